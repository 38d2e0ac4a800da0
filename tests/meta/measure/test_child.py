"""Processes that answer, fail, die or are late, each in words, and are new after that."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from tvm_axe.errors import TuneError
from tvm_axe.meta.measure.child import Child, Fault

_ENTRY = "answering:main"


@pytest.fixture(scope="module")
def child(tmp_path_factory):
    """One for all the tests: starting it takes longer than they do."""
    child = Child(_ENTRY, tmp_path_factory.mktemp("child") / "log", {"SAID": "hello"})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        yield child
    child.close()


def test_it_stays_up_while_requests_fail_in_themselves(child):
    status, (pid, said, score) = child.ask(("pid",), 60)
    assert (status, pid, said, score) == ("ok", child.pid, "hello", "1000")
    status, reason = child.ask(("raise",), 60)
    assert status == "error"
    assert len(reason) < 330
    assert reason.startswith("ValueError: x")
    assert reason.endswith("with an end")
    assert child.ask(("pid",), 60)[1][0] == pid


@pytest.mark.parametrize(
    "request_, status, reason",
    [
        (("fatal",), "error", "the device is broken"),
        (("die", 11), "died", "crashed (SIGSEGV)"),
        (("die", 9), "died", "killed (SIGKILL): by the system for want of memory, or from outside"),
        (("exit",), "died", "exited (3)"),
        (("wait",), "error", "no result within 0.2 s"),
    ],
)
def test_it_is_new_after_its_end(child, request_, status, reason):
    before = child.ask(("pid",), 60)[1][0]
    assert child.ask(request_, 0.2 if request_ == ("wait",) else 60) == (status, reason)
    assert child.pid is None
    assert not psutil.pid_exists(before)
    status, (after, *_) = child.ask(("pid",), 60)
    assert (status, after) == ("ok", child.pid)
    assert after != before


@pytest.mark.parametrize(
    "request_, error",
    [(("fault",), "KeyError: 'fault'"), (("fault", 1), "AttributeError: 'int'"), (("fault", 0), "TypeError")],
)
def test_a_fault_of_its_own_code_is_no_answer(child, request_, error):
    """It stops who asks, with the traceback of the process."""
    with pytest.raises(Fault, match=error) as caught:
        child.ask(request_, 60)
    assert "in _handle" in str(caught.value)
    assert child.pid is None


def test_what_it_started_ends_with_it_and_what_it_prints_is_kept(child):
    sleeper = psutil.Process(child.ask(("start",), 60)[1])
    child.send(("wait",))
    deadline = time.monotonic() + 30
    while "heard wait" not in child.log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.close()
    assert psutil.wait_procs([sleeper], timeout=10)[1] == []


def test_one_that_was_killed_while_idle_is_found_dead(child):
    os.kill(child.ask(("pid",), 60)[1][0], 9)
    assert child.ask(("pid",), 60)[0] == "died"
    assert child.pid is None


def test_a_log_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(TuneError, match=r"no tuning worker can be started: .*No such file"):
        Child(_ENTRY, tmp_path / "missing" / "log").ask(("pid",), 60)
