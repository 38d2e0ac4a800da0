"""Whether an element of a matrix is a code of few bits, less what stands for zero, times the scale of its group.

    V[j, i] = (code(j, i) - zero(i // group, j)) * scale(i // group, j)

Codes of four bits are integers; which bits of which word a code is, is nobody's business: its values are bounded, and
what packs them anew computes each where it is asked to (`Codes.packed`). Those of eight are integers or floats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tvm import ir, tirx
from tvm.sym import Analyzer
from tvm_ffi import structural_equal

from tvm_axe.analysis.expressions import is_choice, is_float, loads_in, substitute, uses
from tvm_axe.layout.dtypes import dtype_bits
from tvm_axe.tile.kernels.weights import CODES, OF_BYTES, Stored, stored_as

__all__ = ["Codes", "codes_of", "in_range"]

_BITS = 4
_MOST = (1 << 8) - 1  # what stands for zero is stored in a byte
_EXACT = 1 << 8  # floats of 16 bits have all integers up to it


class Codes(NamedTuple):
    """What a matrix (n, k) is made of.

    Attributes
    ----------
    code, scale, zero : Expr
        Of `row`, and of `column` or `part`, the number of a group; a code of four bits is an integer from 0 to 15.
    stored : Stored
        How the kernel reads them.
    row, column, part : Var
        Their variables.
    n, k, group : int
        Rows, columns, and how many columns of a row have one scale.
    """

    code: tirx.Expr
    scale: tirx.Expr
    zero: tirx.Expr
    stored: Stored
    row: tirx.Var
    column: tirx.Var
    part: tirx.Var
    n: int
    k: int
    group: int

    @property
    def words(self) -> tirx.Buffer | None:
        """The tensor that has the codes in rows, that of an earlier column in lower bits of a word; None if none has.

        Of four bits it has n rows of k / 2 bytes, read as words of whichever type on machines that store the lowest
        byte first.
        """
        sources = {load.source for load in loads_in(self.code)}
        if len(sources) != 1:
            return None
        (source,) = sources
        kind = str(source.dtype)
        if self.stored.each == 1:
            load = _loaded(self.code)
            lies_so = load is not None and structural_equal(list(load.indices), [self.row, self.column])
            is_whole = [int(extent) for extent in source.shape] == [self.n, self.k]
            return source if lies_so and is_whole and kind == self.stored.dtype else None
        if kind not in ("uint8", "int8", "uint16", "int16", "uint32", "int32"):
            return None
        lanes = int(kind.lstrip("uint")) // _BITS
        if self.k % lanes or [int(extent) for extent in source.shape] != [self.n, self.k // lanes]:
            return None
        word, analyzer = tirx.Var("word", "int64"), Analyzer()
        analyzer.bind(word, ir.Range(0, self.k // lanes))
        analyzer.bind(self.row, ir.Range(0, self.n))
        for lane in range(lanes):
            bits = _bits(analyzer.simplify(substitute(self.code, {self.column: word * lanes + lane})))
            if bits is None or bits[1] != lane * _BITS or not structural_equal(list(bits[0]), [self.row, word]):
                return None
        return source

    def byte(self, j: tirx.Expr, b: tirx.Expr) -> tirx.Expr:
        """A byte of the codes as the kernel reads them; of four bits that of an even column is in its low bits."""
        if self.stored.each == 1:
            return tirx.Cast(self.stored.dtype, substitute(self.code, {self.row: j, self.column: b}))
        low, high = (substitute(self.code, {self.row: j, self.column: b * 2 + odd}) for odd in (0, 1))
        return tirx.Cast("uint8", low | (high << tirx.const(_BITS, "int32")))

    def of_groups(self, value: tirx.Expr, dtype: str) -> tirx.Buffer | None:
        """The tensor that scales or zeros are as (k / group, n); None if there is none."""
        if not isinstance(value, ir.TensorLoad) or str(value.source.dtype) != dtype:
            return None
        shape = [int(extent) for extent in value.source.shape]
        lies_so = structural_equal(list(value.indices), [self.part, self.row])
        return value.source if lies_so and shape == [self.k // self.group, self.n] else None

    def of_group(self, value: tirx.Expr, g: tirx.Expr, j: tirx.Expr) -> tirx.Expr:
        """A scale or zero of a group and a row."""
        return substitute(value, {self.row: j, self.part: g})


def codes_of(
    element: tirx.Expr, row: tirx.Var, column: tirx.Var, n: int, k: int, dtype: str, bits: int = _BITS
) -> Codes | str:
    """What a matrix is made of whose element is an expression of `row` and `column`; why it isn't, in words.

    Parameters
    ----------
    element : Expr
        Of a type of 16 bits, `dtype`.
    row, column : Var
        int64, from 0 to n and k.
    bits : int
        Of a code, 4 or 8.
    """
    wholes, others = list[tirx.Expr](), list[tirx.Expr]()
    for factor in _factors(element):
        number = _narrowed(factor)
        whole = number if bits == 8 and str(number.ty.dtype) in OF_BYTES else _as_integer(factor)
        if whole is None:
            others.append(number)
        else:
            wholes.append(whole)
    others = others or [tirx.const(1.0, dtype)]  # of a scale behind the product, or none
    if len(wholes) != 1 or len(others) != 1:
        return "they aren't numbers times scales" if bits == 8 else "they aren't integers times scales"
    (whole,), (scale,) = wholes, others
    if str(scale.ty.dtype) not in (dtype, "float32"):
        return f"their scales are {scale.ty.dtype}; of {dtype}, as the product is, or float32, they would be"
    parts = _parts(_terms(whole), scale, row, column, n, k)
    if parts is None:
        return "their scales, or what stands for zero, aren't those of groups of columns"
    found = _stored(parts, bits)
    if isinstance(found, str):
        return found
    stored, code, zero = found
    return Codes(code, parts.scale, zero, stored, row, column, parts.part, n, k, parts.group)


def _stored(parts: _Parts, bits: int) -> tuple[Stored, tirx.Expr, tirx.Expr] | str:
    """How codes are stored, as numbers of which range, and what stands for zero among these; why they aren't."""
    simplify = parts.analyzer.simplify
    if is_float(parts.code):
        return stored_as(str(parts.code.ty.dtype)), parts.code, parts.zero
    least, most = _bounds(parts.code)
    if most - least >= 1 << bits:
        each = "4 bits, 16 in a row, they" if bits == _BITS else "8 bits they"
        return f"they are integers from {least} to {most}; of {each} would be"
    stored, from_ = CODES, least
    if bits == 8:
        signed = in_range(least, most, "int8")
        stored = stored_as("int8" if signed else "uint8")
        from_ = 0 if signed or in_range(least, most, "uint8") else least
    zero = simplify(parts.zero - tirx.const(from_, "int32"))
    if not in_range(*_bounds(zero), stored.dtype):
        return "what stands for zero isn't an integer of 8 bits"
    return stored, simplify(parts.code if from_ == 0 else parts.code - tirx.const(from_, "int32")), zero


class _Parts(NamedTuple):
    """What is of a column, and what of its group, of whose number `part` the scale and zero are."""

    code: tirx.Expr
    scale: tirx.Expr
    zero: tirx.Expr
    part: tirx.Var
    group: int
    analyzer: Analyzer


def _parts(
    terms: Sequence[tuple[int, tirx.Expr]], scale: tirx.Expr, row: tirx.Var, column: tirx.Var, n: int, k: int
) -> _Parts | None:
    """The parts of a sum times a scale, in the largest groups that there are; None if there are none."""
    part, within = tirx.Var("g", "int64"), tirx.Var("r", "int64")
    for group in (size for size in range(k, 1, -1) if k % size == 0):
        analyzer = Analyzer()
        for variable, extent in ((row, n), (part, k // group), (within, group), (column, k)):
            analyzer.bind(variable, ir.Range(0, extent))
        place = {column: part * group + within}
        own = analyzer.simplify(substitute(scale, place))
        seen = [(sign, analyzer.simplify(substitute(term, place))) for sign, term in terms]
        fixed = [(sign, term) for sign, term in seen if not uses(term, within)]
        codes = [term for (_, term), (sign, at) in zip(terms, seen) if uses(at, within) and sign > 0]
        if uses(own, within) or len(codes) != 1 or len(fixed) + 1 != len(terms):
            continue
        zero: tirx.Expr = tirx.const(0, "int32")
        for sign, term in fixed:
            zero = zero - term if sign > 0 else zero + term
        return _Parts(codes[0], own, zero, part, group, analyzer)
    return None


def _loaded(code: tirx.Expr) -> ir.TensorLoad | None:
    """The element that a number of eight bits is, cast or not; None if it is something else."""
    while isinstance(code, tirx.Cast):
        code = code.value
    return code if isinstance(code, ir.TensorLoad) else None


def _factors(expr: tirx.Expr) -> list[tirx.Expr]:
    """What is multiplied, without casts of floats around."""
    expr = _narrowed(expr)
    return [*_factors(expr.a), *_factors(expr.b)] if isinstance(expr, tirx.Mul) and is_float(expr) else [expr]


def _narrowed(expr: tirx.Expr) -> tirx.Expr:
    """A float without the casts of floats around it, but for those that leave it eight bits."""
    while isinstance(expr, tirx.Cast) and is_float(expr) and is_float(expr.value):
        if dtype_bits(str(expr.ty.dtype)) <= 8:
            break
        expr = expr.value
    return expr


def _as_integer(expr: tirx.Expr) -> tirx.Expr | None:
    """A float, or an integer, that is computed of integers alone, as an integer of 32 bits; else None."""
    if isinstance(expr, tirx.FloatImm):
        number = float(expr.value)
        return tirx.const(int(number), "int32") if number.is_integer() and abs(number) <= _MOST else None
    if isinstance(expr, tirx.Cast) and (is_float(expr) or in_range(*_bounds(expr.value), str(expr.ty.dtype))):
        return _as_integer(expr.value)
    if is_choice(expr):
        sides = [_as_integer(each) for each in expr.args[1:]]
        return None if None in sides else tirx.if_then_else(expr.args[0], *sides)
    if isinstance(expr, tirx.Add | tirx.Sub) and _is_exact(expr):
        a, b = _as_integer(expr.a), _as_integer(expr.b)
        return None if a is None or b is None else a + b if isinstance(expr, tirx.Add) else a - b
    if is_float(expr):
        return None
    return expr if str(expr.ty.dtype) == "int32" else tirx.Cast("int32", expr)


def _is_exact(expr: tirx.Expr) -> bool:
    """Whether a sum or difference is no rounded one, and not beyond its type."""
    if not is_float(expr):
        return in_range(*_combined(expr), str(expr.ty.dtype))
    a, b = (_as_integer(each) for each in (expr.a, expr.b))
    if a is None or b is None:
        return False
    return all(max(map(abs, each)) <= _EXACT for each in (_bounds(a), _bounds(b), _combined(type(expr)(a, b))))


def _bounds(expr: tirx.Expr) -> tuple[int, int]:
    """The least and the most that an integer may be.

    Upstream's analyzer takes a cast to a narrower type, which wraps around, for one that keeps values.
    """
    kind = str(expr.ty.dtype)
    found = _range(kind)
    if isinstance(expr, tirx.IntImm):
        found = int(expr), int(expr)
    elif is_choice(expr):
        sides = [_bounds(each) for each in expr.args[1:]]
        found = min(low for low, _ in sides), max(high for _, high in sides)
    elif isinstance(expr, tirx.Cast) and not is_float(expr.value):
        found = _bounds(expr.value)
    elif isinstance(expr, tirx.Add | tirx.Sub):
        found = _combined(expr)
    elif isinstance(expr, tirx.BitwiseAnd) and isinstance(expr.b, tirx.IntImm) and int(expr.b) >= 0:
        found = 0, int(expr.b)
    elif isinstance(expr, tirx.RShift):
        low, high = _bounds(expr.a)
        by = int(expr.b) if isinstance(expr.b, tirx.IntImm) else None
        found = (min(low, 0), max(high, 0)) if by is None else (low >> by, high >> by)
    return found if in_range(*found, kind) else _range(kind)


def _combined(expr: tirx.Add | tirx.Sub) -> tuple[int, int]:
    (low, high), (least, most) = _bounds(expr.a), _bounds(expr.b)
    return (low + least, high + most) if isinstance(expr, tirx.Add) else (low - most, high - least)


def _range(kind: str) -> tuple[int, int]:
    """The least and the most of an integer's type."""
    bits = 1 if kind == "bool" else int(kind.lstrip("uint"))
    return (0, (1 << bits) - 1) if kind.startswith(("u", "b")) else (-(1 << bits - 1), (1 << bits - 1) - 1)


def in_range(least: int, most: int, kind: str) -> bool:
    """Whether a type of integers has all from the least to the most."""
    first, last = _range(kind)
    return first <= least and most <= last


def _terms(expr: tirx.Expr, sign: int = 1) -> list[tuple[int, tirx.Expr]]:
    """What is added, with its sign."""
    if isinstance(expr, tirx.Add | tirx.Sub):
        return [*_terms(expr.a, sign), *_terms(expr.b, -sign if isinstance(expr, tirx.Sub) else sign)]
    return [(sign, expr)]


def _bits(code: tirx.Expr) -> tuple[Sequence[tirx.Expr], int] | None:
    """Where the word lies of which a code is four bits, and behind how many others; None if it is something else."""
    masked, shift = False, 0
    while not isinstance(code, ir.TensorLoad):
        if isinstance(code, tirx.BitwiseAnd) and isinstance(code.b, tirx.IntImm) and not masked:
            if int(code.b) != (1 << _BITS) - 1 or shift:
                return None
            masked, code = True, code.a
        elif isinstance(code, tirx.RShift) and isinstance(code.b, tirx.IntImm):
            shift, code = shift + int(code.b), code.a
        elif isinstance(code, tirx.Cast) and not is_float(code.value):
            code = code.value
        else:
            return None
    kind = str(code.ty.dtype)
    is_last = kind.startswith("u") and shift == int(kind.lstrip("uint")) - _BITS
    return (code.indices, shift) if masked or is_last else None
