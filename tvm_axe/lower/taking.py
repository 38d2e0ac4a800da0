"""Taking: a device gets its share of a value out of its own slab or its peers', where no collective deals it out.

One kernel does it for any two shares of two dimensions, also where blocks don't divide, differ from part to part or are
held by several devices; of terms, it adds up the peers'. What `tvm_axe.lower.exchange` is for layouts this is for
shares, which needn't be any. Giving is the other way round: a device puts what it holds into its peers' slabs, which
is how an all-gather goes on behind what computes the share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from tvm import s_tir, tirx
from tvm.ir import Range
from tvm.sym import Analyzer

from tvm_axe.analysis.blocks import element
from tvm_axe.analysis.sizes import sides, unknown_extents
from tvm_axe.collective import SLAB
from tvm_axe.collective.ops import wide_type
from tvm_axe.collective.tensor import check_dtype, peers_of
from tvm_axe.layout import Mesh
from tvm_axe.layout.shares import Run, Share
from tvm_axe.lower.told import RANK, first_of, part_of, table, with_coordinates, with_own_sizes
from tvm_axe.lower.views import view_buffer

__all__ = ["giving", "storing", "taking"]

_COMBINE: dict[str, Callable[[tirx.Expr, tirx.Expr], tirx.Expr]] = {
    "sum": lambda a, b: a + b,
    "max": tirx.max,
    "min": tirx.min,
}
_Cut = tuple[int, Share] | None


def taking(
    shape: Sequence[int | tirx.Expr],
    dtype: str,
    source: _Cut,
    target: _Cut,
    combiner: str,
    mesh: Mesh,
    axis: str,
    view: str,
    page: int,
    rank: tirx.Var | None = None,
) -> tirx.PrimFunc:
    """The function by which a device takes what it is to hold.

    Parameters
    ----------
    shape, dtype
        Of the whole value. Extents that are no numbers are counted in variables, which are free in the function.
    source, target : (int, Share) or None
        Which dimension is shared before and after, and how; None where none is.
    combiner : str
        What the peers' terms are combined with; empty if they are values.
    mesh, axis : Mesh, str
        The devices, and the axis along which they share.
    view : str
        ``"slab"`` to read the device's own slab alone, which then holds all of it; or `axis`.
    page : int
        Bytes of a page of the devices' memory, of which slabs lie whole ones apart.
    rank : Var, optional
        What the device's coordinate is called; it stays free then (`tvm_axe.lower.shares.with_coordinates`), as the
        variables of `shape` do, and else each extent that is none is one of the function's own.

    Returns
    -------
    func : PrimFunc
        Of the source in the view, if it asks for it the device's coordinate, and the target's slab.
    """
    analyzer, own = Analyzer(), rank is None
    rank = tirx.Var(RANK, "int64") if rank is None else rank
    analyzer.bind(rank, Range.from_min_extent(_int(0), _int(peers_of(mesh, axis)[0])))
    shape = sides(shape)
    before, after = (_local(shape, cut) for cut in (source, target))
    read = view_buffer(mesh, view, before, dtype, "source", page)
    written = view_buffer(mesh, SLAB, after, dtype, "target", page)
    iterators = [tirx.Var(f"v{dim}", "int64") for dim in range(len(shape))]
    for var, extent in zip(iterators, after):
        analyzer.bind(var, Range.from_min_extent(_int(0), _int(extent)))
    index: list[tirx.Expr] = list(iterators)
    if target is not None:
        dim, share = target
        places = functools.partial(_number, rank=rank, extent=_int(shape[dim]))
        index[dim] = analyzer.simplify(_in_runs(share, iterators[dim], False, places))
    owner: tirx.Expr = rank
    if source is not None:
        dim, share = source
        at, extent = index[dim], _int(shape[dim])
        if view == SLAB:
            index[dim] = _in_runs(share, at, True, functools.partial(_own, rank=rank, extent=extent))
        else:
            owner = _in_runs(share, at, True, lambda run, place, _: _holder(run, place, extent, _int))
            index[dim] = _in_runs(share, at, True, functools.partial(_of_holder, extent=extent))
        owner, index[dim] = analyzer.simplify(owner), analyzer.simplify(index[dim])
    devices = [_int(device) for device in range(peers_of(mesh, axis)[0])] if combiner else [owner]
    loads = [tirx.BufferLoad(read, [*([] if view == SLAB else [device]), *index]) for device in devices]
    wide = wide_type(check_dtype(dtype)).name if len(loads) > 1 and combiner == "sum" else dtype
    terms: list[tirx.Expr] = [tirx.Cast(wide, load) if wide != dtype else load for load in loads]
    value = functools.reduce(_COMBINE[combiner], terms) if combiner else terms[0]
    store = tirx.BufferStore(written, tirx.Cast(dtype, value) if wide != dtype else value, iterators)
    func = storing("taken", store, loads, iterators, after, [read, written])
    return with_coordinates(with_own_sizes(func, unknown_extents(func))[0], 1, [rank])[0] if own else func


def giving(
    shape: Sequence[int | tirx.Expr],
    dtype: str,
    source: tuple[int, Share],
    mesh: Mesh,
    axis: str,
    page: int,
    rank: tirx.Var,
) -> tirx.PrimFunc:
    """The function by which a device stores what it holds of a value to every device, which then has all of it.

    What several devices hold each of them stores: they have computed it by the same function of the same numbers.

    Parameters
    ----------
    shape, dtype
        Of the whole value.
    source : (int, Share)
        Which dimension is shared, and how.
    mesh, axis, page, rank
        As of `taking`.

    Returns
    -------
    func : PrimFunc
        Of the source's slab and the target in the view of `axis`; the device's coordinate is free.
    """
    shape = sides(shape)
    local, devices = _local(shape, source), peers_of(mesh, axis)[0]
    read = view_buffer(mesh, SLAB, local, dtype, "source", page)
    written = view_buffer(mesh, axis, shape, dtype, "target", page)
    iterators = [tirx.Var(f"v{dim}", "int64") for dim in range(len(shape))]
    peer, analyzer = tirx.Var("vpeer", "int64"), Analyzer()
    for var, extent in zip([*iterators, rank], [*local, devices]):
        analyzer.bind(var, Range.from_min_extent(_int(0), _int(extent)))
    dim, share = source
    at: list[tirx.Expr] = list(iterators)
    places = functools.partial(_number, rank=rank, extent=_int(shape[dim]))
    at[dim] = analyzer.simplify(_in_runs(share, iterators[dim], False, places))
    load = tirx.BufferLoad(read, iterators)
    store = tirx.BufferStore(written, load, [peer, *at])
    # A row is stored to all devices while it is in the cache.
    order, extents = [*iterators[:-1], peer, iterators[-1]], [*local[:-1], devices, local[-1]]
    return storing("given", store, [load], order, extents, [read, written])


def storing(
    name: str,
    store: tirx.BufferStore,
    loads: Sequence[tirx.BufferLoad],
    iterators: Sequence[tirx.Var],
    extents: Sequence[int | tirx.Expr],
    params: Sequence[tirx.Var],
) -> tirx.PrimFunc:
    """The function of one block, which stores an element for all values of its iterators, with a loop for each.

    What it loads are elements too. What else stands in them is free in the function.
    """
    domains = [Range.from_min_extent(_int(0), _int(extent)) for extent in extents]
    block = s_tir.SBlock(
        [tirx.IterVar(domain, var, tirx.IterVar.DataPar) for domain, var in zip(domains, iterators)],
        [element(load.source, load.indices) for load in loads],
        [element(store.buffer, store.indices)],
        name,
        store,
    )
    loops = [tirx.Var(f"i{at}", "int64") for at in range(len(extents))]
    body: tirx.Stmt = s_tir.SBlockRealize(loops, True, block)
    for loop, extent in reversed(list(zip(loops, extents))):
        body = tirx.For(loop, _int(0), _int(extent), tirx.ForKind.SERIAL, body)
    root = s_tir.SBlockRealize([], True, s_tir.SBlock([], [], [], "root", body))
    return tirx.PrimFunc(list(params), root).with_attrs({"s_tir": True, "tirx.noalias": True})


def _int(number: int | tirx.Expr) -> tirx.Expr:
    return tirx.IntImm("int64", number) if isinstance(number, int) else number


def _local(shape: Sequence[int | tirx.Expr], cut: _Cut) -> tuple[int | tirx.Expr, ...]:
    def held(share: Share, extent: int | tirx.Expr) -> int | tirx.Expr:
        return part_of(_int(extent), share.devices) if share.is_symbolic else share.local

    return tuple(held(cut[1], n) if cut is not None and cut[0] == dim else n for dim, n in enumerate(shape))


def _in_runs(share: Share, at: tirx.Expr, whole: bool, make: Callable[[Run, tirx.Expr, int], tirx.Expr]) -> tirx.Expr:
    """What `make` makes of the run that index `at` of the dimension, or of what a device has of it, is in.

    It is given the run, the index within it, and where the run begins on the other side.
    """
    found: tirx.Expr | None = None
    for run, begins in reversed(list(zip(share.runs, share.begins()))):
        begin, other = begins if whole else begins[::-1]
        made = make(run, at - _int(begin), other)
        length = run.length if whole else run.local
        found = made if found is None else tirx.Select(at < _int(begin + length), made, found)
    assert found is not None  # there is a run
    return found


def _number(run: Run, at: tirx.Expr, begin: int, rank: tirx.Expr, extent: tirx.Expr) -> tirx.Expr:
    """The index in the dimension, of an extent, of what device `rank` has at a place of a run."""
    if run.symbolic:
        return at + first_of(extent, rank, len(run.starts))
    if run.is_whole:
        return at + _int(begin)
    outer, middle, inner = _digits(run, at, run.size)
    middle = middle + table(rank, run.starts, "int64")
    return _int(begin) + (outer * _int(run.extent) + middle) * _int(run.inner) + inner


def _digits(run: Run, at: tirx.Expr, size: int) -> tuple[tirx.Expr, tirx.Expr, tirx.Expr]:
    """The digits of a place of a run, of which the middle one has so many values."""
    return at // _int(size * run.inner), at // _int(run.inner) % _int(size), at % _int(run.inner)


def _own(run: Run, at: tirx.Expr, begin: int, rank: tirx.Expr, extent: tirx.Expr) -> tirx.Expr:
    """Where device `rank` has an index of a run."""
    if run.symbolic:
        return at - first_of(extent, rank, len(run.starts))
    return _placed(run, at, begin, table(rank, run.starts, "int64"))


def _of_holder(run: Run, at: tirx.Expr, begin: int, extent: tirx.Expr) -> tirx.Expr:
    """Where the first device that has an index of a run has it."""
    devices = len(run.starts)
    if run.symbolic:
        return at - _holder(run, at, extent, lambda device: first_of(extent, _int(device), devices))
    return _placed(run, at, begin, _holder(run, at, extent, lambda device: _int(run.starts[device])))


def _placed(run: Run, at: tirx.Expr, begin: int, start: tirx.Expr) -> tirx.Expr:
    if run.is_whole:
        return at + _int(begin)
    outer, middle, inner = _digits(run, at, run.extent)
    return _int(begin) + (outer * _int(run.size) + middle - start) * _int(run.inner) + inner


def _holder(run: Run, at: tirx.Expr, extent: tirx.Expr, make: Callable[[int], tirx.Expr]) -> tirx.Expr:
    """What `make` makes of the first device that has an index of a run."""
    if run.is_whole:
        return make(0)
    last = len(run.starts) - 1
    middle = at if run.symbolic else _digits(run, at, run.extent)[1]
    found = make(last)
    for device in range(last - 1, -1, -1):
        # Of any extent the quotient would say as much, and a quotient by what may be 0 is more than a comparison.
        stop = _int(device + 1) * part_of(extent, last + 1) if run.symbolic else _int(run.starts[device] + run.size)
        found = tirx.Select(middle < stop, make(device), found)
    return found
