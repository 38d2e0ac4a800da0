"""The choice that moves the fewest bytes of those that take about the least time, with weights that fit.

Times are estimates, bytes aren't: of two choices that take about equally long the one that moves less is better. A
search finds the choice that costs the least where bytes and weights have prices, so that the prices are what is to be
found. Those by which weights fit in the least time come first, by bisection, then two at which bytes are dearer.

Where that moves no more than the closed form, it is enough. Where it does, the prices are worked out. Each choice that
is known says that no prices leave more bytes to be moved than it would; the prices by which all of them together leave
the most are searched at next: Kelley's cutting planes ("The cutting-plane method for solving convex programs", 1960),
which are column generation seen from the other side. Where a search finds nothing cheaper there are no better prices.
Of what is found then, a tenth of the bytes is worth 1% of the time.

>>> known = [Point(100.0, 50.0, 10.0), Point(110.0, 10.0, 10.0)]
>>> toll, _, bound = prices(known, longest=105.0, most=math.inf, dearest=1.0)
>>> print(f"{toll:.2f} s a byte: {bound:.0f} bytes, by half of the calls in either way")
0.25 s a byte: 30 bytes, by half of the calls in either way

That bound is met only where layers are mixed: the first calls may be made as in one choice, the others as in another.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from tvm_axe.layout import Link
from tvm_axe.relax.chosen import Choice, Chosen

__all__ = ["Call", "Found", "Point", "Prices", "Search", "fewest_bytes", "mixes", "prices"]

NEAR = 1.03
"""How much longer than the least a call may take for fewer bytes, and how much more than the closed form is enough."""
TOLLS = 16, 128
"""What a byte that is moved is taken to cost beyond its time, in multiples of it."""
DEAREST, SEARCHES = 128, 4
"""What it costs at most where that is worked out, and how often is searched then."""
WORTH = 0.1
"""The exponent of bytes in what a choice costs, beside its time: a tenth of the bytes is worth about 1% of the time."""
ALIKE = 1.1
"""How many times as much is moved rather than equal layers held in two ways, which are compiled and tuned twice."""


class Point(NamedTuple):
    """What a choice takes: seconds of a call, bytes that are moved, and bytes of weights on a device."""

    seconds: float
    bytes: float
    weights: float


class Prices(NamedTuple):
    """Seconds for a byte that is moved, beyond its time, and for one of weights; the fewest bytes that there may be."""

    toll: float
    price: float
    bound: float


class Call(NamedTuple):
    """How a call of a function is made, how what is needed later is held behind it, and what it takes."""

    choice: Choice
    held: object
    point: Point


@dataclass(frozen=True)
class Found:
    """A choice for a function, call by call, and what it takes."""

    chosen: Chosen
    calls: Sequence[Call]
    point: Point


class Search(Protocol):
    """What finds choices for a function."""

    link: Link

    def solved(self, price: float, toll: float) -> Found:
        """Find the cheapest where a byte of weights and one that is moved have prices, in seconds."""

    def found(self, calls: Sequence[Call]) -> Found:
        """Make a choice of calls."""

    def keep_shared(self, found: Found) -> None:
        """Have products that a choice has devices share be shared from here on."""


def fewest_bytes(search: Search, total: float, limit: float, met: float) -> Chosen:
    """Return the choice that moves the fewest bytes of those that take about the least time and fit.

    What the fastest has devices share stays shared: that every device computes all of a product moves nothing.

    Parameters
    ----------
    search : Search
        For the function.
    total : float
        Bytes of its weights.
    limit : float
        Bytes of weights that a device may hold; the least that is found if it can't be met.
    met : float
        Bytes of the closed form. Where that many are moved or fewer, no more time is spent on them.
    """
    most = math.inf if total <= limit else limit
    found, price = ([search.solved(0.0, 0.0)], 0.0) if most == math.inf else _fitting(search, most)
    most = max(most, min(each.point.weights for each in found))  # the least that there is, if no more is shared
    for toll in TOLLS:
        found.append(search.solved(price, toll / search.link.bandwidth))
        while found[-1].point.weights > most and price < 1:
            price *= 10  # where bytes are dear weights are held to move less
            found.append(search.solved(price, toll / search.link.bandwidth))
        fastest = _fastest(found, most)
        if found[-1].point.seconds > NEAR * fastest.point.seconds:
            break  # where bytes are dearer still a call takes no less
    best = min(_near(found, most), key=lambda each: (each.point.bytes, each.point.seconds))
    if best.point.bytes <= NEAR * met:
        return best.chosen
    return _worked_out(search, found, best, most).chosen


def _cost(point: Point) -> float:
    """What a choice costs where bytes are bought with time: the logarithms of both count, by their worth."""
    return point.seconds * point.bytes**WORTH


def _near(found: Sequence[Found], most: float) -> list[Found]:
    """What fits, takes about the least time and shares as much as the fastest."""
    fastest = _fastest(found, most)
    longest, divided = NEAR * fastest.point.seconds, fastest.chosen.divided
    return [
        each
        for each in found
        if each.point.weights <= most and each.point.seconds <= longest and each.chosen.divided >= divided
    ]


def _fastest(found: Sequence[Found], most: float) -> Found:
    return min((each for each in found if each.point.weights <= most), key=lambda each: each.point.seconds)


def _worked_out(search: Search, known: Sequence[Found], best: Found, most: float) -> Found:
    """What costs the least of what moves no more than the best that is known: of all that is found at prices that are
    worked out, and of two of it together.
    """
    fastest = _fastest(known, most)
    search.keep_shared(fastest)
    found = [each for each in known if each.chosen.divided >= fastest.chosen.divided]
    longest, dearest = NEAR * fastest.point.seconds, DEAREST / search.link.bandwidth
    for _ in range(SEARCHES):
        toll, price, bound = prices([each.point for each in found], longest, most, dearest)
        found.append(search.solved(price, toll))
        seconds, moved, weights = found[-1].point
        over = price * (weights - most) if price else 0.0
        if moved + (seconds - longest + over) / toll >= bound * (1 - 1e-3):
            break
        if weights <= most:
            longest = min(longest, NEAR * seconds)
    less = [each for each in _near(found, most) if each.point.bytes < best.point.bytes]
    alike = min([best, *less], key=lambda each: _cost(each.point))
    mixed = [
        (_cost(point), one, other, at)
        for point, one, other, at in mixes([each.calls for each in found])
        if point.seconds <= longest and point.weights <= most and ALIKE * point.bytes < alike.point.bytes
    ]
    for cost, one, other, at in sorted(mixed):
        if cost >= _cost(alike.point):
            break
        made = search.found([*found[one].calls[:at], *found[other].calls[at:]])
        # What two calls hold in two ways counts twice.
        if made.point.weights <= most and made.chosen.divided >= fastest.chosen.divided:
            return made
    return alike


def _fitting(search: Search, limit: float) -> tuple[list[Found], float]:
    """What is chosen at prices about the least by which weights fit a limit; and that price."""
    low, high = 1e-12, 1e-10
    found = [search.solved(high, 0.0)]
    while found[-1].point.weights > limit and high < 1:
        low, high = high, high * 100
        found.append(search.solved(high, 0.0))
        if found[-1].point.weights >= found[-2].point.weights:
            break  # no more is shared however dear it is
    while high / low > 4 and found[-1].point.weights <= limit:
        middle = math.sqrt(low * high)
        trial = search.solved(middle, 0.0)
        if trial.point.weights <= limit:
            high = middle
            found.append(trial)
        else:
            low = middle
    return found, high


def prices(points: Sequence[Point], longest: float, most: float, dearest: float) -> Prices:
    """Return the prices at which what is known leaves the most bytes to be moved within the limits.

    That is the linear program of the convex combination of points that moves the fewest bytes, in its dual form: of
    multipliers l of seconds and m of weights the largest v with v <= b + l (s - longest) + m (w - most) for all points.

    Parameters
    ----------
    points : Sequence[Point]
        Of which one at least is within the limits, and one moves something.
    longest : float
        Seconds that a call may take.
    most : float
        Bytes of weights that a device may hold; math.inf if any.
    dearest : float
        Seconds that a byte that is moved costs at most, beyond its time.
    """
    unit = max(point.bytes for point in points)
    # In units of `unit`, `longest` and `most`, so that all numbers are about 1.
    rows = [[1.0, 1.0 - s / longest, 0.0 if math.isinf(most) else 1.0 - w / most] for s, _, w in points]
    rows += [[0.0, -1.0, 0.0], [0.0, 0.0, -1.0]]
    sides = [*(point.bytes / unit for point in points), -longest / unit / dearest, 0.0]
    of, side = np.array(rows), np.array(sides)
    size = np.abs(of).max(axis=1)
    of, side = of / size[:, None], side / size
    corners = np.array(list(itertools.combinations(range(len(of)), 3)))
    corners = corners[np.abs(np.linalg.det(of[corners])) > 1e-12]
    found = np.linalg.solve(of[corners], side[corners][..., None])[..., 0]
    found = found[(found @ of.T <= side + 1e-9).all(axis=1)]
    bound, by_seconds, by_weights = found[np.argmax(found[:, 0])]
    toll = longest / unit / by_seconds
    price = 0.0 if math.isinf(most) else max(0.0, by_weights) * unit / most * toll
    return Prices(float(toll), float(price), float(bound * unit))


def mixes(found: Sequence[Sequence[Call]]) -> Iterator[tuple[Point, int, int, int]]:
    """Yield the choices of which the first calls are made as in one and the others as in another.

    From one to another is gone where both hold alike what is needed later.

    Parameters
    ----------
    found : Sequence of Sequence[Call]
        Choices for the same function.

    Yields
    ------
    Point
        What the choice takes.
    int, int, int
        The choices that it is made of, by number, and the first call that is made as in the second.
    """
    taken = [np.cumsum([call.point for call in calls], axis=0) for calls in found]
    for one, other in itertools.permutations(range(len(found)), 2):
        for at, (before, after) in enumerate(zip(found[one][:-1], found[other])):
            if before.held == after.held:
                point = taken[one][at] + taken[other][-1] - taken[other][at]
                yield Point(*map(float, point)), one, other, at + 1
