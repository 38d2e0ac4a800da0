"""Hopper's warpgroup matrix instruction: what it multiplies, how its registers lie, and the dispatch that issues it.

A warpgroup, 128 threads, multiplies 64 x k by k x n into registers, asynchronously. Operands come from swizzled shared
memory, through matrix descriptors; the left one, of 16 or 8 bits, also from registers. Upstream has no dispatch of its
``gemm_async`` for it; importing this module registers one.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".

>>> from tvm_axe.tile.targets.cuda.instructions.wgmma import accumulator
>>> print(accumulator(128, 16, 2))
S[(2, 1, 4, 2, 8, 2, 4, 2) : (128@tx, 8, 32@tx, 2, 4@tx, 4, 1@tx, 1)]
>>> print(accumulator(64, 32, 2, across=2))
S[(1, 1, 4, 2, 8, 2, 2, 4, 2) : (256@tx, 8, 32@tx, 2, 4@tx, 128@tx, 4, 1@tx, 1)]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm.script import tirx as T
from tvm.script.tirx import tile as primitives
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.layout import Layout
from tvm_axe.layout.dtypes import dtype_bits
from tvm_axe.machines import Gpu, machine_of
from tvm_axe.machines.registry import described
from tvm_axe.tile.nodes import Gemm
from tvm_axe.tile.regions import Region
from tvm_axe.tile.targets.cuda.instructions import tma
from tvm_axe.tile.targets.cuda.swizzles import same_layout

WARPGROUP = 128
"""Threads of a warpgroup."""

ROWS = 64
"""Rows of one instruction."""

COLUMNS = 256
"""Most columns of one instruction."""


@dataclass(frozen=True)
class Operands:
    """What the instruction takes of a type: its name there, elements along k a step, and the type it sums in.

    Of its columns, it does `columns` at most, and beyond 32 a multiple of `step`.
    """

    ptx: str
    depth: int
    total: str
    ptx_total: str = "f32"
    columns: int = COLUMNS
    step: int = 8

    def columns_step(self, columns: int) -> int:
        """What so many columns of one instruction are a multiple of."""
        return self.step if columns > 32 else 8

    @property
    def transposes(self) -> bool:
        """Whether operands may lie along m and n; those of 16 bits."""
        return self.depth == 16

    @property
    def pack(self) -> int:
        """How many elements of an operand share a register."""
        return self.depth // 8

    @property
    def scales(self) -> bool:
        """Whether it can negate its operands, for which it then takes two more numbers."""
        return self.ptx_total == "f32"


OPERANDS = {
    "float16": Operands("f16", 16, "float32"),
    "bfloat16": Operands("bf16", 16, "float32"),
    "float32": Operands("tf32", 8, "float32"),
    "float8_e4m3fn": Operands("e4m3", 32, "float32"),
    "float8_e5m2": Operands("e5m2", 32, "float32"),
    "int8": Operands("s8", 32, "int32", "s32", columns=224, step=16),  # upstream knows none of 240 or 256
}


def obstacle(gemm: Gemm) -> str | None:
    """Why the instruction can't do a product, as the end of a sentence; None if it can.

    Source: PTX ISA, "Matrix Descriptor Format", for where an operand may begin.
    """
    (m, n, k), dtype, other = gemm.shape, gemm.a.tile.dtype, gemm.b.tile.dtype
    if dtype not in OPERANDS or (other != dtype and not {dtype, other} <= {"float8_e4m3fn", "float8_e5m2"}):
        return f"operands are {dtype} and {other}; valid are two of one type among {', '.join(OPERANDS)}"
    takes = OPERANDS[dtype]
    if gemm.c.tile.dtype != takes.total or gemm.c.tile.scope != "fragment":
        return f"products of {dtype} are summed in a fragment of {takes.total}, c is {gemm.c.tile}"
    if gemm.b.tile.scope != "shared" or gemm.a.tile.scope not in ("shared", "fragment"):
        return f"a is in shared memory or a fragment and b in shared memory, they are {gemm.a.tile} and {gemm.b.tile}"
    if m % ROWS or n % takes.columns_step(n) or k % takes.depth:
        return (
            f"m x n x k = {m} x {n} x {k}; m is a multiple of {ROWS}, n of {takes.columns_step(n)}, k of {takes.depth} "
            f"for {dtype}"
        )
    if (gemm.transpose_a or not gemm.transpose_b) and not takes.transposes:
        return f"operands of {dtype} lie along k: transpose_b, and not transpose_a"
    if gemm.a.tile.scope == "fragment" and (gemm.transpose_a or takes.pack == 1 or not gemm.a.whole):
        return f"a in a fragment is of 16 or 8 bits, whole and not transposed, it is {gemm.a} of {dtype}"
    if not gemm.c.whole:
        return f"c is a whole fragment, it is {gemm.c}"
    if not _lies(n, gemm.transpose_b):
        return f"n = {n} with b lying along n; more than {COLUMNS} is a multiple of {COLUMNS}"
    for tile in (gemm.a.tile, gemm.b.tile):
        if tile.scope == "shared" and (len(tile.shape) != 2 or not tma.swizzle(tile)):
            return f"operands in shared memory are matrices with 8i rows of 32j bytes, not {tile}"
        if tile.scope == "shared" and tile.layout is not None and not same_layout(tile.layout, tma.axe_layout(tile)):
            return f"{tile} is annotated with {tile.layout}; the instruction takes {tma.axe_layout(tile)}"
    for region, along_k in ((gemm.a, not gemm.transpose_a), (gemm.b, gemm.transpose_b)):
        steps = (tma.ATOM_ROWS, takes.depth if along_k else tma.panel(region.tile))
        if region.tile.scope == "shared" and not all(region.begins_at(d, step) for d, step in enumerate(steps)):
            # A descriptor's address is of a pattern that repeats: it knows no row of an atom, nor a part of a step.
            return f"{region} begins at no row that {steps[0]} divides and column that {steps[1]} divides"
    return None


def shares_columns(gemm: Gemm, warpgroups: int) -> bool:
    """Whether so many warpgroups can share a product's columns: each reads all of a, from shared memory."""
    share, rest = divmod(gemm.shape[1], warpgroups)
    whole = rest == 0 and share % OPERANDS[gemm.a.tile.dtype].columns_step(share) == 0
    return gemm.a.tile.scope == "shared" and whole and _lies(share, gemm.transpose_b)


def _lies(columns: int, along_k: bool) -> bool:
    """Whether instructions can take so many columns of b: whole panels of it, where it lies along n."""
    return along_k or columns <= COLUMNS or columns % COLUMNS == 0


def accumulator(rows: int, columns: int, warpgroups: int, across: int = 1, pack: int = 2) -> Layout:
    """Where an accumulator's elements are, over threads ``tx`` and registers ``m``; also a 16-bit left operand's.

    A thread has `pack` neighbours of a row together.

    `across` neighbouring warpgroups share columns, so that each holds ``across * rows / warpgroups`` consecutive rows
    and ``columns / across`` consecutive columns.
    """
    groups, share = warpgroups // across, columns // across
    extents = f"{share // (4 * pack)}" if across == 1 else f"{across}, {share // (4 * pack)}"
    strides = f"{2 * pack}" if across == 1 else f"{WARPGROUP}@tx, {2 * pack}"
    text = (
        f"S[({groups}, {rows // groups // ROWS}, 4, 2, 8, {extents}, 4, {pack}) : "
        f"({across * WARPGROUP}@tx, {share // 2}, 32@tx, {pack}, 4@tx, {strides}, 1@tx, 1)]"
    )
    layout = Layout.parse(text)
    assert isinstance(layout, Layout)
    return layout


def warpgroup_fragment(rows: int, columns: int, pack: int = 2) -> Any:
    """The part of `accumulator` that one warpgroup holds, `rows` of it, as upstream's layout."""
    extents = [rows // ROWS, 4, 2, 8, columns // (4 * pack), 4, pack]
    strides = [(columns // 2, False), (32, True), (pack, False), (4, True), (2 * pack, False), (1, True), (1, False)]
    first = 0 if rows > ROWS else 1
    return _tvm.warpgroup_layout(extents[first:], strides[first:])


def issue(
    gemm: Gemm,
    accumulator: Any,
    group: Any,
    stand: tuple[int, int],
    operand: Callable[[Region, int, Any, int], Any],
    accumulate: Any,
) -> None:
    """Start a warpgroup's share of a product: one committed group of instructions.

    Parameters
    ----------
    gemm : Gemm
        The product, of all warpgroups.
    accumulator : Buffer
        The warpgroup's registers, which lie as `warpgroup_fragment`.
    group : Expr
        The warpgroup's number.
    stand : (int, int)
        How many warpgroups share the rows, and how many the columns; one of them is 1.
    operand : callable
        ``(region, dimension, at, extent)`` to what upstream's primitive takes: a fragment's registers; of a region in
        shared memory `extent` elements along a dimension, from `at` on.
    accumulate : bool or Expr
        Whether the accumulator is added to, and not set.
    """
    down, across = stand
    assert 1 in stand  # the registers of several warpgroups' rows that share columns would be more than there are
    rows, columns = gemm.shape[0] // down, gemm.shape[1] // across
    row, column = (group * rows, 0) if across == 1 else (0, group * columns)
    primitives.wg.gemm_async(
        accumulator,
        operand(gemm.a, 1 if gemm.transpose_a else 0, row, rows),
        operand(gemm.b, 0 if gemm.transpose_b else 1, column, columns),
        transA=gemm.transpose_a,
        transB=not gemm.transpose_b,
        accum=accumulate,
    )


def part_of(
    tiles: Any, slot: Any, start: Sequence[Any], extents: Sequence[int], dimension: int, at: Any, extent: int
) -> Any:
    """`extent` of a region in a slot of a buffer by (slot, row, column), from `at` on along one of two dimensions."""
    starts, sizes = list(start[-2:]), list(extents[-2:])
    starts[dimension], sizes[dimension] = starts[dimension] + at, extent
    return tiles[slot, starts[0] : starts[0] + sizes[0], starts[1] : starts[1] + sizes[1]]


def columns_at_once(columns: int, takes: Operands, along_k: bool) -> int:
    """How many columns one instruction does of more than it can: equal shares, in whole panels unless along k.

    >>> columns_at_once(256, OPERANDS["int8"], along_k=True), columns_at_once(320, OPERANDS["float16"], along_k=True)
    (128, 160)
    """
    if not along_k:
        return min(columns, takes.columns)
    shares = -(-columns // takes.columns)
    while columns % shares or columns // shares % takes.columns_step(columns // shares):
        shares += 1
    return columns // shares


def _shared_operand(region: Any, transposed: bool) -> Callable[[int, int], list[Any]]:
    """(row, k) -> [matrix descriptor] of an operand in shared memory. Called while a function is traced."""
    buffer, start = region.source, [r.min for r in region.region]
    swizzle = _tvm.swizzle_of(buffer.layout)
    if swizzle == 0 or not tvm_ffi.structural_equal(
        buffer.layout, _tvm.swizzled_layout(str(buffer.dtype), swizzle, buffer.shape)
    ):
        raise ValueError(f"wgmma: operand {buffer.name} lies as {buffer.layout}, which is not swizzled for it")
    bits, rows = dtype_bits(str(buffer.dtype)), int(buffer.shape[-2])
    width = 16 << swizzle  # bytes of a swizzled row; eight rows make an atom, a column of atoms a panel
    stride, leading = 8 * width // 16, rows * width // 16 if transposed else 1  # in 16 bytes
    first = T.alloc_local([1], "uint64")
    encode = T.cuda.wgmma.encode_matrix_descriptor
    T.evaluate(encode(T.address_of(first[0]), buffer.ptr_to(start), leading, stride, swizzle))

    def operand(row: Any, k: Any) -> list[Any]:
        y, x = (k, row) if transposed else (row, k)
        here, there = (
            elements_before(start[-2] + down, start[-1] + along, rows, 8 * width // bits)
            for down, along in ((0, 0), (y, x))
        )
        return [_behind(first[0], (there - here) * bits // 128)]

    return operand


def elements_before(row: Any, column: Any, rows: int, panel: int) -> Any:
    """How many elements lie in front of one of an atom's first row, whose place no swizzle changes.

    Panels of so many columns lie one behind the other, each with all `rows`.
    """
    return column // panel * (rows * panel) + row * panel + column % panel


def _behind(descriptor: Any, units: Any) -> Any:
    """The descriptor of what lies so many times 16 bytes behind: addresses are its lowest 14 bits, and don't carry."""
    code = """
__device__ __forceinline__ unsigned long long axe_descriptor_behind(unsigned long long descriptor, int units) {
  unsigned int lower = (unsigned int)descriptor + units;
  return (descriptor & 0xFFFFFFFF00000000ull) | lower;
}
"""
    return _tvm.device_call("axe_descriptor_behind", descriptor, units, code=code, gives="uint64")


def _register_operand(region: Any, rows: int, depth: int) -> Callable[[int, int], list[Any]]:
    """(row, k) -> the four 32-bit registers of an instruction's left operand, held as `warpgroup_fragment`."""
    takes = OPERANDS[str(region.source.dtype)]
    if not tvm_ffi.structural_equal(region.source.layout, warpgroup_fragment(rows, depth, takes.pack)):
        raise ValueError(f"wgmma: operand {region.source.name} lies as {region.source.layout}, not as its registers")
    words = region.source.local(rows * depth // WARPGROUP).view("uint32")
    return lambda row, k: [
        words[row // ROWS * (depth // (2 * takes.pack)) + k // takes.depth * 4 + i] for i in range(4)
    ]


def _has_wgmma(target: Target) -> bool:
    machine = machine_of(target)
    return isinstance(machine, Gpu) and machine.tensor_cores == "wgmma"


_APPLIES = [
    _tvm.dispatch_predicate("wgmma", lambda call, at: (_has_wgmma(at.target), described(at.target))),
    _tvm.dispatch_predicate("warpgroup", lambda call, at: (at.scope_kind == "warpgroup", at.scope_kind)),
]


@_tvm.register_dispatch("gemm_async", "cuda", variant="wgmma", priority=20, when=_APPLIES)
def _wgmma(call: Any, _context: Any) -> Any:
    """One committed group of instructions; whoever reads the accumulator waits for it."""
    c, a, b = call.args[:3]
    trans_a, trans_b = (int(bool(x)) for x in call.args[3:5])
    accumulate = T.cast(call.args[5], "bool")
    takes, other = OPERANDS[str(a.source.dtype)], OPERANDS[str(b.source.dtype)]
    rows, columns = (int(r.extent) for r in c.region)
    depth = int(b.region[-2 if trans_b else -1].extent)
    in_registers = a.source.scope() == "local"
    share = columns_at_once(columns, takes, along_k=not trans_b)
    name = f"wgmma.mma_async.sync.aligned.m64n{share}k{takes.depth}.{takes.ptx_total}.{takes.ptx}.{other.ptx}"
    trans = () if not takes.transposes else (trans_b,) if in_registers else (trans_a, trans_b)
    flags, registers, step = ((1, 1) if takes.scales else ()) + trans, share // 2, takes.depth

    def left() -> Callable[[int, int], list[Any]]:
        return _register_operand(a, rows, depth) if in_registers else _shared_operand(a, bool(trans_a))

    def total() -> Any:
        held = c.source.local(rows * columns // WARPGROUP)
        return held.view("uint32") if takes.ptx_total == "s32" else held  # upstream's name of an integer register

    @T.prim_func(check_well_formed=False)
    def impl():  # type: ignore[no-untyped-def]
        acc = T.meta_var(total())
        A = T.meta_var(left())
        B = T.meta_var(_shared_operand(b, bool(trans_b)))
        T.ptx.wgmma.fence.sync.aligned()
        for k in T.unroll(depth // step):
            for m in T.unroll(rows // 64):
                for n in T.unroll(columns // share):
                    T.ptx[name](
                        *[acc[m * (columns // 2) + n * registers + i] for i in range(registers)],
                        *A(m * 64, k * step), *B(n * share, k * step), T.Or(k != 0, accumulate), *flags
                    )  # fmt: skip
        T.ptx.wgmma.commit_group.sync.aligned()

    return impl
