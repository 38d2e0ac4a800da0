"""What processes that tests start do; see tvm_axe.processes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any


def exit_with_3(_: Sequence[int], **__: Any) -> None:
    sys.exit(3)


def tell(descriptors: Sequence[int], names: Sequence[str]) -> None:
    """Write what the process is like, and the variables of these names, to a pipe."""
    found = {
        "variables": {name: os.environ.get(name) for name in names},
        "directory": os.getcwd(),
        "path": sys.path,
        "umask": os.umask(0),
        "cores": sorted(os.sched_getaffinity(0)),
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "ignored": sorted(
            number
            for number in signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}
            if signal.getsignal(number) is signal.SIG_IGN
        ),
        "interrupts": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "input": os.readlink("/proc/self/fd/0"),
        "outputs": [os.fstat(number).st_ino for number in (1, 2)],
        "leads": os.getsid(0) == os.getpid() == os.getpgid(0),
        "threads": len(os.listdir("/proc/self/task")),
        "parent": os.getppid(),
        "compiler": "tvm" in sys.modules,
        "descriptors": len(os.listdir("/proc/self/fd")) - 1,  # less the folder's own
    }
    with open(descriptors[0], "w") as pipe:
        json.dump(found, pipe)


def draw(descriptors: Sequence[int]) -> None:
    """Write a random number of numpy's and one of Python's to a pipe."""
    import random

    import numpy as np

    with open(descriptors[0], "w") as pipe:
        print(np.random.default_rng().random(), np.random.random(), random.random(), file=pipe)


def say(_: Sequence[int]) -> None:
    print("to output")
    print("to error", file=sys.stderr)


def fail(_: Sequence[int], **__: Any) -> None:
    raise ValueError("this is the one")


def die(_: Sequence[int]) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def stay(descriptors: Sequence[int]) -> None:
    """Say that the process is there, run another one, and stay whatever it is asked."""
    import subprocess

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    os.write(descriptors[0], f"{other.pid}\n".encode())
    while True:
        time.sleep(1)
