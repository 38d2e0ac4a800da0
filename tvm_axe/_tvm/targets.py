"""What LLVM knows of this host and of CPUs."""

from __future__ import annotations

import functools
import json

from tvm.target import Target
from tvm.target import codegen as _codegen


def host_triple() -> str:
    """LLVM's triple of this host."""
    return str(_codegen.llvm_get_system_triple())


def system_cpu() -> str:
    """LLVM's name of this host's CPU, whether or not the running system lets all of it be used."""
    return str(_codegen.llvm_get_system_cpu())


def is_valid_cpu(name: str, triple: str) -> bool:
    """Whether LLVM knows the CPU; the code generator only logs an unknown one, and compiles for a generic CPU."""
    return bool(_codegen.llvm_is_valid_cpu(name, triple))


def cpu_features(target: Target) -> frozenset[str]:
    """LLVM's names of what the target's CPU has, such as ``avx512f``."""
    return _cpu_features(str(target))


@functools.cache
def _cpu_features(target: str) -> frozenset[str]:
    return frozenset(str(name) for name in _codegen.llvm_get_cpu_features(Target(json.loads(target))))
