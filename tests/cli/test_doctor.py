"""`tvm-axe doctor`."""

import json
import os

import pytest
import tvm

from tvm_axe.cli import main
from tvm_axe.collective import registry


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
