"""Casts of integers of few values to 16-bit floats by adding, which is done in pairs and faster than converting.

Where the last bit of a float stands for 1, an integer in its low bits is added to it: float16 has the bits 0x6400 for
1024, and 0x6400 + i for 1024 + i, for i up to 1023. Subtracting 1024 again is exact, so it is the number that a cast
gives:

>>> import numpy as np
>>> np.uint16(0x6400 + 5).view(np.float16) - np.float16(1024)
np.float16(5.0)

Codes of some bits that lie side by side in an integer are added to two floats at once, which is one register:

>>> byte, both = 0xA7, 0x64006400
>>> hex(both + ((byte | byte << 12) & 0x000F000F))
'0x640a6407'

Of 8 bits a register has four. The codes of two bytes are spread over it, and what is taken from each is taken from all
at once: none borrows from its neighbour, since 128 was added to it. For floats of 8 bits two registers of float16 are
made as above, and rounded.

>>> bytes_, zero = 0x5C | 0xA7 << 16, 9
>>> word = (((bytes_ | bytes_ << 4) & 0x0F0F0F0F) + 0x80808080 - zero * 0x01010101) ^ 0x80808080
>>> [int(number) for number in np.array([word], "uint32").view("int8")]
[3, -4, -2, 1]

Source: Kim et al., "Who says elephants can't run", 2022, section 3.3, for weights of 4 and 8 bits; Lin et al., "QServe:
W4A8KV4 Quantization and System Co-design for Efficient LLM Serving", 2024, section 5, for four in a register.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import numpy as np
import tvm_ffi
from tvm import sym, tirx
from tvm.ir import Range

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import alike, substitute, terms
from tvm_axe.tile.targets.cuda.fragments.layout import evaluate
from tvm_axe.tile.targets.cuda.instructions.halves import both_steps, is_apart, is_twice

UNITS = {"float16": (0x6400, 1024), "bfloat16": (0x4300, 128)}
"""By type the bits, and the value, of the float whose last bit is 1; as many integers follow it."""

_HALF = 16
"""The bits of each of two floats in a register."""

_EIGHT_BITS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
"""Floats of 8 bits by their names in PTX."""

_NIBBLE, _SIGN, _EACH = 15, 128, 0x01010101
"""The mask of four bits, the sign of a byte, and a one in each byte of a register."""


def _masked(value: tirx.Expr, mask: int, others: int) -> tirx.Expr:
    """The bits of a mask, and other bits that are set: one instruction, of which the assembler makes two by itself.

    Source: PTX ISA, "Logic and Shift Instructions: lop3": 0xEA is the table of a & b | c.
    """
    name = f"axe_bits_{mask:x}_{others:x}"
    code = f"""
__device__ __forceinline__ int {name}(int value) {{
  int bits;
  asm("lop3.b32 %0, %1, {mask:#x}, {others:#x}, 0xEA;" : "=r"(bits) : "r"(value));
  return bits;
}}
"""
    return _tvm.device_call(name, value, code=code, gives="int32")


def decoded(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with casts of integers whose values are known to be few made by addition."""
    analyzer = sym.Analyzer()

    def on_loop(loop: tirx.For) -> None:
        if isinstance(loop.min, tirx.IntImm) and isinstance(loop.extent, tirx.IntImm):
            analyzer.bind(loop.loop_var, Range.from_min_extent(loop.min, loop.extent))

    tvm_ffi.structural_walk(func.body, (tirx.For, on_loop))

    def on_cast(cast: tirx.Cast) -> tirx.Expr:
        source, target = str(cast.value.ty), str(cast.ty)
        if target not in UNITS or not source.startswith(("int", "uint")) or isinstance(cast.value, tirx.IntImm):
            return cast
        bits, unit = UNITS[target]
        value = cast.value.astype("int32") if source != "int32" else cast.value
        bound = analyzer.const_int_bound(value)
        low = int(bound.min_value)
        if int(bound.max_value) - low >= unit or not 0 <= unit - low <= 2 * unit:
            return cast
        number = analyzer.simplify(value + (bits - low)).astype("uint16")
        return tirx.reinterpret(target, number) - tirx.const(unit - low, target)

    body = _tvm.structural_map(func.body, (tirx.For, lambda loop: _in_quads(loop, analyzer)))
    body = _tvm.structural_map(body, (tirx.Cast, on_cast))
    return func.with_body(_tvm.structural_map(body, (tirx.For, lambda loop: _in_pairs(loop, analyzer))))


def _in_pairs(loop: tirx.For, analyzer: sym.Analyzer) -> tirx.Stmt:
    """The loop; one that stores two neighbours of the same bytes has their bits made at once, in front of it."""
    store = loop.body
    if not is_twice(loop) or not is_apart(store):
        return loop
    words: list[tirx.Bind] = []
    halves: dict[tirx.Cast, tirx.Var] = {}

    def found(cast: tirx.Cast) -> None:
        if str(cast.ty) != "uint16" or str(cast.value.ty) != "int32":
            return
        numbers = [analyzer.simplify(substitute(cast.value, {loop.loop_var: at})) for at in places]
        if not all(_fits(analyzer.const_int_bound(number), 1 << _HALF) for number in numbers):
            return  # one would carry into the other
        word = _word(_codes(numbers[0]), _codes(numbers[1]), analyzer)
        if word is not None:
            halves[cast] = tirx.Var("both", "int32")
            words.append(tirx.Bind(halves[cast], word))

    places = [tirx.const(n, loop.loop_var.ty) for n in range(2)]
    tvm_ffi.structural_walk(store.value, (tirx.Cast, found))
    return both_steps(loop, words, halves) if words else loop


def _in_quads(loop: tirx.For, analyzer: sym.Analyzer) -> tirx.Stmt:
    """The loop; two that store four neighbours, codes of two bytes as numbers of 8 bits, do so at once."""
    inner = loop.body
    if not is_twice(loop) or not is_twice(inner) or not is_apart(inner.body):
        return loop
    store, cast = inner.body, inner.body.value
    if not isinstance(cast, tirx.Cast) or str(cast.value.ty) != "int32" or len(store.indices) != 1:
        return loop
    if store.buffer.scope() != "local":
        return loop  # which alone is aligned for four at once
    places = [
        {each.loop_var: tirx.const(step, each.loop_var.ty) for each, step in ((loop, i), (inner, j))}
        for i in range(2)
        for j in range(2)
    ]
    first, *others = (substitute(store.indices[0], at) for at in places)
    if any(not analyzer.can_prove_equal(other, first + n) for n, other in enumerate(others, 1)):
        return loop
    if not analyzer.can_prove_equal(first % 4, 0):
        return loop
    dtype = str(cast.ty)
    word = _quad(dtype, [analyzer.simplify(substitute(cast.value, at)) for at in places], analyzer)
    if word is None:
        return loop
    return tirx.BufferStore(store.buffer, tirx.reinterpret(f"{dtype}x4", word), [tirx.Ramp(first, 1, 4)])


def _quad(dtype: str, numbers: list[tirx.Expr], analyzer: sym.Analyzer) -> tirx.Expr | None:
    """Four numbers of 8 bits in a uint32, the first in its lowest; None if they aren't codes of two bytes."""
    bounds = [analyzer.const_int_bound(number) for number in numbers]
    low, high = min(int(bound.min_value) for bound in bounds), max(int(bound.max_value) for bound in bounds)
    if dtype == "int8" and low > -_SIGN and high < _SIGN:
        word = _quad_of_integers([_codes(number) for number in numbers], analyzer)
        return None if word is None else _in_place(word)
    bits, unit = UNITS["float16"]
    if dtype not in _EIGHT_BITS or high - low >= unit or not 0 <= unit - low <= 2 * unit:
        return None
    codes = [_codes(analyzer.simplify(number + (bits - low))) for number in numbers]
    lower, upper = _word(codes[0], codes[1], analyzer), _word(codes[2], codes[3], analyzer)
    return None if lower is None or upper is None else _rounded(lower, upper, unit - low, _EIGHT_BITS[dtype])


def _quad_of_integers(codes: list[_Codes | None], analyzer: sym.Analyzer) -> tirx.Expr | None:
    """Four codes of two bytes, and what is the same for all, in a byte each; None if they aren't such."""
    known = [(*code.bits, code.rest) for code in codes if code is not None and len(code.bits) == 1]
    places = [(bits.shift, bits.mask, bits.up) for bits, _ in known if isinstance(bits.shift, int)]
    if places != 2 * [(0, _NIBBLE, 0), (4, _NIBBLE, 0)]:
        return None
    rest, sources = [rest for _, rest in known], [bits.source for bits, _ in known]
    if any(not alike([sources[n], rest[0]], [sources[n + 1], rest[n + 1]]) for n in (0, 2)):
        return None
    if not alike([rest[0]], [rest[2]]) or any(
        not _fits(analyzer.const_int_bound(source), 1 << 8) for source in sources
    ):
        return None
    word = (sources[0] + sources[2] * (1 << _HALF)).astype("uint32")
    bits = tirx.bitwise_and(tirx.bitwise_or(word, word << 4), tirx.const(_NIBBLE * _EACH, "uint32"))
    taken = analyzer.simplify(rest[0] * _EACH)
    if isinstance(taken, tirx.IntImm):
        taken = tirx.const(int(taken) % (1 << 32), "uint32")
    signs = tirx.const(_SIGN * _EACH, "uint32")
    return tirx.bitwise_xor(bits + (taken.astype("uint32") + signs), signs)


def _in_place(word: tirx.Expr) -> tirx.Expr:
    """The word, made where it stands: nvcc moves plain arithmetic behind the fence in front of the products of it."""
    code = """
__device__ __forceinline__ unsigned int axe_in_place(unsigned int word) {
  asm volatile("" : "+r"(word));
  return word;
}
"""
    return _tvm.device_call("axe_in_place", word, code=code, gives="uint32")


def _rounded(lower: tirx.Expr, upper: tirx.Expr, unit: int, ptx: str) -> tirx.Expr:
    """Four float16 in two registers, less `unit`, which is exact, as floats of 8 bits in one."""
    name = f"axe_{ptx}_less_{unit}"
    both = int(np.array([unit, unit], "float16").view("uint32")[0])
    code = f"""
__device__ __forceinline__ unsigned int {name}(int lower, int upper) {{
  unsigned int word;
  asm("{{.reg .b32 l, u; .reg .b16 x, y; sub.rn.f16x2 l, %1, %3; sub.rn.f16x2 u, %2, %3; "
      "cvt.rn.satfinite.{ptx}x2.f16x2 x, l; cvt.rn.satfinite.{ptx}x2.f16x2 y, u; mov.b32 %0, {{x, y}};}}"
      : "=r"(word) : "r"(lower), "r"(upper), "r"({both:#x}));
  return word;
}}
"""
    return _tvm.device_call(name, lower, upper, code=code, gives="uint32")


def _fits(bound: sym.ConstIntBound, end: int) -> bool:
    """Whether an integer is in 0 to `end`, which it isn't."""
    return int(bound.min_value) >= 0 and int(bound.max_value) < end


class _Bits(NamedTuple):
    """`(source >> shift & mask) << up`, whose mask is of lowest bits."""

    source: tirx.Expr
    shift: tirx.Expr | int
    mask: int
    up: int


class _Codes(NamedTuple):
    """An integer as the sum of bits, none of them at the same place, and of other terms."""

    bits: tuple[_Bits, ...]
    rest: tirx.Expr


def _codes(number: tirx.Expr) -> _Codes | None:
    """The terms that take bits, and the other ones; None if there are none, or some take the same place."""
    found, rest, taken = [], tirx.const(0, "int32"), 0
    for sign, term in terms(number):
        bits = _bits(term) if sign == 1 else None
        if bits is None:
            rest = rest + term if sign == 1 else rest - term
            continue
        if taken & bits.mask << bits.up:
            return None
        taken |= bits.mask << bits.up
        found.append(bits)
    return _Codes(tuple(found), rest) if found else None


def _bits(term: tirx.Expr) -> _Bits | None:
    """The bits that a term takes, if it does nothing else."""
    up = 0
    if isinstance(term, tirx.Mul) and isinstance(term.b, tirx.IntImm) and int(term.b).bit_count() == 1:
        term, up = term.a, int(term.b).bit_length() - 1
    if not isinstance(term, tirx.BitwiseAnd) or not isinstance(term.b, tirx.IntImm):
        return None
    source, shift, mask = term.a, 0, int(term.b)
    if isinstance(source, tirx.RShift):
        known = evaluate(source.b, {})
        source, shift = source.a, source.b if known is None else int(known)
    return _Bits(source, shift, mask, up) if mask > 0 and mask & (mask + 1) == 0 else None


def _word(first: _Codes | None, second: _Codes | None, analyzer: sym.Analyzer) -> tirx.Expr | None:
    """Both numbers in an int32, the second in its upper half; None if they aren't bits of the same and equal else."""
    if first is None or second is None or len(first.bits) != len(second.bits):
        return None
    if not alike([first.rest], [second.rest]):
        return None
    placed = [_placed(*bits, analyzer) for bits in zip(first.bits, second.bits)]
    copies = [each for each in placed if each is not None]
    if len(copies) < len(placed):
        return None
    masks = [bits.mask << bits.up | bits.mask << bits.up + _HALF for bits in first.bits]
    rest = analyzer.simplify(first.rest * (1 << _HALF | 1))
    if len(copies) == 1 and isinstance(rest, tirx.IntImm) and int(rest) & masks[0] == 0:
        return _masked(copies[0], masks[0], int(rest))
    masked = [tirx.bitwise_and(copy, _signed(mask)) for copy, mask in zip(copies, masks)]
    return reduce(tirx.bitwise_or, masked) + rest


def _placed(first: _Bits, second: _Bits, analyzer: sym.Analyzer) -> tirx.Expr | None:
    """An int32 that has the bits of both where they are to be, and others elsewhere; None if there is none.

    Of a word both are where they are to be, but for a shift. Another integer is moved twice, so that the second's bits
    are in the upper half.
    """
    if (first.mask, first.up) != (second.mask, second.up) or not alike([first.source], [second.source]):
        return None
    width, places = first.mask.bit_length(), (_whole(first.shift), _whole(second.shift))
    if first.up == 0 and _are_halves_apart(*places, width, analyzer):
        return first.source >> places[0]
    if not isinstance(first.shift, int) or not isinstance(second.shift, int):
        return None
    lower, upper = first.up - first.shift, first.up + _HALF - second.shift
    bound = analyzer.const_int_bound(first.source)
    # Neither copy of the integer may have a bit where the other one is masked.
    if lower < 0 or first.up + width > upper or not _fits(bound, 1 << max(upper - lower, 0)):
        return None
    if int(bound.max_value) << upper < 1 << 2 * _HALF - 1:
        return first.source * (1 << upper | 1 << lower)
    copies = tirx.Cast("uint32", first.source) * tirx.const(1 << upper | 1 << lower, "uint32")
    return tirx.reinterpret("int32", copies)


def _signed(mask: int) -> int:
    """A mask of 32 bits as the int32 that has them."""
    return mask - (mask >> 2 * _HALF - 1 << 2 * _HALF)


def _whole(shift: tirx.Expr | int) -> tirx.Expr:
    """A shift, without the bits of a word's places being taken from it: what it is where it is one of these."""
    if isinstance(shift, tirx.BitwiseAnd) and evaluate(shift.b, {}) == 2 * _HALF - 1:
        shift = shift.a
    return tirx.const(shift, "int32") if isinstance(shift, int) else shift


def _are_halves_apart(first: tirx.Expr, second: tirx.Expr, width: int, analyzer: sym.Analyzer) -> bool:
    """Whether as many bits from the first place on, and 16 behind it, are two halves' of a word."""
    fits = _fits(analyzer.const_int_bound(first), _HALF + 1 - width)
    return fits and bool(analyzer.can_prove_equal(second - first, _HALF))
