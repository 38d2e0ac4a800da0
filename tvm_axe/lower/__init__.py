"""From a scheduled function over whole tensors to the module that each device of a mesh runs.

`lower` takes four steps, one module each: *infer* where buffers live, *derive* what each stage communicates, *localize*
the stages to a device, *emit* a Relax module. `tvm_axe.executable.Executable` runs the result.
"""

from tvm_axe.errors import LowerError
from tvm_axe.lower.lowered import Lowered, MeshBuffer, Stage, lower

__all__ = ["LowerError", "Lowered", "MeshBuffer", "Stage", "lower"]
