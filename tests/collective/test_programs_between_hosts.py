"""The programs of the package on four ranks of two hosts, along axes that cross them and axes that don't."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import ended, start

from tvm_axe.collective.cuda import driver
from tvm_axe.programs import PROGRAMS

SCRIPT = Path(__file__).parent / "programs_between_hosts.py"
RANKS, HOSTS_OF = 4, 2


def judge(engine: str, sizes: str, count: int) -> None:
    (output, errors, status), *rest = ended(
        start(RANKS, str(SCRIPT), sizes, str(count), hosts_of=HOSTS_OF, engine=engine), 900
    )
    assert status == 0, output + errors
    said = [line.split() for line in output.splitlines()]
    assert {line[0] for line in said} == set(PROGRAMS) and {line[-1] for line in said} == {"right"}, output
    assert [status for *_, status in rest] == [0] * (RANKS - 1), rest


@pytest.mark.parametrize("sizes", ["2,2", "4"])
def test_last_schedule(sizes: str) -> None:
    judge("ranks", sizes, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", ["2,2", "4"])
def test_every_schedule_on_gpus(cuda: object, sizes: str) -> None:
    """By NCCL between hosts, within one by what its GPUs see of each other."""
    if driver.gpus() < RANKS:
        pytest.skip(f"each of {RANKS} ranks needs a GPU, and there are {driver.gpus()}")
    judge("cuda", sizes, 9)
