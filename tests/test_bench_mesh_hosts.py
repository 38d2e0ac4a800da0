"""The script that measures collectives between hosts: our side as a job of ranks, and what it says without GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tvm_axe.collective.cuda import driver
from tvm_axe.errors import InputError

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_mesh_hosts.py"


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize(
    ("per_host", "forms"),
    [((), ["tp=2 along tp"]), (("--per-host", "2"), ["dp=2,tp=2 along dp", "tp=4 along tp"])],
)
def test_our_side_between_ranks(per_host: tuple[str, ...], forms: list[str]) -> None:
    done = ran("--engine", "ranks", *per_host, "--sizes", "1", "--rounds", "1", "--reps", "2", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert [row["name"] for row in rows] == [
        f"{name} between hosts, {form}, 1 MiB" for form in forms for name in ("all_reduce", "all_gather")
    ]
    assert all(row["ours_ms"] > 0 and row["peer"] is row["ratio"] is None for row in rows)


def test_without_gpus_it_says_what_is_missing() -> None:
    try:
        if driver.gpus() > 1:
            pytest.skip("there are GPUs")
    except InputError:
        pass  # which is what it is to say
    done = ran()
    assert done.returncode == 1 and not done.stdout
    assert "nothing is measured: " in done.stderr and "--engine ranks" in done.stderr
