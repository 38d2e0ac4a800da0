"""Starting Python with this process's way of finding modules, and no other for a moment.

`python -c` looks for modules in the current folder first, `python -m` too: whoever works in a folder that has a
`json.py` would have each worker run that file.
"""

from __future__ import annotations

import os
import sys

# Of the modules that it names only `sys` is imported before the path is the right one, and that is built in.
_PATH = "import sys; sys.argv[1:], sys.path[:] = sys.argv[2 + int(sys.argv[1]):], sys.argv[2:2 + int(sys.argv[1])]\n"


def module_path() -> list[str]:
    """Return `sys.path` as text; paths given as objects are there as well, and what is no path isn't."""
    return [os.fsdecode(entry) for entry in sys.path if isinstance(entry, str | os.PathLike)]


def interpreter(code: str, *arguments: str) -> list[str]:
    """Return the command that runs code in a fresh Python, which finds modules where this process does.

    Parameters
    ----------
    code : str
        Statements.
    *arguments : str
        What is in `sys.argv` there, from 1 on.
    """
    path = module_path()
    return [sys.executable, "-c", _PATH + code, str(len(path)), *path, *arguments]
