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

__all__ = ["FLOAT8", "constant_stores", "dtype_like", "exact_casts", "narrowed", "uint_like", "widened"]


class _Format(NamedTuple):
    """The digits behind the leading one, the exponent's bias, and whether the largest exponent is of infinities."""

    digits: int
    bias: int
    has_infinities: bool

    @property
    def infinity(self) -> int:
        """The bits of what is no finite number any more: infinity, or NaN where there is none."""
        return (0x7F >> self.digits) << self.digits if self.has_infinities else 0x7F


FLOAT8 = {
    "float8_e4m3fn": _Format(3, 7, False),
    "float8_e4m3": _Format(3, 7, True),
    "float8_e5m2": _Format(2, 15, True),
}
"""The floats of eight bits that have digits."""
_SCALE = "float8_e8m0fnu"  # a power of two, of which there are no digits and no sign


def widened(bits: tirx.Expr, dtype: str) -> tirx.Expr:
    """The float32 that equals a float of eight bits; `bits` is a uint32, or a vector of them.

    Shifted into place, the exponent is wrong by a power of two, of denormal numbers too.
    """
    form, size = FLOAT8[dtype], bits & uint_like(0x7F, bits)
    shifted = tirx.reinterpret(dtype_like("float32", bits), size << uint_like(23 - form.digits, bits))
    value = shifted * _float_like(2.0 ** (127 - form.bias), bits)
    beyond = _float_like(float("nan"), bits)
    if form.has_infinities:
        beyond = tirx.Select(size == uint_like(form.infinity, bits), _float_like(float("inf"), bits), beyond)
    value = tirx.Select(size >= uint_like(form.infinity, bits), beyond, value)
    return tirx.Select(bits >= uint_like(0x80, bits), -value, value)


def narrowed(number: tirx.Expr, dtype: str, saturating: bool = False) -> tirx.Expr:
    """The bits, as a uint32, of the float of eight bits that is nearest to a float32, the even one of two.

    What is too large becomes an infinity, or NaN where the type has none; or, `saturating`, the largest number, as in a
    GPU's instructions (PTX ISA, ``cvt`` with ``.satfinite``). Rounding a normal number is arithmetic on the bits that
    stay; of a denormal one the adder does it, which rounds what is below the last place of the large number that is
    added.
    """
    form, float32, uint32 = FLOAT8[dtype], dtype_like("float32", number), dtype_like("uint32", number)
    bits, drop = tirx.reinterpret(uint32, number), 23 - form.digits
    size = kept = bits & uint_like(0x7FFFFFFF, number)
    magnitude = tirx.reinterpret(float32, size)
    if saturating:
        limit = _float_like(tirx.max_value(dtype).value, number)
        kept = tirx.reinterpret(uint32, tirx.Select(magnitude < limit, magnitude, limit))
    odd = (kept >> uint_like(drop, number)) & uint_like(1, number)
    halves = kept + odd + uint_like((1 << (drop - 1)) - 1, number)
    normal = (halves >> uint_like(drop, number)) - uint_like((127 - form.bias) << form.digits, number)
    if not saturating:
        normal = tirx.min(normal, uint_like(form.infinity, number))
    unit = _float_like(2.0 ** (1 - form.bias - form.digits + 23), number)  # its last place is the least number
    denormal = tirx.reinterpret(uint32, magnitude + unit) - tirx.reinterpret(uint32, unit)
    finite = tirx.Select(magnitude < _float_like(2.0 ** (1 - form.bias), number), denormal, normal)
    found = tirx.Select(size > uint_like(0x7F800000, number), uint_like(0x7F, number), finite)  # NaN
    return found | ((bits >> uint_like(24, number)) & uint_like(0x80, number))


@tirx.transform.prim_func_pass(opt_level=0)
def exact_casts(func: tirx.PrimFunc, _mod: ir.IRModule, _context: ir.transform.PassContext) -> tirx.PrimFunc:
    """The pass that writes out casts of a function for the host; a GPU has instructions for them."""
    target = func.attrs.get("target") if func.attrs else None
    if target is not None and not backend_of(target).on_host:
        return func

    def written_out(cast: tirx.Cast) -> tirx.Expr:
        source, result = str(cast.value.ty), str(cast.ty)
        if source in FLOAT8 or source == _SCALE:
            bits = tirx.Cast("uint32", tirx.reinterpret("uint8", cast.value))
            number = _scale(bits) if source == _SCALE else widened(bits, source)
            return number if result == "float32" else written_out(tirx.Cast(result, number))
        if result in FLOAT8:
            number = cast.value if source == "float32" else tirx.Cast("float32", cast.value)
            return tirx.reinterpret(result, tirx.Cast("uint8", narrowed(number, result)))
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


def _scale(bits: tirx.Expr) -> tirx.Expr:
    """The float32 that equals a power of two in eight bits."""
    value = tirx.Select(bits == uint_like(0, bits), uint_like(1 << 22, bits), bits << uint_like(23, bits))
    return tirx.Select(
        bits == uint_like(0xFF, bits), _float_like(float("nan"), bits), tirx.reinterpret("float32", value)
    )


def dtype_like(dtype: str, value: tirx.Expr) -> str:
    """A type with as many lanes as a value has."""
    lanes = int(value.ty.dtype.lanes)
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def uint_like(number: int, value: tirx.Expr) -> tirx.Expr:
    """A uint32 for each of the lanes that a value has."""
    return _constant(tirx.const(number, "uint32"), value)


def _float_like(number: float, value: tirx.Expr) -> tirx.Expr:
    """A float32 for each of the lanes that a value has."""
    return _constant(tirx.const(number, "float32"), value)


def _constant(number: tirx.Expr, value: tirx.Expr) -> tirx.Expr:
    lanes = int(value.ty.dtype.lanes)
    return number if lanes == 1 else tirx.Broadcast(number, lanes)
