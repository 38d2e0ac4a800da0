"""The code by which a kernel that is profiled writes down when it waits (`tvm_axe.tile.profiling`).

A role has a `Waits`, around whose `around` each of its waits is emitted. That of a kernel that isn't profiled emits
nothing. Clocks are read by one thread of a role, in the kernel's first blocks; to read them is ordered with waits, as
all of these are volatile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import _tvm
from tvm_axe.tile.profiling import HEADER, LABELS, Samples

_CLOCK = """
__device__ __forceinline__ long axe_clock() { return static_cast<long>(clock64()); }
"""

_BEGIN = """
__device__ __forceinline__ void axe_samples_begin(void* to) {
  volatile long* at = reinterpret_cast<long*>(to);
  unsigned int processor;
  unsigned long nanoseconds;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(processor));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
  at[5] = processor;
  at[1] = static_cast<long>(nanoseconds);
  at[0] = static_cast<long>(clock64());
}
"""

_SAMPLE = f"""
__device__ __forceinline__ void axe_sample(void* to, int count, int most, int label, long begin) {{
  long cycles = static_cast<long>(clock64()) - begin;
  if (count < most) {{
    volatile long* at = reinterpret_cast<long*>(to) + {HEADER} + 2 * count;
    at[0] = begin;
    at[1] = cycles * {LABELS} + label;
  }}
}}
"""

_END = """
__device__ __forceinline__ void axe_samples_end(void* to, int count) {
  volatile long* at = reinterpret_cast<long*>(to);
  unsigned long nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
  at[2] = static_cast<long>(clock64());
  at[3] = static_cast<long>(nanoseconds);
  at[4] = count;
}
"""


class Waits:
    """The waits of a role, which nobody writes down."""

    @contextlib.contextmanager
    def around(self, what: str) -> Iterator[None]:
        """What is emitted inside waits for `what`."""
        yield

    def end(self) -> None:
        """Emit what the role does at its end."""


class SampledWaits(Waits):
    """Those that are written down, from where it is made on.

    Parameters
    ----------
    samples : Samples
        Where.
    block : Expr
        The block's number in the order of launching.
    role : Expr or int
        The role's number.
    conditions : Expr
        What holds in the one thread of the role that writes.
    """

    def __init__(self, samples: Samples, block: Any, role: Any, *conditions: Any) -> None:
        self.samples = samples
        self.writes = tirx.all(block < samples.blocks, *conditions)
        first = tirx.if_then_else(self.writes, (block * len(samples.roles) + role) * samples.stride, 0)
        self.first, self.count = T.alloc_local([1], "int32"), T.alloc_local([1], "int32")
        self.began = T.alloc_local([1], "int64")
        T.buffer_store(self.first, first, [0])
        T.buffer_store(self.count, 0, [0])
        with self._writing():
            T.evaluate(_tvm.device_call("axe_samples_begin", self._place(), code=_BEGIN))

    @contextlib.contextmanager
    def around(self, what: str) -> Iterator[None]:
        label = self.samples.label(what)
        T.buffer_store(self.began, _tvm.device_call("axe_clock", code=_CLOCK, gives="int64"), [0])
        yield
        with self._writing():
            given = (self.count[0], self.samples.most, label, self.began[0])
            T.evaluate(_tvm.device_call("axe_sample", self._place(), *given, code=_SAMPLE))
            T.buffer_store(self.count, self.count[0] + 1, [0])

    def end(self) -> None:
        with self._writing():
            T.evaluate(_tvm.device_call("axe_samples_end", self._place(), self.count[0], code=_END))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with T.If(self.writes), T.Then():
            yield

    def _place(self) -> Any:
        return self.samples.buffer.ptr_to([self.first[0]])


def waits_of(samples: Samples | None, block: Any, role: Any, *conditions: Any) -> Waits:
    """What a role writes its waits by."""
    return Waits() if samples is None else SampledWaits(samples, block, role, *conditions)


def parameters(func: tirx.PrimFunc, samples: Samples | None) -> list[Any]:
    """A program's parameters, behind which stands the memory for samples."""
    return [*func.params, *(() if samples is None else (samples.buffer,))]
