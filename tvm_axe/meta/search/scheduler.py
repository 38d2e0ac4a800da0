"""Which task gets the next trials: the one from which the whole gains most.

The whole is what a call of each function takes, by weight. Its expected gain from one more trial of task i is, as in
Ansor (Zheng et al., OSDI 2020, section 6) and MetaSchedule's ``GradientBased``, a mixture of what the last trials have
gained and of what is left if a task improves for ever in proportion to its trials, that is to best/n after n of them::

    w_i * (alpha * (best[n - window] - best[n]) / window + (1 - alpha) * best[n] / n)
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from tvm_axe.meta.search.policy import BETTER
from tvm_axe.records.database import FAILED_SECONDS

__all__ = ["expected_gain", "stalled"]

_ALPHA = 0.2  # as in MetaSchedule
_WINDOW = 48  # trials: three of its rounds of 16


def expected_gain(weight: float, before: float | None, seconds: Sequence[float]) -> float:
    """What one more trial is expected to take off the weighted total, in seconds.

    Parameters
    ----------
    weight
        How often the function is called.
    before
        Seconds of the untuned function, which is what is used while no candidate is faster; None if it has none.
    seconds
        Each candidate's, in the order of measuring; `FAILED_SECONDS` where it failed.
    """
    best = list(accumulate(seconds, min, initial=FAILED_SECONDS if before is None else before))
    trials = len(seconds)
    if trials == 0:
        return float("inf")
    if best[-1] >= FAILED_SECONDS:  # nothing of it runs: try for a while, then leave the trials to the others
        return float("inf") if trials < _WINDOW else 0.0
    rest = best[-1] / trials
    recent = (best[-1 - _WINDOW] - best[-1]) / _WINDOW if trials >= _WINDOW else rest
    return weight * (_ALPHA * recent + (1 - _ALPHA) * rest)


def stalled(seconds: Sequence[float], patience: int) -> bool:
    """Whether the last `patience` candidates have not made the best of them faster by at least 1%."""
    if len(seconds) <= patience:
        return False
    earlier = min(seconds[:-patience])
    return min(seconds[-patience:]) > BETTER * earlier
