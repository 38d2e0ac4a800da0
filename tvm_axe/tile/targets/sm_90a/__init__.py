"""The back end sm_90a: Hopper's GPUs, the largest of which is the H100 (SXM), with what later ones don't have.

Tile programs run in the specialized model where they can: a producer warp loads by TMA what warpgroups multiply by
wgmma; the others in the uniform one. Source: NVIDIA, "H100 Tensor Core GPU Architecture", and the CUDA C++ Programming
Guide, "Compute Capability 9.0".
"""

from tvm_axe.machines import Gpu
from tvm_axe.tile.targets.cuda.backend import CudaTileBackend

GPU = Gpu(
    processors=132,
    shared_bytes=227 << 10,
    tensor_cores="wgmma",
    float8=True,
    dependent_launch=True,
)

BACKEND = CudaTileBackend(name="sm_90a", gpu=GPU)
