"""`print` on a GPU: each element's line by the first thread that has it, and a number's by the first of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.script import tirx as T

from tvm_axe import _tvm
from tvm_axe.tile import printing
from tvm_axe.tile.nodes import Print
from tvm_axe.tile.regions import Region
from tvm_axe.tile.targets.cuda.fragments.copies import Place
from tvm_axe.tile.targets.cuda.fragments.emitter import Emitter, Registers, region_constants
from tvm_axe.tile.targets.cuda.fragments.walk import FragmentWalk, StridedWalk


def print_lines(emitter: Emitter, node: Print) -> None:
    """Emit a Print."""
    thread, region = emitter.threads.index, node.region
    if region is None:
        with emitter.guarded([thread == 0]):
            _line(emitter, node, [], emitter.expression(node.value))
        return
    stored = emitter.storages[region.tile]
    if isinstance(stored, Registers):
        first = region_constants(region)
        walk = FragmentWalk(stored.fragment, first, region.extents)
        owner = walk.first_copy(thread)
        with walk.steps() as steps, emitter.guarded([*walk.conditions(thread, steps), *owner]):
            place = [low + step for low, step in zip(first, walk.index(thread, steps))]
            _line(emitter, node, place, stored.buffer[walk.register(steps)])
        return
    _of_memory(emitter, node, region)


def _of_memory(emitter: Emitter, node: Print, region: Region) -> None:
    thread, strides = emitter.threads.index, StridedWalk(region.shape, emitter.threads.count)
    with strides.steps() as steps, emitter.guarded(strides.conditions(thread, steps)):
        place = Place(emitter, region, strides.index(thread, steps))
        with emitter.guarded(place.bounds):
            _line(emitter, node, place.index, place.value())


def _line(emitter: Emitter, node: Print, place: Sequence[Any], value: Any) -> None:
    given = printing.arguments(node, place, value, [emitter.expression(at) for at in node.block])
    T.evaluate(_tvm.device_call(printing.function(node), *given, code=_code(node)))


def _code(node: Print) -> str:
    """A call of its own, since an unrolled tile has many."""
    text = "".join(f"\\{byte:03o}" for byte in printing.line(node).encode())
    value = {"float64": "double", "int64": "long", "uint64": "unsigned long"}[printing.kind(node)]
    count = 0 if node.region is None else len(node.region.extents)
    types = ["long"] * count + [value] + ["long"] * len(node.block)
    given = ", ".join(f"{of} a{number}" for number, of in enumerate(types))
    names = ", ".join(f"a{number}" for number in range(len(types)))
    return f"""
__device__ __noinline__ void {printing.function(node)}({given}) {{
  printf("{text}", {names});
}}
"""
