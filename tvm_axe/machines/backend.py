"""A back end: everything that is particular to one kind of target, as one object.

A back end is registered by name (`tvm_axe.machines.registry`), and whoever needs to know something of a target asks its
back end or its machine, never the target's name. `tvm_axe.tile.backend.TileBackend` is one that tile programs run on.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import tvm
from tvm.runtime import Module
from tvm.target import Target

from tvm_axe.machines.cache import Cache
from tvm_axe.machines.cubins import Resources
from tvm_axe.machines.machine import Machine

__all__ = ["Backend", "Built"]


class Built(NamedTuple):
    """Functions that were compiled.

    Attributes
    ----------
    module : Module
        What can be called.
    source : str or None
        The source of the device's code, where there is such.
    resources : mapping from str to Resources
        What threads of each kernel take, by its name, where the compiler says so.
    remarks : mapping from str to list of str
        What the compiler expects to be slow in a kernel, by its name, where it says so.
    """

    module: Module
    source: str | None
    resources: Mapping[str, Resources] = MappingProxyType({})
    remarks: Mapping[str, list[str]] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Backend(ABC):
    """How functions are compiled, run and tuned on one kind of target.

    Attributes
    ----------
    name : str
        Its name in the registry.
    device : str
        The runtime's name of the device that code runs on: ``"cpu"``, which is the host, or such as ``"cuda"``.
    alignment : int
        Bytes that the address of a tensor's first element is a multiple of: what the code takes for granted.
    page : int
        Bytes of which the distance between slabs of a mesh tensor is a multiple, in the memory of such devices.
    rules : str
        Upstream's name of the schedule rules, postprocessors and mutators for such a target (MetaSchedule).
    timeout : float
        Seconds that a candidate of tuning may take to be built.
    """

    name: str
    device: str
    alignment: int
    rules: str
    timeout: float
    page: int = mmap.PAGESIZE

    @property
    def on_host(self) -> bool:
        """Whether code runs on the host itself, in its memory and on its cores."""
        return self.device == "cpu"

    @abstractmethod
    def machine(self, target: Target) -> Machine:
        """The machine that a (resolved) target is; `tvm_axe.machines.machine_of` remembers it."""

    @abstractmethod
    def build(self, mod: tvm.IRModule, target: Target, store: Cache | None = None, overlap: bool = False) -> Built:
        """Compile functions, all of them: nothing is left for the first call but to link.

        Parameters
        ----------
        mod : IRModule
            Functions with the attribute ``global_symbol``, as upstream compiles them for the target; on a GPU also such
            of blocks whose loops nobody has bound to threads (`tvm_axe.machines.threads`).
        target : Target
            A resolved target.
        store : Cache, optional
            Where compiled code is kept. Without one, code that takes long to compile is kept in the user's cache, and
            other code isn't kept: so are candidates of tuning, which nobody builds twice.
        overlap : bool
            Whether every function waits for what was launched before it, and so may be launched while that still runs.

        Raises
        ------
        TileError
            There is no compiler for the device's code.
        """

    def stand_ins(self, target: Target) -> Sequence[Target]:
        """Generic targets whose code runs on a (resolved) target too, and is about as fast there; the best first."""
        return ()
