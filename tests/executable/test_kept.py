"""What was compiled before is taken from disk, and is the same; what differs in anything is compiled anew."""

import logging
import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.script import from_source
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe import compiler
from tvm_axe.errors import InputError, LowerError
from tvm_axe.executable import kept
from tvm_axe.machines import backend_of, keeping, resolve_target
from tvm_axe.machines.builder import build_kept
from tvm_axe.machines.cache import Cache
from tvm_axe.programs import PROGRAMS
from tvm_axe.relax.packing import attached

DP = axe.Mesh({"dp": 2})


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    """A folder of its own, in which what is compiled is kept."""
    monkeypatch.setenv("TVM_AXE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(keeping.KEEP, "1")
    return Cache()


@pytest.fixture
def compiled(monkeypatch):
    """Counts what is compiled."""
    calls = []
    for name in ("_compiled", "_model", "_model_on_mesh"):
        own = getattr(compiler, name)
        monkeypatch.setattr(compiler, name, lambda *args, own=own: calls.append(1) or own(*args))
    return calls


def scaled(factor=2.0):
    @T.prim_func(s_tir=True)
    def scale(x: T.Buffer((8, 8), "float32"), y: T.Buffer((8, 8), "float32")):
        for i, j in T.grid(8, 8):
            with T.sblock("y"):
                vi, vj = T.axis.remap("SS", [i, j])
                y[vi, vj] = x[vi, vj] * T.float32(factor)

    return scale


def model(rows=4, weights=None, constant=None):
    """y = relu(x w) + constant, whose weight has been brought along if it is given."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((rows, 8), "float32"))
    w = relax.Var("w", relax.TensorType((8, 8), "float32"))
    with builder.function("main", [x, w], attrs={"num_input": 1}):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.relu(relax.op.matmul(x, w)))
            if constant is not None:
                y = builder.emit(relax.op.add(y, relax.const(constant)))
            y = builder.emit_output(y)
        builder.emit_func_output(y)
    mod = builder.get()
    if weights is not None:
        mod["main"] = mod["main"].with_attr("params", [tvm.runtime.tensor(weights)])
    return mod


def kept_programs(store):
    """How many files there are in the folder."""
    return len(store.entries())


def test_a_function_is_compiled_once(store, compiled):
    x = np.random.default_rng(0).standard_normal((8, 8)).astype("float32")
    first, second = (axe.compile(scaled(), work_dir=None) for _ in range(2))
    assert len(compiled) == 1 and kept_programs(store) == 2  # the program, and its code
    np.testing.assert_array_equal(first(x), 2 * x)
    np.testing.assert_array_equal(second(x), 2 * x)
    assert first.show() == second.show() and second.source is not None
    tvm.ir.assert_structural_equal(first.runnable, second.runnable)


def test_code_is_kept_by_what_it_is_made_of(store, monkeypatch):
    axe.compile(scaled(), work_dir=None)
    monkeypatch.setattr(tvm, "compile", None)  # what makes code
    y = axe.compile(scaled(), work_dir=None)(np.ones((8, 8), "float32"))
    np.testing.assert_array_equal(y, np.full((8, 8), 2, "float32"))


OTHERS = {
    "another constant": lambda: axe.compile(scaled(3.0), work_dir=None),
    "another target": lambda: axe.compile(scaled(), target={"kind": "llvm", "mcpu": "x86-64-v2"}, work_dir=None),
    "a mesh": lambda: axe.compile(scaled(), mesh=DP, work_dir=None),
    "another answer to what isn't owned": lambda: axe.compile(scaled(), work_dir=None, redistribute="refuse"),
    "a schedule": lambda: axe.compile(PROGRAMS["sgd"](DP).schedule("AR-C"), work_dir=None),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_differs_is_compiled_anew(compiled, other):
    axe.compile(scaled(), work_dir=None)
    OTHERS[other]()
    assert len(compiled) == 2


def test_where_the_text_stood_makes_no_difference(compiled):
    for lines in ("", "\n\n\n"):
        space = {"T": T}
        text = (
            f"{lines}@T.prim_func(s_tir=True)\ndef f(x: T.Buffer((4,), 'float32'), y: T.Buffer((4,), 'float32')):\n"
            "    for i in range(4):\n        with T.sblock('y'):\n            v = T.axis.spatial(4, i)\n"
            "            y[v] = x[v]\n"
        )
        axe.compile(from_source(text, space), work_dir=None)
    assert len(compiled) == 1


def test_records_count(compiled, tmp_path):
    folder = tmp_path / "logs" / "one"
    compile_it = partial(axe.compile, scaled(), work_dir=tmp_path / "logs")
    compile_it(), compile_it()
    assert len(compiled) == 1
    folder.mkdir(parents=True)
    (folder / "database_workload.json").write_text("")
    (folder / "database_tuning_record.json").write_text("\n")
    compile_it(), compile_it()
    assert len(compiled) == 2


def test_the_package_counts(compiled, monkeypatch):
    axe.compile(scaled(), work_dir=None)
    monkeypatch.setattr(kept, "sources", lambda: "edited")
    axe.compile(scaled(), work_dir=None)
    assert len(compiled) == 2


@pytest.mark.parametrize("how", ["variable", "argument", "context"])
def test_it_can_be_turned_off(store, compiled, monkeypatch, how):
    if how == "variable":
        monkeypatch.setenv(keeping.KEEP, "0")
    for _ in range(2):
        if how == "context":
            with tvm.transform.PassContext(config={"tirx.disable_vectorize": True}):
                axe.compile(scaled(), work_dir=None)
        else:
            axe.compile(scaled(), work_dir=None, keep=how != "argument")
    assert len(compiled) == 2 and kept_programs(store) == (how == "context")  # code is kept by what it is made of


def test_a_wrong_variable_is_refused(monkeypatch):
    monkeypatch.setenv(keeping.KEEP, "no")
    with pytest.raises(InputError, match="TVM_AXE_KEEP is 'no'; valid are 0"):
        axe.compile(scaled(), work_dir=None)


def test_what_is_refused_is_refused_again(store, compiled):
    for _ in range(2):
        with pytest.raises(LowerError, match="pack_weights"):
            axe.compile(scaled(), work_dir=None, pack_weights=True)
    assert len(compiled) == 2 and not kept_programs(store)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_what_is_damaged_is_said_and_compiled_again(store, compiled, caplog, damage):
    axe.compile(scaled(), work_dir=None)
    for path, *_ in store.entries():
        data = path.read_bytes()
        path.write_bytes({"cut": data[: len(data) // 2], "flipped": data[:-9] + b"?" + data[-8:], "empty": b""}[damage])
    with caplog.at_level(logging.WARNING, "tvm_axe"):
        y = axe.compile(scaled(), work_dir=None)(np.ones((8, 8), "float32"))
    np.testing.assert_array_equal(y, np.full((8, 8), 2, "float32"))
    assert len(compiled) == 2
    assert sum("is damaged: what it held is made again" in line.getMessage() for line in caplog.records) == 2


def test_what_is_no_archive_is_said_and_compiled_again(store, compiled, caplog):
    axe.compile(scaled(), work_dir=None)
    (program,) = [path for path, *_ in store.entries() if path.read_bytes()[32:34] == b"PK"]
    store.put(program.stem, b"whole, but something else")
    with caplog.at_level(logging.WARNING, "tvm_axe"):
        axe.compile(scaled(), work_dir=None)
    assert any("it is compiled again" in line.getMessage() for line in caplog.records)
    assert len(compiled) == 2


def test_a_program_on_a_mesh(compiled, caplog):
    program = PROGRAMS["adam"](DP)
    schedule = program.schedule([*program.schedules][-1])
    first, second = (axe.compile(schedule, work_dir=None) for _ in range(2))
    assert len(compiled) == 1
    assert first.show() == second.show() and first.stages == second.stages and first.layouts == second.layouts
    rng = np.random.default_rng(0)
    arrays = [abs(rng.standard_normal(each.shape)).astype(each.dtype) for each in first._inputs()]
    results = []
    for exe in (first, second):
        with exe, axe.launch(DP) as workers:
            results.append(exe.run(workers, *arrays))
    for one, two in zip(*results, strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_model(compiled):
    rng = np.random.default_rng(0)
    x, w, c = (rng.standard_normal(shape).astype("float32") for shape in ((4, 8), (8, 8), (8,)))
    want = np.maximum(x.astype("float64") @ w, 0) + c
    for mesh in (None, axe.Mesh({"tp": 2})):
        compiled.clear()
        for _ in range(2):
            exe = axe.compile(model(constant=c), mesh=mesh, work_dir=None)
            with exe:
                np.testing.assert_allclose(exe(x, w), want, rtol=1e-5, atol=1e-5)
        assert len(compiled) == 1


@pytest.mark.parametrize("mesh", [None, axe.Mesh({"tp": 2})])
def test_weights_brought_along_are_the_model_s(store, compiled, mesh):
    """Another model of the same functions with other weights has its own, and no weight is on disk."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4, 8)).astype("float32")
    for _ in range(2):
        w = rng.standard_normal((8, 8)).astype("float32")
        exe = axe.compile(model(weights=w), mesh=mesh, work_dir=None)
        np.testing.assert_array_equal(attached(model(weights=w))["w"].numpy(), w)
        with exe, exe.load() as session:
            got = np.asarray(session.main(x))
        np.testing.assert_allclose(got, np.maximum(x.astype("float64") @ w, 0), rtol=1e-5, atol=1e-5)
    assert len(compiled) == 1


def test_large_constants_are_not_kept(store, compiled, monkeypatch):
    monkeypatch.setattr(kept, "MOST", 16)
    for _ in range(2):
        axe.compile(model(constant=np.ones(8, "float32")), work_dir=None)
    assert len(compiled) == 2


def test_a_program_for_gpus_has_the_same_source_again(compiled):
    """What is read again is the same down to the source of its kernels, whose binaries are then found."""
    first, second = (axe.compile(scaled(), target="cuda:sm_90a", work_dir=None) for _ in range(2))
    assert len(compiled) == 1
    target = resolve_target("cuda:sm_90a")
    one, two = (backend_of(target).build(exe.runnable, target).source for exe in (first, second))
    assert one == two and "__global__" in one


def test_workers_keep_what_all_have_alike(store):
    """Kernels are compiled once for all workers; what has addresses of a process in it isn't kept."""
    program = PROGRAMS["sgd"](DP)
    exe = axe.compile(program.schedule("AR-C"), work_dir=None)
    arrays = [np.ones(each.shape, each.dtype) for each in exe._inputs()]
    with exe, axe.launch(DP) as workers:
        exe.run(workers, *arrays)
    there = {path.name for path, *_ in store.entries()}
    again = axe.compile(program.schedule("AR-C"), work_dir=None)
    with again, axe.launch(DP) as workers:
        again.run(workers, *arrays)
    assert {path.name for path, *_ in store.entries()} == there


def test_what_compiles_a_kept_program_takes_its_kernels_from_there(store, monkeypatch):
    exe = axe.compile(PROGRAMS["sgd"](axe.Mesh({"dp": 1})).schedule("AR-C"), work_dir=None)
    build_kept(exe.runnable, exe.target)
    monkeypatch.setattr(tvm, "compile", None)
    build_kept(exe.runnable, exe.target)


def test_another_process_finds_it(tmp_path):
    code = (
        "import numpy as np, tvm_axe as axe\n"
        "from tvm_axe import compiler\n"
        "from tvm_axe.programs import PROGRAMS\n"
        "made = []\n"
        "own = compiler._compiled\n"
        "compiler._compiled = lambda *args: made.append(1) or own(*args)\n"
        "axe.compile(PROGRAMS['sgd'](axe.Mesh({'dp': 2})).schedule('AR-C'), work_dir=None)\n"
        "print(len(made))\n"
    )
    said = [
        subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert [line.strip() for line in said] == ["1", "0"]


@pytest.mark.parametrize("place", ["given", "made"])
def test_what_can_not_be_written_is_compiled_and_not_kept(store, compiled, monkeypatch, place):
    func = scaled()
    if place == "given":
        func = func.with_attr("library", axe.compile(scaled(3.0), work_dir=None, keep=False).built)
    else:

        def refuse(*_args, **_named):
            raise tvm.error.InternalError("it holds a library")

        monkeypatch.setattr(kept, "write_archive", refuse)
    compiled.clear()
    for _ in range(2):
        y = axe.compile(func, work_dir=None)(np.ones((8, 8), "float32"))
        np.testing.assert_array_equal(y, np.full((8, 8), 2, "float32"))
    assert len(compiled) == 2
    assert not [path for path, *_ in store.entries() if path.read_bytes()[32:34] == b"PK"]
