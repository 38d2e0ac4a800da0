"""What a schedule is expected to take, well enough to tell which ones are not worth measuring.

Of each stage: the bytes that the busiest device receives of its peers over the link's bandwidth, those of its own that
it touches over the memory's; and a latency for each time that it must wait for others. Arithmetic is left out:
schedules that share a program over the same axes do the same amount of it, which `operations` counts for those that
don't. (The alpha-beta model of `tvm_axe.layout.redistributing`.)
"""

from __future__ import annotations

from tvm import tirx

from tvm_axe.collective.engine import HOST, Rates
from tvm_axe.layout import Mesh
from tvm_axe.layout.collectives import Collective
from tvm_axe.lower import Lowered
from tvm_axe.lower.parsing import parse_program

_WAITS = {"local": 0, Collective.ALL_REDUCE: 2}  # of any other kind: 1


def estimate(lowered: Lowered, rates: Rates = HOST) -> float:
    """Seconds of one run, arithmetic left out."""
    return features_of_program(lowered, rates)["link_seconds"]


def features_of_program(lowered: Lowered, rates: Rates = HOST) -> dict[str, float]:
    """What a lowered program communicates, in numbers for a cost model.

    Returns
    -------
    dict
        ``bytes`` that the busiest device of each stage receives of its peers, and ``memory``, bytes of its own that it
        touches; ``waits``
        for others if nothing is cut into chunks, and ``messages``, which has one for each chunk; ``peers``, the most
        that a stage has; ``chunks``, the most that a stage is cut into; ``stages``, and how many of them overlap
        (``overlapping``), are kernels that index their peers' slabs (``mesh_kernels``) or plain collectives
        (``collectives``); and ``link_seconds``, what `estimate` gives.
    """
    stages = lowered.stages
    waits = [_WAITS.get(stage.kind, 1) for stage in stages]
    moved, memory = sum(stage.bytes for stage in stages), sum(stage.memory for stage in stages)
    kernels = sum(stage.kind == "mesh kernel" for stage in stages)
    return {
        "bytes": float(moved),
        "memory": float(memory),
        "waits": float(sum(waits)),
        "messages": float(sum(count * stage.chunks for count, stage in zip(waits, stages))),
        "peers": float(max((lowered.devices(s) - 1 for s in stages), default=0)),
        "chunks": float(max((stage.chunks for stage in stages), default=1)),
        "stages": float(len(stages)),
        "overlapping": float(sum(stage.chunks > 1 for stage in stages)),
        "mesh_kernels": float(kernels),
        "collectives": float(sum(stage.axis is not None for stage in stages) - kernels),
        "link_seconds": moved / rates.link.bandwidth + memory / rates.memory + sum(waits) * rates.link.latency,
    }


def operations(func: tirx.PrimFunc, mesh: Mesh) -> tuple[float, float]:
    """Multiplications and additions in the matmuls of a scheduled function: of a device on average, and of all once."""
    counts = [block.operations(mesh) for block in parse_program(func, mesh).blocks()]
    return sum(own for own, _ in counts), sum(whole for _, whole in counts)


def expected(lowered: Lowered, rates: Rates = HOST) -> list[float]:
    """Seconds that each stage is expected to take, its arithmetic with them: what the search ranks by, taken apart."""
    return [
        stage.bytes / rates.link.bandwidth
        + stage.memory / rates.memory
        + _WAITS.get(stage.kind, 1) * rates.link.latency
        + stage.operations / rates.operations
        for stage in lowered.stages
    ]
