"""Handles: what a function of a session has returned, where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tvm_axe.errors import LowerError

if TYPE_CHECKING:
    from tvm_axe.executable.session import Session

__all__ = ["Handle"]


class Handle:
    """A value that a function of a session returned, where it is: passed to a function, it isn't copied. ::

        logits, *caches = model.prefill(ids)
        logits, *caches = model.decode(next, *caches)
        np.asarray(logits)                             # a copy, in the host's memory

    It speaks DLPack. What is no array, such as a paged cache, has neither shape nor type, and is passed on as it is.
    """

    __slots__ = ("__weakref__", "_session", "_value")

    def __init__(self, session: Session, value: Any) -> None:
        self._session, self._value = session, value

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The array's extents; None if it is no array."""
        shape = getattr(self._value, "shape", None)
        return None if shape is None else tuple(shape)

    @property
    def dtype(self) -> str:
        """The type of the array's elements; empty if it is no array."""
        return str(getattr(self._value, "dtype", ""))

    @property
    def object(self) -> Any:
        """The runtime's own object, for its functions, such as those that begin a sequence in a paged cache."""
        self._session._check_open()
        return self._value

    def numpy(self) -> np.ndarray:
        """A copy of the array.

        Raises
        ------
        LowerError
            If it is no array, or its session is closed.
        """
        value, session = self._array(), self._session
        with session._memory.lock:
            return session._memory.fetch(value)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("what a function returned is copied to the host; np.from_dlpack doesn't copy on a CPU")
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def __dlpack__(self, **options: Any) -> Any:
        return self._session._memory.export(self._array()).__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._session._memory.export(self._array()).__dlpack_device__()

    def _array(self) -> Any:
        self._session._check_open()
        if self.shape is None:
            raise LowerError(f"{self!r} is no array; it is only passed on to functions of its session")
        return self._value

    def __repr__(self) -> str:
        what = type(self._value).__name__ if self.shape is None else f"{self.dtype}[{', '.join(map(str, self.shape))}]"
        return f"<{what} in a session of {self._session.name}>"
