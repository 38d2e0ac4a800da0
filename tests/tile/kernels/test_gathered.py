"""Products whose matrix each row chooses: sorted or not, and rows that choose none."""

from __future__ import annotations

import re
import shutil
from typing import Any

import numpy as np
import pytest
from interpreter import interpret
from tvm.target import Target

from tvm_axe.machines import resolve_target
from tvm_axe.tile import compile_all
from tvm_axe.tile.kernels import KERNELS
from tvm_axe.tile.kernels.check import executed, judged, poison
from tvm_axe.tile.kernels.gathered import _listing
from tvm_axe.tile.kernels.kernel import TOLERANCE
from tvm_axe.tile.reading import read

GATHERED_MATMUL = KERNELS["gathered_matmul"]
LABELS = {
    "sorted": lambda rng, rows, groups: np.sort(rng.integers(0, groups, rows)),
    "in no order": lambda rng, rows, groups: rng.integers(0, groups, rows),
    "each another than the one before": lambda rng, rows, groups: np.arange(rows) % groups,
    "one for all": lambda rng, rows, groups: np.full(rows, groups - 1),
    "none": lambda rng, rows, groups: np.full(rows, -1),
    "none behind the last": lambda rng, rows, groups: np.r_[
        np.sort(rng.integers(0, groups, rows // 2)), [-1] * (rows - rows // 2)
    ],
    "any number": lambda rng, rows, groups: rng.choice([-(2**31), -1, 0, groups - 1, groups, 2**31 - 1], rows),
}
PROBLEMS: tuple[dict[str, Any], ...] = (
    {"rows": 300, "n": 72, "k": 40, "groups": 7, "dtype": "bfloat16"},
    {"rows": 131, "n": 40, "k": 72, "groups": 4, "dtype": "float16", "transpose_b": False},
)
TILES = {"tall": {"block_m": 64, "turned": 0}, "turned": {"block_m": 24, "turned": 1}}


def check(problem: dict[str, Any], labels: str, target: Target, seed: int, **parameters: int) -> None:
    """Run it into poisoned outputs; matrices that nobody chooses, and rows that choose none, are no numbers."""
    rng = np.random.default_rng([19, seed])
    arrays = GATHERED_MATMUL.inputs(rng, problem)
    drawn = LABELS[labels](rng, problem["rows"], problem["groups"]).astype("int32")
    arrays["W"][np.setdiff1d(np.arange(problem["groups"]), drawn)] = np.nan
    arrays["X"][(drawn < 0) | (drawn >= problem["groups"])] = np.nan
    arrays["labels"] = drawn
    recipe = GATHERED_MATMUL.recipe(target, problem, **parameters)
    _, fault = judged(
        executed(recipe, target, arrays), GATHERED_MATMUL.reference(problem, arrays), TOLERANCE[problem["dtype"]]
    )
    assert not fault


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=["by rows", "by columns"])
def test_on_a_cpu(problem: dict[str, Any], labels: str) -> None:
    check(problem, labels, resolve_target("llvm"), 0)


@pytest.mark.gpu
@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("problem", PROBLEMS, ids=["by rows", "by columns"])
def test_on_a_gpu(problem: dict[str, Any], tiles: str, labels: str, cuda: object) -> None:
    for seed in range(3):
        check(problem, labels, resolve_target("cuda"), seed, **TILES[tiles])


def test_on_a_gpu_tiles_that_reach_over_an_end_are_stored_by_pairs() -> None:
    """Whole tiles by TMA, of others as many neighbours as a thread has."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    target, problem = resolve_target("cuda:sm_90a"), {**PROBLEMS[0], "rows": 4096, "n": 512}
    recipe = GATHERED_MATMUL.recipe(target, problem, block_m=128, block_n=128, block_k=64)
    source = compile_all([recipe.programs[-1]], target)[0].source
    stores = [line.strip() for line in source.splitlines() if re.match(r"\s*(\*\(\w+\*\)\()?Y_ptr", line)]
    assert stores and all(line.startswith("*(nv_bfloat162*)(Y_ptr") for line in stores)
    assert "s2g" in source and "Y_tensormap" in source


@pytest.mark.parametrize("rows", [1, 255, 256, 257, 700])
@pytest.mark.parametrize("labels", LABELS)
def test_every_row_is_in_one_tile(labels: str, rows: int) -> None:
    """Of rows of one label, one behind the other; `used` tells how many there are."""
    groups, block_m, rng = 5, 16, np.random.default_rng(rows)
    given = LABELS[labels](rng, rows, groups).astype("int64")
    count, listing = map(read, _listing(rows, groups, block_m))
    chunks = count.params[1].shape
    _, counts = interpret(count, given, poison(chunks, "int64"))
    tables = [poison((extent,), "int64") for extent in (1, rows + 1, rows)]
    _, _, used, row, group = interpret(listing, given, counts, *tables)
    first, stop = row[: used[0]], row[1 : used[0] + 1]
    assert first[0] == 0 and stop[-1] == rows and (stop - first > 0).all() and (stop - first <= block_m).all()
    for begin, end, own in zip(first, stop, group):
        assert len({*given[begin:end]}) == 1
        assert own == (given[begin] if 0 <= given[begin] < groups else -1)
