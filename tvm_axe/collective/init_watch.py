"""A script that runs beside a rank while it starts MPI, which the rank can't leave, and cleans up if it ends there.

It is given the rank's process id, and its standard input is a pipe that the rank writes a byte to when it is through;
without one the pipe ends when the rank does. MPICH's ranks share a file with a name until all have opened it. Its
standard error is the rank's: if the rank was ended by its clock, this says so.
"""

import contextlib
import os
import select
import signal
import sys
import time

_SLICE = 0.05  # seconds between two looks at what the rank has mapped


def mpich_files(pid: int) -> set[str]:
    """Return the shared memory of MPICH's that has a name and that a process has mapped."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
        return {field for line in maps for field in line.split() if field.startswith("/dev/shm/mpich_shm_")}
    return set()


def take_name_off(names: set[str]) -> None:
    """Have files go when nobody uses them any more, unless another rank was faster."""
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name)


def main(rank: int, end: float, message: str) -> None:
    """Watch until the rank is through or ends; if it is past the `end` of the machine's clock then, print a message."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # as long as the rank is there, so is this
    names: set[str] = set()
    while not select.select([0], [], [], _SLICE)[0]:
        names |= mpich_files(rank)
    if os.read(0, 1):
        return
    take_name_off(names)
    if time.monotonic() >= end:
        print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3])
