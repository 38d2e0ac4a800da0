"""What a compiled tile program is called with: checked against its parameters, and brought to where it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx

from tvm_axe import _tvm
from tvm_axe.errors import InputError
from tvm_axe.layout.shapes import dense_strides
from tvm_axe.machines import Backend
from tvm_axe.tile.assuming import Assumption, find_broken
from tvm_axe.tile.given import Given, settle
from tvm_axe.tile.program import TileProgram, TileSequence
from tvm_axe.tile.strides import reach


@dataclass(frozen=True)
class Parameter:
    """A tensor that a program takes; extents may be variables, which the first tensor that has them decides.

    Of a mesh tensor, the slabs along dimension 0 may lie any distance apart. `strides` are those of a tensor that isn't
    row-major, in elements, numbers or expressions.
    """

    name: str
    shape: tuple[int | tirx.Expr, ...]
    dtype: str
    is_output: bool
    is_mesh: bool = False
    strides: tuple[int | tirx.Expr, ...] | None = None

    @functools.cached_property
    def fixed(self) -> tuple[int, ...] | None:
        """The shape, if it has no variables."""
        return tuple(map(int, self.shape)) if all(isinstance(extent, int) for extent in self.shape) else None

    @functools.cached_property
    def steps(self) -> tuple[Any, ...]:
        """The strides, those that are a variable as its name; none of a tensor in row-major order."""
        return tuple(str(each.name) if isinstance(each, tirx.Var) else each for each in self.strides or ())

    @functools.cached_property
    def is_wide(self) -> bool:
        """Whether its places are counted in int64."""
        sizes = [each for each in (*self.shape, *(self.strides or ())) if not isinstance(each, int)]
        return any(str(each.ty) == "int64" for each in sizes) if sizes else self.strides is not None

    def __str__(self) -> str:
        apart = "" if self.strides is None else f" with strides ({', '.join(map(str, self.strides))})"
        return f"{self.name}: {self.dtype}[{', '.join(map(str, self.shape))}]{apart}"


@dataclass(frozen=True)
class Scalar:
    """A number that a program takes; the device's coordinate is one below `devices`."""

    name: str
    dtype: str
    devices: int | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{'' if self.devices is None else f' < {self.devices}'}"


def parameters(program: TileProgram | TileSequence) -> tuple[Parameter | Scalar, ...]:
    """The parameters of a tile program, in order."""
    written = {tile.buffer for node in program.nodes() for tile in node.writes}
    found: dict[tirx.Var, Parameter | Scalar] = {
        tile.buffer: Parameter(tile.name, tile.shape, tile.dtype, tile.buffer in written, tile.is_mesh, tile.strides)
        for tile in program.params
    }
    for scalar in program.scalars:
        is_device = program.device is not None and scalar.same_as(program.device)
        found[scalar] = Scalar(str(scalar.name), str(scalar.ty), program.devices if is_device else None)
    return tuple(found[param] for param in program.func.params)


@dataclass(frozen=True)
class Arguments:
    """What the compiled function is called with, and what is to be done afterwards, such as copying results back.

    `copied` are the parameters whose values are copies of arrays.
    """

    values: tuple[Any, ...]
    afterwards: tuple[Callable[[], None], ...]
    copied: tuple[str, ...]


class Binder:
    """Makes `Arguments` for one function out of arrays and tensors.

    Parameters
    ----------
    name : str
        The function's name, for messages.
    params : sequence of Parameter or Scalar
        Its parameters.
    backend : Backend
        What it was compiled by, which says where it runs and how tensors are aligned.
    assumptions : sequence of Assumption, optional
        What it takes for granted of its open sizes and its scalars.
    """

    def __init__(
        self,
        name: str,
        params: Sequence[Parameter | Scalar],
        backend: Backend,
        assumptions: Sequence[Assumption] = (),
    ) -> None:
        self.name, self.params, self.backend = name, tuple(params), backend
        self.assumptions = tuple(assumptions)
        self._device = tvm.runtime.device(backend.device)
        tensors = [param for param in params if isinstance(param, Parameter)]
        self._has_strides = any(param.strides is not None for param in tensors)
        self._is_checked = not (any(param.is_mesh for param in tensors) or self._has_strides or self.assumptions)

    def quick(self, given: Sequence[Any]) -> list[Any] | None:
        """What to call the function with if it refuses by itself all that `bind` would; None if it may not.

        A compiled function looks at the number of its arguments and at each tensor's type, extents, strides and device,
        in a fraction of the time that it takes here. It knows nothing of where a tensor begins, of the limits of a
        number, of what a program assumes, of a mesh's slabs, and of elements that overlap.

        Raises
        ------
        InputError
            A scalar is no number of its type.
        """
        if not self._is_checked or len(given) != len(self.params):
            return None
        values, alignment = [], self.backend.alignment
        for param, value in zip(self.params, given):
            if isinstance(param, Scalar):
                value = self._scalar(param, value)
            else:
                begin = getattr(value, "data_ptr", None)  # of PyTorch's tensors and TVM's, and of no array's
                try:
                    if begin is None or begin() % alignment:
                        return None
                except RuntimeError:  # a tensor of PyTorch's that has no memory
                    return None
            values.append(value)
        return values

    def bind(self, given: Sequence[Any]) -> Arguments:
        """Check what is given, and bring numpy arrays to where the function runs.

        Raises
        ------
        InputError
            The number of arguments is wrong, or a type, dtype, shape, device or memory order doesn't fit; a scalar
            is no number of its type; a size isn't as the program assumes; elements of what is written overlap.
        """
        if len(given) != len(self.params):
            takes = ", ".join(map(str, self.params))
            what = "arguments" if any(isinstance(param, Scalar) for param in self.params) else "tensors"
            raise InputError(f"{self.name} takes {len(self.params)} {what} ({takes}); got {len(given)}")
        extents: dict[str, tuple[int, str]] = {}
        scalars: dict[str, int | float] = {}
        values: list[Any] = []
        for param, value in zip(self.params, given):
            if isinstance(param, Scalar):
                value = scalars[param.name] = self._scalar(param, value)
            elif isinstance(value, np.ndarray):
                self._check(param, value.shape, str(value.dtype), extents)
            else:
                value = self._tensor(param, value, extents)
            values.append(value)
        if self._has_strides:
            extents |= self._settle(values, extents, scalars)
        afterwards: list[Callable[[], None]] = []
        copied = []
        for at, (param, value) in enumerate(zip(self.params, values)):
            if not isinstance(value, np.ndarray):
                continue
            assert isinstance(param, Parameter), param
            if self._is_in_place(param, value):
                values[at] = _tvm.as_tensor(value)
                continue
            values[at], after = self._copied(param, value)
            afterwards += after
            copied.append(param.name)
        if self.assumptions:
            self._check_assumed(extents, scalars)
        return Arguments(tuple(values), tuple(afterwards), tuple(copied))

    def _settle(
        self, values: list[Any], extents: Mapping[str, tuple[int, str]], scalars: Mapping[str, int | float]
    ) -> dict[str, tuple[int, str]]:
        """Check the strides of tensors, put views in their place where one element is along a dimension, return sizes.

        These are what strides are variables of, by name, and in which tensor.
        """
        places = [at for at, param in enumerate(self.params) if isinstance(param, Parameter) and param.strides]
        tensors = []
        for at in places:
            param, value = self.params[at], values[at]
            assert isinstance(param, Parameter), param
            tensors.append(Given(param, tuple(map(int, value.shape)), _strides_of(self.name, param, value)))
        sizes = {name: extent for name, (extent, _) in extents.items()}
        wanted, found = settle(self.name, tensors, {**sizes, **scalars}, self.assumptions)
        for at, given, strides in zip(places, tensors, wanted):
            if strides != given.strides:
                values[at] = _with_strides(self.name, given, values[at], strides)
        return found

    def _check_assumed(self, extents: Mapping[str, tuple[int, str]], scalars: Mapping[str, int | float]) -> None:
        sizes: dict[str, int | float] = {name: extent for name, (extent, _) in extents.items()}
        broken = find_broken(self.assumptions, sizes | dict(scalars))
        if broken is not None:
            value, source = extents.get(broken.name) or (scalars[broken.name], "")
            where = f" in {source}" if source else ""
            raise InputError(f"{self.name}: {broken.name} is {value}{where}; the program has tile.assume({broken})")

    def _scalar(self, param: Scalar, value: Any) -> int | float:
        whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
        if "float" in param.dtype:
            if not whole and not isinstance(value, float | np.floating):
                raise InputError(f"{self.name}: {param.name} is a number, {param.dtype}; got {type(value).__name__}")
            return float(value)
        if not whole:
            raise InputError(f"{self.name}: {param.name} is an integer, {param.dtype}; got {type(value).__name__}")
        limits = np.iinfo(param.dtype)
        if not limits.min <= value <= limits.max:
            raise InputError(f"{self.name}: {param.name} is {param.dtype}, {limits.min} to {limits.max}; got {value}")
        if param.devices is not None and not 0 <= value < param.devices:
            raise InputError(
                f"{self.name}: {param.name} is the device that runs, 0 to {param.devices - 1} of the mesh tensors' "
                f"{param.devices}; got {value}"
            )
        return int(value)

    def _check(self, param: Parameter, shape: Sequence[int], dtype: str, extents: dict[str, tuple[int, str]]) -> None:
        if dtype != param.dtype:
            raise InputError(f"{self.name}: {param.name} is {param.dtype}; got {dtype}")
        if shape == param.fixed:
            return
        fits = len(shape) == len(param.shape)
        for extent, own in zip(shape, param.shape):
            if isinstance(own, int):
                fits = fits and extent == own
            elif isinstance(own, tirx.Var):
                known, source = extents.setdefault(str(own.name), (int(extent), param.name))
                if known != extent:
                    raise InputError(
                        f"{self.name}: {own.name} is {extent} in {param.name} and {known} in {source}; got the shape "
                        f"{tuple(shape)} for {param}"
                    )
        if not fits:
            raise InputError(f"{self.name}: {param.name} has the shape {_shape(param)}; got {tuple(shape)}")

    def _is_in_place(self, param: Parameter, array: np.ndarray) -> bool:
        """Whether the function can run on an array's own memory."""
        if param.is_output and not array.flags.writeable:
            raise InputError(f"{self.name} writes {param.name}; got a read-only array")
        fits = array.flags.writeable and (param.strides is not None or array.flags.c_contiguous)
        # The strides that numpy gives an array without an element aren't those of a dense one.
        return self.backend.on_host and fits and array.size > 0 and array.ctypes.data % self.backend.alignment == 0

    def _copied(self, param: Parameter, array: np.ndarray) -> tuple[Any, list[Callable[[], None]]]:
        """A copy of an array where the function runs, and what brings back what is written to it."""
        if param.strides is not None:
            return self._copied_apart(param, array)
        host = tvm.runtime.empty(array.shape, param.dtype)
        view = _tvm.as_array(host)
        view[...] = array
        if self.backend.on_host:
            return host, [lambda: np.copyto(array, view)] if param.is_output else []
        tensor = tvm.runtime.empty(array.shape, param.dtype, self._device)
        host.copyto(tensor)

        def fetch() -> None:
            tensor.copyto(host)
            np.copyto(array, view)

        return tensor, [fetch] if param.is_output else []

    def _copied_apart(self, param: Parameter, array: np.ndarray) -> tuple[Any, list[Callable[[], None]]]:
        """The same of an array with strides, whose elements lie as far apart in the copy."""
        elements = reach(array.shape, array.strides) // array.itemsize + 1 if array.size else 1
        host = tvm.runtime.empty((elements,), param.dtype)
        view = _tvm.restrided(_tvm.as_array(host), array.shape, array.strides)
        view[...] = array
        if self.backend.on_host:
            return _tvm.as_tensor(view), [lambda: np.copyto(array, view)] if param.is_output else []
        memory = tvm.runtime.empty(host.shape, param.dtype, self._device)
        host.copyto(memory)
        tensor = _tvm.device_tensor(memory.data_ptr(), array.shape, array.strides, array.dtype, self._device)

        def fetch() -> None:  # which keeps the memory, too, that the tensor is a view of
            if param.is_output:
                memory.copyto(host)
                np.copyto(array, view)

        return tensor, [fetch]

    def _tensor(self, param: Parameter, value: Any, extents: dict[str, tuple[int, str]]) -> Any:
        """The value itself, which tells the runtime its stream too, once a view of it was checked."""
        if isinstance(value, tvm_ffi.Tensor):
            tensor = value
        elif hasattr(value, "__dlpack__"):
            try:
                tensor = tvm_ffi.from_dlpack(value)
            except (BufferError, RuntimeError, ValueError) as error:
                raise InputError(
                    f"{self.name}: {param.name} cannot be taken over from {type(value).__name__}: {error}"
                ) from error
        else:
            raise InputError(
                f"{self.name}: {param.name} must be a numpy array or a tensor with __dlpack__; got "
                f"{type(value).__name__}"
            )
        if tensor.device.dlpack_device_type() != self._device.dlpack_device_type():
            raise InputError(f"{self.name} runs on {self.backend.device}; {param.name} is on {tensor.device}")
        self._check(param, tuple(tensor.shape), str(tensor.dtype), extents)
        fits = _slabs_are_dense(tensor) if param.is_mesh else param.strides is not None or tensor.is_contiguous()
        if not fits:
            what = "of slabs that are dense and apart" if param.is_mesh else "dense"
            raise InputError(f"{self.name}: {param.name} must be {what}, in row-major order")
        alignment = self.backend.alignment
        if tensor.data_ptr() % alignment:
            raise InputError(f"{self.name}: {param.name} must start at a multiple of {alignment} bytes; copy it")
        return value


def _strides_of(name: str, param: Parameter, value: Any) -> tuple[int, ...]:
    """The strides of an array or of a tensor that was checked, in elements."""
    if not isinstance(value, np.ndarray):
        tensor = value if isinstance(value, tvm_ffi.Tensor) else tvm_ffi.from_dlpack(value)
        return tuple(map(int, tensor.strides))
    if any(stride % value.itemsize for stride in value.strides):
        raise InputError(
            f"{name}: {param.name} has strides of {value.strides} bytes; valid are multiples of an element's "
            f"{value.itemsize}: copy it"
        )
    return tuple(stride // value.itemsize for stride in value.strides)


def _with_strides(name: str, given: Given, value: Any, strides: tuple[int, ...]) -> Any:
    """A view of an array or a tensor with strides that differ along dimensions of one element alone."""
    if isinstance(value, np.ndarray):
        return _tvm.restrided(value, value.shape, [stride * value.itemsize for stride in strides])
    if hasattr(value, "as_strided"):  # a tensor of PyTorch's
        return value.as_strided(value.shape, strides, value.storage_offset())
    raise InputError(
        f"{name}: {given.param.name} has the strides {given.strides}, and is taken with {strides}, which along "
        "dimensions of one element are as good; valid are those, or an array or a tensor of PyTorch's, of which views "
        "are made"
    )


def _slabs_are_dense(tensor: Any) -> bool:
    """Whether a tensor is dense but for the distance between its slabs, which don't overlap."""
    shape, strides = tuple(tensor.shape), tuple(tensor.strides)
    dense = dense_strides(shape)
    apart = shape[0] == 1 or strides[0] >= dense[0]
    return apart and all(e == 1 or s == d for e, s, d in zip(shape[1:], strides[1:], dense[1:]))


def _shape(param: Parameter) -> str:
    return f"({', '.join(map(str, param.shape))}{',' if len(param.shape) == 1 else ''})"
