"""What a machine is, as it says itself; and in what it isn't what a job needs."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any

import tvm
from tvm.target import Target

from tvm_axe.machines import backend_of
from tvm_axe.machines.registry import made_for
from tvm_axe.machines.target import architecture_of, cores, host_cpu, runs_on

__all__ = ["Fingerprint"]

_VERSIONS = ("tvm-axe", "apache-tvm")  # a record means the same for all who have these
_CLOCK = 0.05  # of which two clocks may differ
_SYSTEM = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Fingerprint:
    """What a machine is; what it doesn't say is empty, or 0.

    Attributes
    ----------
    cpu : str
        LLVM's name of its CPU.
    model : str
        The CPU's own name, such as ``"AMD EPYC 9354 32-Core Processor"``.
    cores : int
        Those that a server may use.
    mhz : int
        The CPU's highest clock, of which most virtual machines say nothing.
    gpu : str
        The name of its first GPU.
    gpu_code : str
        What code for that GPU is made for, its architecture.
    gpus : int
        How many GPUs it has.
    versions : dict of str to str
        Of this package and of the compiler.
    """

    cpu: str = ""
    model: str = ""
    cores: int = 0
    mhz: int = 0
    gpu: str = ""
    gpu_code: str = ""
    gpus: int = 0
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def own(cls) -> Fingerprint:
        """That of this machine, for this process."""
        gpu = tvm.cuda()
        return cls(
            host_cpu(),
            _model(),
            len(os.sched_getaffinity(0)),
            _mhz(),
            str(gpu.device_name) if gpu.exist else "",
            architecture_of(gpu) or "",
            next(number for number in count() if not tvm.cuda(number).exist),
            cls.versions_here(),
        )

    @classmethod
    def told(cls, told: Mapping[str, Any]) -> Fingerprint:
        """One that came as JSON, from a server that may say more, or less, than this version knows of."""
        return cls(**{own.name: told[own.name] for own in fields(cls) if own.name in told})

    def encode(self) -> dict[str, Any]:
        """It as JSON has it."""
        return asdict(self)

    def why_not(self, target: Target, versions: Mapping[str, str], devices: int = 1) -> list[str]:
        """In what the machine isn't one that a (resolved) target's code is for, in words; none if it is.

        Parameters
        ----------
        target
            The target.
        versions
            What the job itself runs with. What a machine doesn't say of its versions isn't compared.
        devices
            How many devices of the target the job needs at once.
        """
        found = [
            f"it has {name} {self.versions[name]}, not {version}"
            for name, version in versions.items()
            if self.versions.get(name, version) != version
        ]
        wanted = made_for(target)
        if not backend_of(target).on_host:
            if self.gpu_code != wanted:
                found.append(f"its GPU is {self.gpu_code or 'none'}, not {wanted}")
            elif self.gpus < devices:
                found.append(f"it has {self.gpus} GPUs, not {devices}")
            return found
        if self.cpu and wanted and not runs_on(wanted, self.cpu):
            found.append(f"its CPU is {self.cpu}, not {wanted}")
        if 0 < self.cores < devices * cores(target):
            found.append(f"it has {self.cores} cores for a server, not {devices * cores(target)}")
        return found

    def unlike(self, other: Fingerprint, on_host: bool) -> list[str]:
        """In what the machine is another one than the first of its key, in words; none if the two are alike."""
        found = []
        if on_host:
            if self.model != other.model:
                found.append(f"its CPU is a {self.model}, not a {other.model}")
            if self.mhz and other.mhz and abs(self.mhz / other.mhz - 1) > _CLOCK:
                found.append(f"its CPU runs at {self.mhz} MHz, not {other.mhz}")
        elif self.gpu != other.gpu:
            found.append(f"its GPU is a {self.gpu or 'none'}, not a {other.gpu}")
        return found

    @staticmethod
    def versions_here() -> dict[str, str]:
        """Those of this process, by distribution: what a machine says of itself, and what a job compares with."""
        return {name: metadata.version(name) for name in _VERSIONS}


def _model() -> str:
    """The CPU's name as the system has it."""
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        found = next((line for line in lines if line.startswith(("model name", "CPU part"))), "")
    return found.partition(":")[2].strip() or platform.machine()


def _mhz() -> int:
    """The highest clock of the first core that this process may run on."""
    first = min(os.sched_getaffinity(0))
    try:
        return int((_SYSTEM / f"cpu{first}/cpufreq/cpuinfo_max_freq").read_text(encoding="ascii")) // 1000
    except (OSError, ValueError):
        return 0
