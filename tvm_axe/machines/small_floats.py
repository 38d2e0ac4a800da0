"""Small floats on a CPU, of which upstream gets something wrong.

Casts from and to those of eight bits are written out: upstream's are wrong for zero and small numbers.

Upstream shifts the exponent and the digits into the other type and corrects the bias, as if all numbers were normal: it
makes 0.0078125 of a zero of float8_e4m3fn, and numbers of infinities. Here denormal numbers are an integer times a
power of two; what is too large becomes an infinity, or NaN where the type has none, as in PyTorch and ml_dtypes.

Types without instructions are stored as integers of their bits. Upstream turns single constants into these, and not
vectors of one constant, so loops that store nothing but a constant are left to LLVM to vectorise.
"""

from __future__ import annotations

from typing import NamedTuple

import tvm_ffi
from tvm import ir, tirx

from tvm_axe import _tvm
from tvm_axe.machines.registry import backend_of

__all__ = ["constant_stores", "exact_casts"]


class _Format(NamedTuple):
    """The digits behind the leading one, the exponent's bias, and whether the largest exponent is of infinities."""

    digits: int
    bias: int
    has_infinities: bool

    @property
    def infinity(self) -> int:
        """The bits of what is no finite number any more: infinity, or NaN where there is none."""
        return (0x7F >> self.digits) << self.digits if self.has_infinities else 0x7F


_FORMATS = {
    "float8_e4m3fn": _Format(3, 7, False),
    "float8_e4m3": _Format(3, 7, True),
    "float8_e5m2": _Format(2, 15, True),
}

_SCALE = "float8_e8m0fnu"  # a power of two, of which there are no digits and no sign


@tirx.transform.prim_func_pass(opt_level=0)
def exact_casts(func: tirx.PrimFunc, _mod: ir.IRModule, _context: ir.transform.PassContext) -> tirx.PrimFunc:
    """The pass that writes out casts of a function for the host; a GPU has instructions for them."""
    target = func.attrs.get("target") if func.attrs else None
    if target is not None and not backend_of(target).on_host:
        return func

    def written_out(cast: tirx.Cast) -> tirx.Expr:
        source, result = str(cast.value.ty), str(cast.ty)
        if source in _FORMATS or source == _SCALE:
            number = _scale(cast.value) if source == _SCALE else _widened(cast.value, _FORMATS[source])
            return number if result == "float32" else written_out(tirx.Cast(result, number))
        if result in _FORMATS:
            number = cast.value if source == "float32" else tirx.Cast("float32", cast.value)
            return tirx.reinterpret(result, _narrowed(number, _FORMATS[result]))
        return cast

    return func.with_body(_tvm.structural_map(func.body, (tirx.Cast, written_out)))


_AS_INTEGERS = ("bfloat16", "float8", "float6", "float4")


@tirx.transform.prim_func_pass(opt_level=0)
def constant_stores(func: tirx.PrimFunc, _mod: ir.IRModule, _context: ir.transform.PassContext) -> tirx.PrimFunc:
    """The pass that makes a vectorised loop plain in which all lanes store one value of a type stored as integers.

    Upstream stores such types as integers, and leaves the broadcast of a constant, or of an element, as it is.
    """

    def plain(loop: tirx.For) -> tirx.For:
        if loop.kind != tirx.ForKind.VECTORIZED or not _stores_one_value(loop):
            return loop
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.SERIAL, loop.body)

    return func.with_body(_tvm.structural_map(func.body, (tirx.For, plain)))


def _stores_one_value(loop: tirx.For) -> bool:
    found: list[tirx.BufferStore] = []
    tvm_ffi.structural_walk(loop.body, (tirx.BufferStore, found.append))
    return any(
        str(store.buffer.dtype).startswith(_AS_INTEGERS)
        and not any(loop.loop_var.same_as(each) for each in tirx.analysis.undefined_vars(store.value))
        for store in found
    )


def _widened(x: tirx.Expr, form: _Format) -> tirx.Expr:
    """The float32 that equals a float of eight bits."""
    bits = tirx.Cast("uint32", tirx.reinterpret("uint8", x))
    size = bits & _whole(0x7F)
    normal = tirx.reinterpret("float32", (size << _whole(23 - form.digits)) + _whole((127 - form.bias) << 23))
    least = _number(2.0 ** (1 - form.bias - form.digits))
    value = tirx.Select(size < _whole(1 << form.digits), tirx.Cast("float32", size) * least, normal)
    if form.has_infinities:
        value = tirx.Select(size == _whole(form.infinity), _number(float("inf")), value)
        value = tirx.Select(size > _whole(form.infinity), _number(float("nan")), value)
    else:
        value = tirx.Select(size == _whole(0x7F), _number(float("nan")), value)
    sign = (bits >> _whole(7)) << _whole(31)
    return tirx.reinterpret("float32", tirx.reinterpret("uint32", value) | sign)


def _scale(x: tirx.Expr) -> tirx.Expr:
    """The float32 that equals a power of two in eight bits."""
    bits = tirx.Cast("uint32", tirx.reinterpret("uint8", x))
    value = tirx.Select(bits == _whole(0), _whole(1 << 22), bits << _whole(23))
    return tirx.Select(bits == _whole(0xFF), _number(float("nan")), tirx.reinterpret("float32", value))


def _narrowed(x: tirx.Expr, form: _Format) -> tirx.Expr:
    """The bits of the float of eight bits that is nearest to a float32, the even one of two."""
    all_bits = tirx.reinterpret("uint32", x)
    bits = all_bits & _whole(0x7FFFFFFF)
    shift = 23 - form.digits
    odd = (bits >> _whole(shift)) & _whole(1)
    rounded = (bits + _whole((1 << (shift - 1)) - 1) + odd) >> _whole(shift)
    normal = rounded - _whole((127 - form.bias) << form.digits)
    # Added to a number whose last digit is worth as much as theirs, denormal numbers are rounded by the addition.
    anchor = _number(2.0 ** (23 - (form.bias - 1 + form.digits)))
    size = tirx.reinterpret("float32", bits)
    denormal = tirx.reinterpret("uint32", size + anchor) - tirx.reinterpret("uint32", anchor)
    value = tirx.Select(size < _number(2.0 ** (1 - form.bias)), denormal, tirx.min(normal, _whole(form.infinity)))
    value = tirx.Select(bits > _whole(0x7F800000), _whole(0x7F), value)  # NaN
    return tirx.Cast("uint8", value | ((all_bits >> _whole(31)) << _whole(7)))


def _whole(value: int) -> tirx.Expr:
    return tirx.const(value, "uint32")


def _number(value: float) -> tirx.Expr:
    return tirx.const(value, "float32")
