"""What is known of the module that each device runs of a shared model (`tvm_axe.relax.emitting`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tvm

from tvm_axe.collective import SLAB
from tvm_axe.layout import Mesh
from tvm_axe.relax.chosen import Chosen
from tvm_axe.relax.forms import WHOLE, Forms, are_whole, local_shape
from tvm_axe.relax.sizes import Shape
from tvm_axe.relax.steps import Step

__all__ = ["Argument", "DeviceFunction", "DeviceModule", "Pack", "Placed"]


@dataclass(frozen=True)
class Placed:
    """A tensor of the mesh: a value in a form along each axis, of which each device has a slab."""

    name: str
    shape: Shape
    dtype: str
    forms: Forms

    @property
    def slab(self) -> Shape:
        """The shape of a slab."""
        return local_shape(self.forms, self.shape)

    @property
    def is_whole(self) -> bool:
        """Whether every device holds all of it."""
        return are_whole(self.forms)

    @property
    def shown(self) -> str:
        """Its forms as text: of several axes each with its name, those along which all is held left out."""
        if len(self.forms) == 1:
            return str(self.forms[0][1])
        return " ".join(f"{axis}:{form}" for axis, form in self.forms if form != WHOLE) or str(WHOLE)


@dataclass(frozen=True)
class Argument:
    """What a function of the model takes or has as a constant: a whole array, and the tensors that it is put into.

    What is a ``"shape"``, a ``"number"`` or an ``"object"`` instead, by its `kind`, is in no tensor.
    """

    name: str
    shape: Shape
    dtype: str
    kind: str
    tensors: tuple[Placed, ...]


@dataclass(frozen=True)
class DeviceFunction:
    """A function of the device's module.

    Attributes
    ----------
    name : str
        Its name, in the model and in the module.
    inputs : tuple[Argument, ...]
        What the model's function takes.
    results : tuple[Placed, ...]
        The tensors that it leaves, in the model's order.
    sizes : tuple[str, ...]
        The sizes that shapes are counted in: what the device's function is called with first.
    objects : tuple[str, ...]
        The objects that it takes or makes, by name: where the device keeps them is what it is called with then.
    left : tuple of (int, str)
        The objects that it returns: where each is among all results, and its name.
    most : Mapping[str, int]
        Upper bounds of sizes, by name, of those that have one.
    arguments : tuple of (str, str)
        What it is called with behind these: tensors of the mesh by name, each with the view of it; its coordinates come
        behind them.
    levels : tuple[Chosen, ...]
        How values are shared along each axis, of what the outer ones leave.
    checks : tuple of (Shape, Shape, str)
        Shapes that are to be others, with the variable that this is said of.
    steps : tuple[Step, ...]
        What a device does, in order.
    overwritten : tuple[str, ...]
        The tensors of the mesh to which calls store that are in place, inputs among them.
    """

    name: str
    inputs: tuple[Argument, ...]
    results: tuple[Placed, ...]
    sizes: tuple[str, ...]
    most: Mapping[str, int]
    arguments: tuple[tuple[str, str], ...]
    levels: tuple[Chosen, ...]
    checks: tuple[tuple[Shape, Shape, str], ...] = ()
    steps: tuple[Step, ...] = ()
    overwritten: tuple[str, ...] = ()
    objects: tuple[str, ...] = ()
    left: tuple[tuple[int, str], ...] = ()

    @property
    def numbers(self) -> int:
        """How many numbers it is called with before its tensors."""
        return len(self.sizes) + len(self.objects)

    @property
    def chosen(self) -> Chosen:
        """What a device does at last: how what the outer axes leave is shared along the innermost one."""
        return self.levels[-1]


@dataclass(frozen=True)
class Pack:
    """What is made once of tensors that stay as they are (`tvm_axe.relax.prepacked`).

    Attributes
    ----------
    packer : str
        The module's function that makes it, of the slabs of these, the coordinates, and the slabs of what is made.
    sources : tuple[str, ...]
        The tensors, by name.
    coordinates : tuple[str, ...]
        The mesh axes of which it takes the device's coordinates.
    made : tuple[Placed, ...]
        What is made; every device has one of its own of that shape.
    """

    packer: str
    sources: tuple[str, ...]
    coordinates: tuple[str, ...]
    made: tuple[Placed, ...]


@dataclass(frozen=True)
class DeviceModule:
    """What each device runs of a model.

    Attributes
    ----------
    module : IRModule
        The functions, with the kernels that they call.
    mesh : Mesh
        The devices.
    coordinates : tuple[str, ...]
        The axes along which they share, of which a function takes the device's coordinates behind its tensors.
    functions : Mapping[str, DeviceFunction]
        By name.
    tensors : Mapping[str, Placed]
        All tensors of the mesh.
    constants : tuple of (Placed, Tensor)
        Those that are filled once, with what they hold.
    meets : bool
        Whether kernels may do what collectives would, by indexing the slabs of peers.
    packs : tuple[Pack, ...]
        What is made once of weights and constants.
    """

    module: tvm.IRModule
    mesh: Mesh
    coordinates: tuple[str, ...]
    functions: Mapping[str, DeviceFunction]
    tensors: Mapping[str, Placed]
    constants: tuple[tuple[Placed, tvm.runtime.Tensor], ...]
    meets: bool = True
    packs: tuple[Pack, ...] = ()

    @property
    def indexes_peers(self) -> tuple[str, ...]:
        """The kernels that index the slabs of peers, and the copies to them, by the names of their steps."""
        every = [step for function in self.functions.values() for step in function.steps]
        steps = [step for step in every if step.func is not None or step.copies]
        found = [step.name for step in steps if any(view != SLAB for view in step.views)]
        return tuple(dict.fromkeys(found))
