"""The engines and meshes that the collective tests run on.

In rank 0 of an MPI job (`TVM_AXE_TEST_RANKS`, see test_mpi.py) they are the engine `mpi` and the meshes of that many
devices. A job has one launch at a time, so workers are launched for each test there; it takes a tenth of a second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tvm_axe.collective import Workers, launch
from tvm_axe.layout import Mesh

RANKS = int(os.environ.get("TVM_AXE_TEST_RANKS", "0"))
ENGINES = ["mpi"] if RANKS else ["processes", "threads"]
MESHES = [{"tp": 1}, {"tp": 2}, {"tp": 3}, {"tp": 4}, {"dp": 2, "tp": 2}]
SCOPE = "function" if RANKS else "module"


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope=SCOPE, params=[mesh for mesh in MESHES if RANKS in (0, Mesh(mesh).size)], ids=str)
def workers(request: pytest.FixtureRequest, engine: str) -> Iterator[Workers]:
    """Workers of each engine on each mesh."""
    with launch(Mesh(request.param), engine=engine) as workers:
        yield workers


@pytest.fixture(scope="module")
def two() -> Mesh:
    """A mesh of two devices."""
    if RANKS not in (0, 2):
        pytest.skip(f"this job has {RANKS} ranks, not 2")
    return Mesh({"tp": 2})


@pytest.fixture(scope=SCOPE)
def pair(two: Mesh, engine: str) -> Iterator[Workers]:
    """Two workers of each engine."""
    with launch(two, engine=engine) as workers:
        yield workers
