"""Experts of ragged ranges: the tables, and whatever a routing asks for, run on workers and compared with float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import tvm_axe as axe
from tvm_axe.collective import Workers
from tvm_axe.errors import TileError
from tvm_axe.layout import Mesh
from tvm_axe.machines import nvcc, resolve_target
from tvm_axe.machines.builder import build_program
from tvm_axe.machines.cubins import Resources, resources
from tvm_axe.programs import PROGRAMS, ranges
from tvm_axe.programs.moe_ragged import Extents, moe_ragged

DEVICES, TOKENS, EXPERTS, CHOICES = 3, 5, 2, 2  # the program's, of its uneven size
ROWS = DEVICES * TOKENS * CHOICES


def routing(kind: str, rng: np.random.Generator) -> np.ndarray:
    """The experts that each token chose."""
    experts = DEVICES * EXPERTS
    chosen = np.argsort(rng.random((DEVICES, TOKENS, experts)), axis=2)[..., :CHOICES]
    if kind == "all to one":
        chosen[..., 0], chosen[..., 1] = 3, 2
    elif kind == "one expert alone":
        chosen[...] = 5  # twice, which counts twice
    elif kind == "empty experts":
        chosen = np.where(chosen % 2 == 1, chosen - 1, chosen)
    elif kind == "at home":
        chosen = chosen % EXPERTS + EXPERTS * np.arange(DEVICES)[:, None, None]
    return chosen.astype("int32")


KINDS = ("random", "all to one", "one expert alone", "empty experts", "at home")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [ROWS, 4])
def test_tables_agree(kind: str, rows: int) -> None:
    expert = routing(kind, np.random.default_rng())
    found = ranges(expert, EXPERTS, rows)
    used = 0
    for place in np.ndindex(*expert.shape):
        d = expert[place] // EXPERTS
        if found.owner[place] < 0:
            assert rows < ROWS and (found.device[d] >= 0).all()  # none was left
            continue
        row = found.row[place]
        used += 1
        assert found.owner[place] == d and found.local[d, row] == expert[place] % EXPERTS
        assert (found.device[d, row], found.token[d, row]) == place[:2]
    assert used == (found.device >= 0).sum() == (expert.size if rows == ROWS else used)
    for d in range(DEVICES):
        inside = found.device[d] >= 0
        assert (np.diff(inside.astype(int)) <= 0).all()  # the list has no holes
        assert (np.diff(found.local[d, inside]) >= 0).all()  # an expert's rows are one range


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with axe.launch(Mesh({"ep": DEVICES}), engine="threads") as started:
        yield started


@pytest.fixture(scope="module", params=["AG-MM-AG", "A2A-MM-A2A", "A2A-fuse(MM-C)-MM-A2A"])
def exe(request: pytest.FixtureRequest) -> axe.Executable:
    program = PROGRAMS["moe_ragged"](Mesh({"ep": DEVICES}), "uneven")
    return axe.compile(program.schedule(request.param), work_dir=None)


@pytest.mark.parametrize("kind", KINDS)
def test_any_routing(workers: Workers, exe: axe.Executable, kind: str) -> None:
    """Beside a loop over tokens and their experts, which knows of no table; nobody's rows hold NaN on the way."""
    program, rng = PROGRAMS["moe_ragged"](Mesh({"ep": DEVICES}), "uneven"), np.random.default_rng()
    for _ in range(3):
        x, w1, w2, gate, *_ = program.inputs(rng)
        expert = routing(kind, rng)
        arrays = (x, w1, w2, gate, *ranges(expert, EXPERTS, ROWS))
        exe.fill(workers, lambda buffer: np.nan if "float" in buffer.dtype else None)
        found = exe.run(workers, *arrays)
        expected = np.zeros(x.shape)
        for s, t, k in np.ndindex(*expert.shape):
            d, e = divmod(int(expert[s, t, k]), EXPERTS)
            inner = np.maximum(x[s, t].astype("f8") @ w1[d, e], 0)
            expected[s, t] += gate[s, t, k] * (inner @ w2[d, e])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(program.reference(*arrays)[0], expected, atol=1e-6)


def test_experts_spill_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The relu between the products, of a tile of 128 x 256 in 16 bits, keeps NaN and all sums in registers."""
    try:
        nvcc.find_compiler()
    except TileError as error:
        pytest.skip(str(error))
    found: dict[str, Resources] = {}
    compiled = nvcc.cubin

    def looked_at(*told: Any) -> bytes:
        cubin = compiled(*told)
        found.update(resources(cubin))
        return cubin

    monkeypatch.setattr("tvm_axe.tile.targets.cuda.backend.nvcc.cubin", looked_at)
    target = resolve_target("cuda:sm_90a")
    schedule = moe_ragged(Mesh({"ep": 2}), Extents(2048, 2048, 768, 64, 8), "bfloat16").schedule(
        "A2A-fuse(MM-C)-MM-A2A"
    )
    build_program(axe.compile(schedule, target=target, work_dir=None).runnable, target)
    products = {name: each.local_bytes for name, each in found.items() if each.registers > 100}
    assert products and not any(products.values()), products
