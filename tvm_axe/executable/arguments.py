"""What an executable is called with: whole arrays by position or by name, of numpy or of what speaks DLPack.

An array of another package, such as PyTorch or JAX, is read where it lies, through the DLPack protocol
(https://dmlc.github.io/dlpack/latest/python_spec.html), and the outputs come back as that package's; none of these
packages is imported here.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tvm

from tvm_axe import _tvm
from tvm_axe.errors import InputError
from tvm_axe.relax.sizes import Extent

if TYPE_CHECKING:
    from tvm_axe.executable.signatures import Param

Arrays = tuple[np.ndarray, ...]

_CPU = 1  # DLDeviceType kDLCPU
_name = functools.cache(str)  # of a type: numpy makes it anew each time, which takes longer than all else of a check


Extents = tuple[int | str | Extent | None, ...]
"""The extents that something is called with: the name of a size, or what is computed of such; None may be any."""


class Input(NamedTuple):
    """An array that an executable takes."""

    name: str
    shape: Extents
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('any' if extent is None else str(extent) for extent in self.shape)}]"


def matched(name: str, inputs: Sequence[Input], arrays: Sequence[Any], named: Mapping[str, Any]) -> Arrays:
    """Return the arrays in the order of the inputs, as numpy's.

    Raises
    ------
    InputError
        If the number, a name, a shape or a dtype is wrong; the message has all that is, beside what is expected.
    """
    own = [each.name for each in inputs]
    wrong = [
        f"{key!r} {'is given twice' if key in own else 'is none of them'}"
        for key in named
        if key not in own[len(arrays) :]
    ]
    given = dict(zip(own, arrays)) | {key: value for key, value in named.items() if key in own[len(arrays) :]}
    count = len(arrays) + len(named)
    takes = f"{name} takes {len(own)} array{'s' * (len(own) != 1)} ({', '.join(own)})"
    if count != len(own):
        wrong.append(f"got {count}")
    problems = [f"{takes}; {'; '.join(wrong)}"] if wrong else []
    found: list[np.ndarray] = []
    rows: list[tuple[str, str]] = []
    sizes = Sizes()
    for each in inputs:
        array, seen, why = array_of(each, given[each.name]) if each.name in given else (None, "nothing", "")
        rows.append((f"{each.name}: {each}", seen))
        if why:
            problems.append(f"{each.name} {why}")
        elif array is not None:
            found.append(array)
            sizes.add(each, array.shape)
    problems += sizes.wrong()
    rows += [("nothing more", _described(value)) for value in arrays[len(own) :]]
    if problems:
        width = max(len(expected) for expected, _ in rows)
        table = [f"  {expected:<{width}}  got {seen}" for expected, seen in rows]
        said = "; ".join(problems)
        raise InputError("\n".join([said if wrong else f"{name}: {said}", *table]))
    return tuple(found)


class Sizes:
    """The sizes that the arrays of one call have, by name: those of one name are equal.

    An extent that is computed, such as ``2 * n`` or ``n + m``, is what it is at these. It says its size, too, if that
    is no array's own extent (`tvm_axe.relax.solving`).
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, str, str]] = {}  # the size, whose it is, and where
        self._computed: list[tuple[Extent, int, str, int]] = []
        self._differing: list[str] = []

    def add(self, param: Input | Param, shape: Sequence[int]) -> None:
        """One more array of a shape, which has the parameter's number of dimensions."""
        for n, (name, extent) in enumerate(zip(param.shape or (), shape)):
            if isinstance(name, Extent):
                self._computed.append((name, extent, param.name, n))
            elif isinstance(name, str):
                self._say(name, extent, param.name, f"{param.name}'s dimension {n}")

    def add_number(self, param: Param, number: int) -> None:
        """One more number, which may be a size by itself."""
        self._say(param.name, number, param.name, param.name)

    def _say(self, name: str, size: int, whose: str, where: str) -> None:
        first, _, there = self._found.setdefault(name, (size, whose, where))
        if first != size:
            own = where if where == name else f"{where}, {name},"
            self._differing.append(f"{own} is {size}, and {there} is {first}")

    def wrong(self) -> list[str]:
        """Return what doesn't fit of the arrays so far."""
        if not self._computed:
            return self._differing
        wrong = list(self._differing)
        sizes = {name: size for name, (size, _, _) in self._found.items()}
        by = {name: whose for name, (_, whose, _) in self._found.items()}
        for extent, got, whose, n in self._computed:
            if extent.line is not None and extent.names[0] not in sizes:
                (name,), (factor, offset) = extent.names, extent.line
                size = max((got - offset) // factor, 0)
                valid = size * factor + offset
                if valid == got:
                    sizes[name], by[name] = size, whose
                else:
                    such = f"such are {valid} and {valid + factor}"
                    wrong.append(f"{whose} has {got} in dimension {n}, which is {extent}, at no {name}; {such}")
        for extent, got, whose, n in self._computed:
            if all(name in sizes for name in extent.names) and (wanted := extent.at(sizes)) != got:
                known = ", ".join(f"{name} is {sizes[name]} as in {by[name]}" for name in extent.names)
                wrong.append(f"{whose} has {got} in dimension {n}, which is {extent} = {wanted} ({known})")
        return wrong


def foreign(values: Sequence[Any]) -> Any:
    """Return the first array of another package than numpy; None if there is none."""
    return next((v for v in values if not isinstance(v, np.ndarray) and hasattr(v, "__dlpack__")), None)


def given_back(array: np.ndarray, like: Any) -> Any:
    """Return an array as one of the package that `like` is of, on its device; itself if that takes no DLPack."""
    namespace = getattr(like, "__array_namespace__", None)
    package = namespace() if namespace is not None else sys.modules.get(type(like).__module__.partition(".")[0])
    take = getattr(package, "from_dlpack", None)
    if take is None:
        return array
    # numpy gives only the types that are its own; the compiler's tensor has them all.
    made = take(array if array.dtype.isbuiltin == 1 else _tvm.as_tensor(array))
    if like.__dlpack_device__()[0] == _CPU:
        return made
    return made.to(like.device) if hasattr(made, "to") else made.to_device(like.device)


def array_of(each: Input | Param, value: Any) -> tuple[np.ndarray | None, str, str]:
    """Return the array, what it is in words, and what is wrong with it, if something is.

    Extents that aren't numbers may be any here.
    """
    array = np.asarray(value) if isinstance(value, np.generic) else value
    if not isinstance(array, np.ndarray):
        if not hasattr(value, "__dlpack__"):
            other = "arrays of other packages are taken, too, by DLPack"
            return None, _described(value), f"must be a numpy array; got {type(value).__name__}; {other}"
        try:
            array = _read(value)
        except Exception as error:  # whatever the other package raises
            return None, _described(value), f"cannot be read by DLPack: {error}"
    dtype = _name(array.dtype)
    seen = f"{dtype}[{', '.join(map(str, array.shape))}]"
    why = misfit(each, array.shape, dtype)
    return None if why else array, seen, why


def misfit(each: Input | Param, shape: tuple[int, ...], dtype: str) -> str:
    """Return what is wrong with an array of a shape and a type; nothing if it fits."""
    own = each.shape
    if own is not None:
        fits = len(shape) == len(own)
        for extent, got in zip(own, shape):
            fits = fits and (extent == got or not isinstance(extent, int))
        if not fits:
            return f"has the shape {shown(own)}; got an array of {shape}"
    return "" if dtype == (each.dtype or dtype) else f"is {each.dtype}; got an array of {dtype}"


def _read(value: Any) -> np.ndarray:
    """Return another package's array as numpy's: the same memory if it is the CPU's, and else a copy."""
    if value.__dlpack_device__()[0] == _CPU:
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError):  # of a type that numpy doesn't know; or for a reason that is said again
            return _tvm.as_array(tvm.runtime.from_dlpack(value))
    return tvm.runtime.from_dlpack(value).numpy()


def _described(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    kind = type(value).__name__
    return kind if shape is None or dtype is None else f"{kind} of {dtype}[{', '.join(map(str, shape))}]"


def shown(shape: Extents) -> str:
    """Return a shape as Python writes a tuple, with `any` for an extent that may be any."""
    extents = ["any" if extent is None else str(extent) for extent in shape]
    return f"({', '.join(extents)}{',' if len(extents) == 1 else ''})"
