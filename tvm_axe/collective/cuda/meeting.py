"""How GPUs wait for each other without the host: counters in each other's memory, which only grow.

Each device has rows of words in its slab of a mesh tensor, and in a row one for each peer and a count of its own. To
arrive, it adds one to its count and stores that to its word in every peer's row; to wait, it polls its own row until
every peer's word is as large as its count less a number. Counts wrap around. A meeting is a kernel of one block, on row
0, or a part of a kernel that moves what a collective moves, whose every block has a row
(`tvm_axe.collective.cuda.source`). So a run that is captured in a CUDA graph meets anew each time that it is launched,
and nothing is ever reset but after a failure.

All the blocks of a kernel that waits run at once (`driver.room`), and all devices have as many.

Memory order. What kernels before this one wrote, to whichever device, happens before it, as they are in one stream. The
thread that stores to a peer fences first (``fence.acq_rel.sys``) and then releases at system scope, so all of that is
seen by who acquires the word there, and by the kernels behind it in its stream.

A wait has a limit of time, and ends when a peer calls it off; then it reports whom it has waited for to memory of the
host's, and the stream goes on, without waiting again: what follows computes nonsense, which nobody is given.

Source: PTX ISA, "Memory Consistency Model", "Release and Acquire Patterns" and "Causality Order".
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from tvm_axe.collective.arena import round_up
from tvm_axe.collective.cuda.driver import call
from tvm_axe.collective.cuda.exchange import EXCHANGED, GROUP, LINE, VECTOR, Exchange
from tvm_axe.collective.cuda.source import Around
from tvm_axe.collective.cuda.waiting import BLOCKS, COUNT, MEET, OFF, PRIMITIVES, ROW, SENT
from tvm_axe.machines import cache, nvcc
from tvm_axe.machines.target import resolve_target

ROWS = BLOCKS
_TOLD = 8 << 20  # bytes of a half of the staging, for messages of which a block says that they are there
_MARKED = 1 << 20  # bytes that a device sends in all, up to which words say so themselves; a third more are sent
_PER_BLOCK = 3 << 10  # bytes that a block sends, where there are blocks enough; one stores some 30 a nanosecond
_MAPPED = 2  # CU_MEMHOSTALLOC_DEVICEMAP


def _marked(vectors: int) -> int:
    """The bytes of so many vectors as marked words, in whole lines."""
    return round_up(-(-vectors // GROUP), LINE) * (GROUP + 1) * VECTOR


def _region(devices: int) -> int:
    """The bytes that a block has for a device's marked words: for two steps, or twice the share of fewer blocks."""
    return 2 * _marked(-(-_MARKED // (max(1, devices - 1) * (ROWS - 1) * VECTOR)))


WORDS = ROWS * ROW + 2 * (_TOLD + max(n * ROWS * _region(n) for n in range(1, EXCHANGED + 1))) // 4
"""Words of 32 bits that a device's slab has: the rows, and the staging of exchanges (see `exchange`)."""
MOST = SENT
"""The most devices that meet."""

_SOURCE = f"""
{PRIMITIVES}{MEET}
extern "C" __global__ void meet(char* slabs, long long distance, int me, int devices, unsigned arrives, int behind,
                                unsigned* missing, unsigned long long limit) {{
  __shared__ unsigned count;
  unsigned* own = reinterpret_cast<unsigned*>(slabs + me * distance);
  if (threadIdx.x == 0) own[{COUNT}] = count = own[{COUNT}] + arrives;
  __syncthreads();
  int peer = threadIdx.x;
  if (peer >= devices) return;
  if (arrives) axe_tell(reinterpret_cast<unsigned*>(slabs + peer * distance) + me, count);
  if (behind >= 0) axe_await(own + peer, count - behind, own + {OFF}, missing + peer, limit);
}}
extern "C" __global__ void hold(unsigned long long nanoseconds) {{
  unsigned long long start = axe_nanoseconds();
  while (axe_nanoseconds() - start < nanoseconds) {{}}
}}
"""


class Meeting:
    """A device's meetings with its peers, in the order in which its stream is told of them.

    Parameters
    ----------
    arch : str
        The GPU's architecture.
    stream : CUstream
        The stream.
    slabs, distance : int
        The address of the first device's slab of a tensor of `WORDS` words of zeros each, and the bytes from one slab
        to the next.
    rank, devices : int
        The device's number among those that meet, and how many these are.
    seconds : float
        The longest that it waits.
    """

    def __init__(
        self, arch: str, stream: Any, slabs: int, distance: int, rank: int, devices: int, seconds: float
    ) -> None:
        self._stream, self._slabs, self._distance, self.rank, self.devices = stream, slabs, distance, rank, devices
        target = resolve_target(f"cuda:{arch}")
        self._module = call("cuModuleLoadData", nvcc.cubin(_SOURCE, target, cache.Cache()))
        self._function, self._hold = (call("cuModuleGetFunction", self._module, name) for name in (b"meet", b"hold"))
        self._report = int(call("cuMemHostAlloc", 4 * MOST, _MAPPED))
        self._missing = np.ctypeslib.as_array((ctypes.c_uint32 * MOST).from_address(self._report))
        self._missing[:] = 0
        self._limit = int(seconds * 1e9)

    def meet(self, arrives: bool, behind: int | None) -> None:
        """Arrive, wait, or both: `behind` is how many arrivals of a peer may lack, None not to wait."""
        if self.devices == 1:
            return
        values = (
            ctypes.c_uint64(self._slabs),
            ctypes.c_int64(self._distance),
            ctypes.c_int32(self.rank),
            ctypes.c_int32(self.devices),
            ctypes.c_uint32(arrives),
            ctypes.c_int32(-1 if behind is None else behind),
            ctypes.c_uint64(self._report),
            ctypes.c_uint64(self._limit),
        )
        self._launch(self._function, -(-self.devices // 32) * 32, values)

    def hold(self, nanoseconds: int) -> None:
        """Have the stream stand still for so long."""
        self._launch(self._hold, 1, (ctypes.c_uint64(nanoseconds),))

    def _launch(self, function: Any, threads: int, values: Sequence[Any]) -> None:
        """Launch a block of so many threads; `values` are objects of ctypes."""
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        call("cuLaunchKernel", function, 1, 1, 1, threads, 1, 1, 0, self._stream, ctypes.addressof(pointers), 0)

    def around(self, before: bool, after: bool) -> Around:
        """Return what a kernel that moves is told to meet peers before, after, or both."""
        place = self._slabs, self._distance
        return Around(*place, self._limit, self._report, self.rank, self.devices, before, after)

    def exchange(
        self, source: int, target: int, nbytes: int, room: int, stride: int = 0, twice: bool = False
    ) -> tuple[Exchange, int, bool] | None:
        """Return what a kernel is told to exchange bytes, its blocks that move, and whether words are marked.

        None if it isn't for as many bytes or devices, or for where they lie.

        Parameters
        ----------
        source, target : int
            Addresses of the device's own slabs.
        nbytes : int
            The bytes that each device sends to each; in two steps, those that all add.
        room : int
            How many blocks may wait at once.
        stride : int
            The bytes from what is for one device to what is for the next; 0 if all are sent the same.
        twice : bool
            Whether it is an all-reduce in two steps: devices send each other parts, and then the parts' sums.
        """
        if nbytes <= 0 or self.devices > EXCHANGED or any(n % VECTOR for n in (source, target, nbytes, stride)):
            return None
        total, steps = nbytes // VECTOR, 1 + twice
        part = -(-total // self.devices) if twice else total  # vectors from one device to another, in a step
        sent = part * VECTOR * max(1, self.devices - 1)
        marked, wanted = sent <= _MARKED, -(-steps * sent // _PER_BLOCK)
        share = -(-part // max(1, min(room - marked, ROWS - marked, wanted)))
        # Marks are never where messages without marks were, of which some could look like one.
        start, region = 0, _TOLD // self.devices // ROWS // VECTOR * VECTOR
        if marked:
            start, region = 2 * _TOLD, _region(self.devices)
        half = region * ROWS
        if (steps * _marked(share) if marked else share * VECTOR) > region or (twice and not marked):
            return None
        apart = part if twice else stride // VECTOR
        told = Exchange(source, target, total, share, apart, 4 * ROWS * ROW + start, half, region)
        return told, -(-part // share), marked

    def missing(self) -> list[int]:
        """Return the peers that a meeting was given up for, once the stream has finished."""
        return [int(peer) for peer in self._missing.nonzero()[0]]

    def call_off(self) -> None:
        """Have the peers leave their meetings."""
        for peer in range(self.devices):
            word = self._slabs + peer * self._distance + 4 * OFF
            call("cuMemsetD32Async", word, 1, 1, self._stream)

    def settle(self) -> None:
        """Begin anew, as all do when none is in a meeting."""
        call("cuMemsetD32Async", self._slabs + self.rank * self._distance, 0, WORDS, self._stream)
        call("cuStreamSynchronize", self._stream)
        self._missing[:] = 0

    def close(self) -> None:
        """Give back what it has."""
        del self._missing
        call("cuMemFreeHost", self._report)
        call("cuModuleUnload", self._module)
