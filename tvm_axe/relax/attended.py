"""A CPU's attention: one kernel that keeps no scores in memory, in the place of each that a model has.

The kernel is that of `tvm_axe.tile.kernels` for the target; what it doesn't compute stays as it is. Where devices are
to share the heads it is in blocks first, which say that a kernel computes them (`tvm_axe.relax.kernels`).

Of an unknown batch or sequences of unknown length the kernel is one of any, with a variant of fewer queries at once for
short ones.
"""

from __future__ import annotations

from tvm import relax, tirx
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.target import Target

from tvm_axe.errors import TileError
from tvm_axe.lower.tiles import with_tile_kernels
from tvm_axe.machines import find_backend
from tvm_axe.relax.attention import Attention, OfAnyLength, attentions, laid, of_any_length
from tvm_axe.relax.kernels import attention_in_blocks, attention_of_any_length, computed_by
from tvm_axe.relax.values import extents_of
from tvm_axe.tile import lowering
from tvm_axe.tile.backend import TileBackend
from tvm_axe.tile.kernels import KERNELS, compiles
from tvm_axe.tile.kernels.kernel import Problem

__all__ = ["with_attention"]

_LEAST = 16  # queries: of fewer most of the kernel's tiles would be empty


def with_attention(model: IRModule, target: Target, in_blocks: bool = False) -> IRModule:
    """The model with a call of a tile kernel for each attention that one computes on the target.

    Parameters
    ----------
    model : IRModule
        The model.
    target : Target
        Resolved, a CPU.
    in_blocks : bool
        Whether what is called is blocks yet, which say what kernel computes them.
    """
    if not isinstance(find_backend(target), TileBackend):
        return model
    kernels = _Kernels(target, in_blocks)
    found = {
        variable: {call: match for call, match in attentions(func).items() if kernels.of(_problem(match)) is not None}
        for variable, func in model.functions_items()
        if isinstance(func, relax.Function)
    }
    unknown = {
        variable: {
            call: match
            for call, match in of_any_length(model[variable]).items()
            if kernels.of_any_length(match.problem) is not None
        }
        for variable in found
    }
    if not any([*found.values(), *unknown.values()]):
        return model
    rewriter = _Rewriter(model, kernels)
    for variable, calls in found.items():
        rewriter.calls, rewriter.unknown = calls, unknown[variable]
        rewriter.builder_.update_func(variable, rewriter.visit_expr(model[variable]))
    return relax.transform.DeadCodeElimination()(rewriter.builder_.get())


def _problem(match: Attention) -> Problem:
    """What the kernel is asked for: it has one batch, of all heads, so that cores share them."""
    problem = match.problem
    heads, kv_heads = (match.batch * problem[name] for name in ("heads", "kv_heads"))
    return {**problem, "batch": 1, "heads": heads, "kv_heads": kv_heads}


class _Kernels:
    """The kernels of problems, lowered for a target."""

    def __init__(self, target: Target, in_blocks: bool) -> None:
        self._target, self._in_blocks = target, in_blocks
        self._made: dict[str, tirx.PrimFunc | None] = {}

    def of(self, problem: Problem) -> tirx.PrimFunc | None:
        """The kernel of a problem; None if it can't compute that here, or isn't worth it."""
        name = repr(problem)
        if problem["queries"] < _LEAST:
            return None
        if name not in self._made:
            try:
                (program,) = KERNELS["attention"].recipe(self._target, problem).programs
                lowered = lowering.lower(program, self._target).without_attr("global_symbol")
                blocks = attention_in_blocks(problem, "hhhh") if self._in_blocks else []
                self._made[name] = computed_by("attention", problem, blocks) if blocks else lowered
            except TileError:
                self._made[name] = None
        return self._made[name]

    def of_any_length(self, problem: Problem) -> tirx.PrimFunc | None:
        """The kernel of attention of unknown extents; None if there is none here."""
        name = repr({key: str(value) for key, value in problem.items()})
        if name not in self._made:
            blocks = attention_of_any_length(problem)
            if not compiles("attention", self._target, {**problem, "order": "tttt"}):
                self._made[name] = None
            elif self._in_blocks:
                self._made[name] = blocks
            else:
                ((_, self._made[name]),) = with_tile_kernels(IRModule({"main": blocks}), self._target).functions_items()
        return self._made[name]


@mutator
class _Rewriter(PyExprMutator):
    """Puts calls of kernels in the places of attentions."""

    def __init__(self, model: IRModule, kernels: _Kernels) -> None:
        super().__init__(model)
        self.kernels = kernels
        self.calls: dict[relax.Call, Attention] = {}
        self.unknown: dict[relax.Call, OfAnyLength] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """The call, or that of a kernel in its place."""
        if (unknown := self.unknown.get(call)) is not None:
            kernel = self.builder_.add_func(self.kernels.of_any_length(unknown.problem), "attention")
            return relax.call_tir(kernel, [*map(self.visit_expr, unknown.tensors)], out_ty=call.ty)
        match = self.calls.get(call)
        if match is None:
            return super().visit_call_(call)
        emit, problem = self.builder_.emit, _problem(match)
        sources = (match.q, match.k, match.v)
        operands = [laid(self.visit_expr(source.value), source, "h", 1, emit) for source in sources]
        variable = self.builder_.add_func(self.kernels.of(problem), "attention")
        shape = [1, *(problem[name] for name in ("heads", "queries", "dim"))]
        out = emit(relax.call_tir(variable, operands, out_ty=relax.TensorType(shape, problem["dtype"])))
        if match.order == "h":
            return relax.op.reshape(out, extents_of(call))
        batch, queries, heads, dim = extents_of(call)
        return relax.op.permute_dims(emit(relax.op.reshape(out, (batch, heads, queries, dim))), [0, 2, 1, 3])
