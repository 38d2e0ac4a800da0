"""Products with weights of four or eight bits that a model decodes in front of them: one kernel decodes and multiplies.

    matmul(x, permute_dims(decode(packed, scale)))    ->    w4a16_matmul(x, packed, scales)

Such a weight is found by what an element of it is (`tvm_axe.relax.codes`), whoever wrote how it is decoded: functions
of an importer, bits that are shifted and stacked, a transpose behind or none. Codes that lie as the kernel reads them
stay where they are, whatever the type of the words that have them; others, and scales that lie in another order, are
packed in front of the kernel: once, where they are constants, or weights that are packed ahead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from tvm import ir, relax, te, tirx
from tvm.ir import GenericConst, IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import loads_in, substitute
from tvm_axe.layout.dtypes import dtype_bits
from tvm_axe.machines import backend_of
from tvm_axe.relax.codes import Codes, codes_of, in_range
from tvm_axe.relax.expressions import Elements
from tvm_axe.relax.in_blocks import computed_by, decoding_product_in_blocks
from tvm_axe.relax.operators_of_attention import APART
from tvm_axe.relax.values import Values, elements_of, extents_of, is_call, product, shape_of, sides_of
from tvm_axe.tile.backend import TileBackend
from tvm_axe.tile.kernels import compiles
from tvm_axe.tile.kernels.dequantized import DECODING, TYPES
from tvm_axe.tile.kernels.kernel import Problem
from tvm_axe.tile.kernels.weights import OF_BYTES

__all__ = ["with_decoding_products"]

_INTEGERS = ("int", "uint")


def with_decoding_products(model: IRModule, target: Target, with_biases: bool = False) -> IRModule:
    """The model, whose products with weights of few bits are calls of a kernel, where the target takes these.

    What isn't one functions say by the attribute `APART`.

    Parameters
    ----------
    model : IRModule
        The model, of Relax's operators; it isn't changed.
    target : Target
        Resolved.
    with_biases : bool
        Whether a kernel adds a bias, too: not where products are shared, of which each device may have some terms.
    """
    backend = backend_of(target)
    if not (isinstance(backend, TileBackend) and backend.by_default):
        return model
    rewriter, changed = _Rewriter(model), False
    for variable, func in model.functions_items():
        if not isinstance(func, relax.Function):
            continue
        finder = _Finder(model, func, target, with_biases)
        if not finder.found and not finder.left:
            continue
        changed, rewriter.found = True, finder.found
        func = rewriter.visit_expr(func)
        rewriter.builder_.update_func(variable, func.with_attr(APART, finder.left) if finder.left else func)
    return relax.transform.DeadCodeElimination()(rewriter.builder_.get()) if changed else model


class _Product(NamedTuple):
    """A product with a weight of few bits: by which kernel, what it is made of, and which value each buffer is."""

    kernel: str
    data: relax.Expr
    codes: Codes
    values: dict[tirx.Buffer, relax.Expr]
    problem: Problem
    bias: relax.Expr | None = None


class _Finder:
    """The products of a function that the kernel computes, and which aren't, and why, a text each."""

    def __init__(self, model: IRModule, func: relax.Function, target: Target, with_biases: bool) -> None:
        self._model, self._values, self._target = model, Values(func), target
        self._with_biases = with_biases
        self.found: dict[relax.Call, _Product] = {}
        self.left: list[str] = []
        for call in self._values.calls():
            own = self._product(call) if is_call(call, "relax.matmul") else None
            if isinstance(own, _Product):
                self.found |= self._in_its_type(call, own)
            elif own is not None:
                bits, why = own
                self.left.append(
                    f"{self._values.named(call).name}: weights of {bits} bits are decoded in memory; {why}"
                )

    def _in_its_type(self, call: relax.Call, own: _Product) -> dict[relax.Call, _Product]:
        """The call and its product; one of float32 is of the type that it is cast to, behind a bias or at once."""
        if "out_dtype" not in own.problem:
            return {call: own}
        narrow = own._replace(problem={key: value for key, value in own.problem.items() if key != "out_dtype"})
        last, bias = self._only_reader(call), None
        if self._with_biases and last is not None and is_call(last, "relax.add"):
            bias = self._bias(call, last, own)
            last = None if bias is None else self._only_reader(last)
        if last is None or not is_call(last, "relax.astype") or str(last.ty.dtype) != own.problem["dtype"]:
            return {call: own}
        if bias is not None:
            narrow = narrow._replace(problem={**narrow.problem, "bias": True}, bias=bias)
        return {last: narrow}

    def _only_reader(self, call: relax.Call) -> relax.Expr | None:
        readers = self._values.readers(call)
        return readers[0] if len(readers) == 1 else None

    def _bias(self, call: relax.Call, added: relax.Call, own: _Product) -> relax.Expr | None:
        """What of the product's type and as many elements as columns is added, in float32; None if it is else."""
        others = [each for each in added.args if self._values.of(each) is not call]
        wide = self._values.of(others[0]) if len(others) == 1 else None
        if wide is None or not is_call(wide, "relax.astype"):
            return None
        (bias,) = wide.args
        is_bias = shape_of(bias) == [own.problem["n"]] and str(bias.ty.dtype) == own.problem["dtype"]
        return bias if is_bias else None

    def _product(self, call: relax.Call) -> _Product | tuple[int, str] | None:
        """What a product is made of; its weight's bits and why no kernel computes it; None if they aren't few."""
        data, weight = call.args
        shape, sides = shape_of(weight), sides_of(data)
        if shape is None or len(shape) != 2 or not sides or isinstance(self._values.of(weight), relax.Var):
            return None
        k, n = shape
        elements = Elements(self._model, self._values, weight)
        bits = next(
            (bits for bits in DECODING if any(_is_of(root, bits, n * k) for root in elements.roots.values())), 0
        )
        if not bits:
            return None
        dtype = str(weight.ty.dtype)
        out_dtype = str(call.ty.dtype)
        if dtype not in TYPES or str(data.ty.dtype) != dtype or out_dtype not in (dtype, "float32"):
            return bits, f"the product is of {dtype}, the kernel's of {' or '.join(TYPES)}"
        row, column = (tirx.Var(name, "int64") for name in ("row", "column"))
        element = elements.at([column, row])
        if element is None:
            return bits, "how isn't said element by element"
        codes = codes_of(_with_constants(element, elements.roots), row, column, n, k, dtype, bits)
        if isinstance(codes, str):
            return bits, codes
        rows = product(sides[:-1])
        problem = {"m": rows if isinstance(rows, int) else tirx.Var("m", "int64"), "n": n, "k": k}
        problem |= {"group": codes.group, "dtype": dtype}
        if bits == 8:
            problem["weights"] = codes.stored.dtype
        if not isinstance(codes.zero, tirx.IntImm):
            problem["zeros"] = True
        elif int(codes.zero) != codes.stored.middle:
            problem["middle"] = int(codes.zero)
        if str(codes.scale.ty.dtype) != dtype:
            problem["scale_dtype"] = str(codes.scale.ty.dtype)
        if out_dtype != dtype:
            problem["out_dtype"] = out_dtype
        if not compiles(DECODING[bits], self._target, problem):
            return bits, f"the target has no kernel for {k} terms in groups of {codes.group}"
        return _Product(DECODING[bits], data, codes, {own: root for root, own in elements.roots.items()}, problem)


def _is_of(root: tirx.Buffer, bits: int, elements: int) -> bool:
    """Whether a tensor has as many bits as so many codes, of integers or floats of as few."""
    kind = str(root.dtype)
    sizes = [int(extent) for extent in root.shape]
    is_code = kind.startswith(_INTEGERS) or (bits == 8 and kind in OF_BYTES)
    return is_code and int(product(sizes)) * dtype_bits(kind) == bits * elements


def _with_constants(element: tirx.Expr, roots: Mapping[relax.Expr, tirx.Buffer]) -> tirx.Expr:
    """The element, with what is known of integers that are constants: the one that all are, or that they have 8 bits.

    Zero points come as integers of 32 or 64 bits.
    """
    known = {own: elements_of(root) for root, own in roots.items() if isinstance(root, GenericConst)}

    def loaded(load: ir.TensorLoad) -> tirx.Expr:
        numbers, dtype = known.get(load.source), str(load.ty.dtype)
        if numbers is None or not dtype.startswith(_INTEGERS) or not numbers.size:
            return load
        least, most = int(numbers.min()), int(numbers.max())
        if least == most:
            return tirx.const(least, dtype)
        fits = next((kind for kind in ("int8", "uint8") if in_range(least, most, kind)), dtype)
        return load if fits == dtype else tirx.Cast(dtype, tirx.Cast(fits, load))

    return _tvm.structural_map(element, (ir.TensorLoad, loaded))


@mutator
class _Rewriter(PyExprMutator):
    def __init__(self, model: IRModule) -> None:
        super().__init__(model)
        self.found: dict[relax.Call, _Product] = {}

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """The call, or that of the kernel that computes it."""
        return self._called(call, self.found[call]) if call in self.found else self.visit_expr_post_order(call)

    def _called(self, call: relax.Call, own: _Product) -> relax.Expr:
        codes, problem, emit = own.codes, own.problem, self.builder_.emit
        sides = sides_of(call) or []
        n, groups = codes.n, codes.k // codes.group
        stored, scale_dtype = codes.stored, str(codes.scale.ty.dtype)
        tensors = [self._tensor(own, "codes", (n, codes.k // stored.each), stored.dtype, codes.words, codes.byte)]
        points = [("points", codes.zero, stored.dtype)] if "zeros" in problem else []
        parts = [("scales", codes.scale, scale_dtype), *points]
        for name, value, kind in parts:
            element = functools.partial(codes.of_group, value)
            tensors.append(self._tensor(own, name, (groups, n), kind, codes.of_groups(value, kind), element))
        rows = product(sides[:-1])
        data = self.visit_expr(own.data)
        if len(sides) != 2:
            data = emit(relax.op.reshape(data, (rows, problem["k"])))
        if own.bias is not None:
            tensors.append(self.visit_expr(own.bias))
        kinds = [(extents_of(each), str(each.ty.dtype)) for each in tensors]
        func = computed_by(own.kernel, problem, decoding_product_in_blocks(problem, kinds))
        out = relax.TensorType((rows, problem["n"]), str(call.ty.dtype))
        made = relax.call_tir(self.builder_.add_func(func, own.kernel), [data, *tensors], out)
        return made if len(sides) == 2 else relax.op.reshape(emit(made), sides)

    def _tensor(
        self,
        own: _Product,
        name: str,
        shape: tuple[int, int],
        dtype: str,
        source: tirx.Buffer | None,
        element: Callable[[tirx.Expr, tirx.Expr], tirx.Expr],
    ) -> relax.Expr:
        """A tensor as the kernel reads it: the one that lies so already, or what packs it, element by element."""
        if source is not None:
            return self.visit_expr(own.values[source])
        places = [tirx.Var(each, "int64") for each in ("i", "j")]
        value = element(*places)
        if isinstance(value, tirx.FloatImm):
            return relax.const(np.full(shape, float(value.value)), dtype)
        sources = list(dict.fromkeys(load.source for load in loads_in(value)))
        given = {each: te.placeholder(each.shape, each.dtype, str(each.name)) for each in sources}
        loaded = _tvm.structural_map(value, (ir.TensorLoad, lambda load: given[load.source](*load.indices)))
        loaded = loaded if str(loaded.ty.dtype) == dtype else tirx.Cast(dtype, loaded)
        made = te.compute(shape, lambda *at: substitute(loaded, dict(zip(places, map(_wide, at)))), name)
        func = te.create_prim_func([*given.values(), made], "int64").without_attr("global_symbol")
        operands = [self.visit_expr(own.values[each]) for each in sources]
        variable = self.builder_.add_func(func, f"packed_{name}")
        return self.builder_.emit(relax.call_tir(variable, operands, relax.TensorType(shape, dtype)))


def _wide(index: tirx.Expr) -> tirx.Expr:
    return tirx.Cast("int64", index)
