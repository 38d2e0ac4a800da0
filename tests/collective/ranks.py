"""Run as each rank of a job by test_mpi.py and test_ranked.py: the tests named on the command line, on rank 0."""

import os
import sys

from tvm_axe.processes import leave_out_torch


def main() -> None:
    """On the other ranks serve rank 0's launches, whatever their axes, and never return."""
    import pytest
    from apart import launched

    from tvm_axe.collective import registry
    from tvm_axe.layout import Mesh

    registry.register("apart", "apart:APART")  # what was measured on it asks for its rates
    mesh = Mesh({"tp": int(os.environ["TVM_AXE_TEST_RANKS"])})
    launched(mesh, os.environ.get("TVM_AXE_TEST_ENGINE", "mpi")).close()
    sys.exit(pytest.main(["-rs", *sys.argv[1:]]))


leave_out_torch()
main()
