"""Where the elements of a parameter lie in global memory: its strides, which everybody asks `strides_of` for.

A parameter is row-major, each element behind the one before, unless it says how far apart neighbours along each
dimension lie: columns of a larger tensor, a transposed view, a row for all. A stride is a number of elements, a
variable that callers' tensors decide, or is worked out of such variables, of extents and of scalars:

>>> from tvm.script import tirx as T
>>> from tvm_axe import tile
>>> @T.prim_func
... def turned(a: T.handle, B: T.Buffer((8, 64), "float32", strides=(1, 8)), C: T.Buffer((8, 64), "float32")):
...     lda = T.int32()
...     A = T.match_buffer(a, (8, 64), "float32", strides=(lda, 1))
...     tile.assume(lda % 4 == 0)
...     with tile.kernel(8) as i, tile.parallel(64) as j:
...         C[i, j] = A[i, j] + B[i, j]
>>> for each in tile.read(turned).params:
...     print(each)
global A: float32[8, 64] with strides (lda, 1)
global B: float32[8, 64] with strides (1, 8)
global C: float32[8, 64]

In a parameter's own annotation, ``A: T.Buffer((8, 64), "float32", strides=(lda, 1))``, a variable is a `tirx.Var` from
outside of the function, or a string, which is ``A.strides[0]`` where it is used.

What a program writes has elements apart from each other, so that no two points and no two blocks store to one place
where nothing orders them; what it reads may have one element at many places.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tvm_ffi
from tvm import ir, sym, tirx

from tvm_axe import _tvm
from tvm_axe.errors import TileError
from tvm_axe.tile.mesh import is_mesh_tensor
from tvm_axe.tile.regions import Tile, constant
from tvm_axe.tile.walking import variables_in

_MOST = 2**31 - 1


def strides_of(tile: Tile) -> tuple[Any, ...]:
    """How many elements apart neighbours along each dimension of a tensor are: numbers, or expressions.

    Of a mesh tensor, whose slabs lie a distance apart that its memory decides, it is as if they were neighbours.
    """
    return row_major(tile.shape) if tile.strides is None else tile.strides


def row_major(shape: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of a tensor each of whose elements is right behind the one before.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    found: list[Any] = [1]
    for extent in list(shape)[:0:-1]:
        found.insert(0, extent if isinstance(found[0], int) and found[0] == 1 else found[0] * extent)
    return tuple(found)


def own_strides(buffer: tirx.Buffer) -> tuple[Any, ...] | None:
    """The strides that a parameter is written with; None where there are none, or where they say row-major order.

    Raises
    ------
    TileError
        One of them is negative, or they aren't as many as dimensions.
    """
    shape, strides = tuple(map(constant, buffer.shape)), tuple(map(constant, buffer.strides))
    if not strides or is_mesh_tensor(buffer):
        return None
    if len(strides) != len(shape):
        raise TileError(
            f"parameter {buffer.name}: {len(strides)} strides of {len(shape)} dimensions; valid is one for each"
        )
    analyzer = sym.Analyzer()
    if all(analyzer.can_prove_equal(stride, step) for stride, step in zip(strides, row_major(shape))):
        return None
    for dimension, stride in enumerate(strides):
        if isinstance(stride, int) and stride < 0:
            raise TileError(
                f"parameter {buffer.name}: stride {stride} along dimension {dimension}; valid are strides of 0 and "
                "more: take the tensor from its other end, and count down where it is indexed"
            )
    return strides


def laid_out(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Return a function whose parameters with strides are told to upstream's TIRx, too, by their layouts.

    Raises
    ------
    TileError
        Strides are negative, not one for each dimension, or of another type of integers than extents.
    """
    known: dict[tirx.Var, tirx.Var] = {}
    for param in func.params:
        strides = own_strides(param) if tirx.is_buffer_var(param) else None
        if strides is not None:
            kind = _counted_in(param)
            sizes = [tirx.const(e, kind) if isinstance(e, int) else e for e in map(constant, (*param.shape, *strides))]
            rank, name, dtype = len(strides), str(param.name), str(param.dtype)
            buffer = _tvm.strided_buffer(sizes[:rank], dtype, name, sizes[rank:])
            if not tvm_ffi.structural_equal(buffer.layout, param.layout):  # as it is in a part of such a function
                known[param] = buffer
    if not known:
        return func
    body = _tvm.structural_map(func.body, (tirx.Var, lambda var: known.get(var, var)))
    params = [known.get(param, param) for param in func.params]
    return tirx.PrimFunc(params, body, func.ret_type).with_attrs(dict(func.attrs.items()))


def _counted_in(param: tirx.Buffer) -> str:
    """The type that a tensor's places are counted in: that of its open extents and strides."""
    sizes = [each for each in (*param.shape, *param.strides) if not isinstance(each, tirx.IntImm)]
    if not sizes:
        last = reach([*map(int, param.shape)], [*map(int, param.strides)])
        return "int64" if last > _MOST else "int32"
    kinds = {str(each.ty) for each in sizes}
    if len(kinds) > 1:
        said = ", ".join(f"{each} of {each.ty}" for each in sizes)
        raise TileError(f"parameter {param.name}: {said}; valid are extents and strides of one type of integers")
    return kinds.pop()


def reach(extents: Sequence[int], strides: Sequence[int]) -> int:
    """How far a tensor's last element is behind its first, in what strides are counted in; it has one at least.

    >>> reach((2, 3), (8, 1))
    10
    """
    return sum((extent - 1) * stride for extent, stride in zip(extents, strides))


def check_strides(params: Sequence[Tile], written: Iterable[Tile], scalars: Sequence[tirx.Var]) -> None:
    """Refuse strides that nobody can know, and those of what is written that are seen to have elements overlap.

    Raises
    ------
    TileError
        A variable is no extent, no stride by itself and no scalar parameter; or such a stride is constant.
    """
    known = set(scalars)
    for tile in params:
        known |= {each for each in (*tile.shape, *(tile.strides or ())) if isinstance(each, tirx.Var)}
    for tile in params:
        for stride in tile.strides or ():
            unknown = sorted(str(var.name) for var in variables_in(stride) if var not in known)
            if unknown:
                raise TileError(
                    f"parameter {tile.name}: a stride is {stride}, and no tensor says what {', '.join(unknown)} is; "
                    "valid is what extents, strides that are a variable by themselves and scalar parameters say"
                )
    for tile in written:
        if tile.strides is None:
            continue
        # An extent that is open is 2 at least, or nobody would ask for its stride.
        numbers = [(e if isinstance(e, int) else 2, s) for e, s in zip(tile.shape, tile.strides)]
        found = overlap(*zip(*((e, s) if isinstance(s, int) else (1, 1) for e, s in numbers)))
        if found is not None:
            raise TileError(f"{tile}: it is written, and {found}")


def overlap(extents: Sequence[int], strides: Sequence[int]) -> str | None:
    """Why elements aren't shown to be apart from each other, with what would be valid; None if they are.

    They are where each stride is more than what the dimensions of smaller ones reach together.

    >>> overlap((4, 4), (2, 1))
    'its elements overlap: 2 elements apart along dimension 0, where others reach 3; valid is 4 or more there'
    >>> overlap((4, 4), (1, 4))
    """
    furthest = 0
    for stride, extent, dimension in sorted((s, e, d) for d, (e, s) in enumerate(zip(extents, strides)) if e > 1):
        if stride == 0:
            return (
                f"its elements overlap: those along dimension {dimension} are one, of stride 0; valid is another stride"
            )
        if stride <= furthest:
            return (
                f"its elements overlap: {stride} elements apart along dimension {dimension}, where others reach "
                f"{furthest}; valid is {furthest + 1} or more there"
            )
        furthest += (extent - 1) * stride
    return None


def with_checks(func: tirx.PrimFunc, written: Iterable[Tile]) -> tirx.PrimFunc:
    """Return a lowered function that refuses tensors that it writes and whose elements overlap, where it can't be seen.

    A call from Python was refused before (`tvm_axe.tile.given`); one of an exported library is refused by this.
    """
    analyzer, checks = sym.Analyzer(), []
    for tile in written:
        if tile.strides is None:
            continue
        apart = analyzer.simplify(_are_apart(tile.shape, tile.strides))
        if not analyzer.can_prove(apart):
            message = f"{tile.name} is written, and its elements overlap"
            checks.append(tirx.AssertStmt(apart, ir.StringImm("ValueError"), [ir.StringImm(message)]))
    return func.with_body(tirx.SeqStmt([*checks, func.body])) if checks else func


def _are_apart(shape: Sequence[Any], strides: Sequence[Any]) -> tirx.Expr:
    """The condition that `overlap` has nothing to say, of sizes that a caller's tensor decides."""
    extents, steps = ([tirx.Cast("int64", tirx.const(0, "int32") + e) for e in sizes] for sizes in (shape, strides))
    conditions = []
    for dimension, (extent, step) in enumerate(zip(extents, steps)):
        furthest: Any = tirx.const(0, "int64")
        for other, (size, stride) in enumerate(zip(extents, steps)):
            if other != dimension:
                before = stride < step if other > dimension else stride <= step
                furthest = furthest + tirx.Select(before, (size - 1) * stride, tirx.const(0, "int64"))
        conditions.append(tirx.any(extent <= 1, step > furthest))
    return tirx.any(tirx.all(*conditions), *(extent <= 0 for extent in extents))


def has_rows(tile: Tile) -> bool:
    """Whether neighbours along a tensor's last dimension are neighbours in memory."""
    last = strides_of(tile)[-1]
    return isinstance(last, int) and last == 1


def advice(stride: Any, divisor: int) -> str:
    """What a program says so that a stride, which is no number, is known to be a multiple of one."""
    if isinstance(stride, tirx.Var):
        return f"tile.assume({stride} % {divisor} == 0)"
    return f"tile.assume, of what {stride} is made of,"


def are_pieces(tile: Tile, length: int, analyzer: sym.Analyzer) -> bool:
    """Whether each `length` neighbours along a tensor's last dimension, from a multiple of it on, are one piece.

    It is one piece of memory that begins at a multiple of as many elements, since the tensor does.
    """
    if length == 1:
        return True
    *outer, _ = strides_of(tile)
    if not has_rows(tile):
        return False
    if tile.strides is None:
        return not outer or bool(analyzer.can_prove(tile.shape[-1] % length == 0))
    return all(
        analyzer.can_prove(stride % length == 0)
        for stride, extent in zip(outer, tile.shape)
        if not (isinstance(extent, int) and extent == 1)
    )
