"""What names a fleet, and what is wrong with it in words."""

from __future__ import annotations

import math
import socket

import pytest

import tvm_axe as axe
from tvm_axe.cli import main
from tvm_axe.cli.worker import given_cores, warn_of
from tvm_axe.errors import InputError, TuneError
from tvm_axe.meta.fleet.fleet import Fleet, address, fleet_of


@pytest.fixture
def nowhere():
    """An address at which nobody listens, and nobody will while the test runs."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


def test_an_address_has_a_host_and_may_have_a_port():
    assert address("10.0.0.1:9000") == ("10.0.0.1", 9000)
    assert address("board") == ("board", 9190)
    assert Fleet("board", "k").address == ("board", 9190)


@pytest.mark.parametrize("text", ["", ":9190", "board:", "board:x", "board:0", "board:65536", "board:-1", "board: 1"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(InputError, match="is no address; host:port is needed"):
        address(text)
    with pytest.raises(InputError, match="is no address"):
        Fleet(text, "k")


@pytest.mark.parametrize("key", ["", "two words", "a:b", "a\tb", "\n"])
def test_what_is_no_key_is_refused(key):
    with pytest.raises(InputError, match=r"key: .* names no machines"):
        Fleet("board", key)


@pytest.mark.parametrize("name", ["workers", "drift", "noise", "every", "silent"])
@pytest.mark.parametrize("value", [0, -1, math.nan])
def test_numbers_are_positive(name, value):
    with pytest.raises(InputError, match=f"{name}: it must be positive, not"):
        Fleet("board", "k", **{name: value})


def test_arguments_make_a_fleet_or_have_one():
    assert fleet_of(None, None, None) is None
    assert fleet_of("board:1", "k", 3) == Fleet("board:1", "k", 3)
    given = Fleet("board:1", "k", silent=3.0)
    assert fleet_of(given, None, None) is given


@pytest.mark.parametrize(
    "arguments, why",
    [
        (("board:1", None, None), "key: name the machines at board:1 that are to measure"),
        ((None, "k", None), "key: it is for a fleet, which is to be named too"),
        ((None, None, 2), "workers: it is for a fleet"),
        ((Fleet("board:1", "k"), "k", None), "key: it is a field of the Fleet"),
        ((Fleet("board:1", "k"), None, 2), "workers: it is a field of the Fleet"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments, why):
    with pytest.raises(InputError, match=why):
        fleet_of(*arguments)


def test_tuning_refuses_them_before_anything_else(matmul, tmp_path):
    with pytest.raises(InputError, match="key: it is for a fleet"):
        axe.tune(matmul(8, 8, 8), key="k", work_dir=tmp_path)
    assert not any(tmp_path.iterdir())


def test_without_a_tracker_tuning_says_so(matmul, tmp_path, nowhere):
    with pytest.raises(TuneError, match=rf"fleet: no tracker at {nowhere}: .*refused.*; tvm-axe fleet tracker is one"):
        axe.tune(matmul(8, 8, 8), work_dir=tmp_path, fleet=nowhere, key="k", progress=False)


def test_without_a_tracker_its_status_says_so(capsys, nowhere):
    assert main(["fleet", "status", "--tracker", nowhere]) == 2
    assert f"--tracker: no tracker at {nowhere}: " in capsys.readouterr().err


def test_who_listens_and_is_no_tracker_is_named_so(matmul, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.01)
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(TuneError, match=f"fleet: no tracker at {place}: timed out"):
            axe.tune(matmul(8, 8, 8), work_dir=tmp_path, fleet=place, key="k", progress=False)


@pytest.mark.parametrize("given", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_this_machine_alone_needs_no_warning(given, capsys):
    warn_of(given, 9)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("given", ["0.0.0.0", "::", "10.0.0.1", "board"])
def test_whoever_can_connect_can_run_code(given, capsys):
    warn_of(given, 9)
    assert f"warning: listening on {given}:9: whoever can connect to it can run code" in capsys.readouterr().err


def test_cores_are_listed(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3, 5})
    assert given_cores("0,2-3,5") == {0, 2, 3, 5}
    for text in ("", "x", "1-", "-1", "1--2"):
        with pytest.raises(InputError, match="is no list of cores"):
            given_cores(text)
    for text in ("4", "3-5", "3-2"):
        with pytest.raises(InputError, match=r"isn't among those that this process may use, \[0, 1, 2, 3, 5\]"):
            given_cores(text)
