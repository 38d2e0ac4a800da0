"""What a job may have of a tracker's servers, where several jobs want them.

A tracker says how many servers of a key there are, how many requests wait, and what servers say of themselves, which of
ours is the job that each works for. A job that has its share asks for no more. So where requests wait, somebody has
less: then each job keeps its share, rounded down, of those that there are, and gives back what it has more.
"""

from __future__ import annotations

import time

from tvm_axe.meta.fleet.fleet import Fleet
from tvm_axe.meta.fleet.tracker import ABOUT, servers_of, tracker_summary

__all__ = ["AGAIN", "Share"]

AGAIN = 2.0
"""Seconds between two looks."""


class Share:
    """What one job sees of the tracker.

    Parameters
    ----------
    fleet
        The tracker and the key.
    job
        What servers call this job.

    Attributes
    ----------
    servers
        How many there are of the key, at the last look.
    wanted
        How many the job may ask for.
    kept
        How many it may keep.
    fault
        Why the last look saw nothing; empty if it did.
    """

    def __init__(self, fleet: Fleet, job: str) -> None:
        self._fleet, self._job = fleet, job
        self.servers, self.wanted, self.kept, self.fault = 0, 1, 1, ""
        self._looked: float | None = None

    def look(self, waiting: int) -> None:
        """See how things stand, if the last look is some time ago; `waiting` are this job's own requests.

        Raises
        ------
        OSError
            If there is no tracker, at the first look.
        """
        now = time.monotonic()
        if self._looked is not None and now - self._looked < AGAIN:
            return
        try:
            summary = tracker_summary(self._fleet.address)
        except OSError as error:
            if self._looked is None:
                raise
            self.fault = str(error)
            self._looked = now
            return
        self._looked, self.fault = now, ""
        key = self._fleet.key
        queue = summary["queue_info"].get(key, {"free": 0, "pending": 0})
        at_work = [about.get(ABOUT, {}).get("job", "") for about in servers_of(summary, key)]
        self.servers = len(at_work)
        had = {job: at_work.count(job) for job in at_work if job and job != self._job}
        others = max(0, queue["pending"] - waiting)
        jobs = 1 + len(had)
        self.wanted = min(self._fleet.workers or max(1, self.servers), -(-max(1, self.servers) // jobs))
        if others and all(number >= self.servers // jobs for number in had.values()):
            jobs += 1  # who waits has none yet
        self.kept = self.servers // jobs if others else max(1, self.servers)
