"""`tvm-axe tile explain`, and how decisions are put in words."""

import subprocess
import sys

import pytest
from tvm.script import tirx as T

from tvm_axe import cli, tile
from tvm_axe.cli.inputs import load_file
from tvm_axe.errors import TileError, TuneError
from tvm_axe.machines.target import resolve_target
from tvm_axe.tile.plans import Decisions, Plan

PROGRAMS = """
from tvm.script import tirx as T

from tvm_axe import tile


@T.prim_func
def matmul(A: T.Buffer((64, 64), "float16"), C: T.Buffer((64, 64), "float16")):
    with tile.kernel(1):
        a = tile.shared((64, 64), "float16")
        c = tile.fragment((64, 64), "float32")
        tile.fill(c, 0)
        for k in tile.pipelined(4):
            tile.copy(A[0, k * 16], a)
            tile.gemm(a, a, c)
        tile.copy(c, C)


def made():
    return matmul


@T.prim_func
def sums(A: T.Buffer((64, 64), "float32"), B: T.Buffer((64,), "float32")):
    rows = tile.knob("rows", (16, 32))
    parts = tile.scratch((2, 64), "float32")
    with tile.kernel(64 // rows, 2) as (m, s):
        a = tile.fragment((rows, 32), "float32")
        part = tile.fragment((rows,), "float32")
        tile.copy(A[m * rows, s * 32], a)
        tile.sum(a, part)
        tile.copy(part, parts[s, m * rows])
    with tile.kernel(1):
        both = tile.fragment((2, 64), "float32")
        total = tile.fragment((64,), "float32")
        tile.copy(parts, both)
        tile.sum(both, total, axis=0)
        tile.copy(total, B)


def sized(n):
    return matmul


def nothing():
    return 3


def refused():
    @T.prim_func
    def func(A: T.Buffer((64, 64), "float16")):
        with tile.kernel(1):
            tile.copy(A[0, 0], A[1, 1])

    return func


@T.prim_func
def no_program(A: T.Buffer((4,), "float32")):
    A[0] = T.float32(0)


number = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "programs.py"
    path.write_text(PROGRAMS)
    return path


@pytest.mark.parametrize("name", ["matmul", "made"])
@pytest.mark.parametrize("target", ["llvm", "cuda", "cuda:sm_80", '{"kind": "cuda", "arch": "sm_80"}'])
def test_explain(file, name, target, capsys):
    assert cli.main(["tile", "explain", f"{file}:{name}", "--target", target]) == 0
    printed = capsys.readouterr().out
    program, _, decisions = printed.partition("\n\n")
    assert program == str(tile.read(load_file(file).matmul))
    assert decisions == tile.explain(load_file(file).matmul, target) + "\n"
    assert decisions.startswith("kernel\n")
    assert ("mma.sync" in decisions) == ("sm_80" in target)


@pytest.mark.parametrize("target", ["llvm", "cuda:sm_80"])
def test_explain_several_kernels(file, target, capsys):
    assert cli.main(["tile", "explain", f"{file}:sums", "--target", target, "--knob", "rows=32"]) == 0
    program, _, decisions = capsys.readouterr().out.partition("\n\n")
    read = tile.read_sequence(load_file(file).sums, {"rows": 32})
    assert program == str(read) and program.startswith("function sums(A, B)\n")
    assert decisions == tile.plan(read, target).explain() + "\n"
    assert decisions.startswith("knobs\n    rows = 32") and "\nsums_1\n    kernel\n" in decisions


@pytest.mark.parametrize(
    "name, target, message",
    [
        ("missing", "llvm", "has no 'missing'; needed is a tile program, or a function that returns one: it has made"),
        ("number", "llvm", "'number' is a int"),
        ("sized", "llvm", "called without arguments, it fails: sized() missing 1 required positional argument"),
        ("nothing", "llvm", "returns a int; needed is a PrimFunc"),
        ("refused", "llvm", "copy: both sides are elements"),
        ("no_program", "llvm", "a tile program is one `with tile.kernel(...)`"),
        ("matmul", "vulkan", "target vulkan: tile programs run on none such; valid are llvm, cuda:sm_90a"),
        ("matmul", "cuda:nine", "names no target"),
    ],
)
def test_refused(file, name, target, message, capsys):
    assert cli.main(["tile", "explain", f"{file}:{name}", "--target", target]) == 2
    assert message in capsys.readouterr().err


def test_decisions_are_grouped():
    @T.prim_func
    def func(A: T.Buffer((32,), "float32")):
        with tile.kernel(1):
            a = tile.shared((32,), "float32")
            for k in tile.pipelined(2):
                tile.copy(A[k * 8], a)

    program = tile.read(func)
    decisions = Decisions(program)
    (loop,) = program.body
    decisions.add("a", "in rows", "it is small")
    decisions.add(loop.body[0], "by one thread", "for want of others")
    decisions.add(loop, "2 stages", "they fit")
    decisions.add("grid", "one block", "there is one")
    decisions.add(program.tiles[0], "aligned", "vectors")
    plan = Plan(program=program, target=resolve_target("llvm"), decisions=decisions.made())
    assert plan.explain().splitlines() == [
        "kernel",
        "    grid: one block  (there is one)",
        "tiles",
        "    shared a: float32[32]: in rows  (it is small)",
        "    shared a: float32[32]: aligned  (vectors)",
        "loops",
        "    for k in pipelined(2): 2 stages  (they fit)",
        "operations",
        "    copy A[k * 8:k * 8 + 32] to a: by one thread  (for want of others)",
    ]


def test_targets():
    @T.prim_func
    def func(A: T.Buffer((32,), "float32")):
        with tile.kernel(1):
            tile.fill(A, 0)

    with pytest.raises(TileError, match="target c: tile programs run on none such; valid are llvm"):
        tile.plan(func, "c")
    with pytest.raises(TuneError, match="names no target"):
        tile.lower(func, "gpu")


def test_a_script_shows_what_its_program_does_wrong(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRAMS + "\n\nrefused()\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert "copy: both sides are elements" in done.stderr and "tile.copy(A[0, 0], A[1, 1])" in done.stderr
