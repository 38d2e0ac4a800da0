"""Flags in global memory of any device: what waits for them, and what sets them, at system scope."""

from __future__ import annotations

from typing import Any

from tvm.backend.cuda.op import cuda_func_call
from tvm.script import tirx as T

_POLLS = 1 << 22  # about three seconds, then a trap: a peer is lost

_WAIT = """
__forceinline__ __device__ void axe_wait(const int* flag, int value, int reset) {
  int seen;
  for (int polls = 0;; ++polls) {
    asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
    if (seen >= value) break;
    if (polls > POLLS) __trap();
  }
  if (reset) asm volatile("st.relaxed.sys.global.s32 [%0], %1;" :: "l"(flag), "r"(0) : "memory");
}
""".replace("POLLS", str(_POLLS))

_SIGNAL = """
__forceinline__ __device__ void axe_signal(int* flag, int value, int mode) {
  if (mode & 2) asm volatile("red.release.sys.global.add.s32 [%0], %1;" :: "l"(flag), "r"(value) : "memory");
  else if (!mode) asm volatile("st.relaxed.sys.global.s32 [%0], %1;" :: "l"(flag), "r"(value) : "memory");
  else asm volatile("st.release.sys.global.s32 [%0], %1;" :: "l"(flag), "r"(value) : "memory");
}
"""

_PROXY = """
__forceinline__ __device__ void axe_proxy() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
"""


def wait(flag: Any, value: Any, reset: bool) -> None:
    """One thread polls until the flag is at least `value`."""
    T.evaluate(cuda_func_call("axe_wait", flag, value, T.int32(int(reset)), source_code=_WAIT))


def signal(flag: Any, node: Any, value: Any) -> None:
    """One thread sets the flag; if it is ordered, behind all that it has seen written."""
    mode = T.int32(int(node.ordered) + 2 * int(node.add))
    T.evaluate(cuda_func_call("axe_signal", flag, value, mode, source_code=_SIGNAL))


def proxy() -> None:
    """What this thread has seen written is seen by the TMA copies that it issues from here on."""
    T.evaluate(cuda_func_call("axe_proxy", source_code=_PROXY))


def each(region: Any) -> list[tuple[int, ...]]:
    """The offsets of a region's elements."""
    found: list[tuple[int, ...]] = [()]
    for extent in region.extents:
        found = [(*before, at) for before in found for at in range(extent)]
    return found
