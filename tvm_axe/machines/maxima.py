"""Maxima and minima of floats that keep a NaN.

``T.max(a, b)`` is ``a > b ? a : b`` in LLVM's code, and fmaxf in CUDA's. The first gives b where a is a NaN, the second
whichever is a number, so that what went wrong before a relu or a pooling is gone behind it. numpy, PyTorch and ONNX
give NaN where either is one, and so does what is compiled here.

It is done to functions whose loops and vectors are made: what schedules, tuning and records know of is ``T.max``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import ir, tirx

from tvm_axe import _tvm
from tvm_axe.analysis.annotations import DROPS_NAN
from tvm_axe.analysis.expressions import is_choice

__all__ = ["PLAIN", "in_cuda", "keep_nan"]

PLAIN = "axe.plain"
"""Upstream's pipeline with nothing else of ours, for the host: what judges is compiled by it."""


@tirx.transform.prim_func_pass(opt_level=0)
def keep_nan(func: tirx.PrimFunc, _mod: ir.IRModule, _context: ir.transform.PassContext) -> tirx.PrimFunc:
    """The pass that writes maxima and minima of floats as choices, of which LLVM makes a maximum and what is left."""
    if DROPS_NAN in (func.attrs or {}):
        return func
    # What a statement computes anyway is kept in memory, which LLVM makes a register: upstream's code generator puts
    # what a name stands for wherever the name does, and choices have their operands several times: a chain ever more.
    body = _tvm.structural_map(func.body, ((tirx.Bind, tirx.BufferStore), _held))
    body = _tvm.structural_map(body, ((tirx.Max, tirx.Min), _chosen))
    return func if body.same_as(func.body) else func.with_body(body)


def _held(stmt: tirx.Bind | tirx.BufferStore) -> tirx.Stmt:
    """The statement, behind others that compute each maximum and minimum of floats in it."""
    before: list[tirx.Stmt] = []

    def loaded(node: tirx.Expr) -> tirx.Expr:
        room = tirx.decl_buffer((1,), str(node.ty), "kept", scope="local")
        before.extend((tirx.AllocBuffer(room), tirx.BufferStore(room, node, [0])))
        return room[0]

    def kept(node: tirx.Max | tirx.Min) -> tirx.Expr:
        return loaded(_chosen(node)) if _tvm.is_float(node) else node

    value = stmt.value
    if not _finds(value, (tirx.Max, tirx.Min), _tvm.is_float):
        return stmt
    if not _finds(
        value, (tirx.Select, tirx.Let, ir.Call), lambda part: not isinstance(part, ir.Call) or is_choice(part)
    ):
        value = _tvm.structural_map(value, ((tirx.Max, tirx.Min), kept))
    elif isinstance(stmt, tirx.Bind):  # one side may not be computed, or is of a name that isn't known outside
        value = loaded(_tvm.structural_map(value, ((tirx.Max, tirx.Min), _chosen)))
    if not before:
        return stmt
    own = (
        tirx.Bind(stmt.var, value)
        if isinstance(stmt, tirx.Bind)
        else tirx.BufferStore(stmt.buffer, value, stmt.indices)
    )
    return tirx.SeqStmt([*before, own])


def _finds(value: tirx.Expr, kinds: tuple[type, ...], is_one: Callable[[Any], bool]) -> bool:
    """Whether an expression has a part of these kinds that is one."""
    found: list[bool] = []
    tvm_ffi.structural_walk(value, (kinds, lambda part: found.append(True) if is_one(part) else None))
    return bool(found)


def _chosen(node: tirx.Max | tirx.Min) -> tirx.Expr:
    if not _tvm.is_float(node):
        return node
    exceeds = tirx.GT if isinstance(node, tirx.Max) else tirx.LT
    named: list[tuple[tirx.Var, tirx.Expr]] = []

    def once(value: tirx.Expr) -> tirx.Expr:
        if isinstance(value, tirx.Var) or _is_number(value):
            return value
        named.append((tirx.Var("operand", value.ty), value))
        return named[-1][0]

    a, b = once(node.a), once(node.b)
    if _is_number(a) or _is_number(b):
        bound, value = (a, b) if _is_number(a) else (b, a)
        chosen = tirx.Select(exceeds(bound, value), bound, value)  # which is not of a NaN: one instruction
    else:
        # Of a running maximum the first is what was so far: its test would be waited for, and this one isn't.
        chosen = tirx.Select(tirx.isnan(b), _none(b), tirx.Select(exceeds(b, a), b, a))
    for variable, value in reversed(named):
        chosen = tirx.Let(variable, value, chosen)
    return chosen


def _none(like: tirx.Expr) -> tirx.Expr:
    """A NaN of a value's type. LLVM would make one choice of two between the same values, and no maximum of either."""
    element, _, lanes = str(like.ty).partition("x")
    none = tirx.const(float("nan"), element)
    return tirx.Broadcast(none, int(lanes)) if lanes else none


def _is_number(value: tirx.Expr) -> bool:
    """Whether it is a constant that is no NaN."""
    if isinstance(value, tirx.Broadcast):
        value = value.value
    return isinstance(value, tirx.FloatImm) and value.value == value.value


_CALLED = {tirx.Max: "axe_max", tirx.Min: "axe_min"}


def in_cuda(mod: ir.IRModule) -> tuple[ir.IRModule, str]:
    """A device's lowered functions with calls for maxima and minima of floats, and the source that defines these."""
    found: list[tirx.Expr] = []

    def called(node: tirx.Max | tirx.Min) -> tirx.Expr:
        if not _tvm.is_float(node):
            return node
        found.append(node)
        return tirx.call_pure_extern(str(node.ty), _CALLED[type(node)], node.a, node.b)

    functions = {
        var: func.with_body(_tvm.structural_map(func.body, ((tirx.Max, tirx.Min), called)))
        for var, func in mod.functions_items()
    }
    return ir.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos), _DEFINED if found else ""


def _defined(name: str, operation: str, sign: str) -> str:
    chosen = f"b != b ? b : b {sign} a ? b : a"
    return f"""\
__device__ __forceinline__ float {name}_of_floats(float a, float b) {{
#if __CUDA_ARCH__ >= 800
  float c;
  asm("{operation}.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
#else
  return {chosen};
#endif
}}
template <typename T> __device__ __forceinline__ T {name}(T a, T b) {{
  return T({name}_of_floats(float(a), float(b)));
}}
template <> __device__ __forceinline__ double {name}(double a, double b) {{ return {chosen}; }}
"""


_DEFINED = _defined("axe_max", "max", ">") + _defined("axe_min", "min", "<")
"""One instruction for a float32, which a GPU of compute capability 8.0 has, and so for those of 16 bits. CUDA's own
functions of these, `__hmax_nan`, take registers of 16 bits: a relu behind a product of 128 x 256 spilled 744 bytes of a
thread. Source: PTX ISA, max."""

_tvm.register_pipeline(PLAIN, "s_tir", ir.transform.Sequential([]), keep_nan)
