"""The demo's block on two hosts of two devices each; run by test_hosts.py it counts what goes between them.

On a mesh of one axis, all devices share the sum, and the all-reduce is one within each host, one across, and a
gathering within each. On one of two, devices of a host share the rows, and hosts the sum: each device adds its rows'
partial sums to those of its peer on the other host, and gathers the others' rows within its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import tvm_axe as axe
from tvm_axe.collective import launch
from tvm_axe.collective.across import Across, Parcel
from tvm_axe.collective.dealing import deal
from tvm_axe.collective.start import start_ranks
from tvm_axe.collective.worker import Worker
from tvm_axe.demo.baseline import Problem
from tvm_axe.demo.block import INNER, OUTER, TOKENS, block, mm_ar_c
from tvm_axe.layout import Mesh
from tvm_axe.schedule import Schedule

FEW, MANY = 3, 33  # runs; what else a measurement moves is the same for both

mesh = Mesh({"dp": 2, "tp": 2})  # of the command line's


def hierarchical(sch: Schedule) -> None:
    """Share the rows within hosts, along tp, and the sum between hosts, along dp."""
    for name in ("epi", "mm"):
        sch.shard(sch.get_loops(sch.get_sblock(name))[0], "tp")
    sch.shard(sch.get_loops(sch.get_sblock("mm"))[-1], "dp")


SCHEDULES = {"dp=2,tp=2": hierarchical, "tp=4": mm_ar_c}


def count(folder: Path) -> None:
    """Have this rank write down how many bytes it has sent to the other host's in collectives.

    What a host's copy of the others' memory takes is none of that.
    """
    sent, counts = 0, False
    take_part, exchange = Worker.take_part, Across.exchange

    def taking_part(self: Worker, *arguments: Any, **options: Any) -> None:
        nonlocal counts
        counts = True
        take_part(self, *arguments, **options)
        counts = False

    def exchanging(self: Across, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        nonlocal sent
        if counts:
            sent += sum(array.nbytes for rank, array in sends if rank not in self._job.host)
            (folder / str(self._job.rank)).write_text(str(sent))
        exchange(self, sends, receives)

    Worker.take_part, Across.exchange = taking_part, exchanging


def on_the_wire() -> int:
    """The bytes that have gone over the cable, either way."""
    fields = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "eth0:" in line).split()
    return int(fields[1]) + int(fields[9])


def main(axes: str, launcher: str, folder: Path) -> None:
    """Print what was counted, on rank 0, as JSON."""
    mesh = Mesh.parse(axes)
    start_ranks(mesh, None, [sys.executable, *sys.argv], deal(["a", "b"], mesh), launcher)
    count(folder)
    with launch(mesh, engine="mpi") as workers:
        sch = Schedule(block, mesh=mesh)
        SCHEDULES[axes](sch)
        exe = axe.compile(sch, work_dir=folder)
        problem = Problem.random(TOKENS, INNER, OUTER, seed=0)
        arrays = [getattr(problem, name) for name in exe.inputs]
        out = exe.run(workers, *arrays)
        counts, wire = [], []
        for repeat in (FEW, MANY):
            before = on_the_wire(), total(folder)
            exe.time(workers, *arrays, repeat=repeat)
            wire.append(on_the_wire() - before[0])
            counts.append(total(folder) - before[1])
        job = workers._session._job
        told = {
            "hosts": job.hosts,
            "nodes": [rank.node for rank in job.ranks],
            "error": float(np.abs(out - problem.reference()).max() / np.abs(problem.reference()).max()),
            "stages": {stage.kind: stage.axis for stage in exe.stages if stage.bytes},
            "derived": sum(
                sum(stage.received) for stage in exe.stages if stage.axis is not None and workers.is_apart(stage.axis)
            ),
            "counted": (counts[1] - counts[0]) / (MANY - FEW),
            "wire": (wire[1] - wire[0]) / (MANY - FEW),
        }
        print(json.dumps(told))


def total(folder: Path) -> int:
    return sum(int(file.read_text()) for file in folder.glob("[0-9]"))


if __name__ == "__main__":
    main(*sys.argv[1:3], Path(sys.argv[3]))
