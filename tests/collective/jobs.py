"""Jobs of ranks that meet by TCP: their processes, some of which are taken for a host."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time


def start(ranks: int, *arguments: str, hosts_of: int, engine: str = "ranks") -> list[subprocess.Popen[str]]:
    """Start Python with the same arguments as each rank, with so many ranks on a simulated host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = os.environ | {
        "TVM_AXE_TEST_JOB": str(os.getpid()),
        "TVM_AXE_TEST_RANKS": str(ranks),
        "TVM_AXE_TEST_ENGINE": engine,
        "TVM_AXE_RANKS_PER_HOST": str(hosts_of),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [
        subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment | {"RANK": str(rank)},
            text=True,
        )
        for rank in range(ranks)
    ]


def ended(processes: list[subprocess.Popen[str]], seconds: float) -> list[tuple[str, str, int]]:
    """What each has said, on either stream, and its exit status."""
    found, deadline = [], time.monotonic() + seconds
    try:
        for process in processes:
            output, errors = process.communicate(timeout=max(1, deadline - time.monotonic()))
            found.append((output, errors, process.returncode))
    finally:
        for process in processes:
            process.kill()
    return found
