"""Asking for a process and holding it: the side of the one who starts processes; see `server` for the other."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from tvm_axe.processes.fresh import interpreter
from tvm_axe.processes.inherited import Inherited
from tvm_axe.processes.server import MANY_THREADS, NUMBER, Request, kill

_STARTUP = 60.0  # seconds that a server may take to fork, its imports included, before it is taken for hung
_PARTING = 1.0  # seconds that it may take to end
_TRIES = 3  # servers, one after the other, that may die before they have forked

_SERVE = "from tvm_axe.processes.server import serve; serve(int(sys.argv[1]), sys.argv[2] == 'imports')"
_LINES = 20  # of what a process printed last, in the error that says that it ended


class Process:
    """A process that a server has forked; made by `start`. When the last reference to it goes, it is killed.

    One thread at a time may use it, of the process that has started it.

    Attributes
    ----------
    pid : int
        Its process id, which is the id of its session and process group as well.
    """

    def __init__(self, pipe: int, server: _Server) -> None:
        self.pid = 0
        self._code: int | None = None
        self._pipe = pipe
        self._server = server  # ends when nobody has a reference to it
        self._close = weakref.finalize(self, os.close, pipe)

    def poll(self) -> int | None:
        """Return how the process ended, or None while it runs.

        It is the exit status, or less the number of the signal that it died of. A process whose server died is killed
        by the kernel.
        """
        if self._code is None and _readable(self._pipe, 0):
            self._code = self.told(-signal.SIGKILL)
            self._close()
        return self._code

    def told(self, otherwise: int) -> int:
        """Return the next number that the server has written; `otherwise` if it is gone."""
        told = os.read(self._pipe, NUMBER.size)
        return NUMBER.unpack(told)[0] if told else otherwise

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process and return how it ended; see `poll`.

        Raises
        ------
        TimeoutError
            If it still runs after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"process {self.pid} still runs after {timeout:g} s")
            _readable(self._pipe, left)
        return code

    def kill(self) -> None:
        """Kill the process and all that it runs, unless it has ended."""
        if self.poll() is None:
            kill(self.pid)


class LastWords:
    """A file without a name for what a process prints until it is up; kept to say why it never was.

    Attributes
    ----------
    descriptor : int
        The file, until `close` is called.

    Raises
    ------
    OSError
        If there can be none.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("words", os.MFD_CLOEXEC)
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, os.O_APPEND)
        self.close = weakref.finalize(self, os.close, self.descriptor)

    def read(self) -> str:
        """Return the last lines that were printed, behind a colon; nothing if there are none, or it is closed."""
        if not self.close.alive:
            return ""
        text = os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0).decode(errors="replace")
        lines = text.strip().splitlines()[-_LINES:]
        return "\n".join([":", *lines]) if lines else ""


def start(
    entry: str,
    arguments: Mapping[str, Any],
    descriptors: Sequence[int] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
    output: int | None = None,
    errors: int | None = None,
) -> Process:
    """Start a process that calls a function, and return when it is there.

    It leads a session of its own, reads nothing from standard input, and inherits from the calling thread what a
    program that the thread starts would. When the function returns, raises or exits, it ends; functions that were
    registered with `atexit` don't run.

    Parameters
    ----------
    entry : str
        ``"package.module:function"``, found on `sys.path`. It is called with a list of descriptors and `arguments`.
    arguments : mapping
        Keyword arguments that JSON can hold.
    descriptors : sequence of int
        Open descriptors, which the process gets duplicates of.
    environment : mapping
        Variables to set besides those of this process.
    output : int, optional
        The descriptor for standard output and standard error; those of this process if left out.
    errors : int, optional
        The descriptor for standard error, if it isn't that.

    Raises
    ------
    OSError
        If no process can be started; a `ChildProcessError` if it is because no server stays alive.
    """
    inherited = Inherited.own(environment)
    outputs = {number: number if output is None else output for number in (1, 2)}
    outputs |= {} if errors is None else {2: errors}
    outputs = {number: source for number, source in outputs.items() if is_open(source)}
    request = Request(entry, dict(arguments), asdict(inherited), list(outputs))
    for _ in range(_TRIES):
        server = _server_for(inherited, request.module)
        process = server.ask(request, [*outputs.values(), *descriptors])
        if process.pid > 0:
            server.words.close()  # it has begun; what it forks speaks for itself
            return process
        if process.pid == MANY_THREADS and not server.imports:
            raise ChildProcessError(
                f"no process for {entry}: Python has other threads before it imports anything here, by a sitecustomize "
                "or a .pth file, and forks none with them"
            )
        if process.pid == MANY_THREADS:
            _importless.add((request.module, server.fixed))
        elif process.pid < 0:
            raise OSError(-process.pid, f"cannot fork a process for {entry}: {os.strerror(-process.pid)}")
        _retire(server)
        words = server.words.read()
    raise ChildProcessError(f"no process for {entry}: {_TRIES} servers ended before they forked one{words}")


class _Server:
    """A server of this process, which ends when nobody has a reference to it.

    Attributes
    ----------
    fixed : tuple
        What it can't change; see `Inherited.fixed`.
    imports : bool
        Whether it imports what its children need.
    """

    def __init__(self, inherited: Inherited, imports: bool) -> None:
        self.fixed = inherited.fixed()
        self.imports = imports
        self.words = LastWords()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                interpreter(_SERVE, str(theirs.fileno()), "imports" if imports else ""),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self.words.descriptor,
                pass_fds=(theirs.fileno(),),
                env=inherited.environment,
                start_new_session=True,  # Ctrl-C in a terminal is not for it
            )
        # Also at the interpreter's exit.
        self.end = weakref.finalize(self, _end, self.socket, self.process, os.getpid())
        _servers.add(self)

    def ask(self, request: Request, descriptors: Sequence[int]) -> Process:
        """Ask for a process; its `pid` is 0 if the server is gone, and negative if it answered with an error.

        Whatever is raised here or where the process is wanted, Ctrl-C's exception say, the pipe of the answer is closed
        then, and a process that was forked meanwhile is killed.
        """
        answers, pipe = os.pipe()
        process = Process(answers, self)
        opened = [pipe]
        try:
            opened.append(request.write())
            opened.append(os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
            pipe, body, directory = opened
            socket.send_fds(self.socket, [b"\0"], [body, pipe, directory, *descriptors])
        except ConnectionError:
            return process
        finally:
            for descriptor in opened:
                os.close(descriptor)
        if _readable(answers, _STARTUP):
            process.pid = process.told(0)
        else:
            self.process.kill()
        return process


_servers: weakref.WeakSet[_Server] = weakref.WeakSet()
_current: _Server | None = None  # the one that is asked; others stay as long as there are processes of theirs
_importless: set[tuple[str, tuple[Any, ...]]] = set()  # modules whose import starts threads, and in which servers
_choosing = threading.Lock()


def _server_for(inherited: Inherited, module: str) -> _Server:
    """Return the server that can fork such a process, started if it isn't there."""
    global _current
    fixed = inherited.fixed()
    imports = (module, fixed) not in _importless
    with _choosing:
        if _current is None or _current.imports != imports or _current.fixed != fixed:
            _current = _Server(inherited, imports)
        return _current


def _retire(server: _Server) -> None:
    """Have the next process come from another server."""
    global _current
    with _choosing:
        if _current is server:
            _current = None


def _after_fork() -> None:
    """In a child that this process forked: its parent's servers are none of its."""
    global _current, _choosing
    _choosing = threading.Lock()
    _current = None
    for server in list(_servers):
        server.socket.close()


os.register_at_fork(after_in_child=_after_fork)


def _end(connection: socket.socket, process: subprocess.Popen[bytes], owner: int) -> None:
    """Have a server end, and wait for it."""
    connection.close()
    if os.getpid() != owner:
        process.returncode = 0  # not this process's child, so nothing that it may have to wait for
        return
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_PARTING)
    process.kill()
    process.wait()


def _readable(descriptor: int, seconds: float | None) -> bool:
    """Whether there is something to read, or the end, within so many seconds."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(None if seconds is None else max(0.0, seconds) * 1e3))


def is_open(descriptor: int) -> bool:
    """Whether this process has it."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
