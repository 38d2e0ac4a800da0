"""What a loop that becomes vectors has of its own, names and memory, kept from what upstream's pass makes of it.

Memory that is allocated within such a loop upstream takes for one of all lanes: what the last lane stores there is what
all others load. And a statement that has no vector form, as one that calls ``isnan`` or ``erf`` or depends on a
condition that isn't the same for all lanes, it runs lane by lane in a loop of its own. A name (`tirx.Bind`) that it
runs so is the last lane's for all that follows, without a word; one that has become a vector isn't known in such a
loop, and compiling fails, as it does where a truth value has a name.

So memory is allocated outside of the loop, for each lane its own, and names stand for elements of such memory where a
statement may be run lane by lane, or where they are truth values; LLVM and ptxas make registers of it. Where that can't
be done, the loop stays a loop. Divisions toward zero are kept from its vectors, too.

Source: upstream's ``src/tirx/transform/vectorize_loop.cc``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tvm_ffi
from tvm import ir, tirx

from tvm_axe._tvm.simplifying import truncated
from tvm_axe._tvm.structural import body_pass, put_around, structural_map

__all__ = ["keep_lanes"]


def keep_lanes() -> None:
    """Have upstream's vectorization keep what each lane has of its own, in every pipeline of this process."""

    def passes(
        vectorizes: Callable[[bool], ir.transform.Pass], enable_vectorize: bool = True
    ) -> list[ir.transform.Pass]:
        before = [body_pass("KeepLanes", _kept)] if enable_vectorize else []
        return [*before, vectorizes(enable_vectorize)]

    put_around(tirx.transform, "VectorizeLoop", passes)


def _kept(body: tirx.Stmt) -> tirx.Stmt:
    return structural_map(body, (tirx.For, lambda loop: _with_lanes(loop) if _is_vector(loop) else loop))


def _is_vector(loop: tirx.For) -> bool:
    return loop.kind == tirx.ForKind.VECTORIZED


def _with_lanes(loop: tirx.For) -> tirx.Stmt:
    """A loop that becomes vectors, behind the allocations of what each lane has of its own."""
    loop = _with_body(loop, truncated(loop.body), loop.kind)
    allocated: list[tirx.Buffer] = []
    bound: list[tirx.Var] = []
    tvm_ffi.structural_walk(loop.body, (tirx.AllocBuffer, lambda made: allocated.append(made.buffer)))
    tvm_ffi.structural_walk(loop.body, (tirx.Bind, lambda bind: bound.append(bind.var)))
    of_lanes = _runs_lanes(loop.body)
    names = [name for name in bound if str(name.ty) == "bool" or (of_lanes and isinstance(name.ty, ir.PrimType))]
    if not allocated and not names:
        return loop
    if not isinstance(loop.extent, tirx.IntImm) or not _are_only_indexed(allocated, loop.body):
        return _with_body(loop, loop.body, tirx.ForKind.SERIAL)
    own = _Own(loop.loop_var - loop.min, int(loop.extent), allocated, names)
    return tirx.SeqStmt([*own.allocations(), _with_body(loop, own.rewritten(loop.body), loop.kind)])


def _with_body(loop: tirx.For, body: tirx.Stmt, kind: tirx.ForKind) -> tirx.For:
    return tirx.For(loop.loop_var, loop.min, loop.extent, kind, body, loop.thread_binding, loop.annotations, loop.step)


def _runs_lanes(body: tirx.Stmt) -> bool:
    """Whether a statement of a vectorized loop's may be run lane by lane; there is no need to know where not."""
    found: list[object] = []
    tvm_ffi.structural_walk(body, ((tirx.IfThenElse, tirx.While), found.append))
    tvm_ffi.structural_walk(body, (ir.Call, lambda call: None if _has_vectors(call) else found.append(call)))
    return bool(found)


def _has_vectors(call: ir.Call) -> bool:
    return isinstance(call.op, ir.Op) and bool(call.op.get_attr("TVectorizable"))


def _are_only_indexed(buffers: Sequence[tirx.Buffer], body: tirx.Stmt) -> bool:
    """Whether buffers of known extents are loaded and stored and nothing else, which a view or a pointer would be."""
    if not all(isinstance(extent, tirx.IntImm) for buffer in buffers for extent in buffer.shape):
        return False
    given: list[Any] = []

    def on_call(call: ir.Call) -> None:
        pointed = isinstance(call.op, ir.Op) and call.op.name == "tirx.address_of"
        given.extend(arg.source if pointed and isinstance(arg, ir.TensorLoad) else arg for arg in call.args)

    tvm_ffi.structural_walk(body, (ir.Call, on_call))
    return not any(arg.same_as(buffer) for arg in given for buffer in buffers)


class _Own:
    """What each of a loop's lanes has of its own: elements of buffers, neighbouring lanes' beside each other."""

    def __init__(
        self, lane: tirx.Expr, lanes: int, allocated: Sequence[tirx.Buffer], names: Sequence[tirx.Var]
    ) -> None:
        self._lane, self._lanes = lane, lanes
        self._rooms = {buffer: self._room(buffer) for buffer in allocated}
        self._held = {name: _room(lanes, str(name.ty), str(name.name), "local") for name in names}

    def _room(self, buffer: tirx.Buffer) -> tirx.Buffer:
        extent = math.prod(int(extent) for extent in buffer.shape) * self._lanes
        return _room(extent, str(buffer.dtype), str(buffer.name), str(buffer.scope()))

    def allocations(self) -> list[tirx.Stmt]:
        return [tirx.AllocBuffer(room) for room in (*self._rooms.values(), *self._held.values())]

    def rewritten(self, body: tirx.Stmt) -> tirx.Stmt:
        rules = (
            (tirx.AllocBuffer, lambda made: tirx.Evaluate(0)),
            (tirx.Bind, self._named),
            (tirx.BufferStore, self._stored),
            (ir.TensorLoad, self._loaded),
        )
        body = structural_map(body, rules)
        return structural_map(body, (tirx.Var, self._known))

    def _named(self, bind: tirx.Bind) -> tirx.Stmt:
        room = self._held.get(bind.var)
        return bind if room is None else _store(room, bind.value, self._lane)

    def _known(self, var: tirx.Var) -> tirx.Expr:
        room = self._held.get(var)
        return var if room is None else _load(room, str(var.ty), self._lane)

    def _stored(self, store: tirx.BufferStore) -> tirx.Stmt:
        room = self._rooms.get(store.buffer)
        return store if room is None else _store(room, store.value, self._place(store))

    def _loaded(self, load: ir.TensorLoad) -> tirx.Expr:
        room = self._rooms.get(load.source)
        return load if room is None else _load(room, str(load.ty), self._place(load))

    def _place(self, access: Any) -> tirx.Expr:
        buffer = access.source if isinstance(access, ir.TensorLoad) else access.buffer
        place: Any = 0
        for index, extent in zip(access.indices, buffer.shape, strict=True):
            place = place * int(extent) + index
        return place * self._lanes + self._lane


def _room(extent: int, dtype: str, name: str, scope: str) -> tirx.Buffer:
    """Memory of so many elements; upstream's vectors of truth values are none that can be stored."""
    return tirx.decl_buffer((extent,), "int8" if dtype == "bool" else dtype, name, scope=scope)


def _store(room: tirx.Buffer, value: tirx.Expr, place: tirx.Expr) -> tirx.Stmt:
    if str(value.ty) == "bool":
        value = tirx.Select(value, tirx.const(1, "int8"), tirx.const(0, "int8"))
    return tirx.BufferStore(room, value, [place])


def _load(room: tirx.Buffer, dtype: str, place: tirx.Expr) -> tirx.Expr:
    value = room[place]
    return tirx.NE(value, tirx.const(0, "int8")) if dtype == "bool" else value
