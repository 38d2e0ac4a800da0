"""TensorIR: schedules and their handles, traces as JSON, functions of other types, calls on parts of a buffer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401  (gives numpy the names of the small float types)
import numpy as np
from tvm import ir, s_tir, tirx
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.s_tir.schedule import _ffi_api as _schedule_ffi


def block_realize(sch: s_tir.Schedule, block: SBlockRV) -> s_tir.SBlockRealize:
    """The block with the expressions that its iterators are bound to; the public `sch.get` leaves them out."""
    return _schedule_ffi.GetSBlockRealize(sch, block)


def statement(sch: s_tir.Schedule, rv: SBlockRV | LoopRV) -> Any:
    """The block or loop that a handle stands for; the public `sch.get` looks at types for sixty times as long."""
    return _schedule_ffi.ScheduleGet(sch, rv)


def has_partials(dtype: Any) -> bool:
    """Whether upstream's `rfactor` takes reductions in a type apart: it knows no beginning of a truth value."""
    return str(dtype) != "bool"


def with_name(block: s_tir.SBlock, name: str) -> s_tir.SBlock:
    """The block under another name."""
    return s_tir.SBlock(
        block.iter_vars, block.reads, block.writes, name, block.body, block.init, block.alloc_buffers,
        block.match_buffers, block.annotations, block.span,
    )  # fmt: skip


def rename_block(sch: s_tir.Schedule, block: s_tir.SBlock, name: str) -> None:
    """Give a block of a schedule another name, which no trace has an instruction for; handles stay valid."""
    renamed = with_name(block, name)
    sch.state.replace(sch.get_sref(block), renamed, {block: renamed})


def put_back(sch: s_tir.Schedule, before: s_tir.Schedule) -> None:
    """Have a schedule be what its copy `before` is, which is used up: state, trace, and what the handles stand for.

    The object in Python is; in C++ it is another. So whoever wrote a rule in Python that MetaSchedule calls, and that
    goes on after an error, has to return the schedule, as such a rule does.
    """
    sch.__move_handle_from__(before)


def plain(value: Any) -> Any:
    """What a trace's `as_json` returns as lists, strings and numbers of Python's own."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, tirx.IntImm | tirx.FloatImm):
        return value.value
    if isinstance(value, tirx.IndexMap):
        return str(ir.save_json(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    return value


_FLOATS = re.compile(r"(?:bfloat|float)\d+(?:_\w+?)?(x\d+)?")


def widened(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with every type of floating point float64: parameters, buffers, constants, casts and calls.

    A constant stays the number that its own type rounds it to.
    """
    graph = json.loads(str(ir.save_json(func)))
    nodes = graph["nodes"]
    for node in nodes:
        if node["type"] == "ir.FloatImm":
            held = np.dtype(nodes[node["data"]["ty"]]["data"]["dtype"])
            with np.errstate(over="ignore"):
                node["data"]["value"] = float(np.asarray(node["data"]["value"]).astype(held))
    for node in nodes:
        found = _FLOATS.fullmatch(node["data"]["dtype"]) if node["type"] == "ir.PrimType" else None
        if found:
            node["data"]["dtype"] = "float64" + (found[1] or "")
    return ir.load_json(json.dumps(graph))


def tensor_argument(buffer: tirx.Buffer, start: tirx.Expr | None, shape: Sequence[int]) -> tirx.Expr:
    """The argument of a packed call that is a dense tensor of `shape` whose first element is ``buffer[start, 0, ...]``.

    A buffer as an argument is passed whole, and with an element offset, which the callee would refuse.
    """
    data = buffer.data if start is None else tirx.address_of(tirx.BufferLoad(buffer, [start] + [0] * (len(shape) - 1)))
    extents = tirx.call_intrin("handle", "tirx.tvm_stack_make_shape", *shape)
    zero = tirx.const(0, buffer.dtype)
    return tirx.call_intrin("handle", "tirx.tvm_stack_make_array", data, extents, 0, len(shape), zero, 0)
