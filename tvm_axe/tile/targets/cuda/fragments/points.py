"""Parallel: its body once for every point that a thread meets.

Threads go along the fragment that the body stores to, else one that it reads, else row-major. Neighbouring points of a
thread that access neighbouring addresses do so at once: their loads come before their bodies, their stores after. So it
is where all of a body is under one condition that neighbouring points share, as of a tile that reaches over an end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm_ffi
from tvm import ir, sym, tirx
from tvm.script import tirx as T

from tvm_axe.analysis.expressions import is_choice
from tvm_axe.layout import ComposeLayout, Layout
from tvm_axe.tile.atomics import formers, joined
from tvm_axe.tile.bodies import chained
from tvm_axe.tile.nodes import Parallel
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.strides import are_pieces
from tvm_axe.tile.targets.cuda.fragments.atomics import join, swap
from tvm_axe.tile.targets.cuda.fragments.copies import keeps_together
from tvm_axe.tile.targets.cuda.fragments.emitter import Emitter, Memory, Registers
from tvm_axe.tile.targets.cuda.fragments.exchanges import (
    Anchor,
    along,
    anchor_of,
    coordinates,
    exchanged,
    put,
    registers_of,
    take,
)
from tvm_axe.tile.targets.cuda.fragments.layout import evaluate
from tvm_axe.tile.targets.cuda.fragments.walk import (
    StridedWalk,
    Walk,
    find_registers,
    vector_lengths,
)
from tvm_axe.tile.walking import substitute_in, variables_in


def parallel(emitter: Emitter, node: Parallel) -> None:
    """Emit a Parallel; of fragments that threads don't hold as they need them, through shared memory."""
    tiles = exchanged(node, registers_of(emitter, node), emitter.threads.count)
    if not tiles:
        _points(emitter, node)
        return
    placed = put(emitter, node, tiles)
    _points(placed, node)
    take(emitter, node, tiles, placed)


def _points(emitter: Emitter, node: Parallel) -> None:
    """The points, each by a thread that holds all that it needs."""
    held = registers_of(emitter, node)
    anchor = anchor_of(node, held)
    place: list[int | None] = list(range(len(node.vars))) if anchor is None else anchor.place
    lane = _lane(emitter, node, anchor)
    found = _Together([], 1, node.body) if lane is None else _together(emitter, node, lane)
    length = found.length
    if anchor is None:
        walk: Walk = StridedWalk(node.extents, emitter.threads.count, length, lanes=True)
    else:
        walk = along(anchor, held)
    outer = len(walk.digits) - (length.bit_length() - 1)
    known = coordinates(node, walk, anchor)
    thread, none = emitter.threads.index, tirx.const(0, "int32")
    with walk.steps(0, outer) as steps:
        first = [*steps, *[none] * (len(walk.digits) - outer)]
        with emitter.guarded(walk.conditions(thread, first)):
            start = walk.index(thread, first)
            body = _Body(emitter, node, walk, known, found.accesses)
            body.values = {var: none if d is None else start[d] for var, d in zip(node.vars, place)}
            body.steps = first
            with body.where(found.condition):
                body.load(length)
                with walk.steps(outer) as lanes:
                    index = walk.index(thread, [*steps, *lanes])
                    body.values = {var: none if d is None else index[d] for var, d in zip(node.vars, place)}
                    body.steps = [*steps, *lanes]
                    body.lane = sum((step << at for at, step in enumerate(reversed(lanes))), none)
                    body.allocate()
                    body.emit(found.body)
                body.values = {var: none if d is None else start[d] for var, d in zip(node.vars, place)}
                body.steps = first
                body.store(length)


# ---- What is accessed at once ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Lane:
    """The variable that runs over a thread's neighbouring points, and how many there are at most."""

    var: tirx.Var
    most: int


@dataclass
class _Access:
    """A load or store by neighbouring points of neighbouring elements; `held` is where they are meanwhile."""

    tile: Tile
    indices: tuple[Any, ...]
    stores: bool
    held: Any = None


def _lane(emitter: Emitter, node: Parallel, anchor: Anchor | None) -> _Lane | None:
    if anchor is None:
        return _Lane(node.vars[-1], node.extents[-1] & -node.extents[-1])
    digits = emitter.registers(anchor.tile).fragment.register_digits
    if not digits or (digits[-1].stride, digits[-1].weight) != (1, 1) or digits[-1].dimension not in anchor.place:
        return None
    dimension = digits[-1].dimension
    sizes = digits[-1].extent | anchor.start[dimension] | anchor.extents[dimension]
    return _Lane(node.vars[anchor.place.index(dimension)], sizes & -sizes)


@dataclass
class _Together:
    """The accesses to memory that neighbouring points make at once, by how many points.

    They are of what is left of the node's `body` under a `condition` that is the same for those points, if any.
    """

    accesses: list[_Access]
    length: int
    body: tirx.Stmt
    condition: Any = None


def _together(emitter: Emitter, node: Parallel, lane: _Lane) -> _Together:
    """What neighbouring points do at once: all that they do, or all that is under the one condition of the body."""
    body, condition = node.body, None
    if isinstance(body, tirx.IfThenElse) and body.else_case is None:
        body, condition = body.then_case, body.condition
    sure = _Unconditional(body)
    stored = [tile for tile, _, stores in node.accesses if stores]
    joins = {tile for tile, _ in node.joins}
    accesses = [
        _Access(tile, indices, stores)
        for tile, indices, stores in sure.accesses(node)
        if isinstance(emitter.storages[tile], Memory) and stored.count(tile) == int(stores) and tile not in joins
    ]
    best = _Together([], 1, node.body)
    least = float(len(accesses))
    for length in vector_lengths(8):
        if lane.most % length or length == 1 or not is_shared(emitter.analyzer, condition, lane.var, length):
            continue
        fitting = [
            access
            for access in accesses
            if length * int(tvm_ffi.dtype(access.tile.dtype).bits) <= 128
            if not sure.names & variables_in(*access.indices) and _are_neighbours(emitter, access, lane.var, length)
        ]
        instructions = len(accesses) - len(fitting) * (1 - 1 / length)  # a point
        if instructions < least:
            best, least = _Together(fitting, length, body, condition), instructions
    return best


def is_shared(analyzer: sym.Analyzer, condition: Any, var: tirx.Var, length: int) -> bool:
    """Whether a condition, if there is one, is the same at `length` points from a multiple of it on."""
    if condition is None or var not in variables_in(condition):
        return True
    if isinstance(condition, ir.prim.And):
        return all(is_shared(analyzer, part, var, length) for part in (condition.a, condition.b))
    if not isinstance(condition, ir.prim.LT) or var in variables_in(condition.b):
        return False
    first = substitute_in(condition.a, {var: tirx.const(0, "int32")})
    multiples = (bool(analyzer.can_prove(each % length == 0)) for each in (first, condition.b))
    return bool(analyzer.can_prove_equal(condition.a, first + var)) and all(multiples)


class _Unconditional:
    """What every point of a body does: its accesses, and the names that the body gives."""

    def __init__(self, body: tirx.Stmt) -> None:
        self.names: set[tirx.Var] = set()
        self.branches = False
        tvm_ffi.structural_walk(body, (tirx.Bind, lambda bind: self.names.add(bind.var)))
        tvm_ffi.structural_walk(body, ((tirx.IfThenElse, tirx.Select, ir.Call), self._meet))

    def _meet(self, found: Any) -> None:
        if not isinstance(found, ir.Call) or is_choice(found):
            self.branches = True

    def accesses(self, node: Parallel) -> list[tuple[Tile, tuple[Any, ...], bool]]:
        """All accesses, if none is under a condition; else none."""
        return [] if self.branches else list(node.accesses)


def _are_neighbours(emitter: Emitter, access: _Access, var: tirx.Var, length: int) -> bool:
    layout = emitter.memory(access.tile).layout
    return is_vector(emitter.analyzer, (access.tile, access.indices), layout, var, length)


def is_vector(
    analyzer: sym.Analyzer,
    access: tuple[Tile, Sequence[Any]],
    layout: Layout | ComposeLayout | None,
    var: tirx.Var,
    length: int,
) -> bool:
    """Whether `length` points from a multiple of it on access as many neighbours, aligned; of a tile, by indices."""
    tile, (*outer, last) = access
    if var in variables_in(*outer) or isinstance(last, int):
        return False
    first = substitute_in(last, {var: tirx.const(0, "int32")})
    if not (analyzer.can_prove_equal(last, first + var) and analyzer.can_prove(first % length == 0)):
        return False
    if layout is not None:
        return keeps_together(layout, tile.shape, length)
    return are_pieces(tile, length, analyzer)


# ---- The body ----------------------------------------------------------------------------------------------------


class _Body:
    """The body at one step of the walk."""

    def __init__(
        self, emitter: Emitter, node: Parallel, walk: Walk, known: dict[tirx.Var, np.ndarray], accesses: list[_Access]
    ) -> None:
        self.emitter, self.node, self.walk, self.known, self.accesses = emitter, node, walk, known, accesses
        self.values: dict[tirx.Var, Any] = {}
        self.steps: Sequence[Any] = ()
        self.lane: Any = 0
        self.rooms: dict[tirx.Var, Any] = {}

    @contextlib.contextmanager
    def where(self, condition: Any) -> Iterator[None]:
        """What is emitted inside is done where a condition holds, if there is one."""
        if condition is None:
            yield
            return
        with T.If(self._expression(condition)), T.Then():
            yield

    def allocate(self) -> None:
        """Make room for names: those that are held in memory, and what compare-and-swaps find.

        The latter are read behind the conditions that they are under.
        """
        self.rooms = {name: T.alloc_buffer((1,), name.ty.dtype, scope="local") for name in chained(self.node.body)}
        for former in formers(self.node.body):
            room = T.alloc_buffer((1,), former.ty.dtype, scope="local")
            T.buffer_store(room, tirx.const(0, former.ty.dtype), [0])
            self.values[former] = room[0]

    def load(self, length: int) -> None:
        """Load what neighbouring points read at once, and make room for what they write."""
        for access in self.accesses:
            held = T.alloc_buffer((length,), access.tile.dtype, scope="local")
            if not access.stores:
                buffer, address = self._address(access, length)
                with T.vectorized(length) as lane:
                    place = (*address[:-1], address[-1] + lane)
                    T.buffer_store(held, buffer[place], [lane])
            access.held = held

    def store(self, length: int) -> None:
        """Store what neighbouring points wrote."""
        for access in self.accesses:
            if access.stores:
                buffer, address = self._address(access, length)
                with (
                    self.emitter.guarded(self.walk.first_copy(self.emitter.threads.index)),
                    T.vectorized(length) as lane,
                ):
                    T.buffer_store(buffer, access.held[lane], [*address[:-1], address[-1] + lane])

    def _address(self, access: _Access, length: int) -> tuple[Any, list[Any]]:
        stored, indices = self.emitter.memory(access.tile), [self._expression(i) for i in access.indices]
        return stored.buffer, stored.address(indices, access.tile.shape, length)

    def emit(self, stmt: tirx.Stmt) -> None:
        """Emit a statement for one point."""
        if isinstance(stmt, tirx.SeqStmt):
            for inner in stmt.seq:
                self.emit(inner)
        elif isinstance(stmt, tirx.IfThenElse):
            with T.If(self._expression(stmt.condition)):
                with T.Then():
                    self.emit(stmt.then_case)
                if stmt.else_case is not None:
                    with T.Else():
                        self.emit(stmt.else_case)
        elif isinstance(stmt, tirx.Bind):
            value = evaluate(stmt.value, self.known)
            if value is not None:
                self.known[stmt.var] = value
            given = self._expression(stmt.value)
            room = self.rooms.get(stmt.var)
            if room is not None:
                T.buffer_store(room, given, [0])
            self.values[stmt.var] = T.bind(given) if room is None else room[0]
        else:
            self._store(stmt)

    def _expression(self, expr: Any) -> Any:
        return self.emitter.rewritten(expr, self.values, self._loaded)

    def _loaded(self, tile: Tile, load: Any) -> Any:
        stored = self.emitter.storages[tile]
        if tile.scope == "fragment" and isinstance(stored, Registers):
            return stored.buffer[self._register(tile, load.indices)]
        held = self._held(tile, load.indices, stores=False)
        if held is not None:
            return held[self.lane]
        if tile.scope != "fragment":
            return None
        assert isinstance(stored, Memory), tile
        return stored.buffer[tuple(stored.address([self._expression(i) for i in load.indices], tile.shape))]

    def _held(self, tile: Tile, indices: Sequence[Any], stores: bool) -> Any:
        for access in self.accesses:
            same = (access.tile, access.stores) == (tile, stores) and access.held is not None
            if same and tvm_ffi.structural_equal(list(access.indices), list(indices)):
                return access.held
        return None

    def _store(self, stmt: tirx.BufferStore) -> None:
        how = joined(stmt.value)
        emitter, value = self.emitter, self._expression(stmt.value if how is None else how.value)
        tile = emitter.tiles[stmt.buffer]
        stored = emitter.storages[tile]
        if isinstance(stored, Registers):
            T.buffer_store(stored.buffer, value, [self._register(tile, stmt.indices)])
            return
        held = self._held(tile, stmt.indices, stores=True)
        if held is not None:
            T.buffer_store(held, value, [self.lane])
            return
        indices = [self._expression(index) for index in stmt.indices]
        address = stored.address(indices, tile.shape)
        if how is not None and how.former is not None:  # each point is one thread's: `anchor_of`
            compare = self._expression(how.compare)
            found = swap(tile, stored.buffer.ptr_to(address), compare, value)
            T.buffer_store(self.values[how.former].source, found, [0])
            return
        with emitter.guarded(self.walk.first_copy(emitter.threads.index)):
            if how is None:
                T.buffer_store(stored.buffer, value, address)
            else:
                join(how.kind, tile, stored.buffer.ptr_to(address), value)

    def _register(self, tile: Tile, indices: Sequence[Any]) -> tirx.Expr:
        held = self.emitter.registers(tile)
        index = [evaluate(part, self.known) for part in indices]
        found = find_registers(self.walk, held.fragment, [part for part in index if part is not None])
        assert found is not None, (str(self.node), tile.name, indices)  # or it would have been exchanged
        base, coefficients = found
        return sum((step * c for step, c in zip(self.steps, coefficients) if c), tirx.const(base, "int32"))
