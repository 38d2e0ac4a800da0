"""What `axe.compile` returns: one type, whatever was compiled and for whom.

`Executable` is the interface. Behind it are a function or a model on a mesh (`tvm_axe.executable.mesh`), and a function
or a model on one device (`tvm_axe.executable.alone`); `tvm_axe.executable.saved` writes and reads all of them.
"""

from tvm_axe.executable.base import Executable

__all__ = ["Executable"]
