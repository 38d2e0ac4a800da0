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


_CHECKED = ("-vectorize-scev-check-threshold:uint=0", "-max-interleave-group-factor:uint=1")
"""What LLVM's loop vectorizer is told: no loop is taken that is right only if numbers don't wrap.

LLVM 22 leaves the check of that out where it would fail, and where another of wider numbers is made
(llvm/llvm-project 225086, 118184), so that of a loop over ``i`` with ``i % 4`` in an index vectors read on at ``i``.
The first option refuses such a loop; where groups of strided accesses or a cost need one later, nothing asks again,
so that there are no groups. Vectors that a schedule asks for are no matter of LLVM's.
"""


def rightly_vectorized(target: Target) -> Target:
    """A target of LLVM's, with the options that its vectorizer has to be right with."""
    config = dict(target.export())
    return Target({**config, "cl-opt": [*config.get("cl-opt", ()), *_CHECKED]})


def cpu_features(target: Target) -> frozenset[str]:
    """LLVM's names of what the target's CPU has, such as ``avx512f``."""
    return _cpu_features(str(target))


@functools.cache
def _cpu_features(target: str) -> frozenset[str]:
    return frozenset(str(name) for name in _codegen.llvm_get_cpu_features(Target(json.loads(target))))
