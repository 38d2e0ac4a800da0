"""The back end sm_80: Ampere's data-centre GPUs, the largest of which is the A100.

Tile programs run in the uniform model: every warp loads by cp.async and multiplies by mma. Source: NVIDIA, "A100 Tensor
Core GPU Architecture", and the CUDA C++ Programming Guide, "Compute Capability 8.x".
"""

from tvm_axe.machines import Gpu
from tvm_axe.tile.targets.cuda.backend import CudaTileBackend

GPU = Gpu(
    processors=108,
    shared_bytes=163 << 10,
    tensor_cores="mma",
    float8=False,
    dependent_launch=False,
)

BACKEND = CudaTileBackend(name="sm_80", gpu=GPU)
