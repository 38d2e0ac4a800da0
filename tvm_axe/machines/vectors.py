"""Which elements of tensors neighbouring iterations of a loop touch: vectors that begin at a multiple of their length.

What is shown is shown for all iterations of the loops around. A load under a condition is one for all only if the
condition is the same for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import DataType, ir, tirx
from tvm.sym import Analyzer

from tvm_axe.analysis.blocks import ranges_of
from tvm_axe.analysis.expressions import is_zero, substitute, uses
from tvm_axe.analysis.guards import COMPARISONS
from tvm_axe.layout.shapes import dense_strides

__all__ = ["Elements", "Finder", "like"]


@dataclass(frozen=True)
class Elements:
    """Elements that a thread loads or stores: one that all lanes have in common, or one for each lane, a vector.

    Attributes
    ----------
    indices : tuple of Expr
        As they stand in the nest, for any lane.
    first : tuple of Expr
        Those of the first lane.
    dim : int or None
        The dimension in which a vector's elements are beside each other.
    guard : Expr or None
        The condition under which they are loaded.
    """

    buffer: tirx.Buffer
    indices: tuple[tirx.Expr, ...]
    first: tuple[tirx.Expr, ...]
    dim: int | None
    guard: tirx.Expr | None


class Finder:
    """Shows that elements of a buffer are beside each other, and begin at a multiple of their number.

    Parameters
    ----------
    loops : sequence of For
        All loops around.
    loop : For
        The one of them of whose iterations so many that follow each other are lanes. In what is found its variable is
        that of groups of lanes.
    width : int
        How many.
    """

    def __init__(self, loops: Sequence[tirx.For], loop: tirx.For, width: int) -> None:
        self.width = width
        self._var = var = loop.loop_var
        kind = str(var.ty)
        self._lane = tirx.Var("lane", kind)
        number = var * tirx.const(width, kind)  # the variable is from now on that of groups of lanes
        self._first, self._any = {var: number}, {var: number + self._lane}
        self._analyzer = Analyzer()
        groups = ir.Range(tirx.const(0, kind), tirx.const(int(loop.extent) // width, kind))
        spans = ranges_of(loops) | {
            var: groups,
            self._lane: ir.Range(tirx.const(0, kind), tirx.const(width, kind)),
        }
        for each, span in spans.items():
            self._analyzer.bind(each, span)

    def loaded(self, load: ir.TensorLoad, guard: tirx.Expr | None) -> Elements | None:
        """Return what is to be loaded at once for all lanes; None if they need others each, or not all of them any."""
        if guard is not None and not self._is_common(guard):
            return None
        indices = tuple(load.indices)
        if uses(list(indices), self._var):
            return self.vector(load.source, indices, guard)
        return Elements(load.source, indices, indices, None, self._of_first(guard))

    def vector(
        self, buffer: tirx.Buffer, indices: tuple[tirx.Expr, ...], guard: tirx.Expr | None = None
    ) -> Elements | None:
        """Return the vector of these elements; None if they can't be shown to be one."""
        strides = _strides(buffer)
        if strides is None:
            return None
        first = tuple(substitute(index, self._first) for index in indices)
        along = []
        for dim, (index, begin) in enumerate(zip(indices, first)):
            moved = substitute(index, self._any)
            if not self._analyzer.can_prove_equal(moved, begin):
                step = like(self._lane, index)
                if strides[dim] != 1 or not self._analyzer.can_prove_equal(moved - begin, step):
                    return None
                along.append(dim)
        if len(along) != 1:
            return None
        if not all(self._is_multiple(begin, stride) for begin, stride in zip(first, strides)):
            return None
        simple = tuple(self._analyzer.simplify(begin) for begin in first)
        return Elements(buffer, indices, simple, along[0], self._of_first(guard))

    def _of_first(self, guard: tirx.Expr | None) -> tirx.Expr | None:
        return None if guard is None else substitute(guard, self._first)

    def _is_common(self, condition: tirx.Expr) -> bool:
        """Whether a condition can be shown to be the same for all lanes."""
        if not uses(condition, self._var):
            return True
        if isinstance(condition, tirx.And | tirx.Or):
            return self._is_common(condition.a) and self._is_common(condition.b)
        if isinstance(condition, tirx.Not):
            return self._is_common(condition.a)
        if not isinstance(condition, COMPARISONS) or not str(condition.a.ty).startswith("int"):
            return False
        a, b, one = condition.a, condition.b, tirx.const(1, str(condition.a.ty))
        # Upstream sees of a number that is less than a multiple what it doesn't of one that is at least one.
        forms: tuple[tirx.Expr, ...] = (condition,)
        if isinstance(condition, tirx.LT | tirx.GE):
            forms = tirx.LT(a, b), tirx.LT(b, a + one)
        elif isinstance(condition, tirx.LE | tirx.GT):
            forms = tirx.LT(a, b + one), tirx.LT(b, a)
        return any(
            self._analyzer.can_prove_equal(substitute(form, self._any), substitute(form, self._first)) for form in forms
        )

    def _is_multiple(self, begin: tirx.Expr, stride: int) -> bool:
        """Whether so many elements, times the stride, are a multiple of the width."""
        if stride % self.width == 0:
            return True
        known = self._analyzer.modular_set(begin)
        return int(known.coeff) * stride % self.width == 0 and int(known.base) * stride % self.width == 0


def like(number: tirx.Expr, other: tirx.Expr) -> tirx.Expr:
    """Return the number in the type of another."""
    return number if str(number.ty) == str(other.ty) else tirx.Cast(str(other.ty), number)


def _strides(buffer: tirx.Buffer) -> list[int] | None:
    """How far apart elements are along each dimension; None of what isn't whole bytes or not known.

    None of bools, too: upstream's code generator writes vectors of four as other types, and has none of more.
    """
    kind = DataType(str(buffer.dtype))
    offset = buffer.elem_offset
    if str(buffer.dtype) == "bool" or buffer.scope() not in ("", "global"):
        return None
    if kind.bits % 8 or kind.lanes != 1 or not (offset is None or is_zero(offset)):
        return None
    given = list(buffer.strides) or list(buffer.shape)
    if not all(isinstance(each, tirx.IntImm) for each in given):
        return None
    numbers = [int(each) for each in given]
    return numbers if len(buffer.strides) else list(dense_strides(numbers))
