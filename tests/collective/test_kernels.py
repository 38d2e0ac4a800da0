"""Compiled collectives against the ones with numpy, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from tvm_axe import _tvm
from tvm_axe.collective import kernels, ops
from tvm_axe.collective.plan import VIEWS, plan
from tvm_axe.machines import resolve_target

PAGE = 4096
PARTS = 3

# Name, slab shapes of the source and of the target, other arguments: runs that are long, short, strided; uneven ends.
CASES = {
    "all_reduce": ("all_reduce", (7, 33), (7, 33), ()),
    "reduce_scatter rows": ("reduce_scatter", (7, 33), (3, 33), (0,)),
    "reduce_scatter columns": ("reduce_scatter", (5, 300), (5, 100), (1,)),
    "all_gather rows": ("all_gather", (3, 33), (7, 33), (0,)),
    "all_gather middle": ("all_gather", (5, 100, 2), (5, 298, 2), (1,)),
    "all_gather lines": ("all_gather", (3, 64, 64), (3, 192, 64), (1,)),
    "all_to_all": ("all_to_all", (2, 7, 40), (6, 3, 40), (0, 1)),
    "all_to_all back": ("all_to_all", (70, 4, 3), (24, 10, 3), (1, 0)),
    "send": ("send", (9, 21), (9, 21), (1,)),
    "reduce": ("reduce", (9, 21), (9, 21), (1,)),
    "broadcast": ("broadcast", (9, 210), (9, 210), (2,)),
    "scalar": ("send", (), (), (1,)),
}
DTYPES = ["float32", "float16", "int8", "float64", "bool", "uint64", "int32"]
TARGETS = {"any": tvm.target.Target("llvm"), "host": resolve_target("llvm", threads=1)}


def allocate(slabs: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Slabs that start at pages, as in a mesh tensor."""
    itemsize = np.dtype(dtype).itemsize
    stride = -(-int(np.prod(shape)) * itemsize // PAGE) * PAGE
    room = np.zeros(slabs * stride + PAGE, "uint8")
    return np.ndarray(
        (slabs, *shape),
        dtype,
        buffer=room,
        offset=-room.ctypes.data % PAGE,
        strides=(stride, *np.empty(shape, dtype).strides),
    )


def random(rng: np.random.Generator, like: np.ndarray) -> np.ndarray:
    scale = 1000 if like.dtype.kind in "iu" else 1
    with np.errstate(invalid="ignore"):  # negative to unsigned
        return (scale * rng.standard_normal(like.shape)).astype(like.dtype)


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view("uint8")


def check(name: str, source: np.ndarray, target: np.ndarray, numbers: tuple[int, ...], target_cpu: str) -> None:
    """Run all ranks' kernels and all ranks' numpy on groups of slabs, and compare every bit of the targets."""
    expected = allocate(len(target), target.shape[1:], target.dtype.name)
    expected[...] = target
    source_for_numpy = expected if source is target else source
    functions, calls = {}, []
    for rank in range(PARTS):
        views = VIEWS[name]
        pairs = [
            [group if is_view else group[rank, ...] for group, is_view in zip(groups, views)]
            for groups in ((source, target), (source_for_numpy, expected))
        ]
        moves = plan(name, source.shape[1:], target.shape[1:], numbers, PARTS, rank)
        if moves:
            functions[f"rank{rank}"] = kernels.kernel(
                moves, pairs[0][0].shape, pairs[0][1].shape, views, target.dtype.name
            ).with_attr("global_symbol", f"rank{rank}")
            calls.append((f"rank{rank}", pairs[0]))
        ops.collective(name, *pairs[1], *numbers, rank=rank)
    compiled = tvm.compile(tvm.IRModule(functions), target=TARGETS[target_cpu]).jit()
    for function, arrays in calls:
        compiled[function](*map(_tvm.as_tensor, arrays))
    np.testing.assert_array_equal(bits(target), bits(expected))


# Sums depend on the type, copies and the way of storing on its size alone.
SUMS = [(case, dtype, False) for case in ("all_reduce", "reduce_scatter columns") for dtype in DTYPES]
COPIES = [(case, dtype, streams) for case in CASES for dtype, streams in (("bfloat16", False), ("float32", True))]


@pytest.mark.parametrize(("case", "dtype", "streams"), SUMS + COPIES)
def test_bits_are_those_of_numpy(case: str, dtype: str, streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "STREAM", 0 if streams else 1 << 60)
    name, source_shape, target_shape, numbers = CASES[case]
    rng = np.random.default_rng(len(case))
    source, target = (allocate(PARTS, shape, dtype) for shape in (source_shape, target_shape))
    source[...], target[...] = random(rng, source), random(rng, target)
    check(name, source, target, numbers, "host" if streams else "any")


@pytest.mark.parametrize("cpu", TARGETS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_small_float_is_added_as_numpy_does(dtype: str, cpu: str) -> None:
    """All pairs of a sample of the bit patterns, subnormal, infinite and not numbers among them."""
    patterns = np.arange(0, 1 << 16, 37, dtype="uint16")
    source = allocate(PARTS, (len(patterns), 64), dtype)
    rng = np.random.default_rng(0)
    source[0] = patterns[:, None].view(dtype)
    source[1] = rng.choice(patterns, source.shape[1:]).view(dtype)
    source[2] = np.zeros(1, dtype)
    target = allocate(PARTS, source.shape[1:], dtype)
    with np.errstate(all="ignore"):
        total = source.astype("float32").sum(axis=0).astype(dtype)
    numbers = ~np.isnan(total.astype("float32"))
    moves = plan("reduce", source.shape[1:], target.shape[1:], (0,), PARTS, 0)
    function = kernels.kernel(moves, source.shape, target.shape[1:], (True, False), dtype)
    compiled = tvm.compile(tvm.IRModule({"collective": function}), target=TARGETS[cpu]).jit()
    compiled["collective"](_tvm.as_tensor(source), _tvm.as_tensor(target[0]))
    np.testing.assert_array_equal(target[0][numbers].view("uint16"), total[numbers].view("uint16"))
    assert np.isnan(target[0][~numbers].astype("float32")).all() and (~numbers).any()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint64"])
def test_whole_numbers_wrap_around(dtype: str) -> None:
    source = allocate(PARTS, (100,), dtype)
    source[...] = np.iinfo(dtype).max
    check("all_reduce", source, allocate(PARTS, (100,), dtype), (), "host")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("name", "numbers"), [("all_reduce", ()), ("all_gather_in_place", (0,)), ("reduce", (1,)), ("broadcast", (2,))]
)
def test_in_place(name: str, numbers: tuple[int, ...], streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "STREAM", 0 if streams else 1 << 60)
    both = allocate(PARTS, (1013,), "float32")
    both[...] = random(np.random.default_rng(0), both)
    check(name, both, both, numbers, "host")


def test_floats_of_one_byte_are_copied_only() -> None:
    assert not kernels.can_sum("float8_e4m3fn") and not kernels.can_sum("float8_e5m2")
    source, target = (allocate(PARTS, (7, 3), "float8_e4m3fn") for _ in range(2))
    source[...] = random(np.random.default_rng(0), source)
    check("broadcast", source, target, (1,), "host")


def test_large_calls_stream_their_stores_and_small_ones_do_not() -> None:
    for size, streams in ((1 << 20, False), (1 << 24, True)):
        moves = plan("all_gather", (size // 2,), (size,), (0,), 2, 0)
        function = kernels.kernel(moves, (size // 2,), (2, size), (False, True), "float32")
        source = tvm.compile(tvm.IRModule({"collective": function}), target="llvm").mod.inspect_source("asm")
        assert ("movnt" in source) == streams
        assert ("sfence" in source) == streams
