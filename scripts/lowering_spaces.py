"""What `record_lowering` hashes of searches: the design spaces of kernels, and the schedules that are enumerated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import tvm
from lowering_cases import Job, Texts, cpu, device_code, gpu, or_refused, script
from lowering_names import (
    LAYOUT_FREE,
    PROGRAMS,
    _tvm,
    block,
    first_schedules,
    fuse,
    lower,
    normalize,
    program_workload,
    schedules,
    seed_schedule,
    sharings,
    space_for,
    split_packing,
)
from tvm import relax, s_tir, te, tirx, topi
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.testing import te_workload
from tvm.target import Target

import tvm_axe as axe

# ---- Design spaces ---------------------------------------------------------------------------------------------------


def _operator(shapes: list[tuple[int, ...]], build: Callable[..., Any], free: tuple[int, ...] = ()) -> tirx.PrimFunc:
    """The one kernel of a model of one operator and what is pointwise behind it."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{n}", relax.TensorType(shape, "float32")) for n, shape in enumerate(shapes)]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(build(builder, *params))
        builder.emit_func_output(out)
    fused = fuse(builder.get(), cpu("x86-64-v3"))
    (func,) = [func for func in fused.functions.values() if isinstance(func, tirx.PrimFunc)]
    return func.with_attr(LAYOUT_FREE, list(free)) if free else func


def _dense(bb: Any, x: Any, w: Any, bias: Any) -> Any:
    product = bb.emit(relax.op.matmul(x, bb.emit(relax.op.permute_dims(w))))
    return relax.op.nn.relu(bb.emit(relax.op.add(product, bias)))


def _conv(layout: str, groups: int = 1) -> Callable[..., Any]:
    kernel = "OIHW" if layout == "NCHW" else "HWIO"

    def build(bb: Any, x: Any, w: Any, bias: Any) -> Any:
        y = relax.op.nn.conv2d(x, w, 1, 1, groups=groups, data_layout=layout, kernel_layout=kernel)
        return relax.op.nn.relu(bb.emit(relax.op.add(bb.emit(y), bias)))

    return build


def _half_product(m: int, n: int, k: int, dtype: str) -> tirx.PrimFunc:
    """C = A B^T, summed in float32 and rounded once."""
    a, b, l = te.placeholder((m, k), dtype, "A"), te.placeholder((n, k), dtype, "B"), te.reduce_axis((0, k), "l")
    d = te.compute((m, n), lambda i, j: te.sum(a[i, l].astype("float32") * b[j, l].astype("float32"), l), "product")
    return te.create_prim_func([a, b, te.compute((m, n), lambda i, j: d[i, j].astype(dtype), "round")])


def _transpose() -> tirx.PrimFunc:
    x = te.placeholder((64, 48), name="x")
    return te.create_prim_func([x, topi.transpose(x)])


_DENSE = [(96, 256), (320, 256), (320,)]
_NCHW, _NHWC = [(1, 16, 14, 14), (32, 16, 3, 3), (1, 32, 1, 1)], [(1, 14, 14, 16), (3, 3, 16, 32), (32,)]
_DEPTHWISE = [(1, 6, 13, 12), (6, 1, 3, 3), (1, 6, 1, 1)]
WORKLOADS: dict[str, Callable[[], tirx.PrimFunc]] = {
    "matmul": lambda: _operator([(128, 192), (192, 256)], lambda bb, a, b: relax.op.matmul(a, b)),
    "matmul-uneven": lambda: _operator([(13, 50), (50, 7)], lambda bb, a, b: relax.op.matmul(a, b)),
    "batched": lambda: _operator([(4, 32, 64), (4, 64, 48)], lambda bb, a, b: relax.op.matmul(a, b)),
    "row": lambda: _operator([(1, 512), (512, 384)], lambda bb, a, b: relax.op.matmul(a, b)),
    "dense": lambda: _operator(_DENSE, _dense),
    "dense-free": lambda: _operator(_DENSE, _dense, (1,)),
    "bfloat16": lambda: _half_product(256, 256, 256, "bfloat16"),
    "float16-skinny": lambda: _half_product(4, 512, 1024, "float16"),
    "conv-nchw": lambda: _operator(_NCHW, _conv("NCHW")),
    "conv-nchw-free": lambda: _operator(_NCHW, _conv("NCHW"), (1,)),
    "conv-nhwc": lambda: _operator(_NHWC, _conv("NHWC")),
    "conv-nhwc-free": lambda: _operator(_NHWC, _conv("NHWC"), (1,)),
    "depthwise": lambda: _operator(_DEPTHWISE, _conv("NCHW", 6)),
    "softmax": lambda: te.create_prim_func(te_workload.softmax_mn(64, 256)),
    "norm": lambda: te.create_prim_func(te_workload.norm_bmn(1, 64, 96)),
    "column-sums": lambda: _operator([(96, 64)], lambda bb, x: relax.op.sum(x, 0)),
    "layer-norm": lambda: _operator([(24, 64), (64,), (64,)], lambda bb, *xs: relax.op.nn.layer_norm(*xs, axes=-1)),
    "transpose": _transpose,
}
_SPACE_TARGETS = {
    "v3-1": partial(cpu, "x86-64-v3", 1),
    "v3-2": partial(cpu, "x86-64-v3", 2),
    "v4-1": partial(cpu, "x86-64-v4", 1),
    "v4-2": partial(cpu, "x86-64-v4", 2),
    "sm_80": partial(gpu, "sm_80"),
    "sm_90a": partial(gpu, "sm_90a"),
}
_MOST, _SEARCHED = 3, 2


def _candidate(sch: s_tir.Schedule, target: Target) -> str:
    def code() -> str:
        parts = split_packing(sch.mod["main"])
        mods = [tvm.IRModule({"main": parts.main.with_attr("global_symbol", "main")})]
        mods += [] if parts.pack is None else [tvm.IRModule({"main": parts.pack})]
        # Upstream's spaces leave loops on a GPU unbound until their postprocessors have run.
        chosen = "axe.tile" in script(sch.mod) or target.kind.name != "cuda"
        return "\n".join(device_code(mod, target) if chosen else script(mod) for mod in mods)

    return "\n".join([str(sch.trace), script(sch.mod), or_refused(code)])


def _space(workload: str, target: str) -> Texts:
    """The design spaces as they are generated, and what a search of fixed seed would measure first."""
    mod, resolved = normalize(WORKLOADS[workload]()), _SPACE_TARGETS[target]()
    strategy = ms.search_strategy.EvolutionarySearch(population_size=8, init_min_unmeasured=4, genetic_num_iters=1)
    space = space_for(mod["main"], resolved)
    context = _tvm.tune_context(mod, resolved, space, strategy, "main", 1, 1, logging.getLogger(__name__))
    found = list(context.generate_design_space())
    # Of many the first ones and the last: all of their traces are in one text.
    shown = found if len(found) <= _MOST else [*found[: _MOST - 1], found[-1]]
    texts = {"traces": "\n\n".join(str(sch.trace) for sch in found)}
    texts |= {f"space-{n}": _candidate(sch, resolved) for n, sch in enumerate(shown)}
    database = ms.database.MemoryDatabase()
    database.commit_workload(mod)
    context.pre_tuning(_SEARCHED, _SEARCHED, found, database, ms.cost_model.RandomModel(seed=1))
    first = context.generate_measure_candidates() or ()
    return texts | {f"searched-{n}": _candidate(candidate.sch, resolved) for n, candidate in enumerate(first)}


def spaces() -> Iterator[tuple[str, Job]]:
    """The design spaces of kernels, on CPUs of several levels and numbers of cores and on GPUs."""
    for workload in WORKLOADS:
        for target in _SPACE_TARGETS:
            yield f"spaces/{workload}/{target}", partial(_space, workload, target)


# ---- The search over schedules ---------------------------------------------------------------------------------------

_LISTED = 24  # candidates whose modules are recorded; all of a longer list are in its text


def _moves(axes: Mapping[str, int], program: str | None) -> Texts:
    mesh = axe.Mesh(dict(axes))
    func, keep = (block, ()) if program is None else (PROGRAMS[program](mesh).func, ("m_out", "v_out"))
    found = list(schedules(seed_schedule(func, mesh), keep=keep))
    lines = [f"{n}: {'; '.join(candidate.steps)}\n{candidate.sch.trace}" for n, candidate in enumerate(found)]
    texts = {"list": "\n".join(lines)}
    step = max(1, -(-len(found) // _LISTED))
    for n in range(0, len(found), step):
        texts[f"{n:03}"] = or_refused(partial(_lowered, found[n].sch.mod["main"], mesh))
    return texts


def _lowered(func: tirx.PrimFunc, mesh: axe.Mesh) -> str:
    lowered = lower(func, mesh)
    return "\n".join([lowered.notation, *map(str, lowered.stages), script(lowered.module)])


def _sharings(axes: Mapping[str, int]) -> Texts:
    mesh = axe.Mesh(dict(axes))
    found = list(sharings(block, mesh))
    texts = {"list": "\n\n".join(str(sch.trace) for sch in found)}
    return texts | {f"{n:03}": or_refused(partial(_lowered, s.mod["main"], mesh)) for n, s in enumerate(found)}


def _tuned_schedules(axes: Mapping[str, int]) -> Texts:
    """What `axe.tune` of a program on a mesh begins with, in its order."""
    mesh = axe.Mesh(dict(axes))
    found = first_schedules(program_workload(block, mesh, "processes"), (2, 4, 8))
    return {"list": "\n\n".join(f"{'; '.join(candidate.steps)}\n{candidate.sch.trace}" for candidate in found)}


def searches() -> Iterator[tuple[str, Job]]:
    """The schedules that are enumerated: of the demo's block, and of two programs with state or a tensor axis."""
    for on, axes in {"tp=2": {"tp": 2}, "dp=2,tp=2": {"dp": 2, "tp": 2}}.items():
        yield f"search/block/{on}/moves", partial(_moves, axes, None)
        yield f"search/block/{on}/sharings", partial(_sharings, axes)
    yield "search/block/tp=2/first", partial(_tuned_schedules, {"tp": 2})
    yield "search/adam/dp=2/moves", partial(_moves, {"dp": 2}, "adam")
    yield "search/mlp/tp=2/moves", partial(_moves, {"tp": 2}, "mlp")


GROUPS = (spaces, searches)
