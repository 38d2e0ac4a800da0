"""The collectives of two worker processes beside the same done with multiprocessing and numpy.

The peer is what one writes without a library: two processes on `multiprocessing.shared_memory` blocks, numpy for the
sums and copies (each process sums its half and writes it to both), and a `multiprocessing.Barrier`. Both sides do the
collective and then a barrier, timed inside the workers after another barrier; a round's time is that of the slower
worker, a row the median of the rounds. The same amounts of data move on both sides.

Run `python scripts/bench_collective.py [--json]`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_axe.collective import Coord, Workers, launch
from tvm_axe.layout import Mesh

SIZES = {"4 KiB": 1 << 10, "64 KiB": 1 << 14, "1.5 MiB": 3 << 17, "64 MiB": 1 << 24}  # name -> elements of float32
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")


def rounds(size: int) -> int:
    """How many rounds to time: more of the short ones."""
    return 15 if size >= 1 << 24 else 200


def program(size: int) -> tvm.IRModule:
    """One function for each collective, with the barrier that makes its result everybody's."""

    @I.ir_module
    class Collectives:
        @R.function(pure=False)
        def all_reduce(
            whole: R.Tensor((2, size), "float32"),
            block: R.Tensor((size // 2,), "float32"),
            out: R.Tensor((2, size), "float32"),
            rank: R.Prim("int64"),
        ):
            R.func_attr({"relax.force_pure": False})
            _: R.Tuple() = R.call_packed("axe.all_reduce", whole, out, rank, sinfo_args=(R.Tuple(),))
            _1: R.Tuple() = R.call_packed("axe.barrier", sinfo_args=(R.Tuple(),))
            return R.tuple()

        @R.function(pure=False)
        def reduce_scatter(
            whole: R.Tensor((2, size), "float32"),
            block: R.Tensor((size // 2,), "float32"),
            out: R.Tensor((2, size), "float32"),
            rank: R.Prim("int64"),
        ):
            R.func_attr({"relax.force_pure": False})
            _: R.Tuple() = R.call_packed("axe.reduce_scatter", whole, block, 0, rank, sinfo_args=(R.Tuple(),))
            _1: R.Tuple() = R.call_packed("axe.barrier", sinfo_args=(R.Tuple(),))
            return R.tuple()

        @R.function(pure=False)
        def all_gather(
            whole: R.Tensor((2, size), "float32"),
            block: R.Tensor((size // 2,), "float32"),
            out: R.Tensor((2, size), "float32"),
            rank: R.Prim("int64"),
        ):
            R.func_attr({"relax.force_pure": False})
            _: R.Tuple() = R.call_packed("axe.all_gather", block, out, 0, rank, sinfo_args=(R.Tuple(),))
            _1: R.Tuple() = R.call_packed("axe.barrier", sinfo_args=(R.Tuple(),))
            return R.tuple()

    return Collectives


def ours(workers: Workers, name: str, size: int) -> list[float]:
    """Seconds of each round of a collective of the package."""
    whole, out = (workers.mesh_tensor((size,), "float32") for _ in range(2))
    block = workers.mesh_tensor((size // 2,), "float32")
    compiled = workers.load(program(size), "llvm")
    for device in range(2):
        whole.slab(device)[:] = block.slab(device)[:] = device + 1
    arguments = [(whole, "tp"), (block, "slab"), (out, "tp"), Coord("tp")]
    seconds = workers.time(compiled, arguments, rounds(size), warmup=3, function=name)
    for tensor in (whole, out, block):
        workers.free(tensor)
    return seconds


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
        for _ in range(3 + rounds(size)):
            barrier.wait()
            start = time.perf_counter()
            collective()
            barrier.wait()
            seconds.append(time.perf_counter() - start)
        connection.send(seconds[3:])
    connection.close()


def peer(size: int) -> dict[str, list[float]]:
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
        return {name: [max(pair) for pair in zip(*(read.recv() for read, _ in pipes))] for name in COLLECTIVES}
    finally:
        for process in processes:
            process.join()
        shared.close()
        shared.unlink()


def main() -> None:
    """Measure every collective at every size and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one object instead of a table")
    as_json = parser.parse_args().json
    rows = []
    with launch(Mesh({"tp": 2}), engine="processes") as workers:
        for label, size in SIZES.items():
            others = peer(size)
            for name in COLLECTIVES:
                mine = 1e3 * statistics.median(ours(workers, name, size))
                other = 1e3 * statistics.median(others[name])
                rows.append(
                    {
                        "name": f"{name} {label}",
                        "ours_ms": mine,
                        "peer": "multiprocessing + numpy",
                        "peer_ms": other,
                        "ratio": other / mine,
                    }
                )
    if as_json:
        print(json.dumps({"rows": rows}))
        return
    print(f"{'':<24}{'ours, ms':>12}{'peer, ms':>12}{'ratio':>8}")
    for row in rows:
        print(f"{row['name']:<24}{row['ours_ms']:>12.4f}{row['peer_ms']:>12.4f}{row['ratio']:>8.2f}")


if __name__ == "__main__":
    main()
