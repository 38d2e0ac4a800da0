"""An epilogue put into a tile program: what is done to its result's elements before they are stored.

A program that ends in ``copy(c, C[...])`` from a fragment gets a `parallel` before it, which computes every element of
the fragment from itself and from tensors in global memory. One that ends in a `parallel` with ``C[...] = value`` gets
another value there. Either goes on with the product as it was summed: it is rounded when it is stored, and before only
where the epilogue reads it in 16 bits and does no arithmetic with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import tvm_ffi
from tvm import ir, s_tir, sym, tirx

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import alike, is_zero, loads_in, uses
from tvm_axe.analysis.rounding import rounded_once
from tvm_axe.analysis.sizes import Extent, are_same, sides
from tvm_axe.errors import TileError
from tvm_axe.tile.kernels.kernel import Recipe
from tvm_axe.tile.nodes import Branch, Copy, Loop, Node, Parallel
from tvm_axe.tile.reading import read
from tvm_axe.tile.regions import Region
from tvm_axe.tile.walking import walk

_NO_SPLIT = "the epilogue's shape {} doesn't split the kernel's {}"
_NOT_ONCE = "the kernel takes no epilogue: its result isn't stored once, from a fragment"


@dataclass(frozen=True)
class Epilogue:
    """``out[i..] = value(product[i..], inputs[...])``, for every point `i..` of the product's shape.

    Attributes
    ----------
    value : Expr
        In the variables of `point`, which has 0 where an extent is 1.
    product, out : Buffer
        What is read at the point, and what is written there; of one shape.
    inputs : Mapping[str, Buffer]
        The other buffers that are read, each by a name of its own.
    """

    value: tirx.Expr
    point: tuple[tirx.Expr, ...]
    product: tirx.Buffer
    out: tirx.Buffer
    inputs: Mapping[str, tirx.Buffer]

    @classmethod
    def of(cls, block: s_tir.SBlock, product: tirx.Buffer) -> Epilogue:
        """The epilogue that a block is.

        Raises
        ------
        TileError
            It isn't pointwise in `product`.
        """
        name, store = block.name_hint, block.body
        loads = loads_in([store.value])
        indices = list(store.indices)
        # Where an iterator of extent 1 was, lowering may have put 0 and left the iterator.
        ones = [are_same([extent], [1]) and is_zero(index) for index, extent in zip(indices, store.buffer.shape)]
        variables = [it.var for it in block.iter_vars if not are_same([it.dom.extent], [1]) or uses(store, it.var)]
        same = all(alike(load.indices, indices) for load in loads if load.source.same_as(product))
        places = [n for index in indices for n, var in enumerate(variables) if var.same_as(index)]
        domains = [next(it.dom for it in block.iter_vars if it.var.same_as(variables[n])) for n in places]
        extents = [extent for extent, one in zip(store.buffer.shape, ones) if not one]
        whole = [is_zero(d.min) and are_same([d.extent], [e]) for d, e in zip(domains, extents)]
        pointwise = block.init is None and len(places) == len(extents) == len(variables) == len(set(places))
        if not (same and pointwise and all(whole) and are_same(store.buffer.shape, product.shape)):
            raise TileError(
                f"block {name!r} is no epilogue: valid is out[i, j] = f(product[i, j], ...) for all elements, with the "
                f"product {product.name} read at the point that is written only"
            )
        others = dict.fromkeys(load.source for load in loads if not load.source.same_as(product))
        inputs = {f"epilogue_{number}": buffer for number, buffer in enumerate(others)}
        return cls(rounded_once(store.value), tuple(indices), product, store.buffer, inputs)


def with_epilogue(recipe: Recipe, epilogue: Epilogue) -> Recipe:
    """The recipe with an epilogue in its last program.

    Raises
    ------
    TileError
        It doesn't end in one copy of a fragment to its one output, in one `parallel` that stores it, or in either as a
        condition says: its result is added up in memory, or there are several.
    """
    (*before, program) = recipe.programs
    last = program.func
    stores = _stores(program.nodes(), recipe.outputs)
    earlier = [node for other in before for node in _stores(other.nodes(), recipe.outputs)]
    once = len(stores) == 1 or any(
        [_stores(walk(arm), recipe.outputs) for arm in (node.then, node.otherwise)] == [[store] for store in stores]
        for node in program.nodes()
        if isinstance(node, Branch)
    )
    if len(recipe.outputs) > 1 or earlier or not once:
        raise TileError(_NOT_ONCE)
    (whole,) = (list(tile.shape) for tile in program.params if tile.name == recipe.outputs[0])
    buffers = {
        buffer: tirx.decl_buffer(
            whole if _is_rowwise(buffer, epilogue, whole) else list(buffer.shape), buffer.dtype, name
        )
        for name, buffer in epilogue.inputs.items()
    }
    body = last.body
    for store in stores:
        changed = _with_value(body, store, recipe.outputs[0], epilogue, buffers, program.analyzer())
        if changed is None:
            return recipe
        body = changed
    func = tirx.PrimFunc([*last.params, *buffers.values()], body, last.ret_type, last.attrs)
    return replace(recipe, programs=(*before, read(func)), inputs=(*recipe.inputs, *epilogue.inputs))


def _is_rowwise(buffer: tirx.Buffer, epilogue: Epilogue, whole: Sequence[Extent]) -> bool:
    """Whether a tensor can be read as one of the kernel's shape, of unknown rows: then no row is divided for it."""
    if isinstance(sides(whole)[0], int) or not are_same(buffer.shape, epilogue.out.shape):
        return False
    loads = [load for load in loads_in([epilogue.value]) if load.source.same_as(buffer)]
    return all(alike(load.indices, epilogue.point) for load in loads)


def _with_value(
    body: tirx.Stmt,
    store: Node,
    output: str,
    epilogue: Epilogue,
    buffers: Mapping[tirx.Buffer, tirx.Buffer],
    analyzer: sym.Analyzer,
) -> tirx.Stmt | None:
    """A program's body whose `store` of its output stores the epilogue's value; None if that is what it does."""
    if isinstance(store, Copy) and not store.atomic and store.src.tile.scope == "fragment" and store.src.whole:
        dst, nest = store.dst, _nest(store.src, store.dst, epilogue, buffers, analyzer)
        if nest is None:
            return None

        def insert(call: tirx.TilePrimitiveCall) -> tirx.Stmt:
            return tirx.SeqStmt([nest, call]) if _writes(call, dst) else call

        return _tvm.structural_map(body, (tirx.TilePrimitiveCall, insert))
    if not isinstance(store, Parallel) or (own := _own_store(store, output)) is None:
        raise TileError(_NOT_ONCE)
    for var, extent in zip(store.vars, store.extents):
        analyzer.bind(var, ir.Range(0, extent))

    found: list[tirx.BufferStore] = []

    def replaced(stmt: tirx.BufferStore) -> tirx.Stmt:
        if not stmt.same_as(own):
            return stmt
        found.append(stmt)
        return _stored(stmt, epilogue, buffers, analyzer)

    changed = _tvm.structural_map(body, (tirx.BufferStore, replaced))
    if not found:  # what it stores has names, or stands in a loop that is written out
        raise TileError(_NOT_ONCE)
    return changed


def _own_store(parallel: Parallel, output: str) -> tirx.BufferStore | None:
    """The one statement that writes the output, if nothing reads it; else None."""
    uses = [written for tile, _, written in parallel.accesses if tile.scope == "global" and tile.name == output]
    stores: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(parallel.body, (tirx.BufferStore, stores.append))
    found = [store for store in stores if str(store.buffer.name) == output]
    return found[0] if uses == [True] and len(found) == 1 else None


def _stores(nodes: Iterable[Node], outputs: Sequence[str]) -> list[Node]:
    """What of these writes the outputs, without the loops and branches around it."""
    return [
        node
        for node in nodes
        if not isinstance(node, Loop | Branch)
        and any(tile.scope == "global" and tile.name in outputs for tile in node.writes)
    ]


def _writes(call: tirx.TilePrimitiveCall, dst: Region) -> bool:
    return any(isinstance(arg, ir.TensorRegion) and arg.source.same_as(dst.tile.buffer) for arg in call.args)


def _nest(
    src: Region,
    dst: Region,
    epilogue: Epilogue,
    buffers: Mapping[tirx.Buffer, tirx.Buffer],
    analyzer: sym.Analyzer,
) -> tirx.Stmt | None:
    """``parallel`` over the fragment: every element that lies in the output becomes the epilogue's value.

    The copy that follows rounds to the output's type, so that an epilogue which does so at the end needn't; None if it
    does nothing else.
    """
    loops = [tirx.Var(f"e{n}", "int32") for n in range(len(src.extents))]
    inner = [loop for loop, extent in zip(loops, src.extents) if extent != 1]
    offsets = iter(inner)
    place = [start + next(offsets) if extent != 1 else start for start, extent in zip(dst.start, dst.extents)]
    for loop, extent in zip(loops, src.extents):
        analyzer.bind(loop, ir.Range(0, extent))
    fragment = tirx.BufferLoad(src.tile.buffer, loops)
    dtype = src.tile.dtype

    shape, whole = sides(dst.tile.shape), sides(epilogue.out.shape)
    slot = 0  # the leading dimensions in which the output is a slot of the tensor
    while slot < len(shape) and _is_more(shape[slot:], whole) and dst.extents[slot] == 1:
        slot += 1
    point = _point(place[slot:], shape[slot:], whole, analyzer)
    last = epilogue.value
    if isinstance(last, tirx.Cast) and str(last.ty.dtype) == dst.tile.dtype and str(last.value.ty.dtype) == dtype:
        epilogue = replace(epilogue, value=last.value)
    value = _value(epilogue, fragment, point, place, buffers, dtype)
    if value.same_as(fragment):
        return None
    body: tirx.Stmt = tirx.BufferStore(src.tile.buffer, value, loops)
    inside = [index < extent for index, extent, size in zip(place, dst.tile.shape, dst.extents) if size != 1]
    for condition in reversed([condition for condition in inside if not analyzer.can_prove(condition)]):
        body = tirx.IfThenElse(condition, body, None)
    for loop, extent in reversed(list(zip(loops, src.extents))):
        body = tirx.For(loop, 0, extent, tirx.ForKind.PARALLEL, body)
    return body


def _stored(
    store: tirx.BufferStore,
    epilogue: Epilogue,
    buffers: Mapping[tirx.Buffer, tirx.Buffer],
    analyzer: sym.Analyzer,
) -> tirx.Stmt:
    """A store of the product that stores the epilogue's value, which is computed before the product is rounded."""
    product = store.value.value if isinstance(store.value, tirx.Cast) else store.value
    point = _point(store.indices, sides(store.buffer.shape), sides(epilogue.out.shape), analyzer)
    value = _value(epilogue, product, point, store.indices, buffers, str(store.buffer.dtype))
    return tirx.BufferStore(store.buffer, value, store.indices)


def _value(
    epilogue: Epilogue,
    product: tirx.Expr,
    point: Sequence[tirx.Expr],
    place: Sequence[tirx.Expr],
    buffers: Mapping[tirx.Buffer, tirx.Buffer],
    dtype: str,
) -> tirx.Expr:
    """The epilogue of a product at a point, as `dtype`; `place` is the point in the kernel's shape."""
    values = {var: at for var, at in zip(epilogue.point, point) if isinstance(var, tirx.Var)}

    def on_load(load: ir.TensorLoad) -> tirx.Expr:
        if load.source.same_as(epilogue.product):
            own = str(epilogue.product.dtype)
            return product if own == str(product.ty.dtype) else tirx.Cast(own, product)
        own_buffer = buffers[load.source]
        if not are_same(own_buffer.shape, load.source.shape):  # it is read in the kernel's shape
            return tirx.BufferLoad(own_buffer, list(place))
        indices = [_tvm.structural_map(i, (tirx.Var, lambda v: values.get(v, v))) for i in load.indices]
        return tirx.BufferLoad(own_buffer, indices)

    def on_cast(cast: tirx.Cast) -> tirx.Expr:
        """The product as it was summed, where it is read in that type."""
        rounded = isinstance(cast.value, tirx.Cast) and cast.value.value.same_as(product)
        return product if rounded and cast.ty.dtype == product.ty.dtype else cast

    value = _tvm.structural_map(
        epilogue.value, [(tirx.Var, lambda var: values.get(var, var)), (ir.TensorLoad, on_load), (tirx.Cast, on_cast)]
    )
    return value if str(value.ty.dtype) == dtype else tirx.Cast(dtype, value)


def _is_more(shape: Sequence[Extent], whole: Sequence[Extent]) -> bool:
    """Whether a shape has more elements than another; of unknown extents they have as many."""
    known = [extent for extent in (*shape, *whole) if isinstance(extent, int)]
    return len(known) == len(shape) + len(whole) and prod(known[: len(shape)]) > prod(known[len(shape) :])


def _point(
    place: Sequence[tirx.Expr], shape: Sequence[Extent], whole: Sequence[Extent], analyzer: sym.Analyzer
) -> list[tirx.Expr]:
    """The point of the epilogue's shape at `place` of the kernel's, of which it splits dimensions, or merges some.

    The first dimension of the kernel's, if it isn't known, is those of the epilogue's that are in front of known ones.
    """
    found: list[tirx.Expr] = []
    dims, places = list(whole), list(zip(place, shape))
    if shape and not isinstance(shape[0], int):
        (index, _), rest = places.pop(0), prod(extent for extent in shape[1:] if isinstance(extent, int))
        least = 1 + max(number for number, extent in enumerate(dims) if not isinstance(extent, int))
        ends = [end for end in range(least, len(dims) + 1) if prod(map(int, dims[end:])) == rest]
        if not ends:
            raise TileError(_NO_SPLIT.format(tuple(whole), tuple(shape)))
        found += _parts(index, dims[: ends[-1]])  # with the 1s in front of the columns, which then aren't divided
        del dims[: ends[-1]]
    while places:
        index, extent = places.pop(0)
        own: list[int] = []
        while (dims and (prod(own) < extent or not own)) or (places and prod(own) > extent):
            if prod(own) > extent:
                following, size = places.pop(0)
                index, extent = index * size + following, extent * size
            else:
                own.append(dims.pop(0))
        if prod(own) != extent:
            raise TileError(_NO_SPLIT.format(tuple(whole), tuple(shape)))
        for number, size in enumerate(own):
            inner = prod(own[number + 1 :])
            part = index if inner == 1 else tirx.floordiv(index, inner)
            found.append(analyzer.simplify(part if number == 0 else tirx.floormod(part, size)))
    # What is left has extents of 1.
    return found + [tirx.IntImm("int32", 0) for _ in dims]


def _parts(index: tirx.Expr, dims: Sequence[Extent]) -> list[tirx.Expr]:
    """The indices in dimensions that are counted as one."""
    ones = [are_same([extent], [1]) for extent in dims]
    found: list[tirx.Expr] = []
    # Of numbers from 0 on the two ways of dividing are one; this one asks for no sign of what isn't known.
    for number, extent in reversed([*enumerate(dims)]):
        if ones[number]:
            found.append(tirx.const(0, str(index.ty)))
        elif all(ones[:number]):
            found.append(index)
        else:
            size = tirx.Cast(str(index.ty), extent)
            found.append(tirx.truncmod(index, size))
            index = tirx.truncdiv(index, size)
    return found[::-1]
