"""Tile functions that are TensorIR: compiled once, whatever the number of rows of the tiles that come.

>>> f = tensor_ir(silu)
>>> from tvm_axe.stream import Tile, symbol
>>> tile = Tile(symbol("R"), 64)
>>> print(f.result(tile), f.flops(tile))
Tile(R, 64, float32) 448*R

A function's buffers are matrices, inputs before the one output; an extent is a number or a variable, which takes what
comes. FLOPs are counted in the body, loop by loop: 1 for an arithmetic operation on floats, 4 for a call such as exp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import sympy
import tvm
from tvm import ir, s_tir, tirx
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.errors import StreamError
from tvm_axe.machines.maxima import PLAIN
from tvm_axe.stream.functions import TileFunction
from tvm_axe.stream.types import DataType, Size, Tile, as_size, differ

CALL_FLOPS = 4
"""FLOPs of a call of a math function."""
_BINARY = {
    tirx.Add: sympy.Add,
    tirx.Sub: lambda a, b: a - b,
    tirx.Mul: sympy.Mul,
    tirx.FloorDiv: lambda a, b: sympy.floor(a / b),
    tirx.FloorMod: sympy.Mod,
    tirx.Max: sympy.Max,
    tirx.Min: sympy.Min,
}


def tensor_ir(func: tirx.PrimFunc, name: str | None = None, target: str = "llvm", **more: Any) -> TileFunction:
    """Return a PrimFunc as a tile function.

    Parameters
    ----------
    func : PrimFunc
        A function over matrices: it writes the last buffer, all of it, and reads the others.
    name : str, optional
        The name of the tile function; the global symbol of `func` by default.
    target : str
        The target that it is compiled for, when it is first called.
    **more : Any
        Further attributes of the `TileFunction`: `flops` instead of what is counted, `combine`, `initial`, `cycles`.

    Raises
    ------
    StreamError
        If a buffer isn't a matrix, or extents of the output are none of the inputs'.
    """
    kernel = _Kernel(func, name or str(func.attrs["global_symbol"]), target)
    return TileFunction(name=kernel.name, call=kernel, result=kernel.result, **{"flops": kernel.flops, **more})


class _Kernel:
    """A PrimFunc over matrices, and the function that it is compiled to."""

    def __init__(self, func: tirx.PrimFunc, name: str, target: str) -> None:
        self.name, self.func, self.target = name, func, target
        self.buffers = [param for param in func.params if isinstance(param, tirx.Buffer)]
        if len(self.buffers) != len(func.params) or len(self.buffers) < 2:
            raise StreamError(f"{name}: parameters must be buffers, of inputs and then of one output")
        for buffer in self.buffers:
            if len(buffer.shape) != 2:
                raise StreamError(f"{name}: buffer {buffer.name} must be a matrix, not of shape {list(buffer.shape)}")
        known = {extent for buffer in self.buffers[:-1] for extent in buffer.shape if isinstance(extent, tirx.Var)}
        for extent in self.buffers[-1].shape:
            if isinstance(extent, tirx.Var) and extent not in known:
                raise StreamError(f"{name}: extent {extent} of the output is none of the inputs'")

    @functools.cached_property
    def compiled(self) -> Callable[..., None]:
        """The function on tensors, the output's last."""
        mod = tvm.IRModule({"main": self.func.with_attr("global_symbol", "main")})
        return _tvm.load_llvm(_tvm.compile_llvm(mod, Target(self.target), PLAIN))["main"]

    def __call__(self, *arrays: np.ndarray) -> np.ndarray:
        sizes = self._sizes([Tile(array.shape[0], array.shape[1], str(array.dtype)) for array in arrays])
        output = self.buffers[-1]
        made = np.empty([int(_size(extent, sizes)) for extent in output.shape], np.dtype(str(output.dtype)))
        self.compiled(*[_tvm.as_tensor(np.ascontiguousarray(array)) for array in arrays], _tvm.as_tensor(made))
        return made

    def result(self, *types: DataType) -> Tile:
        """Return the type of what the kernel writes."""
        sizes, output = self._sizes(types), self.buffers[-1]
        rows, columns = (_size(extent, sizes) for extent in output.shape)
        return Tile(rows, columns, str(output.dtype))

    def flops(self, *types: DataType) -> Size:
        """Return the kernel's FLOPs, as the body says."""
        return as_size("FLOPs", sympy.expand(_flops(self.func.body, self._sizes(types))), least=0)

    def _sizes(self, types: Any) -> dict[Any, Size]:
        """Return what the variables of the buffers' extents stand for."""
        inputs = self.buffers[:-1]
        if len(types) != len(inputs):
            raise StreamError(f"{self.name} takes {len(inputs)} tiles, not {len(types)}")
        sizes: dict[Any, Size] = {}
        for type, buffer in zip(types, inputs):
            if not isinstance(type, Tile) or type.dtype != str(buffer.dtype):
                raise StreamError(f"{self.name}: buffer {buffer.name} is of {buffer.dtype}, and gets {type}")
            for extent, size in zip(buffer.shape, type.shape):
                wanted = sizes.setdefault(extent, size) if isinstance(extent, tirx.Var) else _size(extent, sizes)
                if differ(wanted, size):
                    raise StreamError(f"{self.name}: buffer {buffer.name} of shape {list(buffer.shape)} gets {type}")
        return sizes


def _size(extent: Any, sizes: dict[Any, Size]) -> Size:
    """Return the value of an extent."""
    return as_size("extent", _expression(extent, sizes), least=0)


def _expression(extent: Any, sizes: dict[Any, Size]) -> sympy.Expr:
    if isinstance(extent, (int, tirx.IntImm)):
        return sympy.Integer(int(extent))
    if extent in sizes:
        return sympy.sympify(sizes[extent])
    for kind, apply in _BINARY.items():
        if isinstance(extent, kind):
            return apply(_expression(extent.a, sizes), _expression(extent.b, sizes))
    raise StreamError(f"extent {extent} must be made of numbers and of the buffers' extents")


def _flops(stmt: Any, sizes: dict[Any, Size]) -> Any:
    """Return a statement's FLOPs, without a reduction's initial values; of a branch those of the larger side."""
    if isinstance(stmt, tirx.For):
        return _expression(stmt.extent, sizes) * _flops(stmt.body, sizes)
    if isinstance(stmt, tirx.SeqStmt):
        return sum(_flops(part, sizes) for part in stmt.seq)
    if isinstance(stmt, s_tir.SBlockRealize):
        return _flops(stmt.block.body, sizes)
    if isinstance(stmt, tirx.BufferStore):
        return operations(stmt.value)
    if isinstance(stmt, tirx.IfThenElse):
        sides = [side for side in (stmt.then_case, stmt.else_case) if side is not None]
        return sympy.Max(*[_flops(side, sizes) for side in sides])
    return _flops(stmt.body, sizes) if hasattr(stmt, "body") else 0


def operations(value: Any) -> int:
    """Return the FLOPs of an expression, `CALL_FLOPS` a call of a math function."""
    if isinstance(value, tirx.Select):
        return max(operations(value.true_value), operations(value.false_value))
    if isinstance(value, tirx.Cast):
        return operations(value.value)
    if isinstance(value, ir.Call):
        return CALL_FLOPS * _tvm.is_float(value) + sum(map(operations, value.args))
    if hasattr(value, "a") and hasattr(value, "b"):
        return int(_tvm.is_float(value)) + operations(value.a) + operations(value.b)
    return 0


@T.prim_func(s_tir=True)
def matmul(a: T.handle, b: T.handle, c: T.handle) -> None:
    """The product of two matrices of any shape, in float32."""
    m, k, n = T.int64(), T.int64(), T.int64()
    A = T.match_buffer(a, (m, k), "float32")
    B = T.match_buffer(b, (k, n), "float32")
    C = T.match_buffer(c, (m, n), "float32")
    for i, x, j in T.grid(m, k, n):
        with T.sblock("product"):
            vi, vx, vj = T.axis.remap("SRS", [i, x, j])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vx] * B[vx, vj]


@T.prim_func(s_tir=True)
def add(a: T.handle, b: T.handle, c: T.handle) -> None:
    """The sum of two matrices of any shape, in float32."""
    m, n = T.int64(), T.int64()
    A = T.match_buffer(a, (m, n), "float32")
    B = T.match_buffer(b, (m, n), "float32")
    C = T.match_buffer(c, (m, n), "float32")
    for i, j in T.grid(m, n):
        with T.sblock("sum"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = A[vi, vj] + B[vi, vj]


@T.prim_func(s_tir=True)
def silu(a: T.handle, c: T.handle) -> None:
    """``a / (1 + exp(-a))`` of a matrix of any shape, in float32."""
    m, n = T.int64(), T.int64()
    A = T.match_buffer(a, (m, n), "float32")
    C = T.match_buffer(c, (m, n), "float32")
    for i, j in T.grid(m, n):
        with T.sblock("silu"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = A[vi, vj] / (T.float32(1) + T.exp(T.float32(0) - A[vi, vj]))
