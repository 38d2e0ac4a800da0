"""Make a program's collectives and barriers compiled functions instead of calls to Python.

A program calls `axe.all_reduce` and the others by name. `link` replaces such a call, where shapes and type are known,
by a call of a function in the program that does this worker's part of it. The worker's rank and the addresses of the
control block are constants in there, so a linked module is one worker's, in one process. What is left alone runs in
Python, with the same result.
"""

from __future__ import annotations

import platform
from collections.abc import Collection, Sequence

from tvm import relax
from tvm.ir import GlobalVar, IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.tirx import IntImm, PrimFunc

from tvm_axe.analysis.annotations import LINKED
from tvm_axe.collective.kernels import can_sum, kernel
from tvm_axe.collective.native import MEETINGS, meeting
from tvm_axe.collective.plan import VIEWS, plan
from tvm_axe.collective.side import BESIDE
from tvm_axe.collective.stream import stream_copies
from tvm_axe.collective.sync import Control
from tvm_axe.errors import InputError
from tvm_axe.layout import Mesh

SUPPORTED = platform.machine() == "x86_64"  # which the system calls, the order of stores and the streaming ones are of


def link(mod: IRModule, mesh: Mesh, rank: int, axes: Collection[str], control: Control | None, spins: int) -> IRModule:
    """Return the module of one worker, with compiled collectives and barriers.

    Parameters
    ----------
    mod : IRModule
        A Relax program.
    mesh : Mesh
        The devices of the launch.
    rank : int
        The worker's number.
    axes : collection of str
        The mesh axes whose collectives are to be replaced: those along which a worker sees its peers' slabs.
    control : Control, optional
        The control block of the workers that meet at a barrier; None leaves barriers alone.
    spins : int
        How often to look at a word before sleeping.

    Raises
    ------
    RuntimeError
        If the tensors that a collective is called with don't fit each other: an `InputError` in here, of which the
        compiler's visitor leaves the message.
    """
    linker = _Linker(mod, mesh, rank, axes, control, spins)
    for var, function in mod.functions_items():
        if isinstance(function, relax.Function):
            linker.builder_.update_func(var, linker.visit_expr(function))
        elif isinstance(function, PrimFunc):
            linker.builder_.update_func(var, stream_copies(function))
    return linker.builder_.get()


@mutator
class _Linker(PyExprMutator):
    def __init__(
        self, mod: IRModule, mesh: Mesh, rank: int, axes: Collection[str], control: Control | None, spins: int
    ) -> None:
        super().__init__(mod)
        self._mesh, self._rank, self._axes, self._control, self._spins = mesh, rank, axes, control, spins
        self._functions: dict[tuple[object, ...], GlobalVar] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if isinstance(call.op, relax.ExternFunc):
            name = str(call.op.global_symbol).removeprefix("axe.").removesuffix(BESIDE)  # which cores do where it is
            if name in MEETINGS and self._control is not None:
                return self._meeting(name, self._control, [int(number) for number in call.args])
            if name in VIEWS and call.args[-1].value in self._axes:
                return self._collective(name, call)
        return super().visit_call_(call)

    def _meeting(self, name: str, control: Control, numbers: Sequence[int]) -> relax.Expr:
        key = (name, *numbers)
        if key not in self._functions:
            self._functions[key] = self._add(name, meeting(name, numbers, control, self._rank, self._spins), True)
        return relax.Call(self._functions[key], [])

    def _collective(self, name: str, call: relax.Call) -> relax.Expr:
        source, target, *others, axis = call.args
        if not (_is_static(source) and _is_static(target)):
            return call
        shapes = [tuple(int(extent) for extent in tensor.ty.shape.values) for tensor in (source, target)]
        numbers = [int(number) for number in others]
        dtypes = [str(tensor.ty.dtype) for tensor in (source, target)]
        key = (name, *shapes, *dtypes, *numbers, axis.value)
        if key not in self._functions:
            function = self._kernel(name, shapes, dtypes, numbers, axis.value)
            if function is None:
                return call
            self._functions[key] = self._add(name, function, False)
        return relax.Call(self._functions[key], [source, target])

    def _kernel(
        self, name: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], numbers: Sequence[int], axis: str
    ) -> PrimFunc | None:
        """Build this worker's part of a collective; None if there is no kernel for it."""
        parts, views, (dtype, other) = self._mesh[axis], VIEWS[name], dtypes
        for which, shape, is_view in zip(("source", "target"), shapes, views):
            if is_view and shape[:1] != (parts,):
                raise InputError(f"axe.{name}: {which} has shape {shape}, not ({parts}, ...) as a view along {axis!r}")
        if dtype != other:
            raise InputError(f"axe.{name}: target has dtype {other}, not the source's {dtype}")
        source, target = (shape[1:] if is_view else shape for shape, is_view in zip(shapes, views))
        moves = plan(name, source, target, numbers, parts, self._mesh.coords(self._rank)[axis])
        if any(len(move.source.slabs) > 1 for move in moves) and not can_sum(dtype):
            return None
        return kernel(moves, shapes[0], shapes[1], views, dtype)

    def _add(self, name: str, function: PrimFunc, has_addresses: bool) -> GlobalVar:
        unique = f"axe_{name}_{len(self._functions)}"
        # One function without this mark would cost all the others of the module their vectors: upstream tells LLVM that
        # buffers don't overlap only where every function says so. In place, a sum reads an element before it writes it.
        marks = {"global_symbol": unique, "tirx.noalias": True, LINKED: int(has_addresses)}
        return self.builder_.add_func(function.with_attrs(marks), unique)


def _is_static(tensor: relax.Expr) -> bool:
    shape = tensor.ty.shape
    return isinstance(shape, relax.ShapeExpr) and all(isinstance(extent, IntImm) for extent in shape.values)
