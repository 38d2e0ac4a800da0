"""Columns about loops and memory: parallelism, the inner tile, and what each level of the memory must deliver.

Most of a function's time goes into the nest with the most iterations; the columns are about that one, the *hot* nest,
and about the others as far as they feed it (panels, padding, write-back).

The traffic columns are a model, not a count: a level of `CAPACITIES` bytes keeps what the innermost loops touch as long
as all of it fits, and everything is fetched anew by each iteration of the loops outside (the working-set argument of
Lam, Rothberg and Wolf, "The cache performance and optimizations of blocked algorithms", ASPLOS 1991).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm.target import Target

from tvm_axe.machines import Gpu, machine_of
from tvm_axe.machines.target import vector_bits
from tvm_axe.meta.model.features.nest import Access, Nest, shared_loops

__all__ = ["CAPACITIES", "hot_nest", "locality", "log"]

CAPACITIES = (1 << 11, 1 << 15, 1 << 18, 1 << 20, 1 << 24)
"""Bytes of a register file, and of caches as CPUs have them: what is trained on one target needs no exact sizes."""

_PAGE = 4096  # rows whose distance is a multiple of it share the sets of a first-level cache


def log(value: float) -> float:
    """log2(1 + value): most quantities span orders of magnitude."""
    return math.log2(1.0 + max(0.0, value))


def hot_nest(found: Sequence[Nest]) -> Nest:
    """The nest with the most iterations; of several, one that sums, then the last."""
    return max(enumerate(found), key=lambda pair: (pair[1].iterations, pair[1].reduces, pair[0]))[1]


def locality(found: Sequence[Nest], needed: float, target: Target) -> dict[str, float]:
    """The columns, by name.

    Parameters
    ----------
    found
        The function's nests as scheduled, at least one.
    needed
        Iterations of the hot nest before it was scheduled; what exceeds them is padding.
    target
        A resolved target.
    """
    hot = hot_nest(found)
    lanes = hot.extent("vectorized")
    columns = {
        "work": log(hot.iterations),
        "waste": hot.iterations / needed if needed else 1.0,
        "lanes": log(lanes),
        "unrolled": log(hot.extent("unrolled")),
        **_parallel(found, hot, target),
        **_inner_tile(hot, lanes, target),
        **_strides(hot),
        **_feeding(found, hot),
    }
    sizes = [_working_set(hot, level) for level in range(len(hot.loops) + 1)]
    for capacity in CAPACITIES:
        columns[f"traffic_{capacity}"] = log(_traffic(hot, sizes, capacity) / hot.iterations * 64)
    serial = hot.kinds("serial")
    columns["working_set"] = log(sizes[serial[-1]] if serial else 0)
    columns["working_set_outer"] = log(sizes[serial[-2]] if len(serial) > 1 else 0)
    return columns


def _parallel(found: Sequence[Nest], hot: Nest, target: Target) -> dict[str, float]:
    """How the work is cut, and how evenly the pieces fall on the cores (or blocks on multiprocessors)."""
    machine = machine_of(target)
    kinds = ("blockIdx.x", "blockIdx.y", "blockIdx.z") if isinstance(machine, Gpu) else ("parallel",)
    pieces, workers = hot.extent(*kinds), machine.processors
    alone = sum(nest.iterations for nest in found if nest.extent(*kinds) == 1)
    return {
        "pieces": log(pieces),
        "balance": pieces / (math.ceil(pieces / workers) * workers),
        "piece": log(hot.iterations / pieces),
        "serial_share": alone / sum(nest.iterations for nest in found),
    }


def _inner_tile(hot: Nest, lanes: int, target: Target) -> dict[str, float]:
    """What stays in registers: the loops inside the last serial one, which are unrolled or vectorised."""
    tile = hot.inside(max(hot.kinds("serial", "parallel"), default=-1) + 1)
    registers = {a.buffer: a.touched(tile) * a.bytes * 8 / vector_bits(target) for a in hot.accesses if a.written}
    results = sum(registers.values())
    loads = {a.buffer: a.touched(tile) / lanes for a in hot.accesses if not a.written and a.buffer not in registers}
    operations = math.prod(tile.values()) / lanes
    return {
        "accumulators": results,
        "loads_each": sum(loads.values()) / operations,
        "in_registers": float(all(a.scope == "local" for a in hot.accesses if a.written)),
    }


def _strides(hot: Nest) -> dict[str, float]:
    """How neighbours in the innermost loop, and in the innermost serial one, lie in memory."""
    moving = [n for n, loop in enumerate(hot.loops) if loop.extent > 1]
    serial = [n for n in moving if hot.loops[n].kind == "serial"]
    inner = [a.stride(moving[-1]) for a in hot.accesses] if moving else []
    far = [a.stride(serial[-1]) * a.bytes for a in hot.accesses if a.scope == "global"] if serial else []
    pitches = [_pitch(a) for a in hot.accesses if a.scope == "global"]
    return {
        "same": inner.count(0) / max(1, len(inner)),
        "contiguous": inner.count(1) / max(1, len(inner)),
        "serial_stride": log(max(far, default=0.0)),
        "aliasing": float(any(pitch and pitch % _PAGE == 0 for pitch in pitches)),
    }


def _pitch(access: Access) -> float:
    """Bytes from one row to the next."""
    return access.shape[-1] * access.bytes if len(access.shape) > 1 else 0.0


def _feeding(found: Sequence[Nest], hot: Nest) -> dict[str, float]:
    """The other nests: how much they do, and the buffers that they fill for the hot one, a piece (panel) at a time."""
    others = [nest for nest in found if nest is not hot]
    iterations = sum(nest.iterations for nest in others)
    plain = sum(nest.iterations for nest in others if nest.extent("vectorized") == 1)
    inputs = {a.buffer for a in hot.accesses} - {a.buffer for a in hot.accesses if a.written}
    panels, refills = 0.0, 0.0
    for nest in others:
        depth = shared_loops(nest, hot)
        for access in nest.accesses:
            if access.written and access.buffer in inputs:
                panels += access.touched(nest.inside(depth)) * access.bytes
                refills += nest.iterations / math.prod(access.shape)
    return {
        "others": log(64 * iterations / hot.iterations),
        "others_plain": log(64 * plain / hot.iterations),
        "nests": float(len(found)),
        "panels": log(panels),
        "refills": refills,
    }


def _working_set(nest: Nest, level: int) -> float:
    """Bytes that one run of the loops from number `level` inwards touches, registers aside."""
    inside = nest.inside(level)
    sizes: dict[str, float] = {}
    for access in nest.accesses:
        if access.scope != "local":
            size = access.touched(inside) * access.bytes
            sizes[access.buffer] = max(size, sizes.get(access.buffer, 0.0))
    return sum(sizes.values())


def _traffic(nest: Nest, sizes: Sequence[float], capacity: int) -> float:
    """Bytes that a memory of that capacity fetches for the whole nest."""
    level = next((n for n, size in enumerate(sizes) if size <= capacity), len(sizes) - 1)
    return sizes[level] * math.prod(loop.extent for loop in nest.loops[:level])
