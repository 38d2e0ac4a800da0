"""The back end sm_100a: Blackwell's data-centre GPUs, such as the B200. Nobody has run tile programs on one.

They are planned in the uniform model, by cp.async and mma, which every GPU since sm_80 has: Blackwell has no wgmma, and
nothing here uses what took its place (tcgen05). Source: NVIDIA, CUDA C++ Programming Guide, "Technical Specifications
per Compute Capability", and "Blackwell Tuning Guide".
"""

from tvm_axe.machines import Gpu
from tvm_axe.tile.targets.cuda.backend import CudaTileBackend

GPU = Gpu(
    processors=148,
    shared_bytes=227 << 10,
    tensor_cores="mma",
    float8=True,
    dependent_launch=True,
)

BACKEND = CudaTileBackend(name="sm_100a", gpu=GPU, untried=True)
