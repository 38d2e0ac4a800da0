"""Columns about what a GPU's blocks need and how their threads touch memory; all 0 on other targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm.target import Target

from tvm_axe.machines import Gpu, machine_of
from tvm_axe.meta.model.features.locality import log
from tvm_axe.meta.model.features.nest import Access, Nest, shared_loops

__all__ = ["bank_conflict", "gpu_columns"]

_BLOCKS = ("blockIdx.x", "blockIdx.y", "blockIdx.z")
_THREADS = ("threadIdx.x", "threadIdx.y", "threadIdx.z", "vthread.x", "vthread.y", "vthread.z")
_WARP, _BANKS, _WORD, _SEGMENT = 32, 32, 4, 32  # lanes; banks of a word each; bytes of a memory transaction
_OWN_REGISTERS = 32  # a thread's addresses and counters, beside its arrays

_NAMES = (
    "gpu_threads",
    "gpu_blocks",
    "gpu_shared_bytes",
    "gpu_local_bytes",
    "gpu_resident",
    "gpu_occupancy",
    "gpu_waves",
    "gpu_last_wave",
    "gpu_transactions",
    "gpu_conflicts",
)


def gpu_columns(found: Sequence[Nest], target: Target) -> dict[str, float]:
    """The columns, by name: occupancy, waves, memory transactions a warp, bank conflicts.

    Parameters
    ----------
    found
        The function's nests, as scheduled.
    target
        A resolved target.
    """
    threaded = [nest for nest in found if nest.kinds(*_THREADS)]
    gpu = machine_of(target)
    if not isinstance(gpu, Gpu) or not threaded:
        return dict.fromkeys(_NAMES, 0.0)
    threads = max(nest.extent(*_THREADS[:3]) for nest in threaded)
    blocks = max(nest.extent(*_BLOCKS) for nest in threaded)
    shared, local = _held(threaded, "shared", _THREADS), _held(threaded, "local", ())
    resident = min(
        gpu.resident_blocks,
        gpu.resident_threads // max(threads, 1),
        int(gpu.shared_bytes // shared) if shared else gpu.resident_blocks,
        int(gpu.registers // (threads * (_OWN_REGISTERS + math.ceil(local / 4)))),
    )
    waves = blocks / (gpu.processors * max(1, resident))
    return {
        "gpu_threads": log(threads),
        "gpu_blocks": log(blocks),
        "gpu_shared_bytes": log(shared),
        "gpu_local_bytes": log(local),
        "gpu_resident": float(resident),
        "gpu_occupancy": resident * threads / gpu.resident_threads,
        "gpu_waves": log(waves),
        "gpu_last_wave": waves / math.ceil(waves),
        "gpu_transactions": _mean(threaded, "global", transactions),
        "gpu_conflicts": _mean(threaded, "shared", bank_conflict),
    }


def transactions(stride: float, size: float) -> float:
    """Memory transactions of a warp whose neighbours are `stride` bytes apart, each with `size` bytes."""
    return float(min(max(_WARP, size), math.ceil(((_WARP - 1) * stride + size) / _SEGMENT)))


def bank_conflict(stride: float, size: float) -> float:
    """How many times a warp's access to shared memory is repeated; `stride` and `size` as in `transactions`.

    Lanes that are a multiple of the 32 banks of 4 bytes apart share a bank; a stride of 0 is one broadcast.
    """
    words = max(1, round(size / _WORD))
    step = round(stride / _WORD)
    return float(words if step == 0 else max(words, math.gcd(step, _BANKS)))


def _mean(nests: Sequence[Nest], scope: str, cost: Callable[[float, float], float]) -> float:
    """The mean over all accesses to a kind of memory, each as often as it happens."""
    total = weight = 0.0
    for nest in nests:
        lane = next(reversed(nest.kinds("threadIdx.x")), None)  # threads that copy together are bound anew, inside
        size = nest.extent("vectorized")
        for access in nest.accesses:
            if access.scope.startswith(scope) and lane is not None:
                vector = size if _vectorised(nest, access) else 1
                total += nest.iterations / vector * cost(access.stride(lane) * access.bytes, access.bytes * vector)
                weight += nest.iterations / vector
    return total / weight if weight else 0.0


def _vectorised(nest: Nest, access: Access) -> bool:
    """Whether an access's innermost loop makes vectors of it."""
    loops = nest.kinds("vectorized")
    return bool(loops) and access.stride(loops[-1]) == 1


def _held(nests: Sequence[Nest], scope: str, kept: Sequence[str]) -> float:
    """Bytes of the buffers of a kind that are alive at once: what the loops touch that one filling of them runs.

    Those are the writer's loops that none of the readers shares, and of the shared ones the threads, `kept`, which hold
    a buffer together.
    """
    sizes: dict[str, float] = {}
    for nest in nests:
        for access in [a for a in nest.accesses if a.written and a.scope.startswith(scope)]:
            readers = [other for other in nests if other is not nest and other.reads(access.buffer)]
            depth = min((shared_loops(nest, other) for other in readers), default=0)
            alive = nest.inside(depth) | {n: nest.loops[n].extent for n in nest.kinds(*kept)}
            blocks = nest.kinds(*_BLOCKS)
            size = access.touched({n: extent for n, extent in alive.items() if n not in blocks}) * access.bytes
            sizes[access.buffer] = max(size, sizes.get(access.buffer, 0.0))
    return sum(sizes.values())
