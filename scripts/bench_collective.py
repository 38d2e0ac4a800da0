"""The collectives of two worker processes beside MPI's, or beside multiprocessing and numpy where MPI is missing.

Ours: a compiled program of collectives, each with the barrier that makes its result everybody's, timed inside the
workers; a round's time is that of the slower one. MPI (mpi4py on MPICH, two ranks under mpiexec): the same number of
calls on numpy buffers in a plain loop. Both between separate buffers and in place, where less is moved, except that a
reduce-scatter of ours is never in place and is compared with the faster of MPI's. The sides take turns; a turn's time
is the median of its rounds, and each side's best turn counts, which is the one that other programs on the machine
disturbed least.

Without MPI the peer is what one writes without a library: two processes on shared memory, numpy for the sums and
copies, and a `multiprocessing.Barrier`.

Run `python scripts/bench_collective.py [--json] [--turns N]`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tvm_axe.collective import Workers, launch
from tvm_axe.layout import Mesh
from tvm_axe.machines import resolve_target

SIZES = {  # name -> elements of float32
    "4 KiB": 1 << 10,
    "16 KiB": 1 << 12,
    "64 KiB": 1 << 14,
    "256 KiB": 1 << 16,
    "1.5 MiB": 3 << 17,
    "4 MiB": 1 << 20,
    "16 MiB": 1 << 22,
    "64 MiB": 1 << 24,
    "256 MiB": 1 << 26,
}
# A collective, and the calls of the package and of MPI that do it.
COLLECTIVES = {
    "all_reduce": ("all_reduce", ["separate"]),
    "all_reduce in place": ("all_reduce", ["in place"]),
    "reduce_scatter": ("reduce_scatter", ["separate", "in place"]),
    "all_gather": ("all_gather", ["separate"]),
    "all_gather in place": ("all_gather", ["in place"]),
}


def repetitions(size: int) -> tuple[int, int]:
    """How many collectives a round has, and how many rounds are timed in a turn: more of the short ones."""
    if size <= 1 << 16:
        return 20, 50
    return (4, 20) if size <= 1 << 20 else (1, 7)


# ---- Ours --------------------------------------------------------------------------------------------------------


def program(name: str, size: int) -> tvm.IRModule:
    """A module whose main does a collective and a barrier so many times."""
    builder = relax.BlockBuilder()
    shapes = {"whole": [2, size], "block": [size // 2], "out": [2, size]}
    tensors = {which: relax.Var(which, relax.TensorType(shape, "float32")) for which, shape in shapes.items()}
    function, source, target, dim = {
        "all_reduce": ("all_reduce", "whole", "out", []),
        "all_reduce in place": ("all_reduce", "out", "out", []),
        "reduce_scatter": ("reduce_scatter", "whole", "block", [0]),
        "all_gather": ("all_gather", "block", "out", [0]),
        "all_gather in place": ("all_gather_in_place", "out", "out", [0]),
    }[name]
    arguments = [tensors[source], tensors[target], *map(relax.prim_value, dim), tvm.ir.StringImm("tp")]
    with builder.function("main", list(tensors.values()), pure=False):
        for _ in range(repetitions(size)[0]):
            for callee, given in ((function, arguments), ("barrier", [])):
                op = relax.ExternFunc(f"axe.{callee}")
                builder.emit(relax.Call(op, given, ty_args=[relax.TupleType([])]))
        builder.emit_func_output(relax.Tuple([]))
    return builder.finalize()


def ours(workers: Workers, size: int) -> dict[str, list[float]]:
    """Seconds of each collective of the package, in each round."""
    whole, out = (workers.mesh_tensor((size,), "float32") for _ in range(2))
    block = workers.mesh_tensor((size // 2,), "float32")
    for device in range(2):
        whole.slab(device)[:] = device + 1
    views = [(whole, "tp"), (block, "slab"), (out, "tp")]
    target = resolve_target("llvm", threads=1)
    repeat, rounds = repetitions(size)
    seconds = {}
    for name in COLLECTIVES:
        for device in range(2):
            out.slab(device)[:] = 0  # else sums in place grow without end
        compiled = workers.load(program(name, size), target)
        seconds[name] = [time / repeat for time in workers.time(compiled, views, rounds, warmup=2)]
        workers.free(compiled)
    for tensor in (whole, out, block):
        workers.free(tensor)
    return seconds


# ---- MPI ---------------------------------------------------------------------------------------------------------


def has_mpi() -> bool:
    """Whether mpi4py and mpiexec are there."""
    return importlib.util.find_spec("mpi4py") is not None and mpiexec().exists()


def mpiexec() -> Path:
    return Path(sys.executable).parent / "mpiexec"


def mpi_rank(size: int) -> None:
    """Time every collective of MPI, as one of its ranks; rank 0 prints seconds by collective and way."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    whole, out, block = np.full(size, world.rank + 1.0, "f4"), np.zeros(size, "f4"), np.ones(size // 2, "f4")
    calls: dict[str, dict[str, Callable[[], None]]] = {
        "all_reduce": {
            "separate": lambda: world.Allreduce(whole, out),
            "in place": lambda: world.Allreduce(MPI.IN_PLACE, out),
        },
        "reduce_scatter": {
            "separate": lambda: world.Reduce_scatter_block(whole, block),
            "in place": lambda: world.Reduce_scatter_block(MPI.IN_PLACE, out),
        },
        "all_gather": {
            "separate": lambda: world.Allgather(block, out),
            "in place": lambda: world.Allgather(MPI.IN_PLACE, out),
        },
    }
    repeat, rounds = repetitions(size)
    result: dict[str, dict[str, list[float]]] = {name: {} for name in calls}
    for name, ways in calls.items():
        for way, call in ways.items():
            out[:] = 0
            seconds = []
            for _ in range(2 + rounds):
                world.Barrier()
                start = time.perf_counter()
                for _ in range(repeat):
                    call()
                seconds.append((time.perf_counter() - start) / repeat)
            result[name][way] = [max(pair) for pair in zip(*world.allgather(seconds[2:]))]
    if world.rank == 0:
        print(json.dumps(result))


def mpi(size: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round of each collective of MPI, by the way that it is done."""
    command = [str(mpiexec()), "-n", "2", sys.executable, __file__, "--mpi-rank", str(size)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    result: dict[str, dict[str, list[float]]] = json.loads(done.stdout)
    return result


# ---- multiprocessing ---------------------------------------------------------------------------------------------


def peer_worker(rank: int, memory: str, size: int, barrier: Any, connection: Any) -> None:
    """Time every collective with numpy on named shared memory, as one of two processes."""
    shared = SharedMemory(memory)
    whole, out = np.ndarray((2, 2, size), "float32", buffer=shared.buf)
    block = np.ndarray((2, size // 2), "float32", buffer=shared.buf, offset=16 * size)
    whole[rank], block[rank] = rank + 1, rank + 1
    half = slice(rank * (size // 2), (rank + 1) * (size // 2))

    def all_reduce() -> None:
        np.add(whole[0, half], whole[1, half], out=out[rank, half])
        out[1 - rank, half] = out[rank, half]

    def reduce_scatter() -> None:
        np.add(whole[0, half], whole[1, half], out=block[rank])

    def all_gather() -> None:
        out[0, half] = block[rank]
        out[1, half] = block[rank]

    for collective in (all_reduce, reduce_scatter, all_gather):
        seconds = []
        for _ in range(3 + repetitions(size)[1]):
            barrier.wait()
            start = time.perf_counter()
            collective()
            barrier.wait()
            seconds.append(time.perf_counter() - start)
        connection.send(seconds[3:])
    connection.close()


def by_hand(size: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each round of each collective with multiprocessing."""
    context = multiprocessing.get_context("spawn")
    shared = SharedMemory(create=True, size=20 * size)
    barrier = context.Barrier(2)
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    processes = [
        context.Process(target=peer_worker, args=(rank, shared.name, size, barrier, pipes[rank][1]))
        for rank in range(2)
    ]
    try:
        for process, (_, write) in zip(processes, pipes):
            process.start()
            write.close()  # so that reading ends if the process does
        return {
            name: {"separate": [max(pair) for pair in zip(*(read.recv() for read, _ in pipes))]} for name in COLLECTIVES
        }
    finally:
        for process in processes:
            process.join()
        shared.close()
        shared.unlink()


# ---- Both --------------------------------------------------------------------------------------------------------


def compare(turns: int) -> list[dict[str, Any]]:
    """Measure every collective at every size, both sides in turns."""
    peer, measure = ("MPI", mpi) if has_mpi() else ("multiprocessing + numpy", by_hand)
    rows = []
    with launch(Mesh({"tp": 2}), engine="processes") as workers:
        for label, size in SIZES.items():
            mine: dict[str, list[float]] = {}
            theirs: dict[tuple[str, str], list[float]] = {}
            for _ in range(turns):
                for name, seconds in ours(workers, size).items():
                    mine.setdefault(name, []).append(statistics.median(seconds))
                for call, ways in measure(size).items():
                    for way, seconds in ways.items():
                        theirs.setdefault((call, way), []).append(statistics.median(seconds))
            for name, (call, comparable) in COLLECTIVES.items():
                others = [1e3 * min(theirs[call, way]) for way in comparable if (call, way) in theirs]
                if others:
                    ours_ms, peer_ms = 1e3 * min(mine[name]), min(others)
                    row = {"name": f"{name} {label}", "ours_ms": ours_ms, "peer": peer, "peer_ms": peer_ms}
                    rows.append(row | {"ratio": peer_ms / ours_ms})
    return rows


def main() -> None:
    """Measure and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    parser.add_argument("--turns", type=int, default=5, help="how often each side is measured (5)")
    parser.add_argument("--mpi-rank", type=int, metavar="SIZE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mpi_rank is not None:
        mpi_rank(options.mpi_rank)
        return
    if not has_mpi():
        print("mpi4py or mpiexec is not installed (pip install tvm-axe[mpi]); comparing with numpy", file=sys.stderr)
    rows = compare(options.turns)
    if options.json:
        print(json.dumps({"rows": rows}))
        return
    print(f"{'milliseconds':<32}{'ours':>10}{rows[0]['peer']:>26}{'ratio':>8}")
    for row in rows:
        print(f"{row['name']:<32}{row['ours_ms']:>10.4f}{row['peer_ms']:>26.4f}{row['ratio']:>8.2f}")


if __name__ == "__main__":
    main()
