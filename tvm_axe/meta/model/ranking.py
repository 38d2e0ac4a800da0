"""How well scores order candidates: rank correlations, and what trusting the first few of them gives."""

from __future__ import annotations

import numpy as np

__all__ = ["METRICS", "grade", "kendall", "ranks", "recall", "spearman", "yielded"]


def ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each value, from 0; equal values share the mean of theirs.

    >>> ranks(np.array([3.0, 1.0, 3.0]))
    array([1.5, 0. , 1.5])
    """
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts + 1) / 2)[group]


def spearman(scores: np.ndarray, seconds: np.ndarray) -> float:
    """Spearman's rho: how far higher scores mean shorter times, from -1 to 1; 0 where either is the same throughout."""
    a, b = ranks(scores), ranks(-seconds)
    a, b = a - a.mean(), b - b.mean()
    scale = np.sqrt((a @ a) * (b @ b))
    return float(a @ b / scale) if scale > 0 else 0.0


def kendall(scores: np.ndarray, seconds: np.ndarray) -> float:
    """Kendall's tau-b: pairs in the right order less pairs in the wrong one, from -1 to 1; 0 as for `spearman`."""
    a = np.sign(scores[:, None] - scores)
    slower = seconds[:, None] > seconds
    b = slower.T.astype(float) - slower  # no difference of times: those of two failures are infinite
    scale = np.sqrt((a * a).sum() * (b * b).sum())
    return float((a * b).sum() / scale) if scale > 0 else 0.0


def recall(scores: np.ndarray, seconds: np.ndarray, count: int) -> float:
    """The share of the `count` fastest that are among the `count` with the highest scores (recall@k of Ansor)."""
    first, fastest = np.argsort(-scores, kind="stable")[:count], np.argsort(seconds, kind="stable")[:count]
    return len({*first.tolist()} & {*fastest.tolist()}) / len(fastest)


def yielded(scores: np.ndarray, seconds: np.ndarray, count: int) -> float:
    """The best time over the best of the `count` candidates with the highest scores; 0 if all of those failed."""
    first = np.argsort(-scores, kind="stable")[:count]
    return float(seconds.min() / seconds[first].min())


METRICS = ("spearman", "kendall", "recall_1", "recall_5", "best_1", "best_5")


def grade(scores: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """All of `METRICS`, for candidates of which at least one didn't fail; those that did have infinite seconds."""
    return np.array(
        [
            spearman(scores, seconds),
            kendall(scores, seconds),
            *(recall(scores, seconds, count) for count in (1, 5)),
            *(yielded(scores, seconds, count) for count in (1, 5)),
        ]
    )
