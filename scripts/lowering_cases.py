"""What `record_lowering` hashes of programs, kernels, models and records; and what all its cases are made with.

A job gives texts, by name. It is a function without arguments; nothing is built before it is called. What it gives
depends neither on the machine nor on the process: every target says its CPU, and how many cores there are is fixed by
`record_lowering`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from lowering_names import (
    KERNELS,
    PROGRAMS,
    SCHEDULES,
    SHIPPED,
    apply_best,
    block,
    compile_model,
    fuse,
    metrics,
    overlaps,
    resolve_target,
    runnable,
    samples,
    split_packing,
    tile,
    with_tile_kernels,
)
from tvm import relax, s_tir, tirx
from tvm.relax.frontend import nn
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

import tvm_axe as axe

# ---- What all jobs share ---------------------------------------------------------------------------------------------

Texts = dict[str, str]
Job = Callable[[], Mapping[str, str]]

TESTS = Path(__file__).parents[1] / "tests"
NO_RECORDS = "no such folder"  # of a user's own: only the records that ship are found
REFUSED = "refused:"


def cpu(level: str, cores: int = 2) -> Target:
    """A CPU of a generic level."""
    return resolve_target({"kind": "llvm", "mcpu": level, "num-cores": cores})


def gpu(arch: str) -> Target:
    """A GPU by its architecture."""
    return resolve_target({"kind": "cuda", "arch": arch})


TARGETS = {
    "v3": partial(cpu, "x86-64-v3"),
    "v4": partial(cpu, "x86-64-v4"),
    "sm_80": partial(gpu, "sm_80"),
    "sm_90a": partial(gpu, "sm_90a"),
}
MESH_TARGET = {"kind": "llvm", "mcpu": "x86-64-v3"}  # its cores are the mesh's matter


def refused(error: Exception) -> str:
    """What stands for a text that a rule refuses."""
    return f"{REFUSED}{type(error).__name__}: {error}"


def or_refused(make: Callable[[], str]) -> str:
    """A text, or that a rule refuses it."""
    try:
        return make()
    except (axe.AxeError, s_tir.ScheduleError) as error:
        return refused(error)


def made(job: Job) -> Mapping[str, str]:
    """The texts of a job; where a rule refuses all of it, one that says so."""
    try:
        return job()
    except (axe.AxeError, s_tir.ScheduleError) as error:
        return {"": refused(error)}


def script(mod: tvm.IRModule | tirx.PrimFunc) -> str:
    """Everything that a module or a function says."""
    return str(mod.script(show_meta=True))


def cuda_source(mod: tvm.IRModule, target: Target) -> str:
    """The CUDA source of a module of kernels."""
    schedulable = any("s_tir" in func.attrs for func in mod.functions.values())
    built = tvm.compile(mod, target, tir_pipeline="s_tir" if schedulable else "tirx").mod
    return str(built.imports[0].inspect_source())


def device_code(mod: tvm.IRModule, target: Target) -> str:
    """A module with its tile kernels, and for a GPU its source."""
    chosen = with_tile_kernels(mod, target)
    if target.kind.name != "cuda":
        return script(chosen)
    return "\n".join([script(chosen), cuda_source(chosen, target)])


def compiled(exe: axe.Executable) -> Texts:
    """What an executable runs, and what it says about that."""
    module, ready = script(exe.module), script(runnable(exe))
    said = exe.show().replace(exe.module.script(), "")
    return {
        "module": module if ready == module else "\n".join([module, ready]),
        "show": f"{said}\ntuned {dict(exe.tuned)}\n{exe.target}",
    }


def scheduled(sch: axe.Schedule, target: Mapping[str, Any] = MESH_TARGET, work_dir: str | None = None) -> Texts:
    """A schedule and what is compiled of it."""
    texts = {"schedule": "\n".join([str(sch.trace), script(sch.mod)])}
    try:
        return texts | compiled(axe.compile(sch, target=dict(target), work_dir=work_dir))
    except axe.AxeError as error:
        return texts | {"module": refused(error)}


# ---- The distributed programs ----------------------------------------------------------------------------------------


def _published(name: str, axes: Mapping[str, int], size: str, schedule: str) -> Texts:
    return scheduled(PROGRAMS[name](axe.Mesh(dict(axes)), size).schedule(schedule))


def _meshes(axes: Iterable[str]) -> list[dict[str, int]]:
    first, *others = axes
    if others:
        return [{first: 2, others[0]: 1}, {first: 2, others[0]: 2}, {first: 4, others[0]: 1}]
    other = "tp" if first == "dp" else "dp"
    return [{first: 2}, {first: 4}, {other: 2, first: 2}]


def distributed() -> Iterator[tuple[str, Job]]:
    """Every program, with each of its schedules, on several meshes, of extents that these divide or don't."""
    for name, builder in PROGRAMS.items():
        for axes in _meshes(builder.axes):
            program, on = builder(axe.Mesh(axes)), ",".join(f"{axis}={size}" for axis, size in axes.items())
            for size in ("test", "uneven") if program.mesh.size == 4 else ("test",):
                for schedule in program.schedules:
                    yield f"programs/{name}/{on}/{size}/{schedule}", partial(_published, name, axes, size, schedule)


# ---- Tile programs ---------------------------------------------------------------------------------------------------


def _tiled(func: tirx.PrimFunc, target: Target) -> Texts:
    plan = tile.plan(func, target)
    lowered = tile.lower(func, target).with_attr("global_symbol", "main")
    code = script(lowered)
    if target.kind.name == "cuda":
        code = "\n".join([code, cuda_source(tvm.IRModule({"main": lowered}), target)])
    return {"plan": f"{plan.explain()}\noverlaps {overlaps(func, target)}", "code": code}


def _kernel(name: str, case: int, target: str) -> Texts:
    kernel, resolved = KERNELS[name], TARGETS[target]()
    problem = kernel.cases[case]
    found = [_tiled(func, resolved) for func in kernel.recipe(resolved, problem).programs]
    plans = [f"{name}: {[*values]}" for name, values in kernel.parameters(resolved, problem).items()]
    plans += [program["plan"] for program in found]
    return {"plan": "\n".join(plans), "code": "\n".join(program["code"] for program in found)}


def kernels() -> Iterator[tuple[str, Job]]:
    """Every tile kernel on each of its problems, for each target."""
    for name, kernel in KERNELS.items():
        for case in range(len(kernel.cases)):
            for target in TARGETS:
                yield f"kernels/{name}/{case}/{target}", partial(_kernel, name, case, target)


_HOPPER_PROGRAMS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("matmul", (4096, 4096, 4096), {}),
    ("matmul", (4096, 4104, 4096), {}),
    ("matmul", (1000, 1208, 520, (128, 128, 64)), {"out": "float32"}),
    ("matmul", (512, 512, 512, (128, 256, 128), "float8_e4m3fn", "bfloat16"), {}),
    ("matmul", (512, 512, 512, (192, 128, 64), "float16"), {"transpose_a": True, "transpose_b": False}),
    ("matmul", (512, 512, 512, (128, 128, 128), "int8", "int32"), {}),
    ("matmul", (1, 512, 512, (64, 8, 128)), {}),
    ("matmul", (128, 192, 512, (64, 96, 128)), {}),
    ("matmul", (128, 128, 128, (128, 128, 32), "float32"), {"instruction": "wgmma"}),
    ("matmul", (512, 512, 512), {"persistent": True, "swizzle": 4, "stages": 3}),
    ("attention", (4, 32, 4096), {}),
    ("attention", (2, 3, 768), {"causal": True}),
    ("attention", (2, 3, 768), {"block": (192, 64)}),
    ("through_shared", (256, 256, 256), {}),
    ("batched", (2, 256, 64, 256), {}),
    ("chained", (256, 256), {}),
    ("chained", (256, 256), {"branch": True}),
]
_UNIFORM_PROGRAMS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("matmul", (256, 256, 256, (128, 128, 32), "bfloat16", "bfloat16"), {"transpose_b": True}),
    ("matmul", (99, 77, 61), {"stages": 2, "persistent": True, "swizzle": 2}),
    ("matmul", (64, 64, 64), {"transpose_a": True}),
    ("matmul", (64, 64, 64), {"dtype": "float32"}),
    ("matmul", (64, 64, 64), {"dtype": "float32", "transpose_b": True, "instruction": "mma"}),
    ("matmul", (64, 64, 128), {"dtype": "int8", "out": "int32", "total": "int32", "transpose_b": True}),
    ("attention", (128, 64), {}),
    ("rows", (5, 8192, 1, "float32", "sum"), {}),
    ("rows", (64, 96, 16, "bfloat16", "max"), {}),
    ("rows", (64, 64, 8, "float32", "min"), {}),
    ("columns", (64, 24), {}),
    ("transposed", (100, 70, "bfloat16"), {}),
    ("segments", (5, 200), {}),
    ("gathered", (16, 40), {}),
    ("split", (64, 64, 512, 4), {}),
    ("chain", (51, 50), {}),
    ("unlike", (64, 64), {}),
    ("reused", (512,), {}),
    ("fused", (64, 256), {}),
    ("reduced_memory", (10, 37), {}),
    ("converted", ("float32", "bfloat16"), {}),
    ("converted", ("int8", "float16"), {}),
    ("converted", ("int64", "float64"), {}),
]


def _test_program(file: str, name: str, arguments: tuple[Any, ...], options: dict[str, Any], target: str) -> Texts:
    folder = str(TESTS / "tile")
    if folder not in sys.path:
        sys.path.append(folder)
    return _tiled(getattr(__import__(file), name)(*arguments, **options), TARGETS[target]())


def tile_programs() -> Iterator[tuple[str, Job]]:
    """The programs of the tests, for each target."""
    for file, programs in (("programs_hopper", _HOPPER_PROGRAMS), ("programs_uniform", _UNIFORM_PROGRAMS)):
        for at, (name, arguments, options) in enumerate(programs):
            for target in TARGETS:
                job = partial(_test_program, file, name, arguments, options, target)
                yield f"tile/{file}/{at:02}-{name}/{target}", job


# ---- Relax models ----------------------------------------------------------------------------------------------------


class _Mlp(nn.Module):
    def __init__(self) -> None:
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24, bias=False)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.down(nn.op.gelu(self.up(x))) + x


class _Gated(nn.Module):
    def __init__(self) -> None:
        self.gate, self.up, self.down = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.norm = nn.RMSNorm(8, [-1])

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.norm(self.down(nn.op.silu(self.gate(x)) * self.up(x)) + x)


class _ConvNet(nn.Module):
    def __init__(self) -> None:
        self.first, self.second = nn.Conv2D(3, 16, 3, padding=1), nn.Conv2D(16, 16, 3, padding=1, groups=16)
        self.last = nn.Linear(16, 10)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        y = nn.op.relu(self.second(nn.op.relu(self.first(x))))
        return self.last(nn.op.reshape(nn.op.sum(y, [2, 3]), (1, 16)))


_MODELS: dict[str, tuple[type[nn.Module], list[int]]] = {
    "mlp": (_Mlp, [12, 24]),
    "gated": (_Gated, [6, 8]),
    "convnet": (_ConvNet, [1, 3, 16, 16]),
}


def _model(name: str, bound: bool = False) -> tvm.IRModule:
    kind, shape = _MODELS[name]
    mod, _ = kind().export_tvm({"forward": {"x": nn.spec.Tensor(shape, "float32")}})
    if not bound:
        return mod
    rng = np.random.default_rng(3)
    weights = {
        str(param.name): rng.standard_normal([int(n) for n in param.ty.shape], "float32")
        for param in mod["forward"].params[1:]
    }
    return relax.transform.BindParams("forward", weights)(mod)


def _alone(name: str, target: str, form: str) -> Texts:
    model, resolved, pack = _model(name, form == "bound"), TARGETS[target](), form == "packed"
    texts = {"fused": or_refused(lambda: str(fuse(model, resolved, pack).script()))}
    if resolved.kind.name == "llvm":
        texts["vm"] = str(compile_model(model, resolved, None, pack).as_text())
    return texts


def _sharded(name: str, axes: Mapping[str, int], axis: str) -> Texts:
    mesh, model = axe.Mesh(dict(axes)), _model(name)
    pipeline = tvm.relax.get_pipeline("axe", mesh=mesh, axis=axis, target=MESH_TARGET)
    exe = axe.compile(model, mesh, MESH_TARGET, None, axis=axis)
    return {"pipeline": script(pipeline(model)), "module": script(exe.module), "runnable": script(runnable(exe))}


def models() -> Iterator[tuple[str, Job]]:
    """Relax models, on one device for each target and on meshes."""
    for name in _MODELS:
        for target in TARGETS:
            for form in ("plain", "bound", "packed"):
                yield f"models/{name}/{target}/{form}", partial(_alone, name, target, form)
        for on, axes in {"tp=2": {"tp": 2}, "tp=4": {"tp": 4}, "dp=2,tp=2": {"dp": 2, "tp": 2}}.items():
            yield f"models/{name}/{on}", partial(_sharded, name, axes, "tp")


# ---- Records ---------------------------------------------------------------------------------------------------------


def _target_of(folder: str) -> Target:
    match = re.fullmatch(r"llvm-(.+)-(\d+)cores?", folder)
    return gpu(folder.removeprefix("cuda-")) if match is None else cpu(match[1], int(match[2]))


def _shipped(folder: str, workload: str) -> Texts:
    target, path = _target_of(folder), SHIPPED / folder / workload
    (line,) = (path / "database_workload.json").read_text(encoding="utf-8").splitlines()
    mod = ms.database.Workload.from_json(json.loads(line)).mod
    best, seconds = apply_best(mod, target, NO_RECORDS)
    return {"best": f"{seconds}\n{script(best)}", "code": _parts(best["main"], target)}


def _parts(func: tirx.PrimFunc, target: Target) -> str:
    parts = split_packing(func)
    mods = [tvm.IRModule({"main": part}) for part in (parts.pack, parts.main) if part is not None]
    return or_refused(lambda: "\n".join(device_code(mod, target) for mod in mods))


def _demo(schedule: str, level: str, devices: int) -> Texts:
    sch = axe.Schedule(block, mesh=axe.Mesh({"tp": devices}))
    SCHEDULES[schedule](sch)
    return scheduled(sch, {"kind": "llvm", "mcpu": level}, NO_RECORDS)


def records() -> Iterator[tuple[str, Job]]:
    """Compiling with the records that ship: the demo's kernels, and every workload that has some."""
    for schedule in SCHEDULES:
        for level in ("x86-64-v3", "x86-64-v4"):
            for devices in (2, 4):
                yield f"records/demo/{level}/tp={devices}/{schedule}", partial(_demo, schedule, level, devices)
    for path in sorted(SHIPPED.glob("*/*/database_workload.json")):
        folder, workload = path.parts[-3:-1]
        yield f"records/shipped/{folder}/{workload}", partial(_shipped, folder, workload)


# ---- Streams ---------------------------------------------------------------------------------------------------------


def _stream(name: str, model: str, batch: int, values: bool) -> Texts:
    sample = samples.make_sample(name, samples.MODELS[model], batch, seed=3)
    report = sample.run(values=values, trace=True)
    sums = [metrics.off_chip_read, metrics.off_chip_written, metrics.flops]
    counted = [report.cycles, report.read, report.written, report.flops, report.tokens, report.compute]
    counted += [report.peak_on_chip, report.off_chip_busy]
    return {
        "metrics": "\n".join(f"{count.__name__} {count(sample.program)}" for count in sums),
        "program": str(sample.program),
        "run": "\n".join([str(counted), str(report), *map(repr, report.units), str(report.occupancy)]),
    }


def streams() -> Iterator[tuple[str, Job]]:
    """Streaming programs: what they are expected to move and compute, and what a simulated run counts."""
    for name in samples.PROGRAMS:
        yield f"streams/{name}/small", partial(_stream, name, "small", 5, True)
        yield f"streams/{name}/small-11", partial(_stream, name, "small", 11, False)


GROUPS = (distributed, kernels, tile_programs, models, records, streams)
