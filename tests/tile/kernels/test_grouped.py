"""Products of ragged groups: whatever the groups are, and rows that are in none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from interpreter import interpret
from tvm.target import Target

from tvm_axe.errors import TileError
from tvm_axe.machines import resolve_target
from tvm_axe.tile.kernels import KERNELS
from tvm_axe.tile.kernels.check import executed, judged, poison
from tvm_axe.tile.kernels.grouped import _find_tiles
from tvm_axe.tile.kernels.kernel import TOLERANCE
from tvm_axe.tile.reading import read

GROUPED_MATMUL = KERNELS["grouped_matmul"]
ROUTINGS = {
    "one group has all": lambda rows, groups: [0] * (groups // 2 + 1) + [rows] * (groups - groups // 2),
    "the last has all": lambda rows, groups: [0] * groups + [rows],
    "nobody has any": lambda rows, groups: [0] * (groups + 1),
    "one row each": lambda rows, groups: [min(rows, g) for g in range(groups + 1)],
    "some rows are nobody's": lambda rows, groups: [5, *sorted(np.random.default_rng(1).integers(5, rows - 9, groups))],
    "every second is empty": lambda rows, groups: [g // 2 * 2 * rows // groups for g in range(groups)] + [rows],
}
PROBLEMS: tuple[dict[str, Any], ...] = (
    {"rows": 203, "n": 72, "k": 40, "groups": 7, "dtype": "bfloat16"},
    {"rows": 97, "n": 40, "k": 72, "groups": 6, "dtype": "float16", "activation": "silu", "gated": True,
     "weighted": True, "transpose_b": False},
)  # fmt: skip
TILES = {"tall": {"block_m": 64, "turned": 0}, "turned": {"block_m": 24, "turned": 1}}


def drawn(problem: dict[str, Any], routing: str, seed: int) -> dict[str, np.ndarray]:
    """Random data with a routing's groups; what no group has is no number, so that it can't come into a result."""
    arrays = GROUPED_MATMUL.inputs(np.random.default_rng([17, seed]), problem)
    starts = np.asarray(ROUTINGS[routing](problem["rows"], problem["groups"]), "int32")
    assert starts.shape == arrays["starts"].shape and (np.diff(starts) >= 0).all() and starts[-1] <= problem["rows"]
    arrays["X"][: starts[0]] = arrays["X"][starts[-1] :] = np.nan
    arrays["W"][np.flatnonzero(np.diff(starts) == 0)] = np.nan
    return arrays | {"starts": starts}


def check(problem: dict[str, Any], arrays: dict[str, np.ndarray], target: Target, **parameters: int) -> None:
    """Run it into poisoned outputs: rows in groups are right, and the others are as they were."""
    recipe = GROUPED_MATMUL.recipe(target, problem, **parameters)
    found = executed(recipe, target, arrays)["Y"]
    first, last = int(arrays["starts"][0]), int(arrays["starts"][-1])
    assert np.isnan(found[:first].astype("f4")).all() and np.isnan(found[last:].astype("f4")).all()
    if last > first:
        expected = GROUPED_MATMUL.reference(problem, arrays)["Y"]
        _, fault = judged({"Y": found[first:last]}, {"Y": expected}, TOLERANCE[problem["dtype"]])
        assert not fault


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=["plain", "gated"])
def test_on_a_cpu(problem: dict[str, Any], routing: str) -> None:
    check(problem, drawn(problem, routing, 0), resolve_target("llvm"))


@pytest.mark.gpu
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("problem", PROBLEMS, ids=["plain", "gated"])
def test_on_a_gpu(problem: dict[str, Any], tiles: str, routing: str, cuda: object) -> None:
    del cuda
    for seed in range(3):
        check(problem, drawn(problem, routing, seed), resolve_target("cuda"), **TILES[tiles])


@pytest.mark.parametrize("groups", [1, 2, 3, 8, 13, 300])
@pytest.mark.parametrize("block_m", [8, 64])
def test_every_row_is_in_one_tile(groups: int, block_m: int) -> None:
    """Of its own group, and no tile begins with another's; behind the last tile there is none."""
    rows = 700
    for routing in ROUTINGS:
        starts = np.asarray(ROUTINGS[routing](rows, groups), "int64")
        tiles = rows // block_m + min(groups, rows)
        tables = [poison((tiles,), "int64") for _ in range(2)]
        _, group, row = interpret(read(_find_tiles(groups, tiles, block_m)), starts, *tables)
        used = int((group >= 0).sum())
        assert (group[:used] >= 0).all() and (group[used:] == -1).all()
        covered = np.zeros(rows, int)
        for g, first in zip(group[:used], row[:used]):
            assert starts[g] <= first < starts[g + 1]
            covered[first : min(first + block_m, starts[g + 1])] += 1
        expected = np.zeros(rows, int)
        expected[starts[0] : starts[-1]] = 1
        np.testing.assert_array_equal(covered, expected)


def test_tiles_for_few_and_many_rows() -> None:
    """Few rows a group are computed transposed, in tiles that hold most groups; a gate has half the columns."""
    hopper, ampere = (Target({"kind": "cuda", "arch": arch}) for arch in ("sm_90a", "sm_80"))
    problem = {"n": 768, "k": 2048, "groups": 128, "dtype": "bfloat16"}

    def default(target: Target, rows: int, **options: Any) -> tuple[int | str, int | str]:
        space = GROUPED_MATMUL.parameters(target, {**problem, **options, "rows": rows})
        return space["block_m"][0], space["turned"][0]

    assert default(hopper, 512) == (8, 1) and default(hopper, 4096) == (48, 1)
    assert default(hopper, 32768)[1] == 0 and default(ampere, 512)[1] == 0
    wide, half = (
        GROUPED_MATMUL.parameters(hopper, {**problem, "rows": 32768, "gated": gated})["block_n"][0]
        for gated in (False, True)
    )
    assert int(wide) == 2 * int(half)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(TileError, match="grouped_matmul: activation is one of none, relu, silu, gelu, got 'swish'"):
        GROUPED_MATMUL.recipe(resolve_target("llvm"), {**PROBLEMS[0], "activation": "swish"})
