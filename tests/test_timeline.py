"""Timelines: what they refuse, the file as a viewer reads it, and the drawing."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_axe.errors import InputError
from tvm_axe.timeline import ARRIVAL, EDGE, WAITING, Arrow, Event, Timeline

WORKERS = ("worker 0 (tp=0)", "worker 1 (tp=1)", "worker 2 (tp=2)")
KINDS = ("local", "all-reduce", "mesh kernel", WAITING, ARRIVAL, EDGE)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Events of up to three workers, some a nanosecond long and some right after another; arrows forward in time."""
    lengths = st.one_of(st.just(1), st.integers(1, 2000), st.integers(1, 10**7))
    workers = WORKERS[: draw(st.integers(1, 3))]
    events = []
    for worker in range(len(workers)):
        now = draw(st.integers(0, 10**6))
        for _ in range(draw(st.integers(0, 6))):
            stop = now + draw(lengths)
            details = draw(st.sampled_from([{}, {"chunk": 1, "bytes": 12.5, "axis": "tp"}]))
            events.append(Event(worker, draw(st.sampled_from("ab")), draw(st.sampled_from(KINDS)), now, stop, details))
            now = stop + draw(st.sampled_from([0, 1, 5000]))
    pairs = [(a, b) for a in events for b in events if a.worker != b.worker and a.stop <= b.start]
    arrows = draw(st.lists(st.sampled_from(pairs), max_size=4)) if pairs else []
    return Timeline("title", workers, tuple(events), tuple(Arrow("C", *pair) for pair in arrows))


def nanoseconds(microseconds: float) -> int:
    """As Perfetto reads a time."""
    return int(microseconds * 1000)


def as_viewed(data: dict) -> tuple[dict[int, list[dict]], list[tuple[dict, dict]]]:
    """What a viewer that takes the records one after the other makes of them: slices by track, and pairs of slices.

    A slice is open from its start to before its stop; a flow's sides bind to the slices that are open then.
    """
    slices: dict[int, list[dict]] = defaultdict(list)
    starts: dict[object, dict] = {}
    flows = []
    latest = -1.0
    for record in data["traceEvents"]:
        if record["ph"] == "M":
            continue
        assert record["ts"] >= latest, "in order"
        latest = record["ts"]
        at, track = nanoseconds(record["ts"]), slices[record["tid"]]
        if record["ph"] == "X":
            record = record | {"start": at, "stop": at + nanoseconds(record["dur"])}
            assert not track or track[-1]["stop"] <= record["start"], "slices of a track overlap"
            track.append(record)
            continue
        assert track and track[-1]["start"] <= at < track[-1]["stop"], "no slice is open"
        key = record["id"], record["cat"], record["name"]  # what says which two belong together
        if record["ph"] == "s":
            assert key not in starts
            starts[key] = track[-1]
        else:
            assert (record["ph"], record["bp"]) == ("f", "e")
            flows.append((starts.pop(key), track[-1]))
    assert not starts, "a flow has no end"
    return slices, flows


@given(timelines())
def test_a_viewer_sees_the_events_and_the_arrows(drawn: Timeline) -> None:
    data = json.loads(json.dumps(drawn.trace_events()))
    slices, flows = as_viewed(data)
    for rank in range(len(drawn.workers)):
        seen = [(record["name"], record["cat"], record["start"], record["args"]) for record in slices.get(rank + 1, [])]
        assert seen == [(event.name, event.kind, event.start, event.details) for event in drawn.track(rank)]
        for record, event in zip(slices.get(rank + 1, []), drawn.track(rank)):
            assert event.stop - 1 <= record["stop"] <= event.stop
    joined = sorted((a["tid"] - 1, a["start"], b["tid"] - 1, b["start"]) for a, b in flows)
    assert joined == sorted((a.source.worker, a.source.start, a.target.worker, a.target.start) for a in drawn.arrows)
    assert all(a["start"] <= b["start"] for a, b in flows)  # else Perfetto turns the arrow round


def test_tracks_are_named(tmp_path: Path) -> None:
    Timeline("MM-AR on tp=2", WORKERS[:2], (Event(1, "mm", "local", 0, 5),), ()).save(tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text())
    assert set(data) == {"traceEvents", "displayTimeUnit"}
    named = [(r["name"], r["tid"], r["args"]) for r in data["traceEvents"] if r["ph"] == "M"]
    assert named == [
        ("process_name", 1, {"name": "MM-AR on tp=2"}),
        ("thread_name", 1, {"name": WORKERS[0]}),
        ("thread_sort_index", 1, {"sort_index": 0}),
        ("thread_name", 2, {"name": WORKERS[1]}),
        ("thread_sort_index", 2, {"sort_index": 1}),
    ]
    assert {record["pid"] for record in data["traceEvents"]} == {1}


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none/t\.json: cannot be written: No such file or directory"):
        Timeline("", (), (), ()).save(tmp_path / "none" / "t.json")


@pytest.mark.parametrize(("start", "stop"), [(5, 5), (5, 4), (-1, 3)])
def test_an_event_takes_time(start: int, stop: int) -> None:
    with pytest.raises(InputError, match=f"event 'mm' of worker 0: .* not run from {start} to {stop}"):
        Event(0, "mm", "local", start, stop)


def test_events_of_a_worker_do_not_overlap() -> None:
    first, second = Event(0, "a", "local", 0, 10), Event(0, "b", "local", 9, 12)
    with pytest.raises(InputError, match=r"'a' and 'b' of worker 0 \(tp=0\) overlap: .* stops at 10, .* starts at 9"):
        Timeline("", WORKERS, (second, first), ())
    Timeline("", WORKERS, (first, Event(1, "b", "local", 9, 12)), ())
    with pytest.raises(InputError, match="event 'b': there are 3 workers, no 3"):
        Timeline("", WORKERS, (Event(3, "b", "local", 9, 12),), ())


def test_an_arrow_joins_events_of_the_timeline() -> None:
    first, other = Event(0, "a", "local", 0, 10), Event(1, "a", "local", 0, 10)
    with pytest.raises(InputError, match="arrow 'C': its source and target must be events of the timeline"):
        Timeline("", WORKERS, (first,), (Arrow("C", first, other),))


def test_text() -> None:
    chunks = [Event(0, "mm", "local", 1000 * at, 1000 * (at + 1), {"chunk": at}) for at in range(3)]
    short = Event(1, "sum", "all-reduce", 2_500, 2_501)
    others = [Event(1, "wait", WAITING, 0, 2_000), Event(1, "arrive", ARRIVAL, 2_000, 2_400)]
    edges = [Event(0, "outputs", EDGE, 4_000, 9_000), Event(1, "outputs", EDGE, 4_000, 9_000)]
    last = Event(0, "sum", "all-reduce", 3_500, 4_000)
    drawn = Timeline("t", WORKERS[:2], (*chunks, *others, short, last, *edges), ())
    assert drawn.duration == 4_000
    assert drawn.text(width=26).splitlines() == [
        "t: 0.004 ms, 0.5 us a column",
        "worker 0 (tp=0) |AAaaAA B|",
        "worker 1 (tp=1) |.....B  |",
        "milliseconds of each worker",
        "  A mm: local        0.003  0.000",
        "  B sum: all-reduce  0.001  0.000",
        "  . waiting          0.000  0.002",
    ]
    with pytest.raises(InputError, match="width must be at least 19 for these workers' names, not 18"):
        drawn.text(width=18)


@given(timelines(), st.integers(19, 60))
def test_text_has_the_width_and_shows_each_stage(drawn: Timeline, width: int) -> None:
    header, *lines = drawn.text(width).splitlines()
    assert header.startswith("title: ")
    for rank, worker in enumerate(drawn.workers):
        assert lines[rank].startswith(f"{worker} |") and lines[rank].endswith("|") and len(lines[rank]) == width
        bar = lines[rank][len(worker) + 2 : -1]
        stages = [event for event in drawn.track(rank) if event.kind not in (WAITING, ARRIVAL, EDGE)]
        assert bool(stages) == bool(set(bar.upper()) - {" ", "."})
