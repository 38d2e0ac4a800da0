"""Messages by TCP: a connection to each other rank, and a thread that moves what is sent and received on them."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from tvm_axe.collective.messages import Deadline, Messages, Nap, Request

__all__ = ["TcpMessages"]

_HEAD = struct.Struct("!IqQ")  # what is in front of a message: whose it is, its tag, its bytes
_TAGS = 1 << 62
_PIECE = 1 << 20  # bytes that are asked for at a time
_LEAVING = 2.0  # seconds that what was sent may take to leave when the process ends

_Key = tuple[int, int, int]  # the sender, whose messages they are, and the tag


class _Sending:
    """A message that goes out, and what is left of it."""

    def __init__(self, head: bytes, content: memoryview) -> None:
        self.left = [memoryview(head), content] if content.nbytes else [memoryview(head)]
        self.done = False

    def Test(self) -> bool:
        return self.done

    def Cancel(self) -> None:
        """It goes out all the same."""


class _Receiving:
    """A message that is to come."""

    def __init__(self, links: _Links, key: _Key, into: memoryview) -> None:
        self._links, self.key, self.into = links, key, into
        self.done = False

    def Test(self) -> bool:
        return self.done

    def Cancel(self) -> None:
        self._links.cancel(self)


class _Done:
    """What needs nothing more."""

    def Test(self) -> bool:
        return True

    def Cancel(self) -> None:
        """There is nothing to take back."""


class _Link:
    """A connection to a rank: what is to be sent, and what is being received."""

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self.connection = rank, connection
        self.outgoing: deque[_Sending] = deque()
        self.head = bytearray(_HEAD.size)
        self.key: _Key | None = None  # of the message whose head has come
        self.whole: Any = self.head
        self.room = memoryview(self.head)
        self.receiving: _Receiving | None = None


class _Links:
    """All connections of a process, and what has come."""

    def __init__(self, connections: Mapping[int, socket.socket]) -> None:
        self.links = {rank: _Link(rank, connection) for rank, connection in connections.items()}
        self.gone: list[int] = []
        self._lock = threading.Lock()
        self._posted: dict[_Key, deque[_Receiving]] = {}
        self._come: dict[_Key, deque[bytearray]] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = os.pipe()[::-1]
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        for link in self.links.values():
            self._selector.register(link.connection, selectors.EVENT_READ, link)
        self._ends = False
        self._thread = threading.Thread(target=self._work, name="tvm_axe messages", daemon=True)
        self._thread.start()

    def send(self, rank: int, message: _Sending) -> None:
        with self._lock:
            link = self.links[rank]
            if rank in self.gone:
                message.done = True  # its memory is free; that nobody gets it is seen by who waits for an answer
                return
            link.outgoing.append(message)
            if len(link.outgoing) == 1:
                self._write(link)
            if link.outgoing:
                self._selector.modify(link.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, link)
        self._rouse()

    def receive(self, request: _Receiving) -> None:
        with self._lock:
            come = self._come.get(request.key)
            if come:
                _fill(request, come.popleft())
            else:
                self._posted.setdefault(request.key, deque()).append(request)

    def cancel(self, request: _Receiving) -> None:
        with self._lock:
            if request.done:
                return
            posted = self._posted.get(request.key, ())
            if request in posted:
                posted.remove(request)  # type: ignore[union-attr]
            link = self.links[request.key[0]]
            if link.receiving is request:
                # What is left of it goes where nobody looks.
                link.receiving, left = None, link.room.nbytes
                link.whole, link.key = bytearray(left), None if link.key is None else (*link.key[:2], -1)
                link.room = memoryview(link.whole)
            request.done = True

    def take(self, rank: int | None, channel: int, tag: int) -> tuple[int, bytearray] | None:
        with self._lock:
            for source in self.links if rank is None else (rank,):
                come = self._come.get((source, channel, tag))
                if come:
                    return source, come.popleft()
        return None

    def leave(self) -> None:
        """Wait a little for what was sent to leave, and close the connections."""
        nap, deadline = Nap(), Deadline(_LEAVING)
        while any(link.outgoing for link in self.links.values()) and not deadline.passed:
            nap.take()
        self._ends = True
        self._rouse()
        self._thread.join(_LEAVING)
        for link in self.links.values():
            link.connection.close()

    def _rouse(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._wake, b"\0")

    def _work(self) -> None:
        while not self._ends:
            for key, events in self._selector.select():
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._woken, 1 << 12)
                    continue
                with self._lock:
                    if events & selectors.EVENT_WRITE and key.data.rank not in self.gone:
                        self._write(key.data)
                    if events & selectors.EVENT_READ and key.data.rank not in self.gone:
                        self._read(key.data)

    def _write(self, link: _Link) -> None:
        try:
            while link.outgoing:
                message = link.outgoing[0]
                count = link.connection.sendmsg(message.left)
                while count and count >= message.left[0].nbytes:
                    count -= message.left.pop(0).nbytes
                    if not message.left:
                        break
                if message.left:
                    message.left[0] = message.left[0][count:]
                    return
                message.done = True
                link.outgoing.popleft()
            self._selector.modify(link.connection, selectors.EVENT_READ, link)
        except BlockingIOError:
            pass
        except OSError:
            self._lose(link)

    def _read(self, link: _Link) -> None:
        try:
            count = link.connection.recv_into(link.room, min(link.room.nbytes, _PIECE))
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self._lose(link)
            return
        link.room = link.room[count:]
        if link.room.nbytes:
            return
        if link.whole is link.head and link.key is None:
            channel, tag, nbytes = _HEAD.unpack(link.head)
            link.key = link.rank, channel, tag
            posted = self._posted.get(link.key)
            if posted and posted[0].into.nbytes == nbytes:
                link.receiving = posted.popleft()
                link.whole, link.room = link.receiving.into, link.receiving.into
            else:
                link.whole = bytearray(nbytes)
                link.room = memoryview(link.whole)
        if not link.room.nbytes:
            self._deliver(link)

    def _deliver(self, link: _Link) -> None:
        """A message has come whole."""
        assert link.key is not None  # its head had come before
        if link.receiving is not None:
            link.receiving.done = True
        elif link.key[2] >= 0:
            posted = self._posted.get(link.key)
            if posted:
                _fill(posted.popleft(), link.whole)
            else:
                self._come.setdefault(link.key, deque()).append(link.whole)
        link.key, link.receiving, link.whole, link.room = None, None, link.head, memoryview(link.head)

    def _lose(self, link: _Link) -> None:
        """The other end is closed."""
        self.gone.append(link.rank)
        self._selector.unregister(link.connection)
        while link.outgoing:
            link.outgoing.popleft().done = True


def _view(content: Any) -> memoryview:
    view = memoryview(content)
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def _fill(request: _Receiving, come: bytearray) -> None:
    """Give a message to who waits for it; one of another length, which ours never send, is no answer."""
    if len(come) == request.into.nbytes:
        request.into[:] = come
        request.done = True


class TcpMessages(Messages):
    """Messages over connections to the other ranks.

    Parameters
    ----------
    rank : int
        This rank's number.
    connections : mapping of int to socket
        One that doesn't block to each other rank.
    """

    tags = _TAGS

    def __init__(self, rank: int, connections: Mapping[int, socket.socket]) -> None:
        self.rank, self.size = rank, len(connections) + 1
        self._links = _Links(connections)
        self._channel = 0

    def send(self, rank: int, tag: int, content: Any) -> Request:
        view = _view(content)
        message = _Sending(_HEAD.pack(self._channel, tag, view.nbytes), view)
        self._links.send(rank, message)
        return message

    def receive(self, rank: int, tag: int, into: Any) -> Request:
        request = _Receiving(self._links, (rank, self._channel, tag), _view(into))
        self._links.receive(request)
        return request

    def take(self, tag: int, rank: int | None = None) -> tuple[int, bytes | bytearray] | None:
        return self._links.take(rank, self._channel, tag)

    def another(self) -> tuple[Messages, Request]:
        other = TcpMessages.__new__(TcpMessages)
        other.rank, other.size, other._links, other._channel = self.rank, self.size, self._links, self._channel + 1
        return other, _Done()

    def gone(self) -> Sequence[int]:
        return tuple(self._links.gone)

    def finish(self, whoever_began: bool = False) -> None:
        self._links.leave()

    def abort(self, status: int) -> NoReturn:
        self._links.leave()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # the others see that this end is closed
