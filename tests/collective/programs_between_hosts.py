"""Run as each rank of a job by test_programs_between_hosts.py: programs on meshes that cross hosts, near float64.

Told the sizes of the mesh, and then of how many schedules of each program, the last ones, rank 0 says what it has
compared.
"""

import os
import sys

import numpy as np

import tvm_axe as axe
from tvm_axe.layout import Mesh
from tvm_axe.programs import PROGRAMS

SIZES, COUNT = tuple(map(int, sys.argv[1].split(","))), int(sys.argv[2])
ENGINE = os.environ["TVM_AXE_TEST_ENGINE"]
TARGET = "cuda" if ENGINE == "cuda" else "llvm"


def mesh_of(axes: tuple[str, ...]) -> Mesh:
    """One of these axes, and where sizes are fewer or more, of one device or of an axis that isn't the program's."""
    return Mesh(dict(zip((*axes, "other"), (*SIZES, *[1] * (len(axes) - len(SIZES))))))


for name, builder in PROGRAMS.items():
    program = builder(mesh_of(builder.axes), "test")
    arrays = program.inputs(np.random.default_rng())
    exact = program.reference(*arrays)
    with axe.launch(program.mesh, engine=ENGINE) as workers:  # other ranks serve rank 0's launches, and never return
        for schedule in list(program.schedules)[-COUNT:]:
            exe = axe.compile(program.schedule(schedule), target=TARGET, work_dir=None)
            exe.run(workers, *(np.full_like(each, np.nan) if each.dtype.kind == "f" else each for each in arrays))
            outputs = exe.run(workers, *arrays)
            error = program.error(outputs if isinstance(outputs, tuple) else (outputs,), exact)
            print(name, schedule, error, "right" if error <= program.tolerance else "wrong", flush=True)
