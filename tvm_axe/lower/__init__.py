"""From a scheduled function over whole tensors to the module that each device of a mesh runs.

`lower` takes four steps, one module each: *infer* where buffers live, *derive* what each stage communicates, *localize*
the stages to a device, *emit* a Relax module. `Executable` runs the result.
"""

from ..errors import LowerError
from . import vector_math as vector_math  # has every compilation for a CPU use it
from .executable import Executable
from .lowered import Lowered, MeshBuffer, Stage, lower

__all__ = ["Executable", "LowerError", "Lowered", "MeshBuffer", "Stage", "lower"]
