"""The collectives compiled: a TensorIR function that does one worker's part, for one shape and type.

Each peer's slab is read once and each target written once, with vectors and nothing in between. Of each element all
terms are read before the sum is written, so a target may be a source. Results are, bit for bit, those of
`tvm_axe.collective.ops`: the sum of a float type of less than four bytes is in float32 and rounded once.

A processor that writes to a line of memory reads it first, unless it is told that the line will be overwritten whole
and isn't needed soon: a streaming (non-temporal) store. Two processes that gather 64 MiB take 2.3 ms with streaming
stores and 4.0 to 4.5 ms without; at 4 MiB, of which the cache holds what is read next, they gain nothing. libc's memcpy
streams too, but only from a size on that it derives from the processor's caches, here 288 MiB. To LLVM it is an
annotation of a store, which TensorIR can't express, so the store comes in as a function in LLVM's language.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import add, mul, or_

from tvm.ir import PointerType, PrimType
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.tirx import Buffer, Expr, PrimFunc, Var

from tvm_axe.collective.plan import Corner, Move
from tvm_axe.collective.tensor import check_dtype
from tvm_axe.layout.shapes import dense_strides

LINE = 64  # bytes; of a cache line and of a vector
STREAM = 16 << 20  # bytes; a call that reads and writes as many or more in all streams its stores
STREAM_LINE = """
define linkonce_odr void @axe_stream_line(ptr %to, <64 x i8> %line) alwaysinline {
  store <64 x i8> %line, ptr %to, align 64, !nontemporal !0
  ret void
}
!0 = !{i32 1}
"""


def can_sum(dtype: str) -> bool:
    """Whether there are kernels that add elements of this type: all whole numbers, and floats of two bytes or more."""
    return check_dtype(dtype).kind in "biu" or dtype in ("float16", "bfloat16", "float32", "float64")


def kernel(
    moves: Sequence[Move], source: Sequence[int], target: Sequence[int], views: tuple[bool, bool], dtype: str
) -> PrimFunc:
    """Build the function (source, target) -> None that does `moves`.

    Parameters
    ----------
    moves : sequence of Move
        What `plan` returns.
    source, target : sequence of int
        The arguments' shapes.
    views : (bool, bool)
        Whether each is a view along the axis, whose dimension 0 may have any stride.
    dtype : str
        Of both; one that `can_sum` takes if there is something to add.
    """
    nbytes = check_dtype(dtype).itemsize
    word = f"uint{8 * nbytes}"  # what is only copied has no type
    if any(len(move.source.slabs) > 1 for move in moves):
        word = {"bfloat16": "uint16", "bool": "uint8"}.get(dtype, dtype)
    touched = sum(math.prod(move.box) * len(move.source.slabs + move.target.slabs) for move in moves)
    stream = touched * nbytes >= STREAM
    with IRBuilder() as builder, T.prim_func(s_tir=True), ExitStack() as scope:
        T.func_name("collective")
        arguments = [
            _argument(name, shape, is_view, dtype)
            for name, shape, is_view in zip(("source", "target"), (source, target), views)
        ]
        sources, targets = (_slabs(argument, word) for argument in arguments)
        if stream:
            scope.enter_context(T.attr(0, "pragma_import_llvm", STREAM_LINE))
        for move in moves:
            _move(move, sources, targets, dtype, nbytes, stream)
        if stream:  # they aren't ordered with other stores, and who sees this worker arrive shall see them
            T.evaluate(T.call_llvm_intrin("void", "llvm.x86.sse.sfence"))
    return builder.get()


@dataclass(frozen=True)
class _Slabs:
    """An argument as a flat buffer, in which element i of slab k is at k * stride + i; an own slab is slab 0."""

    flat: Buffer
    stride: Expr


def _argument(name: str, shape: Sequence[int], is_view: bool, dtype: str) -> Buffer:
    strides: list[Expr] = [T.int64(step) for step in dense_strides(shape)]
    if is_view:
        strides[0] = T.int64()
    extents = [T.int64(extent) for extent in shape]
    return T.match_buffer(T.arg(name, T.handle()), extents, dtype, strides=strides or None)


def _slabs(argument: Buffer, word: str) -> _Slabs:
    data = argument.data
    if word != argument.dtype:
        data = T.Bind(T.reinterpret(PointerType(PrimType(word), "global"), data))
    size = functools.reduce(mul, argument.shape, T.int64(1))
    return _Slabs(T.decl_buffer((size,), word, data=data), argument.strides[0] if argument.strides else T.int64(0))


def _move(move: Move, sources: _Slabs, targets: _Slabs, dtype: str, nbytes: int, stream: bool) -> None:
    """Emit loops over the contiguous runs of the box, and in each over its vectors."""
    lanes = LINE // nbytes
    outer = move.outer
    run = math.prod(move.box[outer:])
    with ExitStack() as nest:
        indices = [nest.enter_context(T.serial(T.int64(extent))) for extent in move.box[:outer]]
        read, write = (_position(corner, indices) for corner in (move.source, move.target))
        start, steps = move.target.start, dense_strides(move.target.shape)[:outer]
        stream = stream and all(step % lanes == 0 for step in steps)  # else runs start anywhere in a line
        head = min(-start % lanes, run) if stream else 0
        tail = (run - head) % lanes
        for first, last, width in ((0, head, 1), (head, run - tail, lanes), (run - tail, run, 1)):
            if first == last:
                continue
            with T.serial(T.int64((last - first) // width)) as i:
                at = i * width + first
                terms = [_load(sources.flat, slab * sources.stride + read + at, width) for slab in move.source.slabs]
                total = T.Bind(_sum(terms, dtype, width))
                for slab in move.target.slabs:
                    index = slab * targets.stride + write + at
                    if stream and width == lanes:
                        line = T.reinterpret("int8x64", total)
                        T.evaluate(T.call_extern("void", "axe_stream_line", T.address_of(targets.flat[index]), line))
                    else:
                        T.buffer_store(targets.flat, total, [_vector(index, width)])


def _position(corner: Corner, indices: Sequence[Var]) -> Expr:
    """Return the element of a slab where the run at `indices` of the outer dimensions starts."""
    return functools.reduce(add, map(mul, indices, dense_strides(corner.shape)), T.int64(corner.start))


def _vector(index: Expr, width: int) -> Expr:
    return index if width == 1 else T.Ramp(index, 1, width)


def _load(flat: Buffer, index: Expr, width: int) -> Expr:
    return flat[_vector(index, width)]


def _sum(terms: Sequence[Expr], dtype: str, width: int) -> Expr:
    """Add terms of so many elements, as they are held in memory, in their order."""
    if len(terms) == 1:
        return terms[0]
    if dtype == "bool":
        return functools.reduce(or_, terms)
    if dtype == "float16":
        wide = [T.Cast(_lanes("float32", width), term) for term in terms]
        return T.Cast(_lanes("float16", width), functools.reduce(add, wide))
    if dtype == "bfloat16":
        return _to_bfloat16(functools.reduce(add, [_from_bfloat16(term, width) for term in terms]), width)
    return functools.reduce(add, terms)


# The upper half of a float32 is a bfloat16. The compiler's own conversions lose NaNs on some processors, and
# subnormal numbers on others.
def _from_bfloat16(term: Expr, width: int) -> Expr:
    return T.reinterpret(_lanes("float32", width), T.Cast(_lanes("uint32", width), term) << _constant(16, width))


def _to_bfloat16(total: Expr, width: int) -> Expr:
    """Round to the nearest, ties to even; a NaN keeps its sign and becomes quiet."""
    bits = T.reinterpret(_lanes("uint32", width), total)
    odd = (bits >> _constant(16, width)) & _constant(1, width)
    rounded = (bits + odd + _constant(0x7FFF, width)) >> _constant(16, width)
    quiet = (bits >> _constant(16, width)) | _constant(0x40, width)
    is_nan = (bits & _constant(0x7FFFFFFF, width)) > _constant(0x7F800000, width)
    return T.Cast(_lanes("uint16", width), T.Select(is_nan, quiet, rounded))


def _constant(value: int, width: int) -> Expr:
    return T.uint32(value) if width == 1 else T.Broadcast(T.uint32(value), width)


def _lanes(dtype: str, width: int) -> str:
    return dtype if width == 1 else f"{dtype}x{width}"
