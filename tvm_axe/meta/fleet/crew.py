"""A job's servers: asked for at the tracker, looked at, given work, and let go.

The job goes on with who is left when a server is lost; when nobody is, it waits and says so.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from tvm.target import Target

from tvm_axe.errors import TuneError
from tvm_axe.machines import backend_of
from tvm_axe.machines.target import as_given, cores
from tvm_axe.meta.fleet.fingerprint import Fingerprint
from tvm_axe.meta.fleet.fleet import Fleet
from tvm_axe.meta.fleet.items import Items, Outcome
from tvm_axe.meta.fleet.link import CONNECT, WAIT
from tvm_axe.meta.fleet.member import Conversation, Lost, Member, Refused, WorkError
from tvm_axe.meta.fleet.scale import Reference, probed
from tvm_axe.meta.fleet.session import candidates_of
from tvm_axe.meta.fleet.share import AGAIN, Share
from tvm_axe.meta.measure.builder import BUILDER
from tvm_axe.meta.measure.child import Child
from tvm_axe.progress import say
from tvm_axe.records.files import needed
from tvm_axe.records.folders import target_name

__all__ = ["Crew", "Machine", "Preparation", "crew_for"]

_ENTRY = "tvm_axe.meta.fleet.link:main"
_LEASE = 20.0  # seconds that a server is kept at least: to begin takes a few
_BACK = 10.0  # seconds until the tracker is asked again after it gave a server that isn't to be used
_MINUTE = 60.0  # seconds between two words on waiting
_SOON = 5.0  # seconds of waiting before the first
_PROBES = 5  # calls of one probe
_PROBED = 3  # times at most, before a machine that doesn't satisfy is taken out
_LOSSES = 3  # of one server, or in preparing the same, after which it isn't tried again
_START = 240.0  # seconds without a result: importing the compiler, or running an untuned function, on a busy machine
_PLAIN = 60.0  # seconds, beyond twice those for building, that one of upstream's servers may take for a candidate


class Preparation(NamedTuple):
    """What a server must have done before it is given items: work of a kind, which has one result."""

    kind: str
    arguments: Sequence[Any]

    @property
    def digest(self) -> str:
        """What it is known by."""
        return hashlib.sha256(json.dumps([self.kind, self.arguments]).encode()).hexdigest()


@dataclass
class Machine:
    """What a job knows of a server that it had, for its report.

    Attributes
    ----------
    name : str
        The server's.
    fingerprint : Fingerprint
        What it is.
    scale : float
        What its times are multiplied by; the last one.
    measured, failed : int
        Candidates.
    events : list of str
        What happened to it, in order.
    out : str
        Why it isn't used any more; empty if it is.
    """

    name: str
    fingerprint: Fingerprint
    scale: float = 1.0
    measured: int = 0
    failed: int = 0
    events: list[str] = field(default_factory=list)
    out: str = ""

    def encode(self) -> dict[str, Any]:
        """As the provenance has it."""
        told = {"scale": self.scale, "measured": self.measured, "failed": self.failed, "events": [*self.events]}
        return {**told, "fingerprint": self.fingerprint.encode()}

    def __str__(self) -> str:
        events = f"; {'; '.join(self.events)}" if self.events else ""
        return f"{self.name}: {self.measured} measured, {self.failed} failed, times by {self.scale:.3f}{events}"


@contextmanager
def crew_for(
    fleet: Fleet | None, target: str | dict[str, Any] | Target, work_dir: Path, progress: bool, devices: int = 1
) -> Iterator[Crew | None]:
    """A job's crew, which says on stderr what the user should know if `progress` is shown; None if there is no fleet.

    Raises
    ------
    TuneError
        If there is no tracker, `target` isn't one, or `work_dir` can't be used.
    """
    if fleet is None:
        yield None
        return
    log = work_dir / "logs" / "fleet.log"
    with needed(work_dir):
        log.parent.mkdir(parents=True, exist_ok=True)
    with Crew(fleet, json.dumps(as_given(target)), work_dir, log, say if progress else lambda _: None, devices) as crew:
        yield crew


class Crew:
    """The servers that a job has.

    Parameters
    ----------
    fleet
        Where they are from.
    target
        What to measure for, as JSON; the first server completes it.
    work_dir
        Where databases are; the scale of the times lies beside them.
    log
        File that collects what the connections' processes print.
    say
        Is told what the user should know, a line each.
    devices
        How many devices of the target a machine must have, between which its cores are dealt.

    Attributes
    ----------
    machines
        Those that the job had, by name.

    Raises
    ------
    TuneError
        If there is no tracker.
    """

    def __init__(
        self,
        fleet: Fleet,
        target: str,
        work_dir: Path,
        log: Path,
        say: Callable[[str], None] = lambda _: None,
        devices: int = 1,
    ) -> None:
        self.fleet, self._given, self._work_dir, self._log, self._say = fleet, target, work_dir, log, say
        self._devices = devices
        self._timeout = backend_of(Target(json.loads(target)["kind"])).timeout
        self._job = secrets.token_hex(4)
        self._share = Share(fleet, self._job)
        self._target: Target | None = None
        self._reference: Reference | None = None
        self.machines: dict[str, Machine] = {}
        self._members: list[Member] = []
        self._losses: Counter[str] = Counter()
        self._items: Items | None = None
        self._preparation: Preparation | None = None
        self._answers: dict[str, Outcome] = {}
        self._not_before = 0.0  # when the tracker may be asked for a server again
        self._alone: float | None = None  # since when nobody is there
        self._missed = False
        self._unmet = ""  # what became of the last server that didn't say who it is
        try:
            self._share.look(0)
        except OSError as error:
            raise TuneError(f"fleet: no tracker at {fleet.tracker}: {error}; tvm-axe fleet tracker is one") from error

    @property
    def target(self) -> Target:
        """The target, resolved by the first server, for which this waits."""
        while self._target is None:
            self._turn()
        return self._target

    def prepare(self, preparation: Preparation) -> Outcome:
        """Have a server do this, if none has; what came of it."""
        if preparation.digest not in self._answers:
            for _ in self.do(preparation, "", [None]):
                pass
        return self._answers[preparation.digest]

    def do(self, preparation: Preparation, kind: str, items: Sequence[Any]) -> Iterator[Outcome]:
        """Have items done, each by any server that has done `preparation` before; gives what became of each, in order.

        Raises
        ------
        TuneError
            If servers are lost in preparing for it again and again.
        Fault
            If our own code is at fault, here or there.
        """
        self._preparation, self._items = preparation, Items(kind, items)
        self._losses[preparation.digest] = 0
        try:
            for number in range(len(items)):
                while number not in self._items.done:
                    self._turn()
                yield self._items.done.pop(number)
        finally:
            self._preparation = self._items = None
            for member in [member for member in self._members if member.hands]:  # nobody wants that any more
                self._drop(member)

    def close(self) -> None:
        """Let all servers go."""
        for member in [*self._members]:
            self._drop(member)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _turn(self) -> None:
        """Do what can be done now, and wait a moment for what comes of it."""
        self._recruit()
        for member in [*self._members]:
            if member.is_in and not member.is_busy:
                self._employ(member)
        self._wait()

    def _recruit(self) -> None:
        """Ask for servers, and give some back, as the job's share is."""
        waiting = sum(member.is_waiting for member in self._members)
        self._share.look(waiting)
        if bool(self._share.fault) != self._missed:
            self._missed = not self._missed
            why = f": {self._share.fault}; trying again until there is" if self._missed else " again"
            self._say(f"fleet: {'no tracker' if self._missed else 'there is a tracker'} at {self.fleet.tracker}{why}")
        held, now = len(self._members) - waiting, time.monotonic()
        if not waiting and held < self._share.wanted and now >= self._not_before and not self._missed:
            member = Member(Child(_ENTRY, self._log))
            self._members.append(member)
            self._converse(member, self._enter(member))
        for member in [*self._members]:
            if held <= self._share.kept:
                break
            if member.is_in and not member.is_busy and now - member.joined > _LEASE:
                self._drop(member)
                held -= 1

    def _wait(self) -> None:
        """Wait for an answer, for a moment, and carry the conversations on."""
        busy = [member for member in self._members if member.is_busy]
        pipes: list[Connection] = [m.child.connection for m in busy if m.child.connection is not None]
        now = time.monotonic()
        until = min([now + AGAIN / 2, *(member.deadline for member in busy if member.deadline is not None)])
        if not pipes:
            time.sleep(AGAIN / 4)
        ready = wait(pipes, max(0.0, until - now)) if pipes else []
        now = time.monotonic()
        for member in busy:
            late = member.deadline is not None and now >= member.deadline
            if member in self._members and (member.child.connection in ready or late):
                self._converse(member, None)
        self._notice_loneliness(now)

    def _notice_loneliness(self, now: float) -> None:
        out = [f"{machine.name} is out: {machine.out}" for machine in self.machines.values() if machine.out]
        if any(not member.is_waiting for member in self._members):
            self._alone = None
        elif self._target is None and 0 < self._share.servers <= len(out):
            key, tracker = self.fleet.key, self.fleet.tracker
            raise TuneError(f"fleet: no server of key {key!r} at {tracker} can be used: {'; '.join(out)}")
        elif self._alone is None:
            self._alone = now + _SOON
        elif now >= self._alone:
            self._alone = now + _MINUTE
            there = f"{self._share.servers} known there, free or not" if self._share.servers else ""
            unmet = [f"the last one didn't answer, {self._unmet}"] if self._unmet else []
            about = "; ".join([*([there] if there else ["none is known there"]), *unmet, *out])
            self._say(f"fleet: waiting for a server of key {self.fleet.key!r} at {self.fleet.tracker} ({about})")

    def _converse(self, member: Member, talk: Conversation | None) -> None:
        """Begin a conversation, or carry on the one that there is; see to what it ends by."""
        try:
            if talk is None:
                member.hear()
            else:
                member.begin(talk)
        except Refused as refused:
            self._put_out(member, str(refused))
        except Lost as lost:
            self._lose(member, str(lost))
        except BaseException:
            self._drop(member)
            raise

    def _enter(self, member: Member) -> Conversation:
        """Ask for a server, see who it is, and have it measure for the job's target."""
        silent = self.fleet.silent
        host, port, match = yield (WAIT, self.fleet.address, self.fleet.key), None
        member.joined, member.place = time.monotonic(), f"{host}:{port}"
        member.is_plain = yield (CONNECT, host, port, match), silent
        (name, told), *_ = yield from self._results(member, "look")
        member.fingerprint = Fingerprint.told(told)
        machine = self.machines.setdefault(name, Machine(name, member.fingerprint))
        member.name, machine.fingerprint, self._unmet = name, member.fingerprint, ""
        if machine.out:
            raise Refused(machine.out)
        yield from member.note(silent, job=self._job)
        asked = self._given if self._target is None else str(self._target)
        try:
            (opened,) = yield from self._results(member, "open", asked, BUILDER, self._timeout, self._devices)
        except WorkError as error:
            raise Refused(str(error)) from error
        target = Target(json.loads(opened))
        self._check(member, target)
        self._target = target
        yield from self._probe(member, first=True)
        self._check(member, target)  # others may have come meanwhile
        if self._reference is None:
            self._reference = Reference(name, member.fingerprint, member.probe)
            self._reference.write(self._work_dir / target_name(target), self.fleet.key)
        member.scale = machine.scale = self._reference.probe / member.probe
        yield from member.note(silent, scale=member.scale)
        member.is_in = True

    def _check(self, member: Member, target: Target) -> None:
        """Refuse a server that isn't what the target says, or isn't like the others."""
        wrong = member.fingerprint.why_not(target, Fingerprint.versions_here(), self._devices)
        if self._target is not None and str(target) != str(self._target):
            wrong.append(f"code for it is for {target}, not for {self._target}")
        if self._reference is None and not wrong:
            self._reference = Reference.read(self._work_dir / target_name(target), self.fleet.key)
        if self._reference is not None and not member.is_plain:
            unlike = member.fingerprint.unlike(self._reference.fingerprint, backend_of(target).on_host)
            wrong += [f"{how}, as the first of its key was, {self._reference.name}" for how in unlike]
        if wrong:
            raise Refused("; ".join(wrong))

    def _probe(self, member: Member, first: bool) -> Conversation:
        """Time the probe, and again if that doesn't satisfy."""
        wrong = ""
        for _ in range(_PROBED):
            try:
                (times,) = yield from self._results(member, "probe", _PROBES)
            except WorkError as error:
                raise Refused(f"its probe failed: {error}") from error
            member.probed, member.prepared = time.monotonic(), ""
            wrong = probed(times, None if first else member.probe, self.fleet)
            if not wrong:
                break
        if wrong:
            raise Refused(wrong)
        if first:
            member.probe = statistics.median(times)

    def _results(self, member: Member, kind: str, *arguments: Any) -> Any:
        """The results of work, all of them (a conversation)."""
        found: list[Any] = []
        yield from member.work(kind, arguments, self.fleet.silent, _START, found.append)
        return found

    def _employ(self, member: Member) -> None:
        """Give an idle server something to do, if there is anything."""
        if self._items is None or not self._items.left:
            return
        if time.monotonic() - member.probed > self.fleet.every:
            self._converse(member, self._probe(member, first=False))
        else:
            self._converse(member, self._serve(member, self._items, self._preparation))

    def _serve(self, member: Member, items: Items, preparation: Preparation | None) -> Conversation:
        """Have a server do some items, prepared for them."""
        assert preparation is not None
        if member.prepared != preparation.digest:
            yield from self._prepare(member, preparation)
        if self._items is not items:
            return
        share = -(-items.left // max(1, sum(other.is_in for other in self._members)))
        numbers = items.take(max(1, min(share, self._together(member))))
        member.hands = [*numbers]
        if not numbers:
            return
        if not items.kind:
            for number in numbers:
                items.done[number] = self._answers[preparation.digest]
            member.hands = []
            return
        machine = self.machines[member.name]

        def got(result: Any) -> None:
            items.done[member.hands.pop(0)] = Outcome(member.name, member.scale, result)
            for candidate in candidates_of(items.kind, result):
                machine.measured += 1
                machine.failed += candidate["failure"] is not None

        longest = 2 * self._timeout + _PLAIN if member.is_plain else _START
        try:
            yield from member.work(items.kind, [items.items[n] for n in numbers], self.fleet.silent, longest, got)
        except WorkError as error:
            if items.kind != "turns":  # a candidate's failure is a result, so this is the server's
                raise Lost(f"it can't measure: {error}") from error
            for number in member.hands:
                items.done[number] = Outcome(member.name, member.scale, None, str(error))
            member.hands = []

    def _prepare(self, member: Member, preparation: Preparation) -> Conversation:
        """Have a server do what comes before items; what it can't, others may."""
        try:
            (result,) = yield from self._results(member, preparation.kind, *preparation.arguments)
        except WorkError as error:
            self._losses[preparation.digest] += 1
            if self._losses[preparation.digest] >= _LOSSES:
                raise TuneError(f"fleet: {member.name} can't be prepared: {error}") from error
            raise Lost(f"it can't be prepared: {error}") from error
        answer = self._answers.setdefault(preparation.digest, Outcome(member.name, member.scale, result))
        if answer.result["failure"] is None and result["failure"] is not None:
            raise Lost(f"it can't be prepared, as {answer.machine} was: {result['failure']}")
        member.prepared = preparation.digest

    def _together(self, member: Member) -> int:
        """How many items a server is given at once: enough to build on all its cores."""
        return 1 if member.is_plain or self._target is None else cores(self._target)

    def _lose(self, member: Member, reason: str) -> None:
        """Go on without a server that is of no more use; it may come back, but not again and again."""
        name, hands = member.name, member.hands
        member.hands = []
        self._drop(member)
        self._not_before = time.monotonic() + AGAIN
        if not name:  # a tracker that went, or one that gave a server that is no more, or isn't reached from here
            self._unmet = f"{member.place}: {reason}" if member.place else ""
            return
        self._losses[name] += 1
        machine = self.machines[name]
        machine.events.append(f"lost: {reason}")
        self._say(f"fleet: {name} is lost: {reason}")
        if self._losses[name] >= _LOSSES:
            machine.out = f"it was lost {_LOSSES} times"
        if self._items is not None:
            self._items.lose(hands, name, reason)

    def _put_out(self, member: Member, reason: str) -> None:
        """Use a server no more."""
        machine = self.machines[member.name]
        self._drop(member)
        self._not_before = time.monotonic() + (_BACK if machine.out else AGAIN)
        if not machine.out:
            machine.out = reason
            machine.events.append(f"taken out: {reason}")
            self._say(f"fleet: {machine.name} is taken out: {reason}")

    def _drop(self, member: Member) -> None:
        member.close()
        self._members.remove(member)
