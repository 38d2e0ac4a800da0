"""Tile programs on a CPU: vector micro-kernels over packed panels, blocks in parallel threads.

A block of the grid is an iteration of a parallel loop, its tiles are buffers that stay in the core's cache, and every
word of the language is a nest of loops over vectors. `decide` decides where tiles live and how products are computed,
`lower` writes the function.
"""

from tvm_axe.tile.targets.llvm.backend import BACKEND
from tvm_axe.tile.targets.llvm.emit import lower
from tvm_axe.tile.targets.llvm.plan import CpuPlan, decide

__all__ = ["BACKEND", "CpuPlan", "decide", "lower"]
