"""A node of an ONNX model, as what converts it sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_axe.errors import InputError

__all__ = ["Call", "dtype_of", "rank_of"]


class Call:
    """A node that is converted.

    Attributes
    ----------
    name, operator : str
        The node's own name, and its operator's.
    results : int
        How many results are asked for.
    emit : callable
        Binds a value that is read more than once.
    upstream : callable
        What upstream's importer makes of an operator: of its name, the inputs, and the attributes by their names.
    stored : callable
        The array of a constant or of a weight, or None.
    sizes : callable
        A shape of a tensor of int64, whose elements become known when the model runs.
    body : callable
        What a graph that is an attribute makes of values, which its inputs are bound to.
    """

    def __init__(
        self,
        name: str,
        operator: str,
        results: int,
        emit: Callable[[Any], Any],
        upstream: Callable[..., Any],
        stored: Callable[[Any], Any],
        sizes: Callable[[Any], Any],
        body: Callable[[Any, Sequence[Any]], list[Any]],
    ) -> None:
        self.name, self.operator, self.results = name, operator, results
        self.emit, self.upstream, self._stored = emit, upstream, stored
        self.sizes, self.body = sizes, body

    def constant(self, value: Any, what: str) -> Any:
        """The array that an input is; an `InputError` if that isn't known."""
        found = self._stored(value)
        if found is None:
            raise self.refused(f"its {what} isn't a constant", f"give the {what} as an initializer")
        return found

    def known(self, value: Any) -> Any:
        """The array that an input is, or None."""
        return self._stored(value)

    def refused(self, what: str, remedy: str) -> InputError:
        return InputError(f"{self.name}: {self.operator} isn't imported: {what}; {remedy}")


def dtype_of(value: Any) -> str:
    """The type of a tensor's elements."""
    return str(value.ty.dtype)


def rank_of(value: Any) -> int:
    """How many dimensions a tensor has."""
    return len(value.ty.shape)
