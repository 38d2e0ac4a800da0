"""Tile programs: kernels written tile by tile, that run on Hopper's tensor cores and on a CPU's vectors.

The words are for use inside ``@T.prim_func`` (`tvm_axe.tile.language` explains them); `compile` makes a program
callable; `lower`, `plan` and `explain` are the steps on the way.
"""

from tvm_axe.tile.assuming import assume
from tvm_axe.tile.atomics import atomic_add, atomic_cas, atomic_max, atomic_min
from tvm_axe.tile.build import compile, compile_all
from tvm_axe.tile.executables import TileExecutable
from tvm_axe.tile.flags import signal, wait
from tvm_axe.tile.knobs import knob, require
from tvm_axe.tile.language import (
    cast,
    cdiv,
    copy,
    fill,
    fragment,
    gemm,
    kernel,
    local,
    max,
    min,
    parallel,
    pipelined,
    scratch,
    shared,
    sum,
)
from tvm_axe.tile.lowering import explain, lower, plan
from tvm_axe.tile.mesh import mesh_tensor
from tvm_axe.tile.operators import operator
from tvm_axe.tile.order import argmax, argmin, cumsum, sort, top_k
from tvm_axe.tile.philox import random
from tvm_axe.tile.printing import print
from tvm_axe.tile.reading import read
from tvm_axe.tile.reducers import reduce
from tvm_axe.tile.sequences import read_sequence

__all__ = [
    "TileExecutable",
    "argmax",
    "argmin",
    "assume",
    "atomic_add",
    "atomic_cas",
    "atomic_max",
    "atomic_min",
    "cast",
    "cdiv",
    "compile",
    "compile_all",
    "copy",
    "cumsum",
    "explain",
    "fill",
    "fragment",
    "gemm",
    "kernel",
    "knob",
    "local",
    "lower",
    "max",
    "mesh_tensor",
    "min",
    "operator",
    "parallel",
    "pipelined",
    "plan",
    "print",
    "random",
    "read",
    "read_sequence",
    "reduce",
    "require",
    "scratch",
    "shared",
    "signal",
    "sort",
    "sum",
    "top_k",
    "wait",
]
