"""What the process of `test_child.py` answers: it does to itself what a request says."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvm_axe.meta.measure.child import Fatal, serve


def main(descriptors: Sequence[int]) -> None:
    """Be that process."""
    serve(descriptors, _handle)


def _handle(request: tuple[Any, ...]) -> Any:
    kind, *rest = request
    if kind == "pid":
        return os.getpid(), os.environ.get("SAID"), Path("/proc/self/oom_score_adj").read_text().strip()
    if kind == "raise":
        raise ValueError("a  long\nreason " + "x" * 400 + " with an end")
    if kind == "fault":
        return {}[kind] if not rest else rest[0].nothing if rest[0] else 1 + None
    if kind == "fatal":
        raise Fatal("the device is broken")
    if kind == "die":
        os.kill(os.getpid(), rest[0])
    if kind == "exit":
        os._exit(3)
    if kind == "start":
        return subprocess.Popen(["sleep", "60"]).pid
    print("heard", kind, flush=True)
    time.sleep(60)
    return None
