"""Refuses a compiler that the package wasn't written against, before anything imports it.

It stands apart from `_tvm`, which imports the compiler: a wrong one must be met by this message, not by whichever
of its names has moved.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import metadata

__all__ = ["check_versions"]

# Distribution, its pin in setup.cfg, the versions which that pin admits. With apache-tvm-ffi 0.1.15, writing IR as
# JSON crashes the process, and every MetaSchedule database with it.
PINS = (
    ("apache-tvm", "==0.27.0.post1", re.compile(r"0\.27\.0\.post1(\+.*)?")),
    ("apache-tvm-ffi", ">=0.1.14.post0,<0.1.15", re.compile(r"0\.1\.14\.post\d+(\+.*)?")),
)


def check_versions(installed: Callable[[str], str] = metadata.version) -> None:
    """Check that the installed compiler is the one that the package was written against.

    Parameters
    ----------
    installed
        From a distribution's name to its version; raises `importlib.metadata.PackageNotFoundError` where there is none.

    Raises
    ------
    ImportError
        With the right pins, when a distribution is missing or has another version.
    """
    wrong = []
    for name, pin, admitted in PINS:
        try:
            version = installed(name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{name} is not installed (needed: {name}{pin})")
        else:
            if not admitted.fullmatch(version):
                wrong.append(f"{name} {version} is installed (needed: {name}{pin})")
    if wrong:
        pins = " ".join(f"'{name}{pin}'" for name, pin, _ in PINS)
        raise ImportError(f"tvm_axe: {'; '.join(wrong)}. Install the right versions with: pip install {pins}")
