"""300 fixed cases of scripts/fuzz_schedules.py: what isn't refused is right."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "fuzz_schedules.py"
COUNT = 300
BUGS = ("wrong with annotations ignored", "wrong on the mesh", "raw error", "crashed or hung")


@pytest.mark.parametrize("first", range(0, COUNT, 60))
def test_no_schedule_is_wrong(first):
    command = [sys.executable, str(SCRIPT), "--seed", str(first), "--count", "60", "--json", "--minimize", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    records = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(records) == 60, done.stderr[-3000:]
    bugs = [record for record in records if record["kind"] in BUGS]
    assert not bugs, "\n\n".join(
        f"seed {bug['seed']}: {bug['kind']}: {bug['reason']}\n{bug['small'] or bug['case']}\n{bug['detail'][-1000:]}"
        for bug in bugs
    )
    assert done.returncode == 0
    # The draw hasn't run dry: a good part of the schedules runs.
    assert Counter(record["kind"] for record in records)["right"] >= 20
