"""A CPU's attention: one kernel that keeps no scores in memory, in the place of each that a model has.

The kernel is that of `tvm_axe.tile.kernels` for the target; what it doesn't compute stays as it is. Where devices are
to share the heads it is in blocks first, which say that a kernel computes them (`tvm_axe.relax.kernels`).

Of sequences of unknown length the kernel is one of any length, with a variant of fewer queries at once for short ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import relax, tirx
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.target import Target
from tvm_ffi import structural_equal

from tvm_axe.analysis.expressions import substitute
from tvm_axe.errors import TileError
from tvm_axe.machines import find_backend
from tvm_axe.relax.attention import DTYPES, Attention, attentions, laid
from tvm_axe.relax.kernels import attention_in_blocks, computed_by
from tvm_axe.relax.values import Values, extents_of, is_call, shape_of
from tvm_axe.tile import lowering
from tvm_axe.tile.backend import TileBackend
from tvm_axe.tile.kernels import KERNELS
from tvm_axe.tile.kernels.attention import attention
from tvm_axe.tile.kernels.kernel import Problem

__all__ = ["with_attention"]

_LEAST = 16  # queries: of fewer most of the kernel's tiles would be empty
_FEW, _MANY = {"block_m": 8, "block_n": 64}, {"block_m": 64, "block_n": 128}
"""The queries and keys at once of up to `_LEAST` queries, where these aren't known, and of more."""


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
    # How blocks of unknown extents are shared doesn't say which kernel computes a share.
    unknown = {variable: {} if in_blocks else _of_any_length(model[variable]) for variable in found}
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


class _Unknown(NamedTuple):
    """Attention of tokens before heads, of unknown numbers of tokens.

    Attributes
    ----------
    problem : Problem
        What a kernel is asked for, but for how many queries and keys there are.
    alike : bool
        Whether there are as many queries as keys.
    """

    problem: Problem
    alike: bool


def _of_any_length(func: relax.Function) -> dict[relax.Call, _Unknown]:
    """The calls of `R.nn.attention`, without a bias and a window, whose queries or keys are of unknown number."""
    found = {}
    for call in Values(func).calls():
        if not is_call(call, "relax.nn.attention") or len(call.args) != 3 or call.attrs.window_size is not None:
            continue
        q, k, v = ([*each.ty.shape.values] if isinstance(each.ty.shape, relax.ShapeExpr) else [] for each in call.args)
        dtypes = {str(each.ty.dtype) for each in call.args}
        if not len(q) == len(k) == len(v) == 4 or len(dtypes) > 1 or not dtypes <= {*DTYPES}:
            continue
        known = [*q[:1], *q[2:], *k[:1], *k[2:]]
        if not all(isinstance(extent, tirx.IntImm) for extent in known) or shape_of(call) is not None:
            continue
        batch, heads, dim, of_keys, kv_heads, of_dim = map(int, known)
        alike = structural_equal(q[1], k[1])
        causal = call.attrs.causal_mask is not None
        if (batch, dim) != (of_keys, of_dim) or heads % kv_heads or not structural_equal(k, v) or causal > alike:
            continue
        problem: dict[str, Any] = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "dim": dim, "causal": causal}
        scale = {} if call.attrs.scale is None else {"scale": float(call.attrs.scale)}
        found[call] = _Unknown({**problem, **scale, "dtype": dtypes.pop(), "order": "tttt"}, alike)
    return found


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

    def of_any_length(self, asked: _Unknown) -> tirx.PrimFunc | None:
        """The kernel of attention of unknown length; None if there is none here."""
        name = repr(asked)
        if name not in self._made:
            queries = tirx.Var("queries", "int64")
            sizes: dict[str, Any] = {"queries": queries, "keys": queries if asked.alike else tirx.Var("keys", "int64")}
            try:
                made = [attention(**{**asked.problem, **sizes, **blocks}).programs[0] for blocks in (_FEW, _MANY)]
                few, many = (lowering.lower(program, self._target) for program in made)
            except TileError:
                self._made[name] = None
            else:
                # Without layouts: in these upstream leaves variables as they were that it has replaced elsewhere.
                params = [tirx.decl_buffer(each.shape, each.dtype, each.name, layout=None) for each in many.params]
                branches = [substitute(each.body, dict(zip(each.params, params))) for each in (few, many)]
                body = tirx.IfThenElse(queries <= _LEAST, *branches)
                self._made[name] = tirx.PrimFunc(params, body, many.ret_type, many.attrs).without_attr("global_symbol")
        return self._made[name]


@mutator
class _Rewriter(PyExprMutator):
    """Puts calls of kernels in the places of attentions."""

    def __init__(self, model: IRModule, kernels: _Kernels) -> None:
        super().__init__(model)
        self.kernels = kernels
        self.calls: dict[relax.Call, Attention] = {}
        self.unknown: dict[relax.Call, _Unknown] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """The call, or that of a kernel in its place."""
        match = self.calls.get(call)
        if match is None:
            return self._of_any_length(call)
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

    def _of_any_length(self, call: relax.Call) -> relax.Expr:
        """The same of any other call, which may be attention of unknown length."""
        kernel = self.kernels.of_any_length(self.unknown[call]) if call in self.unknown else None
        if kernel is None:
            return super().visit_call_(call)
        call = self.visit_expr_post_order(call)
        return relax.call_tir(self.builder_.add_func(kernel, "attention"), list(call.args), out_ty=call.ty)
