"""Every kernel's programs mean what their references say: interpreted in float64, in no order, with any tiles."""

import itertools

import numpy as np
import pytest
from interpreter import interpret
from tvm import tirx
from tvm.target import Target

from tvm_axe.tile.kernels import KERNELS
from tvm_axe.tile.kernels.attention import attention

TARGETS = [
    Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}),
    Target({"kind": "cuda", "arch": "sm_90a"}),
]
CASES = [(kernel.name, index) for kernel in KERNELS.values() for index in range(len(kernel.cases))]


def error(kernel, problem, target, **parameters) -> float:
    """The relative error of the worst output after poisoned outputs and scratch; NaN where one is left."""
    recipe = kernel.recipe(target, problem, **parameters)
    inputs = kernel.inputs(np.random.default_rng([7, len(str(problem))]), problem)
    assert set(inputs) == set(recipe.inputs)
    held = {}
    for name, (shape, dtype) in recipe.tensors.items():
        whole = "int" in dtype
        held[name] = np.full(shape, -(10**6), "int64") if whole else np.full(shape, np.nan)
        if name in inputs:
            assert (inputs[name].shape, str(inputs[name].dtype)) == (shape, dtype)
            held[name] = inputs[name].astype(held[name].dtype)
    for program, names in zip(recipe.programs, recipe.arguments):
        held.update(zip(names, interpret(program, *(held[name] for name in names))))
    expected = kernel.reference(problem, inputs)
    assert set(expected) == set(recipe.outputs)
    errors = []
    for name, (value, slack) in expected.items():
        with np.errstate(invalid="ignore"):  # infinities that are equal are no difference
            off = np.where(held[name] == value, 0.0, held[name] - value)
        if "int" in recipe.tensors[name][1]:  # of two integers as near either is right
            off = np.where(np.abs(off) <= slack, 0.0, off)
        errors.append(np.linalg.norm(off) / (np.linalg.norm(value[np.isfinite(value)]) or 1))
    return float(np.max(errors))  # NaN stays


@pytest.mark.parametrize("target", TARGETS, ids=["cpu", "sm_90a"])
@pytest.mark.parametrize("name, index", CASES)
def test_programs_compute_the_reference(name, index, target):
    kernel = KERNELS[name]
    # float32's exponentials are constants in the program: log2(e) has 24 bits.
    assert error(kernel, kernel.cases[index], target) < 1e-6


@pytest.mark.parametrize("name", KERNELS)
def test_every_candidate_makes_a_program(name):
    """The second candidate of each parameter, the third, ..., at once."""
    kernel, target = KERNELS[name], TARGETS[1]
    problem = kernel.cases[0]
    space = dict(kernel.parameters(target, problem))
    assert all(len(set(candidates)) == len(candidates) for candidates in space.values())
    space.pop("stages", None)  # a loop of fewer iterations than stages is refused
    for index in range(1, max(map(len, space.values()))):
        chosen = {parameter: candidates[min(index, len(candidates) - 1)] for parameter, candidates in space.items()}
        assert error(kernel, problem, target, **chosen) < 1e-6, chosen


@pytest.mark.parametrize(
    "bias, activation, residual", [*itertools.product([False, True], ["relu", "gelu"], [False, True])]
)
def test_epilogues(bias, activation, residual):
    problem = {"m": 40, "n": 72, "k": 24, "dtype": "float32", "bias": bias, "residual": residual}
    for name in ("matmul", "split_k_matmul", "skinny_matmul"):
        assert error(KERNELS[name], {**problem, "activation": activation}, TARGETS[1]) < 1e-6, name


@pytest.mark.parametrize("workers", [1, 2, 7, 64])
def test_stream_k_shares_the_work_between_any_number_of_blocks(workers):
    problem = {"m": 100, "n": 150, "k": 170, "dtype": "bfloat16"}
    tiles = {"block_m": 64, "block_n": 64, "block_k": 32}
    assert error(KERNELS["stream_k_matmul"], problem, TARGETS[1], workers=workers, **tiles) < 1e-6


@pytest.mark.parametrize("splits", [1, 2, 3, 5, 16])
def test_split_sums_are_whole(splits):
    """Whatever the number of steps that the splits share: none is left out, none is added twice."""
    problem = {"m": 20, "n": 30, "k": 150, "dtype": "float32"}
    tiles = {"block_m": 32, "block_n": 32, "block_k": 32}
    assert error(KERNELS["split_k_matmul"], problem, TARGETS[1], splits=splits, **tiles) < 1e-6
    cache = {"batch": 2, "heads": 4, "kv_heads": 2, "capacity": 300, "dim": 64, "dtype": "float32"}
    assert error(KERNELS["decode_attention"], cache, TARGETS[1], splits=splits, block_n=64) < 1e-6
    packed = {"m": 20, "n": 30, "k": 320, "group": 32, "dtype": "float16", "residual": True}
    tiles = {"block_m": 16, "block_n": 64, "block_k": 64}
    assert error(KERNELS["w4a16_matmul"], packed, TARGETS[1], splits=splits, **tiles) < 1e-6
    for dtype, group in (("int8", 32), ("int8", 320), ("float8_e4m3fn", 160)):
        problem = {**packed, "group": group, "dtype": dtype, "out_dtype": "float32"}
        assert error(KERNELS["w4a8_matmul"], problem, TARGETS[1], splits=splits, **tiles | {"block_k": 32}) < 1e-6


@pytest.mark.parametrize("window, block_m, block_n", [(1, 32, 32), (33, 32, 64), (64, 64, 32), (100, 16, 48)])
def test_keys_behind_a_window_are_not_loaded(window, block_m, block_n):
    """Keys that no query sees any more may be anything, but for those that share a block with some that one sees."""
    kernel = KERNELS["attention"]
    problem = {"batch": 1, "heads": 2, "kv_heads": 1, "queries": 90, "keys": 300, "dim": 16, "dtype": "float32"}
    problem |= {"causal": True, "window": window}
    arrays = kernel.inputs(np.random.default_rng(1), problem)
    expected = kernel.reference(problem, arrays)["O"].value
    first = (300 - 90 + 1 - window) // block_n * block_n
    assert first > 0
    for name in "KV":
        arrays[name][:, :, :first] = np.nan
    (program,) = kernel.recipe(TARGETS[1], problem, block_m=block_m, block_n=block_n).programs
    out = interpret(program, *(arrays[name] for name in "QKV"), np.full(expected.shape, np.nan))[3]
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_pieces_of_a_window_are_whole():
    problem = {"batch": 3, "heads": 4, "kv_heads": 2, "capacity": 320, "dim": 64, "dtype": "float32", "window": 77}
    paged = {**problem, "page": 16, "pages": 30, "sinks": True}
    for splits, own in itertools.product([1, 2, 3, 7], [problem, paged]):
        assert error(KERNELS["decode_attention"], own, TARGETS[1], splits=splits, block_n=32) < 1e-6


def test_parts_of_latents_are_whole():
    """Whatever the tiles of heads, of which the last has fewer, and of keys; each part has the whole scores."""
    problem = {"batch": 3, "heads": 20, "capacity": 100, "dim": 48, "rope": 16, "dtype": "float32"}
    for rows, parts, splits, block_n in ((16, 1, 1, 32), (16, 3, 2, 16), (64, 2, 5, 32)):
        tiles = {"rows": rows, "parts": parts, "splits": splits, "block_n": block_n}
        assert error(KERNELS["mla_decode"], problem, TARGETS[1], **tiles) < 1e-6, tiles


def test_a_window_and_sinks_of_attention_of_open_lengths():
    """The loop's mask is decided at run time there."""
    n = tirx.Var("n", "int64")
    recipe = attention(
        1, 2, 1, n, n, 16, "float32", causal=True, window=20, sinks=True, order="hhhh", block_m=16, block_n=16
    )
    for length in (1, 15, 16, 70):
        problem = {"batch": 1, "heads": 2, "kv_heads": 1, "queries": length, "keys": length, "dim": 16}
        problem |= {"dtype": "float32", "causal": True, "window": 20, "sinks": True}
        arrays = KERNELS["attention"].inputs(np.random.default_rng(length), problem)
        expected = KERNELS["attention"].reference(problem, arrays)["O"].value
        held = [arrays[name] if name in arrays else np.full(expected.shape, np.nan) for name in recipe.tensors]
        out = interpret(recipe.programs[0], *held)[list(recipe.tensors).index("O")]
        np.testing.assert_allclose(out, expected, atol=1e-5)
