"""The distributed programs of CoCoNet and those that go on from there, each with all of its schedules.

>>> from tvm_axe.layout import Mesh
>>> adam = PROGRAMS["adam"](Mesh({"dp": 2}))
>>> list(adam.schedules)
['AR-C', 'RS-C-AG', 'fuse(RS-C-AG)']
>>> sch = adam.schedule("fuse(RS-C-AG)")  # ready for axe.compile

(Jangda et al., "Breaking the computation and communication abstraction barrier in distributed machine learning
workloads", ASPLOS 2022.)
"""

from tvm_axe.programs.bucket import Bucket
from tvm_axe.programs.moe import route
from tvm_axe.programs.moe_ragged import Ranges, ranges
from tvm_axe.programs.program import SIZES, DistributedProgram, ProgramFactory
from tvm_axe.programs.random import dropout, dropped, philox
from tvm_axe.programs.registry import PROGRAMS

__all__ = [
    "PROGRAMS",
    "SIZES",
    "Bucket",
    "DistributedProgram",
    "ProgramFactory",
    "Ranges",
    "dropout",
    "dropped",
    "philox",
    "ranges",
    "route",
]
