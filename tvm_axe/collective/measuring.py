"""Measuring which algorithm is fastest for each collective and size, and the table that follows (`choice.Table`).

Each algorithm is forced on workers of its own. A run is a program of a collective between barriers, so many times that
launching it doesn't count; a size's time is the median of runs, each that of its slowest device, a collective's share.
Where two are as fast as makes no difference, the one of the smaller size stays.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import tvm
from tvm import relax

from tvm_axe.collective.algorithms import Algorithm, offered
from tvm_axe.collective.choice import Table
from tvm_axe.collective.plan import VIEWS
from tvm_axe.collective.tensor import SLAB
from tvm_axe.collective.workers import Workers
from tvm_axe.layout.collectives import Collective
from tvm_axe.machines.target import resolve_target

__all__ = ["SIZES", "Time", "chain", "measure", "table_of"]

SIZES = (*(1 << shift for shift in range(10, 23)), 16 << 20, 64 << 20)
"""Bytes of the messages that are measured."""

_DTYPE, _ITEMSIZE = "float32", 4
_AS_FAST = 0.97  # of another's time; by less than that none is faster
_SECONDS = 2e-3  # that a run takes, about


class Time(NamedTuple):
    """What a collective took by an algorithm."""

    collective: str
    algorithm: str
    nbytes: int
    seconds: float


class Chain(NamedTuple):
    """A program that does a collective again and again, and the slabs of its source and target."""

    module: tvm.IRModule
    source: tuple[int, ...]
    target: tuple[int, ...]


def chain(name: str, nbytes: int, axis: str, parts: int, times: int) -> Chain:
    """Return a program that does a collective of messages of so many bytes, about, between barriers.

    Its ``main`` takes the source and the target as the collective does (`plan.VIEWS`).
    """
    size = max(1, nbytes // _ITEMSIZE)
    part = -(-size // parts)
    slabs: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
        Collective.REDUCE_SCATTER.operation: ((size,), (part,), (0,)),
        Collective.ALL_GATHER.operation: ((part,), (size,), (0,)),
        "all_gather_in_place": ((size,), (size,), (0,)),
        Collective.ALL_TO_ALL.operation: ((1, size), (parts, part), (0, 1)),
        Collective.SEND.operation: ((size,), (size,), (1,)),
        Collective.REDUCE.operation: ((size,), (size,), (0,)),
        Collective.BROADCAST.operation: ((size,), (size,), (0,)),
    }
    source, target, numbers = slabs.get(name, ((size,), (size,), ()))
    builder = relax.BlockBuilder()
    tensors = [
        relax.Var(which, relax.TensorType([*([parts] if is_view else []), *slab], _DTYPE))
        for which, slab, is_view in zip(("source", "target"), (source, target), VIEWS[name])
    ]
    given = [*tensors, *map(relax.prim_value, numbers), tvm.ir.StringImm(axis)]
    with builder.function("main", tensors, pure=False):
        for _ in range(times):
            for callee, arguments in (("barrier", []), (name, given), ("barrier", [])):
                builder.emit(relax.Call(relax.ExternFunc(f"axe.{callee}"), arguments, ty_args=[relax.TupleType([])]))
        builder.emit_func_output(relax.Tuple([]))
    return Chain(builder.finalize(), source, target)


def measure(
    launched: Callable[[Algorithm], AbstractContextManager[Workers]],
    sizes: Sequence[int] = SIZES,
    repeat: int = 15,
    times: int = 20,
) -> list[Time]:
    """Return what each collective takes by each algorithm that is offered for it, along the only axis of a mesh.

    Parameters
    ----------
    launched : callable
        Workers that do collectives by an algorithm.
    sizes : sequence of int
        Bytes of the messages.
    repeat : int
        Runs of which the median is taken.
    times : int
        Collectives of a run, of small ones.
    """
    found = []
    for algorithm in Algorithm:
        with launched(algorithm) as workers:
            for name in VIEWS:
                if algorithm in offered(name, in_place=False) and len(offered(name, in_place=False)) > 1:
                    found += [
                        Time(name, str(algorithm), nbytes, seconds)
                        for nbytes, seconds in _taken(workers, name, sizes, repeat, times)
                    ]
    return found


def _taken(workers: Workers, name: str, sizes: Sequence[int], repeat: int, times: int) -> Iterator[tuple[int, float]]:
    (axis,) = workers.mesh.names
    target = resolve_target(workers.target)
    for nbytes in sizes:
        number = max(1, min(times, int(_SECONDS * 20e9 / nbytes)))
        made = chain(name, nbytes, axis, workers.mesh.size, number)
        tensors = [workers.mesh_tensor(slab, _DTYPE) for slab in (made.source, made.target)]
        if name == "all_gather_in_place":
            workers.free(tensors.pop())
            tensors *= 2
        program = workers.load(made.module, target)
        arguments = [(tensor, axis if is_view else SLAB) for tensor, is_view in zip(tensors, VIEWS[name])]
        yield nbytes, statistics.median(workers.time(program, arguments, repeat, warmup=3)) / number
        workers.free(program)
        for tensor in set(tensors):
            workers.free(tensor)


def table_of(times: Sequence[Time], source: str) -> Table:
    """Return the table of what was measured.

    >>> taken = [("one-shot", 1024, 3e-6), ("two-shot", 1024, 4e-6), ("one-shot", 4096, 6e-6), ("two-shot", 4096, 5e-6)]
    >>> print(table_of([Time("all_reduce", *each) for each in taken], "an example"))
    all_reduce: one-shot to 4 KiB, then two-shot
    reduce_scatter, all_gather, all_gather_in_place, all_to_all, send, reduce, broadcast: one-shot
    from an example
    """
    rows: dict[str, list[tuple[int | None, Algorithm]]] = {}
    for name in dict.fromkeys(time.collective for time in times):
        changes: list[tuple[int, Algorithm]] = []  # from how many bytes on which is used
        for nbytes in sorted({time.nbytes for time in times if time.collective == name}):
            taken = {
                Algorithm.of(time.algorithm): time.seconds
                for time in times
                if (time.collective, time.nbytes) == (name, nbytes)
            }
            best = min(taken, key=taken.__getitem__)
            kept = changes[-1][1] if changes else None
            if kept is None or kept not in taken or taken[best] < _AS_FAST * taken[kept]:
                changes.append((nbytes, best))
        limits = [*(nbytes for nbytes, _ in changes[1:]), None]
        rows[name] = [(limit, algorithm) for limit, (_, algorithm) in zip(limits, changes)]
    return Table(rows, source)
