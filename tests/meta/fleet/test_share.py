"""What a job may have of a tracker's servers, as its summary is."""

from __future__ import annotations

import pytest

from tvm_axe.meta.fleet import share
from tvm_axe.meta.fleet.fleet import Fleet
from tvm_axe.meta.fleet.share import AGAIN, Share


class Tracker:
    """A tracker as a job sees it: the jobs of the servers of its key, None one of upstream's; requests that wait."""

    def __init__(self):
        self.now, self.fault, self.asked = 100.0, None, 0
        self.jobs, self.pending = [], 0

    def summary(self, address):
        assert address == ("board", 9190)
        self.asked += 1
        if self.fault is not None:
            raise self.fault
        about = [{"key": "server:k", **({} if job is None else {share.ABOUT: {"job": job}})} for job in self.jobs]
        others = [{"key": "server:other", share.ABOUT: {"job": "else"}}] * 9
        queues = {"k": {"free": 0, "pending": self.pending}} if self.jobs or self.pending else {}
        return {"server_info": [*about, *others], "queue_info": {**queues, "other": {"free": 0, "pending": 9}}}


@pytest.fixture
def tracker(monkeypatch):
    tracker = Tracker()
    monkeypatch.setattr(share, "tracker_summary", tracker.summary)
    monkeypatch.setattr(share.time, "monotonic", lambda: tracker.now)
    return tracker


def look(tracker, jobs, pending=0, waiting=0, workers=None):
    tracker.jobs, tracker.pending = jobs, pending
    mine = Share(Fleet("board", "k", workers), "me")
    mine.look(waiting)
    return mine.servers, mine.wanted, mine.kept


@pytest.mark.parametrize(
    "jobs, pending, waiting, workers, found",
    [
        ([], 0, 0, None, (0, 1, 1)),  # one is asked for, whenever it comes
        ([""] * 4, 0, 0, None, (4, 4, 4)),
        ([""] * 4, 0, 0, 2, (4, 2, 4)),
        ([""], 0, 0, 8, (1, 1, 1)),
        (["me"] * 4, 1, 1, None, (4, 4, 4)),  # nobody waits but this job
        (["me"] * 4, 1, 0, None, (4, 4, 2)),  # who waits has none: half of them are given back
        (["me"] * 3, 1, 0, None, (3, 3, 1)),
        (["me"] * 2 + ["it"] * 2, 0, 0, None, (4, 2, 4)),
        (["me"] * 3 + ["it"], 1, 0, None, (4, 2, 2)),  # who waits is one that has less
        (["me"] * 2 + ["it"] * 2, 1, 0, None, (4, 2, 1)),  # who waits is a third one
        (["me", "me", "it", "she"], 1, 0, None, (4, 2, 1)),
        (["me"], 1, 0, None, (1, 1, 0)),  # one server for two jobs: they take turns
        ([None] * 3, 0, 0, None, (3, 3, 3)),  # upstream's don't say whose they are
    ],
)
def test_servers_are_shared_evenly(tracker, jobs, pending, waiting, workers, found):
    assert look(tracker, jobs, pending, waiting, workers) == found


def test_nobody_looks_all_the_time(tracker):
    mine = Share(Fleet("board", "k"), "me")
    mine.look(0)
    tracker.jobs = [""] * 5
    mine.look(0)
    assert (tracker.asked, mine.servers) == (1, 0)
    tracker.now += AGAIN
    mine.look(0)
    assert (tracker.asked, mine.servers) == (2, 5)


def test_a_tracker_that_never_was_is_an_error_and_one_that_goes_is_not(tracker):
    tracker.fault = OSError("refused")
    mine = Share(Fleet("board", "k"), "me")
    with pytest.raises(OSError, match="refused"):
        mine.look(0)
    tracker.fault, tracker.jobs = None, ["me"] * 2
    mine.look(0)
    tracker.fault = OSError("reset")
    tracker.now += AGAIN
    mine.look(0)
    assert (mine.fault, mine.servers, mine.wanted, mine.kept) == ("reset", 2, 2, 2)
    tracker.fault = None
    tracker.now += AGAIN
    mine.look(0)
    assert mine.fault == ""
