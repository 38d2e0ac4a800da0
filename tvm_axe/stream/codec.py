"""Nested lists as the tokens of a stream, and back.

A token is a pair (value, stop): a value and the highest rank that ends right after it, 0 if none does. In a stream of
rank 2:

>>> tokens = encode([[1, 2], [3]], 2)
>>> tokens
[(1, 0), (2, 1), (3, 2)]
>>> text(tokens)
'1 2 S1 3 S2'
>>> decode(tokens, 2)
[[1, 2], [3]]

Only the highest stop is sent where several lists end. An empty list has no value to travel with, so it sends its stop
alone, as `EMPTY`; what then tells ``[[]]`` from ``[]`` is that an empty list's stop is never merged into the next:

>>> text(encode([[]], 2)), text(encode([], 2)), text(encode([[1], []], 2))
('S1 S2', 'S2', '1 S1 S1 S2')

An operator that learns late that a list has ended (`Partition`, of an output that gets nothing more) sends that stop
alone, late. A stop closes the lists of lower rank that something is in, and its own whether or not something is, so
such a stream decodes to the same lists: ``1 S1 S2`` as ``1 S2``.

Source: Streaming Tensor Programs (arXiv 2511.07776), section 3.1, and, for the empty lists, this package.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

from tvm_axe.errors import StreamError


class _Empty:
    """The value of a token that is a stop alone."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "EMPTY"


EMPTY: Final = _Empty()
"""The value of a token that is a stop alone."""
Token: TypeAlias = tuple[Any, int]


def encode(nested: Any, rank: int) -> list[Token]:
    """Return the tokens of lists nested `rank` deep.

    Law: ``decode(encode(x, n), n) == x``, whatever lists of x are empty.

    Raises
    ------
    StreamError
        If the lists are not that deep. Elements may be anything, lists too.
    """
    if rank == 0:
        return [(nested, 0)]
    if not isinstance(nested, (list, tuple)):
        raise StreamError(f"a stream's values must be lists nested as deep as its rank; {nested!r} is no list")
    if rank == 1:
        tokens: list[Token] = [(element, 0) for element in nested]
    else:
        tokens = [token for element in nested for token in encode(element, rank - 1)]
    if tokens and (rank == 1 or len(nested[-1])):
        tokens[-1] = (tokens[-1][0], rank)
    else:
        tokens.append((EMPTY, rank))
    return tokens


def decode(tokens: Iterable[Token], rank: int) -> list:
    """Return the nested lists that the tokens of a stream of that rank stand for.

    Raises
    ------
    StreamError
        If the tokens end before the stream does, or go on after it, or a stop is beyond its rank.
    """
    lists: list[list] = [[] for _ in range(rank)]  # lists[n] is closed by the stop n + 1
    done = False
    for value, stop in tokens:
        if done:
            raise StreamError(f"{show(value, stop)} comes after the stop S{rank}, which ends the stream")
        if stop > rank or (stop == 0 and value is EMPTY):
            raise StreamError(f"{show(value, stop)} is no token of a stream of rank {rank}")
        if value is not EMPTY:
            lists[0].append(value)
        for closed in range(1, min(stop + 1, rank)):
            if lists[closed - 1] or closed == stop:
                lists[closed].append(lists[closed - 1])
                lists[closed - 1] = []
        done = stop == rank
    if not done:
        raise StreamError(f"the stream ends without S{rank}, the stop of its rank")
    return lists[-1]


def text(tokens: Iterable[Token]) -> str:
    """Write tokens with their stops behind them."""
    return " ".join(show(value, stop) for value, stop in tokens)


def show(value: Any, stop: int) -> str:
    """Write one token."""
    return " ".join(([] if value is EMPTY else [str(value)]) + ([f"S{stop}"] if stop else []))
