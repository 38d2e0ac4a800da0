"""What a tile program must keep on every target; see `tvm_axe.tile.read`.

What needs more than one node is in `tvm_axe.tile.races` and `tvm_axe.tile.pipelines`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import ir, sym, tirx

from tvm_axe import _tvm
from tvm_axe.errors import TileError
from tvm_axe.tile.atomics import is_swap
from tvm_axe.tile.clocks import check_order
from tvm_axe.tile.dispatch import TypeTable
from tvm_axe.tile.joining import check_joins
from tvm_axe.tile.keys import ORDERED
from tvm_axe.tile.meeting import check_meeting
from tvm_axe.tile.nodes import (
    Assign,
    Branch,
    Copy,
    Fill,
    Gemm,
    Let,
    Loop,
    Node,
    Parallel,
    Print,
    Reduce,
    Scan,
    Signal,
    Sort,
    Wait,
)
from tvm_axe.tile.peers import check_peers
from tvm_axe.tile.pipelines import check_pipelines
from tvm_axe.tile.points import Scope, accesses, evaluate, scoped
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.races import check_blocks, check_parallel
from tvm_axe.tile.regions import Region, Tile

ATOMIC = ("float16", "bfloat16", "float32", "float64", "int32", "int64", "uint32")
"""The types that every target joins atomically in global memory."""


def check(program: TileProgram) -> None:
    """Raise TileError where the program can't be right on any target."""
    tiles = {tile.buffer: tile for tile in (*program.params, *program.tiles)}
    for tile in program.tiles:
        _layout(tile)
    for var, extent in program.grid:
        if isinstance(extent, int) and extent < 1:
            raise TileError(f"kernel: the grid's extent along {var.name} is {extent}; valid is 1 or more")
    known = _Known(program, program.analyzer(), tiles)
    for node, scope in scoped(program):
        for rule in _RULES.of(node):
            rule(node, scope, known)
    check_joins(program)
    _written(program.body, tiles, set(program.params))
    check_pipelines(program)
    check_blocks(program)
    check_peers(program)
    check_meeting(program)
    check_order(program)


def check_atomics(program: TileProgram) -> None:
    """Raise TileError where a program joins values with a type that no target does it for, alike on all of them."""
    for node in program.nodes():
        for tile, _ in node.joins:
            if tile.dtype not in ATOMIC:
                raise TileError(f"{node}: atomically into {tile}; valid are tensors of {', '.join(ATOMIC)}")


def check_written(program: TileProgram, empty: Collection[tirx.Buffer]) -> None:
    """Refuse reads of tensors, `empty`, that nothing has written when the kernel begins, before it writes them itself.

    Raises
    ------
    TileError
        There is such a read, or a join with what such a tensor holds, or flags in it.
    """
    tiles = {tile.buffer: tile for tile in (*program.params, *program.tiles)}
    for node in program.nodes():
        for tile, kind in node.joins:
            if tile.buffer in empty:
                raise TileError(
                    f"{program.name}: `{node}` is a join ({kind}) with {tile}, which nothing has written before; valid "
                    "is a kernel before this one that fills it"
                )
        if isinstance(node, Wait | Signal) and node.flags.tile.buffer in empty:
            raise TileError(
                f"{program.name}: `{node}` is of flags that nothing has set to 0 before; valid is a kernel before this "
                "one that fills them"
            )
    _written(program.body, tiles, {tile for tile in program.params if tile.buffer not in empty})


@dataclass(frozen=True)
class _Known:
    """What rules know of a program beside a node: what its analyzer proves, and the tile behind each buffer."""

    program: TileProgram
    analyzer: sym.Analyzer
    tiles: dict[tirx.Buffer, Tile]


def _layout(tile: Tile) -> None:
    if tile.layout is not None and not tile.layout.admits(tile.shape):
        raise TileError(
            f"{tile}: layout {tile.layout} is of {tile.layout.size()} elements; valid is one of {math.prod(tile.shape)}"
        )


# ---- Operations ------------------------------------------------------------------------------------------------------


def _copy(copy: Copy, scope: Scope, known: _Known) -> None:
    src, dst = copy.src, copy.dst
    if src.shape != dst.shape:
        raise TileError(f"{copy}: src has shape {src.extents}, dst {dst.extents}; they must be equal up to ones")
    if src.tile is dst.tile and not _disjoint(src, dst, known.analyzer):
        raise TileError(f"{copy}: src and dst may overlap; valid are parts of {src.tile} that provably don't")


def _disjoint(a: Region, b: Region, analyzer: sym.Analyzer) -> bool:
    sides = list(zip(a.start, a.extents, b.start, b.extents))
    return any(analyzer.can_prove(s + m <= t) or analyzer.can_prove(t + n <= s) for s, m, t, n in sides)


def _gemm(gemm: Gemm, scope: Scope, known: _Known) -> None:
    valid = {"a": ("shared", "fragment"), "b": ("shared",), "c": ("fragment",)}
    for name, scopes in valid.items():
        region = getattr(gemm, name)
        if region.tile.scope not in scopes:
            raise TileError(f"gemm {gemm}: {name} is {region.tile}; valid is a {' or '.join(scopes)} tile")
        if len(region.extents) < 2 or any(extent != 1 for extent in region.extents[:-2]):
            raise TileError(f"gemm {gemm}: {name} has shape {region.extents}; valid are two dimensions, behind ones")
    m, n, k = gemm.shape
    rows, columns = reversed(gemm.a.extents[-2:]) if gemm.transpose_a else gemm.a.extents[-2:]
    depth, width = reversed(gemm.b.extents[-2:]) if gemm.transpose_b else gemm.b.extents[-2:]
    if (rows, columns, depth, width) != (m, k, k, n):
        raise TileError(
            f"gemm {gemm}: c is {m} x {n}, a {'transposed ' * gemm.transpose_a}{rows} x {columns}, "
            f"b {'transposed ' * gemm.transpose_b}{depth} x {width}; valid are m x n, m x k and k x n"
        )
    if gemm.c.tile in (gemm.a.tile, gemm.b.tile):
        raise TileError(
            f"gemm {gemm}: c is an operand, too, which would change while it is read; valid is another tile"
        )
    a, b, c = (region.tile.dtype for region in (gemm.a, gemm.b, gemm.c))
    if a != b:
        raise TileError(f"gemm {gemm}: a is of {a}, b of {b}; valid are operands of one type")
    sums = ("float32", a) if "float" in a else ("int32", a)
    if c not in sums:
        raise TileError(f"gemm {gemm}: products of {a} are summed in {c}; valid is {' or '.join(dict.fromkeys(sums))}")


def _reduce(reduce: Reduce, scope: Scope, known: _Known) -> None:
    for name, region in (("src", reduce.src), ("dst", reduce.dst)):
        if region.tile.scope == "global":
            raise TileError(f"{reduce}: {name} is {region.tile}; valid are tiles on chip, to which it can be copied")
    if reduce.src.tile is reduce.dst.tile:
        raise TileError(f"{reduce}: dst is src, which would change while it is read; valid is another tile")
    left = tuple(extent for axis, extent in enumerate(reduce.src.extents) if axis != reduce.axis)
    if [e for e in left if e != 1] != [e for e in reduce.dst.extents if e != 1]:
        raise TileError(
            f"{reduce}: src has shape {reduce.src.extents}, which without axis {reduce.axis} is {left}; dst has shape "
            f"{reduce.dst.extents}, and must have that one"
        )


def _sort(sort: Sort, scope: Scope, known: _Known) -> None:
    _on_chip(sort, (*sort.results, sort.src))
    src, dtypes = sort.src, {"values": sort.src.tile.dtype, "indices": "int32"}
    if src.tile.dtype not in ORDERED:
        raise TileError(
            f"{sort}: src is {src.tile}; valid are tiles of {', '.join(ORDERED)}, to which T.cast brings its elements"
        )
    for name, dtype in dtypes.items():
        region = getattr(sort, name)
        if region is not None and region.tile.dtype != dtype:
            raise TileError(f"{sort}: {name} are of {region.tile.dtype}; valid is a tile of {dtype}")
    left = [extent for axis, extent in enumerate(src.extents) if axis != sort.axis]
    if sort.keeps_axis:
        most, kept = sort.length, [*left, sort.count]
        if sort.count > most or (sort.word == "sort" and sort.count != most):
            valid = f"{most}" if sort.word == "sort" else f"1 to {most}"
            raise TileError(f"{sort}: {sort.count} elements of each row of {most} in a result; valid is {valid}")
    else:
        kept = left
    for region in sort.results:
        if [e for e in kept if e != 1] != [e for e in region.extents if e != 1]:
            raise TileError(
                f"{sort}: src has shape {src.extents}, and {region.tile.name} {region.extents}; valid is {tuple(kept)}"
            )


def _scan(scan: Scan, scope: Scope, known: _Known) -> None:
    _on_chip(scan, (scan.dst, scan.src))
    dst, src = scan.dst.tile.dtype, scan.src.tile.dtype
    if scan.src.shape != scan.dst.shape:
        raise TileError(
            f"{scan}: src has shape {scan.src.extents}, dst {scan.dst.extents}; they must be equal up to ones"
        )
    if not any(kind in src and kind in dst for kind in ("float", "int")):
        raise TileError(f"{scan}: sums of {src} in {dst}; valid are floats in floats, and integers in integers")


def _on_chip(node: Sort | Scan, regions: tuple[Region, ...]) -> None:
    """Refuse tensors, and one tile in two places."""
    for region in regions:
        if region.tile.scope not in ("shared", "fragment"):
            raise TileError(f"{node}: {region.tile}; valid are shared tiles and fragments, to which it can be copied")
        if sum(other.tile is region.tile for other in regions) > 1:
            raise TileError(
                f"{node}: {region.tile.name} is in two places, and would change while it is read; valid is another tile"
            )


def _flags(node: Wait | Signal, scope: Scope, known: _Known) -> None:
    word, tile = type(node).__name__.lower(), node.flags.tile
    if tile.scope != "global" or tile.dtype != "int32":
        raise TileError(f"{node}: flags are {tile}; valid is an int32 tensor in global memory")
    if str(node.value.ty) != "int32":
        raise TileError(f"{node}: the value is {node.value.ty}; valid is int32")
    for other in known.program.nodes():
        touched = () if other.bodies or isinstance(other, Wait | Signal) else (*other.reads, *other.writes)
        if tile not in (*touched, *scalars(other, known.tiles)):
            continue
        raise TileError(
            f"{node}: `{other}` touches {tile}, too, which is ordered by nothing; valid is a tensor of flags that wait "
            "and signal alone touch"
        )
    for dimension, (start, extent, size) in enumerate(zip(node.flags.start, node.flags.extents, tile.shape)):
        for values in scope.corners():
            at = evaluate(start, values)
            if at is not None and isinstance(size, int) and at + extent > size:
                raise TileError(
                    f"{node}: its flags end at {at + extent} in dimension {dimension} of {tile}{_when(scope, values)}; "
                    f"valid is up to {size}: a {word} has no flags outside of their tensor"
                )


def _assign(assign: Assign, scope: Scope, known: _Known) -> None:
    for values in scope.ends():
        for dimension, (index, size) in enumerate(zip(assign.indices, assign.tile.shape)):
            at = evaluate(index, values)
            if at is not None and not 0 <= at < size:
                raise TileError(
                    f"{assign}: it is element {at} of dimension {dimension} of {assign.tile}{_when(scope, values)}; "
                    f"valid is 0 to {size - 1}"
                )


def _parallel(parallel: Parallel, scope: Scope, known: _Known) -> None:
    for tile in parallel.writes:
        if tile.scope == "local":
            raise TileError(
                f"{parallel}: {tile} is stored for one point, and every thread has a {tile.name} of its own; valid "
                "are fragments, shared tiles and tensors"
            )
    check_parallel(parallel, scope, known.tiles)


# ---- Regions and scalars ---------------------------------------------------------------------------------------------


def _regions(node: Node, scope: Scope, known: _Known) -> None:
    for region in node.regions:
        _bounds(node, region, scope, known.analyzer)


def _scalars(node: Node, scope: Scope, known: _Known) -> None:
    for expression in node.scalars:
        _no_swap(node, expression)
    for tile in scalars(node, known.tiles):
        if tile.scope == "fragment":
            raise TileError(
                f"{node}: a scalar is read from {tile}, whose elements are spread over threads, and every thread "
                "needs it; valid are tensors in global memory, shared and local tiles"
            )


def _no_swap(node: Node, expression: Any) -> None:
    """Refuse a compare-and-swap that all threads would do."""

    def on_call(call: ir.Call) -> None:
        if is_swap(call):
            raise TileError(
                f"{node}: atomic_cas of {call.args[-1]} outside of a `parallel`, where every thread would do it; valid "
                f"is a store to an element of a tile.shared((1,), {str(call.ty.dtype)!r}), once by the block, and that "
                "element in its place"
            )

    if not isinstance(expression, int):
        tvm_ffi.structural_walk(expression, (ir.Call, on_call))


_Rule = Callable[[Any, Scope, _Known], None]

_RULES: TypeTable[tuple[_Rule, ...]] = TypeTable(
    "rules of a tile program",
    {
        Assign: (_scalars, _assign),
        Branch: (_scalars,),
        Copy: (_copy, _regions, _scalars),
        Fill: (_regions, _scalars),
        Gemm: (_gemm, _regions, _scalars),
        Let: (_scalars,),
        Loop: (_scalars,),
        Parallel: (_parallel,),
        Print: (_regions, _scalars),
        Reduce: (_reduce, _regions, _scalars),
        Scan: (_scan, _regions, _scalars),
        Sort: (_sort, _regions, _scalars),
        Signal: (_flags, _regions, _scalars),
        Wait: (_flags, _regions, _scalars),
    },
)
"""What is checked of each node by itself, in order."""


def _bounds(node: Node, region: Region, scope: Scope, analyzer: sym.Analyzer) -> None:
    """On chip a region must be inside, provably. In global memory it must start inside, as far as is known."""
    tile = region.tile
    for dimension, (start, extent, size) in enumerate(zip(region.start, region.extents, tile.shape)):
        if tile.scope != "global":
            if not _holds(start >= 0, scope, analyzer) or not _holds(start + extent <= size, scope, analyzer):
                raise TileError(
                    f"{node}: {region} isn't shown to be inside of {tile}: dimension {dimension} goes from {start} to "
                    f"{start + extent}; valid is 0 to {size}"
                )
            continue
        for values in scope.corners():
            at = evaluate(start, values)
            if at is not None and (at < 0 or (isinstance(size, int) and at >= size)):
                raise TileError(
                    f"{node}: {region} starts at {at} in dimension {dimension} of {tile}{_when(scope, values)}; valid "
                    f"is 0 to {size - 1}; it may end outside, but not start there"
                )


def _holds(condition: Any, scope: Scope, analyzer: sym.Analyzer) -> bool:
    """Whether a condition is proved, given the conditions around."""
    if isinstance(condition, bool):
        return condition
    for name, value in scope.names:
        condition = _named(condition, name, value)
    if analyzer.can_prove(condition):
        return True
    known = [truth if holds else tirx.Not(truth) for truth, holds in scope.conditions]
    if not known:
        return False
    with analyzer.constraint_scope(known[0] if len(known) == 1 else tirx.all(*known)):
        return bool(analyzer.can_prove(condition))


def _named(condition: tirx.Expr, name: tirx.Var, value: tirx.Expr) -> tirx.Expr:
    """A condition with a value in the place of its name."""
    return _tvm.structural_map(condition, (tirx.Var, lambda var: value if var.same_as(name) else var))


def _when(scope: Scope, values: dict[tirx.Var, Any]) -> str:
    """The iteration, in words."""
    at = [f"{var.name}={values[var]}" for var, _, _ in scope.loops if values.get(var) is not None]
    return f" when {', '.join(at)}" if at else ""


# ---- Values that nothing wrote ---------------------------------------------------------------------------------------


def scalars(node: Node, tiles: dict[tirx.Buffer, Tile]) -> tuple[Tile, ...]:
    """The tiles and tensors from which a node needs an element as a scalar."""
    found: dict[Tile, None] = {}
    for expression in node.scalars:
        if not isinstance(expression, int):
            tvm_ffi.structural_walk(expression, (ir.TensorLoad, lambda load: found.setdefault(tiles[load.source])))
    return tuple(found)


def _written(
    body: tuple[Node, ...],
    tiles: dict[tirx.Buffer, Tile],
    written: set[Tile],
    around: frozenset[Tile] = frozenset(),
    carried: frozenset[Tile] = frozenset(),
) -> None:
    """Refuse reads of what nothing wrote before, and add what the body writes to `written`.

    What the loops around write (`around`) counts under a condition only (`carried`): their first iteration reads what
    it reads without one.
    """
    for node in body:
        for tile, stores in _touches(node, tiles):
            if stores:
                written.add(tile)
            elif tile not in written and tile not in carried:
                raise TileError(f"`{node}` reads {tile}, which nothing has written before; valid is to fill it first")
        if isinstance(node, Loop):
            _written(node.body, tiles, written, around | set(node.writes), carried)
        elif isinstance(node, Branch):
            otherwise = set(written)
            _written(node.then, tiles, written, around, carried | around)
            _written(node.otherwise, tiles, otherwise, around, carried | around)
            written |= otherwise


def _touches(node: Node, tiles: dict[tirx.Buffer, Tile]) -> Iterator[tuple[Tile, bool]]:
    """The tiles that a node itself reads and writes (True), in order."""
    for tile in scalars(node, tiles):
        yield tile, False
    if isinstance(node, Parallel):
        for access in accesses(node):
            yield tiles[access.buffer], access.stores
    elif not node.bodies:
        for tile in node.reads:
            yield tile, False
        for tile in node.writes:
            yield tile, True
