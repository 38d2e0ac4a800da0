"""Operators that a tile kernel computes whole: attention, norms, softmax, as importers and `relax.frontend.nn` do.

Each becomes a call of a function of blocks that says by its attributes which kernel computes it, for which problem
(`tvm_axe.analysis.annotations`). Nothing is fused with it. The function's blocks compute the same, so that whatever
doesn't know of kernels compiles it too; `tvm_axe.lower.tiles.with_tile_kernels` puts the kernel in its place.

What stands around an operator only because of how it is written goes: what `tvm_axe.relax.attention` looks through in
front of attention, since the kernel reads either order of heads and tokens, and permutations that cancel each other.
Attention and a root mean square norm are found where they are written out, too.

A product with matrices that are taken by index, a row's expert for one, becomes one that reads each where it lies; its
kernel is chosen later, as other products', with what is pointwise behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm import relax, te, tirx
from tvm.ir import GenericConst, GlobalVar, IRModule, Op
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.target import Target
from tvm.topi import nn as topi

from tvm_axe.machines import backend_of
from tvm_axe.relax.attention import Attention, attentions
from tvm_axe.relax.in_blocks import (
    attention_in_blocks,
    computed_by,
    gathered_in_blocks,
    layer_norm_in_blocks,
    softmax_in_blocks,
)
from tvm_axe.relax.operators_of_attention import DTYPES
from tvm_axe.relax.scores import is_last
from tvm_axe.relax.values import Values, alike, is_call, product, shape_of, sides_of
from tvm_axe.tile.backend import TileBackend
from tvm_axe.tile.kernels import compiles

__all__ = ["called_for", "with_kernels"]

_FUSABLE = 4  # what it fuses with elementwise operators behind

_FORMS = {
    "relax.permute_dims": "permuted",
    "relax.nn.rms_norm": "rms_norm",
    "relax.nn.layer_norm": "layer_norm",
    "relax.nn.softmax": "softmax",
    "relax.multiply": "multiplied",
    "relax.mean": "widely",
    "relax.sum": "widely",
    "relax.matmul": "gathered",
}
"""What rewrites the calls of an operator: a method of `_Rewriter`."""


def with_kernels(model: IRModule, target: Target, alone: bool = False) -> IRModule:
    """Return a Relax model whose attention and norms are calls of kernels, where the target takes these by default.

    Parameters
    ----------
    model : IRModule
        The model, of Relax's operators; it isn't changed.
    target : Target
        Resolved.
    alone : bool, optional
        Whether it is for one device. Then a softmax is one, too, where nothing pointwise reads it, which would be a
        kernel of its own; on a mesh elements go into a softmax row by row (`tvm_axe.relax.fusing`).
    """
    backend = backend_of(target)
    if not (isinstance(backend, TileBackend) and backend.by_default):
        return model
    rewriter = _Rewriter(model, target)
    for variable, func in model.functions_items():
        if isinstance(func, relax.Function):
            rewriter.attentions = attentions(func)
            rewriter.ending = _softmaxes(func) if alone else set()
            rewriter.builder_.update_func(variable, rewriter.visit_expr(func))
    return relax.transform.DeadCodeElimination()(rewriter.builder_.get())


@mutator
class _Rewriter(PyExprMutator):
    def __init__(self, model: IRModule, target: Target) -> None:
        super().__init__(model)
        self._target = target
        self.attentions: dict[relax.Call, Attention] = {}
        self.ending: set[relax.Call] = set()

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """The call, its arguments rewritten, or what takes its place."""
        if call in self.attentions and (whole := self._attention(call, self.attentions[call])) is not None:
            return whole
        ends, call = call in self.ending, self.visit_expr_post_order(call)
        found = None
        if is_call(call, "relax.nn.softmax") and not ends:
            return call
        if isinstance(call.op, Op) and (form := _FORMS.get(str(call.op.name))) is not None:
            found = getattr(self, form)(call)
        return call if found is None else found

    # ---- What stands around -----------------------------------------------------------------------------------------

    def _value(self, expr: relax.Expr, name: str) -> relax.Call | None:
        """The call of that operator that a variable stands for."""
        value = self.lookup_binding(expr) if isinstance(expr, relax.Var) else None
        if not isinstance(value, relax.Call) or not isinstance(value.op, Op):
            return None
        return value if str(value.op.name) == f"relax.{name}" else None

    def permuted(self, call: relax.Call) -> relax.Expr | None:
        """What was permuted before, if this permutes it back."""
        inner = self._value(call.args[0], "permute_dims")
        if inner is None or call.attrs.axes is None or inner.attrs.axes is None:
            return None
        axes = [int(inner.attrs.axes[int(axis)]) for axis in call.attrs.axes]
        return inner.args[0] if axes == [*range(len(axes))] else None

    # ---- Operators --------------------------------------------------------------------------------------------------

    def _attention(self, call: relax.Call, match: Attention) -> relax.Expr | None:
        """A call of a kernel that computes an attention; None if there is none."""
        letters, problem, name = match.letters, match.problem, "attention"
        asked = {**problem, "order": letters}
        if match.is_known and problem["queries"] == 1 and letters[1:3] == "hh":
            name = "decode_attention"
            asked = {key: value for key, value in problem.items() if key not in ("queries", "keys", "causal")}
            asked |= {"capacity": problem["keys"], "whole": True}
        if not compiles(name, self._target, asked):
            return None
        operands = match.operands(letters, match.batch, self.visit_expr, self.builder_.emit)
        variable = self.builder_.add_func(computed_by(name, asked, attention_in_blocks(problem, letters)), name)
        return called_for(match, variable, operands, call, self.builder_.emit)

    def rms_norm(self, call: relax.Call) -> relax.Expr | None:
        """A norm of the last axis."""
        data, weight = call.args
        if not _is_last(call.attrs.axes, data):
            return None
        return self._rms_norm(data, weight, float(call.attrs.epsilon))

    def layer_norm(self, call: relax.Call) -> relax.Expr | None:
        """A norm of the last axis, scaled and shifted."""
        data, weight, bias = call.args
        whole = bool(call.attrs.center) and bool(call.attrs.scale)
        if not whole or not _is_last(call.attrs.axes, data):
            return None
        epsilon = float(call.attrs.epsilon)
        given = data, weight, bias
        return self._of_rows(
            "layer_norm", given, lambda x, w, b: layer_norm_in_blocks((x, w, b), epsilon), epsilon=epsilon
        )

    def softmax(self, call: relax.Call) -> relax.Expr | None:
        """A softmax of the last axis."""
        if not is_last(int(call.attrs.axis), call):
            return None
        return self._of_rows("softmax", call.args, softmax_in_blocks)

    def multiplied(self, call: relax.Call) -> relax.Expr | None:
        """A root mean square norm that is written out: a weight by what is divided by the root of its mean square."""
        for weight, normed in (call.args, tuple(call.args)[::-1]):
            cast = self._value(normed, "astype")
            scaled = self._value(normed if cast is None else cast.args[0], "multiply")
            if scaled is None or len(sides_of(weight) or ()) != 1:
                continue
            for wide, root in (scaled.args, tuple(scaled.args)[::-1]):
                epsilon = self._root_of_mean_square(root, wide)
                inner = self._value(wide, "astype")
                data = wide if inner is None else inner.args[0]
                if epsilon is not None and str(data.ty.dtype) == str(weight.ty.dtype) == str(call.ty.dtype):
                    return self._rms_norm(data, weight, epsilon)
        return None

    def _root_of_mean_square(self, root: relax.Expr, data: relax.Expr) -> float | None:
        """The epsilon of ``rsqrt(mean(data ** 2, the last axis) + epsilon)``."""
        reciprocal = self._value(root, "rsqrt")
        shifted = None if reciprocal is None else self._value(reciprocal.args[0], "add")
        if shifted is None or not isinstance(shifted.args[1], GenericConst) or len(_extents(shifted.args[1])):
            return None
        mean = self._value(shifted.args[0], "mean")
        if mean is None or not mean.attrs.keepdims or not _is_last(mean.attrs.axis or (), data):
            return None
        square = self._value(mean.args[0], "power")
        if square is not None:
            two = square.args[1]
            fits = isinstance(two, GenericConst) and not len(_extents(two)) and float(two.value.numpy()) == 2.0
        else:
            square = self._value(mean.args[0], "multiply")
            fits = square is not None and square.args[1].same_as(data)
        if square is None or not fits or not square.args[0].same_as(data):
            return None
        return float(shifted.args[1].value.numpy())

    def widely(self, call: relax.Call) -> relax.Expr | None:
        """A sum of 16-bit floats in float32: upstream's rounds to 16 bits after each term."""
        data = call.args[0]
        dtype = str(data.ty.dtype)
        if dtype not in ("float16", "bfloat16"):
            return None
        wide = self.builder_.emit(relax.op.astype(data, "float32"))
        return relax.op.astype(self.builder_.emit(relax.Call(call.op, [wide], call.attrs)), dtype)

    def gathered(self, call: relax.Call) -> relax.Expr | None:
        """A row by the matrix that its index takes, of which then no copy is made."""
        for number, (weight, data) in enumerate((tuple(call.args)[::-1], tuple(call.args))):
            permuted, rank = self._value(weight, "permute_dims"), len(_extents(weight))
            if permuted is not None:
                swapped = [*range(rank - 2), rank - 1, rank - 2]
                if permuted.attrs.axes is None or [int(axis) for axis in permuted.attrs.axes] != swapped:
                    continue
            taken = self._value(weight if permuted is None else permuted.args[0], "take")
            if taken is None or int(taken.attrs.axis or 0) != 0 or str(taken.attrs.mode) != "fast":
                continue
            matrices, index = taken.args
            lead, shape, rows = _extents(index), _extents(matrices), _extents(data)
            one = -1 if number else -2  # of the rows: each is a row at the left, and a column at the right
            result = _extents(call)
            if len(shape) != 3 or not lead or len(rows) < 2 or rows[one] != 1 or result[:-2] != lead:
                continue
            # Of a matrix that is multiplied from the left, and wasn't permuted, the columns of the product come first.
            by_columns = bool(number) == (permuted is None)
            n, k = shape[1:] if by_columns else shape[:0:-1]
            dtype = str(matrices.ty.dtype)
            if {dtype} != {str(data.ty.dtype), str(call.ty.dtype)} or dtype not in (*DTYPES, "float32"):
                continue
            told = {"rows": math.prod(lead), "n": n, "k": k, "groups": shape[0]}
            if not compiles("gathered_matmul", self._target, {**told, "dtype": dtype, "transpose_b": by_columns}):
                continue
            emit, op = self.builder_.emit, relax.op
            x = emit(op.broadcast_to(emit(op.reshape(data, (*rows[:-2], k))), (*lead, k)))
            labels = emit(op.astype(emit(op.reshape(index, (told["rows"],))), "int32"))
            # Extents as Relax has them, so that upstream fuses it with operators of its own.
            func = te.create_prim_func(gathered_in_blocks(told, shape, dtype, by_columns), "int64").without_attr(
                "global_symbol"
            )
            variable = self.builder_.add_func(func.with_attr("op_pattern", _FUSABLE), "gathered_matmul")
            arguments = [emit(op.reshape(x, (told["rows"], k))), matrices, labels]
            product = emit(relax.call_tir(variable, arguments, relax.TensorType((told["rows"], n), dtype)))
            return op.reshape(product, result)
        return None

    def _rms_norm(self, data: relax.Expr, weight: relax.Expr, epsilon: float) -> relax.Expr | None:
        def blocks(x: te.Tensor, w: te.Tensor) -> list[te.Tensor]:
            return [x, w, topi.rms_norm(x, w, axis=[len(x.shape) - 1], epsilon=epsilon)]

        return self._of_rows("rms_norm", (data, weight), blocks, epsilon=epsilon)

    def _of_rows(
        self, name: str, arguments: Sequence[relax.Expr], blocks: Callable[..., list[te.Tensor]], **options: float
    ) -> relax.Expr | None:
        """A call of a kernel of rows, of as many as a call brings; None of an unknown number of columns."""
        sides, dtypes = sides_of(arguments[0]) or [], {str(each.ty.dtype) for each in arguments}
        if len(sides) < 2 or not isinstance(sides[-1], int) or len(dtypes) > 1 or not dtypes <= {*DTYPES}:
            return None
        *rows, columns = sides
        if any(sides_of(each) != [columns] for each in arguments[1:]):
            return None
        number = product(rows) if all(isinstance(each, int) for each in rows) else tirx.Var("rows", "int64")
        problem = {"rows": number, "columns": columns, "dtype": dtypes.pop(), **options}
        if not compiles(name, self._target, problem):
            return None
        own = [_placeholder(each, letter) for each, letter in zip(arguments, ("X", "weight", "bias"))]
        func = computed_by(name, problem, blocks(*own), {"rows": [0, *range(len(rows))]})
        out = relax.TensorType(sides, str(arguments[0].ty.dtype))
        return relax.call_tir(self.builder_.add_func(func, name), list(arguments), out)


def called_for(
    match: Attention,
    variable: GlobalVar,
    operands: Sequence[relax.Expr],
    call: relax.Expr,
    emit: Callable[[relax.Expr], relax.Var],
) -> relax.Expr:
    """A call of a kernel that computes an attention, of the shape of the call whose place it takes."""
    out = relax.call_tir(variable, list(operands), relax.TensorType(match.result, str(call.ty.dtype)))
    shape = sides_of(call) or []
    return out if alike(match.result, shape) else relax.op.reshape(emit(out), shape)


def _extents(expr: relax.Expr) -> tuple[int, ...]:
    """The extents of a tensor; none if they aren't all known."""
    return tuple(shape_of(expr) or ())


def _softmaxes(func: relax.Function) -> set[relax.Call]:
    """The softmaxes that no call reads whose result has their shape: what is pointwise is fused behind upstream's."""
    values, found, passed = Values(func), list[relax.Call](), list[relax.Call]()

    def visit(node: relax.Expr) -> None:
        if is_call(node, "relax.nn.softmax"):
            found.append(node)
        if isinstance(node, relax.Call):
            sides = sides_of(node)
            passed.extend(
                own
                for own in map(values.of, node.args)
                if is_call(own, "relax.nn.softmax") and sides is not None and alike(sides, sides_of(own) or [])
            )

    relax.analysis.post_order_visit(func, visit)
    return {*found} - {*passed}


def _is_last(axes: Sequence[int], value: relax.Expr) -> bool:
    """Whether axes are a value's last alone."""
    return len(axes) == 1 and is_last(int(axes[0]), value)


def _placeholder(expr: relax.Expr, name: str) -> te.Tensor:
    """A tensor of the same type, whose unknown extents are variables of its own, each of another."""
    sides = [
        side if isinstance(side, int) else tirx.Var(f"n{at}", "int64") for at, side in enumerate(sides_of(expr) or ())
    ]
    return te.placeholder(sides, str(expr.ty.dtype), name)
