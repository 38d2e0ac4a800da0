"""The choice of forms: its work doesn't grow with the layers, and packed parts are shared alike."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from shared_models import decoder, encoder
from tvm.relax.frontend import nn

from tvm_axe.collective.engine import HOST
from tvm_axe.layout import Mesh
from tvm_axe.layout.shares import Share
from tvm_axe.relax import choosing, share_model
from tvm_axe.relax.forms import WHOLE, Form
from tvm_axe.relax.operators import Operators
from tvm_axe.relax.reading import graph_of, legalized


class Layer(nn.Module):
    def __init__(self) -> None:
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: nn.Tensor, mask: nn.Tensor) -> nn.Tensor:
        return self.down(nn.op.relu(self.up(x * mask))) + x


class Model(nn.Module):
    """Layers that all read a value that is computed once, and of which each leaves a result, as a cache is."""

    def __init__(self, layers: int) -> None:
        self.layers = nn.ModuleList([Layer() for _ in range(layers)])

    def forward(self, x: nn.Tensor, mask: nn.Tensor) -> list[nn.Tensor]:
        mask, results = nn.op.exp(nn.op.exp(mask)), []
        for layer in self.layers:
            x = layer(x, mask)
            results.append(nn.op.exp(x))
        return results


def exported(layers: int) -> Any:
    spec = {"x": nn.spec.Tensor([16, 32], "float32"), "mask": nn.spec.Tensor([16, 32], "float32")}
    return Model(layers).export_tvm({"forward": spec})[0]


def test_equal_layers_are_solved_once_beside_what_all_of_them_read(solved_calls: list[int]) -> None:
    calls = []
    for layers in (24, 48):
        solved_calls.clear()
        share_model(exported(layers), Mesh({"tp": 2}))
        calls.append(sum(solved_calls))
    assert calls[1] < 1.3 * calls[0]


@pytest.mark.parametrize("most", [16, 1000])
def test_states_that_a_cheaper_one_reaches_by_moves_are_dropped(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after another, as it is said; they are looked at together."""
    monkeypatch.setattr(choosing, "TOGETHER", 5)
    graph = graph_of(legalized(exported(1)), "forward")
    search = choosing._Search(graph, Operators(2, HOST), {})
    values = [number for number, value in enumerate(graph.values) if value.kind == "value"][:2]
    forms = [WHOLE, Form(partial="sum"), Form(0, Share.blocks(16, 2)), Form(1, Share.blocks(32, 2))]
    ways = [frozenset(each) for n in (1, 2) for each in itertools.combinations(forms, n)]
    rng = random.Random(0)
    numbered = {search.moving.number(each): each for each in ways}
    states = {state: (rng.random() * 2e-6,) for state in itertools.product(numbered, numbered)}

    def reaches(value: int, one: int, other: int) -> float:
        have, want = numbered[one], numbered[other]
        made = ([search.moving.between(value, each, form) for each in have] for form in want - have)
        return sum(min((how.seconds for how in each if how is not None), default=float("inf")) for each in made)

    kept: list[Any] = []
    for state in sorted(states, key=lambda each: states[each]):
        moves = ([*map(reaches, values, other, state)] for other in kept)
        if all(states[other][0] + move[0] + move[1] > states[state][0] for other, move in zip(kept, moves)):
            kept.append(state)
    assert 16 < len(kept) < len(states)
    assert [*search._pruned(states, values, most)] == kept[:most]


def test_parts_that_are_packed_are_shared_alike() -> None:
    """Three heads of queries, keys and values, packed, on two devices: a half of each head's columns."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            self.qkv = nn.Linear(48, 3 * 48, bias=False)

        def forward(self, x: nn.Tensor) -> tuple[nn.Tensor, ...]:
            q, k, v = nn.op.split(self.qkv(x), 3, axis=-1)
            q, k, v = (nn.op.reshape(each, [16, 3, 16]) for each in (q, k, v))
            return q, k, v

    model, _ = Packed().export_tvm({"forward": {"x": nn.spec.Tensor([16, 48], "float32")}})
    graph = graph_of(legalized(model), "forward")
    (node,) = (each for each in graph.nodes if len(each.outs) == 3)
    assert node.func is not None
    halves = Form(1, Share.blocks(16, 2).around(3, 1))
    ways = Operators(2, HOST).of(node).strategies(frozenset({(1, halves)}))
    assert [way.outs for way in ways if str(way.ins[0]) == "S1[9(8@0 8@1)]"] == [(halves,) * 3]


def test_what_is_shared_stays_shared_where_bytes_are_dear() -> None:
    """That every device computes all of a product moves nothing."""
    graph = graph_of(legalized(encoder(1, 256, 4, 1024, 64)), "forward")
    search = choosing._Search(graph, Operators(2, HOST), {})
    fastest = search.solved(1e-10, 0.0)
    assert search.solved(1e-10, 1e-5).chosen.divided < fastest.chosen.divided == 1
    search.keep_shared(fastest)
    assert search.solved(1e-10, 1e-5).chosen.divided == 1


@pytest.mark.parametrize("devices", [2, 3])
def test_where_devices_meet_behind_products_is_megatrons_closed_form(devices: int) -> None:
    """Two all-reduces a layer; what the first takes is an embedding, or comes in and is whole."""
    for model, embedded in ((encoder(2, 256, 4, 1024, 64), 0), (decoder(2, 256, 8, 4, 768, 64), 1)):
        graph = graph_of(legalized(model), "forward")
        unit = (devices - 1) / devices * 64 * 256 * 4
        met = choosing._Search(graph, Operators(devices, HOST), {}).met()
        assert met == pytest.approx(unit * (4 * 2 + embedded))
