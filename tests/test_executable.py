"""Executable: the same interface for a function and a model, for one device and a mesh; and what is saved is loaded."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.relax.frontend import nn
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.collective import Workers
from tvm_axe.executable.saved import LAYOUT
from tvm_axe.layout import Mesh
from tvm_axe.lower import lower
from tvm_axe.lower.calls import Touches
from tvm_axe.machines import resolve_target
from tvm_axe.machines.nvcc import find_compiler
from tvm_axe.programs.registry import PROGRAMS
from tvm_axe.records.database import Database, normalize
from tvm_axe.schedule import Schedule, with_layouts

TP = Mesh({"tp": 2})
RNG = np.random.default_rng(7)


@T.prim_func(s_tir=True)
def update(
    A: T.Buffer((12, 19), "float32"),
    W: T.Buffer((19, 16), "float32"),
    total: T.Buffer((12, 16), "float32"),
    out: T.Buffer((12, 16), "float32"),
):
    """A product, added to `total` in place, and its positive part."""
    C = T.sblock_alloc_buffer((12, 16), "float32")
    for i, j, k in T.grid(12, 16, 19):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
    for i, j in T.grid(12, 16):
        with T.sblock("add"):
            vi, vj = T.axis.remap("SS", [i, j])
            total[vi, vj] = total[vi, vj] + C[vi, vj]
    for i, j in T.grid(12, 16):
        with T.sblock("relu"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = T.max(C[vi, vj], T.float32(0))


ARRAYS = [RNG.standard_normal(shape, dtype="float32") for shape in ((12, 19), (19, 16), (12, 16))]


def is_right(outputs: tuple[np.ndarray, ...]) -> bool:
    a, w, total = (array.astype("float64") for array in ARRAYS)
    wanted = (total + a @ w, np.maximum(a @ w, 0))
    return all(np.abs(got - want).max() < 1e-4 for got, want in zip(outputs, wanted, strict=True))


class Layers(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: nn.Tensor):
        hidden = nn.op.relu(self.up(x))
        return self.down(hidden), hidden


class Two(nn.Module):
    def first(self, x: nn.Tensor) -> nn.Tensor:
        return x + x

    def second(self, x: nn.Tensor) -> nn.Tensor:
        return x * x


@pytest.fixture(scope="module")
def model() -> tvm.IRModule:
    return Layers().export_tvm({"forward": {"x": nn.spec.Tensor([12, 24], "float32")}})[0]


@pytest.fixture(scope="module")
def weights() -> list[np.ndarray]:
    return [RNG.standard_normal(shape, dtype="float32") for shape in ((12, 24), (40, 24), 40, (24, 40), 24)]


def model_is_right(outputs: tuple[np.ndarray, ...], weights: list[np.ndarray]) -> bool:
    x, w1, b1, w2, b2 = (array.astype("float64") for array in weights)
    hidden = np.maximum(x @ w1.T + b1, 0)
    pairs = zip(outputs, (hidden @ w2.T + b2, hidden), strict=True)
    return all(np.abs(got - want).max() / np.abs(want).max() < 1e-5 for got, want in pairs)


# ---- One device ------------------------------------------------------------------------------------------------------


def test_a_function_runs_in_this_process(compiled: Callable[..., axe.Executable]) -> None:
    exe = compiled(update)
    assert (exe.inputs, exe.outputs) == (("A", "W", "total"), ("total", "out"))
    assert (exe.mesh, exe.stages, exe.notation, dict(exe.layouts), exe.bytes) == (None, (), "", {}, 0)
    before = ARRAYS[2].copy()
    a, w, total = ARRAYS
    for outputs in (exe(*ARRAYS), exe.run(*ARRAYS), exe(a, total=total, W=w)):
        assert isinstance(outputs, tuple) and is_right(outputs)
    np.testing.assert_array_equal(total, before)  # what it updates is the caller's
    seconds = exe.time(*ARRAYS, repeat=3, warmup=1)
    assert len(seconds) == 3 and min(seconds) > 0
    for words in (
        "update on one device",
        "total: float32[12, 16], in and out",
        "out: float32[12, 16], out",
        "def main",
    ):
        assert words in exe.show()


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda exe: exe(*ARRAYS[:2]), r"update takes 3 arrays \(A, W, total\); got 2"),
        (lambda exe: exe(*ARRAYS, ARRAYS[0]), r"update takes 3 arrays \(A, W, total\); got 4"),
        (lambda exe: exe(*ARRAYS[:2], W=ARRAYS[1]), "'W' is given twice"),
        (lambda exe: exe(*ARRAYS[:2], bias=ARRAYS[2]), "'bias' is none of them"),
        (lambda exe: exe(*ARRAYS[:2], ARRAYS[2].T), r"total has the shape \(12, 16\); got an array of \(16, 12\)"),
        (lambda exe: exe(*ARRAYS[:2], ARRAYS[2].astype("float64")), "total is float32; got an array of float64"),
        (lambda exe: exe(*ARRAYS[:2], ARRAYS[2].tolist()), "total must be a numpy array; got list"),
    ],
)
def test_what_arrays_a_function_on_one_device_refuses(
    compiled: Callable[..., axe.Executable], use: Callable[[axe.Executable], object], message: str
) -> None:
    with pytest.raises(axe.InputError, match=message):
        use(compiled(update))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda exe: exe.trace(*ARRAYS), r"compiled for one device, where a run is one call; time\(\) says"),
        (lambda exe: exe.vm, r"\.vm is of a Relax model .* a function compiled for one device; run it as exe\(A, W, "),
    ],
)
def test_what_a_function_on_one_device_refuses(
    compiled: Callable[..., axe.Executable], use: Callable[[axe.Executable], object], message: str
) -> None:
    with pytest.raises(axe.LowerError, match=message):
        use(compiled(update))


def test_workers_are_refused_on_one_device(
    compiled: Callable[..., axe.Executable], launched: Callable[..., Workers]
) -> None:
    with pytest.raises(axe.LowerError, match=r"runs in this process, without workers: exe\(A, W, total\)"):
        compiled(update).run(launched(TP), *ARRAYS)


def test_a_function_on_one_device_is_as_it_was_tuned(tmp_path: Path) -> None:
    target = resolve_target("llvm", threads=1)
    database = Database(tmp_path / "update")
    workload = database.commit_workload(normalize(update))
    sch = tvm.s_tir.Schedule(workload.mod)
    sch.vectorize(sch.get_loops(sch.get_sblock("relu"))[1])
    infos = tvm.s_tir.meta_schedule.arg_info.ArgInfo.from_entry_func(workload.mod)
    record = tvm.s_tir.meta_schedule.database.TuningRecord(sch.trace, workload, [0.002], target, infos)
    database.commit_tuning_record(record)
    exe = axe.compile(update, target=target, work_dir=tmp_path)
    assert dict(exe.tuned) == {"main": 0.002}
    assert "T.vectorized" in exe.module.script() and "tuned: 2.000 ms" in exe.show()
    assert is_right(exe(*ARRAYS))


def test_a_tile_program_has_a_compiler_of_its_own(compiled: Callable[..., axe.Executable]) -> None:
    func = tirx.PrimFunc([], tirx.Evaluate(0))
    with pytest.raises(axe.LowerError, match=r"a tile program is compiled by tvm_axe\.tile\.compile"):
        compiled(func)


def test_a_model_of_one_function_is_called_as_a_function_is(
    compiled: Callable[..., axe.Executable], model: tvm.IRModule, weights: list[np.ndarray]
) -> None:
    exe = compiled(model)
    assert len(exe.inputs) == 5 and len(exe.outputs) == 2 and exe.inputs[0] == "x"
    outputs = exe(*weights)
    assert isinstance(outputs, tuple) and model_is_right(outputs, weights)
    named = exe(weights[0], **dict(zip(exe.inputs[1:], weights[1:])))
    np.testing.assert_array_equal(named[0], outputs[0])
    assert min(exe.time(*weights, repeat=2, warmup=1)) > 0
    assert isinstance(exe.vm, relax.VMExecutable) and "forward(x, " in exe.show()
    with pytest.raises(axe.InputError, match=r"forward: x has the shape \(12, 24\)"):
        exe(weights[0].T, *weights[1:])


def test_models_that_are_called_by_name(compiled: Callable[..., axe.Executable], model: tvm.IRModule) -> None:
    x = np.ones(3, "float32")
    two, _ = Two().export_tvm({name: {"x": nn.spec.Tensor([3], "float32")} for name in ("first", "second")})
    exe = compiled(two)
    with pytest.raises(
        axe.LowerError, match=r"has 2 functions \(first, second\); call them by name: model = exe\.load"
    ):
        exe(x)
    machine = relax.VirtualMachine(exe.vm, tvm.cpu())
    np.testing.assert_array_equal(machine["first"](tvm.runtime.tensor(x)).numpy(), 2 * x)
    with pytest.raises(axe.LowerError, match="forward takes packed weights, which are packed once"):
        compiled(model, pack_weights=True)(x)


@T.prim_func(s_tir=True)
def halves(A: T.Buffer((128, 64), "float16"), B: T.Buffer((128, 64), "float16"), C: T.Buffer((128, 128), "float32")):
    for i, j, k in T.grid(128, 128, 64):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + T.cast(A[vi, vk], "float32") * T.cast(B[vj, vk], "float32")


@pytest.fixture
def on_hopper(compiled: Callable[..., axe.Executable]) -> axe.Executable:
    """A product by a tile kernel, compiled for a GPU, which needs none."""
    try:
        find_compiler()
    except axe.TileError:
        pytest.skip("neither nvcc nor nvrtc")
    sch = Schedule(halves, mesh=Mesh({"tp": 1}))
    sch.tile_kernel(sch.get_sblock("mm"), "matmul")
    return compiled(sch.mod["main"], target="cuda:sm_90a")


@pytest.mark.skipif(tvm.cuda().exist, reason="there is a GPU, on which it would run")
def test_a_device_that_is_missing(on_hopper: axe.Executable) -> None:
    assert (on_hopper.inputs, on_hopper.outputs) == (("A", "B"), ("C",))
    with pytest.raises(axe.LowerError, match="halves was compiled for sm_90a; this machine has no cuda device"):
        on_hopper(*(np.ones((128, 64), "float16") for _ in range(2)))


@pytest.mark.gpu
def test_a_function_on_a_gpu(cuda: tvm.runtime.Device, on_hopper: axe.Executable, tmp_path: Path) -> None:
    if cuda.compute_version != "9.0":
        pytest.skip("not a Hopper GPU")
    a, b = (RNG.standard_normal((128, 64)).astype("float16") for _ in range(2))
    want = a.astype("float64") @ b.astype("float64").T
    on_hopper.save(tmp_path / "exe")
    for exe in (on_hopper, axe.Executable.load(tmp_path / "exe")):
        got = exe(a, B=b)
        assert isinstance(got, np.ndarray) and np.abs(got - want).max() < 1e-3
        assert min(exe.time(a, b, repeat=3)) > 0


# ---- A mesh ----------------------------------------------------------------------------------------------------------


def test_a_mesh_has_workers(compiled: Callable[..., axe.Executable], launched: Callable[..., Workers]) -> None:
    exe = compiled(update, mesh=TP)
    with pytest.raises(axe.LowerError, match=r"\.vm is of a Relax model .* this is compiled for the mesh tp=2"):
        _ = exe.vm
    a, w, total = ARRAYS
    assert is_right(exe(launched(TP), *ARRAYS)) and is_right(exe.run(launched(TP), a, W=w, total=total))


def test_what_is_in_place_is_timed_again(launched: Callable[..., Workers]) -> None:
    exe, workers = axe.compile(update, mesh=TP, work_dir=None), launched(TP)
    with pytest.raises(axe.LowerError, match="has not run on these workers; run it first"):
        exe.time_again(workers)
    exe.run(workers, *ARRAYS)
    assert len(exe.time_again(workers, repeat=2, warmup=1)) == 2
    assert "measured" in exe.show()
    assert set(exe.inputs) <= set(exe.held(workers))


def test_a_mesh_has_workers_of_its_own(compiled: Callable[..., axe.Executable]) -> None:
    """They are launched when they are first needed, kept, ended by `close`, and then launched again."""
    exe = compiled(update, mesh=TP)
    a, w, total = ARRAYS
    with exe as same:
        assert same is exe and exe._own is None
        assert is_right(exe(*ARRAYS))
        own = exe._own[1]
        assert is_right(exe.run(a, total=total, W=w)) and exe._own[1] is own
        assert len(exe.time(*ARRAYS, repeat=3)) == 3 and exe._own[1] is own
    assert own.closed and exe._own is None
    assert is_right(exe(*ARRAYS))
    again = exe._own[1]
    again._session.close(force=True)  # as after a fault
    assert is_right(exe(*ARRAYS)) and exe._own[1] is not again
    last = exe._own[1]
    del exe, same
    gc.collect()
    assert last.closed


def test_all_that_is_wrong_is_listed(compiled: Callable[..., axe.Executable]) -> None:
    exe = compiled(update, mesh=TP)
    a, w, total = ARRAYS
    with pytest.raises(axe.InputError) as caught:
        exe(a.T, W=w.astype("float64"), bias=total)
    assert str(caught.value).splitlines() == [
        "update takes 3 arrays (A, W, total); 'bias' is none of them; "
        "A has the shape (12, 19); got an array of (19, 12); W is float32; got an array of float64",
        "  A: float32[12, 19]      got float32[19, 12]",
        "  W: float32[19, 16]      got float64[19, 16]",
        "  total: float32[12, 16]  got nothing",
    ]
    assert exe._own is None  # nothing was launched for it


class Elsewhere:
    """An array of a package that speaks DLPack and isn't numpy; this module is the package."""

    def __init__(self, array: Any) -> None:
        self.held = array if isinstance(array, np.ndarray) else np.from_dlpack(array)

    def __dlpack__(self, **options: Any) -> Any:
        return self.held.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.held.__dlpack_device__()

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=Elsewhere)


@pytest.mark.parametrize("mesh", [None, TP])
def test_arrays_of_other_packages_come_and_go(compiled: Callable[..., axe.Executable], mesh: axe.Mesh | None) -> None:
    with compiled(update, mesh=mesh) as exe:
        a, w, total = ARRAYS
        outputs = exe(Elsewhere(np.asfortranarray(a)), w, Elsewhere(total))
        assert all(isinstance(output, Elsewhere) for output in outputs)
        assert is_right(tuple(output.held for output in outputs))
        with pytest.raises(axe.InputError, match=r"A has the shape \(12, 19\); got an array of \(19, 12\)"):
            exe(Elsewhere(a.T), w, total)


@pytest.mark.parametrize("package", ["torch", "jax.numpy"])
def test_arrays_of_torch_and_jax(compiled: Callable[..., axe.Executable], package: str) -> None:
    found = pytest.importorskip(package, reason=f"{package} is not installed")
    make = found.from_numpy if package == "torch" else found.asarray
    outputs = compiled(update)(*(make(array) for array in ARRAYS))
    assert all(type(output) is type(make(ARRAYS[0])) for output in outputs)
    assert is_right(tuple(np.asarray(output) for output in outputs))


def test_what_was_lowered_before_is_compiled_as_it_is(
    compiled: Callable[..., axe.Executable], monkeypatch: pytest.MonkeyPatch
) -> None:
    lowered = lower(update, TP)
    monkeypatch.setattr("tvm_axe.pipeline.lower", None)  # nobody lowers it again
    exe = compiled(lowered)
    assert exe.module.script() == lowered.module.script() and exe.stages == lowered.stages
    with pytest.raises(axe.LowerError, match="the program is for the mesh tp=2, not tp=3; leave mesh out"):
        compiled(lowered, mesh=Mesh({"tp": 3}))


# ---- On disk ---------------------------------------------------------------------------------------------------------

LOADED = """
import sys
import numpy as np
import tvm_axe as axe

path, arrays, results, devices = sys.argv[1:]
exe = axe.Executable.load(path)
given = list(np.load(arrays).values())
shown = exe.show()
if exe.mesh is None:
    outputs = exe(*given)
else:
    with axe.launch(exe.mesh, engine="processes") as workers:
        outputs = exe.run(workers, *given)
        assert len(exe.time(workers, *given, repeat=2)) == 2
        assert exe.trace(workers, *given).events
outputs = outputs if isinstance(outputs, tuple) else (outputs,)
assert exe.mesh is None or exe.mesh.size == int(devices)
np.savez(results, *outputs)
print(shown)
"""


def in_another_process(exe: axe.Executable, arrays: list[np.ndarray], folder: Path) -> tuple[np.ndarray, ...]:
    """What a process that loads it, with none of the sources, computes; `show` is the same there."""
    exe.save(folder / "exe")
    np.savez(folder / "in.npz", *arrays)
    devices = 1 if exe.mesh is None else exe.mesh.size
    arguments = [str(folder / name) for name in ("exe", "in.npz", "out.npz")]
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *arguments, str(devices)], capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == exe.show() + "\n"
    with np.load(folder / "out.npz") as found:
        return tuple(found.values())


def test_a_function_is_loaded_by_another_process(compiled: Callable[..., axe.Executable], tmp_path: Path) -> None:
    exe = compiled(update)
    outputs = in_another_process(exe, ARRAYS, tmp_path)
    assert is_right(outputs)
    for got, here in zip(outputs, exe(*ARRAYS)):
        np.testing.assert_array_equal(got, here)


def test_a_function_on_a_mesh_is_loaded_by_another_process(
    compiled: Callable[..., axe.Executable], tmp_path: Path
) -> None:
    program = PROGRAMS["mlp"](TP)
    arrays = program.inputs(np.random.default_rng(0))
    outputs = in_another_process(compiled(program.schedule("ol(MM, fuse(RS-C-AG))")), list(arrays), tmp_path)
    assert program.error(outputs, program.reference(*arrays)) <= program.tolerance


def test_models_are_loaded_by_another_process(
    compiled: Callable[..., axe.Executable], tmp_path: Path, model: tvm.IRModule, weights: list[np.ndarray]
) -> None:
    assert model_is_right(in_another_process(compiled(model), weights, tmp_path), weights)
    names = [str(param.name) for param in model["forward"].params[1:]]
    bound = relax.transform.BindParams("forward", dict(zip(names, weights[1:])))(model)
    assert model_is_right(in_another_process(compiled(bound), weights[:1], tmp_path), weights)


@pytest.mark.parametrize(
    ("name", "schedule", "size"),
    [(name, schedule, "uneven") for name, cls in PROGRAMS.items() for schedule in cls(
        Mesh(dict.fromkeys(cls.axes, 2))).schedules] + [("mlp", "ol(MM, fuse(RS-C-AG))", "bench")],
)  # fmt: skip
def test_all_that_is_known_of_a_program_is_saved(
    compiled: Callable[..., axe.Executable], tmp_path: Path, name: str, schedule: str, size: str
) -> None:
    mesh = Mesh(dict.fromkeys(PROGRAMS[name].axes, 2))
    exe = compiled(PROGRAMS[name](mesh, size).schedule(schedule))
    exe.save(tmp_path / "exe")
    found = axe.Executable.load(tmp_path / "exe")
    assert found.show() == exe.show()
    assert (found.inputs, found.outputs, found.stages, found.notation) == (
        exe.inputs, exe.outputs, exe.stages, exe.notation
    )  # fmt: skip
    assert dict(found.layouts) == dict(exe.layouts) and str(found.target) == str(exe.target)
    old, new = exe.lowered, found.lowered
    assert (old.calls, old.arguments, old.coordinates) == (new.calls, new.arguments, new.coordinates)
    assert dict(old.buffers) == dict(new.buffers)
    touches = [Touches(mesh, lowered.module, lowered.buffers) for lowered in (old, new)]
    for before, after in zip(old.calls, new.calls):
        assert touches[0].of(before, 1) == touches[1].of(after, 1)


def test_layouts_in_memory_and_tile_kernels_are_saved(
    compiled: Callable[..., axe.Executable], launched: Callable[..., Workers], tmp_path: Path
) -> None:
    sch = Schedule(with_layouts(update, {"total": "S[(12, 16) : (1, 12)] + R[2 : 1@tp]"}), mesh=TP)
    sch.tile_kernel(sch.get_sblock("mm"), "matmul")
    exe = compiled(sch)
    exe.save(tmp_path / "exe")
    found = axe.Executable.load(str(tmp_path / "exe"))
    assert found.lowered.buffers["total"].sharding.memory is not None
    assert found.module.script() == exe.module.script() != found.runnable.script() == exe.runnable.script()
    assert is_right(found.run(launched(TP), *ARRAYS))


@pytest.fixture(scope="module")
def saved(compiled: Callable[..., axe.Executable], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "exe"
    compiled(update, mesh=TP).save(path)
    return path.read_bytes()


def test_files_that_are_no_executables_are_refused(saved: bytes, tmp_path: Path) -> None:
    path = tmp_path / "exe"
    half = len(saved) // 2
    contents = [b"", b"PK\x03\x04", b"\x80\x04pickle", saved[:half], saved[:half] + b"damage" + saved[half + 6 :]]
    for content in contents:
        path.write_bytes(content)
        with pytest.raises(axe.InputError, match=r"exe: no executable that Executable\.save wrote, or a damaged one"):
            axe.Executable.load(path)
    with pytest.raises(axe.InputError, match=r"none: cannot be read: No such file"):
        axe.Executable.load(tmp_path / "none")


def changed(saved: bytes, folder: Path, change: Callable[[dict], object], drop: str = "") -> Path:
    """The file with another manifest, and without one of its members."""
    (folder / "old").write_bytes(saved)
    with zipfile.ZipFile(folder / "old") as old, zipfile.ZipFile(folder / "new", "w") as new:
        for member in old.namelist():
            manifest = json.loads(old.read(member))
            if member == "manifest.json":
                change(manifest)
            if member != drop:
                new.writestr(member, json.dumps(manifest))
    return folder / "new"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(format="other"), "no executable that"),
        (lambda m: m.update(layout=3), f"has the layout 3; this version reads {LAYOUT}: compile it again"),
        (lambda m: m["versions"].update({"apache-tvm": "0.1"}), "was saved with apache-tvm 0.1, and this is 0"),
        (lambda m: m.update(versions={}), "was saved with tvm_axe None"),
        (lambda m: m.update(kind="pickle"), "no executable that"),
        (lambda m: m.update(target={"kind": "abacus"}), "no executable that"),
        (lambda m: m.pop("tuned"), "no executable that"),
        (lambda m: m["details"].update(mesh="tp"), "no executable that"),
        (lambda m: m["details"]["buffers"][0].pop("shape"), "no executable that"),
        (lambda m: m["details"]["calls"][0].update(more=1), "no executable that"),
        (lambda m: m["details"]["stages"].append({}), "no executable that"),
    ],
)
def test_manifests_that_make_no_sense_are_refused(
    saved: bytes, tmp_path: Path, change: Callable[[dict], object], message: str
) -> None:
    with pytest.raises(axe.InputError, match=message):
        axe.Executable.load(changed(saved, tmp_path, change))


def test_a_member_that_is_missing_or_unwritable(
    saved: bytes, tmp_path: Path, compiled: Callable[..., axe.Executable]
) -> None:
    with pytest.raises(axe.InputError, match="There is no item named"):
        axe.Executable.load(changed(saved, tmp_path, lambda manifest: None, drop="modules.json"))
    assert axe.Executable.load(changed(saved, tmp_path, lambda manifest: None)).mesh == TP
    with pytest.raises(axe.InputError, match="cannot be written: No such file"):
        compiled(update).save(tmp_path / "none" / "exe")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
