"""What lives where: the device mesh, and layouts over named axes.

`Layout` and `ComposeLayout` are the layouts and their algebra; `plan_redistribution` plans the way from one to another
on a mesh; `show`, `explain`, `bank_conflicts` and `sectors_touched` say what one means. Layouts of known hardware are
in `tvm_axe.layout.named`, conversions to and from other systems' in `tvm_axe.layout.convert`. Nothing here imports the
compiler, unless a layout is given one of its expressions.
"""

from tvm_axe.errors import LayoutError
from tvm_axe.layout.arrays import memory_size, pack, unpack
from tvm_axe.layout.axes import Coordinate
from tvm_axe.layout.draw import show
from tvm_axe.layout.explaining import explain
from tvm_axe.layout.iters import Iter
from tvm_axe.layout.layout import Layout
from tvm_axe.layout.memory import Access, bank_conflicts, sectors_touched
from tvm_axe.layout.mesh import Mesh
from tvm_axe.layout.picture import Picture
from tvm_axe.layout.placement import Placement
from tvm_axe.layout.redistributing import Link, Plan, plan_redistribution
from tvm_axe.layout.swizzle import ComposeLayout

__all__ = [
    "Access",
    "ComposeLayout",
    "Coordinate",
    "Iter",
    "Layout",
    "LayoutError",
    "Link",
    "Mesh",
    "Picture",
    "Placement",
    "Plan",
    "bank_conflicts",
    "explain",
    "memory_size",
    "pack",
    "plan_redistribution",
    "sectors_touched",
    "show",
    "unpack",
]
