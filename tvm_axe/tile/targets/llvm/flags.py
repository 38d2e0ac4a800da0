"""Flags in memory that workers share: the code that waits for them and that sets them.

TensorIR has no atomic loads and stores for CPUs; they come in as functions in LLVM's language. A wait acquires what a
signal releases. It gives up its processor while it polls, as there may be more devices than processors, and ends the
kernel with an error where nobody signals.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from tvm import sym
from tvm.script.ir_builder import tirx as T

from tvm_axe.tile.nodes import Signal, Wait
from tvm_axe.tile.targets.llvm.writer import Writer, nest

SECONDS = 20
"""How long a kernel waits for a flag: whoever signals later than that is lost."""

SOURCE = """
declare i32 @sched_yield()
declare i64 @time(ptr)
define linkonce_odr i32 @axe_wait(ptr %flag, i32 %value, i64 %seconds) {
entry:
  %begin = call i64 @time(ptr null)
  br label %loop
loop:
  %seen = load atomic i32, ptr %flag acquire, align 4
  %set = icmp sge i32 %seen, %value
  br i1 %set, label %done, label %rest
rest:
  %yielded = call i32 @sched_yield()
  %now = call i64 @time(ptr null)
  %waited = sub i64 %now, %begin
  %late = icmp sgt i64 %waited, %seconds
  br i1 %late, label %lost, label %loop
done:
  ret i32 1
lost:
  ret i32 0
}
define linkonce_odr void @axe_signal(ptr %flag, i32 %value) {
  store atomic i32 %value, ptr %flag release, align 4
  ret void
}
define linkonce_odr void @axe_signal_at_once(ptr %flag, i32 %value) {
  store atomic i32 %value, ptr %flag monotonic, align 4
  ret void
}
define linkonce_odr void @axe_signal_add(ptr %flag, i32 %value) {
  %before = atomicrmw add ptr %flag, i32 %value release
  ret void
}
define linkonce_odr void @axe_signal_add_at_once(ptr %flag, i32 %value) {
  %before = atomicrmw add ptr %flag, i32 %value monotonic
  ret void
}
"""


MOST = 32
"""The most flags whose code is written one by one, so that an error names which; more are a loop."""


def write_wait(writer: Writer, node: Wait) -> None:
    """Emit the wait for each of the flags, then their reset."""
    value = writer.expr(node.value)

    def wait(place: list[Any], name: str) -> None:
        done = T.call_extern("int32", "axe_wait", _address(node, place), value, T.int64(SECONDS))
        with T.Assert(
            done == 1, f"{node}: {name} was not signalled in {SECONDS} seconds; the device that does is lost"
        ):
            pass

    _each(writer, node, wait)
    if node.reset:
        _each(writer, node, lambda place, _: _call("axe_signal_at_once", node, place, 0))


def write_signal(writer: Writer, node: Signal) -> None:
    """Emit the signal to each of the flags."""
    name, value = f"axe_signal{'_add' * node.add}{'' if node.ordered else '_at_once'}", writer.expr(node.value)
    _each(writer, node, lambda place, _: _call(name, node, place, value))


def _each(writer: Writer, node: Wait | Signal, body: Callable[[list[Any], str], None]) -> None:
    """Emit `body` for each flag, of which it is given the indices and the name."""
    start, extents = writer.exprs(node.flags.start), node.flags.extents
    if math.prod(extents) <= MOST:
        for offsets in np.ndindex(*extents):
            named = ", ".join(str(sym.Analyzer().simplify(f + o)) for f, o in zip(node.flags.start, offsets))
            body([first + offset for first, offset in zip(start, offsets)], f"{node.flags.tile.name}[{named}]")
        return
    with nest([(0, extent) for extent in extents]) as at:
        body([first + offset for first, offset in zip(start, at)], "one of them")


def _call(name: str, node: Wait | Signal, place: list[Any], value: Any) -> None:
    T.evaluate(T.call_extern("void", name, _address(node, place), value))


def _address(node: Wait | Signal, place: list[Any]) -> Any:
    return T.address_of(node.flags.tile.buffer[tuple(place)])
