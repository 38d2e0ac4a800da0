"""How processes of one or several machines find each other by TCP, told by variables what torchrun tells its own.

Rank 0 listens at an address that all are told. The others say hello there, and where they listen themselves; when all
have come, rank 0 tells everybody where the others are, and each connects to those before it. Who hasn't come by the
deadline is named, on every rank that has.

Whoever can connect to these ports can take part, as with torch's and NCCL's own: they are for trusted networks. With
an address of this machine alone, ``127.0.0.1``, nobody else can.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm_axe.collective.messages import Deadline
from tvm_axe.connections import is_loopback, keep_alive
from tvm_axe.errors import InputError, WorkerError

__all__ = ["Variables", "meet"]

_LENGTH = struct.Struct("!I")
_MOST = 1 << 20  # bytes of a greeting
_PORTS = 16  # that rank 0 tries: others may listen at the first, torchrun's agent for one
_PATIENCE = 1.0  # seconds in which rank 0 answers, or the next port is tried too
_AGAIN = 0.05  # seconds between tries to connect to who doesn't listen yet
_PARTING = 2.0  # seconds that rank 0's answer may take beyond the deadline


@dataclass(frozen=True)
class Variables:
    """What torchrun's variables say: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Attributes
    ----------
    rank, size : int
        This process's number among all.
    local_rank, local_size : int
        The same among those of its machine.
    address, port : str, int
        Where rank 0 listens.
    job : str
        What tells the job from others.
    taken : bool
        Whether somebody else listens at that very port, as torchrun's agent does.

    Raises
    ------
    InputError
        If they don't fit each other.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    job: str = ""
    taken: bool = False

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.size and 0 <= self.local_rank < self.local_size <= self.size):
            raise InputError(
                f"launch: RANK={self.rank} must be below WORLD_SIZE={self.size}, and LOCAL_RANK={self.local_rank} "
                f"below LOCAL_WORLD_SIZE={self.local_size}, which is no more than WORLD_SIZE"
            )
        if not 0 < self.port < 1 << 16:
            raise InputError(f"launch: MASTER_PORT must be a port, not {self.port}")

    @property
    def ports(self) -> Sequence[int]:
        """Where rank 0 may listen, the likeliest first."""
        first = self.port + self.taken
        return range(first, min(first + _PORTS, 1 << 16))

    @staticmethod
    def told(environment: Mapping[str, str] = os.environ) -> Variables | None:
        """Return what the variables say; None if this process is no rank of a job of several.

        Raises
        ------
        InputError
            If some are missing or no numbers.
        """
        if "RANK" not in environment or environment.get("WORLD_SIZE", "1") == "1":
            return None
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
        if missing:
            raise InputError(f"launch: RANK is set, and {missing[0]} is not; torchrun sets them all")
        size = _number(environment, "WORLD_SIZE")
        return Variables(
            _number(environment, "RANK"),
            size,
            _number(environment, "LOCAL_RANK", 0),
            _number(environment, "LOCAL_WORLD_SIZE", size),
            environment["MASTER_ADDR"],
            _number(environment, "MASTER_PORT"),
            environment.get("TORCHELASTIC_RUN_ID", ""),
            environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise InputError(f"launch: {name} must be a number, not {text!r}")
    return int(text)


def meet(variables: Variables, seconds: float) -> dict[int, socket.socket]:
    """Return a connection to each other rank, once all have come.

    Raises
    ------
    WorkerError
        If ranks haven't come within so many seconds; names them.
    InputError
        If two processes are one rank, or were told different numbers of ranks.
    """
    deadline = Deadline(seconds)
    found: dict[int, socket.socket] = {}
    try:
        if variables.rank == 0:
            _gather(variables, deadline, found)
        else:
            _greet(variables, deadline, found)
        for connection in found.values():
            connection.setblocking(False)
            keep_alive(connection)
    except BaseException:
        for connection in found.values():
            connection.close()
        raise
    return found


def _gather(variables: Variables, deadline: Deadline, found: dict[int, socket.socket]) -> None:
    """As rank 0: hear from all the ranks, and tell them where the others are, or what is wrong."""
    fault, where = "", dict[int, tuple[str, int]]()
    kind: type[Exception] = InputError
    with _listener(variables) as listener, _Door(listener, variables.job) as door:
        while len(found) < variables.size - 1 and not fault and not deadline.passed:
            for connection, told in door.look(deadline.left):
                rank, size = told["rank"], told["size"]
                if size != variables.size:
                    fault = f"launch: rank {rank} was told of {size} ranks, and rank 0 of {variables.size}"
                elif rank in found or not 0 < rank < size:
                    fault = f"launch: two processes are rank {rank} of the job at {_named(variables)}"
                found.setdefault(rank, connection)
                where[rank] = connection.getpeername()[0], told["port"]
        missing = sorted(set(range(1, variables.size)).difference(found))
        if missing and not fault:
            kind, fault = WorkerError, _late(variables, missing, deadline)
    for connection in found.values():
        with contextlib.suppress(OSError):  # who has gone meanwhile is missed later
            _say(connection, {"fault": fault, "late": kind is WorkerError, "where": list(where.items())})
    if fault:
        raise kind(fault)


def _greet(variables: Variables, deadline: Deadline, found: dict[int, socket.socket]) -> None:
    """As another rank: say hello to rank 0, hear where the others are, and connect to those."""
    loopback = is_loopback(variables.address)
    with socket.create_server(("127.0.0.1" if loopback else "", 0), backlog=variables.size) as listener:
        hello = {"job": variables.job, "rank": variables.rank, "size": variables.size}
        port = listener.getsockname()[1]
        found[0], said = _hear(variables, {**hello, "port": port}, deadline)
        if said["fault"]:
            raise (WorkerError if said["late"] else InputError)(said["fault"])
        for rank, (address, port) in said["where"]:
            if 0 < rank < variables.rank:
                # Who came to rank 0 from its own machine is there for all others too.
                there = variables.address if is_loopback(address) else address
                found[rank] = _connected((there, port), deadline, f"rank {rank} at {there}:{port}")
                _say(found[rank], hello)
        with _Door(listener, variables.job) as door:
            while (missing := set(range(variables.size)) - {variables.rank, *found}) and not deadline.passed:
                for connection, told in door.look(deadline.left):
                    found.setdefault(told["rank"], connection)
        if missing:
            raise WorkerError(_late(variables, sorted(missing), deadline, f" to rank {variables.rank}"))


def _hear(variables: Variables, hello: Mapping[str, Any], deadline: Deadline) -> tuple[socket.socket, Any]:
    """Say hello to rank 0, wherever it listens, and return the connection and what it answers when all have come.

    Others may listen at rank 0's ports, and say nothing for ever: who is silent for a while isn't waited for alone, the
    next ports are told as well, and who answers as rank 0 does is rank 0.
    """
    told: dict[int, socket.socket] = {}
    until, reason = deadline, "nobody listens there"
    try:
        for port in itertools.cycle(variables.ports):
            wait = _AGAIN if port == variables.ports[-1] else 0.0
            if port not in told and not deadline.passed:
                try:
                    told[port] = _connection((variables.address, port), _PATIENCE if told else deadline.left)
                    told[port].settimeout(_PARTING)
                    _say(told[port], hello)
                    until = Deadline(deadline.seconds + _PARTING)  # who listens may have begun only now
                    wait = _PATIENCE
                except OSError as error:
                    reason = str(error)
            for answering in _answering(told, min(wait, until.left)):
                connection = told.pop(answering)
                if (said := _answer(connection)) is not None:
                    return connection, said
                connection.close()
                reason = f"who listens at port {answering} isn't rank 0"
            if until.passed:
                break
    finally:
        for connection in told.values():
            connection.close()
    if told:
        reason = f"who listens at port {min(told)} says nothing"
    raise WorkerError(f"launch: rank 0 at {_named(variables)} did not answer within {deadline.seconds:g} s ({reason})")


def _answer(connection: socket.socket) -> dict[str, Any] | None:
    """What rank 0 answers; None from others, as from who takes a hello and goes."""
    try:
        said = _heard(connection)
    except OSError:
        return None
    return said if isinstance(said, dict) and said.keys() >= {"fault", "late", "where"} else None


def _answering(told: Mapping[int, socket.socket], seconds: float) -> list[int]:
    """The ports from which something comes within so many seconds."""
    with selectors.DefaultSelector() as selector:
        for port, connection in told.items():
            selector.register(connection, selectors.EVENT_READ, port)
        return [key.data for key, _ in selector.select(seconds)]


def _connected(place: tuple[str, int], deadline: Deadline, whom: str) -> socket.socket:
    """A connection to who will listen there."""
    while True:
        try:
            return _connection(place, deadline.left)
        except OSError as error:
            if deadline.passed:
                raise WorkerError(f"launch: {whom} did not listen within {deadline.seconds:g} s ({error})") from None
        time.sleep(_AGAIN)


def _connection(place: tuple[str, int], seconds: float) -> socket.socket:
    try:
        connection = socket.create_connection(place, max(_AGAIN, seconds))
    except socket.gaierror as error:
        raise InputError(f"launch: {place[0]!r} is no address: {error}") from None
    if connection.getsockname() == connection.getpeername():
        # TCP's simultaneous open: nobody listens, and the port that was picked for this end is that very port.
        connection.close()
        raise ConnectionRefusedError("connected to itself")
    return connection


class _Door:
    """Those who come to a listener, as they have said who they are; others are sent away, or wait for the deadline."""

    def __init__(self, listener: socket.socket, job: str) -> None:
        self._job = job
        self._listener = listener
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._said: dict[socket.socket, bytearray] = {}

    def look(self, seconds: float) -> list[tuple[socket.socket, Any]]:
        """Wait for somebody for a while, and return who has said hello, with what they said."""
        found = []
        for key, _ in self._selector.select(min(seconds, 0.2)):
            if key.fileobj is self._listener:
                with contextlib.suppress(OSError):
                    connection, _ = self._listener.accept()
                    connection.setblocking(False)
                    self._selector.register(connection, selectors.EVENT_READ)
                    self._said[connection] = bytearray()
                continue
            connection = key.fileobj  # type: ignore[assignment]
            told = self._told(connection)
            if told is None:
                continue
            self._selector.unregister(connection)
            del self._said[connection]
            if told.get("job") == self._job and isinstance(told.get("rank"), int):
                connection.setblocking(True)
                found.append((connection, told))
            else:
                connection.close()
        return found

    def _told(self, connection: socket.socket) -> dict[str, Any] | None:
        """What somebody has said, if that was all; nothing if it isn't what a rank says."""
        said = self._said[connection]
        try:
            piece = connection.recv(1 << 16)
            said += piece
            length = _LENGTH.unpack_from(said)[0] if len(said) >= _LENGTH.size else 0
            if not piece or length > _MOST or len(said) > _LENGTH.size + length > _LENGTH.size:
                return {}
            if len(said) < max(_LENGTH.size + length, _LENGTH.size + 1):
                return None
            told = json.loads(said[_LENGTH.size :])
        except BlockingIOError:
            return None
        except (OSError, ValueError):
            return {}
        return told if isinstance(told, dict) else {}

    def __enter__(self) -> _Door:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for connection in self._said:
            connection.close()


def _listener(variables: Variables) -> socket.socket:
    """Listen at the first port that nobody else listens at."""
    where = variables.address if is_loopback(variables.address) else ""
    reason: OSError | None = None
    for port in variables.ports:
        try:
            return socket.create_server((where, port), backlog=variables.size)
        except OSError as error:
            reason = error
    first, *_, last = variables.ports
    raise WorkerError(f"launch: rank 0 can't listen at any of the ports {first} to {last}: {reason}")


def _say(connection: socket.socket, told: Mapping[str, Any]) -> None:
    text = json.dumps(told).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)


def _heard(connection: socket.socket) -> Any:
    """What was said; None if nothing was."""
    head = _read(connection, _LENGTH.size)
    text = None if head is None else _read(connection, min(_LENGTH.unpack(head)[0], _MOST))
    try:
        return None if text is None else json.loads(text)
    except ValueError:
        return None


def _read(connection: socket.socket, nbytes: int) -> bytes | None:
    found = b""
    while len(found) < nbytes:
        piece = connection.recv(nbytes - len(found))
        if not piece:
            return None
        found += piece
    return found


def _named(variables: Variables) -> str:
    return f"{variables.address}:{variables.port}"


def _late(variables: Variables, missing: Sequence[int], deadline: Deadline, to: str = "") -> str:
    names = ", ".join(f"rank {rank}" for rank in missing)
    where = to or f" to {_named(variables)}"
    return f"launch: of the {variables.size} ranks of the job, {names} did not come{where} in {deadline.seconds:g} s"
