"""Where the time of a small all-reduce on GPUs goes, by samples of the clock in its kernel (`bench_mesh_gpu --phases`).

The kernels are built with samples, the product's without, and each size is measured as the product launches it and as
the kernel before ends its last block ("launched early"). Devices are threads of this process, each with a GPU, or all
with the first one (`--shared`), where the way between GPUs is left out; with `--devices 1` peers are left out, too, and
what remains is launching, loading, fencing and storing. A sample costs some nanoseconds itself, and a fence behind one
waits for it, so the sum of a phase is what tells, not its last digits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

import tvm_axe as axe
from tvm_axe.collective import Workers
from tvm_axe.collective.cuda import driver
from tvm_axe.collective.cuda.moving import Mover
from tvm_axe.layout import Mesh

SIZES = (16 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20)
STEPS = {"has its data": 1, "has sent it": 2, "has what peers sent": 3, "has stored the sum": 4, "has all sums": 7}
"""The samples of a thread that moves, behind the first; of an exchange in two steps, the sum is that of its part."""


def summary(samples: np.ndarray) -> dict[str, float]:
    """Microseconds by what they are of, medians over exchanges of the block that was last in each.

    Parameters
    ----------
    samples : array
        What `Mover.samples` returns.
    """
    kept = samples[(samples["ticks"][..., 0] != 0).any(axis=1)]
    blocks = (kept["ticks"][..., 0] != 0).all(axis=0)
    kept = kept[:, blocks]
    kept = kept[np.argsort(kept["nanoseconds"][:, :, 0].min(axis=1))]  # in the order of time, not of place
    ticks, nanoseconds = kept["ticks"], kept["nanoseconds"].astype("int64")
    rate = (ticks[..., -1] - ticks[..., 0]).sum() / (nanoseconds[..., 1] - nanoseconds[..., 0]).sum() * 1e3
    since = (ticks - ticks[..., :1]) / rate  # microseconds, each block's since it began
    came = {step: at for step, at in STEPS.items() if ticks[..., at].any()}
    found = {step: float(np.median(since[..., at].max(axis=1))) for step, at in came.items()}
    told = ticks[:, -1, 5] != 0  # whether the last block, which meets in any case, told a peer
    if told.any():
        found["has told a peer"] = float(np.median(since[told, -1, 5]))
        found["has been told"] = float(np.median(since[told, -1, 6]))
    found["ends"] = float(np.median(since[..., -1].max(axis=1)))
    begun, ended = nanoseconds[..., 0].min(axis=1), nanoseconds[..., 1].max(axis=1)
    if len(kept) > 1:
        found["from the end of one to the next"] = float(np.median(begun[1:] - ended[:-1])) * 1e-3
        found["from one to the next"] = float(np.median(np.diff(begun))) * 1e-3
    found["ticks a microsecond"] = float(rate)
    return found


def measured(
    devices: int,
    shared: bool,
    collective: Callable[[str, int, Workers], Callable[[int], list[float]]],
    options: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Print where the time goes at each size, on each device; returns the same. Launches have the options, too."""
    movers: list[tuple[Any, Mover]] = []
    begin, default = Mover.__init__, Mover.early

    def kept(self: Mover, *arguments: Any) -> None:
        begin(self, *arguments)
        movers.append((driver.call("cuCtxGetCurrent"), self))  # this is the device's thread

    found = []
    Mover.phases, Mover.__init__ = True, kept  # type: ignore[method-assign]
    try:
        for nbytes, early in product(SIZES, (False, True)):
            movers.clear()
            Mover.early = early
            mesh, told = Mesh({"tp": devices}), {**options, **({"gpus": (0,) * devices} if shared else {})}
            with axe.launch(mesh, engine="cuda", processes=False, barriers="device", **told) as workers:
                said = ", launched early" if early else ""
                seconds = collective("all_reduce", nbytes, workers)(5)
                print(f"all_reduce, {nbytes:,} bytes: {1e6 * float(np.median(seconds)):.2f} us with samples{said}")
                for number, samples in enumerate(sampled(movers)):
                    if not samples["ticks"].any():
                        print(f"  device {number}: it is no exchange")
                        continue
                    times = summary(samples)
                    found.append({"nbytes": nbytes, "early": early, "device": number, "us": times})
                    print(f"  device {number}: " + "; ".join(f"{name} {value:.2f}" for name, value in times.items()))
    finally:
        Mover.phases, Mover.early, Mover.__init__ = False, default, begin  # type: ignore[method-assign]
    return found


def sampled(movers: Sequence[tuple[Any, Mover]]) -> list[np.ndarray]:
    """What the devices' exchanges sampled, each read in its own GPU's context."""
    found = []
    for context, mover in movers:
        driver.call("cuCtxSetCurrent", context)
        found.append(mover.samples())
    return found
