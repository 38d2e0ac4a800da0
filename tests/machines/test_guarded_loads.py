"""On a CPU what a condition in a condition loads is loaded only where the outer one holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import numpy as np
from tvm.script import tirx as T

import tvm_axe as axe

FAR = 1 << 26  # elements beyond a table's end: nothing is there


@T.prim_func(s_tir=True)
def chosen(count: T.Buffer((1,), "int32"), place: T.Buffer((5,), "int32"), table: T.Buffer((5,), "int32"),
           X: T.Buffer((5, 6), "float32"), Y: T.Buffer((5, 6), "float32")):
    for r, h in T.grid(5, 6):
        with T.sblock("chosen"):
            vr, vh = T.axis.remap("SS", [r, h])
            Y[vr, vh] = {value}


exe = axe.compile(chosen, target="llvm", work_dir=None)
rng = np.random.default_rng()
for count in range(1, 6):
    table, x = rng.integers(0, 2, 5).astype("int32"), rng.random((5, 6), dtype="float32")
    rows = np.arange(5)
    inner = table[np.minimum(rows, count - 1)] == 1
    expected = {expected}
    place = np.where(rows < count, rows, FAR).astype("int32")
    found = exe(np.array([count], "int32"), place, table, x)
    assert (found == np.where(expected[:, None], x, 0)).all(), (count, found, expected)
"""
LOOKUP = "table[place[vr]] == 1"  # a place that is only there where the outer condition holds


def choice(*conditions: str) -> str:
    """X where all conditions hold, each asked for inside of those before it."""
    first, *others = conditions
    inside = choice(*others) if others else "X[vr, vh]"
    return f"T.if_then_else({first}, {inside}, T.float32(0))"


BOTH, EITHER = "(rows < count) & inner", "(rows >= count) | inner"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (choice("vr < count[0]", LOOKUP), BOTH),
        (choice("vr < count[0]", "vh < 6", LOOKUP), BOTH),
        (choice(f"T.And(vr < count[0], {LOOKUP})"), BOTH),
        (choice(f"T.Or(vr >= count[0], {LOOKUP})"), EITHER),
    ],
)
def test_what_is_guarded_is_not_loaded(value: str, expected: str, tmp_path: Path) -> None:
    """In a process of its own, which a load beyond all memory would end."""
    path = tmp_path / "chosen.py"
    path.write_text(SCRIPT.replace("{value}", value).replace("{expected}", expected))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
