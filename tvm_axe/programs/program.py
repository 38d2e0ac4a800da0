"""What a program is: a function over whole tensors, the schedules it is known by, and what is expected of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from tvm import tirx

from tvm_axe.errors import InputError
from tvm_axe.layout import Mesh
from tvm_axe.layout.dtypes import dtype_bytes
from tvm_axe.layout.traffic import chunk, received_of_all_reduce
from tvm_axe.schedule import Schedule

__all__ = ["SIZES", "DistributedProgram", "ProgramFactory", "Rows", "normal"]

SIZES = ("test", "uneven", "bench")
"""Extents that up to four devices divide; those that they don't; those to measure."""


@dataclass(frozen=True)
class DistributedProgram:
    """A distributed program of one size, for one mesh.

    Attributes
    ----------
    name : str
        What it is called in `PROGRAMS`.
    func : PrimFunc
        The function over whole tensors, its inputs before its outputs; unscheduled, it runs on one device.
    mesh : Mesh
        The devices that it was made for. Dimensions that count devices have the extents of its axes.
    schedules : Mapping[str, Callable[[Schedule], object]]
        A function that applies primitives, by the name that CoCoNet gives such a schedule.
    bytes : Mapping[str, int]
        The bytes that the busiest device of each stage receives of its peers, over all stages of one run, in closed
        form, by the schedule's name.
    inputs : Callable[[numpy.random.Generator], tuple[numpy.ndarray, ...]]
        A function that draws random arrays for the function's inputs, in its order.
    compute : Callable[..., tuple[numpy.ndarray, ...]]
        The same function in numpy; it computes in the floating-point type of its arrays.
    axis : str
        The mesh axis that schedules share the work over; on others, but for a pipeline's, all devices do the same.
    reduced : tuple[tuple[int, ...], str]
        Shape and dtype of the tensor that devices would sum over `axis`, had they nothing but numpy and an all-reduce.
    terms : frozenset[int]
        Positions of the inputs whose dimension 0 counts the terms of that sum.
    tolerance : float
        The largest `error` that is right.
    """

    name: str
    func: tirx.PrimFunc
    mesh: Mesh
    schedules: Mapping[str, Callable[[Schedule], object]]
    bytes: Mapping[str, int]
    inputs: Callable[[np.random.Generator], tuple[np.ndarray, ...]]
    compute: Callable[..., tuple[np.ndarray, ...]]
    axis: str
    reduced: tuple[tuple[int, ...], str]
    terms: frozenset[int] = frozenset()
    tolerance: float = 1e-5

    def schedule(self, name: str) -> Schedule:
        """Return the function as the schedule `name` has it.

        Raises
        ------
        InputError
            If there is no such schedule; names those there are.
        ScheduleError
            If a rule of a primitive doesn't hold on this mesh.
        """
        if name not in self.schedules:
            raise InputError(f"{self.name} has no schedule {name!r}; it has {', '.join(self.schedules)}")
        sch = Schedule(self.func, mesh=self.mesh)
        self.schedules[name](sch)
        return sch

    def reference(self, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the outputs for `arrays`, computed in float64."""
        return self.compute(*(array.astype("float64") if array.dtype.kind == "f" else array for array in arrays))

    def error(self, outputs: tuple[np.ndarray, ...], reference: tuple[np.ndarray, ...]) -> float:
        """Return the largest difference from the reference over the largest value of that, of the worst output.

        NaN anywhere gives NaN.
        """
        pairs = [(out.astype("float64"), expected) for out, expected in zip(outputs, reference, strict=True)]
        errors = [np.abs(out - expected).max() / np.abs(expected).max() for out, expected in pairs]
        return float(np.max(errors))


@dataclass(frozen=True)
class ProgramFactory:
    """A maker of one program for any mesh and size: an entry of `PROGRAMS`.

    Attributes
    ----------
    axes : tuple[str, ...]
        The mesh axes that its schedules share work over; on any other axis all devices do the same.
    build : Callable[[Mesh, str], DistributedProgram]
        The function that makes the program for a mesh that has these axes, and a size.
    """

    axes: tuple[str, ...]
    build: Callable[[Mesh, str], DistributedProgram]

    def __call__(self, mesh: Mesh, size: str = "test") -> DistributedProgram:
        """Make the program.

        Raises
        ------
        InputError
            If the mesh lacks one of `axes`, or `size` is not one of `SIZES`.
        """
        missing = [axis for axis in self.axes if axis not in mesh]
        if missing:
            raise InputError(
                f"the program is shared over {' and '.join(self.axes)}, and mesh {mesh} has no {', '.join(missing)}; "
                "an axis of size 1 will do"
            )
        if size not in SIZES:
            raise InputError(f"size must be one of {', '.join(SIZES)}, not {size!r}")
        return self.build(mesh, size)


@dataclass(frozen=True)
class Rows:
    """A tensor whose rows devices share, and the bytes that the busiest of them receives in what they do with it.

    >>> rows = Rows(10, 3, "float32", devices=4)
    >>> rows.reduce_scattered, rows.all_gathered, rows.fused, rows.all_reduced
    (108, 108, 192, 360)

    Of a sum of so few elements one device adds up all: devices share whole cache lines.

    Attributes
    ----------
    rows, width : int
        How many there are, and the elements of each.
    dtype : str
        The type of the elements.
    devices : int
        How many devices share the rows, in blocks of which the first are the largest.
    """

    rows: int
    width: int
    dtype: str
    devices: int

    @property
    def reduce_scattered(self) -> int:
        """What a device receives of the others, a term from each for each element of its block."""
        return self._bytes((self.devices - 1) * self._blocks[0])

    @property
    def all_gathered(self) -> int:
        """What a device receives to have all rows beside its block."""
        return self._bytes(self.rows - self._blocks[-1])

    @property
    def fused(self) -> int:
        """What it receives in both, in one kernel: who has the most terms to add isn't who has the most rows to get."""
        return self._bytes(max((self.devices - 1) * own + self.rows - own for own in self._blocks))

    @property
    def all_reduced(self) -> int:
        """What a device receives in an all-reduce of the whole tensor, which has no rows."""
        return dtype_bytes(self.dtype, received_of_all_reduce(self.rows * self.width, self.devices))

    @property
    def whole(self) -> int:
        """The bytes of all rows."""
        return self._bytes(self.rows)

    @property
    def block(self) -> int:
        """The bytes of the largest block."""
        return self._bytes(self._blocks[0])

    @property
    def _blocks(self) -> list[int]:
        found = [chunk(self.rows, self.devices, rank) for rank in range(self.devices)]
        return [block.stop - block.start for block in found]

    def _bytes(self, rows: int) -> int:
        return dtype_bytes(self.dtype, rows * self.width)


def normal(rng: np.random.Generator, *shape: int, scale: float = 1) -> np.ndarray:
    """Normally distributed float32 numbers of the standard deviation `scale`."""
    return rng.standard_normal(shape, dtype="float32") * np.float32(scale)
