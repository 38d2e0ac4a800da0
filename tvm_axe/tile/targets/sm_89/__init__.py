"""The back end sm_89: Ada's GPUs, the largest of which in servers is the L40S. Nobody has run tile programs on one.

They are planned as for sm_80, with less shared memory and fewer threads at once, and multiply 8-bit floats by mma.
Source: NVIDIA, "NVIDIA Ada GPU Architecture", and the CUDA C++ Programming Guide, "Technical Specifications per Compute
Capability".
"""

from tvm_axe.machines import Gpu
from tvm_axe.tile.targets.cuda.backend import CudaTileBackend

GPU = Gpu(
    processors=142,
    shared_bytes=99 << 10,
    tensor_cores="mma",
    float8=True,
    dependent_launch=False,
    resident_threads=1536,
    resident_blocks=24,
)

BACKEND = CudaTileBackend(name="sm_89", gpu=GPU, untried=True)
