"""What a function of a session is called with: checked all at once, and copied when all of it is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm_ffi

from tvm_axe.executable.arguments import Sizes, array_of, misfit
from tvm_axe.executable.handles import Handle
from tvm_axe.executable.signatures import ARRAY, NUMBER, SHAPE, TUPLE, Param

if TYPE_CHECKING:
    from tvm_axe.executable.session import Session

__all__ = ["Taken", "filled"]


@dataclass(frozen=True, eq=False)
class Copy:
    """An array that is still to be copied: nothing is of a call that is refused."""

    array: np.ndarray


def filled(value: Any, put: Callable[[np.ndarray], Any]) -> Any:
    """A value, or a tuple of such, with what `put` makes of each array that is to be copied."""
    if type(value) is tuple:
        return tuple([filled(each, put) if type(each) in (tuple, Copy) else each for each in value])
    return put(value.array) if isinstance(value, Copy) else value


class Taken:
    """The inputs of one call, as they are checked."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sizes = Sizes()
        self._problems: list[str] = []

    @property
    def problems(self) -> list[str]:
        """All that is wrong with those so far."""
        return self._problems + self._sizes.wrong()

    def of(self, param: Param, value: Any) -> Any:
        """The value for a parameter; None, and a problem more, if it doesn't fit."""
        if isinstance(value, Handle):
            return self._handle(param, value)
        if param.kind == ARRAY:
            array, _, why = array_of(param, value)
            if array is None:
                return self._wrong(param, why)
            self._sizes.add(param, array.shape)
            return Copy(array)
        if param.kind == TUPLE:
            if not isinstance(value, Sequence) or len(value) != len(param.fields):
                return self._wrong(param, f"is a sequence of {len(param.fields)}; got {_size(value)}")
            return tuple([self.of(field, each) for field, each in zip(param.fields, value)])
        if param.kind == SHAPE:
            if not isinstance(value, Sequence) or not all(isinstance(e, int | np.integer) for e in value):
                return self._wrong(param, f"is a tuple of integers; got {_size(value)}")
            why = misfit(param, tuple(value), "")
            if why:
                return self._wrong(param, why.replace("got an array of", "got"))
            self._sizes.add(param, tuple(value))
            return tvm_ffi.Shape([int(e) for e in value])
        if param.kind == NUMBER:
            number = value.item() if isinstance(value, np.generic) else value
            if not isinstance(number, int | float):
                return self._wrong(param, f"is a number; got {type(value).__name__}")
            if isinstance(number, int):
                self._sizes.add_number(param, number)
            return number
        return value

    def _handle(self, param: Param, handle: Handle) -> Any:
        if handle._session is not self._session:
            return self._wrong(param, f"is {handle!r}, another; np.asarray(...) of it can be given")
        if param.kind == ARRAY:
            shape, dtype = handle.shape, handle.dtype
            if shape is None:
                return self._wrong(param, f"is an array; got {handle!r}")
            if shape != param.shape or dtype != param.dtype:  # mostly equal, and a call may have hundreds
                why = misfit(param, shape, dtype)
                if why:
                    return self._wrong(param, why)
                self._sizes.add(param, shape)
        return handle._value

    def _wrong(self, param: Param, why: str) -> None:
        self._problems.append(f"{param.name} {why}")


def _size(value: Any) -> str:
    return f"{len(value)} values" if isinstance(value, list | tuple) else type(value).__name__
