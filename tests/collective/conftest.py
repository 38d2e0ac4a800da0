"""The engines and meshes that the collective tests run on.

Besides those that start workers on the host's cores there are, by `WHERE`, devices with memory of their own:
``apart``, whose memory is the host's (apart.py), and ``cuda``, where GPUs are, one for each device or, where there are
fewer, each for several; as processes and, ``-threads``, as threads; of ``-meeting`` the devices wait for each other,
not their workers; those of ``-staged`` don't see each other's memory.

In rank 0 of a job (`TVM_AXE_TEST_RANKS`, see test_mpi.py and test_ranked.py) they are the engine `mpi`, or what
`TVM_AXE_TEST_ENGINE` says, and the meshes of that many devices. A job has one launch at a time, so workers are launched
for each test there; it takes a tenth of a second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from apart import launched
from two_devices import nothing_left, place  # noqa: F401, fixtures of all tests here

from tvm_axe.collective import Workers
from tvm_axe.layout import Mesh

RANKS = int(os.environ.get("TVM_AXE_TEST_RANKS", "0"))
ENGINES = [os.environ.get("TVM_AXE_TEST_ENGINE", "mpi")] if RANKS else ["processes", "threads"]
_GPUS = [pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "cuda-threads", "cuda-meeting", "cuda-staged")]
WHERE = ENGINES if RANKS else [*ENGINES, "apart", "apart-threads", "apart-staged", "apart-staged-threads", *_GPUS]
MESHES = [{"tp": 1}, {"tp": 2}, {"tp": 3}, {"tp": 4}, {"dp": 2, "tp": 2}]
SCOPE = "function" if RANKS else "module"


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=WHERE)
def where(request: pytest.FixtureRequest) -> str:
    if request.param.startswith("cuda"):
        request.getfixturevalue("cuda")
    return request.param


@pytest.fixture(scope=SCOPE, params=[mesh for mesh in MESHES if RANKS in (0, Mesh(mesh).size)], ids=str)
def workers(request: pytest.FixtureRequest, where: str) -> Iterator[Workers]:
    """Workers of each engine on each mesh."""
    with launched(Mesh(request.param), where) as workers:
        yield workers


@pytest.fixture(scope="module")
def two() -> Mesh:
    """A mesh of two devices."""
    if RANKS not in (0, 2):
        pytest.skip(f"this job has {RANKS} ranks, not 2")
    return Mesh({"tp": 2})


@pytest.fixture(scope=SCOPE)
def pair(two: Mesh, where: str) -> Iterator[Workers]:
    """Two workers of each engine."""
    with launched(two, where) as workers:
        yield workers
