"""What a program says of its collectives: the algorithm at their size, by which table, and where none is chosen."""

from __future__ import annotations

import json

import pytest

import tvm_axe as axe
from tvm_axe.collective import choice
from tvm_axe.collective.algorithms import Algorithm
from tvm_axe.layout import Mesh
from tvm_axe.lower.algorithms import described
from tvm_axe.lower.lowered import Lowered, lower
from tvm_axe.programs import PROGRAMS

TABLE = choice.Table({"all_reduce": [(128, Algorithm.ONE_SHOT), (None, Algorithm.TWO_SHOT)]}, "this test")


def layers(schedule: str = "MM-beside(AR)-C") -> Lowered:
    sch = PROGRAMS["layers"](Mesh({"dp": 2}), "uneven").schedule(schedule)
    return lower(sch.mod["main"], sch.mesh)


@pytest.mark.parametrize("schedule", ["MM-AR-C", "MM-beside(AR)-C"])
def test_the_size_decides(schedule: str) -> None:
    """Sums of 9 x 3 and of 7 x 9 elements."""
    lines = described(layers(schedule), TABLE, lambda axis: "")
    assert sorted(lines[:-1]) == [
        "sum1: all_reduce of 252 bytes over dp: two-shot (one-shot to 128 B, then two-shot)",
        "sum2: all_reduce of 108 bytes over dp: one-shot (one-shot to 128 B, then two-shot)",
    ]
    assert lines[-1] == "by the table from this test"


def test_apart_nothing_is_chosen() -> None:
    lines = described(layers(), TABLE, lambda axis: "through the host's memory, in rounds" * (axis == "dp"))
    assert all("through the host's memory, in rounds" in line for line in lines[:-1])


def test_a_program_for_gpus_says_so_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    program = PROGRAMS["layers"](Mesh({"dp": 2}))
    exe = axe.compile(program.schedule("MM-AR-C"), target="cuda:sm_90a", work_dir=None)
    text = exe.show()
    assert "\ncollectives\n  sum2: all_reduce of " in text and "by the table from " in text
    fused = PROGRAMS["adam"](Mesh({"dp": 2})).schedule("fuse(RS-C-AG)")
    assert "\ncollectives\n" not in axe.compile(fused, target="cuda:sm_90a", work_dir=None).show()
    assert "\ncollectives\n" not in axe.compile(program.schedule("MM-AR-C"), work_dir=None).show()


def test_a_measured_table_says_when(tmp_path: object) -> None:
    machine = choice.Machine("NVIDIA H200", 2, "NVLink")
    folder = tmp_path / choice.FOLDER  # type: ignore[operator]
    folder.mkdir()
    told = {**TABLE.encode(), "source": "what was measured here", "origin": {"date": "2026-11-24T13:00:00+00:00"}}
    (folder / machine.file).write_text(json.dumps(told))
    found = choice.read(machine, tmp_path)  # type: ignore[arg-type]
    assert found is not None and found.source == "what was measured here on 2026-11-24T13:00:00+00:00"
    assert "from what was measured here on 2026-11-24" in described(layers(), found, lambda axis: "")[-1]
