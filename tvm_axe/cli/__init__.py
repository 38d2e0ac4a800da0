"""`tvm-axe`: a module a command, each with its `COMMAND`.

Beside them, `command` says what a command is, `given` has the arguments that several share, `inputs` reads the files
that they name, and `entry` lists and runs them.
"""

from tvm_axe.cli.entry import main

__all__ = ["main"]
