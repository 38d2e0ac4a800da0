"""A model whose weights and state stay on the devices: its functions called by name, with arrays or with handles.

What a session knows of names, shapes and errors is here. Where values live is another's business: a `Memory` keeps
them, that of one device in `tvm_axe.executable.placed`, that of a mesh in `tvm_axe.executable.mesh_memory`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tvm_ffi

from tvm_axe.collective import Timeline
from tvm_axe.errors import InputError, LowerError
from tvm_axe.executable.handles import Handle
from tvm_axe.executable.signatures import Signature
from tvm_axe.executable.taken import Taken, filled
from tvm_axe.executable.weights import Weight

__all__ = ["Handle", "Memory", "Session", "SessionFunction"]


class Memory(Protocol):
    """Where the values of a session live, and what calls functions there.

    A value is whatever the memory makes of an array; it has its ``shape`` and ``dtype``. What a function returns that
    is no array, such as a paged cache, is a value without them, and only passed on.

    Attributes
    ----------
    copied : int
        Bytes of arrays that were copied to the devices so far.
    held : tuple of int
        Bytes of weights that each device holds.
    lock : threading.RLock
        Who has it may use the devices.
    """

    copied: int
    held: tuple[int, ...]
    lock: threading.RLock

    def place(self, weights: Mapping[str, Weight]) -> None:
        """Keep the weights for all calls; once, before the first."""

    def put(self, array: np.ndarray, function: str, param: str) -> Any:
        """The value of an array for a parameter of a function, or for what such a tuple has, copied."""

    def call(self, function: str, arguments: Sequence[Any]) -> Any:
        """What a function returns for its inputs, in tuples where it returns such; weights are added here."""

    def time(self, function: str, arguments: Sequence[Any], repeat: int, warmup: int) -> list[float]:
        """Seconds of each of `repeat` calls."""

    def trace(self, function: str, arguments: Sequence[Any], warmup: int) -> Timeline:
        """What each device does when in a call behind others; an error on one device."""

    def apply(self, function: str, value: Any, arguments: Sequence[Any]) -> int | float | None:
        """What a function of the runtime returns for an object, on every device for its own."""

    def fetch(self, value: Any) -> np.ndarray:
        """A copy of a value."""

    def export(self, value: Any) -> Any:
        """What speaks DLPack for a value, over the same memory where there is one."""

    def close(self) -> None:
        """Let go of everything."""


class SessionFunction:
    """A function of a session's model: called with its inputs, by position or by name; weights are there already."""

    def __init__(self, session: Session, signature: Signature, weights: frozenset[str]) -> None:
        self._session, self.signature = session, signature
        self._inputs = tuple(param for param in signature.params if param.name not in weights)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of what it takes, in order."""
        return tuple(param.name for param in self._inputs)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function once.

        Parameters
        ----------
        *arguments
            Its inputs in order: arrays, of numpy or of what speaks DLPack, which are copied to the devices once;
            handles; tuples of integers for shapes; numbers; and sequences of all these for tuples.
        **named
            The inputs that are given by name.

        Returns
        -------
        results : Handle or tuple
            What it returned, which stays on the devices; tuples where it returned such.

        Raises
        ------
        InputError
            If the number, a name, a shape or a type is wrong, or extents don't fit each other: all of it is listed.
        LowerError
            If the runtime refuses the call, as the model checks more while it runs; or if the session is closed.
        """
        return self._session._call(self.signature.name, self._taken(arguments, named))

    def time(self, *arguments: Any, repeat: int = 20, warmup: int = 3, **named: Any) -> list[float]:
        """Seconds of each of `repeat` calls with these inputs, which are in place before, on the device's own clock.

        Raises
        ------
        InputError
            As a call; and if `repeat` or `warmup` is too small.
        LowerError
            As a call.
        """
        return self._session._time(self.signature.name, self._taken(arguments, named), repeat, warmup)

    def trace(self, *arguments: Any, warmup: int = 3, **named: Any) -> Timeline:
        """What each device does when in a call with these inputs, behind `warmup` others.

        Raises
        ------
        InputError
            As a call.
        LowerError
            As a call; and on one device, where there is nothing to see but one call.
        """
        return self._session._trace(self.signature.name, self._taken(arguments, named), warmup)

    def __repr__(self) -> str:
        return f"<{self.signature.name}({', '.join(map(str, self._inputs))}) in a session of {self._session.name}>"

    def _taken(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """The values of the inputs in order, with arrays that are still to be copied."""
        self._session._check_open()
        own = self.inputs
        rest = own[len(arguments) :]
        problems = [
            f"{key!r} {'is given twice' if key in own else 'is none of its inputs'}" for key in named if key not in rest
        ]
        problems += [f"{name!r} is missing" for name in rest if name not in named]
        if len(arguments) > len(own):
            problems.append(f"got {len(arguments)} inputs")
        given = [*arguments, *(named.get(name) for name in rest)]
        taken = Taken(self._session)
        if not problems:
            found = [taken.of(param, value) for param, value in zip(self._inputs, given)]
            problems = taken.problems
        if problems:
            takes = f"{self.signature.name} takes {', '.join(map(str, self._inputs)) or 'nothing'}"
            raise InputError("\n".join([f"{takes}; that is wrong:", *(f"  {problem}" for problem in problems)]))
        return found

    def put(self, values: Sequence[Any]) -> list[Any]:
        """The values with all arrays copied."""
        memory, function = self._session._memory, self.signature.name
        return [
            filled(value, lambda array, to=param.name: memory.put(array, function, to))  # type: ignore[misc]
            for param, value in zip(self._inputs, values)
        ]


class Session:
    """A model with its weights in place, as ``exe.load(params)`` gives it. ::

        with exe.load("model.safetensors") as model:
            logits, *caches = model.prefill(ids)
            logits, *caches = model["decode"](np.asarray(logits).argmax(-1), *caches)

    Functions are called by name, as attributes or as items. Weights are in place before the first call and never
    copied again; inputs are copied once; results stay on the devices, as `Handle`. Calls of several threads follow each
    other. A call that fails loses nothing: weights and handles are as they were, and the next call runs.

    Attributes
    ----------
    name : str
        The model's name.
    functions : tuple[str, ...]
        The names of its functions.
    """

    def __init__(
        self,
        name: str,
        functions: Sequence[Signature],
        weights: Mapping[str, Weight],
        memory: Memory,
        keeps: object = None,
    ) -> None:
        self.name = name
        self.functions = tuple(each.name for each in functions)
        self._memory, self._closed, self._keeps = memory, False, keeps
        self._weights = {key: _bytes(value) for key, value in weights.items()}
        own = frozenset(weights)
        self._functions = {each.name: SessionFunction(self, each, own) for each in functions}
        memory.place(weights)

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of the weights that are in place, each once however many functions take it."""
        return tuple(self._weights)

    @property
    def copied(self) -> int:
        """Bytes that were copied to the devices so far: weights once, and the arrays that calls were given."""
        return self._memory.copied

    @property
    def held(self) -> tuple[int, ...]:
        """Bytes of weights that each device holds."""
        return self._memory.held

    def __getitem__(self, function: str) -> SessionFunction:
        if function not in self._functions:
            raise LowerError(f"{self.name} has no function {function!r}; it has {', '.join(self.functions)}")
        return self._functions[function]

    def __getattr__(self, name: str) -> SessionFunction:
        functions = self.__dict__.get("_functions", {})
        if name in functions:
            return functions[name]
        raise AttributeError(
            f"a session of {self.__dict__.get('name')} has no {name!r}; its functions are {', '.join(functions)}"
        )

    def __dir__(self) -> Iterator[str]:
        return iter(sorted({*super().__dir__(), *self._functions}))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the weights; handles can't be used any more, and no function called."""
        with self._memory.lock:
            if not self._closed:
                self._closed = True
                self._memory.close()

    def show(self) -> str:
        """The functions with what they take, and the bytes of the weights in place."""
        lines = [f"session of {self.name}", "", "functions"]
        for each in self._functions.values():
            inputs = ", ".join(str(param) for param in each._inputs)
            lines.append(f"  {each.signature.name}({inputs}) -> {', '.join(each.signature.outputs)}")
        held = "" if len(self.held) == 1 else f"; a device holds {max(self.held)}"
        lines += ["", f"weights: {sum(self._weights.values())} bytes{held}"]
        return "\n".join([*lines, *(f"  {name}: {size} bytes" for name, size in self._weights.items())])

    def __repr__(self) -> str:
        state = "a closed session" if self._closed else "a session"
        return f"<{state} of {self.name}: {', '.join(self.functions)}; {len(self._weights)} weights>"

    def _call(self, function: str, values: Sequence[Any]) -> Any:
        with self._memory.lock:
            self._check_open()
            return self._handles(self._memory.call(function, self._functions[function].put(values)))

    def _time(self, function: str, values: Sequence[Any], repeat: int, warmup: int) -> list[float]:
        if repeat < 1 or warmup < 0:
            raise InputError(f"time: repeat must be at least 1 and warmup at least 0, not {repeat} and {warmup}")
        with self._memory.lock:
            self._check_open()
            return self._memory.time(function, self._functions[function].put(values), repeat, warmup)

    def _trace(self, function: str, values: Sequence[Any], warmup: int) -> Timeline:
        with self._memory.lock:
            self._check_open()
            return self._memory.trace(function, self._functions[function].put(values), warmup)

    def _apply(self, function: str, value: Any, arguments: Sequence[Any]) -> int | float | None:
        with self._memory.lock:
            self._check_open()
            return self._memory.apply(function, value, arguments)

    def _handles(self, result: Any) -> Any:
        if type(result) is tuple:
            return tuple([self._handles(each) for each in result])
        return (
            result if result is None or isinstance(result, int | float | str | tvm_ffi.Shape) else Handle(self, result)
        )

    def _check_open(self) -> None:
        if self._closed:
            raise LowerError(f"the session of {self.name} is closed; load the model again")


def _bytes(weight: Weight) -> int:
    return sum(each.nbytes for each in weight) if isinstance(weight, tuple) else weight.nbytes
