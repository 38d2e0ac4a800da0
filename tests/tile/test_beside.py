"""Collectives beside independent stages: what is told when, and that it is right in any order of events.

Programs run as their lowered calls say, on all devices, in numpy: each has two streams, and a collective beside others
moves a row at a time while kernels run. What comes out is compared with the program in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from beside import Devices, Stuck
from tvm.script import tirx as T

from tvm_axe.errors import LowerError, ScheduleError
from tvm_axe.layout import Layout, Mesh
from tvm_axe.layout.arrays import scatter
from tvm_axe.lower import Lowered, lower
from tvm_axe.lower.calls import Call
from tvm_axe.machines import resolve_target
from tvm_axe.programs import PROGRAMS
from tvm_axe.schedule import Schedule, with_layouts
from tvm_axe.schedule.naming import block_names

HOPPER = resolve_target("cuda:sm_90a")


def layers(devices: int = 2, schedule: str = "MM-beside(AR)-C") -> Lowered:
    sch = PROGRAMS["layers"](Mesh({"dp": devices}), "uneven").schedule(schedule)
    return lower(sch.mod["main"], sch.mesh)


def told(lowered: Lowered) -> list[str]:
    return [
        " ".join([call.function, *(str(each) for each in call.arguments if isinstance(each, int))])
        for call in lowered.calls
    ]


def test_a_collective_begins_when_it_can_and_is_joined_when_it_must_be() -> None:
    found = layers()
    assert told(found) == [
        "part2", "axe.barrier", "axe.fork 0", "axe.all_reduce:beside",
        "back", "part1", "axe.barrier", "axe.fork 0", "axe.all_reduce:beside",
        "axe.join 1", "axe.barrier", "step2",
        "axe.join 0", "axe.barrier", "step1",
    ]  # fmt: skip
    assert found.forms == ("sum2: an all-reduce beside back, part1", "sum1: an all-reduce beside step2")


def test_unmarked_programs_are_as_they_were() -> None:
    assert not any(call.function.startswith(("axe.fork", "axe.join")) for call in layers(2, "MM-AR-C").calls)


def test_one_that_nothing_can_hide_stays_in_its_place() -> None:
    program = PROGRAMS["sgd"](Mesh({"dp": 2}))
    sch = program.schedule("AR-C")
    sch.beside("sum")
    found = lower(sch.mod["main"], sch.mesh)
    assert told(found) == ["axe.all_reduce", "axe.barrier", "mean_m_p"]
    assert found.forms == ("sum: an all-reduce in its place: mean_m_p follows at once",)


def test_what_is_no_collective_is_refused() -> None:
    mesh = Mesh({"dp": 2})
    sch = Schedule(PROGRAMS["layers"](mesh).func, mesh=mesh)
    with pytest.raises(ScheduleError, match="beside: block 'step2' computes, and neither copies nor reduces"):
        sch.beside("step2")
    plain = Schedule(PROGRAMS["sgd"](mesh).func, mesh=mesh)
    plain.beside("sum")  # which no device shares yet
    with pytest.raises(LowerError, match="stage 'sum' is to run beside others, and is no collective but local"):
        lower(plain.mod["main"], mesh)
    fused = PROGRAMS["adam"](mesh).schedule("fuse(RS-C-AG)")
    with pytest.raises(ScheduleError, match="beside: block 'sum' shares its nest with 'mean'"):
        fused.beside("sum")
    chunks = PROGRAMS["ag_mm"](Mesh({"tp": 2})).schedule("ol(AG, MM)")
    (gathered,) = (name for name in block_names(chunks.mod) if "global" in name)
    with pytest.raises(ScheduleError, match="is in chunks, which overlap hides already"):
        chunks.beside(gathered)


@pytest.mark.usefixtures("pairs_at_any_size")
def test_a_kernel_beside_copies_waits_for_none() -> None:
    """It fills the processors and waits for the side stream, so what is there has to be done before."""
    m, n, k = 256, 128, 256

    @T.prim_func(s_tir=True)
    def func(
        D: T.Buffer((2, m, n), "float16"),
        X: T.Buffer((m, k), "float16"),
        W: T.Buffer((n, k), "float16"),
        S: T.Buffer((m, n), "float16"),
        Y: T.Buffer((m, n), "float16"),
        out: T.Buffer((m, n), "float16"),
    ) -> None:
        for i, j, d in T.grid(m, n, 2):
            with T.sblock("sum"):
                vi, vj, vd = T.axis.remap("SSR", [i, j, d])
                with T.init():
                    S[vi, vj] = T.float16(0)
                S[vi, vj] = S[vi, vj] + D[vd, vi, vj]
        for i, j in T.grid(m, n):
            with T.sblock("other"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = T.Cast("float16", vi + vj)
        for i, j, l in T.grid(m, n, k):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, l])
                with T.init():
                    out[vi, vj] = T.float16(0)
                out[vi, vj] = out[vi, vj] + X[vi, vk] * W[vj, vk]

    sch = Schedule(func, mesh=Mesh({"tp": 2}))
    sch.all_reduce("sum", "d", "tp")
    sch.beside("sum")
    partial, reduce = sch.shard("mm", "l", "tp")
    reduce, gathered = sch.split_collective(reduce)
    sch.fuse_collective([reduce, gathered])
    sch.overlap([partial, reduce], "tp", 2)
    found = lower(sch.mod["main"], sch.mesh, 2 << 20, HOPPER)
    names = told(found)
    assert names.index("axe.join 0") < next(i for i, name in enumerate(names) if name.endswith("_prepare"))
    assert "sum: an all-reduce beside other" in found.forms
    on_cores = told(lower(sch.mod["main"], sch.mesh))  # chunks wait for nothing but their peers
    assert on_cores[-1] == "axe.join 0"


# ---- In any order of events ------------------------------------------------------------------------------------------


class Case:
    """A lowered program on simulated devices, of a mesh of one axis."""

    def __init__(self, lowered: Lowered, compute: Callable[..., Sequence[np.ndarray]]) -> None:
        self.lowered, self.compute = lowered, compute
        size = lowered.mesh.size
        self.arrays = {
            buffer.name: np.full((size, *buffer.sharding.stored), np.nan, buffer.dtype)
            for buffer in lowered.buffers.values()
        }
        functions = {var: f for var, f in lowered.module.functions_items() if isinstance(f, tvm.tirx.PrimFunc)}
        module = tvm.compile(tvm.IRModule(functions), "llvm").jit()
        kernels = {str(var.name_hint): self._kernel(module[str(var.name_hint)]) for var in functions}
        self.own: dict[tuple[int, str], np.ndarray] = {}
        for call in lowered.calls:  # what main allocates
            for each in call.arguments:
                name = getattr(each, "buffer", None)
                if name is not None and name not in self.arrays:
                    self.arrays[name] = np.full((size, *each.shape), np.nan, "float32")
        self.devices = Devices(self.arrays, {}, {}, kernels)

    @staticmethod
    def _kernel(function: Any) -> Callable[..., None]:
        def run(*arguments: Any) -> None:
            tensors = [tvm.runtime.tensor(each) if isinstance(each, np.ndarray) else each for each in arguments]
            function(*tensors)
            for given, tensor in zip(arguments, tensors):
                if isinstance(given, np.ndarray):
                    given[...] = tensor.numpy()

        return run

    def check(self, rng: np.random.Generator, calls: Sequence[Call] | None = None) -> None:
        """Run it on new data and compare."""
        whole = [rng.standard_normal(buffer.shape).astype("float32") for buffer in self.lowered.inputs]
        for buffer in self.lowered.buffers.values():
            self.arrays[buffer.name][...] = np.nan
        for buffer, array in zip(self.lowered.inputs, whole):
            for device in range(self.lowered.mesh.size):
                scatter(array, buffer.sharding.holding, device, self.arrays[buffer.name][device])
        self.devices.run(self.lowered.calls if calls is None else calls, rng)
        for buffer, wanted in zip(self.lowered.outputs, self.compute(*(array.astype("f8") for array in whole))):
            for device in range(self.lowered.mesh.size):  # those that hold all of it, too
                found = self.arrays[buffer.name][device]
                expected = np.full(found.shape, np.nan)
                scatter(wanted, buffer.sharding.holding, device, expected)
                its = ~np.isnan(expected)
                np.testing.assert_allclose(found[its], expected[its], rtol=1e-4, atol=1e-4)


@functools.cache
def case_of(devices: int) -> Case:
    return Case(layers(devices), PROGRAMS["layers"](Mesh({"dp": devices}), "uneven").compute)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_any_order_of_events(devices: int) -> None:
    for seed in range(6):
        case_of(devices).check(np.random.default_rng(seed))


def without(calls: Sequence[Call], at: int) -> list[Call]:
    return [*calls[:at], *calls[at + 1 :]]


def swapped(calls: Sequence[Call], at: int) -> list[Call]:
    changed = list(calls)
    changed[at : at + 2] = changed[at : at + 2][::-1]
    return changed


def places(function: str) -> list[int]:
    return [at for at, call in enumerate(layers().calls) if call.function == function]


MISTAKES = {
    **{f"no barrier at {at}": functools.partial(without, at=at) for at in places("axe.barrier")},
    **{f"no join at {at}": functools.partial(without, at=at) for at in places("axe.join")},
    **{f"a barrier before the join at {at}": functools.partial(swapped, at=at) for at in places("axe.join")[-1:]},
    **{f"a fork before the barrier at {at}": functools.partial(swapped, at=at - 1) for at in places("axe.fork")},
    "the first join leaves all": lambda calls: [
        replace(call, arguments=(2,)) if call.function == "axe.join" and call.arguments == (1,) else call
        for call in calls
    ],
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_caught(mistake: str) -> None:
    case = case_of(2)
    calls = MISTAKES[mistake](case.lowered.calls)
    for seed in range(60):
        try:
            case.check(np.random.default_rng(seed), calls)
        except (Stuck, AssertionError):
            return
    raise AssertionError(f"{mistake}: nothing of it was seen")


# ---- Programs drawn at random ----------------------------------------------------------------------------------------

SHARES, TERMS, TOTALS = ("S0", "S1"), ("P0", "P1", "P2"), ("R0", "R1", "R2")
RESULTS = ("S0", "S1", "R0", "R1")  # the others are intermediates


def drawn(rng: np.random.Generator, devices: int, stages: int) -> tuple[tvm.tirx.PrimFunc, Callable[..., Any]]:
    """Draw stages on shares and totals, which they overwrite again and again, and what they are in numpy."""
    lines: list[str] = []
    steps: list[Callable[[dict[str, Any]], None]] = []
    written = ["X", "V"]

    def one(names: Sequence[str]) -> str:
        return str(rng.choice([name for name in names if name in written]))

    def stage(kind: str, target: str) -> None:
        number, mark = len(steps), rng.random() < 0.7
        if kind == "sum":
            source = one(TERMS)
            lines.append(f"""
    for i, j in T.grid(4, 3):
        for d in T.serial({devices}, annotations={{"axe.bind": "dp"}}):
            with T.sblock("sum{number}"):
                {'T.sblock_attr({"axe.beside": "1"})' if mark else "pass"}
                vi, vj, vd = T.axis.remap("SSR", [i, j, d])
                with T.init():
                    {target}[vi, vj] = T.float32(0)
                {target}[vi, vj] = {target}[vi, vj] + {source}[vd, vi, vj]""")
            steps.append(lambda known: known.update({target: known[source].sum(0)}))
        elif kind == "share":
            source, total = one((*SHARES, "X")), one((*TOTALS, "V"))
            lines.append(f"""
    for d in T.serial({devices}, annotations={{"axe.bind": "dp"}}):
        for i, j in T.grid(4, 3):
            with T.sblock("share{number}"):
                vd, vi, vj = T.axis.remap("SSS", [d, i, j])
                {target}[vd, vi, vj] = {source}[vd, vi, vj] * T.float32(0.5) - {total}[vi, vj]""")
            steps.append(lambda known: known.update({target: known[source] * 0.5 - known[total]}))
        else:
            source, other = one((*TOTALS, "V")), one((*TOTALS, "V"))
            lines.append(f"""
    for i, j in T.grid(4, 3):
        with T.sblock("total{number}"):
            vi, vj = T.axis.remap("SS", [i, j])
            {target}[vi, vj] = {source}[vi, vj] * T.float32(0.25) + {other}[vi, vj]""")
            steps.append(lambda known: known.update({target: known[source] * 0.25 + known[other]}))
        written.append(target)

    stage("share", "P0")
    for _ in range(stages):
        kind = str(rng.choice(["sum", "sum", "share", "total"]))
        stage(kind, str(rng.choice((*SHARES, *TERMS, *TERMS) if kind == "share" else TOTALS)))
    for target in RESULTS:
        if target not in written:
            stage("share" if target in SHARES else "sum", target)
    share, total = f'T.Buffer(({devices}, 4, 3), "float32")', 'T.Buffer((4, 3), "float32")'
    results = ", ".join(f"{name}: {share if name in SHARES else total}" for name in RESULTS)
    head = f"@T.prim_func(s_tir=True)\ndef main(X: {share}, V: {total}, {results}) -> None:"
    inner = "".join(
        f"\n    {name} = T.sblock_alloc_buffer({(4, 3) if name in TOTALS else (devices, 4, 3)}, 'float32')"
        for name in (*TERMS, "R2")
        if name in written
    )
    func = tvm.script.from_source(head + inner + "".join(lines))

    def compute(x: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
        known = {"X": x, "V": v}
        for step in steps:
            step(known)
        return [known[name] for name in RESULTS]

    return func, compute


@pytest.mark.parametrize("seed", range(5))
def test_drawn_programs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    devices = int(rng.integers(2, 4))
    func, compute = drawn(rng, devices, int(rng.integers(4, 12)))
    mesh = Mesh({"dp": devices})
    shared = dict.fromkeys(("X", "S0", "S1"), Layout.sharded((devices, 4, 3), mesh, {0: "dp"}))
    case = Case(lower(with_layouts(func, shared), mesh), compute)
    for turn in range(4):
        case.check(np.random.default_rng(turn))
