"""Handles: what a function of a session has returned, where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tvm_axe.errors import LowerError
from tvm_axe.executable.objects import Kept

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
        """The runtime's own object, on one device; on a mesh each device has one, which `call` reaches."""
        self._session._check_open()
        if isinstance(self._value, Kept):
            raise LowerError(
                f"{self!r} is an object on each device, and none here; call functions of the runtime with it by "
                "handle.call(name, ...)"
            )
        return self._value

    def call(self, function: str, *arguments: Any) -> int | float | None:
        """Call a function of the runtime with an object that is no array, on a mesh on every device with its own. ::

            cache = model.create_paged_kv_cache((2,), (1024,), (256,), (16,), (0,))
            cache.call("vm.builtin.kv_state_add_sequence", 0)
            cache.call("vm.builtin.kv_state_begin_forward", (0,), (len(prompt),))
            logits, cache = model.prefill(ids, cache)
            cache.call("vm.builtin.kv_state_end_forward")

        Parameters
        ----------
        function : str
            Its name among the runtime's global functions.
        *arguments
            What it takes behind the object: numbers, text, None, sequences of integers, which are shapes there, and
            handles of other objects.

        Returns
        -------
        result : int, float or None
            What it returned; on a mesh, on the first device.

        Raises
        ------
        LowerError
            If the handle or an argument is none of these, the session is closed, or on one device there is no such
            function, or it fails or returns something else.
        WorkerError
            If it does on a mesh.
        """
        given = []
        for each in (self, *arguments):
            if isinstance(each, Handle):
                if each.shape is not None or each._session is not self._session:
                    raise LowerError(f"{function}: {each!r} is no object of this session; arrays go to its functions")
                given.append(each._value)
            elif isinstance(each, list | tuple) and all(isinstance(n, int | np.integer) for n in each):
                given.append(tuple(map(int, each)))
            elif isinstance(each, int | float | str | np.integer | None):
                given.append(int(each) if isinstance(each, np.integer) else each)
            else:
                raise LowerError(
                    f"{function}: an argument is a number, text, None, integers or a handle of an object; got "
                    f"{type(each).__name__}"
                )
        value, *rest = given
        return self._session._apply(function, value, rest)

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
        if isinstance(self._value, Kept):
            what = "an object on each device"
        elif self.shape is None:
            what = type(self._value).__name__
        else:
            what = f"{self.dtype}[{', '.join(map(str, self.shape))}]"
        return f"<{what} in a session of {self._session.name}>"
