"""Workers that stumble: random sleeps round everything that their programs call, for `fuzz_schedules --delays`.

Kernels, collectives, barriers and the waits between chunks are all calls of the virtual machine, which takes an
instrument: what it is to call before and after each. Sleeps there move every stage of every worker against the others,
in compiled barriers too, so that a barrier that is missing shows as a wrong answer.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

from tvm_axe.collective import local, serving, worker

LONGEST = 0.004
"""Seconds."""


class _Stumbler:
    """An instrument that sleeps now and then."""

    def __init__(self, rank: int) -> None:
        self.rng = random.Random(rank)

    def __call__(self, function: Any, name: str, before: bool, result: Any, *arguments: Any) -> None:
        if not name.startswith("vm.builtin") and self.rng.random() < 0.5:
            time.sleep(self.rng.random() * LONGEST)


_load = worker.COMMANDS["load"]


def _stumbling_load(self: worker.Worker, program: int, *arguments: Any) -> None:
    _load(self, program, *arguments)
    self._programs[program].set_instrument(_Stumbler(self.rank))


def install() -> None:
    """Have the workers of this process stumble, and those that it starts."""
    worker.COMMANDS["load"] = _stumbling_load
    local._ENTRY = f"{__name__}:serve"
    folder = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))


def serve(*arguments: Any, **named: Any) -> None:
    """Be a worker that stumbles, alone in this process."""
    worker.COMMANDS["load"] = _stumbling_load
    serving.serve(*arguments, **named)
