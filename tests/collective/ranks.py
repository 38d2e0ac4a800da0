"""Run under mpiexec by test_mpi.py: the tests named on the command line, on rank 0 of a job."""

import os
import sys

import pytest

from tvm_axe.collective import launch
from tvm_axe.layout import Mesh

# On the other ranks this serves rank 0's launches, whatever their axes, and never returns.
launch(Mesh({"tp": int(os.environ["TVM_AXE_TEST_RANKS"])}), engine="mpi").close()
sys.exit(pytest.main(["-rs", *sys.argv[1:]]))
