"""scripts/record_lowering.py: what it records is the same in every process, and a comparison names what differs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "record_lowering.py"
# A schedule, what a rule refuses, a kernel on a GPU and a design space.
FEW = "schedules/norm/columns/tp=2/even|overlap-fuse-3/tp=2/uneven|kernels/transpose/0/sm_80|spaces/column-sums/v3-1"


def called(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The hashes of two runs, whose sets have orders of their own, and the folder of the first one's texts."""
    folder = tmp_path_factory.mktemp("recorded")
    for seed in ("1", "2"):
        arguments = (folder / f"{seed}.json", "--keep", folder / seed, "--processes", 1, "--only", FEW)
        done = called(*arguments, PYTHONHASHSEED=seed)
        assert done.returncode == 0, done.stderr
    return folder


def test_two_runs_agree(recorded):
    done = called("--compare", recorded / "1.json", recorded / "2.json")
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("0 differences")


def test_what_is_recorded(recorded):
    hashes = json.loads((recorded / "1.json").read_text(encoding="utf-8"))
    assert [*hashes] == sorted(hashes)
    assert {name.split("/")[0] for name in hashes} == {"schedules", "kernels", "spaces"}
    assert all(len(value.removeprefix("refused:")) == 64 for value in hashes.values())
    refused = [name for name, value in hashes.items() if value.startswith("refused:")]
    assert refused == ["schedules/block/overlap-fuse-3/tp=2/uneven"]
    assert "3 chunks do not divide" in (recorded / "1" / f"{refused[0]}.txt").read_text(encoding="utf-8")


def test_texts_are_kept_and_name_nothing_of_the_machine(recorded):
    hashes = json.loads((recorded / "1.json").read_text(encoding="utf-8"))
    texts = {name: (recorded / "1" / f"{name}.txt").read_text(encoding="utf-8") for name in hashes}
    assert "__global__" in texts["kernels/transpose/0/sm_80/code"]
    assert "reduce_scatter" in texts["schedules/norm/columns/tp=2/even/module"]
    assert not any(str(SCRIPT.parents[1]) in text for text in texts.values())


def test_a_comparison_names_what_differs_appeared_and_vanished(tmp_path):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(json.dumps({"same": "1", "changed": "1", "gone": "1"}), encoding="utf-8")
    after.write_text(json.dumps({"same": "1", "changed": "refused:1", "new": "1"}), encoding="utf-8")
    done = called("--compare", before, after)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "differs   changed",
        "vanished  gone",
        "appeared  new",
        "3 differences; 3 texts before, 3 after",
    ]


def test_a_file_is_needed():
    done = called()
    assert done.returncode == 2
    assert "name a file to write, or --compare two" in done.stderr
