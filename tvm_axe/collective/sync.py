"""How workers wait for each other: the control block at the start of the arena, and the barrier.

Every 32-bit word of the block has one writer (the abort word is only ever set while commands run), so no atomic
read-modify-write is needed, which Python doesn't have. A worker arrives at a barrier by adding one to its own word and
then watches the words of the others, asleep in the kernel (futex) until they change: a waiting worker costs no core
that another one needs. Programs of a worker that is alone in its process do the same in compiled code, which looks at
the words for some microseconds before it sleeps and comes here only when a peer stays away: see `native`.

Memory order. What a worker wrote before the barrier must be seen by the others after it. x86-64 keeps stores in order
and loads in order, and each word is aligned and written by one instruction, so nothing more is needed there. On other
machines `_fence` makes a system call that passes a full memory barrier in the kernel: futex(FUTEX_WAKE) has one before
it looks for waiters (kernel/futex/waitwake.c, "smp_mb (B)"). It runs before the word is written and after all the words
were read. A sleeper isn't missed: FUTEX_WAIT compares the word under the lock that FUTEX_WAKE takes.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import time
from collections.abc import Iterable

from tvm_axe.collective.arena import round_up

SLICE = 0.05  # seconds; the longest that a sleeper goes without looking at the abort word and at the clock
_LINE = 128  # bytes; a word's neighbours in one cache line (or in the one fetched beside it) belong to its writer
_REPLY = 16384  # bytes of a worker's answer
_MASK = 0xFFFFFFFF

# The answer to a command.
DONE, FAILED, LATE, ABORTED, LOST = range(5)

_syscall = ctypes.CDLL(None).syscall  # lets go of the interpreter's lock while it waits
_syscall.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
)
SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}.get(platform.machine())
FUTEX_WAIT, FUTEX_WAKE = 0, 1  # without the PRIVATE flag: the waiters are other processes
_ORDERED = platform.machine() == "x86_64"


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _futex_wait(address: int, expected: int, seconds: float) -> None:
    """Sleep until the word is woken, unless it no longer holds `expected`; may return early."""
    if SYS_FUTEX is None:
        time.sleep(min(seconds, 0.0005))
        return
    timeout = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _syscall(SYS_FUTEX, address, FUTEX_WAIT, expected, ctypes.addressof(timeout), None, 0)


def _futex_wake(address: int) -> None:
    """Wake every sleeper on the word."""
    if SYS_FUTEX is not None:
        _syscall(SYS_FUTEX, address, FUTEX_WAKE, 0x7FFFFFFF, None, None, 0)


def _fence(address: int) -> None:
    """Order what this thread read and wrote before with what it reads and writes after; see the module's head."""
    if not _ORDERED:
        _futex_wake(address)


class Aborted(Exception):
    """The command was called off because another worker failed or died.

    Attributes
    ----------
    missing : list of int
        The ranks that this worker was waiting for.
    """

    def __init__(self, missing: list[int]) -> None:
        super().__init__("another worker failed")
        self.missing = missing


class Late(Exception):
    """Workers that didn't arrive at a barrier in time.

    Attributes
    ----------
    missing : list of int
        Their ranks.
    """

    def __init__(self, missing: list[int], timeout: float) -> None:
        super().__init__(f"worker(s) {missing} did not arrive at a barrier within {timeout:g} s")
        self.missing = missing


class Control:
    """The control block of a launch of `size` workers, over the first `nbytes(size)` bytes of the arena's mapping.

    Attributes
    ----------
    size : int
        The number of workers.
    ranks : tuple of int
        Those of them that share this memory, if not all do: a barrier is theirs.
    """

    def __init__(self, memory: mmap.mmap, size: int, ranks: Iterable[int] | None = None) -> None:
        self.size = size
        self.ranks = tuple(range(size) if ranks is None else ranks)
        self._bytes = memoryview(memory)[: self.nbytes(size)]
        self._words = self._bytes.cast("I")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))
        _Timespec.from_buffer(self._bytes, _LINE // 2).nanoseconds = int(SLICE * 1e9)

    def close(self) -> None:
        """Let go of the mapping, whoever still holds this object; no thread may be in one of its methods."""
        self._words.release()
        self._bytes.release()

    @staticmethod
    def nbytes(size: int) -> int:
        """Bytes that the block of `size` workers takes: the abort word, three lines and an answer for each worker."""
        return round_up(_LINE * (1 + 3 * size) + _REPLY * size)

    # For compiled code, which sleeps on the words too.
    @property
    def abort_address(self) -> int:
        """Where the abort word is."""
        return self._address

    @property
    def slice_address(self) -> int:
        """Where `SLICE` is, as the kernel takes a timeout."""
        return self._address + _LINE // 2

    def arrival_address(self, rank: int) -> int:
        """Where the word is that counts how often worker `rank` has arrived."""
        return self._address + 4 * self._word(0, rank)

    # A word's index: line 0 is the abort word (and SLICE); then the arrivals, the finished commands and the outcomes.
    def _word(self, kind: int, rank: int) -> int:
        return _LINE // 4 * (1 + kind * self.size + rank)

    def barrier(self, rank: int, timeout: float) -> None:
        """Arrive as worker `rank` and wait until every worker here has arrived as often: see `wait`."""
        self.arrive(rank)
        self.wait(rank, 0, timeout)

    def arrive(self, rank: int) -> None:
        """Say that what worker `rank` wrote and read until now is done."""
        mine = self._word(0, rank)
        generation = (self._words[mine] + 1) & _MASK
        _fence(self._address)
        self._words[mine] = generation
        _futex_wake(self._address + 4 * mine)

    def wait(self, rank: int, behind: int, timeout: float) -> None:
        """Wait, as worker `rank`, until every worker here has arrived as often as this one less `behind` times.

        Parameters
        ----------
        timeout : float
            Seconds from now that the others may take.

        Raises
        ------
        Aborted
            If the command was called off.
        Late
            If a worker didn't arrive in time.
        """
        words = self._words
        generation = (words[self._word(0, rank)] - behind) & _MASK
        deadline = time.monotonic() + timeout
        for peer in self.ranks:
            word = self._word(0, peer)
            while (generation - (seen := words[word]) - 1) & _MASK < _MASK // 2:  # seen < generation, wrapping around
                if words[0]:
                    raise Aborted(self._behind(generation))
                if time.monotonic() > deadline:
                    raise Late(self._behind(generation), timeout)
                _futex_wait(self._address + 4 * word, seen, SLICE)
        _fence(self._address)

    def _behind(self, generation: int) -> list[int]:
        arrived = [(peer, self._words[self._word(0, peer)]) for peer in self.ranks]
        return [peer for peer, seen in arrived if (generation - seen - 1) & _MASK < _MASK // 2]

    def abort(self) -> None:
        """Call the running command off: who waits at a barrier leaves it within `SLICE`."""
        self._words[0] = 1

    @property
    def aborted(self) -> bool:
        """Whether the running command was called off."""
        return bool(self._words[0])

    def reset(self, ranks: Iterable[int] | None = None) -> None:
        """Make ready for a new command, for `ranks` or for all; no worker may be in one."""
        for rank in self.ranks if ranks is None else ranks:
            self._words[self._word(0, rank)] = 0
        self._words[0] = 0

    def finish(self, rank: int, sequence: int, outcome: int, text: str) -> None:
        """Answer command `sequence` as worker `rank`; of a text that is too long the end is kept."""
        answer = text.encode(errors="replace")[-_REPLY:]
        start = _LINE * (1 + 3 * self.size) + _REPLY * rank
        self._bytes[start : start + len(answer)] = answer
        self._words[self._word(2, rank)] = outcome
        self._words[self._word(2, rank) + 1] = len(answer)
        _fence(self._address)
        self._words[self._word(1, rank)] = sequence
        _futex_wake(self._address + 4 * self._word(1, rank))

    def finished(self, rank: int, sequence: int) -> bool:
        """Whether worker `rank` has answered command `sequence`, the last one sent."""
        return self._words[self._word(1, rank)] == sequence

    def unfinished(self, ranks: Iterable[int], sequence: int) -> list[int]:
        """The ranks that haven't answered command `sequence`, the last one sent."""
        return [rank for rank in ranks if not self.finished(rank, sequence)]

    def await_finish(self, rank: int, sequence: int) -> None:
        """Sleep until worker `rank` answers command `sequence`, or up to `SLICE`."""
        word = self._word(1, rank)
        seen = self._words[word]
        if seen != sequence:
            _futex_wait(self._address + 4 * word, seen, SLICE)

    def all_done(self) -> bool:
        """Whether the last answer of every worker is that all went well."""
        _fence(self._address)
        return all(self._words[self._word(2, rank)] == DONE for rank in range(self.size))

    def answer(self, rank: int) -> tuple[int, str]:
        """Return the outcome (DONE, FAILED, LATE, ABORTED or LOST) and the text of worker `rank`'s last answer."""
        _fence(self._address)
        word = self._word(2, rank)
        start = _LINE * (1 + 3 * self.size) + _REPLY * rank
        return self._words[word], bytes(self._bytes[start : start + self._words[word + 1]]).decode(errors="replace")
