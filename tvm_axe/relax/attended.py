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
from tvm_axe.relax.attention import Attention, attentions
from tvm_axe.relax.in_blocks import attention_in_blocks, computed_by
from tvm_axe.relax.kernels import called_for
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
        variable: {call: match for call, match in attentions(func).items() if kernels.of(match) is not None}
        for variable, func in model.functions_items()
        if isinstance(func, relax.Function)
    }
    if not any(found.values()):
        return model
    rewriter = _Rewriter(model, kernels)
    for variable, calls in found.items():
        rewriter.calls = calls
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

    def of(self, match: Attention) -> tirx.PrimFunc | None:
        """The kernel of an attention; None if there is none here, or it isn't worth it."""
        return self._of_known(_problem(match)) if match.is_known else self._of_any_length(match)

    def _of_known(self, problem: Problem) -> tirx.PrimFunc | None:
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

    def _of_any_length(self, match: Attention) -> tirx.PrimFunc | None:
        problem = {**match.problem, "order": match.letters}
        name = repr({key: str(value) for key, value in problem.items()})
        if name not in self._made:
            blocks = computed_by("attention", problem, attention_in_blocks(problem, match.letters))
            if not compiles("attention", self._target, problem):
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

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """The call, or that of a kernel in its place."""
        match = self.calls.get(call)
        if match is None:
            return super().visit_call_(call)
        emit, variable = self.builder_.emit, self.builder_.add_func(self.kernels.of(match), "attention")
        if not match.is_known:
            operands = match.operands(match.letters, match.batch, self.visit_expr, emit)
            return called_for(match, variable, operands, call, emit)
        problem, operands = _problem(match), match.operands("hhh", 1, self.visit_expr, emit)
        shape = [1, *(problem[name] for name in ("heads", "queries", "dim"))]
        out = emit(relax.call_tir(variable, operands, out_ty=relax.TensorType(shape, problem["dtype"])))
        if match.order == "h":
            return relax.op.reshape(out, extents_of(call))
        batch, queries, heads, dim = extents_of(call)
        return relax.op.permute_dims(emit(relax.op.reshape(out, (batch, heads, queries, dim))), [0, 2, 1, 3])
