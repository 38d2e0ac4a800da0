"""Trying lines of a database in another process, which they may end: no check of a text shows that upstream takes it.

`Trials` is this process's side, `serve` the other's. Each line goes there and is read, replayed and printed as it would
be here. What upstream refuses there it will refuse here, by an exception; what ends that process is told by how it
ended, and the next line goes to another one, forked in milliseconds (`tvm_axe.processes`).
"""

from __future__ import annotations

import json
import resource
import select
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from tvm import s_tir
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.errors import TuneError
from tvm_axe.processes import Process, start
from tvm_axe.records.folders import workload_name
from tvm_axe.records.packing import split_packing

__all__ = ["Trials", "serve"]

SECONDS = 30.0
"""How long a line may take."""

_MEMORY = 8 << 30  # bytes that a line may take
_STARTUP = 60.0
_ENDED = "ends the process that reads it ({})"


class Trials:
    """A process in which lines are tried; started by the first, and by the first after one that ended it.

    One thread at a time may use it.

    Parameters
    ----------
    seconds
        How long a line may take.
    """

    def __init__(self, seconds: float = SECONDS) -> None:
        self.seconds = seconds
        self._process: Process | None = None
        self._socket: socket.socket | None = None

    def workload_fault(self, workload: tuple[str, str]) -> str | None:
        """Why a workload cannot be read here; None if it can.

        Raises
        ------
        TuneError
            If no process can be started.
        """
        return self._ask(list(workload), None)

    def entry_fault(self, workload: tuple[str, str], entry: Any) -> str | None:
        """Why a record, on a workload that can be read, cannot be here; None if it can, or is refused in good order.

        Raises
        ------
        TuneError
            If no process can be started.
        """
        return self._ask(list(workload), entry)

    def _ask(self, workload: list[str], entry: Any) -> str | None:
        fault = self._asked(workload, entry)
        # No line kills: the system for want of memory does, or somebody else.
        return self._asked(workload, entry) if fault == _ENDED.format(signal.SIGKILL.name) else fault

    def _asked(self, workload: list[str], entry: Any) -> str | None:
        connection = self._started()
        deadline = time.monotonic() + self.seconds
        try:
            _send(connection, [workload, entry])
            answer = _receive(connection, deadline)
        except TimeoutError:
            self.close()
            return f"takes more than {self.seconds:g} s"
        except (ConnectionError, EOFError):
            return _ENDED.format(self._how())
        return None if answer is None else str(answer)

    def _started(self) -> socket.socket:
        if self._socket is None:
            ours, theirs = socket.socketpair()
            try:
                with theirs:
                    self._process = start("tvm_axe.records.replay:serve", {"memory": _MEMORY}, [theirs.fileno()])
                _receive(ours, time.monotonic() + _STARTUP)
            except (OSError, EOFError) as error:
                ours.close()
                self.close()
                raise TuneError(f"no process can be started in which records could be tried: {error}") from error
            self._socket = ours
        return self._socket

    def _how(self) -> str:
        """How the process ended, in words."""
        assert self._process is not None
        try:
            code = self._process.wait(5)
        except TimeoutError:
            code = -signal.SIGKILL
        self.close()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """End the process, if there is one."""
        if self._socket is not None:
            self._socket.close()
        self._socket = self._process = None  # which kills it, as nobody else holds it


def serve(descriptors: Sequence[int], memory: int) -> None:
    """Try the lines that come over a socket, until nobody holds its other end."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    with socket.socket(fileno=descriptors[0]) as connection:
        _send(connection, None)
        seen: tuple[list[str], ms.database.Workload] | None = None
        while True:
            try:
                encoded, entry = _receive(connection, None)
            except (EOFError, ConnectionError):
                return
            answer = None
            try:
                if seen is None or seen[0] != encoded:
                    seen = encoded, _read(encoded)
                if entry is not None:
                    _replay(seen[1], entry)
            except Exception as error:  # whatever it is, it is raised there as well, and isn't the end of anything
                if entry is None or seen is None or seen[0] != encoded:
                    answer = f"is refused: {' '.join(str(error).split())[:300] or type(error).__name__}"
            _send(connection, answer)


def _read(encoded: list[str]) -> ms.database.Workload:
    """The workload, after all that is done with one."""
    workload = ms.database.Workload.from_json(encoded)
    mod = workload.mod
    mod.script()
    _tvm.workload_hash(mod)
    _tvm.structural_equal(mod, ms.database.Workload.from_json(encoded).mod)
    _tvm.flops(mod)
    workload_name("f", mod)
    s_tir.Schedule(mod)
    workload.as_json()
    return workload


def _replay(workload: ms.database.Workload, entry: Any) -> None:
    """Do all that is done with a record."""
    Target(entry[2])
    sch = s_tir.Schedule(workload.mod)
    s_tir.schedule.Trace.apply_json_to_schedule(entry[0], sch)
    sch.mod.script()
    str(sch.trace)
    _tvm.record_json(ms.database.TuningRecord.from_json(entry, workload))
    split_packing(sch.mod["main"])


def _send(connection: socket.socket, value: Any) -> None:
    data = json.dumps(value).encode()
    connection.sendall(len(data).to_bytes(8, "little") + data)


def _receive(connection: socket.socket, deadline: float | None) -> Any:
    """The next value.

    Raises
    ------
    TimeoutError
        If it isn't there by the deadline.
    EOFError
        If the other end is closed.
    """
    size = int.from_bytes(_exactly(connection, 8, deadline), "little")
    return json.loads(_exactly(connection, size, deadline))


def _exactly(connection: socket.socket, size: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not select.select([connection], [], [], left)[0]:
            raise TimeoutError
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)
