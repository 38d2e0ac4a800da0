"""The engines by their names.

A new engine is a module that has an `Engine`, and a line here. What it needs, the compiler first of all, is imported
when it is asked for.

>>> names()
('processes', 'threads', 'mpi', 'ranks', 'cuda')
>>> find("threads").device_type
'cpu'
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tvm_axe.errors import InputError

if TYPE_CHECKING:
    from tvm.target import Target

    from tvm_axe.collective.engine import Engine

_HOMES: dict[str, str] = {}


def register(name: str, home: str) -> None:
    """Register an engine, ``"package.module:OBJECT"``, by its name.

    Raises
    ------
    InputError
        If another engine has that name.
    """
    if _HOMES.setdefault(name, home) != home:
        raise InputError(f"register: engine {name!r} is {_HOMES[name]} already, and can't be {home}")


register("processes", "tvm_axe.collective.local:PROCESSES")
register("threads", "tvm_axe.collective.local:THREADS")
register("mpi", "tvm_axe.collective.mpi:MPI")
register("ranks", "tvm_axe.collective.ranks_engine:RANKS")
register("cuda", "tvm_axe.collective.cuda.engine:CUDA")


def names() -> tuple[str, ...]:
    """The names of the engines, the default one first."""
    return tuple(_HOMES)


def for_target(target: Target) -> Engine:
    """Return the first engine on whose devices a target's code runs.

    Raises
    ------
    InputError
        If there is none.
    """
    for name in names():
        found = find(name)
        if found.matches(target):
            return found
    raise InputError(f"launch: no engine has devices for {target}; there are {', '.join(names())}")


def find(name: str) -> Engine:
    """Return the engine of that name.

    Raises
    ------
    InputError
        If there is none.
    """
    if name not in _HOMES:
        raise InputError(f"launch: unknown engine {name!r}; valid: {', '.join(names())}")
    module, _, attribute = _HOMES[name].partition(":")
    engine: Engine = getattr(import_module(module), attribute)
    return engine
