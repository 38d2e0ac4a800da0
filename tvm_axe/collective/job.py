"""The ranks of a job: how they meet, what they tell each other besides the data, and how they part.

Their messages go by MPI, if `mpiexec` started them, or by TCP, if torchrun's variables say where to meet (`Messages`).

Rank 0 is the controller. The other ranks say hello with their mesh, and rank 0 welcomes them or says what is wrong, the
same to each; all of it, the beginning of the messages included, has one deadline. Ranks of one machine watch rank 0 and
are watched by it, in /proc. Of other machines a death shows by TCP; by MPI it is `mpiexec`'s to notice: unless told
otherwise it ends the whole job.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tvm_axe.collective.messages import Deadline, Messages, Nap, Request
from tvm_axe.collective.ranks import Rank, find_fault, is_alive, open_process, ranks_per_host, split_hosts
from tvm_axe.errors import AxeError, InputError, WorkerError
from tvm_axe.interrupts import uninterrupted
from tvm_axe.layout import Mesh

# What a message is about: its tag. The first two are sent where a script's own messages are sent too.
HELLO, WELCOME, COMMAND, ABORT, ANSWER, MEMORY, BYE = range(29_000, 29_007)

# What rank 0 tells another in a COMMAND: to be a worker of a launch, to do a command of it, that it is closed, to end.
LAUNCH, DO, CLOSE, END = "launch", "do", "close", "end"

_PARTING = 2.0  # seconds that the ranks may take to answer when the job ends
_FORWARDING = 0.3  # seconds for mpiexec to pass output on: what it hasn't when a job is aborted is lost
_INTERRUPTED = 130  # the exit status of a command that Ctrl-C ended
_LOOKS = 20  # looks before the first nap


class Job:
    """The job that this process is a rank of; there is one, made by `join`.

    Attributes
    ----------
    rank : int
        This process's number.
    ranks : tuple of Rank
        All of them.
    hosts : tuple of tuple of int
        The ranks of each machine; rank 0's is the first.
    data : Messages
        For the workers' data; messages between the processes are others.
    lost : dict of int to str
        The ranks that can't be reached any more, and why.
    commands : int
        How many commands rank 0 gave in earlier launches, so that each command of the job has a number of its own.
    """

    def __init__(self, start: Callable[[float], Messages], mesh: Mesh, timeout: float, cores: Sequence[int]) -> None:
        deadline = Deadline(timeout)
        self._ranks_per_host = ranks_per_host()
        self._messages = start(timeout)
        self._outbox: list[tuple[Request, bytes]] = []  # with the memory that they use
        self._using = threading.Lock()
        self._process = os.getpid()
        self.rank = self._messages.rank
        self.ranks: tuple[Rank, ...] = ()
        self.lost: dict[int, str] = {}
        self.commands = 0
        self._watched: dict[int, tuple[int, int | None]] = {}  # ranks, with their ids and their folders in /proc
        self._close: Callable[[], object] | None = None
        self._status = 1  # of the job, if some are lost
        atexit.register(self._end)
        try:
            self._meet(Rank.own(mesh, cores), deadline)
        except BaseException as error:
            if not isinstance(error, AxeError):
                self.lost, self._status = {self.rank: "was interrupted while it launched"}, _INTERRUPTED
            raise

    def _meet(self, me: Rank, deadline: Deadline) -> None:
        """Learn who the ranks are, and get communicators with them."""
        welcome = self._gather(me, deadline) if self.rank == 0 else self._greet(me, deadline)
        if "fault" in welcome:
            self.lost = {int(rank): why for rank, why in welcome.get("lost", {}).items()}
            raise (WorkerError if self.lost else InputError)(welcome["fault"])
        self.ranks = tuple(Rank(**{**rank, "cores": tuple(rank["cores"])}) for rank in welcome["ranks"])
        self.hosts: tuple[tuple[int, ...], ...] = tuple(map(tuple, welcome["hosts"]))
        for rank in range(1, len(self.ranks)) if self.rank == 0 else [0]:
            self._watch(rank, self.ranks[rank], me)
        self.data = self._duplicate(deadline)
        self._messages = self._duplicate(deadline)

    def _watch(self, rank: int, them: Rank, me: Rank) -> None:
        """See from now on whether a rank is alive, if it is on this machine."""
        if them.machine == me.machine and rank not in self._watched:
            self._watched[rank] = them.pid, open_process(them.pid)

    @property
    def host(self) -> tuple[int, ...]:
        """The ranks of this process's machine."""
        return next(host for host in self.hosts if self.rank in host)

    @property
    def claimed(self) -> bool:
        """Whether a launch uses the ranks."""
        return self._close is not None

    def sharing(self) -> int:
        """How many ranks of the machine have cores in common with this one, itself included."""
        me = self.ranks[self.rank]
        return sum(rank.machine == me.machine and bool(set(rank.cores) & set(me.cores)) for rank in self.ranks)

    def send(self, rank: int, tag: int, content: Any) -> None:
        """Send JSON to a rank; returns at once."""
        message = json.dumps(content).encode()
        with uninterrupted(), self._using:
            self._outbox = [(request, kept) for request, kept in self._outbox if not request.Test()]
            self._outbox.append((self._messages.send(rank, tag, message), message))

    def receive(self, tag: int, rank: int | None = None) -> tuple[int, Any] | None:
        """Return a message of that tag, from `rank` or any, with the rank that it is from; None if there is none."""
        found = self._messages.take(tag, rank)
        return None if found is None else (found[0], json.loads(found[1]))

    def await_message(self, tag: int, rank: int, seconds: float | None = None, longest: float = 1e-3) -> Any:
        """Return the next message of that tag from `rank`; None if there is none within `seconds`."""
        last, nap = Deadline(math.inf if seconds is None else seconds), Nap(longest)
        while (found := self.receive(tag, rank)) is None:
            if last.passed:
                return None
            nap.take()
        return found[1]

    def dead(self) -> list[int]:
        """The ranks that this one sees to have ended; those that serve look at rank 0 alone, which says who died."""
        ended = [rank for rank, (_, folder) in self._watched.items() if folder is None or not is_alive(folder)]
        return sorted({*ended, *(rank for rank in self._messages.gone() if 0 in (rank, self.rank))})

    def claim(self, close: Callable[[], object]) -> None:
        """Use the ranks for a launch, which `close` ends if the process does before `release`."""
        self._close = close

    def release(self, commands: int) -> None:
        """Let the ranks be used for another launch, after one of so many commands."""
        self._close = None
        self.commands += commands

    def leave(self) -> NoReturn:
        """End this process, as a rank that rank 0 has told to."""
        self.send(0, BYE, None)
        self._messages.finish(whoever_began=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # what the script left to do is rank 0's; and taking the compiler down takes long

    def _gather(self, me: Rank, deadline: Deadline) -> dict[str, Any]:
        """As rank 0: hear from all the ranks, and tell them how it stands."""
        size = self._messages.size
        ranks = {0: me}
        nap = Nap()
        while len(ranks) < size and not deadline.passed and not self.dead():
            hello = self.receive(HELLO)
            if hello is None:
                nap.take()
            else:
                rank, fields = hello
                ranks[rank] = Rank(**fields)
                self._watch(rank, ranks[rank], me)
        dead = self.dead()
        missing = dead or sorted(set(range(size)).difference(ranks))
        if missing:
            names = ", ".join(f"rank {rank}" for rank in missing)
            what, why = (
                ("ended while it launched",) * 2
                if dead
                else (f"did not launch in {deadline.seconds:g} s", "did not launch")
            )
            fault = f"launch: of the {size} ranks of the job, {names} {what}"
            welcome: dict[str, Any] = {"fault": fault, "lost": dict.fromkeys(missing, why)}
        else:
            fault = find_fault([ranks[rank].mesh for rank in range(size)])
            welcome = {"fault": fault} if fault else {"ranks": [vars(ranks[rank]) for rank in range(size)]}
            welcome["hosts"] = split_hosts([ranks[rank] for rank in range(size)], self._ranks_per_host)
        for rank in set(ranks).difference([0]):
            self.send(rank, WELCOME, welcome)
        return json.loads(json.dumps(welcome))

    def _greet(self, me: Rank, deadline: Deadline) -> dict[str, Any]:
        """As another rank: say hello to rank 0 and hear how it stands."""
        self.send(0, HELLO, vars(me))
        welcome = self.await_message(WELCOME, 0, deadline.left + _PARTING)
        if welcome is None:
            fault = f"launch: rank 0 of the job did not launch in {deadline.seconds:g} s"
            return {"fault": fault, "lost": {0: "did not launch"}}
        return welcome

    def _duplicate(self, deadline: Deadline) -> Messages:
        with uninterrupted():
            other, request = self._messages.another()
            self._outbox.append((request, b""))
        last, nap = Deadline(deadline.left + _PARTING), Nap()
        while not self._sent():
            gone = self.dead()
            if gone or last.passed:
                self.lost = dict.fromkeys(gone, "has ended") or {self.rank: "did not hear from all the ranks"}
                who = f"rank {gone[0]} has ended" if gone else f"they did not all answer in {deadline.seconds:g} s"
                raise WorkerError(f"launch: the ranks of the job did not agree on a communicator: {who}")
            nap.take()
        return other

    def _sent(self) -> bool:
        """Whether what was asked of MPI is done."""
        with uninterrupted(), self._using:
            self._outbox = [(request, kept) for request, kept in self._outbox if not request.Test()]
            return not self._outbox

    def _drain(self) -> bool:
        """Wait a little for what was sent to be received; whether it was."""
        last, nap = Deadline(_PARTING), Nap()
        while not (sent := self._sent()) and not last.passed and not self.dead():
            nap.take()
        return sent

    def _end(self) -> None:
        """When the process ends by itself: end the other ranks, if this is rank 0, or the job, if some are lost."""
        if os.getpid() != self._process:  # a child that was forked
            return
        with contextlib.suppress(ValueError):  # the interpreter may end in another thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._close is not None:
            self._close()
        if self.rank == 0 and not self.lost:
            self._part()
        if not self.lost and not self._drain():
            self.lost = {self.rank: "could not tell the others all that it had to"}
        if self.lost:
            for rank, why in self.lost.items():
                print(f"tvm_axe: rank {rank} {why}; ending the job", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            time.sleep(_FORWARDING)
            for rank in set(self._watched).difference(self.dead()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._watched[rank][0], signal.SIGKILL)  # mpiexec may have a shell between it and the rank
            self._messages.abort(self._status)
        self._messages.finish()

    def _part(self) -> None:
        """Tell the ranks that serve to end; those that don't answer are lost."""
        others = set(range(1, len(self.ranks)))
        for rank in others:
            self.send(rank, COMMAND, [END])
        last, nap = Deadline(_PARTING), Nap()
        while others and not last.passed:
            bye = self.receive(BYE)
            others -= {bye[0]} if bye is not None else set()
            nap.take()
        self.lost = dict.fromkeys(sorted(others), "did not end when it was asked to")


_job: Job | None = None


def join(start: Callable[[float], Messages], mesh: Mesh, timeout: float, cores: Sequence[int]) -> Job:
    """Join the job that this process was started in, or return it if that is done; all the ranks must.

    What has messages with the others is told the seconds in which all are to come.

    Raises
    ------
    InputError
        If mpi4py isn't there, the number of ranks isn't the mesh's, or ranks have other meshes.
    WorkerError
        If ranks of the job are lost, or serve another launch.
    """
    global _job
    if _job is None:
        _job = Job(start, mesh, timeout, cores)
    if _job.lost:
        names = ", ".join(f"rank {rank} {why}" for rank, why in _job.lost.items())
        raise WorkerError(f"launch: the job can't go on ({names}); start it again")
    if _job.claimed:
        raise WorkerError("launch: the ranks of a job serve one launch at a time; close the other one first")
    fault = find_fault([str(mesh)] * len(_job.ranks))
    if fault:
        raise InputError(fault)
    return _job
