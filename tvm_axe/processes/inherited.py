"""What a process inherits from the one that starts it.

A fresh process has it from the kernel. One that a server forks has the server's, and is given the rest: `Inherited` is
taken by who asks for the process and put in place by the process itself. `fixed` is what can't be put in place later;
for another value of it there must be another server.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm_axe.processes.fresh import module_path

# Variables that are read while a process starts and while it imports the compiler and numpy: by the loader and the C
# library, by Python, by numpy and OpenBLAS, by TVM and LLVM. A server has these for good.
_READ_AT_START = (
    *("LD_", "GLIBC_", "MALLOC_", "LANG", "LC_", "TZ", "PYTHON"),
    *("BLIS_", "GOTO_", "MKL_", "NPY_", "NUMPY_", "OMP_", "OPENBLAS_", "GOMP_", "KMP_"),
    *("CUDA_INJECTION", "LLVM_", "TVM_"),
)
_READ_WHEN_USED = "TVM_AXE_"  # this package's own
_PYTHONS = {signal.SIGPIPE, signal.SIGXFSZ}  # signals that Python itself ignores from its start on


@dataclass(frozen=True)
class Inherited:
    """What a forked process puts in place of the server's; its fields can be JSON.

    Attributes
    ----------
    environment : dict of str to str
        All the environment variables.
    path : list of str
        `sys.path`, as text.
    umask : int
        The permissions that new files don't get.
    affinity : list of int
        The cores that it may run on.
    blocked, ignored : list of int
        Signals.
    """

    environment: dict[str, str]
    path: list[str]
    umask: int
    affinity: list[int]
    blocked: list[int]
    ignored: list[int]

    @classmethod
    def own(cls, environment: Mapping[str, str]) -> Inherited:
        """Take what a process that this thread starts would inherit, with these variables set besides."""
        ignored = [number for number in _signals() if signal.getsignal(number) is signal.SIG_IGN]
        return cls(
            dict(os.environ) | dict(environment),
            module_path(),
            _umask(),
            sorted(os.sched_getaffinity(0)),
            [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            ignored,
        )

    def put_in_place(self) -> None:
        """Have this process, which was forked for it, be as it was asked for."""
        os.environ.clear()
        os.environ.update(self.environment)
        sys.path[:] = self.path
        os.umask(self.umask)
        os.sched_setaffinity(0, self.affinity)
        for number in _signals():
            if number in self.ignored:
                signal.signal(number, signal.SIG_IGN)
            elif number == signal.SIGINT:
                signal.signal(number, signal.default_int_handler)
            elif signal.getsignal(number) is not signal.SIG_DFL:
                signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)

    def fixed(self) -> tuple[Any, ...]:
        """What of this, and of this process, a server has to be started with."""
        variables = sorted(
            (name, value)
            for name, value in self.environment.items()
            if name.startswith(_READ_AT_START) and not name.startswith(_READ_WHEN_USED)
        )
        limits = [resource.getrlimit(limit) for limit in _limits()]
        identity = os.getresuid(), os.getresgid(), tuple(os.getgroups()), os.getpriority(os.PRIO_PROCESS, 0)
        return sys.executable, tuple(variables), tuple(limits), identity


def _signals() -> Sequence[int]:
    fixed = {signal.SIGKILL, signal.SIGSTOP} | _PYTHONS
    return sorted(int(number) for number in signal.valid_signals() if number not in fixed)


def _limits() -> list[int]:
    return sorted(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))


def _umask() -> int:
    """The umask, which can be asked for only by setting it, for all the threads."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1], 8) for line in status if line.startswith("Umask:"))
