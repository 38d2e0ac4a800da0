"""What `axe.compile` returns: one type, whatever was compiled and for whom.

`Executable` is the interface. Behind it are a function or a model on a mesh (`tvm_axe.executable.mesh`), and a function
or a model on one device (`tvm_axe.executable.alone`); `tvm_axe.executable.saved` writes and reads all of them. A
`Session` is a model with its weights in place; `read_safetensors` reads these from files.
"""

from tvm_axe.executable.base import Executable
from tvm_axe.executable.handles import Handle
from tvm_axe.executable.safetensors import read_safetensors, write_safetensors
from tvm_axe.executable.session import Session

__all__ = ["Executable", "Handle", "Session", "read_safetensors", "write_safetensors"]
