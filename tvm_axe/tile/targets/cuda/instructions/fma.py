"""Matrix products by ordinary multiply-adds: exact float32, float64, and whatever shapes and types `mma` has none of.

Each thread holds a piece of the accumulator and goes along k, reading a column of `a` and a row of `b` from shared
memory; a left operand in registers is left there first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe.layout import Iter, Layout
from tvm_axe.tile.nodes import Copy, Gemm
from tvm_axe.tile.regions import Region
from tvm_axe.tile.targets.cuda.fragments.copies import copy, row_major
from tvm_axe.tile.targets.cuda.fragments.emitter import Emitter, Registers
from tvm_axe.tile.targets.cuda.fragments.layout import REGISTER, THREAD

_COLUMNS = 16
_WIDTH = 4


def obstacle(gemm: Gemm) -> str | None:
    """Why multiply-adds can't do a gemm; None if they can."""
    a, b, c = (region.tile.dtype for region in (gemm.a, gemm.b, gemm.c))
    bits = [tvm_ffi.dtype(dtype).bits for dtype in (a, b, c)]
    floats = [dtype.startswith(("float", "bfloat")) for dtype in (a, b, c)]
    if len(set(floats)) > 1 or bits[2] < max(32, *bits[:2]):
        return (
            f"operands are {a} and {b}, the accumulator {c}; valid is an accumulator of 32 bits or more, of their kind"
        )
    return None


def threads_along_rows(columns: Iterable[int], threads: int) -> int:
    """How many threads go along a row of accumulators with so many columns: alike for all that one program has.

    >>> threads_along_rows([64, 32], 128)
    8
    """
    return math.gcd(*(n // math.gcd(n, _WIDTH) for n in columns), min(_COLUMNS, threads))


def accumulator(m: int, n: int, across: int, threads: int) -> Layout:
    """The layout of an m x n accumulator: pieces of 4 columns a thread, `across` threads along a row.

    >>> print(accumulator(16, 64, 16, 256))
    S[(256, 4) : (1@tx, 1)]
    """
    width = math.gcd(n, _WIDTH)
    down = math.gcd(m, threads // across)
    pieces = n // width // across
    rows = [Iter(m // down, pieces * width, REGISTER), Iter(down, across, THREAD)]
    columns = [Iter(pieces, width, REGISTER), Iter(across, 1, THREAD), Iter(width, 1, REGISTER)]
    return Layout([*rows, *columns], [Iter(threads // (across * down), across * down, THREAD)]).canonicalize()


def emit(emitter: Emitter, gemm: Gemm) -> None:
    """Emit ``c (+)= a @ b``; `c` is any fragment."""
    if isinstance(emitter.storages[gemm.a.tile], Registers):
        emitter, gemm = _left_in_memory(emitter, gemm)
    held = emitter.registers(gemm.c.tile)
    fragment, acc, depth = held.fragment, held.buffer, gemm.shape[2]
    start = fragment.start(emitter.threads.index)
    by_dimension = [[d for d in fragment.register_digits if d.dimension == axis] for axis in (0, 1)]
    counts = [math.prod(digit.extent for digit in digits) for digits in by_dimension]
    if not gemm.accumulate:
        with T.unroll(fragment.registers) as register:
            T.buffer_store(acc, tirx.const(0, acc.dtype), [register])
    sides = [T.alloc_buffer((count,), str(acc.dtype), scope="local") for count in counts]
    operands = [(gemm.a, gemm.transpose_a), (gemm.b, not gemm.transpose_b)]
    with T.serial(0, depth) as k:
        for axis, (region, depth_first) in enumerate(operands):
            with T.unroll(counts[axis]) as c:
                at = start[axis] + _offset(by_dimension[axis], c, "weight")
                place = [k, at] if depth_first else [at, k]
                T.buffer_store(sides[axis], T.cast(_element(emitter, region, place), acc.dtype), [c])
        with T.unroll(counts[0]) as i, T.unroll(counts[1]) as j:
            register = _offset(by_dimension[0], i, "stride") + _offset(by_dimension[1], j, "stride")
            T.buffer_store(acc, acc[register] + sides[0][i] * sides[1][j], [register])


def _offset(digits: list[Any], count: Any, what: str) -> Any:
    """What the `count`-th of the points over `digits` adds to the element's index or the register."""
    found: Any = tirx.const(0, "int32")
    below = 1
    for digit in reversed(digits):
        found = found + count // below % digit.extent * getattr(digit, what)
        below *= digit.extent
    return found


def _element(emitter: Emitter, region: Region, place: list[Any]) -> Any:
    stored = emitter.memory(region.tile)
    index = [emitter.expression(start) for start in region.start]
    index = [*index[:-2], index[-2] + place[0], index[-1] + place[1]]
    return stored.buffer[tuple(stored.address(index, region.tile.shape))]


def _left_in_memory(emitter: Emitter, gemm: Gemm) -> tuple[Emitter, Gemm]:
    emitter, left = row_major(emitter, gemm.a)
    emitter.threads.sync()
    copy(emitter, Copy(left, gemm.a, None))
    emitter.threads.sync()
    return emitter, Gemm(gemm.c, left, gemm.b, gemm.transpose_a, gemm.transpose_b, gemm.accumulate, gemm.instruction)
