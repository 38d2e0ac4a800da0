"""What a layout reaches: bounds and spans, whether elements collide, what is covered, and whether two maps are equal.

D and R move along each axis by digits that no other axis shares. So the points that a layout reaches are all those
whose position on every axis is one that the axis alone reaches, and two elements meet iff they meet on each axis. Every
question here is answered axis by axis, and exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import LINEAR_MEMORY, MEMORY_AXES, check_int
from tvm_axe.layout.iters import Iter, absorb
from tvm_axe.layout.symbolic import Number, proved_less

if TYPE_CHECKING:
    from tvm_axe.layout.layout import Layout

_MOST_BITS = 2**27  # of one set of positions held at a time, 16 MiB
_MOST_STATES = 2**18  # of the search for two elements that meet


def axes_of(layout: Layout) -> list[str]:
    """Return the axes that a layout names, in the order of D, R and O."""
    return list(dict.fromkeys([*(it.axis for it in (*layout.D, *layout.R)), *layout.O]))


def bounds(layout: Layout, axis_name: str) -> tuple[Number, Number]:
    """Return the lowest and the highest position reached on an axis; both are 0 on an axis it doesn't name.

    Law: the least and the greatest ``p[axis_name]`` over the points p of all elements.

    >>> Layout.parse("S[(4, 8) : (-1@tp, 2)] + R[2 : 1] + 5").bounds("m")
    (5, 20)

    Raises
    ------
    LayoutError
        If a stride is symbolic, and neither that it is positive nor that it is negative was proved.
    """
    low = high = layout.O[axis_name]
    for it in (*layout.D, *layout.R):
        if it.axis == axis_name:
            reach = (it.extent - 1) * it.stride
            if it.stride > 0:
                high += reach
            else:
                low += reach
    return low, high


def span(layout: Layout, axis_name: str | None = None) -> Number:
    """Return the number of positions from the lowest to the highest reached on an axis; without one, in memory.

    Law: ``high - low + 1`` of `bounds`. An offset moves the positions, and changes nothing.

    >>> layout = Layout.parse("S[(4, 8) : (1@tp, 2)] + 5")
    >>> layout.span("tp"), layout.span("m"), layout.span()
    (4, 15, 15)

    Parameters
    ----------
    axis_name : str, optional
        The axis. If it is left out, the memory axis that the layout names, or linear memory if it names none.

    Raises
    ------
    LayoutError
        If no axis is given and the layout names several memory axes; or as `bounds`.

    Notes
    -----
    Source: Axe (arXiv:2601.19092), section 2.3, axis-wise span, and Lemma C.1.
    """
    if axis_name is None:
        memory = [axis for axis in axes_of(layout) if axis in MEMORY_AXES]
        if len(memory) > 1:
            raise LayoutError(f"axis_name is needed: layout {layout} has a span on each of {', '.join(memory)}")
        axis_name = memory[0] if memory else LINEAR_MEMORY
    low, high = bounds(layout, axis_name)
    return high - low + 1


def covers(layout: Layout, box: Mapping[str, int]) -> bool:
    """Return whether every point of a box holds an element.

    Law: every point with 0 <= p[a] < box[a] on the axes of `box`, and 0 on all others, is in ``apply(x)`` for some x.

    >>> Layout.parse("S[(2, 4) : (1@tp, 1)]").covers({"tp": 2, "m": 4})
    True
    >>> Layout.parse("S[(2, 4) : (1@tp, 2)]").covers({"tp": 2, "m": 4})
    False

    Parameters
    ----------
    box : Mapping[str, int]
        The number of positions on each axis, from 0 on. The axes of a mesh are a box: ``mesh.axes``.

    Raises
    ------
    LayoutError
        If the box is malformed, an iter is symbolic, or an axis is so wide that its positions can't be listed.
    """
    if not isinstance(box, Mapping):
        raise LayoutError(f'box must be a mapping from axis to size, such as {{"m": 64}}, not {box!r}')
    sizes = {**dict.fromkeys(axes_of(layout), 1), **{a: check_int(f"box[{a!r}]", n, 1) for a, n in box.items()}}
    return all(_covers_axis(layout, axis, size) for axis, size in sizes.items())


def _covers_axis(layout: Layout, axis: str, size: int) -> bool:
    iters = _known(layout, (*layout.D, *layout.R), axis, "covers")
    low, high = bounds(layout, axis)
    if low > 0 or high < size - 1:
        return False
    runs = absorb([(abs(s), e) for s, e in iters])
    if not runs or (len(runs) == 1 and runs[0][0] == 1):
        return True
    wanted = ((1 << size) - 1) << -int(low)
    return _positions(runs, layout, axis) & wanted == wanted


def equivalent(layout: Layout, other: Layout) -> bool:
    """Return whether two layouts have the same map.

    Law: ``layout.equivalent(other)`` iff both place as many elements, and ``layout.apply(x) == other.apply(x)`` for
    every x. (Equal maps have equal D in canonical form; the copies are then compared as sets.)

    >>> one, other = Layout.parse("S[(2, 4) : (4, 1)]"), Layout.parse("S[8 : 1]")
    >>> one == other, one.equivalent(other)
    (False, True)

    Raises
    ------
    LayoutError
        If D is the same and the sets of copies can't be compared: they are symbolic, or too wide to be listed.
    """
    if not isinstance(other, type(layout)):  # a swizzled layout, which can tell
        return other.equivalent(layout)
    one, two = layout.canonicalize(), other.canonicalize()
    if one == two:
        return True
    if one.D != two.D or one.size() != two.size():
        return False
    for axis in {it.axis for it in (*one.R, *two.R)} | {*one.O, *two.O}:
        ones, twos = (tuple(it for it in part.R if it.axis == axis) for part in (one, two))
        if ones == twos and one.O[axis] == two.O[axis]:
            continue
        sets = [(part.O[axis], _known(part, part.R, axis, "equivalent")) for part in (one, two)]
        reach = [(low, low + sum(s * (e - 1) for s, e in runs)) for low, runs in sets]
        if reach[0] != reach[1] or len({_positions(runs, layout, axis) for _, runs in sets}) > 1:
            return False
    return True


def is_injective(layout: Layout) -> bool:
    """Return whether no two elements share a point.

    Law: ``layout.apply(x)`` and ``layout.apply(y)`` are disjoint for all x != y. (Copies of one element may meet.)

    >>> Layout.parse("S[(4, 8) : (8, 1)]").is_injective(), Layout.parse("S[(4, 8) : (4, 1)]").is_injective()
    (True, False)

    Raises
    ------
    LayoutError
        If an iter is symbolic and it was not proved that every stride steps over all smaller ones together; or if the
        search for two elements that meet grows too large.

    Notes
    -----
    Source: Axe (arXiv:2601.19092), Lemmas A.9 and A.10: where every stride exceeds the reach of all smaller ones,
    digits are unique, and that is decided at once; other layouts are searched.
    """
    return all(_injective_on(layout, axis) for axis in {it.axis for it in layout.canonicalize().D})


def _injective_on(layout: Layout, axis: str) -> bool:
    """Return whether no two choices of D's digits on one axis reach one position, whatever the replicas add."""
    canonical = layout.canonicalize()
    steps = [(abs(it.stride), it.extent - 1, True) for it in canonical.D if it.axis == axis]
    steps += [(abs(it.stride), it.extent - 1, False) for it in canonical.R if it.axis == axis]
    if _gaps([(stride, most) for stride, most, _ in steps]):
        return True
    if any(type(stride) is not int or type(most) is not int for stride, most, _ in steps):
        raise LayoutError(
            f"is_injective: it was not proved that on axis {axis!r} every stride is greater than the reach of all "
            f"smaller ones together, in {layout}"
        )
    return not _meets(sorted((int(s), int(m), d) for s, m, d in steps), layout, axis)


def _gaps(steps: list[tuple[Number, Number]]) -> bool:
    """Return whether every stride is known to be greater than the reach of all smaller ones together."""
    reach: Number = 0
    left = list(steps)
    while left:
        for one in left:
            farther = reach + one[0] * one[1]
            if proved_less(reach, one[0]) and all(proved_less(farther, other[0]) for other in left if other is not one):
                left.remove(one)
                reach = farther
                break
        else:
            return False
    return True


def _meets(steps: list[tuple[int, int, bool]], layout: Layout, axis: str) -> bool:
    """Return whether differences of two choices of digits, not all of D's zero, sum to zero; greatest stride first.

    A partial sum that what is left can't bring back to zero, by its reach or its divisor, is dropped.
    """
    reach, divisor = [0], [0]
    for stride, most, _ in steps:
        reach.append(reach[-1] + stride * most)
        divisor.append(math.gcd(divisor[-1], stride))
    states = {(0, False)}
    for level in range(len(steps) - 1, -1, -1):
        stride, most, in_shard = steps[level]
        room, left = reach[level], divisor[level]
        after = set()
        for total, moved in states:
            # |total + d * stride| <= room
            first = max(-most, -((room + total) // stride))
            last = min(most, (room - total) // stride)
            for d in range(first, last + 1):
                value = total + d * stride
                if value % left == 0 if left else value == 0:
                    after.add((value, moved or (in_shard and d != 0)))
            if len(after) > _MOST_STATES:
                raise LayoutError(f"is_injective: axis {axis!r} of {layout} leads to more than {_MOST_STATES} cases")
        states = after
    return (0, True) in states


def positions(layout: Layout, axis: str) -> list[int]:
    """Return the positions that the elements of a layout reach on one axis, ascending."""
    low = bounds(layout, axis)[0]
    runs = [(abs(s), e) for s, e in _known(layout, (*layout.D, *layout.R), axis, "positions")]
    return [int(low) + k for k, bit in enumerate(reversed(f"{_positions(runs, layout, axis):b}")) if bit == "1"]


def _known(layout: Layout, iters: Sequence[Iter], axis: str, what: str) -> list[tuple[int, int]]:
    """Return (stride, extent) of the iters on one axis, or raise LayoutError if one is symbolic."""
    runs = []
    for it in iters:
        if it.axis == axis and it.extent != 1:
            if not isinstance(it.extent, int) or not isinstance(it.stride, int):
                raise LayoutError(f"{what}: nothing was proved about the positions of {it}, in {layout}")
            runs.append((it.stride, it.extent))
    return runs


def _positions(runs: list[tuple[int, int]], layout: Layout, axis: str) -> int:
    """Return the positions that runs of positive strides reach from 0 on, as the bits of an int."""
    reach = sum(s * (e - 1) for s, e in runs)
    if reach >= _MOST_BITS:
        raise LayoutError(f"axis {axis!r} of {layout} reaches over {reach} positions; up to {_MOST_BITS} can be listed")
    bits = 1
    for stride, extent in runs:
        done = 1
        while done < extent:
            more = min(done, extent - done)
            bits |= bits << (stride * more)
            done += more
    return bits
