"""A peer of scripts/bench_gpu.py in a process of its own, which has other versions of libraries than ours."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


class PeerProcess:
    """A script that answers each line of JSON with one: asked by keywords, `do` first."""

    def __init__(self, script: Path, libraries: Path) -> None:
        """Start the script by this interpreter, with `libraries` as the one folder on PYTHONPATH."""
        self.script = script
        self._libraries = libraries.resolve()
        self._process = self._started()

    def _started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(self.script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(self._libraries)},
        )

    def again(self) -> None:
        """End the script and start it anew: it knows nothing of what it was asked before."""
        self.end()
        self._process = self._started()

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """The answer to a question.

        Raises
        ------
        RuntimeError
            The script says that something failed, or has ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **more}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"{self.script.name} ended with exit code {self._process.wait()}; stderr says why")
        answer: dict[str, Any] = json.loads(line)
        if "failed" in answer:
            raise RuntimeError(f"{self.script.name}: {answer['failed']}")
        return answer

    def end(self) -> None:
        """Let the script end, by the end of its input."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and a question to it is left in the buffer
            self._process.stdin.close()
        self._process.wait()
