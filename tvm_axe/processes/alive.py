"""Whether a process that isn't a child of this one is alive."""

from __future__ import annotations

import os


def open_process(pid: int) -> int | None:
    """Open the folder in /proc of a process, which stays that of this process whoever gets its number; None if gone."""
    try:
        return os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


def is_alive(folder: int) -> bool:
    """Whether the process of an open folder in /proc is neither gone nor waits to be collected by its parent."""
    try:
        stat = os.open("stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    except (FileNotFoundError, ProcessLookupError):
        return False
    try:
        return os.read(stat, 4096).rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except ProcessLookupError:
        return False
    finally:
        os.close(stat)
