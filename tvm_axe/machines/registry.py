"""The back ends by name: the one place that asks what a target is called.

>>> from tvm.target import Target
>>> backend_of(Target({"kind": "cuda", "arch": "sm_80"})).name
'sm_80'
>>> machine_of(Target({"kind": "cuda", "arch": "sm_80"})).processors
108

A new target is a folder, and a line here that says which targets it is for and where its ``BACKEND`` is. That module is
imported when such a target is first seen.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType

from tvm.target import Target

from tvm_axe.errors import TuneError
from tvm_axe.machines.backend import Backend
from tvm_axe.machines.machine import Machine

__all__ = [
    "Registration",
    "backend_of",
    "described",
    "find_backend",
    "kinds_by_device",
    "machine_of",
    "made_for",
    "register",
    "registered",
]


@dataclass(frozen=True)
class Registration:
    """A back end that isn't imported yet.

    Attributes
    ----------
    name : str
        The back end's name.
    home : str
        The module whose ``BACKEND`` it is.
    kind : str
        The kind of the targets that it is for.
    attributes : Mapping[str, str]
        What these targets' attributes are, such as ``arch``.
    """

    name: str
    home: str
    kind: str
    attributes: Mapping[str, str]

    def matches(self, target: Target) -> bool:
        """Whether the back end is for a target."""
        own = target.attrs
        return str(target.kind.name) == self.kind and all(
            str(own.get(name, "")) == value for name, value in self.attributes.items()
        )

    def load(self) -> Backend:
        """The back end, from its module."""
        found = import_module(self.home).BACKEND
        assert isinstance(found, Backend) and found.name == self.name, found
        return found

    def target(self) -> Target:
        """The plainest target that it is for."""
        return Target({"kind": self.kind, **self.attributes})


_registered: dict[str, Registration] = {}


def register(name: str, home: str, kind: str, **attributes: str) -> None:
    """Register a back end for the targets of a kind whose attributes are `attributes`.

    Where several match a target, the one with the most attributes is taken, and among those the one registered last.

    Raises
    ------
    TuneError
        There is one of that name.
    """
    if name in _registered:
        raise TuneError(f"register: the back end {name} is registered, in {_registered[name].home}; take another name")
    _registered[name] = Registration(name, home, kind, MappingProxyType(attributes))


register("llvm", "tvm_axe.tile.targets.llvm", "llvm")
register("sm_90a", "tvm_axe.tile.targets.sm_90a", "cuda", arch="sm_90a")
register("sm_80", "tvm_axe.tile.targets.sm_80", "cuda", arch="sm_80")
register("sm_89", "tvm_axe.tile.targets.sm_89", "cuda", arch="sm_89")
register("sm_100a", "tvm_axe.tile.targets.sm_100a", "cuda", arch="sm_100a")
register("cuda", "tvm_axe.tile.targets.untiled", "cuda")  # any other GPU of CUDA's
register("gfx942", "tvm_axe.tile.targets.gfx942", "rocm", mcpu="gfx942")


def registered() -> tuple[Registration, ...]:
    """All registrations, in their order."""
    return tuple(_registered.values())


def kinds_by_device() -> dict[str, str]:
    """The kind of target that functions on a device are compiled for, by the runtime's name of such devices."""
    kinds: dict[str, str] = {}
    for registration in _registered.values():
        kinds.setdefault(registration.load().device, registration.kind)
    return kinds


def find_backend(target: Target) -> Backend | None:
    """The back end for a target, or None where none is registered."""
    found = [registration for registration in reversed(_registered.values()) if registration.matches(target)]
    return max(found, key=lambda registration: len(registration.attributes)).load() if found else None


def backend_of(target: Target) -> Backend:
    """The back end for a target.

    Raises
    ------
    TuneError
        None is registered for it.
    """
    found = find_backend(target)
    if found is None:
        raise TuneError(f"target {described(target)}: it has no back end; there are {', '.join(_registered)}")
    return found


def made_for(target: Target) -> str:
    """What a (resolved) target's code is made for: a GPU's architecture, or LLVM's name of a CPU; empty if not said."""
    return str(target.attrs.get("arch" if target.kind.name == "cuda" else "mcpu", ""))


def described(target: Target) -> str:
    """What messages call a target: its architecture, or its kind where it has none."""
    kind = str(target.kind.name)
    return kind if kind == "llvm" else made_for(target) or kind


def machine_of(target: Target) -> Machine:
    """The machine that a target is; made once.

    Raises
    ------
    TuneError
        As `backend_of`.
    """
    return _machine(backend_of(target), str(target))


@functools.cache
def _machine(backend: Backend, target: str) -> Machine:
    return backend.machine(Target(json.loads(target)))
