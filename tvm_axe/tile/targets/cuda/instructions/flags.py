"""Flags in global memory of any device: the code that waits for them and that sets them, at system scope.

A wait acquires what a signal releases (PTX ISA, "Memory Consistency Model"): what the signalling thread has
written, or has seen written behind a barrier, is seen by the waiting thread, and behind a barrier by its block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import _tvm
from tvm_axe.tile.nodes import Signal, Wait
from tvm_axe.tile.regions import Region
from tvm_axe.tile.walking import substitute_in

_POLLS = 1 << 22
"""Loads of a flag, about three seconds of them, after which a wait ends the kernel: whoever signals is lost."""

_UNSHARED = """
// Others write while this kernel runs: no pointer has its memory to itself, and no load moves over a wait.
#define __restrict__
"""

_WAIT = (
    _UNSHARED
    + """
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
)

_SIGNAL = (
    _UNSHARED
    + """
__forceinline__ __device__ void axe_SET(int* flag, int value) {
  asm volatile("SET [%0], %1;" :: "l"(flag), "r"(value) : "memory");
}
"""
)

_SETS = {
    (True, False): ("signal", "st.release.sys.global.s32"),
    (False, False): ("signal_at_once", "st.relaxed.sys.global.s32"),
    (True, True): ("signal_add", "red.release.sys.global.add.s32"),
    (False, True): ("signal_add_at_once", "red.relaxed.sys.global.add.s32"),
}
"""Names and instructions of signals, by whether they are ordered and whether they add."""

_PROXY = """
__forceinline__ __device__ void axe_proxy() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}
"""


def wait(node: Wait, index: list[Any], value: Any) -> None:
    """Emit one thread's wait for the flag at `index`."""
    flag = node.flags.tile.buffer.ptr_to(index)
    T.evaluate(_tvm.device_call("axe_wait", flag, value, T.int32(int(node.reset)), code=_WAIT))


def signal(node: Signal, index: list[Any], value: Any) -> None:
    """Emit one thread's signal to the flag at `index`."""
    name, instruction = _SETS[node.ordered, node.add]
    code = _SIGNAL.replace("axe_SET", f"axe_{name}").replace("SET", instruction)
    T.evaluate(_tvm.device_call(f"axe_{name}", node.flags.tile.buffer.ptr_to(index), value, code=code))


def order_copies() -> None:
    """Emit the fence behind which this thread's TMA copies see what a wait let it see.

    Source: PTX ISA, "Memory Consistency Model: Proxies".
    """
    T.evaluate(_tvm.device_call("axe_proxy", code=_PROXY))


def each(region: Region, values: Mapping[tirx.Var, Any]) -> Iterator[list[Any]]:
    """The indices of a region's flags, one after the other."""
    for offsets in np.ndindex(*region.extents):
        yield [substitute_in(start, values) + offset for start, offset in zip(region.start, offsets)]


def count(region: Region) -> int:
    """How many flags a region has."""
    return math.prod(region.extents)


def at(extents: tuple[int, ...], start: list[Any], number: Any) -> list[Any]:
    """The indices of flag `number`, row-major, of those that begin at `start`."""
    index: list[Any] = []
    for first, extent in reversed(list(zip(start, extents))):
        index.insert(0, first if extent == 1 else first + number % extent)
        number = number if extent == 1 else number // extent
    return index
