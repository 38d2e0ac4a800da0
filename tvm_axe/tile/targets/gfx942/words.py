"""What code of the uniform model says in CUDA's words, said in LLVM's of AMD's GPUs.

A warp of 32 threads is half a wavefront of 64, so that its shuffles are within one. Source: LLVM, "User Guide for
AMDGPU Backend", and AMD, "AMD Instinct MI300 Instruction Set Architecture": S_WAITCNT, S_BARRIER, DS_BPERMUTE_B32.
"""

from __future__ import annotations

from typing import Any

import tvm_ffi
from tvm import ir, tirx
from tvm.ir import IRModule
from tvm.script import tirx as T

from tvm_axe import _tvm
from tvm_axe.errors import TileError
from tvm_axe.machines.maxima import keep_nan
from tvm_axe.tile.targets.cuda.uniform.emit import Places
from tvm_axe.tile.targets.cuda.uniform.memory import ALIGNMENT
from tvm_axe.tile.targets.gfx942 import views

_EXP2 = "axe_exp2"  # the device function of `_tvm.fast_exp2`
_OF_LIBRARY = {f"llvm.{name}" for name in ("exp", "exp2", "log", "log2", "log10", "sin", "cos", "pow")}
"""LLVM's functions of which it has code for floats of 16 and 32 bits alone; of 64 bits they are AMD's library's."""


class AmdPlaces(Places):
    """Memory of its own for each tile, which LLVM puts somewhere; allocated as bytes, as `views` says why."""

    def shared(self, size: int, dtype: str, align: int = ALIGNMENT) -> tirx.Buffer:
        return _viewed(size, dtype, "shared", align)

    def registers(self, size: int, dtype: str) -> tirx.Buffer:
        return _viewed(size, dtype, "local", 16) if dtype == "bfloat16" else super().registers(size, dtype)


def _viewed(size: int, dtype: str, scope: str, align: int) -> tirx.Buffer:
    count = size * int(tvm_ffi.dtype(dtype).bits) // 8
    held = T.alloc_buffer((count,), "uint8", scope=scope, align=align)
    return held if dtype == "uint8" else T.decl_buffer((size,), dtype, data=held.data, scope=scope, align=align)


def of(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """A function of the uniform model in these words.

    Raises
    ------
    TileError
        It has one that there is no other for.
    """

    bound: list[tirx.Bind] = []
    tvm_ffi.structural_walk(func.body, (tirx.Bind, bound.append))
    for bind in bound:
        if str(bind.var.ty) == "bfloat16":  # upstream computes in float32 and leaves the name's own type
            raise TileError(
                f"{func.attrs['global_symbol']}: `{bind.var.name}` is a name of a bfloat16 value, which upstream has "
                "no code for on AMD's GPUs; cast it to float32"
            )

    def on_evaluate(statement: tirx.Evaluate) -> tirx.Stmt:
        if _name(statement.value) != "tirx.cuda.cta_sync":
            return statement
        # The barrier says nothing of a thread's own memory, which is waited for before.
        waited = tirx.call_llvm_intrin("void", "llvm.amdgcn.s.waitcnt", tirx.const(0, "int32"))
        met = tirx.call_intrin("void", "tirx.tvm_storage_sync", ir.StringImm("shared"))
        return tirx.SeqStmt([tirx.Evaluate(waited), tirx.Evaluate(met)])

    def on_call(call: ir.Call) -> ir.Expr:
        name = _name(call)
        if name in _SHUFFLES:
            return _shuffled(call, name)
        if name == "tirx.cuda.atomic_add":
            return tirx.call_intrin(str(call.ty), "tirx.atomic_add", *call.args[:2])
        if name == "tirx.cuda.func_call" and str(call.args[0].value) == _EXP2:
            return tirx.call_llvm_pure_intrin("float32", "llvm.amdgcn.exp2", call.args[1])
        if name.startswith(("tirx.cuda.", "tirx.ptx")) and name != "tirx.cuda.cta_sync":
            raise TileError(f"{func.attrs['global_symbol']}: AMD's GPUs have no `{call}`")
        return call

    body = _tvm.structural_map(func.body, (ir.Call, on_call))
    return func.with_body(_tvm.structural_map(body, (tirx.Evaluate, on_evaluate)))


def finished(mod: IRModule) -> IRModule:
    """The device's functions, all lowered, without views of memory.

    Raises
    ------
    TileError
        They call a function of AMD's device library, or take more shared memory than a block has: LLVM would end the
        process.
    """

    functions = {var: views.apart(func) for var, func in keep_nan(mod).functions_items()}
    for func in functions.values():
        _check_functions(func)
        used, most = views.shared_bytes(func), int(func.attrs["target"].attrs["max_shared_memory_per_block"])
        if used > most:
            raise TileError(
                f"{func.attrs['global_symbol']}: {used} bytes of shared memory, exchanges in each of their types; a "
                f"block has {most}; valid are smaller tiles"
            )
    return IRModule(functions, attrs=mod.attrs)


def _check_functions(func: tirx.PrimFunc) -> None:
    calls: list[ir.Call] = []
    tvm_ffi.structural_walk(func.body, (ir.Call, calls.append))
    for call in calls:
        called, name = _name(call), ""
        if called == "tirx.call_pure_extern" and not str(call.args[0].value).startswith("llvm."):
            name = str(call.args[0].value)
        elif called == "tirx.call_llvm_pure_intrin" and "float64" in str(call.ty):
            found = _tvm.intrinsic_name(int(call.args[0].value))
            name = found if found in _OF_LIBRARY else ""
        if name:
            raise TileError(
                f"{name} of {call.ty}: on AMD's GPUs it is a function of their device library, which isn't linked; "
                "valid are exp, log, sqrt, sin, cos and what upstream makes of them, of float32"
            )


_SHUFFLES = {
    "tirx.tvm_warp_shuffle": lambda lane, to: to,
    "tirx.tvm_warp_shuffle_xor": lambda lane, apart: lane ^ apart,
    "tirx.tvm_warp_shuffle_up": lambda lane, apart: lane - tirx.Select(lane >= apart, apart, tirx.const(0, "int32")),
}
"""From which lane of 32 a value comes, by the lane's own number and the call's argument."""


def _shuffled(call: ir.Call, name: str) -> ir.Expr:
    """A value of another lane: its bits, 32 at a time, since the instruction moves as many."""
    _, value, argument, width, _ = call.args
    minus_one, zero = tirx.const(-1, "int32"), tirx.const(0, "int32")
    lane: Any = tirx.call_llvm_pure_intrin("int32", "llvm.amdgcn.mbcnt.lo", minus_one, zero)
    lane = tirx.call_llvm_pure_intrin("int32", "llvm.amdgcn.mbcnt.hi", minus_one, lane)
    own = tirx.bitwise_and(lane, width - 1)
    place = (lane - own + _SHUFFLES[name](own, argument)) * 4

    def moved(word: Any) -> Any:
        return tirx.call_llvm_pure_intrin("int32", "llvm.amdgcn.ds.bpermute", place, word)

    dtype = str(value.ty)
    bits = int(tvm_ffi.dtype(dtype).bits)
    if bits == 32:
        return T.reinterpret(dtype, moved(T.reinterpret("int32", value)))
    if bits < 32:
        narrow = T.reinterpret(f"uint{bits}", value)
        return T.reinterpret(dtype, T.cast(moved(T.cast(narrow, "int32")), f"uint{bits}"))
    whole = T.reinterpret("int64", value)
    low, high = (T.cast(moved(T.cast(T.shift_right(whole, T.int64(by)), "int32")), "int64") for by in (0, 32))
    joined = tirx.bitwise_or(
        tirx.bitwise_and(low, tirx.const(0xFFFFFFFF, "int64")), tirx.shift_left(high, tirx.const(32, "int64"))
    )
    return T.reinterpret(dtype, joined)


def _name(value: Any) -> str:
    return str(value.op.name) if isinstance(value, ir.Call) and isinstance(value.op, ir.Op) else ""
