"""The memory that the workers of one launch share.

It is one anonymous file (`memfd_create`), handed to the worker processes as an open descriptor. It never has a name, so
nothing can be left behind in /dev/shm, whoever dies and however. The file is as long as the machine's memory, or as
half of the address space that is left where that is limited, and maps once into each process, but it is sparse: only
what is allocated takes memory, and that is taken when it is allocated, so that a machine without room for it says so in
an error instead of killing the process that first touches a page.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
from bisect import insort

import numpy as np

from tvm_axe.errors import WorkerError

PAGE = mmap.PAGESIZE


def round_up(nbytes: int, page: int = PAGE) -> int:
    """Return the least multiple of the page size that holds `nbytes`."""
    return -(-nbytes // page) * page


# The limits of a process that starting workers may meet, by the error that comes of it.
_LIMITS = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EFBIG: "raise the limit of the size of files (ulimit -f), as shared memory counts as one",
    errno.ENOMEM: "raise the limit of the address space (ulimit -v), or make memory free",
    errno.EAGAIN: "raise the limit of processes (ulimit -u)",
}


def limited(what: str, error: OSError) -> WorkerError:
    """Return the error that says what did not succeed, and which limit of the process is to be raised if it is one."""
    remedy = _LIMITS.get(error.errno or 0)
    return WorkerError(f"{what}: {error}" + (f"; {remedy}" if remedy else ""))


def _room() -> int:
    """Return how many bytes an arena may map here: the machine's memory, or half of the address space that is left."""
    memory = os.sysconf("SC_PHYS_PAGES") * PAGE
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return memory
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * PAGE
    return min(memory, max(limit - used, 0) // 2 // PAGE * PAGE)


class Arena:
    """A growing file of shared pages, mapped once; offsets into it mean the same in every process.

    Only the controller allocates and frees. Arrays made over `map` keep the mapping alive, so a view that outlives the
    launch is still valid memory.

    Attributes
    ----------
    fd : int
        The file; closed by `close`.
    map : mmap.mmap
        The mapping of the whole file; not after `close`.
    page : int
        Bytes of which what is allocated is a multiple, and begins at a multiple of.
    closed : bool
        Whether `close` was called.

    Raises
    ------
    WorkerError
        If the address space has no room for the mapping.
    """

    def __init__(self, fd: int, size: int, page: int = PAGE) -> None:
        self.fd = fd
        self.page = page
        self.size = size
        try:
            self.map = mmap.mmap(fd, size)
        except OSError as error:
            raise limited(
                f"cannot map {size >> 20} MiB of address space for the workers' shared memory", error
            ) from error
        self.map.madvise(mmap.MADV_DONTDUMP)  # a core dump would fill in every hole
        self.closed = False
        self._used: dict[int, int] = {}
        self._holes: list[tuple[int, int]] = [(0, size)]  # (offset, length), by offset, never touching each other

    @classmethod
    def create(cls, size: int | None = None, page: int = PAGE) -> Arena:
        """Make an empty arena of `size` bytes; as large as the machine and this process's limits let it if left out."""
        size = (_room() if size is None else size) // page * page
        try:
            fd = os.memfd_create("tvm_axe", os.MFD_CLOEXEC)
        except OSError as error:
            raise limited("no shared memory for the workers", error) from error
        try:
            os.ftruncate(fd, size)
            return cls(fd, size, page)
        except OSError as error:
            os.close(fd)
            raise limited(f"no shared memory of {size >> 20} MiB for the workers", error) from error
        except BaseException:
            os.close(fd)
            raise

    def allocate(self, nbytes: int, take: bool = True) -> int:
        """Return the offset of `nbytes` of zeros, at the start of a page.

        Parameters
        ----------
        nbytes : int
            How many.
        take : bool
            Whether the machine's memory is taken for them; else they are a hole in the file, which `take` fills.

        Raises
        ------
        WorkerError
            If the machine hasn't that much shared memory left.
        """
        length = max(round_up(nbytes, self.page), self.page)
        i = next((i for i, (_, room) in enumerate(self._holes) if room >= length), None)
        if i is None:
            raise WorkerError(self._no_space(length, f"the arena has {self.size >> 20} MiB, as much as could be had"))
        offset, room = self._holes[i]
        if take:
            self.take(offset, length)
        self._holes[i : i + 1] = [(offset + length, room - length)] if room > length else []
        self._used[offset] = length
        return offset

    def free(self, offset: int) -> None:
        """Give the pages at `offset`, as returned by `allocate`, back to the machine."""
        length = self._used.pop(offset)
        self.drop(offset, length)
        insort(self._holes, (offset, length))
        merged: list[tuple[int, int]] = []
        for start, room in self._holes:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((start, room))
        self._holes = merged

    def take(self, offset: int, nbytes: int) -> None:
        """Give pages that are a hole in the file memory, of zeros; for those that another arena has allocated.

        Raises
        ------
        WorkerError
            If the machine hasn't that much shared memory left.
        """
        try:
            os.posix_fallocate(self.fd, offset, round_up(nbytes))
        except OSError as error:
            self.drop(offset, nbytes)
            raise WorkerError(self._no_space(nbytes, str(error))) from error

    def drop(self, offset: int, nbytes: int) -> None:
        """Make pages a hole in the file again, which reads as zeros."""
        self.map.madvise(mmap.MADV_REMOVE, offset, round_up(nbytes))

    def bytes(self, offset: int, nbytes: int) -> np.ndarray:
        """Return part of the memory as an array of bytes."""
        return np.ndarray(nbytes, "uint8", buffer=self.map, offset=offset)

    def close(self) -> None:
        """Close the file; the memory goes when the last array over it does."""
        self.closed = True
        os.close(self.fd)
        del self.map

    def _no_space(self, length: int, why: str) -> str:
        used = sum(self._used.values())
        return f"no shared memory for {length >> 10} KiB more (in use: {used >> 10} KiB): {why}"
