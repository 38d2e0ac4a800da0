"""The timeline that a model expects of a lowered program: what waits for what, and what it adds up to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tvm_axe as axe
from tvm_axe.collective import registry
from tvm_axe.layout import Mesh
from tvm_axe.lower.cost import expected
from tvm_axe.programs import PROGRAMS
from tvm_axe.timeline import Event, Timeline


def timeline(name: str, schedule: str, axis: str, target: str = "cuda:sm_90a", devices: int = 2) -> Timeline:
    program = PROGRAMS[name](Mesh({axis: devices}))
    exe = axe.compile(program.schedule(schedule), target=target, work_dir=None)
    assert isinstance(exe, axe.executable.mesh.MeshExecutable)
    return exe.expected()


def named(found: Timeline, name: str, track: int) -> list[Event]:
    return [event for event in found.track(track) if event.name == name and event.kind != "waiting"]


def test_a_collective_beside_others_is_joined_before_what_wants_it() -> None:
    found = timeline("layers", "MM-beside(AR)-C", "dp")
    assert found.workers == ("worker 0", "worker 0 beside", "worker 1", "worker 1 beside")
    (first,), (second,) = named(found, "sum2", 1), named(found, "sum1", 1)
    (back,), (part,) = named(found, "back", 0), named(found, "part1", 0)
    (step2,), (step1,) = named(found, "step2", 0), named(found, "step1", 0)
    assert first.start <= back.start < part.stop < second.start and first.stop <= second.start
    assert first.stop <= step2.start < second.stop <= step1.start
    in_turn = timeline("layers", "MM-AR-C", "dp")
    assert in_turn.workers == ("worker 0", "worker 1") and found.duration < in_turn.duration


def test_every_device_does_what_the_first_does() -> None:
    found = timeline("layers", "MM-beside(AR)-C", "dp", devices=3)
    of_first = [(e.name, e.start, e.stop) for track in (0, 1) for e in found.track(track)]
    for device in (1, 2):
        assert [(e.name, e.start, e.stop) for track in (0, 1) for e in found.track(2 * device + track)] == of_first


@pytest.mark.parametrize("name", PROGRAMS)
def test_stages_take_what_the_model_says(name: str) -> None:
    """On cores, whose chunks are turns of one stream, they add up to it."""
    program = PROGRAMS[name](Mesh(dict.fromkeys(PROGRAMS[name].axes, 2)))
    exe = axe.compile(program.schedule(list(program.schedules)[-1]), work_dir=None)
    assert isinstance(exe, axe.executable.mesh.MeshExecutable)
    found, seconds = exe.expected(), expected(exe.lowered, registry.find("processes").rates)
    for stage, each in zip(exe.lowered.stages, seconds):
        own = [track for track, worker in enumerate(found.workers) if worker.split()[1] == "0"]
        events = [event for track in own for event in named(found, stage.name, track) if event.kind == stage.kind]
        taken = sum(event.stop - event.start for event in events)
        calls = sum(call.stage == exe.lowered.stages.index(stage) for call in exe.lowered.calls)
        assert taken == pytest.approx(1e9 * each, abs=2 * calls, rel=1e-6), stage.name


def test_it_is_saved_for_perfetto(tmp_path: Path) -> None:
    path = tmp_path / "expected.json"
    timeline("layers", "MM-beside(AR)-C", "dp").save(path)
    told = json.loads(path.read_text())["traceEvents"]
    names = {each["args"]["name"] for each in told if each["name"] == "thread_name"}
    assert names == {"worker 0", "worker 0 beside", "worker 1", "worker 1 beside"}
