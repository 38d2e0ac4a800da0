"""`tvm-axe worker`: offers this machine to a tracker, and has each job that is sent here measure in a process.

It speaks upstream's protocols, to trackers and to clients, in a loop of its own: upstream's server ends for good when a
session's process crashes, or when its tracker is away for a minute, waits for ever for a client that says nothing, and
says of itself only that it is there.

A session's process is forked by a server that has imported the compiler (`tvm_axe.processes`), works in a folder that
goes with it, and has limits: of memory, for itself and each process that it starts; of time, for each candidate and for
a job that asks for nothing any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from tvm_axe import _tvm
from tvm_axe.connections import keep_alive
from tvm_axe.meta.fleet.session import FAILED, Desk, Here
from tvm_axe.meta.fleet.tracker import ABOUT, ASK
from tvm_axe.processes import Process, start

__all__ = ["Limits", "Server"]

_TICK = 0.5  # seconds between two looks at what has no descriptor to wait for
_TALK = 5.0  # seconds that a tracker or a client may take to answer
_AGAIN = 2.0  # seconds between tries to reach a tracker, and between two words to it
_UNUSED = 6.0  # seconds after which a job that was given this server and didn't come has lost its claim
_GONE = 30.0  # seconds without a sign of the other end after which a connection is given up
_IDLE = 900.0  # seconds without a request after which a job has gone
_ENTRY = "tvm_axe.meta.fleet.server:serve_session"
_READY = "tvm_axe.meta.fleet.server:end_at_once"


@dataclass(frozen=True)
class Limits:
    """What a session may use.

    Attributes
    ----------
    memory : int
        Bytes of data of each process.
    seconds : float
        That building or running a candidate may take, whatever the job asks for.
    """

    memory: int
    seconds: float


@dataclass
class Counts:
    """What a server says of itself to who asks the tracker."""

    name: str
    job: str = ""
    measured: int = 0
    failed: int = 0
    noted: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> dict[str, Any]:
        """As the tracker's summary has it."""
        return {**self.noted, "name": self.name, "job": self.job, "measured": self.measured, "failed": self.failed}


class Server:
    """Offers this machine under a key, one job at a time.

    Parameters
    ----------
    tracker
        The tracker's host and port.
    key
        What the machine is called there.
    listener
        Where jobs connect to.
    limits
        Of each session.
    folder
        Each session has a folder of its own below this one.
    host
        The address that jobs are told; None: the one by which the tracker sees this machine.
    name
        The server's own name, which no other of its key should have.
    say
        Is told what happens, a line each.
    """

    def __init__(
        self,
        tracker: tuple[str, int],
        key: str,
        listener: socket.socket,
        limits: Limits,
        folder: Path,
        host: str | None = None,
        name: str | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._address, self._key, self._listener = tracker, key, listener
        self._limits, self._folder, self._host, self._say = limits, folder, host, say
        self.port = int(listener.getsockname()[1])
        self.name = name or f"{socket.gethostname()}:{self.port}"
        self._counts = Counts(self.name)
        self._tracker: _tvm.RpcTracker | None = None
        self._missed = False  # whether it was said that there is no tracker
        self._match = ""  # what the next client has to say; empty while nobody is to come
        self._unused: float | None = None  # since when a job that was given this server could have come
        self._told = self._tried = self._looked = -_AGAIN
        self._session: Process | None = None
        self._status, self._notes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._half = b""

    def run(self) -> NoReturn:
        """Serve until an exception ends it, Ctrl-C's say, and with it the session that there is."""
        start(_READY, {}).wait()  # what forks sessions has imported the compiler then, before a job waits for one
        try:
            while True:
                ready, _, _ = select.select([self._listener.fileno(), self._status], [], [], _TICK)
                self._hear_notes()
                if self._session is not None and self._session.poll() is not None:
                    self._end_session()
                if self._listener.fileno() in ready:
                    self._accept()
                self._keep_up()
        finally:
            if self._session is not None:
                self._session.kill()
                self._session.wait()

    def _accept(self) -> None:
        """Let in the client that the tracker sent, and nobody else."""
        connection, (peer, *_) = self._listener.accept()
        with connection:
            connection.settimeout(_TALK)
            try:
                if not self._match or not _tvm.rpc_greet(connection, self._key, self._match):
                    return
                keep_alive(connection, _GONE)
                connection.setblocking(True)
                self._begin_session(connection)
            except OSError as error:  # it went away, or said nothing
                self._say(f"a client at {peer} was not let in: {error}")
                return
        self._say(f"a job came from {peer}")

    def _begin_session(self, connection: socket.socket) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # what tidies up /tmp may have removed it
        folder = Path(tempfile.mkdtemp(prefix="job-", dir=self._folder))
        arguments = {"name": self._counts.name, "folder": str(folder), **asdict(self._limits)}
        self._session = start(_ENTRY, arguments, [connection.fileno(), self._notes])
        self._match, self._unused = "", None
        self._tell()

    def _end_session(self) -> None:
        assert self._session is not None
        code, self._session = self._session.wait(), None
        for left in self._folder.glob("job-*"):
            shutil.rmtree(left, ignore_errors=True)
        counts = self._counts
        counts.job = ""
        self._say(f"the job has gone{f' ({code})' if code else ''}; {counts.measured} measured, {counts.failed} failed")
        self._tell()

    def _hear_notes(self) -> None:
        """Take what the session says of what it does."""
        try:
            self._half += os.read(self._status, 1 << 16)
        except BlockingIOError:
            return
        *lines, self._half = self._half.split(b"\n")
        for line in lines:
            noted = json.loads(line)
            if FAILED in noted:
                self._counts.measured += 1
                self._counts.failed += noted.pop(FAILED)
            self._counts.job = noted.pop("job", self._counts.job)
            self._counts.noted |= noted

    def _keep_up(self) -> None:
        """Have the tracker know this server, and whether it is free."""
        now = time.monotonic()
        try:
            if self._tracker is None:
                if now - self._tried < _AGAIN:
                    return
                self._tried = now
                self._tracker = _tvm.RpcTracker(self._address, _TALK)
                keep_alive(self._tracker.socket, _GONE)
                self._match, self._unused, self._told = "", None, -_AGAIN
                if self._missed:
                    self._say("the tracker is there again")
                self._missed = False
            if now - self._told >= _AGAIN:
                self._tell()
            if self._session is None and self._is_unclaimed(now):
                self._match, self._unused = _tvm.rpc_match(self._key), None
                self._tracker.offer(self._key, self.port, self._match, self._host)
        except OSError as error:
            self._lose_tracker(error)

    def _is_unclaimed(self, now: float) -> bool:
        """Whether the server is free and no job has been told to come, or one was and didn't."""
        assert self._tracker is not None
        if not self._match:
            return True
        if now - self._looked < _AGAIN:
            return False
        self._looked = now
        if self._match in self._tracker.offered():
            self._unused = None
        elif self._unused is None:
            self._unused = now
        return self._unused is not None and now - self._unused > _UNUSED

    def _tell(self) -> None:
        self._told = time.monotonic()
        if self._tracker is None:
            return
        about = {"key": f"server:{self._key}", "addr": [self._host, self.port], ABOUT: self._counts.encode()}
        try:
            self._tracker.tell(about)
        except OSError as error:
            self._lose_tracker(error)

    def _lose_tracker(self, error: OSError) -> None:
        if self._tracker is not None:
            self._tracker.close()
        self._tracker = None
        if not self._missed:
            self._say("no tracker at {}:{} ({}); trying again until there is".format(*self._address, error))
        self._missed = True


def end_at_once(descriptors: Sequence[int]) -> None:
    """Be a process that is of no use but that it could be started."""


def serve_session(descriptors: Sequence[int], name: str, folder: str, memory: int, seconds: float) -> NoReturn:
    """Be a session's process: do what the job at the other end of a connection asks for, until it goes."""
    connection, status = descriptors
    os.chdir(folder)
    os.environ["TMPDIR"] = folder
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    least = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (least, least))

    def noted(about: Mapping[str, Any]) -> None:
        with contextlib.suppress(BlockingIOError):  # a server that doesn't listen is stopped, and misses a count
            os.write(status, json.dumps(dict(about)).encode() + b"\n")

    desk = Desk(Here(name, Path(folder) / "worker.log", seconds), noted)
    _tvm.register_functions({ASK: desk.ask})

    def watch() -> None:
        while time.monotonic() - desk.asked < _IDLE:
            time.sleep(_IDLE / 100)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    with contextlib.suppress(*_tvm.UPSTREAM_ERRORS):  # the job went without a word
        _tvm.rpc_serve(connection)
    os._exit(0)
