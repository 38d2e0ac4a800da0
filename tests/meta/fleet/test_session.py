"""How a job asks a session for work, and what it hears; without processes."""

from __future__ import annotations

import json
import threading

import pytest
import tvm
from tvm.ir import IRModule

from tvm_axe.errors import TuneError
from tvm_axe.meta.fleet import session
from tvm_axe.meta.fleet.session import FAILED, Desk, Here, measured
from tvm_axe.meta.measure.child import Fault
from tvm_axe.meta.measure.protocol import Measurement


class Made:
    """Measures what it is told to: numbers are results, and what else there is to come of it."""

    def __init__(self):
        self.go_on = threading.Event()

    def work(self, kind, arguments):
        if kind == "wait":
            self.go_on.wait()
        for each in arguments:
            if each == "error":
                raise TuneError("it  can't\nbe")
            if each == "other":
                raise OSError(2, "no such thing")
            if each == "own":
                raise AttributeError("a name that isn't there")
            if each == "fault":
                raise Fault("in a tuning worker:\nTraceback")
            yield each


def ask(desk, *request):
    return json.loads(desk.ask(json.dumps(request)))


def all_of(desk):
    """The results until it is over, and how it ended."""
    results = []
    while True:
        told = ask(desk, "next")
        results += told.pop("results")
        if told.pop("over"):
            return results, told


@pytest.fixture(autouse=True)
def moment(monkeypatch):
    monkeypatch.setattr(session, "_MOMENT", 0.05)


def test_results_come_in_order_and_then_it_is_over():
    desk = Desk(Made())
    assert ask(desk, "begin", "count", [1, 2, 3]) is None
    assert all_of(desk) == ([1, 2, 3], {"error": None, "fault": None})
    assert ask(desk, "begin", "count", []) is None
    assert all_of(desk) == ([], {"error": None, "fault": None})


def test_an_answer_comes_although_the_work_goes_on():
    made = Made()
    desk = Desk(made)
    ask(desk, "begin", "wait", [1])
    for _ in range(3):
        assert ask(desk, "next") == {"results": [], "over": False}
    made.go_on.set()
    assert all_of(desk)[0] == [1]


def test_who_asks_is_heard():
    desk = Desk(Made())
    before = desk.asked
    ask(desk, "next")
    assert desk.asked > before


@pytest.mark.parametrize(
    "kind, text", [("error", "it can't be"), ("other", "FileNotFoundError: [Errno 2] no such thing")]
)
def test_what_cannot_be_done_is_an_error_in_a_line(kind, text):
    desk = Desk(Made())
    ask(desk, "begin", "count", [1, kind, 2])
    assert all_of(desk) == ([1], {"error": text, "fault": None})
    ask(desk, "begin", "count", [3])
    assert all_of(desk)[0] == [3]


@pytest.mark.parametrize(
    "kind, text", [("own", "AttributeError: a name that isn't there"), ("fault", "in a tuning worker")]
)
def test_our_own_fault_comes_with_its_traceback(kind, text):
    desk = Desk(Made())
    ask(desk, "begin", "count", [1, kind])
    results, told = all_of(desk)
    assert results == [1] and told["error"] is None
    assert "Traceback" in told["fault"] and text in told["fault"]


def test_what_is_said_of_a_job_and_of_results_is_noted():
    noted = []
    desk = Desk(Made(), noted.append)
    ask(desk, "note", {"job": "me", "scale": 1.5})
    ask(desk, "begin", "measure", [{"failure": None}, {"failure": "crashed"}])
    all_of(desk)
    ask(desk, "begin", "turns", [[1.0]])
    all_of(desk)
    assert noted == [{"job": "me", "scale": 1.5}, {FAILED: False}, {FAILED: True}]


def test_nothing_is_measured_before_a_target_is_opened(tmp_path):
    here = Here("me", tmp_path / "log", 1.0)
    ((name, told),) = here.work("look", [])
    assert name == "me" and told["cores"] > 0
    with pytest.raises(TuneError, match="nothing was opened"):
        list(here.work("measure", []))


def test_a_target_is_opened_and_completed_there(tmp_path):
    here = Here("me", tmp_path / "log", 1.5)
    (opened,) = here.work("open", [json.dumps({"kind": "llvm", "num-cores": 1}), session.__name__, 9.0, 1])
    assert json.loads(opened)["mcpu"]
    assert here.runner.timeout == 1.5
    (opened,) = here.work("open", [opened, session.__name__, 0.5, 1])
    assert here.runner.timeout == 0.5
    here.runner.close()


class Clock:
    """A measurer whose candidates take as long as they are many; every other call of the probe fails."""

    def __init__(self):
        self.conditions = {"clock": "made up"}
        self.prepared = []

    def prepare(self, mod):
        self.prepared.append(mod)
        return Measurement(2.0, None, 0.1, 0.2)

    def measure_all(self, mods):
        for number, _ in enumerate(mods):
            yield Measurement(1.0 + number) if number % 2 == 0 else Measurement(None, "crashed")

    def in_turns(self, mods, turns):
        return [[1.0] * turns for _ in mods]


def test_the_kinds_of_work(matmul):
    mod = tvm.ir.save_json(IRModule({"main": matmul(4, 4, 4)}))
    clock = Clock()
    assert list(measured(clock, "probe", [5])) == [[1.0, 3.0, 5.0]]
    (prepared,) = measured(clock, "prepare", [mod])
    assert prepared == {"seconds": 2.0, "failure": None, "build": 0.1, "run": 0.2, "conditions": clock.conditions}
    first, second = measured(clock, "measure", [mod, mod])
    assert (first["seconds"], first["failure"]) == (1.0, None)
    assert (second["seconds"], second["failure"]) == (None, "crashed")
    assert list(measured(clock, "turns", [[[mod, mod], 3]])) == [[[1.0] * 3] * 2]
    assert len(clock.prepared) == 2
    with pytest.raises(TuneError, match="this server does no work of the kind 'dance'"):
        list(measured(clock, "dance", []))
