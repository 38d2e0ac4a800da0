"""The process in which lines are tried, and what its end says of a line."""

import os
import signal

from tvm import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.script import tirx as T

from tvm_axe.records.replay import Trials


@T.prim_func(s_tir=True)
def double(A: T.Buffer((8,), "float32"), B: T.Buffer((8,), "float32")):
    for i in range(8):
        with T.sblock("B"):
            vi = T.axis.spatial(8, i)
            B[vi] = A[vi] * T.float32(2)


def line() -> tuple[str, str]:
    hashed, encoded = ms.database.Workload(IRModule({"main": double})).as_json()
    return str(hashed), str(encoded)


def test_a_process_that_somebody_kills_says_nothing_of_a_line() -> None:
    trials = Trials()
    assert trials.workload_fault(line()) is None
    first = trials._process
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    assert trials.workload_fault(line()) is None
    assert trials._process is not None and trials._process.pid != first.pid
    trials.close()


def test_a_line_that_ends_its_process_each_time_is_a_fault(monkeypatch) -> None:
    trials, asked = Trials(), []

    def killed(workload: list[str], entry: object) -> str:
        asked.append(workload)
        return "ends the process that reads it (SIGKILL)"

    monkeypatch.setattr(trials, "_asked", killed)
    assert trials.workload_fault(line()) == "ends the process that reads it (SIGKILL)"
    assert len(asked) == 2
