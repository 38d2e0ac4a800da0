"""What a tile program means, in numpy: the judge of every lowering.

`interpret` runs a program's grid points one after the other, in an order drawn at random, and what a block does in
order. Floats are float64 and are never rounded, integers wrap as their types do. A tile on chip begins as NaN, or as an
unlikely integer, and every iteration of the grid makes its own.

It is strict: reading or writing outside of a tile or a tensor (but for the overrun of a copy), what two points of a
`parallel` or two blocks do to one element in no order, and integers, indices and conditions that were never written,
are errors (`Fault`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from expressions import Evaluator, wrapped
from tvm import ir, tirx

from tvm_axe.tile.assuming import find_broken
from tvm_axe.tile.atomics import joined
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
from tvm_axe.tile.printing import kind, line
from tvm_axe.tile.program import TileProgram, TileSequence
from tvm_axe.tile.regions import Region, Tile
from tvm_axe.tile.sequences import read_function

POISON = 0x5A5A5A5A5A5A5A5A
NOBODY, MANY = -1, -2
_JOINS = {"add": np.add, "max": np.maximum, "min": np.minimum}


class Fault(Exception):
    """The program does what no lowering needs to give a meaning to."""


class Unsignalled(Fault):
    """A wait for what nobody has signalled yet."""


class TooLarge(Fault):
    """A store of a larger magnitude than the caller of `interpret` allows."""


def interpret(
    program: TileProgram | TileSequence | tirx.PrimFunc,
    *arguments: np.ndarray | float,
    rng: np.random.Generator | None = None,
    largest: Mapping[str, float] | None = None,
) -> list[np.ndarray]:
    """Run a program on an array or a number for each parameter; arrays stay as they are.

    Blocks run one after the other, so a wait is for flags that the arrays have set, and those of blocks before it.

    Parameters
    ----------
    rng : draws the order of the grid's points
    largest : by type, the largest magnitude that may be stored, for integers in floats that are to be exact

    Returns
    -------
    What each tensor holds afterwards, outputs or not: float64, int64 or bool.
    """
    program = read_function(program) if isinstance(program, tirx.PrimFunc) else program
    given = dict(zip(program.func.params, arguments, strict=True))
    memory = {tile.buffer: np.asarray(given[tile.buffer]) for tile in program.params}
    sizes = _sizes(program, list(memory.values()))
    sizes |= {scalar: np.asarray(given[scalar]) for scalar in program.scalars}
    memory = {buffer: _widened(array) for buffer, array in memory.items()}
    if isinstance(program, TileSequence):  # whose scratch begins as tiles on chip do
        evaluate = Evaluator(sizes, _no_load)
        for tile in program.scratch:
            shape = tuple(int(evaluate(extent)) for extent in tile.shape)
            memory[tile.buffer] = _widened(_poison(replace(tile, shape=shape)))
    for kernel in program.kernels:
        _run_all(kernel, memory, sizes, rng or np.random.default_rng(0), largest or {})
    return [memory[tile.buffer] for tile in program.params]


def _run_all(
    program: TileProgram,
    memory: Mapping[tirx.Buffer, np.ndarray],
    sizes: Mapping[tirx.Var, np.ndarray],
    rng: np.random.Generator,
    largest: Mapping[str, float],
) -> None:
    """Run all blocks of a kernel, on what kernels before it have left."""
    broken = find_broken(program.assumptions, {str(var.name): int(size) for var, size in sizes.items()})
    if broken is not None:
        raise Fault(f"{program.name} assumes {broken}")
    points = list(np.ndindex(*(_extents(program, sizes))))
    rng.shuffle(points)
    tensors = {tile: _Memory(tile, memory[tile.buffer], "block") for tile in program.params}
    for number, point in enumerate(points):
        _run(program, number, point, tensors, sizes, largest)


def _run(
    program: TileProgram,
    number: int,
    point: tuple[int, ...],
    tensors: Mapping[Tile, _Memory],
    sizes: Mapping[tirx.Var, np.ndarray],
    largest: Mapping[str, float],
) -> None:
    """Run the block of a point."""
    with np.errstate(all="ignore"):
        for event in _block(program, number, point, tensors, sizes, largest).run(program.body):
            if isinstance(event, Unsignalled):
                raise event


def _block(
    program: TileProgram,
    number: int,
    point: tuple[int, ...],
    tensors: Mapping[Tile, _Memory],
    sizes: Mapping[tirx.Var, np.ndarray],
    largest: Mapping[str, float],
) -> _Block:
    """The block of a point, before it begins."""
    on_chip = {tile: _Memory(tile, _poison(tile), "point") for tile in program.tiles}
    values = {**sizes, **{var: np.asarray(x) for (var, _), x in zip(program.grid, point)}}
    return _Block(number, {**tensors, **on_chip}, values, largest)


def _sizes(program: TileProgram | TileSequence, arrays: Sequence[np.ndarray]) -> dict[tirx.Var, np.ndarray]:
    """The symbolic extents and strides of parameters, as arrays have them; every other extent must be the array's."""
    sizes: dict[tirx.Var, np.ndarray] = {}
    steps: dict[tirx.Var, np.ndarray] = {}
    for tile, array in zip(program.params, arrays, strict=True):
        assert len(tile.shape) == array.ndim, f"{tile}: an array of shape {array.shape}"
        for extent, size in zip(tile.shape, array.shape):
            known = sizes.setdefault(extent, np.asarray(size)) if isinstance(extent, tirx.Var) else extent
            assert known == size, f"{tile}: an array of shape {array.shape}"
        steps |= {own: np.asarray(step // array.itemsize) for own, step in zip(tile.strides or (), array.strides)}
    return {own: step for own, step in steps.items() if isinstance(own, tirx.Var)} | sizes


def _extents(program: TileProgram, sizes: Mapping[tirx.Var, np.ndarray]) -> list[int]:
    evaluate = Evaluator(dict(sizes), _no_load)
    return [int(evaluate(extent)) for _, extent in program.grid]


def _no_load(load: ir.TensorLoad, *_: object) -> np.ndarray:
    raise Fault(f"a grid's extent loads {load}")


def _widened(array: np.ndarray) -> np.ndarray:
    kind = "int64" if array.dtype.kind in "iu" else "bool" if array.dtype.kind == "b" else "float64"
    return array.astype(kind)


def _poison(tile: Tile) -> np.ndarray:
    if "float" in tile.dtype:
        return np.full(tile.shape, np.nan)
    return np.full(tile.shape, POISON if tile.dtype != "bool" else True)


class _Memory:
    """A tile's or a tensor's elements, and who has touched each since `forget`: `touching` says who there may be."""

    def __init__(self, tile: Tile, data: np.ndarray, touching: str) -> None:
        self.tile, self.data, self.touching = tile, data, touching
        self.forget()

    def forget(self) -> None:
        """From here on, an order holds between what was done and what will be."""
        self.reader, self.writer = (np.full(self.data.shape, NOBODY) for _ in range(2))

    def check(self, where: tuple, who: np.ndarray, stores: bool) -> None:
        """Refuse what isn't ordered: a store to what another touches, a load of what another stores."""
        others = [self.writer[where]] + ([self.reader[where]] if stores else [])
        if any(((other != NOBODY) & (other != who)).any() for other in others):
            raise Fault(f"{self.tile}: two {self.touching}s touch one element, and one of them stores it")
        if stores:
            self.writer[where] = who
            if self.touching == "point" and (self.writer[where] != who).any():
                raise Fault(f"{self.tile}: two points store one element")
        else:
            readers = self.reader[where]
            self.reader[where] = np.where((readers == NOBODY) | (readers == who), who, MANY)

    def join(self, where: tuple, thread: int) -> None:
        """Note that a block joins values with elements, which needs no order with others' joins."""


class _Block:
    """What one block does."""

    def __init__(
        self, number: int, memories: Mapping[Tile, _Memory], values: dict, largest: Mapping[str, float]
    ) -> None:
        self.number, self.memories, self.values, self.largest = number, memories, values, largest
        self.buffers = {tile.buffer: memory for tile, memory in memories.items()}

    def run(self, body: Sequence[Node]) -> Iterator[object]:
        """Do what the nodes say; yields before each, and, while flags don't let it go on, why: `Unsignalled`."""
        for node in body:
            if isinstance(node, Loop):
                yield from self._loop(node)
            elif isinstance(node, Branch):
                yield from self.run(node.then if self._scalar(node.condition) else node.otherwise)
            elif isinstance(node, Wait):
                yield from self._wait(node)
            else:
                yield None
                getattr(self, f"_{type(node).__name__.lower()}")(node)

    # ---- Statements in order ---------------------------------------------------------------------------------------

    def _loop(self, loop: Loop) -> Iterator[object]:
        start = self._scalar(loop.start)
        for step in range(self._scalar(loop.extent)):
            self.values[loop.var] = np.asarray(start + step)
            yield from self.run(loop.body)
            if loop.until is not None and self._scalar(loop.until):
                break

    def _let(self, let: Let) -> None:
        self.values[let.var] = self._value(let.value)

    def _assign(self, assign: Assign) -> None:
        where = tuple(self._scalar(index) for index in assign.indices)
        memory = self.memories[assign.tile]
        self._inside(memory, where, np.True_)
        memory.data[where] = self._kept(self._value(assign.value), assign.tile.dtype)

    def _wait(self, wait: Wait) -> Iterator[object]:
        yield None
        memory, there = self._flags(wait.flags)
        while (memory.data[there] < self._scalar(wait.value)).any():
            yield Unsignalled(f"{wait}: nobody has signalled, it is {memory.data[there].ravel()}")
        if wait.reset:
            memory.data[there] = 0

    def _signal(self, signal: Signal) -> None:
        memory, there = self._flags(signal.flags)
        value = self._scalar(signal.value)
        memory.data[there] = wrapped(memory.data[there] + value if signal.add else np.asarray(value), "int32")

    def _flags(self, region: Region) -> tuple[_Memory, tuple[slice, ...]]:
        memory, there, _ = self._box(region)
        if memory.data[there].shape != region.extents:
            raise Fault(f"{region} leaves {memory.tile}")
        return memory, there

    def _copy(self, copy: Copy) -> None:
        source = self._load(copy.src)
        self._store(copy.dst, source.reshape(copy.dst.extents), copy.atomic)

    def _fill(self, fill: Fill) -> None:
        self._store(fill.dst, np.broadcast_to(self._value(fill.value), fill.dst.extents))

    def _gemm(self, gemm: Gemm) -> None:
        a, b = (self._load(region).reshape(region.extents[-2:]) for region in (gemm.a, gemm.b))
        product = (a.T if gemm.transpose_a else a) @ (b.T if gemm.transpose_b else b)
        total = self._load(gemm.c) + product.reshape(gemm.c.extents) if gemm.accumulate else product
        self._store(gemm.c, total.reshape(gemm.c.extents))

    def _reduce(self, reduce: Reduce) -> None:
        values = self._load(reduce.src)
        if reduce.reducer is None:
            function = {"sum": np.add, "max": np.maximum, "min": np.minimum}[reduce.kind]
            result = function.reduce(values, axis=reduce.axis)
        else:
            function = self._function(reduce.reducer)
            lines = np.moveaxis(values, reduce.axis, 0)
            start = np.full(lines.shape[1:], self._value(reduce.reducer.identity_element[0]))
            result = functools.reduce(function, lines, start)
        result = result.reshape(reduce.dst.extents)
        if "int" in reduce.dst.tile.dtype and result.dtype.kind == "f":  # it is a number of dst's type that accumulates
            result = np.trunc(result)
        self._store(reduce.dst, function(self._load(reduce.dst), result) if reduce.accumulate else result)

    @staticmethod
    def _function(reducer: tirx.CommReducer) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
        (a,), (b,), (value,) = reducer.lhs, reducer.rhs, reducer.result
        return lambda some, other: wrapped(Evaluator({a: some, b: other}, _no_load)(value), str(value.ty))

    def _sort(self, sort: Sort) -> None:
        lines = np.moveaxis(self._load(sort.src), sort.axis, -1)
        if lines.dtype.kind == "i":
            self._written(lines, np.True_)
        bad = np.isnan(lines)
        size = np.where(bad, 0, -lines if sort.descending else lines)
        places = np.arange(lines.shape[-1]) + np.zeros_like(size, "int64")
        order = np.lexsort((places, size, ~bad if sort.nan_first else bad))[..., : sort.count]
        for region, found in ((sort.values, np.take_along_axis(lines, order, -1)), (sort.indices, order)):
            if region is not None:
                self._store(region, found.reshape(region.extents))

    def _scan(self, scan: Scan) -> None:
        values = self._load(scan.src)
        values = np.flip(values, scan.axis) if scan.reverse else values
        sums = np.cumsum(values, axis=scan.axis)
        if scan.exclusive:
            sums = np.roll(sums, 1, axis=scan.axis)
            sums[(slice(None),) * scan.axis + (0,)] = 0
        sums = np.flip(sums, scan.axis) if scan.reverse else sums
        self._store(scan.dst, sums.reshape(scan.dst.extents))

    def _print(self, node: Print) -> None:
        block = [self._scalar(at) for at in node.block]
        if node.region is None:
            self._line(node, [], self._value(node.value), block)
            return
        memory, there, _ = self._box(node.region)
        for offset, value in np.ndenumerate(memory.data[there]):
            self._line(node, [part.start + step for part, step in zip(there, offset)], value, block)

    @staticmethod
    def _line(node: Print, place: list[int], value: np.ndarray, block: list[int]) -> None:
        print(line(node) % (*place, float(value) if kind(node) == "float64" else int(value), *block), end="")

    # ---- Points in no order ----------------------------------------------------------------------------------------

    def _parallel(self, parallel: Parallel) -> None:
        for memory in self.memories.values():
            if memory.touching == "point":
                memory.forget()
        grid = np.indices(parallel.extents).reshape(len(parallel.extents), -1)
        points = dict(zip(parallel.vars, grid))
        who = np.arange(grid.shape[1])

        def load(expr: ir.TensorLoad, indices: list[np.ndarray], active: np.ndarray) -> np.ndarray:
            return self._touch(self.buffers[expr.source], indices, active, who)

        active = np.ones(grid.shape[1], bool)
        self._point(parallel.body, Evaluator({**self.values, **points}, load, active), who)

    def _point(self, stmt: tirx.Stmt, at: Evaluator, who: np.ndarray) -> None:
        if isinstance(stmt, tirx.SeqStmt):
            for inner in stmt.seq:
                self._point(inner, at, who)
        elif isinstance(stmt, tirx.Bind):
            at.values[stmt.var] = at(stmt.value)
        elif isinstance(stmt, tirx.IfThenElse):
            holds = self._written(at(stmt.condition), at.active)
            self._point(stmt.then_case, at.where(holds), who)
            if stmt.else_case is not None:
                self._point(stmt.else_case, at.where(np.logical_not(holds)), who)
        elif isinstance(stmt, tirx.BufferStore):
            memory, how = self.buffers[stmt.buffer], joined(stmt.value)
            if how is not None:
                indices = [at(index) for index in stmt.indices]
                if how.former is None:
                    self._join(memory, indices, at.active, _JOINS[how.kind], at(how.value))
                else:
                    at.values[how.former] = self._swap(memory, indices, at.active, at(how.compare), at(how.value))
                return
            value = self._kept(at(stmt.value), memory.tile.dtype, at.active)
            self._touch(memory, [at(index) for index in stmt.indices], at.active, who, value)
        else:
            raise NotImplementedError(f"the interpreter knows no {type(stmt).__name__}: {stmt}")

    def _touch(
        self, memory: _Memory, indices: list, active: np.ndarray, who: np.ndarray, value: np.ndarray | None = None
    ) -> np.ndarray:
        """Load at the active points, one of `indices` each, or store `value` there."""
        where = tuple(np.broadcast_to(self._written(index, active), who.shape) for index in indices)
        self._inside(memory, where, active)
        where = tuple(np.where(active, index, 0).astype("int64") for index in where)
        chosen = tuple(index[active] for index in where)
        memory.check(chosen, who[active] if memory.touching == "point" else np.asarray(self.number), value is not None)
        if value is None:
            found = memory.data[where]
            return self._written(found, active) if found.dtype.kind == "i" else found
        if memory.touching == "block" and len(np.unique(np.stack(chosen), axis=1).T) < len(chosen[0]):
            raise Fault(f"{memory.tile}: two points store one element")
        memory.data[chosen] = np.broadcast_to(value, who.shape)[active]
        return value

    def _join(self, memory: _Memory, indices: list, active: np.ndarray, how: np.ufunc, value: np.ndarray) -> None:
        """Join a value of each active point with an element, which others may be joined with too."""
        where = tuple(np.broadcast_to(self._written(index, active), active.shape) for index in indices)
        self._inside(memory, where, active)
        memory.join(tuple(index[active] for index in where), self.number)
        how.at(memory.data, tuple(index[active] for index in where), np.broadcast_to(value, active.shape)[active])
        memory.data[...] = self._kept(memory.data, memory.tile.dtype)

    def _swap(
        self, memory: _Memory, indices: list, active: np.ndarray, compare: np.ndarray, value: np.ndarray
    ) -> np.ndarray:
        """Compare and swap at one active point after the other; what each found."""
        where = tuple(np.broadcast_to(self._written(index, active), active.shape) for index in indices)
        self._inside(memory, where, active)
        memory.join(tuple(index[active] for index in where), self.number)
        former = np.zeros(active.shape, memory.data.dtype)
        compare, value = (np.broadcast_to(each, active.shape) for each in (compare, value))
        kept = np.broadcast_to(self._kept(value, memory.tile.dtype), active.shape)
        for point in np.flatnonzero(active):
            there = tuple(int(index[point]) for index in where)
            former[point] = memory.data[there]
            if former[point] == compare[point]:
                memory.data[there] = kept[point]
        return self._written(former, active)

    # ---- Values and regions ----------------------------------------------------------------------------------------

    def _value(self, expr: tirx.Expr) -> np.ndarray:
        def load(expr: ir.TensorLoad, indices: list[np.ndarray], active: np.ndarray) -> np.ndarray:
            memory, where = self.buffers[expr.source], tuple(int(index) for index in indices)
            if not active:
                return np.zeros((), memory.data.dtype)
            self._inside(memory, where, np.True_)
            if memory.touching == "block":
                memory.check(where, np.asarray(self.number), False)
            found = np.asarray(memory.data[where])
            return self._written(found, active) if found.dtype.kind == "i" else found

        return Evaluator(self.values, load)(expr)

    def _scalar(self, expr: tirx.Expr) -> int:
        return int(self._written(self._value(expr), np.True_))

    @staticmethod
    def _written(value: np.ndarray, active: np.ndarray) -> np.ndarray:
        bad = np.isnan(value) if value.dtype.kind == "f" else value == POISON
        if np.logical_and(bad, active).any():
            raise Fault("an integer, an index or a condition was never written")
        return value

    @staticmethod
    def _inside(memory: _Memory, where: tuple, active: np.ndarray) -> None:
        for index, size in zip(where, memory.data.shape, strict=True):
            outside = np.logical_and(np.logical_or(np.less(index, 0), np.greater_equal(index, size)), active)
            if outside.any():
                at = np.asarray(index)[outside] if np.ndim(index) else index
                raise Fault(f"{memory.tile}: index {at} of {size}")

    def _box(self, region: Region) -> tuple[_Memory, tuple[slice, ...], tuple[slice, ...]]:
        """A region's memory, the part of it that is there, and that part of the region."""
        memory = self.memories[region.tile]
        start = [self._scalar(expr) for expr in region.start]
        sizes = memory.data.shape
        stop = [s + e for s, e in zip(start, region.extents)]
        if (min(start) < 0 and not region.in_front) or (
            region.tile.scope != "global" and any(s > size for s, size in zip(stop, sizes))
        ):
            raise Fault(f"{region} from {start} to {stop} leaves {memory.tile}")
        there = tuple(slice(*(min(max(end, 0), size) for end in (s, t))) for s, t, size in zip(start, stop, sizes))
        return memory, there, tuple(slice(own.start - s, own.stop - s) for own, s in zip(there, start))

    def _load(self, region: Region) -> np.ndarray:
        """A region's values, to be read before anything is stored: where all of it is there they are the memory's."""
        memory, there, part = self._box(region)
        if memory.touching == "block":
            memory.check(there, np.asarray(self.number), False)
        if all((own.start, own.stop) == (0, extent) for own, extent in zip(part, region.extents, strict=True)):
            return memory.data[there]
        values = np.zeros(region.extents, memory.data.dtype)
        values[part] = memory.data[there]
        return values

    def _store(self, region: Region, values: np.ndarray, atomic: str | None = None) -> None:
        memory, there, part = self._box(region)
        if memory.touching == "block" and atomic is None:
            memory.check(there, np.asarray(self.number), True)
        if atomic is not None:
            memory.join(there, self.number)
        if memory.data.dtype.kind in "iu" and values.dtype.kind == "f":
            values = np.trunc(values)
        kept = values[part] if atomic is None else _JOINS[atomic](memory.data[there], values[part])
        memory.data[there] = self._kept(kept, region.tile.dtype)

    def _kept(self, value: np.ndarray, dtype: str, active: np.ndarray = np.True_) -> np.ndarray:
        """A value as a tile of the type keeps it."""
        if dtype in self.largest and (active & (np.abs(value) > self.largest[dtype])).any():
            raise TooLarge(f"{np.nanmax(np.abs(value))} is stored as {dtype}")
        return wrapped(value, dtype)
