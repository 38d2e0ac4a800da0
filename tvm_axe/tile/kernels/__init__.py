"""Kernels as tile programs, each with its tunable parameters declared.

>>> from tvm.target import Target
>>> problem = {"m": 4096, "n": 4096, "k": 4096, "dtype": "bfloat16"}
>>> hopper = Target({"kind": "cuda", "arch": "sm_90a"})
>>> [KERNELS["matmul"].parameters(hopper, problem)[name][0] for name in ("block_m", "block_n", "block_k")]
[128, 256, 64]
>>> recipe = KERNELS["matmul"].recipe(hopper, problem, block_n=128)
>>> recipe.inputs, recipe.outputs, len(recipe.programs)
(('A', 'B'), ('C',), 1)
"""

from tvm_axe.tile.kernels.block_sparse import lists_of_queries
from tvm_axe.tile.kernels.kernel import Expected, Kernel, Recipe
from tvm_axe.tile.kernels.reduce_norm import REDUCE_NORM
from tvm_axe.tile.kernels.registry import KERNELS, compiles, matmul_for

__all__ = ["KERNELS", "REDUCE_NORM", "Expected", "Kernel", "Recipe", "compiles", "lists_of_queries", "matmul_for"]
