"""The back end cuda: any other GPU of CUDA's. What upstream compiles runs there; tile programs don't."""

from tvm_axe.tile.targets.cuda.backend import CudaBackend
from tvm_axe.tile.targets.sm_80 import GPU

# Of a GPU that nobody has described, the oldest one that was.
BACKEND = CudaBackend(name="cuda", gpu=GPU)
