"""The process that holds a connection, with a tracker that is made up."""

from __future__ import annotations

import socket
import threading

import pytest
from tvm.rpc import base

from tvm_axe import _tvm
from tvm_axe.errors import TuneError
from tvm_axe.meta.fleet import link
from tvm_axe.meta.fleet.link import ASK, WAIT


def _serve(listener, answer):
    """Be a tracker that answers one request, whatever it is."""
    connection, _ = listener.accept()
    with connection:
        connection.sendall(base.recvall(connection, 4))
        base.recvjson(connection)
        base.sendjson(connection, answer)


@pytest.fixture
def wait():
    """What comes of waiting for a server if the tracker gives an answer."""

    def ask(answer):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=_serve, args=(listener, answer))
            thread.start()
            try:
                return link._Link().handle((WAIT, listener.getsockname(), "k"))
            finally:
                thread.join()

    return ask


def test_a_server_is_what_the_tracker_gives(wait):
    assert wait([base.TrackerCode.SUCCESS, ["board", 9090, "k:0.5"]]) == ("board", 9090, "k:0.5")
    with pytest.raises(OSError, match="the tracker refused: no"):
        wait([base.TrackerCode.FAIL, "no"])


def test_a_tracker_that_vanishes_while_it_is_waited_for_is_noticed(wait, monkeypatch):
    """There is no limit of time, so the system must look whether it is there."""
    given = _tvm.RpcTracker.given

    def watched(self):
        assert self.socket.gettimeout() is None
        assert self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert 0 < self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 60_000
        return given(self)

    monkeypatch.setattr(_tvm.RpcTracker, "given", watched)
    assert wait([base.TrackerCode.SUCCESS, ["board", 9090, "k:0.5"]])[0] == "board"


def test_nothing_is_asked_of_nobody():
    with pytest.raises(TuneError, match="nothing is connected"):
        link._Link().handle((ASK, "[]"))
