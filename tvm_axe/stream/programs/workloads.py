"""Sizes of models, and made-up requests: which experts the tokens of a batch choose, how long the requests' caches are.

What is drawn is the same for the same seed on every machine.

>>> routing(4, QWEN3_30B_A3B.moe, seed=0).shape
(4, 8)
>>> lengths(4, seed=0).tolist()
[1078, 923, 1468, 1064]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tvm_axe.errors import StreamError

__all__ = ["MIXTRAL_8X7B", "QWEN3_30B_A3B", "Heads", "MoE", "Model", "lengths", "routing"]


@dataclass(frozen=True)
class MoE:
    """A layer of experts, each a SwiGLU: (silu(x W_gate) * (x W_up)) W_down.

    Attributes
    ----------
    experts, chosen : int
        How many experts there are, and how many of them a token goes to.
    width, hidden : int
        Columns of a token, and of what is between the matmuls of an expert.

    Raises
    ------
    StreamError
        If a token would go to no expert, or to more than there are.
    """

    experts: int
    chosen: int
    width: int
    hidden: int

    def __post_init__(self) -> None:
        if not 1 <= self.chosen <= self.experts:
            raise StreamError(f"chosen={self.chosen} must be between 1 and the number of experts, {self.experts}")


@dataclass(frozen=True)
class Heads:
    """The heads of attention with a cache of keys and values.

    Attributes
    ----------
    groups, queries : int
        How many heads of keys and values there are, and how many query heads share each.
    size : int
        Columns of a head.
    """

    groups: int
    queries: int
    size: int


@dataclass(frozen=True)
class Model:
    """The sizes of a language model that the programs need."""

    name: str
    moe: MoE
    heads: Heads


MIXTRAL_8X7B = Model("mixtral", MoE(8, 2, 4096, 14336), Heads(8, 4, 128))
QWEN3_30B_A3B = Model("qwen", MoE(128, 8, 2048, 768), Heads(4, 8, 64))
"""The sizes that the published simulations take; the model as it was released has heads of 128 columns."""


def routing(batch: int, moe: MoE, seed: int = 0) -> NDArray[np.int64]:
    """Draw the experts that each token goes to: some experts are liked much more than others, as in traces of real use.

    Parameters
    ----------
    batch : int
        The number of tokens.
    moe : MoE
        The sizes of the layer.
    seed : int
        The seed of the draw.

    Returns
    -------
    numpy.ndarray
        [batch, chosen] of int64; a token's experts differ.
    """
    _check_batch(batch)
    rng = np.random.default_rng(seed)
    liking = rng.normal(scale=1.5 if moe.experts > 16 else 0.3, size=moe.experts)
    # The largest of (log weight + Gumbel noise) is a draw by these weights; the k largest are one without replacement.
    scores = liking + rng.gumbel(size=(batch, moe.experts))
    return np.argsort(-scores, axis=1)[:, : moe.chosen].astype(np.int64)


def lengths(batch: int, seed: int = 0) -> NDArray[np.int64]:
    """Draw how many tokens the cache of each request holds: mostly about a thousand, a few times four thousand.

    Parameters
    ----------
    batch : int
        The number of requests.
    seed : int
        The seed of the draw.

    Returns
    -------
    numpy.ndarray
        [batch] of int64, from 1 on.
    """
    _check_batch(batch)
    rng = np.random.default_rng(seed)
    usual = rng.lognormal(np.log(1000), 0.6, batch)
    long = np.where(rng.random(batch) < 0.08, 4080, 0)
    return np.maximum(np.maximum(usual, long), 1).astype(np.int64)


def _check_batch(batch: int) -> None:
    if batch < 1:
        raise StreamError(f"batch must be 1 or more, not {batch}")
