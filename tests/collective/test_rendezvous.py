"""Processes that find each other by TCP, and the messages between them; ranks are threads here."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tvm_axe.collective.messages import Deadline, Messages, Nap, Request
from tvm_axe.collective.rendezvous import Variables, meet
from tvm_axe.collective.tcp import TcpMessages
from tvm_axe.errors import InputError, WorkerError

VARIABLES = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def told(rank: int, size: int, port: int, **others: Any) -> Variables:
    return Variables(rank, size, rank, size, "127.0.0.1", port, **others)


def at_once(ranks: list[int], do: Callable[[int], Any]) -> list[Any]:
    """What each rank returns, or the error that it raises."""

    def caught(rank: int) -> Any:
        try:
            return do(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(caught, ranks))


def connected(size: int, port: int) -> list[TcpMessages]:
    found = at_once(list(range(size)), lambda rank: TcpMessages(rank, meet(told(rank, size, port), 20)))
    assert all(isinstance(each, TcpMessages) for each in found), found
    return found


def done(request: Request, seconds: float = 10) -> bool:
    deadline = Deadline(seconds)
    while not request.Test() and not deadline.passed:
        time.sleep(1e-3)
    return request.Test()


def taken(messages: Messages, tag: int, rank: int | None = None) -> tuple[int, bytes]:
    deadline = Deadline(10)
    while (found := messages.take(tag, rank)) is None:
        assert not deadline.passed, f"nothing came with tag {tag}"
        time.sleep(1e-3)
    return found[0], bytes(found[1])


def test_naps_may_go_on_for_long() -> None:
    nap = Nap(longest=1e-9)
    for _ in range(20_000):
        nap.take()


def test_what_torchrun_says() -> None:
    variables = Variables.told(VARIABLES | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "OTHER": "x"})
    assert variables == Variables(1, 4, 1, 2, "127.0.0.1", 29500)
    assert Variables.told({}) is None and Variables.told(VARIABLES | {"WORLD_SIZE": "1", "RANK": "0"}) is None
    theirs = Variables.told(VARIABLES | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "job"})
    assert theirs is not None and theirs.ports[0] == 29501 and theirs.job == "job"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"MASTER_PORT": None}, "RANK is set, and MASTER_PORT is not"),
        ({"WORLD_SIZE": "four"}, "WORLD_SIZE must be a number, not 'four'"),
        ({"RANK": "4"}, "RANK=4 must be below WORLD_SIZE=4"),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK=2 below LOCAL_WORLD_SIZE=2"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT must be a port, not 70000"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, str | None], message: str) -> None:
    environment = {name: text for name, text in (VARIABLES | changed).items() if text is not None}
    with pytest.raises(InputError, match=message):
        Variables.told(environment)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_all_are_connected(size: int, port: int) -> None:
    found = connected(size, port)
    for rank, messages in enumerate(found):
        assert (messages.rank, messages.size) == (rank, size)
        for other in set(range(size)) - {rank}:
            messages.send(other, 7, f"{rank} to {other}".encode())
    for rank, messages in enumerate(found):
        for other in set(range(size)) - {rank}:
            assert taken(messages, 7, other) == (other, f"{other} to {rank}".encode())
    for messages in found:
        messages.finish()


def test_who_did_not_come_is_named_everywhere(port: int) -> None:
    began = time.monotonic()
    found = at_once([0, 1, 4], lambda rank: meet(told(rank, 5, port), 1.5))
    expected = f"launch: of the 5 ranks of the job, rank 2, rank 3 did not come to 127.0.0.1:{port} in 1.5 s"
    assert [(type(each), str(each)) for each in found] == [(WorkerError, expected)] * 3
    assert time.monotonic() - began < 8


def test_rank_0_does_not_come(port: int) -> None:
    found = at_once([1, 2], lambda rank: meet(told(rank, 3, port), 1))
    assert all(isinstance(each, WorkerError) for each in found)
    assert all(str(each).startswith(f"launch: rank 0 at 127.0.0.1:{port} did not answer within 1 s") for each in found)


def test_who_says_what_it_hears_is_not_rank_0(port: int) -> None:
    def echo() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.sendall(connection.recv(1 << 16))

    with socket.create_server(("127.0.0.1", port)) as server:
        threading.Thread(target=echo, daemon=True).start()
        (found,) = at_once([1], lambda rank: meet(told(rank, 2, port), 1))
        server.shutdown(socket.SHUT_RDWR)
    assert isinstance(found, WorkerError)
    assert str(found).startswith("launch: rank 0 at ")


def test_who_says_nothing_is_not_waited_for_alone(port: int) -> None:
    """Somebody takes every connection at the first port and never speaks; rank 0 listens at the next."""
    with socket.create_server(("127.0.0.1", port)):
        (alone,) = at_once([1], lambda rank: meet(told(rank, 2, port), 0.5))
        ends = at_once([0, 1, 2], lambda rank: meet(told(rank, 3, port), 20))
    assert isinstance(alone, WorkerError)
    expected = (
        f"launch: rank 0 at 127.0.0.1:{port} did not answer within 0.5 s (who listens at port {port} says nothing)"
    )
    assert str(alone) == expected
    assert [sorted(end) for end in ends] == [[1, 2], [0, 2], [0, 1]]
    for end in ends:
        for connection in end.values():
            connection.close()


def test_a_port_that_answers_itself_is_nobody(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def itself(place: tuple[str, int], timeout: float) -> socket.socket:
        connection = socket.socket()
        connection.bind(place)
        connection.settimeout(timeout)
        connection.connect(place)
        return connection

    monkeypatch.setattr(socket, "create_connection", itself)
    (found,) = at_once([1], lambda rank: meet(told(rank, 2, port), 1))
    assert isinstance(found, WorkerError)
    assert str(found).startswith(f"launch: rank 0 at 127.0.0.1:{port} did not answer within 1 s")


def test_two_are_one_rank(port: int) -> None:
    found = at_once([0, 1, 1], lambda rank: meet(told(rank, 3, port), 5))
    expected = f"launch: two processes are rank 1 of the job at 127.0.0.1:{port}"
    assert {str(each) for each in found[:1]} == {expected} and isinstance(found[0], InputError)
    assert any(str(each) == expected for each in found[1:])


def test_other_numbers_of_ranks(port: int) -> None:
    found = at_once([0, 1], lambda rank: meet(told(rank, 2 + rank, port), 5))
    assert {str(each) for each in found} == {"launch: rank 1 was told of 3 ranks, and rank 0 of 2"}


def test_others_at_the_port(port: int) -> None:
    """Somebody else listens at the first port; strangers come to the next, who say nothing, nonsense or too much."""
    with socket.create_server(("127.0.0.1", port)) as other:

        def leave() -> None:
            while True:
                try:
                    other.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=leave, daemon=True).start()
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(meet, told(0, 2, port, taken=True), 20)
            deadline, strangers = Deadline(10), list[socket.socket]()
            while len(strangers) < 4 and not deadline.passed:
                try:
                    strangers.append(socket.create_connection(("127.0.0.1", port + 1), 1))
                except OSError:
                    time.sleep(0.05)
            strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
            strangers[1].sendall(b"\0\0\0\2[]")
            strangers[2].sendall(b'\0\0\0\x1a{"job":"other","rank":1234}')
            second = pool.submit(meet, told(1, 2, port), 20)
            ends = first.result(30), second.result(30)
        other.shutdown(socket.SHUT_RDWR)
    for end in ends:
        for connection in end.values():
            connection.close()
    for stranger in strangers:
        stranger.close()


def test_messages_of_any_size_come_in_order(port: int) -> None:
    """Received into arrays asked for before or behind their coming, and by other tags, at the same time."""
    first, second = connected(2, port)
    rng = np.random.default_rng(0)
    sizes = [0, 1, 3, 100, 1 << 16, 5 << 20, 0, 7]
    arrays = [rng.integers(0, 256, size, dtype="uint8") for size in sizes]
    early = [np.full_like(array, 170) for array in arrays]
    requests = [second.receive(0, 1, array) for array in early]
    sent = [first.send(1, tag, array) for array in arrays for tag in (1, 2)]
    sent.append(first.send(1, 3, b"last"))
    assert taken(second, 3) == (0, b"last")
    late = [np.full_like(array, 170) for array in arrays]
    requests += [second.receive(0, 2, array) for array in late]
    assert all(map(done, requests + sent))
    for array, one, other in zip(arrays, early, late):
        np.testing.assert_array_equal(one, array)
        np.testing.assert_array_equal(other, array)
    assert second.take(1) is None and second.take(2) is None
    first.finish()
    second.finish()


def test_both_send_more_than_connections_hold(port: int) -> None:
    ends = connected(2, port)
    arrays = [np.random.default_rng(rank).standard_normal(1 << 21) for rank in range(2)]
    got = [np.full(1 << 21, np.nan) for _ in range(2)]
    requests = [ends[rank].send(1 - rank, 1, arrays[rank]) for rank in range(2)]
    time.sleep(0.2)
    requests += [ends[rank].receive(1 - rank, 1, got[rank]) for rank in range(2)]
    assert all(map(done, requests))
    np.testing.assert_array_equal(got, arrays[::-1])
    for end in ends:
        end.finish()


def test_what_is_taken_back_does_not_come(port: int) -> None:
    """Whether its message is there, on its way, or isn't sent yet; what comes behind it is whole."""
    first, second = connected(2, port)
    big, small = np.full(8 << 20, 1, "uint8"), np.full(8, 2, "uint8")
    never = np.zeros(8, "uint8")
    request = second.receive(0, 1, never)
    request.Cancel()
    assert request.Test()
    half = np.zeros_like(big)
    request = second.receive(0, 2, half)
    sending = first.send(1, 2, big)
    deadline = Deadline(10)
    while not half[0] and not deadline.passed:
        pass
    request.Cancel()
    assert request.Test()
    half[:] = 5
    first.send(1, 3, small)
    got = np.zeros(8, "uint8")
    assert done(second.receive(0, 3, got)) and (got == 2).all() and done(sending)
    assert (half == 5).all() and not never.any()
    first.finish()
    second.finish()


def test_others_are_not_taken_for_these(port: int) -> None:
    first, second = connected(2, port)
    ours, theirs = first.another()[0], second.another()[0]
    ours.send(1, 1, b"other")
    first.send(1, 1, b"one")
    assert taken(second, 1) == (0, b"one") and taken(theirs, 1) == (0, b"other") and second.take(1) is None
    first.finish()
    second.finish()


def test_who_is_gone_is_known(port: int) -> None:
    ends = connected(3, port)
    ends[1].send(0, 1, b"last words")
    ends[1].finish()
    deadline = Deadline(10)
    while (list(ends[0].gone()), list(ends[2].gone())) != ([1], [1]) and not deadline.passed:
        time.sleep(1e-3)
    assert (list(ends[0].gone()), list(ends[2].gone())) == ([1], [1])
    assert taken(ends[0], 1) == (1, b"last words")
    assert done(ends[0].send(1, 1, np.zeros(1 << 20, "uint8")))  # its memory is free
    ends[0].send(2, 1, b"still here")
    assert taken(ends[2], 1) == (0, b"still here")
    ends[0].finish()
    ends[2].finish()
