"""The command line: what it loads, what it refuses and how, and the commands themselves."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm.s_tir import meta_schedule as ms

import tvm_axe as axe
from tvm_axe import cli
from tvm_axe.analysis.parameters import Param, parameters
from tvm_axe.cli.inputs import load_file, match_arrays, read_npz
from tvm_axe.errors import InputError
from tvm_axe.executable import Executable
from tvm_axe.records.database import find_databases, read_workloads
from tvm_axe.records.packing import layout_free

KERNEL = """
from tvm.script import ir as I
from tvm.script import tirx as T

from tvm_axe.layout import Mesh


@T.prim_func(s_tir=True)
def block(
    A: T.Buffer((8, 12), "float32"),
    W: T.Buffer((12, 6), "float32"),
    bias: T.Buffer((6,), "float32"),
    out: T.Buffer((8, 6), "float32"),
):
    C = T.sblock_alloc_buffer((8, 6), "float32")
    for i, j, k in T.grid(8, 6, 12):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
    for i, j in T.grid(8, 6):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = T.max(C[vi, vj] + bias[vj], T.float32(0))


@I.ir_module
class Module:
    @T.prim_func(s_tir=True)
    def main(a: T.Buffer((4,), "float32")):
        for i in T.grid(4):
            with T.sblock("double"):
                vi = T.axis.remap("S", [i])
                a[vi] = a[vi] * T.float32(2)


@I.ir_module
class Two:
    @T.prim_func(s_tir=True)
    def one(a: T.Buffer((4,), "float32")):
        T.evaluate(0)

    @T.prim_func(s_tir=True)
    def two(a: T.Buffer((4,), "float32")):
        T.evaluate(0)


@T.prim_func(s_tir=True)
def steps(w: T.Buffer((4,), "float32"), unused: T.Buffer((2, 2), "int8"), o: T.Buffer((4,), "float32")):
    for i in T.grid(4):
        with T.sblock("write"):
            vi = T.axis.remap("S", [i])
            o[vi] = w[vi]
    for i in T.grid(4):
        with T.sblock("update"):
            vi = T.axis.remap("S", [i])
            w[vi] = o[vi] + T.float32(1)


@T.prim_func(s_tir=True)
def symbolic(a: T.handle):
    n = T.int32()
    A = T.match_buffer(a, (n,), "float32")
    for i in T.grid(n):
        with T.sblock("double"):
            vi = T.axis.remap("S", [i])
            A[vi] = A[vi] * T.float32(2)


number = 3


def apply(sch):
    epi = sch.get_sblock("epi")
    _, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    scatter, gather = sch.split_collective(reduce)
    (gather,) = sch.reorder_collective(gather, [epi])
    sch.fuse_collective([scatter, epi, gather])


def wrong_axis(sch):
    sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "dp")


def faulty(sch):
    1 / 0


def unknown(sch):
    sch.get_sblock("nowhere")


def interrupted(sch):
    raise KeyboardInterrupt
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with kernel.py, the same with a mesh in it, and files that cannot be imported."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "kernel.py").write_text(KERNEL)
    (folder / "with_mesh.py").write_text(KERNEL + '\n\nmesh = Mesh({"tp": 2})\n')
    (folder / "syntax.py").write_text("x = 1\ndef (\n")
    (folder / "missing_import.py").write_text("import os\n\nimport no_such_module_anywhere\n")
    (folder / "exits.py").write_text("raise SystemExit(3)\n")
    (folder / "script.py").write_text(
        "from tvm.script import tirx as T\n\n\n@T.prim_func(s_tir=True)\n"
        'def block(a: T.Buffer((4,), "float32")):\n    a[0] = undefined_name\n'
    )
    (folder / "kernel.txt").write_text("x = 1\n")
    (folder / "helper_of_sibling.py").write_text("value = 7\n")
    (folder / "sibling.py").write_text("from helper_of_sibling import value\n")
    return folder


@pytest.fixture
def in_folder(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def arrays_of_block():
    rng = np.random.default_rng()
    shapes = {"A": (8, 12), "W": (12, 6), "bias": (6,)}
    return {name: rng.standard_normal(shape, dtype="float32") for name, shape in shapes.items()}


def refused(capsys, *arguments):
    """Run the command line, which must refuse: exit code 2, nothing printed, one message, no traceback."""
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tvm-axe: error: ")
    assert "Traceback" not in captured.err
    return captured.err


# ---- files that cannot be used -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "parts"),
    [
        ("nowhere.py:block", ["nowhere.py: no such file"]),
        ("kernel.py", ["'kernel.py'", "named as FILE.py:NAME"]),
        ("kernel.py:", ["named as FILE.py:NAME"]),
        (":block", ["named as FILE.py:NAME"]),
        ("kernel.txt:block", ["kernel.txt: not a Python file", "must end in .py"]),
        ("kernel.py:blok", ["kernel.py: has no 'blok'", "a PrimFunc", "it has Module, Two, block, steps, symbolic"]),
        ("kernel.py:apply", ["kernel.py: 'apply' is a function", "it has Module, Two, block"]),
        ("kernel.py:number", ["'number' is a int"]),
        ("kernel.py:Two", ["holds one PrimFunc", "this one holds one, two"]),
        ("syntax.py:block", ["syntax.py:2: cannot be imported: SyntaxError"]),
        ("missing_import.py:block", ["missing_import.py:3: cannot be imported", "no_such_module_anywhere"]),
        ("exits.py:block", ["exits.py:1: cannot be imported: SystemExit: 3"]),
        ("script.py:block", ["script.py:6: cannot be imported: DiagnosticError", "undefined_name"]),
        ("sibling.py:block", ["sibling.py: has no 'block'", "it has none"]),
    ],
)
def test_kernel_that_cannot_be_loaded(in_folder, capsys, kernel, parts):
    message = refused(capsys, "show", kernel)
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--schedule", "kernel.py:apply"], ["a schedule needs a mesh", "--mesh tp=2"]),
        (
            ["--schedule", "kernel.py:appl", "--mesh", "tp=2"],
            ["has no 'appl'", "apply, faulty, interrupted, unknown, wrong_axis"],
        ),
        (["--schedule", "kernel.py:block", "--mesh", "tp=2"], ["'block' is a PrimFunc", "takes an axe.Schedule"]),
        (["--schedule", "nowhere.py:apply", "--mesh", "tp=2"], ["nowhere.py: no such file"]),
        (["--schedule", "kernel.py:apply", "--mesh", "dp=2"], ["'tp'", "dp"]),
        (["--schedule", "kernel.py:wrong_axis", "--mesh", "tp=2"], ["'dp'", "tp"]),
        (["--mesh", "tp"], ["tp"]),
        (["--mesh", "tp=0"], ["tp", "0"]),
        (["--mesh", ""], ["expected axis=size"]),
    ],
)
def test_mesh_or_schedule_that_cannot_be_used(in_folder, capsys, arguments, parts):
    message = refused(capsys, "show", "kernel.py:block", *arguments)
    for part in parts:
        assert part in message


def test_a_schedule_that_raises_shows_its_own_line(in_folder, capsys):
    """Whether it raises by itself, or upstream, which renders the whole module, or the package does."""
    schedule = ["show", "kernel.py:block", "--mesh", "tp=2", "--schedule"]
    lines = (in_folder / "kernel.py").read_text().splitlines()
    at = {name: next(n for n, line in enumerate(lines, 2) if f"def {name}" in line) for name in ("faulty", "unknown")}
    message = refused(capsys, *schedule, "kernel.py:faulty")
    assert message == f"tvm-axe: error: kernel.py:{at['faulty']}: ZeroDivisionError: division by zero\n"
    message = refused(capsys, *schedule, "kernel.py:unknown")
    assert f"kernel.py:{at['unknown']}: " in message and "nowhere" in message and message.count("\n") == 1
    assert "kernel.py:" in refused(capsys, *schedule, "kernel.py:wrong_axis")


def test_a_fault_of_the_package_keeps_its_traceback(in_folder, monkeypatch):
    from tvm_axe.schedule import Schedule

    def fault(*_):
        code = compile("1 / 0", str(Path(axe.__file__).with_name("fault.py")), "exec")
        exec(code)

    monkeypatch.setattr(Schedule, "shard", fault)
    with pytest.raises(ZeroDivisionError):
        cli.main(["show", "kernel.py:block", "--mesh", "tp=2", "--schedule", "kernel.py:apply"])


def test_interrupt_is_not_a_traceback(in_folder, capsys):
    arguments = ["show", "kernel.py:block", "--mesh", "tp=2", "--schedule", "kernel.py:interrupted"]
    assert cli.main(arguments) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "tvm-axe: interrupted\n"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "required: COMMAND"),
        (["walk"], "invalid choice: 'walk'"),
        (["show"], "required: FILE.py:NAME"),
        (["run", "kernel.py:block"], "required: --inputs, --output"),
        (["tune", "kernel.py:block", "--trials", "0"], "must be at least 1, not 0"),
        (["tune", "kernel.py:block", "--trials", "many"], "'many'"),
    ],
)
def test_malformed_options(capsys, arguments, part):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    assert part in capsys.readouterr().err


def test_file_is_imported_once_and_finds_its_siblings(folder):
    module = load_file(folder / "sibling.py")
    assert module.value == 7
    assert load_file(folder / "sibling.py") is module


def test_parameters_have_shapes_and_types(folder):
    kernel = load_file(folder / "kernel.py")
    assert parameters(kernel.steps) == {
        "w": Param("w", (4,), "float32"),
        "unused": Param("unused", (2, 2), "int8"),
        "o": Param("o", (4,), "float32"),
    }
    with pytest.raises(InputError, match=r"'A': its shape .* must be constant"):
        parameters(kernel.symbolic)


# ---- arrays ------------------------------------------------------------------------------------------------------


def write_garbage(path):
    path.write_bytes(b"no zip file")


def write_truncated(path):
    np.savez(path, **arrays_of_block())
    path.write_bytes(path.read_bytes()[:-100])


def write_one_array(path):
    with open(path, "wb") as file:
        np.save(file, np.zeros(3))


def write_objects(path):
    np.savez(path, A=np.array([{}, None], dtype=object))


@pytest.mark.parametrize(
    ("write", "part"),
    [
        (lambda path: None, "in.npz: no such file"),
        (Path.mkdir, "in.npz: not a readable npz file"),
        (Path.touch, "in.npz: not a readable npz file"),
        (write_garbage, "in.npz: not a readable npz file"),
        (write_truncated, "in.npz: not a readable npz file"),
        (write_one_array, "holds one array without a name"),
        (write_objects, "not a readable npz file of plain arrays"),
    ],
)
def test_unreadable_npz(folder, tmp_path, capsys, write, part):
    path = tmp_path / "in.npz"
    write(path)
    output = tmp_path / "out.npz"
    assert part in refused(capsys, "run", f"{folder}/kernel.py:block", "--inputs", str(path), "--output", str(output))
    assert not output.exists()


def packed_arrays():
    file = io.BytesIO()
    np.savez_compressed(file, A=np.arange(24, dtype="float32").reshape(4, 6), b=np.ones(3))
    return file.getvalue()


PACKED = packed_arrays()


@given(st.integers(0, len(PACKED) - 1), st.integers(0, 255), st.booleans())
def test_damaged_npz_gives_arrays_or_an_input_error(tmp_path_factory, position, value, cut):
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    path.write_bytes(PACKED[:position] if cut else PACKED[:position] + bytes([value]) + PACKED[position + 1 :])
    try:
        assert all(isinstance(array, np.ndarray) for array in read_npz(str(path)).values())
    except InputError as error:
        assert str(error).startswith(str(path))


INPUTS = [Param("A", (2, 3), "float32"), Param("b", (3,), "int8")]


def test_arrays_come_in_the_order_of_the_parameters():
    arrays = {"b": np.zeros(3, "int8"), "A": np.zeros((3, 2), "float32").T}
    first, second = match_arrays("in.npz", arrays, INPUTS)
    assert first is not arrays["A"] and first.flags.c_contiguous and first.shape == (2, 3)
    assert second.dtype == np.int8


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"A": None}, "A: float32[2, 3] is missing"),
        ({"c": np.zeros(1)}, "c is not an input"),
        ({"A": np.zeros((3, 2), "float32")}, "A is float32[3, 2], needed is A: float32[2, 3]"),
        ({"A": np.zeros((2, 3))}, "A is float64[2, 3], needed is A: float32[2, 3]"),
    ],
)
def test_arrays_that_dont_fit(change, part):
    arrays = {"A": np.zeros((2, 3), "float32"), "b": np.zeros(3, "int8"), **change}
    with pytest.raises(InputError) as caught:
        match_arrays("in.npz", {name: array for name, array in arrays.items() if array is not None}, INPUTS)
    assert part in str(caught.value)
    assert "the inputs are A: float32[2, 3], b: int8[3]" in str(caught.value)


# ---- the commands ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", [[], ["--schedule", "with_mesh.py:apply"]])
@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_run_writes_the_outputs(in_folder, tmp_path, capsys, schedule, engine):
    arrays = arrays_of_block()
    np.savez(tmp_path / "in.npz", **arrays)
    output = tmp_path / "result"  # the name as it is given, with no .npz behind it
    arguments = ["--inputs", str(tmp_path / "in.npz"), "--output", str(output), "--engine", engine]
    assert cli.main(["run", "with_mesh.py:block", *schedule, *arguments, "--work-dir", str(tmp_path)]) == 0
    with np.load(output) as written:
        assert written.files == ["out"]
        a, w, bias = (arrays[name].astype("float64") for name in ["A", "W", "bias"])
        np.testing.assert_allclose(written["out"], np.maximum(a @ w + bias, 0), rtol=1e-5, atol=1e-5)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"with_mesh.py:block on tp=2 ({engine}, llvm): out: float32[8, 6] to {output}; median of ")


@pytest.mark.parametrize("schedule", [[], ["--schedule", "with_mesh.py:apply"]])
def test_check_says_that_a_schedule_is_right(in_folder, tmp_path, capsys, schedule):
    options = ["--engine", "threads", "--seeds", "1", "--work-dir", str(tmp_path)]
    assert cli.main(["check", "with_mesh.py:block", *schedule, *options]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("block: right on one device, its annotations ignored and on the mesh tp=2, 2 sets of arrays")


def test_check_ends_with_1_where_a_result_is_wrong(in_folder, tmp_path, capsys, monkeypatch):
    def off(self, *arguments):
        out = run(self, *arguments)
        out[2, 5] += 1
        return out

    run = Executable.run
    monkeypatch.setattr(Executable, "run", off)
    options = ["--engine", "threads", "--work-dir", str(tmp_path)]
    assert cli.main(["check", "with_mesh.py:block", "--schedule", "with_mesh.py:apply", *options]) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("block: wrong on the mesh tp=2, of integers up to 50, seed 0: out differs in 1 of 48")
    assert "first wrong element: out[2, 5] is " in shown.out and shown.err == ""


def test_check_of_what_is_refused_ends_with_2(in_folder, capsys):
    assert "dp" in refused(capsys, "check", "with_mesh.py:block", "--schedule", "with_mesh.py:wrong_axis")
    assert "-n is for --engine mpi" in refused(capsys, "check", "with_mesh.py:block", "-n", "2", "--engine", "threads")


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_run_writes_a_timeline(in_folder, tmp_path, capsys, engine):
    np.savez(tmp_path / "in.npz", **arrays_of_block())
    arguments = ["--inputs", str(tmp_path / "in.npz"), "--output", str(tmp_path / "out.npz"), "--engine", engine]
    arguments += ["--schedule", "with_mesh.py:apply", "--timeline", str(tmp_path / "t.json")]
    assert cli.main(["run", "with_mesh.py:block", *arguments, "--work-dir", str(tmp_path)]) == 0
    line, *drawing = capsys.readouterr().out.splitlines()
    assert "median of 5 runs" in line
    assert drawing[0].startswith("block: MM-fuse(RS-C-AG) on tp=2: ")
    assert drawing[1].startswith("worker 0 (tp=0) |") and drawing[2].startswith("worker 1 (tp=1) |")
    records = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [r["args"]["name"] for r in records if r["name"] == "thread_name"] == ["worker 0 (tp=0)", "worker 1 (tp=1)"]
    spans = [(r["tid"], r["name"], r["cat"]) for r in records if r["ph"] == "X"]
    for tid in (1, 2):
        assert (tid, "mm_rf", "local") in spans and (tid, "mm_epi_out_global", "mesh kernel") in spans
        assert (tid, "barrier", "waiting") in spans
    flows = {phase: {r["id"] for r in records if r["ph"] == phase} for phase in "sf"}
    assert flows["s"] == flows["f"] and len(flows["s"]) == 4


def test_run_without_a_mesh_is_one_device_and_takes_a_module(in_folder, tmp_path, capsys):
    np.savez(tmp_path / "in.npz", a=np.arange(4, dtype="float32"))
    arguments = ["--inputs", str(tmp_path / "in.npz"), "--output", str(tmp_path / "out.npz"), "--engine", "threads"]
    assert cli.main(["run", "kernel.py:Module", *arguments]) == 0
    with np.load(tmp_path / "out.npz") as written:
        np.testing.assert_array_equal(written["a"], 2 * np.arange(4, dtype="float32"))
    assert "0 bytes received by the busiest device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--engine", "carrier-pigeon"], ["carrier-pigeon", "processes", "threads"]),
        (["--output", "no/such/folder/out.npz", "--engine", "threads"], ["no/such/folder/out.npz: cannot be written"]),
        (["--target", "no-such-target"], ["no-such-target"]),
        (["--timeline", "no/such/t.json", "--engine", "threads"], ["no/such/t.json: cannot be written"]),
    ],
)
def test_run_options_that_cannot_be_used(in_folder, tmp_path, capsys, options, parts):
    np.savez(tmp_path / "in.npz", **arrays_of_block())
    arguments = ["--inputs", str(tmp_path / "in.npz"), "--output", str(tmp_path / "out.npz")]
    message = refused(capsys, "run", "kernel.py:block", *arguments, *options)
    for part in parts:
        assert part in message


def test_show_prints_layouts_collectives_bytes_and_the_module(in_folder, capsys):
    assert cli.main(["show", "with_mesh.py:block", "--schedule", "with_mesh.py:apply"]) == 0
    shown = capsys.readouterr().out
    for part in ["out", "S[", "@tp", "bytes", "mm_rf", "prim_func"]:
        assert part in shown


def test_show_into_a_pipe_that_closes(in_folder):
    command = [sys.executable, "-m", "tvm_axe", "show", "kernel.py:block"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ})
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


@pytest.mark.parametrize(
    ("options", "kernels"),
    [([], {"block"}), (["--mesh", "tp=2", "--schedule", "kernel.py:apply"], {"mm_rf", "mm_epi_out_global"})],
)
def test_tune_prints_each_kernel_before_and_after(in_folder, tmp_path, capsys, options, kernels):
    work_dir = tmp_path / "records"
    assert cli.main(["tune", "kernel.py:block", *options, "--trials", "2", "--work-dir", str(work_dir)]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert kernels <= set(lines)
    tuned = lines["mm_rf" if "mm_rf" in kernels else "block"]
    assert "ms untuned" in tuned and "ms tuned (2 trials" in tuned
    page = Path(lines["report"])
    assert page.parent.parent == work_dir
    assert f"<h2>{'mm_rf' if 'mm_rf' in kernels else 'block'}</h2>" in page.read_text()
    assert len(list(work_dir.rglob("database_tuning_record.json"))) == sum(
        "ms tuned" in line for line in lines.values()
    )


MODEL = """
from tvm.relax.frontend import nn


class Model(nn.Module):
    def __init__(self):
        self.layer = nn.Linear(12, 8)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return nn.op.relu(self.layer(x))


model, _ = Model().export_tvm({"forward": {"x": nn.spec.Tensor([4, 12], "float32")}})
"""


def test_tune_takes_a_relax_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    options = ["--trials", "2", "--patience", "8", "--report", "page.html", "--seed", "1"]
    assert cli.main(["tune", "model.py:model", *options]) == 0
    kernel, report = capsys.readouterr().out.splitlines()
    assert kernel.startswith("fused_NT_matmul_add_relu: ")
    assert "tuned (2 trials)" in kernel
    assert report == "report: page.html"
    assert "fused_NT_matmul_add_relu" in (tmp_path / "page.html").read_text()
    refused(capsys, "tune", "model.py:model", "--schedule", "model.py:Model.forward")


def test_tune_lets_a_relax_model_have_its_weights_packed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    assert cli.main(["tune", "model.py:model", "--trials", "1", "--pack-weights", "--seed", "1"]) == 0
    (folder,) = find_databases(tmp_path)
    (line,) = read_workloads(folder)
    (func,) = ms.database.Workload.from_json([*line]).mod.functions.values()
    assert layout_free(func) == (1, 2)  # the weights and the bias


def test_tune_takes_values_of_unknown_extents(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL.replace("[4, 12]", '["n", 12]'))
    assert cli.main(["tune", "model.py:model", "--trials", "1", "--values", "n=1,5", "--seed", "1"]) == 0
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.startswith("fused_NT_matmul_add_relu_n1: ") and second.startswith("fused_NT_matmul_add_relu_n5: ")
    assert "no shape has the variable 'm'" in refused(capsys, "tune", "model.py:model", "--values", "m=2")


def test_values_are_numbers_of_a_variable(in_folder, capsys):
    for text in ("5", "n=", "n=0", "=3"):
        with pytest.raises(SystemExit):
            cli.main(["tune", "kernel.py:block", "--values", text])
        assert "--values" in capsys.readouterr().err
    assert "unknown extents" in refused(capsys, "tune", "kernel.py:block", "--mesh", "tp=2", "--values", "n=1")


def test_tune_packs_weights_of_a_relax_model_alone(in_folder, capsys):
    assert "Relax model" in refused(capsys, "tune", "kernel.py:block", "--mesh", "tp=1", "--pack-weights")
    assert "Relax model" in refused(capsys, "tune", "kernel.py:block", "--mesh", "tp=2", "--pack-weights")


def test_tune_finds_a_schedule_on_a_mesh(in_folder, tmp_path, capsys):
    options = ["--mesh", "tp=2", "--engine", "threads", "--work-dir", str(tmp_path / "records")]
    best = str(tmp_path / "best.json")
    assert cli.main(["tune", "kernel.py:block", *options, "--trials", "2", "--patience", "8", "--save", best]) == 0
    *tasks, report, fastest = capsys.readouterr().out.splitlines()
    assert tasks[0].startswith("block: ") and "(2 trials" in tasks[0]
    assert Path(report.removeprefix("report: ")).exists()
    notation = fastest.removeprefix("the fastest schedule: ")
    assert cli.main(["show", "kernel.py:block", "--mesh", "tp=2", "--schedule", best]) == 0
    assert f"schedule {notation} on mesh tp=2" in capsys.readouterr().out


def test_help_as_a_module():
    done = subprocess.run([sys.executable, "-m", "tvm_axe", "--help"], capture_output=True, text=True, check=True)
    for command in ["run", "show", "tune", "demo"]:
        assert f"\n    {command} " in done.stdout
