"""How GPUs wait for each other without the host: counters in each other's memory, which only grow.

Each device has a word for each peer in its slab of a mesh tensor, and a count of its own. To arrive, it adds one to its
count and stores that to its word in every peer's slab; to wait, it polls its own slab until every peer's word is as
large as its count less a number. Counts wrap around. Both are in one kernel of one block, so a run that is captured in
a CUDA graph meets anew each time that it is launched, and nothing is ever reset but after a failure.

Memory order. What kernels before this one wrote, to whichever device, happens before it, as they are in one stream. The
thread that stores to a peer fences first (``fence.acq_rel.sys``) and then releases at system scope, so all of that is
seen by who acquires the word there, and by the kernels behind it in its stream.

A wait has a limit of time, and ends when a peer calls it off; then it reports whom it has waited for to memory of the
host's, and the stream goes on: what follows computes nonsense, which nobody is given.

Source: PTX ISA, "Memory Consistency Model", "Release and Acquire Patterns" and "Causality Order".
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from tvm_axe.collective.cuda.driver import call
from tvm_axe.machines import cache, nvcc
from tvm_axe.machines.target import resolve_target

WORDS = 256
"""Words of 32 bits that a device's slab has; the first are the peers'."""
_COUNT, _OFF = 254, 255  # its own count; whether a peer has called a meeting off
_MAPPED = 2  # CU_MEMHOSTALLOC_DEVICEMAP
MOST = _COUNT
"""The most devices that meet."""

_SOURCE = f"""
extern "C" __global__ void meet(char* slabs, long long distance, int me, int devices, unsigned arrives, int behind,
                                unsigned* missing, unsigned long long limit) {{
  __shared__ unsigned count;
  unsigned* own = reinterpret_cast<unsigned*>(slabs + me * distance);
  if (threadIdx.x == 0) own[{_COUNT}] = count = own[{_COUNT}] + arrives;
  __syncthreads();
  int peer = threadIdx.x;
  if (peer >= devices) return;
  if (arrives) {{
    char* word = slabs + peer * distance + sizeof(unsigned) * me;
    asm volatile("fence.acq_rel.sys;" ::: "memory");
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(count) : "memory");
  }}
  if (behind < 0) return;
  unsigned target = count - behind, seen;
  unsigned long long start = 0, now;
  for (int polls = 0;; ++polls) {{
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(own + peer) : "memory");
    if (static_cast<int>(seen - target) >= 0) return;
    if (polls % 64) continue;
    unsigned off;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(off) : "l"(own + {_OFF}) : "memory");
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (start == 0) start = now;
    if (off || now - start > limit) break;
  }}
  missing[peer] = 1;
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
        The device's number, and how many there are.
    seconds : float
        The longest that it waits.
    """

    def __init__(
        self, arch: str, stream: Any, slabs: int, distance: int, rank: int, devices: int, seconds: float
    ) -> None:
        self._stream, self._slabs, self._distance, self._rank, self._devices = stream, slabs, distance, rank, devices
        target = resolve_target(f"cuda:{arch}")
        self._module = call("cuModuleLoadData", nvcc.cubin(_SOURCE, target, cache.Cache()))
        self._function = call("cuModuleGetFunction", self._module, b"meet")
        self._report = int(call("cuMemHostAlloc", 4 * WORDS, _MAPPED))
        self._missing = np.ctypeslib.as_array((ctypes.c_uint32 * WORDS).from_address(self._report))
        self._missing[:] = 0
        self._limit = int(seconds * 1e9)

    def meet(self, arrives: bool, behind: int | None) -> None:
        """Arrive, wait, or both: `behind` is how many arrivals of a peer may lack, None not to wait."""
        values = (
            ctypes.c_uint64(self._slabs),
            ctypes.c_int64(self._distance),
            ctypes.c_int32(self._rank),
            ctypes.c_int32(self._devices),
            ctypes.c_uint32(arrives),
            ctypes.c_int32(-1 if behind is None else behind),
            ctypes.c_uint64(self._report),
            ctypes.c_uint64(self._limit),
        )
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        threads = -(-self._devices // 32) * 32
        place = ctypes.addressof(pointers)
        call("cuLaunchKernel", self._function, 1, 1, 1, threads, 1, 1, 0, self._stream, place, 0)

    def missing(self) -> list[int]:
        """Return the peers that a meeting was given up for, once the stream has finished."""
        return [int(peer) for peer in self._missing.nonzero()[0]]

    def call_off(self) -> None:
        """Have the peers leave their meetings."""
        for peer in range(self._devices):
            word = self._slabs + peer * self._distance + 4 * _OFF
            call("cuMemsetD32Async", word, 1, 1, self._stream)

    def settle(self) -> None:
        """Begin anew, as all do when none is in a meeting."""
        call("cuMemsetD32Async", self._slabs + self._rank * self._distance, 0, WORDS, self._stream)
        call("cuStreamSynchronize", self._stream)
        self._missing[:] = 0

    def close(self) -> None:
        """Give back what it has."""
        del self._missing
        call("cuMemFreeHost", self._report)
        call("cuModuleUnload", self._module)
