"""`tvm-axe doctor`."""

import json
import os
import socket

import pytest
import tvm

from tvm_axe.cli import elsewhere, main
from tvm_axe.collective import registry
from tvm_axe.collective.engine import Finding


def test_all_engines_are_looked_at(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "apache-tvm 0.27.0.post1" in out
    for name in registry.names():
        assert f"\n{name}: " in out
    assert "\nprocesses: ready\n" in out
    assert f"{len(os.sched_getaffinity(0))} that this process may run on" in out


def test_as_json(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["engines"]) == set(registry.names()) and found["versions"]["python"]
    assert all(set(each) == {"what", "state", "remedy"} for engine in found["engines"].values() for each in engine)


def test_what_is_missing_has_a_remedy(capsys, monkeypatch):
    """The exit code says so of the engine that was asked for."""
    assert main(["doctor", "--engine", "threads"]) == 0
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert main(["doctor", "--engine", "mpi"]) == 1
    out = capsys.readouterr().out
    assert "mpi: something is missing" in out and "-> pip install tvm-axe[mpi]" in out


def test_gpus_are_named_or_missed(capsys):
    code = main(["doctor", "--engine", "cuda"])
    out = capsys.readouterr().out
    if tvm.cuda(0).exist:
        assert code == 0 and "GPU 0  " in out and "driver" in out
    else:
        assert code == 1 and 'engine "cuda" ' in out and "-> " in out


def test_an_unknown_engine_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "--engine", "gloo"])
    assert "invalid choice: 'gloo'" in capsys.readouterr().err


def test_a_host_that_is_this_one(capsys):
    """It is asked as others are, without ssh, and comes back here."""
    assert main(["doctor", "--engine", "ranks", "--hosts", "localhost", "--launcher", "/no/launcher", "--json"]) == 0
    (findings,) = json.loads(capsys.readouterr().out)["hosts"].values()
    states = {finding["what"]: finding["state"] for finding in findings}
    assert states["host"] == "this machine" and states["way back"] == "127.0.0.1 takes connections"
    assert "apache-tvm 0.27.0.post1" in states["versions"] and states["cpu"]


def test_a_host_that_is_not_reached(capsys):
    assert main(["doctor", "--hosts", "far.invalid,localhost:2", "--launcher", "/bin/false", "--engine", "ranks"]) == 1
    first, second = capsys.readouterr().out.split("\n\n")
    assert first.startswith("far.invalid: something is missing\n  host  ") and "  -> " in first
    assert second.startswith("localhost: something is missing\n") and "\n  way to far.invalid  far.invalid: " in second


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hosts", ","], "--hosts: names no host"),
        (["--hosts", "a,-x"], "'-x' names no host"),
        (["--launcher", "x"], "--launcher is what reaches --hosts, and there are none"),
        (["--measure", "--hosts", "a"], "--measure measures this machine"),
    ],
)
def test_hosts_that_can_not_be_asked(options, message, capsys):
    assert main(["doctor", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_port_that_nobody_listens_at(capsys):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{nobody.getsockname()[1]}"
        assert main(["doctor", "--engine", "threads", "--reach", place]) == 1
        assert f"way back  {place}: " in capsys.readouterr().out
        nobody.listen()
        assert main(["doctor", "--engine", "threads", "--reach", place]) == 0
    assert main(["doctor", "--engine", "threads", "--reach", "nowhere:x"]) == 1
    capsys.readouterr()
    ways = ["--reach", "nowhere.invalid", "--reach", "localhost", "--json"]
    assert main(["doctor", "--engine", "threads", *ways]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["reach"]  # none to this machine
    assert finding["what"] == "way to nowhere.invalid" and finding["remedy"]


def test_a_host_that_refuses_is_reached(monkeypatch):
    monkeypatch.setattr(elsewhere, "is_here", lambda _: False)
    assert elsewhere.reach(["127.0.0.1"]) == [Finding("way to 127.0.0.1", "it answers")]
