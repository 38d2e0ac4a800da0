"""Routing: the tables of a mixture of experts agree with each other, and the reference with a loop over tokens."""

import numpy as np
import pytest

from tvm_axe.layout import Mesh
from tvm_axe.programs import PROGRAMS, route


@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_tables_agree(capacity):
    rng = np.random.default_rng()
    experts, choices = 4, 2
    expert = np.argsort(rng.random((3, 7, experts)), axis=2)[..., :choices].astype("int32")
    index, slot = route(expert, experts, capacity)
    assert index.shape == (3, experts, capacity) and slot.shape == expert.shape
    for device, token, choice in np.ndindex(*expert.shape):
        e, at = expert[device, token, choice], slot[device, token, choice]
        earlier = (expert[device, :token] == e).sum()
        assert at == (earlier if earlier < capacity else -1)
        assert at < 0 or index[device, e, at] == token
    assert (index >= 0).sum() == (slot >= 0).sum()


def test_crowded_expert_drops_the_last_tokens():
    index, slot = route(np.zeros((1, 3, 1), "int32"), experts=2, capacity=2)
    assert index.tolist() == [[[0, 1], [-1, -1]]]
    assert slot.tolist() == [[[0], [1], [-1]]]


def test_reference_is_the_formula():
    program = PROGRAMS["moe"](Mesh({"ep": 2}), "uneven")
    rng = np.random.default_rng()
    # Which tokens are dropped is drawn too: draw until the capacity is tested.
    arrays = next(drawn for drawn in (program.inputs(rng) for _ in range(1000)) if (drawn[-1] < 0).any())
    x, _, w1, w2, gate, expert, slot = (a.astype("float64") if a.dtype.kind == "f" else a for a in arrays)
    expected = np.zeros_like(x)
    for device, token, choice in np.ndindex(*expert.shape):
        if slot[device, token, choice] >= 0:
            e = expert[device, token, choice]
            hidden = np.maximum(x[device, token] @ w1[e], 0)
            expected[device, token] += gate[device, token, choice] * (hidden @ w2[e])
    np.testing.assert_allclose(program.reference(*arrays)[0], expected, atol=1e-12)
