"""Which elements of a buffer an access reaches, and whether some of them are all.

An access is taken apart into groups of dimensions whose indices have no variable in common: its elements are the
product of what each group reaches, so that a group is small enough to be looked at point by point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from tvm import ir, tirx

from tvm_axe import _tvm
from tvm_axe.analysis.counting import conjuncts
from tvm_axe.analysis.expressions import variables_of
from tvm_axe.analysis.values import LIMIT, points, values

__all__ = ["Elements", "cover", "elements", "one_to_one"]


@dataclass(frozen=True, eq=False)
class Elements:
    """Elements of a buffer of `shape`: ``masks[dims]`` says which indices of the dimensions `dims` are reached."""

    shape: tuple[int, ...]
    masks: Mapping[tuple[int, ...], np.ndarray]

    @property
    def everything(self) -> bool:
        """Whether these are all elements."""
        return all(bool(mask.all()) for mask in self.masks.values())

    def whole(self) -> np.ndarray:
        """One mask of the whole shape."""
        mask = np.ones([1] * len(self.shape), bool)
        for dims, part in self.masks.items():
            mask = mask & part.reshape([self.shape[dim] if dim in dims else 1 for dim in range(len(self.shape))])
        return np.broadcast_to(mask, self.shape)


def elements(
    indices: Sequence[tirx.Expr], extents: Mapping[tirx.Var, int], shape: Sequence[int], condition: tirx.Expr | None
) -> Elements | None:
    """Return the elements at `indices`, whose variables run from 0 to their extents where `condition` holds.

    None where that can't be seen: of an index that is loaded or beyond the shape, or too many points.
    """
    masks: dict[tuple[int, ...], np.ndarray] = {}
    for dims, conditions in _groups(indices, extents, condition):
        if len(dims) == 1 and not conditions:
            index, extent = indices[dims[0]], shape[dims[0]]
            if any(_counts_up(count, extents, extent) for count in (index, extent - 1 - index)):
                masks[dims] = np.broadcast_to(np.True_, extent)
                continue
        exprs = [indices[dim] for dim in dims]
        at = points([*exprs, *conditions], extents)
        sizes = [shape[dim] for dim in dims]
        if at is None or prod(sizes) > LIMIT:
            return None
        found = [values(expr, at) for expr in (*exprs, *conditions)]
        if any(value is None for value in found):
            return None
        reached = np.broadcast_arrays(*found, *at.values())[: len(found)]  # type: ignore[arg-type]
        holds = np.ones(reached[0].shape, bool) if reached else np.ones((), bool)
        for value in reached[len(exprs) :]:
            holds = holds & value.astype(bool)
        chosen = [value[holds] for value in reached[: len(exprs)]]
        if any(value.size and (value.min() < 0 or value.max() >= size) for value, size in zip(chosen, sizes)):
            return None
        mask = np.zeros(sizes, bool)
        mask[tuple(chosen)] = bool(holds.any())
        masks[dims] = mask
    return Elements(tuple(shape), masks)


def one_to_one(store: tirx.BufferStore, extents: Mapping[tirx.Var, int]) -> bool:
    """Return whether each point of the variables has an element of its own; False also where that can't be seen."""
    own = [index for index in store.indices if isinstance(index, tirx.Var) and index in extents]
    if all(extent == 1 or any(index.same_as(var) for index in own) for var, extent in extents.items()):
        return True
    reached = elements(list(store.indices), extents, [int(extent) for extent in store.buffer.shape], None)
    used = variables_of(list(store.indices))
    if reached is None or not used.issubset(extents) or any(n > 1 and v not in used for v, n in extents.items()):
        return False
    return prod(int(mask.sum()) for mask in reached.masks.values()) == prod(extents.values())


def cover(shape: Sequence[int], parts: Sequence[Elements]) -> bool:
    """Return whether `parts` together are all elements of a buffer of `shape`; False also where that can't be seen."""
    if any(part.everything for part in parts):
        return True
    if not parts or prod(shape) > LIMIT:
        return False
    return bool(np.logical_or.reduce([part.whole() for part in parts]).all())


def _counts_up(index: tirx.Expr, extents: Mapping[tirx.Var, int], extent: int) -> bool:
    """Return whether `index` is seen to be every number below `extent` once, however many these are."""
    used = variables_of(index)
    if not used or not used.issubset(extents):
        return False
    found = _tvm.iter_map([index], {var: ir.Range(0, extents[var]) for var in used})
    if len(found) != 1 or not isinstance(found[0].base, tirx.IntImm) or int(found[0].base):
        return False
    counted = 1
    for split in sorted(found[0].args, key=lambda split: int(split.scale)):
        if not isinstance(split.extent, tirx.IntImm) or int(split.scale) != counted:
            return False
        counted *= int(split.extent)
    return counted == extent


def _groups(
    indices: Sequence[tirx.Expr], extents: Mapping[tirx.Var, int], condition: tirx.Expr | None
) -> list[tuple[tuple[int, ...], list[tirx.Expr]]]:
    """Return the dimensions whose indices have variables in common, each group with the conditions on these."""
    parts = [] if condition is None else conjuncts(condition)
    groups: list[tuple[tuple[int, ...], set[tirx.Var], list[tirx.Expr]]] = []
    for dims, exprs in (*(((dim,), [index]) for dim, index in enumerate(indices)), *(((), [part]) for part in parts)):
        used = variables_of(exprs) & extents.keys()
        joined = [group for group in groups if group[1] & used]
        groups = [group for group in groups if not group[1] & used]
        conditions = [part for group in joined for part in group[2]] + (exprs if not dims else [])
        numbers = tuple(sorted({*dims, *(dim for group in joined for dim in group[0])}))
        groups.append((numbers, used.union(*(group[1] for group in joined)), conditions))
    return [(numbers, conditions) for numbers, _, conditions in groups]
