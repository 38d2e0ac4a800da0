"""What a candidate does to its machine costs itself only, as it does where a job measures on its own."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
import tvm
from misbehaving import does_not_compile, double, half_done, loops, raises, takes_four_gib, vectorized

from tvm_axe.errors import TuneError
from tvm_axe.meta.fleet.crew import Crew
from tvm_axe.meta.fleet.runner import FleetRunner
from tvm_axe.records.database import normalize


@pytest.fixture(scope="module")
def crew(servers, board, tmp_path_factory, limit):
    """The two workers of the board, both at work, for one core."""
    folder = tmp_path_factory.mktemp("crew")
    given = json.dumps({"kind": "llvm", "num-cores": 1})
    with Crew(servers.fleet("board"), given, folder, folder / "log") as crew:
        with limit(240):
            while sum(member.is_in for member in crew._members) < 2:
                crew._turn()
        yield crew


@pytest.fixture
def runner(crew):
    runner = FleetRunner(crew)
    assert runner.prepare(normalize(double)).seconds > 0
    return runner


@pytest.mark.parametrize(
    "candidate, reason",
    [
        (normalize(half_done), "wrong result: argument 1 is off by"),
        (normalize(does_not_compile), "InternalError: not implemented"),
        (raises(signal.SIGSEGV), "crashed (SIGSEGV)"),
        (normalize(loops), "no result within 6"),
        (normalize(takes_four_gib), "std::bad_alloc"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_costs_itself_only(crew, runner, candidate, reason):
    before, fault, *after = runner.measure_all([vectorized(), candidate, *[vectorized()] * 2])
    assert fault.seconds is None and reason in fault.failure
    assert fault.machine in ("first", "second")
    for measured in (before, *after):
        assert measured.failure is None
        assert min(measured.seconds, measured.build_seconds, measured.run_seconds) > 0
    assert all(not machine.events and not machine.out for machine in crew.machines.values())


def test_without_a_limit_the_memory_is_there(target):
    """So it is the worker's limit that the candidate above fails by."""
    tensors = [tvm.runtime.tensor(array) for array in (np.arange(64, dtype="float32"), np.zeros(64, "float32"))]
    tvm.compile(normalize(takes_four_gib), target=target)["main"](*tensors)
    assert (tensors[1].numpy() == 2 * tensors[0].numpy()).all()


def test_both_machines_measure_and_every_result_has_its_place(crew, runner):
    found = list(runner.measure_all([vectorized(), normalize(half_done)] * 6))
    assert [one.failure is None for one in found] == [True, False] * 6
    assert {one.machine for one in found} == {"first", "second"}
    assert sum(machine.measured for machine in crew.machines.values()) >= 12


def test_turns_are_all_on_one_machine(crew, runner, monkeypatch):
    """One item has them all; its machine's scale puts them beside what was measured before."""
    given = []
    do = crew.do
    monkeypatch.setattr(crew, "do", lambda *arguments: (given.append(found) or found for found in do(*arguments)))
    times = runner.in_turns([vectorized(), normalize(double), vectorized()], 4)
    (outcome,) = given
    assert outcome.machine in ("first", "second")
    assert times == [[seconds * outcome.scale for seconds in own] for own in outcome.result]
    assert [len(own) for own in times] == [4] * 3 and min(map(min, times)) > 0


def test_what_cannot_be_timed_in_turns_is_an_error_with_its_reason(crew, runner):
    with pytest.raises(TuneError, match="not implemented"):
        runner.in_turns([vectorized(), normalize(does_not_compile)], 2)
    assert next(runner.measure_all([vectorized()])).failure is None


def test_an_untuned_function_that_cannot_run_is_the_job_s_to_know(runner):
    assert runner.prepare(raises(signal.SIGSEGV)).failure == "crashed (SIGSEGV)"
    with pytest.raises(TuneError, match="no function is prepared"):
        list(runner.measure_all([vectorized()]))


def test_what_nobody_waits_for_is_given_up(crew, runner):
    """Whoever works on it is let go, and comes back."""
    found = runner.measure_all([vectorized(), *[normalize(loops)] * 8])
    assert next(found).failure is None
    found.close()
    assert not any(member.hands for member in crew._members)
    assert next(runner.measure_all([vectorized()])).failure is None


def test_a_session_that_is_killed_costs_nothing(crew, runner, board, limit):
    """Its candidates are measured by the others, and the server is there for the next job."""
    found = runner.measure_all([vectorized()] * 10)
    first = next(found)
    victim = next(member for member in crew._members if member.is_in)
    _kill_session(next(server.process.pid for server in board if f"{victim.name}:" in server.first))
    measured = [first, *found]
    assert [one.failure for one in measured] == [None] * 10
    with limit(120):
        while not crew.machines[victim.name].events:  # it may have had nothing to do any more
            list(runner.measure_all([vectorized()] * 4))
    (event,) = crew.machines[victim.name].events
    assert event.startswith("lost: ")
    assert not crew.machines[victim.name].out


def _kill_session(worker: int) -> None:
    """End the process that serves a job, below the one that forks such."""
    (server,) = psutil.Process(worker).children()
    for session in server.children():
        os.kill(session.pid, signal.SIGKILL)


def test_a_session_leaves_no_files(board, crew, until):
    """What it writes is in a folder of its own, which goes with it."""
    places = [Path(server.folder) for server in board]
    assert sum(len(list(place.glob("tvm-axe-worker-*/job-*"))) for place in places) >= 1
    crew.close()
    until(lambda: not any(list(place.glob("tvm-axe-worker-*/job-*")) for place in places))
    for place in places:
        assert len(list(place.glob("tvm-axe-worker-*"))) == 1
