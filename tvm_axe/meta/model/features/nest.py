"""A scheduled function as the features see it: blocks under loops, and how far each loop moves each access.

A block is taken as its declared reads and writes; its body isn't walked. An index is taken as a sum of loop variables
with coefficients: exact for the affine indices that schedules leave and for the parts of fused loops, and an estimate
behind any other division or remainder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from tvm import s_tir, tirx
from tvm.ir import IRModule

from tvm_axe.layout.dtypes import dtype_bits

__all__ = ["Access", "Loop", "Nest", "nests", "shared_loops"]

_KINDS = {
    tirx.ForKind.SERIAL: "serial",
    tirx.ForKind.PARALLEL: "parallel",
    tirx.ForKind.VECTORIZED: "vectorized",
    tirx.ForKind.UNROLLED: "unrolled",
}
_PLAIN = frozenset(_KINDS.values())

_Steps = Mapping[int, float]  # by loop, numbered from the outermost: how much one iteration adds
_NONE: _Steps = {}


@dataclass(frozen=True)
class Loop:
    """A loop around a block.

    Attributes
    ----------
    extent
        Number of iterations; 1 where it isn't constant.
    kind
        ``serial``, ``parallel``, ``vectorized``, ``unrolled``, or the thread axis it is bound to (``threadIdx.x``).
    """

    extent: int
    kind: str


@dataclass(frozen=True)
class Access:
    """A region that each instance of a block reads or writes.

    Attributes
    ----------
    buffer
        Name of the buffer.
    scope
        Its memory: ``global``, ``shared``, ``local``, ...
    shape, bytes
        Its extents, and the size of an element in bytes.
    steps
        For each dimension, by loop: how far one iteration moves the index.
    widths
        For each dimension: how many elements an instance touches.
    written
        Whether it is a write.
    """

    buffer: str
    scope: str
    shape: tuple[int, ...]
    bytes: float
    steps: tuple[_Steps, ...]
    widths: tuple[int, ...]
    written: bool

    def touched(self, extents: Mapping[int, int]) -> float:
        """Elements that the loops in `extents` touch together, each run that often."""
        total = 1.0
        for size, steps, width in zip(self.shape, self.steps, self.widths):
            reach = width + sum(abs(step) * (extents[loop] - 1) for loop, step in steps.items() if loop in extents)
            total *= min(size, max(1.0, reach))
        return total

    def stride(self, loop: int) -> float:
        """How many elements apart in memory two neighbouring iterations of a loop are."""
        distance, row = 0.0, 1
        for size, steps in zip(reversed(self.shape), reversed(self.steps)):
            distance += row * steps.get(loop, 0.0)
            row *= size
        return abs(distance)


@dataclass(frozen=True)
class Nest:
    """A block below the root and the loops around it, outermost first.

    Attributes
    ----------
    name
        The block's name.
    loops, accesses
        Around it, and in it.
    reduces
        Whether it sums into what it writes.
    annotations
        The block's, those that are texts or integers.
    """

    name: str
    loops: tuple[Loop, ...]
    accesses: tuple[Access, ...]
    reduces: bool
    annotations: Mapping[str, str | int]

    @property
    def iterations(self) -> float:
        """How often the block runs."""
        return float(self.extent(*{loop.kind for loop in self.loops}))

    def kinds(self, *kinds: str) -> list[int]:
        """The loops of these kinds, by number."""
        return [n for n, loop in enumerate(self.loops) if loop.kind in kinds]

    def extent(self, *kinds: str) -> int:
        """Product of the extents of the loops of these kinds; a thread axis that is bound twice is one loop."""
        loops = [self.loops[n] for n in self.kinds(*kinds)]
        threads = {loop.kind: loop.extent for loop in loops if loop.kind not in _PLAIN}
        return math.prod(loop.extent for loop in loops if loop.kind in _PLAIN) * math.prod(threads.values())

    def reads(self, buffer: str) -> bool:
        """Whether it reads a buffer."""
        return any(access.buffer == buffer and not access.written for access in self.accesses)

    def inside(self, first: int) -> dict[int, int]:
        """The loops from number `first` inwards with their extents, as `Access.touched` takes them."""
        return {n: loop.extent for n, loop in enumerate(self.loops) if n >= first}


def shared_loops(a: Nest, b: Nest) -> int:
    """How many outermost loops two nests have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(a.loops, b.loops)))


def nests(mod: IRModule) -> list[Nest]:
    """The innermost blocks of the function ``main``, in their order."""
    return list(_walk(mod["main"].body, (), {}))


def _walk(stmt: tirx.Stmt, loops: tuple[Loop, ...], known: dict[tirx.Var, _Steps]) -> Iterator[Nest]:
    """The blocks of a statement; `known` has what each variable in scope is a sum of."""
    if isinstance(stmt, tirx.For):
        extent = int(stmt.extent) if isinstance(stmt.extent, tirx.IntImm) else 1
        thread = stmt.thread_binding
        kind = _KINDS.get(stmt.kind, "serial") if thread is None else str(thread.thread_tag)
        known[stmt.loop_var] = {len(loops): 1.0}
        yield from _walk(stmt.body, (*loops, Loop(extent, kind)), known)
    elif isinstance(stmt, tirx.SeqStmt):
        for part in stmt.seq:
            yield from _walk(part, loops, known)
    elif isinstance(stmt, s_tir.SBlockRealize):
        block = stmt.block
        for iterator, value in zip(block.iter_vars, stmt.iter_values):
            known[iterator.var] = _steps(value, known, loops)
        inner = list(_walk(block.body, loops, known))
        if inner:
            yield from inner
        elif loops:
            yield _nest(block, loops, known)
    elif isinstance(stmt, tirx.IfThenElse):
        yield from _walk(stmt.then_case, loops, known)
    elif isinstance(stmt, tirx.AttrStmt):
        yield from _walk(stmt.body, loops, known)


def _nest(block: s_tir.SBlock, loops: tuple[Loop, ...], known: Mapping[tirx.Var, _Steps]) -> Nest:
    accesses = [_access(region, False, known, loops) for region in block.reads]
    accesses += [_access(region, True, known, loops) for region in block.writes]
    reduces = any(it.iter_type == tirx.IterVar.CommReduce for it in block.iter_vars)
    annotations: dict[str, str | int] = {}
    for key, value in block.annotations.items():
        if isinstance(value, str):
            annotations[str(key)] = str(value)
        elif isinstance(value, int | tirx.IntImm):
            annotations[str(key)] = int(value)
    return Nest(str(block.name_hint), loops, tuple(accesses), reduces, annotations)


def _access(
    region: tirx.BufferRegion, written: bool, known: Mapping[tirx.Var, _Steps], loops: Sequence[Loop]
) -> Access:
    buffer = region.source
    return Access(
        buffer=str(buffer.name),
        scope=str(buffer.scope()),
        shape=tuple(_constant(size) for size in buffer.shape),
        bytes=dtype_bits(str(buffer.dtype)) / 8,
        steps=tuple(_steps(part.min, known, loops) for part in region.region),
        widths=tuple(_constant(part.extent) for part in region.region),
        written=written,
    )


def _constant(value: tirx.Expr | int) -> int:
    return int(value) if isinstance(value, int | tirx.IntImm) else 1


def _steps(index: tirx.Expr, known: Mapping[tirx.Var, _Steps], loops: Sequence[Loop]) -> _Steps:
    """What an index is a sum of, without its constant."""
    if isinstance(index, tirx.Var):
        return known.get(index, _NONE)
    if isinstance(index, tirx.Add | tirx.Sub):
        a, b = _steps(index.a, known, loops), _steps(index.b, known, loops)
        if not b:
            return a
        sign = 1 if isinstance(index, tirx.Add) else -1
        return {loop: a.get(loop, 0.0) + sign * b.get(loop, 0.0) for loop in (*a, *b)}
    if isinstance(index, tirx.Mul | tirx.FloorDiv | tirx.FloorMod):
        a = _steps(index.a, known, loops)
        if not isinstance(index.b, tirx.IntImm):
            return a
        factor = int(index.b)
        if isinstance(index, tirx.Mul):
            return {loop: step * factor for loop, step in a.items()}
        # Of a fused loop: what steps by whole factors is the quotient, the rest the remainder if it stays below one.
        whole = {loop: step / factor for loop, step in a.items() if step % factor == 0}
        rest = {loop: step for loop, step in a.items() if step % factor != 0}
        if isinstance(index, tirx.FloorMod):
            return rest
        if sum(abs(step) * (loops[loop].extent - 1) for loop, step in rest.items()) < factor:
            return whole
        return {**whole, **{loop: step / factor for loop, step in rest.items()}}
    return _NONE
