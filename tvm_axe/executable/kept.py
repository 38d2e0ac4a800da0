"""Executables that were compiled before, on disk: a second start of a program neither lowers, searches nor compiles.

What is kept is what `Executable.save` writes, by a name that is the hash of all that it depends on: the program, its
mesh and target, what is asked for, and the records that could serve it. Weights that a model has brought along aren't
in there, as nothing that is compiled depends on them. Machine code is kept beside it, by what it is made of
(`tvm_axe.machines.keeping`).
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tvm
from tvm import s_tir, tirx
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.errors import InputError
from tvm_axe.executable.base import Executable
from tvm_axe.executable.saved import read_archive, write_archive
from tvm_axe.layout import Mesh
from tvm_axe.machines import backend_of
from tvm_axe.machines.cache import Cache, key
from tvm_axe.machines.keeping import content, sources
from tvm_axe.records import records_key
from tvm_axe.relax.packing import without_weights
from tvm_axe.schedule import Schedule

__all__ = ["MOST", "get_or_compile", "name_of"]

MOST = 64 << 20
"""Bytes of a program's constants, and of what is kept of it, above which it isn't."""

_LOG = logging.getLogger("tvm_axe")


class _Unwritten(Exception):
    """What was compiled holds what can't be written."""


def name_of(
    program: Schedule | s_tir.Schedule | tirx.PrimFunc | tvm.IRModule,
    mesh: Mesh | None,
    target: Target,
    work_dir: str | Path | None,
    options: Mapping[str, Any],
) -> str | None:
    """The name of what is compiled of a program; None if it isn't to be kept.

    That is so of what can't be written, such as code of other compilers; of large constants; of a back end that isn't
    this package's, of which nobody knows when it changes; and under a ``PassContext`` of the user's own, which may hold
    anything.

    Parameters
    ----------
    program, mesh, work_dir
        As `tvm_axe.compile` takes them.
    target : Target
        Resolved.
    options : mapping
        What else is asked for, by name: what ``repr`` says all of.
    """
    module = program.mod if isinstance(program, Schedule | s_tir.Schedule) else program
    if not isinstance(module, tirx.PrimFunc | tvm.IRModule):
        return None
    own = type(backend_of(target)).__module__.startswith("tvm_axe.")
    if not own or not _tvm.is_plain_context():
        return None
    if isinstance(module, tvm.IRModule):
        module = without_weights(module)
        if _tvm.constant_bytes(module) > MOST or "external_mods" in (module.attrs or {}):
            return None
    text = content(module)
    if text is None:
        return None
    records = "" if work_dir is None else records_key(target, Path(work_dir))
    said = [f"{name}={value!r}" for name, value in sorted(options.items())]
    return key("executable", text, str(mesh), str(target), records, sources(), *said)


def get_or_compile(store: Cache, name: str, program: object, compile_it: Callable[[], Executable]) -> Executable:
    """What was compiled before under a name; or compile it, and keep it.

    Whoever else compiles the same now, another rank such as, is waited for.

    Parameters
    ----------
    store : Cache
        Where it is kept.
    name : str
        What `name_of` says.
    program
        The program, of which a model's weights are taken.
    compile_it : callable
        What compiles it; what that raises is raised.
    """
    made: list[Executable] = []

    def make() -> bytes:
        made.append(compile_it())
        file = io.BytesIO()
        try:
            write_archive(made[0], file, has_weights=False)
        except _tvm.UPSTREAM_ERRORS as error:
            raise _Unwritten from error
        return file.getvalue()

    try:
        contents = store.get_or_make(name, make, MOST)
    except _Unwritten as error:
        _LOG.info("%s isn't kept: %s", made[0].name, error.__cause__)
    if made:
        return made[0]
    model = program if isinstance(program, tvm.IRModule) else None
    try:
        return read_archive(io.BytesIO(contents), store.folder / name, model, store)
    except InputError as error:
        _LOG.warning("%s; it is compiled again", error)
        store.drop(name)
        return compile_it()
