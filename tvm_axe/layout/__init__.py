"""What lives where: the device mesh, and layouts over named axes."""

from tvm_axe.errors import LayoutError
from tvm_axe.layout.arrays import memory_size, pack, unpack
from tvm_axe.layout.axes import Coordinate
from tvm_axe.layout.iters import Iter
from tvm_axe.layout.layout import Layout
from tvm_axe.layout.mesh import Mesh
from tvm_axe.layout.swizzle import ComposeLayout

__all__ = ["ComposeLayout", "Coordinate", "Iter", "Layout", "LayoutError", "Mesh", "memory_size", "pack", "unpack"]
