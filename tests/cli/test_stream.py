"""`tvm-axe stream`: what it prints, what it refuses."""

import json

import pytest

from tvm_axe import cli
from tvm_axe.stream.programs.samples import PROGRAMS
from tvm_axe.stream.published import DATA
from tvm_axe.stream.reproduce import Reproduction


def test_list(capsys):
    assert cli.main(["stream", "list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(PROGRAMS)


def test_run(capsys, tmp_path):
    trace = tmp_path / "t.json"
    assert cli.main(["stream", "run", "moe-shared", "--batch", "4", "--trace", str(trace)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("moe: ") and "relative error beside numpy in float64: " in said
    assert any(event["ph"] == "X" for event in json.loads(trace.read_text())["traceEvents"])
    assert cli.main(["stream", "run", "moe-shared", "--batch", "4", "--units"]) == 0
    assert "share0" in capsys.readouterr().out


def test_run_as_json(capsys):
    assert cli.main(["stream", "run", "attention-dynamic", "--seed", "4", "--json"]) == 0
    small = json.loads(capsys.readouterr().out)
    assert small["relative_error"] < 1e-5 and small["seed"] == 4
    # The models of real size are simulated only.
    assert cli.main(["stream", "run", "moe-dynamic", "--model", "mixtral", "--batch", "64", "--json"]) == 0
    real = json.loads(capsys.readouterr().out)
    assert real["relative_error"] is None and real["cycles"] > 1e6


def test_reproduce_takes_what_comes_with_the_package(capsys, monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(
        "tvm_axe.stream.reproduce.reproduce", lambda folder: asked.append(folder) or Reproduction([], [], 0)
    )
    assert cli.main(["stream", "reproduce"]) == 0
    assert cli.main(["stream", "reproduce", "--data", str(tmp_path), "--json"]) == 0
    assert asked == [DATA, tmp_path]
    text, line = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert "0 published results" in text and json.loads(line) == {"rows": [], "ratios": {}, "wall_s": 0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "moe"], "there is no program 'moe'; there are moe-static"),
        (["run", "moe-static", "--model", "llama"], "--model must be one of small, mixtral, qwen, not llama"),
        (["reproduce", "--data", "/nowhere"], "no published results"),
    ],
)
def test_what_cannot_be_used(capsys, arguments, message):
    assert cli.main(["stream", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_missing_packages(capsys, monkeypatch):
    monkeypatch.setattr("tvm_axe.cli.stream.find_spec", lambda name: None)
    assert cli.main(["stream", "list"]) == 2
    assert "tvm-axe stream needs sympy: pip install tvm-axe[stream]" in capsys.readouterr().err
