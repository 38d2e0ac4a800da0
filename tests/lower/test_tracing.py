"""Tracing: what workers did when, by stage, and whose data they worked on."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import permutations

import numpy as np
import pytest

import tvm_axe as axe
from tvm_axe import tracing
from tvm_axe.collective import Timeline, Workers
from tvm_axe.executable import mesh as on_mesh
from tvm_axe.layout import Mesh
from tvm_axe.programs.registry import PROGRAMS
from tvm_axe.timeline import ARRIVAL, EDGE, WAITING

Trace = Callable[..., tuple[Timeline, axe.Executable]]


@pytest.fixture
def trace(launched: Callable[..., Workers], compiled: Callable[..., axe.Executable]) -> Trace:
    """Trace a program under one of its schedules; the arrows must go forward in time."""

    def run(
        program: str, schedule: str, mesh: Mesh, size: str = "test", engine: str = "threads"
    ) -> tuple[Timeline, axe.Executable]:
        instance = PROGRAMS[program](mesh, size)
        exe = compiled(instance.schedule(schedule))
        arrays = instance.inputs(np.random.default_rng())
        timeline = exe.trace(launched(mesh, engine), *arrays)
        for arrow in timeline.arrows:
            assert arrow.source.stop <= arrow.target.start, (arrow.data, arrow.source, arrow.target)
        return timeline, exe

    return run


def arrows(timeline: Timeline) -> list[tuple]:
    """(data, worker, event, chunk, worker, event, chunk) of each arrow, without chunks where there are none."""
    found = []
    for arrow in timeline.arrows:
        sides = [
            (event.worker, event.name, *([event.details["chunk"]] if "chunk" in event.details else []))
            for event in (arrow.source, arrow.target)
        ]
        found.append((arrow.data, *sides[0], *sides[1]))
    return sorted(found)


@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("tp", [2, 3])
def test_arrows_of_collectives_and_kernels(trace: Trace, tp: int, engine: str) -> None:
    mesh = Mesh({"tp": tp})
    pairs = list(permutations(range(tp), 2))
    timeline, _ = trace("mlp", "MM-RS-C-AG", mesh, "uneven", engine)
    assert arrows(timeline) == sorted(
        [("C_rf", a, "mm_rf", b, "mm") for a, b in pairs] + [("out", a, "out_global", b, "outputs") for a, b in pairs]
    )
    timeline, _ = trace("mlp", "MM-fuse(RS-C-AG)", mesh, "test", engine)
    assert arrows(timeline) == sorted(
        [("C_rf", a, "mm_rf", b, "mm_epi_out_global") for a, b in pairs]
        + [("out", a, "mm_epi_out_global", b, "outputs") for a, b in pairs]
    )


def test_arrows_from_what_was_there_before(trace: Trace) -> None:
    """The gradients are inputs, and on two devices."""
    timeline, _ = trace("sgd", "AR-C", Mesh({"dp": 2}))
    assert arrows(timeline) == [
        ("g", 0, "inputs", 1, "sum"),
        ("g", 1, "inputs", 0, "sum"),
        ("total", 0, "sum", 1, "mean_m_p"),
        ("total", 1, "sum", 0, "mean_m_p"),
    ]


@pytest.mark.parametrize(("tp", "engine"), [(2, "threads"), (3, "threads"), (2, "processes")])
def test_arrows_between_chunks(trace: Trace, tp: int, engine: str) -> None:
    mesh = Mesh({"tp": tp})
    timeline, _ = trace("mlp", "ol(MM, fuse(RS-C-AG))", mesh, engine=engine)
    pairs, name = list(permutations(range(tp), 2)), "mm_epi_out_global"
    chunks = {2: 3, 3: 4}[tp]  # as many as a device's 12 / tp rows can be cut into, up to 4
    assert arrows(timeline) == sorted(
        [("C_rf", a, "mm_rf", c, b, name, c) for a, b in pairs for c in range(chunks)]
        + [("out", a, name, c, b, "outputs") for a, b in pairs for c in range(chunks)]
    )
    for arrow in timeline.arrows:
        if arrow.data == "C_rf":  # the slice that the reader works on
            assert (arrow.source.worker + arrow.source.details["step"]) % tp == arrow.target.worker


def test_arrows_around_the_ring_and_on_a_second_axis(trace: Trace) -> None:
    timeline, _ = trace("ag_mm", "ol(AG, MM)", Mesh({"tp": 3}))
    assert {arrow.data for arrow in timeline.arrows} == {"X"}
    for arrow in timeline.arrows:
        reader = arrow.target
        assert (reader.worker + reader.details["step"]) % 3 == arrow.source.worker
        assert reader.details["bytes"] > 0
    # A step around the ring that stays on the device moves nothing.
    own = [event for event in timeline.track(1) if event.details.get("step") == 0 and "bytes" in event.details]
    assert own and all(event.details["bytes"] == 0 for event in own)

    mesh = Mesh({"pp": 3, "tp": 2})
    timeline, _ = trace("pipeline", "RS-P2P-C-AG", mesh)
    sent = [(arrow.source.worker, arrow.target.worker) for arrow in timeline.arrows if arrow.data == "C_global"]
    assert sorted(sent) == sorted(
        (mesh.device({"pp": s, "tp": t}), mesh.device({"pp": (s + 1) % 3, "tp": t})) for s in range(3) for t in range(2)
    )


SOME = [
    ("mlp", "MM-AR-C"),
    ("mlp", "ol(MM, fuse(RS-C-AG))"),
    ("ag_mm", "ol(AG, MM)"),
    ("lamb", "fuse(RS-C-AG)"),
    ("pipeline", "AR-P2P-C"),
    ("pipeline", "ol(RS, fuse(P2P-C), AG)"),
    ("moe", "A2A-MM-A2A"),
]


@pytest.mark.parametrize("size", ["test", "uneven"])
@pytest.mark.parametrize(("program", "schedule"), SOME)
def test_bytes_are_those_of_the_stages(trace: Trace, program: str, schedule: str, size: str) -> None:
    mesh = Mesh(dict.fromkeys(PROGRAMS[program].axes, 2))
    timeline, exe = trace(program, schedule, mesh, size)
    for stage in exe.stages:
        for device, received in enumerate(stage.received):
            moved = [event.details.get("bytes", 0) for event in timeline.track(device) if event.name == stage.name]
            assert moved and sum(moved) == received and set(map(type, moved)) == {int}
        assert stage.bytes == max(stage.received)
        assert all(event.kind == stage.kind for event in timeline.events if event.name == stage.name)


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_events_are_what_was_called(trace: Trace, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """Under other names, where a program was linked; and nothing is left out."""
    seen: list[tuple] = []

    def spying(*arguments: object) -> Timeline:
        seen.append(arguments)
        return tracing.timeline_of(*arguments)

    monkeypatch.setattr(on_mesh, "timeline_of", spying)
    for program, schedule in SOME[:3]:
        timeline, _ = trace(program, schedule, Mesh({"tp": 2}), engine=engine)
        lowered, recordings = seen.pop()
        for device, recording in enumerate(recordings):
            for call, called in zip(lowered.calls, recording.calls, strict=True):
                linked = "axe_" + call.function.removeprefix("axe.")
                assert called.name == call.function or re.fullmatch(rf"{linked}(_?\d+)?", called.name)
            events = [event for event in timeline.track(device) if event.kind != EDGE and "end" not in event.name]
            assert [(event.start, event.stop) for event in events] == [(c.start, c.stop) for c in recording.calls]


def test_waiting_is_seen(trace: Trace) -> None:
    timeline, exe = trace("mlp", "ol(MM, fuse(RS-C-AG))", Mesh({"tp": 2}))
    assert timeline.title == f"kernel: {exe.notation} on tp=2"
    assert timeline.workers == ("worker 0 (tp=0)", "worker 1 (tp=1)")
    assert exe.notation == "ol(MM, fuse(RS-C-AG))"
    script = exe.module["main"].script()
    for rank in range(2):
        kinds = [(event.name, event.kind) for event in timeline.track(rank)]
        assert kinds.count(("wait", WAITING)) == script.count("axe.wait") > 0
        assert kinds.count(("arrive", ARRIVAL)) == script.count("axe.arrive") > 0
        assert kinds[0] == ("inputs", EDGE) and kinds[-1] == ("outputs", EDGE)
    # All but the last wait for it.
    ended = [event for event in timeline.events if event.name == "wait for the end"]
    assert len(ended) == 1 and ended[0].stop == timeline.duration


def test_one_device_exchanges_nothing(trace: Trace) -> None:
    timeline, _ = trace("mlp", "MM-AR-C", Mesh({"tp": 1}))
    assert not timeline.arrows
    assert [event.kind for event in timeline.track(0)].count(WAITING) == 0


def test_arrays_are_checked_as_for_a_run(
    launched: Callable[..., Workers], compiled: Callable[..., axe.Executable]
) -> None:
    mesh = Mesh({"tp": 2})
    exe = compiled(PROGRAMS["mlp"](mesh).schedule("MM-AR-C"))
    with pytest.raises(axe.InputError, match="takes 5 arrays"):
        exe.trace(launched(mesh))
