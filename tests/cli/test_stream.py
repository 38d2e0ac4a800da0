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


def test_blocks_of_attention(capsys):
    found = {}
    for block in ((), ("--block", "4,4,4,4"), ("--block", "1,1,2,12"), ("--block", "4", "--regions", "2")):
        assert cli.main(["stream", "run", "attention-coarse", "--json", *block]) == 0
        found[block] = json.loads(capsys.readouterr().out)
        assert found[block]["relative_error"] < 1e-5
    even, same, uneven, two = (each["cycles"] for each in found.values())
    assert even == same < min(two, uneven)


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
        (["run", "attention-coarse", "--block", "4,3"], "blocks of 7 requests in all, and there are 16"),
        (["run", "attention-dynamic", "--block", "4"], "--block is of attention-coarse, not of attention-dynamic"),
        (["run", "moe-static", "--regions", "4"], "moe-static takes no regions; programs of attention do"),
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


PRODUCT = """
from tvm.script import tirx as T
from tvm_axe import tile

@T.prim_func
def product(A: T.Buffer((50, 96), "{dtype}"), B: T.Buffer((96, 64), "{dtype}"), C: T.Buffer((50, 64), "{dtype}"),
            scale: T.float32):
    bm = tile.knob("bm", (32, 16))
    with tile.kernel(tile.cdiv(50, bm), 2) as (i, j):
        a = tile.shared((bm, 32), "{dtype}")
        b = tile.shared((32, 32), "{dtype}")
        c = tile.fragment((bm, 32), "float32")
        tile.fill(c, 0)
        for k in tile.pipelined(3):
            tile.copy(A[i * bm, k * 32], a)
            tile.copy(B[k * 32, j * 32], b)
            tile.gemm(a, b, c)
        with tile.parallel(bm, 32) as (x, y):
            c[x, y] = c[x, y] * scale
        tile.copy(c, C[i * bm, j * 32])

def summed_rows():
    @T.prim_func
    def sums(X: T.Buffer((4, 64), "float32"), Y: T.Buffer((1, 64), "float32")):
        with tile.kernel(4) as i:
            x = tile.fragment((1, 64), "float32")
            tile.copy(X[i, 0], x)
            tile.copy(x, Y[0, 0], atomic="add")
    return sums
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_run_of_a_tile_program(capsys, tmp_path, dtype):
    file, trace = tmp_path / "product.py", tmp_path / "t.json"
    file.write_text(PRODUCT.format(dtype=dtype), encoding="utf-8")
    command = ["stream", "run", "--tile", f"{file}:product", "--given", "scale=0.5"]
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cycles"] > 0 and found["relative_error"] < (1e-5 if dtype == "float32" else 1e-2)
    assert cli.main([*command, "--knob", "bm=16", "--units", "--trace", str(trace)]) == 0
    said = capsys.readouterr().out
    assert "gemm_c0" in said and "relative error beside the program compiled for this CPU: " in said
    assert json.loads(trace.read_text())["traceEvents"]


def test_tile_programs_that_cannot_be_run(capsys, tmp_path):
    file = tmp_path / "product.py"
    file.write_text(PRODUCT.format(dtype="float32"), encoding="utf-8")
    for arguments, message in (
        ([], "stream run takes the NAME of a program, as `list` names it, or --tile FILE.py:NAME"),
        (["moe-static", "--tile", f"{file}:product"], "stream run takes the NAME"),
        (["--tile", f"{file}:product"], "scale isn't known"),
        (["--tile", f"{file}:summed_rows"], "product.py, line 28: copy x to Y, adding atomically: Y is joined with"),
    ):
        assert cli.main(["stream", "run", *arguments]) == 2
        assert message in capsys.readouterr().err
