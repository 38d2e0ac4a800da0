"""Nests that copy one buffer to another, their loops shared as the copy is to lie on the mesh."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from math import prod

from tvm import ir, s_tir, tirx

from tvm_axe.analysis.annotations import BIND, INSERTED
from tvm_axe.analysis.blocks import element
from tvm_axe.layout import Mesh
from tvm_axe.layout.sharding import Cuts
from tvm_axe.lower.infer import Sharding
from tvm_axe.lower.pieces import pieces_of


def gathered(buffer: tirx.Buffer, sharding: Sharding, why: str) -> tuple[list[tirx.Stmt], list[tirx.Buffer]]:
    """Copies of a buffer, each over one axis less than the one before; the last is held by all.

    Where several axes share a dimension, the copies are padded to whole pieces, so that those of the minor axis make up
    one of the major axis. What lies on one device of an axis goes to the others first, in the pieces of the other axes.
    """
    copies, nests, source, cuts = list[tirx.Buffer](), list[tirx.Stmt](), buffer, list(sharding.cuts)
    shape = [
        sharding.piece(dim) * prod(map(sharding.mesh.axis_size, cut)) if len(cut) > 1 else extent
        for dim, (extent, cut) in enumerate(zip(sharding.shape, cuts))
    ]
    fewer = [] if shape == list(sharding.shape) and sharding.root is None else [tuple(cuts)]
    for dim in [dim for dim, cut in enumerate(cuts) for _ in cut]:
        cuts[dim] = cuts[dim][:-1]
        fewer.append(tuple(cuts))
    for cuts_left in fewer or [tuple(cuts)]:  # what one device holds is copied once
        copies.append(tirx.decl_buffer(shape, buffer.dtype, f"{buffer.name}_whole", layout=None))
        nests.append(copy_nest(source, copies[-1], sharding.mesh, cuts_left, why))
        source = copies[-1]
    return nests, copies


def copy_nest(source: tirx.Buffer, target: tirx.Buffer, mesh: Mesh, cuts: Cuts, why: str) -> tirx.Stmt:
    """A nest that copies what two buffers have in common, its dimensions shared over `cuts`."""
    shape = [min(int(one), int(other)) for one, other in zip(source.shape, target.shape)]
    shared = shares_of(target, mesh, cuts)
    return nest_of_copy(str(target.name), shape, lambda v: (target, list(v)), lambda v: (source, list(v)), why, shared)


_Element = tuple[tirx.Buffer, list[tirx.Expr]]
_Shared = Mapping[int, Sequence[tuple[str, int, int]]]


def shares_of(buffer: tirx.Buffer, mesh: Mesh, cuts: Sequence[tuple[str, ...]]) -> _Shared:
    """How the dimensions of a buffer are shared over `cuts`: each axis, its devices, their step."""
    pieces = [pieces_of(int(extent), cut, mesh) for extent, cut in zip(buffer.shape, cuts)]
    return {dim: [(axis, mesh.axis_size(axis), step) for axis, step in own] for dim, own in enumerate(pieces)}


def nest_of_copy(
    name: str,
    shape: Sequence[int],
    target: Callable[[Sequence[tirx.Var]], _Element],
    source: Callable[[Sequence[tirx.Var]], _Element],
    why: str,
    shared: _Shared | None = None,
    exists: Callable[[Sequence[tirx.Expr]], tirx.Expr] | None = None,
) -> tirx.Stmt:
    """``target[..] = source[..]``, cast, over a shape whose dimensions are `shared`, where the element `exists`."""
    iterators = [tirx.Var(f"v{dim}", "int32") for dim in range(len(shape))]
    (to, where), (of, which) = target(iterators), source(iterators)
    value = tirx.BufferLoad(of, which)
    block = s_tir.SBlock(
        [tirx.IterVar(ir.Range(0, n), v, tirx.IterVar.DataPar) for n, v in zip(shape, iterators)],
        [element(of, which)],
        [element(to, where)],
        name,
        tirx.BufferStore(to, value if of.dtype == to.dtype else value.astype(to.dtype), where),
        annotations={INSERTED: why},
    )
    loops: list[tuple[tirx.Var, int, dict[str, str]]] = []
    values: list[tirx.Expr] = []
    predicate: tirx.Expr = tirx.IntImm("bool", 1)
    for dim, extent in enumerate(shape):
        own = tirx.Var(f"i{dim}", "int32")
        steps = (shared or {}).get(dim, ())
        devices = [tirx.Var(f"i{dim}_{level}", "int32") for level in range(len(steps))]
        loops += [(device, size, {BIND: axis}) for device, (axis, size, _) in zip(devices, steps)]
        loops.append((own, steps[-1][2] if steps else extent, {}))
        parts = [device * step for device, (_, _, step) in zip(devices, steps)]
        values.append(functools.reduce(operator.add, [*parts, own]))
        if steps and steps[0][1] * steps[0][2] > extent:
            predicate = tirx.all(predicate, values[-1] < extent)
    if exists is not None:
        predicate = tirx.all(predicate, exists(values))
    stmt: tirx.Stmt = s_tir.SBlockRealize(values, predicate, block)
    for var, extent, says in reversed(loops):
        stmt = tirx.For(var, 0, extent, tirx.ForKind.SERIAL, stmt, None, says)
    return stmt
