"""The server: a process with one thread that has imported what its children need, and forks them when asked to.

Fork copies the calling thread alone: what another thread holds then, a lock say, stays held in the copy for ever. So
the server counts its threads before each fork and refuses if there are others, as an import may have started some. Its
answer makes who asks start a server that imports nothing and leaves that to its children.

A request is one byte with descriptors: a file with a `Request` as JSON, the pipe for the answer, the directory to be
in, standard output and error as far as there are any, and those of the new process. Through the pipe come one number,
the process's id or, negative, why there is none, and when the process has ended another: its exit status, or less the
signal that it died of. If nothing comes but the end of the pipe, there is no server any more, and no process either.
When nobody reads the pipe any more, the process is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from tvm_axe.processes.inherited import Inherited
from tvm_axe.processes.torchless import leave_out_torch

NUMBER = struct.Struct("i")
MANY_THREADS = -errno.EDEADLK  # the answer of a server that may not fork; other errors are -errno too
_MOST = 253  # descriptors in one message: SCM_MAX_FD
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Request:
    """A process to be forked.

    Attributes
    ----------
    entry : str
        The function that it calls, ``"package.module:function"``.
    arguments : dict
        The function's keyword arguments.
    inherited : dict
        The fields of an `Inherited`.
    outputs : list of int
        Which of descriptors 1 and 2, standard output and error, are sent along.
    """

    entry: str
    arguments: dict[str, Any]
    inherited: dict[str, Any]
    outputs: list[int]

    def write(self) -> int:
        """Return a descriptor of a file without a name that has the request; it may be longer than a message."""
        text = json.dumps(asdict(self))
        descriptor = os.memfd_create("request", os.MFD_CLOEXEC)
        with open(descriptor, "w", closefd=False) as file:
            file.write(text)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor

    @classmethod
    def read(cls, descriptor: int) -> Request:
        """Read such a file, and close it."""
        with open(descriptor) as file:
            return cls(**json.load(file))

    @property
    def module(self) -> str:
        """The module that has the function."""
        return self.entry.partition(":")[0]


def serve(descriptor: int, imports: bool) -> NoReturn:
    """Be the server, until nobody holds the other end of a socket.

    Parameters
    ----------
    descriptor : int
        The socket.
    imports : bool
        Whether to import the modules that children need, once for all of them.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_out_torch()
    server = _Server(socket.socket(fileno=descriptor), imports)
    os.chdir("/")  # a server keeps no directory in use
    server.run()


class _Server:
    """What the server holds. It has one thread, and no more than these descriptors besides the standard ones.

    Attributes
    ----------
    children : dict of int to int
        The pipe of each process that was forked and has not been collected.
    """

    def __init__(self, requests: socket.socket, imports: bool) -> None:
        self.pid = os.getpid()
        self.children: dict[int, int] = {}
        self._requests, self._imports = requests, imports
        self._imported: set[str] = set()
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wakes)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # for the byte that comes with it
        self._poll = select.poll()
        self._poll.register(self._requests, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)

    def run(self) -> NoReturn:
        """Do what is asked for until there is nobody to ask."""
        while True:
            descriptor, _ = self._poll.poll()[0]  # one: a descriptor's number may mean another one after it
            if descriptor == self._requests.fileno():
                self._answer()
            elif descriptor == self._woken:
                os.read(self._woken, 4096)
                self._collect()
            else:  # a pipe that nobody reads
                self._drop(descriptor)

    def _answer(self) -> None:
        message, descriptors, _, _ = socket.recv_fds(self._requests, 1, _MOST)
        if not message:
            self._end()
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        body, pipe, directory, *others = descriptors
        request = Request.read(body)
        if self._imports and request.module not in self._imported:
            self._import(request, directory)
        try:
            pid = MANY_THREADS if len(os.listdir("/proc/self/task")) > 1 else os.fork()
        except OSError as error:
            pid = -(error.errno or errno.EAGAIN)
        if pid == 0:
            self._become(request, directory, others)
        for descriptor in (directory, *others):
            os.close(descriptor)
        _tell(pipe, pid)
        if pid > 0:
            self.children[pid] = pipe
            self._poll.register(pipe, 0)  # an error, the only thing that comes then, says that nobody reads
        else:
            os.close(pipe)

    def _import(self, request: Request, directory: int) -> None:
        self._imported.add(request.module)
        sys.path[:] = request.inherited["path"]
        os.fchdir(directory)
        # What is wrong with a module is for the process that needs it to say: it imports it again.
        with contextlib.suppress(Exception, SystemExit):
            importlib.import_module(request.module)
        os.chdir("/")
        gc.collect()
        gc.freeze()  # else each child's collector writes to, and so copies, what they share

    def _collect(self) -> None:
        """Say of the processes that have ended how they did."""
        for pid, pipe in list(self.children.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self._forget(pipe)
                del self.children[pid]
                _tell(pipe, os.waitstatus_to_exitcode(status))
                os.close(pipe)

    def _drop(self, pipe: int) -> None:
        """Kill the process that nobody has a handle of."""
        self._forget(pipe)
        for pid, of in self.children.items():
            if of == pipe:
                kill(pid)

    def _forget(self, pipe: int) -> None:
        with contextlib.suppress(KeyError):
            self._poll.unregister(pipe)

    def _end(self) -> NoReturn:
        """End, and with this process its children; what those run too."""
        for pid in self.children:
            kill(pid)
        os._exit(0)

    def _become(self, request: Request, directory: int, others: Sequence[int]) -> NoReturn:
        """Be the process that was asked for, in the child."""
        code = 1
        try:
            os.setsid()  # Ctrl-C in a terminal is for who asked, and all that this process runs is one group
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # follows the thread that forked, of which there is one
            if os.getppid() != self.pid:
                os._exit(1)
            signal.set_wakeup_fd(-1)
            self._requests.close()
            # Its own pipe stays open: without a server, who asked sees the end of the process by the end of that.
            for descriptor in (self._woken, self._wakes, *self.children.values()):
                os.close(descriptor)
            _redirect(dict(zip(request.outputs, others)))
            os.fchdir(directory)
            os.close(directory)
            Inherited(**request.inherited).put_in_place()
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed()  # else the same numbers in every process
            code = _exit_code(request, others[len(request.outputs) :])
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.flush()
            os._exit(code)


def kill(pid: int) -> None:
    """Kill a forked process that has not been collected, and all that it runs; alone, if it leads no group yet."""
    for end in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            end(pid, signal.SIGKILL)


def _exit_code(request: Request, descriptors: Sequence[int]) -> int:
    """Call the function; returns what a Python program that does no more than that exits with."""
    module, _, name = request.entry.partition(":")
    try:
        getattr(importlib.import_module(module), name)(list(descriptors), **request.arguments)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    return 0


def _redirect(outputs: dict[int, int]) -> None:
    """Have standard output and error go where they are to; a stream of Python's over a closed descriptor is None."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if number in outputs:
            os.dup2(outputs[number], number)
            os.close(outputs[number])
            getattr(sys, name).reconfigure(line_buffering=number == 2 or os.isatty(number))
        else:
            os.close(number)
            setattr(sys, name, None)


def _tell(pipe: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # who asked is gone, or will see no more of it
        os.write(pipe, NUMBER.pack(number))
