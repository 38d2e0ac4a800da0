"""Matrix products by ``mma.sync``: layouts of its fragments, and its emission with operands from shared memory.

The warps of a block stand in a grid of rows x columns over the accumulator; each multiplies its own rows and columns
by 16 x 8 x k instructions, whose operands come by ``ldmatrix``: pieces of 16 bytes of eight rows each, straight or (of
16-bit elements) transposed. A left operand in registers has the layout that an accumulator of its shape would have; one
of 8-bit elements has four neighbours where an accumulator has two.

Source: PTX ISA, "Matrix multiply-accumulate operation using mma instruction".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_axe.layout import Iter, Layout
from tvm_axe.layout.dtypes import dtype_bits
from tvm_axe.tile.nodes import Gemm
from tvm_axe.tile.regions import Region
from tvm_axe.tile.targets.cuda.fragments.emitter import Emitter, Registers
from tvm_axe.tile.targets.cuda.fragments.layout import REGISTER, THREAD

WARP = 32

_PIECE = 128
"""Bits of a row of the matrices that are loaded together."""


@dataclass(frozen=True)
class Instruction:
    """``mma.sync`` of 16 x 8 x `depth`; `pack` elements of an operand share a 32-bit register."""

    depth: int
    pack: int
    name: str


INSTRUCTIONS = {
    "float16": Instruction(16, 2, "m16n8k16.row.col.f32.f16.f16.f32"),
    "bfloat16": Instruction(16, 2, "m16n8k16.row.col.f32.bf16.bf16.f32"),
    "float32": Instruction(8, 1, "m16n8k8.row.col.f32.tf32.tf32.f32"),
    "int8": Instruction(32, 4, "m16n8k32.row.col.s32.s8.s8.s32"),
    "uint8": Instruction(32, 4, "m16n8k32.row.col.s32.u8.u8.s32"),
    "float8_e4m3fn": Instruction(32, 4, "m16n8k32.row.col.f32.e4m3.e4m3.f32"),
    "float8_e5m2": Instruction(32, 4, "m16n8k32.row.col.f32.e5m2.e5m2.f32"),
}
"""By the operands' type; float32 operands are rounded to tf32. What computes with 8-bit floats multiplies them, too."""


@dataclass(frozen=True)
class Warps:
    """A block's warps over an accumulator: `rows` x `columns` of them, `copies` times over."""

    rows: int
    columns: int
    copies: int


def obstacle(gemm: Gemm) -> str | None:
    """Why ``mma`` can't do a gemm; None if it can."""
    m, n, k = gemm.shape
    a, b, c = (region.tile for region in (gemm.a, gemm.b, gemm.c))
    if a.dtype != b.dtype or a.dtype not in INSTRUCTIONS:
        return f"operands are {a.dtype} and {b.dtype}; valid are two of one type of {', '.join(INSTRUCTIONS)}"
    result = "int32" if a.dtype.endswith("int8") else "float32"
    if c.dtype != result:
        return f"the accumulator is {c.dtype}; valid is {result}"
    instruction = INSTRUCTIONS[a.dtype]
    if m % 16 or n % 8 or k % instruction.depth:
        return f"{m} x {n} x {k} is no multiple of 16 x 8 x {instruction.depth}"
    if instruction.pack != 2 and ((gemm.transpose_a and a.scope == "shared") or not gemm.transpose_b):
        return f"{a.dtype} operands must lie with k as their last dimension: a (M, K) and b (N, K) with transpose_b"
    if gemm.transpose_a and a.scope != "shared":
        return "a left operand in a fragment can't be transposed"
    if a.scope != "shared" and instruction.pack == 1:
        return f"a left operand in a fragment has elements of 16 or 8 bits, got {a.dtype}"
    return misplaced(gemm)


def misplaced(gemm: Gemm) -> str | None:
    """Why the places of an operand's rows in shared memory aren't those of what is loaded together; None if they are.

    Source: PTX ISA, "Warp-level matrix load instruction: ldmatrix", whose rows are aligned to 16 bytes.
    """
    for region in (gemm.a, gemm.b):
        piece = _PIECE // dtype_bits(region.tile.dtype)
        if region.tile.scope == "shared" and not (region.begins_at(-1, piece) and region.tile.shape[-1] % piece == 0):
            return f"rows of {region} begin at no multiples of {_PIECE // 8} bytes, which are loaded together"
    return None


def arrange(m: int, n: int, threads: int, rows_only: bool) -> Warps:
    """How warps stand over an m x n accumulator: each with a piece as square as can be, or all along its rows."""
    warps = threads // WARP
    options = [
        (rows, columns)
        for rows in range(1, warps + 1)
        for columns in range(1, warps // rows + 1)
        if m % (16 * rows) == 0 and n % (8 * columns) == 0 and warps % (rows * columns) == 0
    ]
    most = max(rows * columns for rows, columns in options)
    full = [option for option in options if math.prod(option) == most]
    if rows_only:
        rows, columns = max(options, key=lambda option: (option[1] == 1, option[0]))
    else:
        rows, columns = min(full, key=lambda option: m // option[0] + n // option[1])
    return Warps(rows, columns, warps // (rows * columns))


def accumulator(m: int, n: int, warps: Warps, pack: int = 2) -> Layout:
    """The layout of an m x n accumulator, of which a thread has `pack` neighbours of a row together.

    >>> print(accumulator(32, 16, Warps(2, 1, 1)))
    S[(2, 2, 8, 2, 4, 2) : (32@tx, 2, 4@tx, 4, 1@tx, 1)]
    """
    below = n // warps.columns // (4 * pack)
    rows = [
        Iter(warps.rows, warps.columns * WARP, THREAD),
        Iter(m // warps.rows // 16, below * 2 * pack, REGISTER),
        Iter(2, pack, REGISTER),
        Iter(8, 4, THREAD),
    ]
    columns = [
        Iter(warps.columns, WARP, THREAD),
        Iter(below, 2 * pack, REGISTER),
        Iter(4, 1, THREAD),
        Iter(pack, 1, REGISTER),
    ]
    copies = Iter(warps.copies, warps.rows * warps.columns * WARP, THREAD)
    return Layout([*rows, *columns], [copies]).canonicalize()


def left_operand(m: int, k: int, warps: Warps, dtype: str) -> Layout:
    """The layout of an m x k left operand in registers: what each row of warps needs, in every one of them."""
    held = accumulator(m, k, Warps(warps.rows, 1, 1), INSTRUCTIONS[dtype].pack).group((m, k))[0]
    spread = [
        Iter(it.extent, it.stride * warps.columns, THREAD) if it.axis == THREAD and it.stride >= WARP else it
        for it in held.D
    ]
    copies = [Iter(warps.columns, WARP, THREAD), Iter(warps.copies, warps.rows * warps.columns * WARP, THREAD)]
    return Layout(spread, copies).canonicalize()


def emit(emitter: Emitter, gemm: Gemm, warps: Warps) -> None:
    """Emit ``c (+)= a @ b``; `c` has the layout of `accumulator`, and `a`, if in registers, that of `left_operand`."""
    _Product(emitter, gemm, warps).emit()


class _Product:
    """The code of one product: where a thread stands, and the operands' registers."""

    def __init__(self, emitter: Emitter, gemm: Gemm, warps: Warps) -> None:
        self.emitter, self.gemm, self.warps = emitter, gemm, warps
        self.instruction = INSTRUCTIONS[gemm.a.tile.dtype]
        m, n, self.depth = gemm.shape
        self.rows, self.columns = m // warps.rows, n // warps.columns  # of one warp
        thread = emitter.threads.index
        self.lane, warp = thread % WARP, thread // WARP
        self.row = warp // warps.columns % warps.rows * self.rows
        self.column = warp % warps.columns * self.columns

    def emit(self) -> None:
        acc = self.emitter.registers(self.gemm.c.tile).buffer
        sums = acc.view("uint32") if acc.dtype == "int32" else acc  # as upstream's instruction takes them
        heights, widths, depth = self.rows // 16, self.columns // 8, self.instruction.depth
        if not self.gemm.accumulate:
            with T.unroll(heights * widths * 4) as register:
                T.buffer_store(acc, tirx.const(0, acc.dtype), [register])
        a = T.alloc_buffer((heights * 4,), "uint32", scope="local")
        b = T.alloc_buffer((widths * 2,), "uint32", scope="local")
        name = f"mma.sync.aligned.{self.instruction.name}"
        with T.unroll(self.depth // depth) as k:
            with T.unroll(heights) as i:
                self._left(a, i, k)
            self._right(b, widths, k)
            with T.unroll(heights) as i, T.unroll(widths) as j:
                values = [sums[(i * widths + j) * 4 + r] for r in range(4)]
                left = [a[i * 4 + r] for r in range(4)]
                T.evaluate(T.ptx[name](*values, *left, b[j * 2], b[j * 2 + 1], *values))

    def _left(self, words: tirx.Buffer, i: Any, k: Any) -> None:
        stored = self.emitter.storages[self.gemm.a.tile]
        if isinstance(stored, Registers):
            packed = stored.buffer.view("uint32")
            base = i * (self.depth // self.instruction.depth * 4) + k * 4  # an instruction takes four words
            for r in range(4):
                T.buffer_store(words, packed[base + r], [i * 4 + r])
            return
        half = self.instruction.depth // 2
        if self.gemm.transpose_a:
            place = [k * 16 + self.lane % 8 + self.lane // 16 * 8, self.row + i * 16 + self.lane // 8 % 2 * 8]
        else:
            place = [self.row + i * 16 + self.lane % 16, k * self.instruction.depth + self.lane // 16 * half]
        self._matrices(words, i * 4, 4, self.gemm.a, place, self.gemm.transpose_a)

    def _right(self, words: tirx.Buffer, widths: int, k: Any) -> None:
        half = self.instruction.depth // 2
        pairs, rest = divmod(widths, 2)

        def load(j: Any, count: int) -> None:
            lane = self.lane if count == 4 else self.lane % 16
            column = self.column + j * 8
            if self.gemm.transpose_b:
                place = [column + lane % 8 + lane // 16 * 8, k * self.instruction.depth + lane // 8 % 2 * half]
            else:
                place = [k * 16 + lane % 16, column + lane // 16 * 8]
            self._matrices(words, j * 2, count, self.gemm.b, place, not self.gemm.transpose_b)

        if pairs:
            with T.unroll(pairs) as pair:
                load(pair * 2, 4)
        if rest:
            load(pairs * 2, 2)

    def _matrices(
        self, words: tirx.Buffer, first: Any, count: int, region: Region, place: Sequence[Any], transposed: bool
    ) -> None:
        """Load `count` matrices of 8 rows of 16 bytes; `place` is where in the region the lane's row starts."""
        stored = self.emitter.memory(region.tile)
        index = [self.emitter.expression(start) for start in region.start]
        for dimension, step in zip((-2, -1), place):
            index[dimension] = index[dimension] + step
        address = stored.address(index, region.tile.shape)
        name = f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if transposed else ''}.shared.b16"
        registers = [words[first + r] for r in range(count)]
        T.evaluate(T.ptx[name](*registers, stored.buffer.ptr_to(address)))
