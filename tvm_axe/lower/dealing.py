"""Which indices of a function's buffers and iterators a device has, where factors of its sharding rule are shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tvm_axe.analysis.sharding_rule import Dimension, Operand, ShardingRule
from tvm_axe.layout.shares import Run, Share

__all__ = ["Assigned", "shares_of"]

Assigned = Mapping[tuple[str, ...], Share]
"""Factors that are shared, those together that count as one index, major first; and how."""


def shares_of(operand: Operand, rule: ShardingRule, assigned: Assigned, devices: int) -> tuple[Share, ...] | None:
    """Return the share of each dimension of an operand of a rule.

    A device has an index if it has it for some value of the factors that the index hasn't.

    Parameters
    ----------
    operand : Operand
        One of `rule`: a parameter, a buffer, or a block's iterators.
    rule : ShardingRule
        The rule.
    assigned : Assigned
        How factors are shared.
    devices : int
        How many there are.

    Returns
    -------
    shares : tuple of Share, or None
        None where that is no share: of an index whose digits lie in two dimensions.
    """
    for together in assigned:
        if sum(any(name in part.factors for part in parts for name in together) for parts in operand.dims) > 1:
            return None
    found = [_dimension(parts, rule, assigned, devices) for parts in operand.dims]
    return None if any(share is None for share in found) else tuple(share for share in found if share is not None)


def _dimension(parts: Dimension, rule: ShardingRule, assigned: Assigned, devices: int) -> Share | None:
    shares = []
    for part in parts:
        hits = [(together, share) for together, share in assigned.items() if set(together) & set(part.factors)]
        if len(hits) > 1:
            return None
        extents = [rule[name].extent for name in part.factors]
        share: Share | None = Share.whole(part.end - part.begin, devices)
        if hits:
            share = _on_digits(part.factors, extents, *hits[0], rule)
        if share is None:
            return None
        shares.append(share)
    return shares[0] if len(shares) == 1 else Share.joined(shares)


def _on_digits(
    names: Sequence[str], extents: Sequence[int], together: tuple[str, ...], share: Share, rule: ShardingRule
) -> Share | None:
    """Return the share of an index over the digits `names` that has some or all of those that are shared `together`."""
    common = [name for name in together if name in names]
    first = names.index(common[0])
    if tuple(names[first : first + len(common)]) != tuple(common):
        return None
    outer, inner = int(np.prod(extents[:first])), int(np.prod(extents[first + len(common) :]))
    if len(common) < len(together):
        share = _of_some(share, [rule[name].extent for name in together], [name in common for name in together])
    return share.around(outer, inner)


def _of_some(share: Share, extents: Sequence[int], kept: Sequence[bool]) -> Share:
    """Return the share of some digits of an index: from the first value that a device needs to the last."""
    lacking = [extent for extent, keep in zip(extents, kept) if keep]
    total, spans = int(np.prod(lacking)), []
    for device in range(share.devices):
        digits = [d for d, keep in zip(np.unravel_index(share.indices(device), tuple(extents)), kept) if keep]
        needed = np.ravel_multi_index(tuple(digits), tuple(lacking))
        spans.append((int(needed.min()), int(needed.max())))
    size = max(last - first + 1 for first, last in spans)
    return Share.of([Run(1, total, 1, tuple(min(first, total - size) for first, _ in spans), size)])
