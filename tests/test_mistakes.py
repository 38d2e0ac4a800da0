"""The likeliest mistakes at each door are refused in words that say what to write; what is in hand says what it is."""

import subprocess
import sys

import numpy as np
import pytest
import tvm
from tvm.error import DiagnosticError
from tvm.relax.frontend import nn
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe import tile
from tvm_axe.machines.nvcc import cubin
from tvm_axe.machines.target import as_given
from tvm_axe.stream import StreamProgram, StreamType


@T.prim_func(s_tir=True)
def double(a: T.Buffer((4, 8), "float32"), b: T.Buffer((4, 8), "float32")):
    for i, j in T.grid(4, 8):
        with T.sblock("double"):
            vi, vj = T.axis.remap("SS", [i, j])
            b[vi, vj] = a[vi, vj] * T.float32(2)


def module() -> tvm.IRModule:
    return tvm.IRModule({"main": double})


def model() -> tvm.IRModule:
    return nn.Linear(4, 4).export_tvm({"forward": {"x": nn.spec.Tensor([2, 4], "float32")}})[0]


def loads() -> tuple[StreamProgram, axe.AxeError]:
    program = StreamProgram("p")
    return program, program.load(program.tensor("x", 16, 32), (16, 32))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: axe.Schedule(double), axe.ScheduleError, 'name the mesh, for example mesh={"tp": 2}'),
        (
            lambda: axe.Schedule(len, mesh={"tp": 2}),
            axe.ScheduleError,
            "len>, a builtin_function_or_method, can't be scheduled; valid is a function of",
        ),
        (
            lambda: axe.compile(len),
            axe.LowerError,
            "len>, a builtin_function_or_method, is no program; valid are a schedule, a function of TensorIR",
        ),
        (
            lambda: axe.compile(nn.Linear(4, 4)),
            axe.LowerError,
            "Linear is a module of Relax's frontend; compile what exp",
        ),
        (
            lambda: axe.compile((module(), [])),
            axe.LowerError,
            "as export_tvm gives it, is no program; compile its first",
        ),
        (
            lambda: axe.compile(double, target="cpu"),
            axe.TuneError,
            "'cpu' names no target: .*valid are \"llvm\" for this",
        ),
        (lambda: as_given(None), axe.TuneError, "None names no target: .*; valid are"),
        (lambda: tile.compile(double, target=3), axe.TuneError, "3 names no target: .*; valid are"),
        (lambda: tile.compile(double), axe.TileError, "SBlockRealize at its top; a function of blocks is compiled by"),
        (lambda: axe.launch({"tp": 2}, timeout="60"), axe.InputError, "positive number of seconds, not '60'"),
        (
            lambda: axe.tune(len),
            axe.TuneError,
            "len>, a builtin_function_or_method, is no program; valid are a function of TensorIR and a schedule",
        ),
        (lambda: axe.tune(double, trials="8"), axe.TuneError, "trials: at least one candidate is needed, not '8'"),
        (
            lambda: axe.tune(double, mesh={"tp": 2}, keep=["c"]),
            axe.TuneError,
            "keep: the program has no output c; its outputs are b",
        ),
        (lambda: axe.tune(double, mesh={"tp": 2}, keep="b"), axe.TuneError, r"such as \['b'\], not 'b'"),
        (lambda: axe.compile(model(), mesh={"tp": 2}, memory="1GB"), axe.InputError, "as a number, not '1GB'"),
        (lambda: loads()[0].run([1]), axe.StreamError, r"inputs are a mapping from name to values, not \[1\]"),
        (lambda: loads()[1].map(len), axe.StreamError, "Map: .*len> is no TileFunction; valid is one of"),
        (
            lambda: loads()[0].load(loads()[0].tensor("y", 4, 4), (4,)),
            axe.StreamError,
            r"rows and columns.* not \(4,\)",
        ),
        (lambda: StreamType(16, "float32"), axe.StreamError, r"a shape is a sequence of dims, such as \(16,\), not 16"),
    ],
)
def test_what_is_given(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_coordinates_are_named_as_there_are_extents():
    """TVMScript reports what is raised in it as an error of its own, with the line."""
    with pytest.raises(DiagnosticError, match="kernel: it has 1 extent, so 1 coordinate; valid is `as i, without brac"):

        @T.prim_func
        def one(A: T.Buffer((4,), "float32")):
            with tile.kernel(1) as (m,):
                A[m] = 0.0

    with pytest.raises(
        DiagnosticError, match=r"parallel: it has 2 extents, so as many coordinates; valid is `as \(i, j"
    ):

        @T.prim_func
        def two(A: T.Buffer((4, 4), "float32")):
            with tile.kernel(1), tile.parallel(4, 4) as (i,):
                A[i, 0] = 0.0

    with pytest.raises(DiagnosticError, match="Undefined variable: i"):

        @T.prim_func
        def unknown(A: T.Buffer((4,), "float32")):
            with tile.kernel(1) as m:
                A[m + i] = 0.0  # noqa: F821


def test_an_architecture_that_the_compiler_of_cuda_does_not_know(tmp_path):
    from tvm_axe.machines.cache import Cache
    from tvm_axe.machines.nvcc import find_compiler

    try:
        find_compiler()
    except axe.TileError as error:
        pytest.skip(str(error))
    target = tvm.target.Target({"kind": "cuda", "arch": "sm_900"})
    with pytest.raises(axe.TuneError, match=r"knows no GPU architecture sm_900; valid is one that it has"):
        cubin('extern "C" __global__ void f() {}', target, Cache(tmp_path))


@pytest.mark.skipif(tvm.cuda().exist, reason="there is a GPU to measure on")
def test_nothing_is_tuned_for_a_device_that_is_not_there(tmp_path):
    with pytest.raises(axe.TuneError, match="this machine has no cuda device; tune on one that has, or"):
        axe.tune(double, target="cuda", trials=1, work_dir=tmp_path)
    assert not [*tmp_path.iterdir()]


def test_arrays_that_are_not_contiguous_are_taken():
    exe = axe.compile(double, work_dir=None, keep=False)
    array = np.arange(64, dtype="float32").reshape(8, 8)[:, ::2].T
    np.testing.assert_array_equal(exe(array), array * 2)


# ---- What is printed by who has something in hand ------------------------------------------------------------------


def test_what_is_in_hand_says_what_it_is(capfd):
    exe = axe.compile(double, work_dir=None, keep=False)
    assert repr(exe) == "<an executable of double on one device, for llvm; show() says more>"
    sch = axe.Schedule(double, mesh={"tp": 2})
    sch.shard("double", "i", "tp")
    shared = axe.compile(sch, target="cuda:sm_80", work_dir=None, keep=False)
    assert repr(shared) == "<an executable of double on the mesh tp=2, for sm_80; show() says more>"
    assert str(shared.expected()).startswith("double: C-AG on tp=2, expected")
    assert as_given("cuda") == {"kind": "cuda"}
    assert "sm_50" not in capfd.readouterr().err


def test_streams_without_their_extra_say_which():
    code = "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n, *p: None if n == 'sympy' else f(n, *p)"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport tvm_axe.stream"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.endswith("needs sympy, which comes with an extra: pip install tvm-axe[stream]\n")
