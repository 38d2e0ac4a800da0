"""Which of several schedules is the fastest beyond noise: asked by every finals, and answered here alone.

The least of many times is a lucky one as often as a good one. So schedules have a right of way, a later one has to be
faster *beyond noise* than the one that would be taken without it, and the evidence is several times of each. Of the
times of two, t of the one and u of the other, t is faster beyond noise if

    1. median(t / u) < 1 - gain, and three quarters of what was seen agrees;  or
    2. median(t / u) < 1 / (1 + plain): so much is never given away, however the times scatter.

Where both were timed in the same turns, t / u are the ratios turn by turn, and what agrees is the turns in which t is
less. Else it is the ratio of the medians, and three quarters agree if the upper quartile of t is below the lower one of
u: the middle halves of the times don't overlap. What is asked of both is set by what is tuned, and by nothing else:

- `KERNELS`: candidates of a kernel run in one process in the same turns, the default first. Of two that are the same a
  later one wins in less than one case of ten, whatever the noise, and one that is slower hardly ever; what is given up
  is a gain below 1%.
- `PROGRAMS`: schedules of a program have times of several jobs, so they aren't compared turn by turn; the simplest has
  the right of way, and at most a twentieth is given up for it.

>>> default, lucky, faster = [10.0, 10.2, 10.1, 10.0], [9.9, 10.3, 10.0, 10.1], [8.8, 9.0, 8.9, 9.9]
>>> winner([default, lucky], KERNELS)
0
>>> winner([default, lucky, faster], KERNELS)
2
>>> winner([[1.02, 0.99, 1.03], [1.00, 0.98, 1.01]], PROGRAMS), winner([[1.06, 0.5, 1.5], [1.00, 0.5, 1.5]], PROGRAMS)
(0, 1)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BETTER", "KERNELS", "PROGRAMS", "Policy", "is_faster", "middle_half", "winner"]

BETTER = 1 - 0.01
"""Of the best so far, or less, counts as faster: what is nearer is noise."""


@dataclass(frozen=True)
class Policy:
    """What is asked of times before one schedule counts as faster than another; the module says how.

    Attributes
    ----------
    same_turns
        Whether the n-th times of two schedules were taken in the same turn.
    gain
        Share of its time that a schedule must save at least.
    plain
        Share of its time that a schedule may cost more than another at most.
    """

    same_turns: bool
    gain: float
    plain: float


KERNELS = Policy(same_turns=True, gain=0.01, plain=math.inf)
PROGRAMS = Policy(same_turns=False, gain=0.0, plain=0.05)


def winner(times: Sequence[Sequence[float]], policy: Policy) -> int:
    """Which of several is to be taken; the earlier ones have the right of way.

    Parameters
    ----------
    times
        Seconds of each; by a policy of the same turns, as many of each.
    policy
        What makes a later one faster.
    """
    best = 0
    for n in range(1, len(times)):
        if is_faster(times[n], times[best], policy):
            best = n
    return best


def is_faster(ours: Sequence[float], theirs: Sequence[float], policy: Policy) -> bool:
    """Whether the one is faster than the other beyond noise."""
    if policy.same_turns:
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        ratio, agreed = statistics.median(ratios), middle_half(ratios)[1] < 1
    else:
        ratio = statistics.median(ours) / statistics.median(theirs)
        agreed = middle_half(ours)[1] < middle_half(theirs)[0]
    return (agreed and ratio < 1 - policy.gain) or ratio < 1 / (1 + policy.plain)


def middle_half(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper quartile, each one of the values: a quarter of them, at most, is beyond it."""
    ordered = sorted(values)
    place = 3 * len(ordered) // 4
    return ordered[-1 - place], ordered[place]
