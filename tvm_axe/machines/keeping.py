"""What is compiled is kept on disk, so that a second start of a program compiles nothing: whether, where, by what name.

An artifact's name is the hash of what it is made of (`tvm_axe.machines.cache`): the program without the places in files
where its text stood, what is asked for, and `sources`: all of this package and the versions of the compiler. So an
upgrade, or an edit of the package, makes everything anew, and nothing is ever out of date.

``TVM_AXE_KEEP=0`` keeps nothing, and takes nothing from there.
"""

from __future__ import annotations

import functools
import logging
import os
from importlib import metadata
from pathlib import Path

from tvm.ir import IRModule
from tvm.tirx import PrimFunc

import tvm_axe
from tvm_axe import _tvm
from tvm_axe.errors import InputError
from tvm_axe.machines.cache import Cache, key

__all__ = ["KEEP", "content", "keeps", "sources", "store"]

KEEP = "TVM_AXE_KEEP"
"""Environment variable: ``0`` if nothing that is compiled is to be kept, ``1`` or nothing otherwise."""


_LOG = logging.getLogger("tvm_axe")


def keeps() -> bool:
    """Whether what is compiled is kept.

    Raises
    ------
    InputError
        If the environment variable is neither 0 nor 1.
    """
    value = os.environ.get(KEEP) or "1"
    if value not in ("0", "1"):
        raise InputError(f"{KEEP} is {value!r}; valid are 0, to keep nothing that is compiled, and 1")
    return value == "1"


def content(program: IRModule | PrimFunc) -> str | None:
    """All that a program says, but for where its text stood; None of what can't be written, as code of others is."""
    try:
        return _tvm.content(program)
    except _tvm.UPSTREAM_ERRORS as error:
        _LOG.info("a program isn't kept, which can't be written: %s", str(error).partition("\n")[0])
        return None


def store() -> Cache | None:
    """Where what is compiled is kept; None if it isn't."""
    return Cache() if keeps() else None


@functools.cache
def sources() -> str:
    """What makes code, by its hash: the files of this package, and the versions of the compiler."""
    home = Path(tvm_axe.__file__).parent
    files = sorted(home.rglob("*.py"))
    versions = [f"{name} {metadata.version(name)}" for name in ("apache-tvm", "apache-tvm-ffi")]
    return key(*versions, *(part for file in files for part in (str(file.relative_to(home)), file.read_bytes())))
