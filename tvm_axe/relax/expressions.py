"""An element of a value of a model, as an expression of elements of what it is made of.

Whatever an importer writes between a parameter and where it is used, functions of its own, bits and reshapes, is
legalized, and its blocks are put into each other, as far as each computes its elements one by one::

    permute_dims(decoded)[i, j]    ->    (cast(packed[j, i // 8] >> i % 8 * 4 & 15) - 7) * scale[j, i // 32]
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import ir, relax, tirx
from tvm.ir import GenericConst, GlobalVar, IRModule

from tvm_axe.analysis.blocks import covers, nested_blocks, statements
from tvm_axe.analysis.expressions import is_choice
from tvm_axe.analysis.patterns import is_pointwise
from tvm_axe.relax.values import Values, is_call, shape_of

__all__ = ["Elements"]

_MANY = 64  # calls between a parameter and its use
_MOST = 4096  # elements that one is made of

_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    tirx.Add: operator.add, tirx.Sub: operator.sub, tirx.Mul: operator.mul,
    tirx.FloorDiv: tirx.floordiv, tirx.FloorMod: tirx.floormod, tirx.Min: tirx.min, tirx.Max: tirx.max,
    tirx.BitwiseAnd: operator.and_, tirx.BitwiseOr: operator.or_, tirx.BitwiseXor: operator.xor,
    tirx.LShift: operator.lshift, tirx.RShift: operator.rshift,
    tirx.LT: operator.lt, tirx.LE: operator.le, tirx.GT: operator.gt, tirx.GE: operator.ge,
    tirx.EQ: lambda a, b: a.equal(b),
    tirx.And: tirx.And, tirx.Or: tirx.Or,
}  # fmt: skip


_NARROW, _WRAPPING = ("int8", "uint8", "int16", "uint16"), (tirx.Add, tirx.Sub, tirx.Mul, tirx.LShift)
"""Types, and what may leave them: C++ computes it in 32 bits, in which it isn't wrapped around without a cast."""


class _UnseenError(Exception):
    """An element isn't an expression of others."""


class Elements:
    """Elements of one value of a function.

    Parameters
    ----------
    model : IRModule
        The model, of which the value's calls name functions.
    values : Values
        Of the function.
    value : Expr
        The value.

    Attributes
    ----------
    roots : mapping
        A buffer for each parameter, large constant or value of anything else than a call that it is made of; none
        if it is made of too much.
    """

    def __init__(self, model: IRModule, values: Values, value: relax.Expr) -> None:
        self._values, self._builder = values, relax.BlockBuilder()
        self._bindings: dict[relax.Var, relax.Expr] = {}
        self._stands: dict[relax.Expr, relax.Var] = {}
        self.roots: dict[relax.Expr, tirx.Buffer] = {}
        self._functions: dict[GlobalVar, ir.BaseFunc] = {}
        self._model = model
        try:
            self._value = self._collected(value)
        except _UnseenError:
            self.roots = {}
        self._legal: IRModule | None = None

    def at(self, place: Sequence[tirx.Expr]) -> tirx.Expr | None:
        """The element at a place, of loads of `roots`; None if some call computes more than element by element."""
        if not self.roots:
            return None
        self._seen = 0
        try:
            if self._legal is None:
                self._legal = self._legalized()
                self._bound = Values(self._legal["main"])
            return self._element(self._value, place)
        except _UnseenError:
            return None

    # ---- What it is made of -----------------------------------------------------------------------------------------

    def _collected(self, value: relax.Expr) -> relax.Expr:
        """The value in terms of roots, whose bindings are taken note of."""
        found = self._values.of(value)
        if isinstance(found, GenericConst) and not (shape_of(found) or []):
            return found
        if not isinstance(found, relax.Call | relax.TupleGetItem) or is_call(found, "relax.builtin.stop_lift_params"):
            return self._root(found)
        if isinstance(value, relax.Var) and value in self._stands:
            return self._stands[value]
        if len(self._bindings) == _MANY:
            raise _UnseenError
        own: relax.Expr
        if isinstance(found, relax.TupleGetItem):
            own = relax.TupleGetItem(self._collected(found.tuple_value), found.index)
        else:
            own = relax.Call(found.op, [self._argument(each) for each in found.args], found.attrs, found.ty_args)
        variable = relax.Var(f"v{len(self._bindings)}", found.ty)
        self._bindings[variable] = self._builder.normalize(own)
        if isinstance(value, relax.Var):
            self._stands[value] = variable
        return variable

    def _argument(self, value: relax.Expr) -> relax.Expr:
        if isinstance(value, GlobalVar):
            self._functions[value] = self._model[value]
            return value
        if isinstance(value, relax.Tuple):
            return relax.Tuple([self._argument(each) for each in value.fields])
        found = self._values.of(value)
        if isinstance(found, relax.Tuple):
            return self._argument(found)
        return value if not isinstance(value.ty, relax.TensorType | relax.TupleType) else self._collected(value)

    def _root(self, value: relax.Expr) -> relax.Expr:
        shape = shape_of(value)
        if shape is None:
            raise _UnseenError
        if value not in self._stands:
            self._stands[value] = relax.Var(f"r{len(self.roots)}", value.ty)
            self.roots[value] = tirx.decl_buffer(shape, str(value.ty.dtype), f"r{len(self.roots)}")
        return self._stands[value]

    def _legalized(self) -> IRModule:
        """A module with a function of the roots, whose calls are functions of blocks."""
        params = [self._stands[root] for root in self.roots]
        out = relax.Var("out", self._value.ty)
        bindings = [relax.VarBinding(var, own) for var, own in self._bindings.items()]
        body = relax.SeqExpr([relax.BindingBlock([*bindings, relax.VarBinding(out, self._value)])], out)
        main = relax.Function(params, body, self._value.ty).with_attr("global_symbol", "main")
        return relax.transform.LegalizeOps()(IRModule({**self._functions, "main": main}))

    # ---- Elements ---------------------------------------------------------------------------------------------------

    def _element(self, value: relax.Expr, place: Sequence[tirx.Expr]) -> tirx.Expr:
        assert self._legal is not None  # it is asked for first
        self._seen += 1
        if self._seen > _MOST:
            raise _UnseenError
        number = 0
        found = self._bound.of(value)
        if isinstance(found, relax.TupleGetItem):
            number, found = int(found.index), self._bound.of(found.tuple_value)
        if isinstance(found, GenericConst):
            return tirx.const(found.value.numpy().item(), str(found.ty.dtype))
        if isinstance(found, relax.Var):
            own = {str(buffer.name): buffer for buffer in self.roots.values()}  # passes may make other variables
            return tirx.BufferLoad(own[str(found.name)], list(place))
        if not is_call(found, "relax.call_tir") or not isinstance(found.args[1], relax.Tuple) or len(found.args) > 2:
            raise _UnseenError
        func = self._legal[found.args[0]]
        given = list(found.args[1].fields)
        buffers = [*filter(tirx.is_buffer_var, func.params)]
        if len(buffers) != len(func.params) or len(buffers) <= len(given):
            raise _UnseenError
        return self._stored(func, dict(zip(buffers, given)), buffers[len(given) + number], place)

    def _stored(
        self,
        func: tirx.PrimFunc,
        given: Mapping[tirx.Buffer, relax.Expr],
        buffer: tirx.Buffer,
        place: Sequence[tirx.Expr],
    ) -> tirx.Expr:
        """The element of a buffer of a function that is called with these values."""
        if buffer in given:
            return self._element(given[buffer], place)
        body = func.body.block.body if hasattr(func.body, "block") else None
        nests = [] if body is None else [own for nest in statements(body) for own in nested_blocks(nest)]
        writers = [own for own in nests if any(region.source.same_as(buffer) for region in own.block.writes)]
        if len(writers) != 1 or not is_pointwise(writers[0].block) or not covers(writers[0].realize, writers[0].loops):
            raise _UnseenError
        store = writers[0].block.body
        known: dict[tirx.Var, tirx.Expr] = {}
        for index, at in zip(store.indices, place):
            if isinstance(index, tirx.Var):
                known[index] = at
            elif not isinstance(index, tirx.IntImm):
                raise _UnseenError

        def loaded(source: tirx.Buffer, at: Sequence[tirx.Expr]) -> tirx.Expr:
            return self._stored(func, given, source, at)

        return _rewritten(store.value, known, loaded)


def _rewritten(
    expr: tirx.Expr,
    known: Mapping[tirx.Var, tirx.Expr],
    loaded: Callable[[tirx.Buffer, Sequence[tirx.Expr]], tirx.Expr],
) -> tirx.Expr:
    """An expression of other variables and loads, whose integers may be wider than they were."""

    def again(part: tirx.Expr) -> tirx.Expr:
        return _rewritten(part, known, loaded)

    if isinstance(expr, tirx.IntImm | tirx.FloatImm):
        return expr
    if isinstance(expr, tirx.Var) and expr in known:
        return known[expr]
    if isinstance(expr, ir.TensorLoad):
        return loaded(expr.source, [again(index) for index in expr.indices])
    if isinstance(expr, tirx.Cast):
        inner, dtype = again(expr.value), str(expr.ty.dtype)
        return inner if str(inner.ty.dtype) == dtype else tirx.Cast(dtype, inner)
    if type(expr) in _BINARY:
        a, b = again(expr.a), again(expr.b)
        dtype = str(expr.ty.dtype)
        if dtype in _NARROW and isinstance(expr, _WRAPPING):
            return tirx.Cast(dtype, _BINARY[type(expr)](tirx.Cast("int32", a), tirx.Cast("int32", b)))
        return _BINARY[type(expr)](a, b)
    if isinstance(expr, tirx.Select):
        return tirx.Select(again(expr.condition), again(expr.true_value), again(expr.false_value))
    if is_choice(expr):
        return tirx.if_then_else(*map(again, expr.args))
    raise _UnseenError
