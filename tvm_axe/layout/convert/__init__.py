"""Layouts in the notations of others, both ways: `to_x` writes one there, `from_x` reads one from there.

What the other side can't say raises LayoutError, with what and why. Of the packages on the other side none is needed to
import this one: their objects are read by their attributes, and those that have to be made are made by importing the
package in the function that makes them. ::

    tile layout, index map            the compiler's, tvm.tirx
    placement, mesh                   Relax distributed tensors, PyTorch DTensor, JAX
    CuTe                              shape:stride, with a swizzle or without
    linear layout                     Triton's bases over bits

>>> from tvm_axe.layout import Layout, convert
>>> convert.to_cute(Layout.parse("S[(2, 4, 8) : (1, 2, 8)]"), (8, 8))
'((4,2),8):((2,1),8)'
"""

from tvm_axe.layout.convert.cute import from_cute, to_cute
from tvm_axe.layout.convert.index_map import from_index_map, to_index_map
from tvm_axe.layout.convert.jax import from_jax_mesh, from_partition_spec, to_jax_mesh, to_partition_spec
from tvm_axe.layout.convert.pytorch import from_torch_mesh, from_torch_placements, to_torch_mesh, to_torch_placements
from tvm_axe.layout.convert.relax import from_relax_mesh, from_relax_placement, to_relax_mesh, to_relax_placement
from tvm_axe.layout.convert.tile_layout import from_tile_layout, to_tile_layout
from tvm_axe.layout.convert.triton import from_triton, to_triton

__all__ = [
    "from_cute",
    "from_index_map",
    "from_jax_mesh",
    "from_partition_spec",
    "from_relax_mesh",
    "from_relax_placement",
    "from_tile_layout",
    "from_torch_mesh",
    "from_torch_placements",
    "from_triton",
    "to_cute",
    "to_index_map",
    "to_jax_mesh",
    "to_partition_spec",
    "to_relax_mesh",
    "to_relax_placement",
    "to_tile_layout",
    "to_torch_mesh",
    "to_torch_placements",
    "to_triton",
]
