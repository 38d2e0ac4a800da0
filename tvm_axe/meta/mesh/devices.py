"""What the devices of a mesh are while schedules are tried on it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tvm.target import Target

from tvm_axe.collective import Workers, launch, registry
from tvm_axe.collective.arena import PAGE
from tvm_axe.collective.engine import Rates
from tvm_axe.errors import TuneError
from tvm_axe.layout import Mesh
from tvm_axe.machines import backend_of

__all__ = ["Devices"]


@dataclass(frozen=True)
class Devices:
    """An engine, and what it is launched with.

    Attributes
    ----------
    engine : str
        Its name.
    options : Mapping[str, Any]
        What `tvm_axe.launch` takes beside; what JSON has.
    page : int
        Bytes of which the distance between slabs is a multiple.
    target : Target or None
        What code for them is compiled for, where it is known.
    """

    engine: str = "processes"
    options: Mapping[str, Any] = field(default_factory=dict)
    page: int = PAGE
    target: Target | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, target: Target, engine: str | None, options: Mapping[str, Any] | None = None) -> Devices:
        """The devices that a (resolved) target's code is tried on; the first engine for it, if none is named.

        Raises
        ------
        TuneError
            If the engine's devices don't run such code.
        InputError
            If there is no such engine.
        """
        found = registry.for_target(target) if engine is None else registry.find(engine)
        if not found.matches(target):
            raise TuneError(
                f"engine: the devices of {found.name!r} are {found.device_type}, which doesn't run code for "
                f"{backend_of(target).device}; leave engine out, or target"
            )
        return cls(found.name, dict(options or {}), backend_of(target).page, target)

    @classmethod
    def parse(cls, text: str, target: Target) -> Devices:
        """The devices that a text is of."""
        engine, _, options = text.partition(" ")
        return cls.of(target, engine, json.loads(options) if options else {})

    def __str__(self) -> str:
        return " ".join([self.engine, *([json.dumps(self.options, sort_keys=True)] if self.options else [])])

    @property
    def rates(self) -> Rates:
        """How fast they are, about."""
        return registry.find(self.engine).rates

    def launch(self, mesh: Mesh) -> Workers:
        """Start a worker for each device of a mesh."""
        return launch(mesh, engine=self.engine, **self.options)
