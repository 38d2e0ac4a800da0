"""The back end gfx942: AMD's CDNA 3, the largest of which is the MI300X. Nobody has run tile programs on one.

Upstream's LLVM makes the code, so that it needs neither ROCm nor a GPU to compile. Programs are planned in CUDA's
uniform model, with its warps as halves of wavefronts: products are multiply-adds, and no loads run ahead. Source: AMD,
"AMD CDNA 3 Architecture" (white paper), and LLVM, "User Guide for AMDGPU Backend".
"""

from tvm_axe.machines import Gpu
from tvm_axe.tile.targets.gfx942.backend import AmdTileBackend

GPU = Gpu(
    processors=304,
    shared_bytes=64 << 10,
    tensor_cores="none",  # its own multiply by wavefronts (mfma), of which nothing here is written
    float8=False,  # its 8-bit floats have no negative zero
    dependent_launch=False,
    asynchronous_copies=False,
    block_threads=256,  # what upstream tells LLVM of every kernel; the GPU runs 1024
)

BACKEND = AmdTileBackend(
    name="gfx942", device="rocm", alignment=16, rules="cuda", timeout=60.0, joins_blocks=False, untried=True, gpu=GPU
)
