"""The records that come with the package: ``tuning_logs/<target>/<workload>/`` of its repository.

Records in a user's own folder hold for exactly the target that they were measured for. Those that ship would then serve
only who has the same CPU as the packager, so they are also measured for the generic levels x86-64-v3 (AVX2) and
x86-64-v4 (AVX-512), compiled without what a newer CPU adds, and stand in for every CPU with the same vector registers
and number of cores. Any trace gives a right program on any CPU; that a stranger's is the fastest is a guess, which is
why a record of the user's own always goes first, and tuning never counts the shipped ones as its trials.
"""

from __future__ import annotations

from pathlib import Path

from tvm.target import Target

import tvm_axe
from tvm_axe.machines import find_backend
from tvm_axe.records.folders import target_name, workload_suffix

__all__ = ["SHIPPED", "all_shipped", "shipped_folders", "stand_ins"]

_PACKAGE = Path(tvm_axe.__file__).parent
_CHECKOUT = _PACKAGE.parent / "tuning_logs"

SHIPPED = _CHECKOUT if _CHECKOUT.is_dir() else _PACKAGE / "tuning_logs"
"""Where they lie: beside the package in a checkout, in it once it is installed. They are only read."""


def stand_ins(target: Target) -> list[Target]:
    """The targets whose shipped records serve a resolved target, the best first: itself, then generic CPUs that it is.

    Examples
    --------
    >>> from tvm_axe.machines import resolve_target
    >>> target = resolve_target({"kind": "llvm", "mcpu": "haswell", "num-cores": 2})
    >>> [str(other.attrs["mcpu"]) for other in stand_ins(target)]
    ['haswell', 'x86-64-v3']
    """
    backend = find_backend(target)
    generic = () if backend is None else backend.stand_ins(target)
    return [target, *(other for other in generic if str(other) != str(target))]


def shipped_folders(target: Target, digest: str) -> list[Path]:
    """The shipped databases of a workload, by its hash, for exactly this target."""
    return sorted((SHIPPED / target_name(target)).glob(f"*{workload_suffix(digest)}"))


def all_shipped(target: Target) -> list[Path]:
    """The shipped databases of all workloads for exactly this target."""
    return sorted(folder for folder in (SHIPPED / target_name(target)).glob("*") if folder.is_dir())
