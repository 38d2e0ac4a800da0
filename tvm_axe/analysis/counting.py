"""How many points meet conditions, where these are integer arithmetic: exactly, without going through all of them.

>>> from tvm import tirx
>>> i, j, k = (tirx.Var(name, "int32") for name in "ijk")
>>> count([i * 3 + j < 8, k >= 2], {i: 4, j: 3, k: 10**9})
7999999984
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
from tvm import tirx
from tvm.sym import Analyzer, detect_linear_equation

from tvm_axe.analysis.expressions import variables_of
from tvm_axe.analysis.values import points, values

__all__ = ["conjuncts", "count", "margin"]


def conjuncts(condition: tirx.Expr) -> list[tirx.Expr]:
    """Return the conditions that together are `condition`; of one that always holds, none."""
    if isinstance(condition, tirx.And):
        return conjuncts(condition.a) + conjuncts(condition.b)
    return [] if isinstance(condition, tirx.IntImm) and int(condition) else [condition]


def margin(condition: tirx.Expr) -> tirx.Expr | None:
    """Return what isn't negative where an order of integers holds, and nowhere else; None of another condition."""
    if isinstance(condition, tirx.LT | tirx.LE):
        return condition.b - condition.a - int(isinstance(condition, tirx.LT))
    if isinstance(condition, tirx.GT | tirx.GE):
        return condition.a - condition.b - int(isinstance(condition, tirx.GT))
    return None


def count(conditions: Sequence[tirx.Expr], extents: Mapping[tirx.Var, int]) -> int | None:
    """Return at how many points of variables, each from 0 to its extent, all conditions hold.

    None where that can't be seen: of a loaded value, or too many points.
    """
    groups: list[tuple[set[tirx.Var], list[tirx.Expr]]] = []
    for part in (each for condition in conditions for each in conjuncts(condition)):
        used, together = variables_of(part), [part]
        apart = [group for group in groups if not group[0] & used]
        for variables, others in (group for group in groups if group[0] & used):
            used, together = used | variables, others + together
        groups = [*apart, (used, together)]
    left = dict(extents)
    total = 1
    for used, together in groups:
        if not used <= extents.keys():
            return None
        found = _in_group(together, {var: left.pop(var) for var in extents if var in used})
        if found is None:
            return None
        total *= found
    return total * prod(left.values())


def _in_group(conditions: Sequence[tirx.Expr], extents: Mapping[tirx.Var, int]) -> int | None:
    if len(extents) == 1:
        ((var, extent),) = extents.items()
        spans = [_span(condition, var, extent) for condition in conditions]
        known = [span for span in spans if span is not None]
        if len(known) == len(spans):
            return max(0, min(stop for _, stop in known) - max(start for start, _ in known))
    at = points(conditions, extents)
    found = [] if at is None else [each for condition in conditions if (each := values(condition, at)) is not None]
    if len(found) < len(conditions):
        return None
    holds = np.broadcast_to(functools.reduce(np.logical_and, found), tuple(extents.values()))
    return int(np.count_nonzero(holds))


def _span(condition: tirx.Expr, var: tirx.Var, extent: int) -> tuple[int, int] | None:
    """Return the first number at which a bound of a linear expression holds, and the one behind the last."""
    left = margin(condition)
    if left is None:
        return None
    parts = [Analyzer().simplify(part) for part in detect_linear_equation(left, [var])]
    if len(parts) != 2 or not all(isinstance(part, tirx.IntImm) for part in parts):
        return None
    step, rest = map(int, parts)
    if step == 0:
        return (0, extent) if rest >= 0 else (0, 0)
    if step > 0:
        return max(0, -(rest // step)), extent
    return 0, min(extent, rest // -step + 1)
