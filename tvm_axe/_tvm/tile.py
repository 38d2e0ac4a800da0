"""TIRx: tile primitives, layouts and intrinsics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm.tirx.script.builder as _tirx_builder
from tvm import tirx
from tvm.backend.cuda import op as _cuda_op
from tvm.backend.cuda.tile_primitive import tma_utils as _tma_utils
from tvm.script import ir_builder as _ir_builder
from tvm.tirx import layout as _upstream_layout
from tvm.tirx.operator import tile_primitive as _tile_primitive


def register_dispatch(*args: Any, **kwargs: Any) -> Callable[[Callable], Callable]:
    """Upstream's decorator: how a tile primitive is lowered on a target, and when."""
    return _tile_primitive.register_dispatch(*args, **kwargs)


def dispatch_predicate(name: str, test: Callable[[Any, Any], tuple[bool, str]]) -> Any:
    """A named condition of `register_dispatch`, which gives whether a call meets it and what was seen."""
    return _tile_primitive.predicate(name, test)


def swizzled_layout(dtype: str, swizzle: int, shape: Sequence[int]) -> Any:
    """Upstream's layout of matrix operands in shared memory; `swizzle` 1, 2, 3 for rows of 32, 64, 128 bytes."""
    return _tma_utils.mma_shared_layout(dtype, swizzle, [int(extent) for extent in shape])


def swizzle_of(layout: Any) -> int:
    """The swizzle of a shared layout, as in `swizzled_layout`; 0 for none."""
    return int(_tma_utils.get_swizzle_mode_from_layout(layout).value)


def memory_layout(extents: Sequence[int], strides: Sequence[int]) -> Any:
    """Upstream's layout in linear memory."""
    return _upstream_layout.TileLayout(_upstream_layout.S[tuple(extents) : tuple(strides)])


def strided_buffer(shape: Sequence[int], dtype: str, name: str, strides: Sequence[int]) -> tirx.Buffer:
    """A buffer with strides; upstream's TIRx takes them from its layout, and all else from the buffer."""
    return tirx.decl_buffer(shape, dtype, name, strides=list(strides), layout=memory_layout(shape, strides))


def warpgroup_layout(extents: Sequence[int], strides: Sequence[tuple[int, bool]]) -> Any:
    """Upstream's layout over the threads of a warpgroup and their registers; a stride is (step, is it of threads)."""
    thread = _upstream_layout.Axis.tid_in_wg
    steps = tuple(step @ thread if threads else step for step, threads in strides)
    return _upstream_layout.TileLayout(_upstream_layout.S[tuple(extents) : steps])


def builder() -> Any:
    """A context in which statements are collected; its ``get()`` is the function made."""
    return _ir_builder.IRBuilder()


def function_frame() -> Any:
    """The frame of a TIRx function inside `builder`."""
    return _tirx_builder.prim_func()


def device_call(name: str, *arguments: tirx.Expr, code: str, gives: str = "void") -> tirx.Expr:
    """A call of a CUDA device function that gives a value of a type, or none; `code` defines it, once in a module."""
    return _cuda_op.cuda_func_call(name, *arguments, source_code=code, return_type=gives)


def fast_exp2(value: tirx.Expr) -> tirx.Expr:
    """2**value of a float32 on a GPU as its one instruction, which flushes denormals; upstream's exp2 takes four."""
    code = (
        "__device__ __forceinline__ float axe_exp2(float x) {\n"
        '  float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y;\n}\n'
    )
    return device_call("axe_exp2", value, code=code, gives="float32")
