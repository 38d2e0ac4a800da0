"""Tuning distributed programs: the space, its model, the search on a made-up clock, and whole jobs."""

import os
import random
import signal
from itertools import product

import numpy as np
import pytest
import tvm
from tvm import s_tir
from tvm.s_tir import meta_schedule as ms
from tvm.script import tirx as T
from tvm.target import Target

import tvm_axe as axe
from tvm_axe import _tvm
from tvm_axe.analysis.patterns import is_product
from tvm_axe.collective.engine import HOST
from tvm_axe.layout import Layout, Link, Mesh
from tvm_axe.lower import lower
from tvm_axe.lower.cost import estimate, features_of_program, operations
from tvm_axe.lower.parsing import parse_program
from tvm_axe.machines.target import cores_per_device, resolve_target
from tvm_axe.meta.measure.protocol import Measurement
from tvm_axe.meta.mesh import best_schedule, tune_program
from tvm_axe.meta.mesh.candidates import mesh_of
from tvm_axe.meta.mesh.model import ProgramModel
from tvm_axe.meta.mesh.moves import structure
from tvm_axe.meta.mesh.runner import MeshRunner
from tvm_axe.meta.mesh.seeds import sharings
from tvm_axe.meta.mesh.space import program_space, program_workload
from tvm_axe.meta.mesh.strategy import Ranking
from tvm_axe.meta.search.loop import Job
from tvm_axe.meta.search.search import Tools, evolution
from tvm_axe.meta.task import Workload
from tvm_axe.pipeline import lowered_for
from tvm_axe.programs import PROGRAMS
from tvm_axe.schedule import with_layouts

TP, TWO_AXES = Mesh({"tp": 2}), Mesh({"dp": 2, "tp": 2})
TARGET = Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 1})
TOKENS, INNER, OUTER = 12, 24, 8


def block_adding(constant):
    """The demo's program, small: relu(X W + bias + constant) + residual."""

    @T.prim_func(s_tir=True)
    def block(
        X: T.Buffer((TOKENS, INNER), "float32"),
        W: T.Buffer((INNER, OUTER), "float32"),
        bias: T.Buffer((OUTER,), "float32"),
        residual: T.Buffer((TOKENS, OUTER), "float32"),
        out: T.Buffer((TOKENS, OUTER), "float32"),
    ) -> None:
        C = T.sblock_alloc_buffer((TOKENS, OUTER), "float32")
        for i, j, k in T.grid(TOKENS, OUTER, INNER):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + X[vi, vk] * W[vk, vj]
        for i, j in T.grid(TOKENS, OUTER):
            with T.sblock("epi"):
                vi, vj = T.axis.remap("SS", [i, j])
                out[vi, vj] = T.max(C[vi, vj] + bias[vj] + T.float32(constant), T.float32(0)) + residual[vi, vj]

    return block


BLOCK = block_adding(0.0)


def workload(func=BLOCK, mesh=TP):
    return program_workload(func, mesh, "threads")


def proposals(mod, space=None):
    """Every schedule of a space, as the search makes them."""
    strategy = Ranking(ProgramModel(), 4)
    context = _tvm.tune_context(mod, TARGET, space or program_space(mod), strategy, "program", 1, 1, None)
    strategy.pre_tuning(1, 1, context.generate_design_space())
    return strategy.candidates


class Clock:
    """A worker that runs nothing: a schedule's seconds are drawn for what it does, by a seed.

    A device does `rate` operations a second.
    """

    def __init__(self, seed, rate=1e12):
        self.conditions, self.machines = {"clock": "made up"}, {}
        self.seed, self.rate, self.measured = seed, rate, []

    def draw(self, name):
        return random.Random(f"{self.seed} {name}").random()

    def seconds(self, mod):
        """Arithmetic, another machine's link, and what each kernel, fusion and number of chunks does to it."""
        func, lowered = lowered_for(mod["main"], mesh_of(mod))
        features = features_of_program(lowered, HOST._replace(link=Link(latency=30e-6, bandwidth=3e9), memory=3e9))
        total = 2e-4 + features["link_seconds"] + operations(func, lowered.mesh)[0] / self.rate
        total += 5e-6 * features["messages"]
        total += sum(2e-5 * self.draw(stage.kind + str(stage.kernel)) for stage in lowered.stages)
        return total * (1 + 0.1 * self.draw(lowered.notation))

    def prepare(self, mod):
        return Measurement(1e-2)

    def measure_all(self, mods):
        for mod in mods:
            self.measured.append(structure(s_tir.Schedule(mod)))
            yield Measurement(self.seconds(mod))


def with_spaces(mod):
    """A workload, and its design spaces, made once."""
    context = _tvm.tune_context(mod, TARGET, program_space(mod), Ranking(ProgramModel(), 4), "program", 1, 1, None)
    spaces = list(context.generate_design_space())
    return mod, ms.space_generator.ScheduleFn(lambda _: spaces, sch_rules=[], postprocs=[], mutator_probs={})


@pytest.fixture(scope="module")
def block():
    return with_spaces(workload())


@pytest.fixture(scope="module")
def candidates(block):
    return proposals(*block)


@pytest.fixture(scope="module")
def on_two_axes():
    return with_spaces(workload(mesh=TWO_AXES))


@pytest.fixture(scope="module")
def two_axes_candidates(on_two_axes):
    return proposals(*on_two_axes)


def search_on(clock, block, work_dir, trials=1000):
    mod, space = block
    model = ProgramModel()
    tools = Tools(clock, model, lambda *_: space, lambda: Ranking(model, 4), opening=0)
    (result,) = Job([Workload("program", mod)], tools, TARGET, work_dir, trials, seed=0).run(progress=False)
    return result


@pytest.mark.parametrize("seed", range(4))
def test_the_search_finds_what_measuring_all_finds(tmp_path, block, candidates, seed):
    """On several made-up machines, with a fraction of the measurements."""
    clock = Clock(seed)
    best = min(clock.seconds(candidate.sch.mod) for candidate in candidates)
    result = search_on(clock, block, tmp_path)
    assert result.best_ms == pytest.approx(best * 1e3, rel=1e-9)
    assert result.trials == len(clock.measured) == len(set(clock.measured))
    assert result.trials < 0.6 * len(candidates)


@pytest.mark.parametrize(("seed", "rate", "axes"), [(0, 1e12, 1), (1, 1e7, 2), (2, 3e6, 2)])
def test_the_search_finds_what_measuring_all_finds_on_two_axes(
    tmp_path, on_two_axes, two_axes_candidates, seed, rate, axes
):
    """Where arithmetic is nothing, and one axis is best left out; and where it is much."""
    clock = Clock(seed, rate)
    best = min(two_axes_candidates, key=lambda candidate: clock.seconds(candidate.sch.mod)).sch.mod
    result = search_on(clock, on_two_axes, tmp_path)
    assert result.best_ms == pytest.approx(clock.seconds(best) * 1e3, rel=1e-9)
    assert result.trials < 0.5 * len(two_axes_candidates)
    assert len(assignment(best["main"])) == axes


def assignment(func):
    """The loop of the matmul that each axis shares."""
    products = [b for b in parse_program(func, TWO_AXES).blocks() if is_product(b.realize.block)]
    (shared,) = [{axis: loop.loop_var.name[0] for axis, loop in block.device.items()} for block in products]
    return shared


def test_each_axis_may_share_any_loop_or_none(two_axes_candidates):
    found = [assignment(way.mod["main"]) for way in sharings(BLOCK, TWO_AXES)]
    pairs = set(product(["i", "j", "k", ""], repeat=2)) - {("", ""), ("i", "i"), ("j", "j")}
    assert sorted((way.get("dp", ""), way.get("tp", "")) for way in found) == sorted(pairs)
    assert found[0] == {"tp": "k"}, "what is meant if nobody says"
    searched = [assignment(candidate.sch.mod["main"]) for candidate in two_axes_candidates]
    assert all(way in searched for way in found if set(way.values()) != {"k"} or len(way) == 1)
    assert len(searched) < 250


def test_schedules_on_two_axes_are_right(two_axes_candidates):
    x, w, bias, residual = arrays()
    wide = np.maximum(x.astype("float64") @ w + bias, 0) + residual
    ways = [way.mod["main"] for way in sharings(BLOCK, TWO_AXES)]
    with axe.launch(TWO_AXES, engine="threads") as workers:
        for scheduled in [*ways, *(candidate.sch.mod["main"] for candidate in two_axes_candidates[::16])]:
            exe = axe.compile(scheduled, TWO_AXES, work_dir=None)
            out = exe.run(workers, x, w, bias, residual)
            np.testing.assert_allclose(out, wide, rtol=1e-5, atol=1e-5, err_msg=exe.notation)


def test_what_is_bound_stays_and_other_axes_may_share_the_rest():
    sch = axe.Schedule(BLOCK, mesh=TWO_AXES)
    mm = sch.get_sblock("mm")
    sch.shard(sch.get_loops(mm)[0], "dp")
    sch.cache_write(mm, 0, "global")
    ways = [assignment(way.mod["main"]) for way in sharings(sch.mod["main"], TWO_AXES)]
    assert ways == [{"dp": "i"}, {"dp": "i", "tp": "k"}, {"dp": "i", "tp": "j"}]
    found = proposals(workload(sch.mod["main"], TWO_AXES))
    searched = [assignment(candidate.sch.mod["main"]) for candidate in found]
    assert all(way in searched for way in ways) and all(way in ways for way in searched)


def test_sums_over_devices_go_on_any_axis():
    """Two terms, and two devices on either axis."""
    ways = [lower(way.mod["main"], TWO_AXES) for way in sharings(PROGRAMS["sgd"](Mesh({"dp": 2})).func, TWO_AXES)]
    assert [[stage.axis for stage in way.stages if stage.axis] for way in ways] == [["dp"], ["tp"]]


def test_a_job_goes_on_where_it_was_interrupted(tmp_path, block):
    first, second, through = Clock(0), Clock(0), Clock(0)
    search_on(first, block, tmp_path / "parts", trials=6)
    parts = search_on(second, block, tmp_path / "parts")
    whole = search_on(through, block, tmp_path / "whole")
    assert len(first.measured) == 6
    assert not set(first.measured) & set(second.measured)
    assert parts.best_ms == whole.best_ms
    assert search_on(Clock(0), block, tmp_path / "parts").trials == parts.trials


def test_the_space_has_each_choice(candidates):
    lowered = [lower(candidate.sch.mod["main"], TP) for candidate in candidates]
    notations = {low.notation for low in lowered}
    by_sums = {"MM-AR-C", "MM-RS-C-AG", "MM-fuse(RS-C-AG)", "ol(MM, fuse(RS-C-AG))"}
    by_rows_or_columns = {"MM-AG-C", "MM-C-AG", "MM-fuse(C-AG)"}
    assert by_sums | by_rows_or_columns <= notations
    assert len({structure(candidate.sch) for candidate in candidates}) == len(candidates)
    chunks = {stage.chunks for low in lowered for stage in low.stages}
    assert chunks == {1, 2, 4}, "of 12 rows a device has 6, of 8 columns 4: 2 chunks divide both, 4 the columns, 8 none"


def test_any_metaschedule_replays_the_traces(block, candidates):
    mod, _ = block
    for candidate in candidates[::7]:
        stock = s_tir.Schedule(mod)
        s_tir.schedule.Trace.apply_json_to_schedule(candidate.sch.trace.as_json(), stock)
        tvm.ir.assert_structural_equal(stock.mod, candidate.sch.mod)


def test_upstreams_search_runs_on_the_space(block):
    """Evolutionary search with the space's own validity check and mutator: what it proposes can be lowered."""
    mod, _ = block
    context = _tvm.tune_context(mod, TARGET, program_space(mod), evolution(), "program", 1, 1, None)
    database = ms.database.MemoryDatabase()
    database.commit_workload(mod)
    context.pre_tuning(4, 4, context.generate_design_space(), database, ProgramModel())
    proposed = context.generate_measure_candidates()
    assert len(proposed) == 4
    for candidate in proposed:
        lower(candidate.sch.mod["main"], TP)


def test_a_layout_that_is_declared_makes_other_ways_cost_what_they_move():
    """X by columns, as the layer before leaves it: rows of the product can't be shared any more without moving X."""
    func = with_layouts(BLOCK, {"X": Layout.sharded((TOKENS, INNER), TP, {1: "tp"})})
    found = [lowered_for(c.sch.mod["main"], TP)[1] for c in proposals(workload(func))]
    as_it_lies = [low for low in found if not low.inserted]
    assert "MM-fuse(RS-C-AG)" in {low.notation for low in as_it_lies}
    assert not any(low.notation.startswith(("MM-AG", "MM-C", "fuse(MM")) for low in found)
    moving = [low for low in found if low.inserted]
    of_x = TOKENS * INNER * 4 // 2  # bytes: a device has the half and gets the other
    by_columns, by_rows = (f"gather X for mm: {of_x} bytes",), (f"recut X for mm: {of_x // 2} bytes",)
    assert {low.inserted for low in moving} == {by_columns, by_rows}
    assert {"AG-MM-AG-C", "AG-MM-C-AG"} <= {low.notation for low in moving if low.inserted == by_columns}
    assert {"A2A-MM-AG-C", "A2A-MM-C-AG"} <= {low.notation for low in moving if low.inserted == by_rows}
    for low in moving:
        moved = of_x if low.inserted == by_columns else of_x // 2
        assert features_of_program(low)["bytes"] > moved, "and the result is gathered"
    assert estimate(found[0]) < min(map(estimate, moving)), "what moves less comes first"


def test_a_schedule_stays_as_its_caller_shared_it():
    shared = next(sharings(BLOCK, TP))
    found = proposals(workload(shared.mod["main"]))
    stages = [lower(candidate.sch.mod["main"], TP).stages for candidate in found]
    assert len(found) > 10
    assert all(any(stage.name == "mm_rf" for stage in low) for low in stages)


def test_the_model_learns_what_schedules_share(block, candidates):
    mod, space = block
    model = ProgramModel()
    context = _tvm.tune_context(mod, TARGET, space, evolution(), "program", 1, 1, None)
    by_notation = {}
    for candidate in candidates:
        by_notation.setdefault(lower(candidate.sch.mod["main"], TP).notation, []).append(candidate)
    pair = next(same for same in by_notation.values() if len(same) > 1)
    (other,) = by_notation["MM-AR-C"]
    assert not model.trained
    before, doubt = model.expect([*pair, other])
    slow = [ms.runner.RunnerResult([10 * before[0]], None)]
    model.update(context, [pair[0]], slow)
    after, less = model.expect([*pair, other])
    assert after[0] == pytest.approx(10 * before[0], rel=0.2)
    news = after - before
    assert news[1] > news[2] > 0, "a schedule of the same shape is expected to be slow too, others less so"
    assert less[0] < less[1] < less[2], "the more two schedules share, the surer"
    assert less[1] / after[1] < doubt[1] / before[1]
    assert model.trained and model.has(pair[0]) and not model.has(pair[1])
    model.update(context, [pair[1]], [ms.runner.RunnerResult(None, "failed")])
    assert not model.has(pair[1])


def test_features_of_a_program(candidates):
    by_notation = {lower(c.sch.mod["main"], TP).notation: c for c in candidates}
    plain, fused, cut = (
        features_of_program(lower(by_notation[notation].sch.mod["main"], TP))
        for notation in ("MM-RS-C-AG", "MM-fuse(RS-C-AG)", "ol(MM, fuse(RS-C-AG))")
    )
    half = TOKENS * OUTER * 4 / 2
    assert plain["bytes"] == fused["bytes"] == cut["bytes"] == 2 * half
    assert (plain["collectives"], plain["mesh_kernels"], plain["waits"]) == (2, 0, 2)
    assert (fused["collectives"], fused["mesh_kernels"], fused["waits"]) == (0, 1, 1)
    assert (cut["chunks"], cut["messages"], cut["overlapping"], cut["peers"]) == (2, 2, 2, 1)
    assert fused["link_seconds"] < plain["link_seconds"]


def test_a_whole_job(tmp_path):
    """Tuned, run and compared with numpy; then found again, without measuring anything."""
    result = tune_program(BLOCK, TP, trials=3, work_dir=tmp_path, seed=0, progress=False, engine="threads")
    program, *kernels = result.tasks
    assert program.trials == 3 and program.failures == ()
    assert kernels and all(task.trials <= 3 * len(kernels) for task in kernels)
    x, w, bias, residual = arrays()
    with axe.launch(TP, engine="threads") as workers:
        exe = axe.compile(result.schedule, work_dir=tmp_path)
        out = exe.run(workers, x, w, bias, residual)
    wide = x.astype("float64") @ w + bias
    np.testing.assert_allclose(out, np.maximum(wide, 0) + residual, rtol=1e-5, atol=1e-5)
    assert exe.notation == result.notation
    assert [found.median_ms is None for found in result.schedules] == [False] * 3
    assert result.best.median_ms == program.best_ms == min(found.median_ms for found in result.schedules)
    assert result.left_out == {}
    assert result.table().count("\n") == 3
    assert "<h2>block</h2>" in result.report.read_text()

    options = {"work_dir": tmp_path, "engine": "threads"}
    again = tune_program(BLOCK, TP, trials=3, seed=1, progress=False, **options)
    assert str(again.schedule.trace) == str(result.schedule.trace)
    assert str(best_schedule(BLOCK, TP, **options).trace) == str(result.schedule.trace)
    assert best_schedule(BLOCK, TP, work_dir=tmp_path) is None, "another engine's times are others"
    assert best_schedule(BLOCK, Mesh({"tp": 3}), **options) is None

    database = ms.database.JSONDatabase(work_dir=str(program.folder))
    traces = [record.trace for record in database.get_all_tuning_records() if record.trace.insts]
    assert len({str(trace) for trace in traces}) == 3
    traces[0].apply_to_schedule(s_tir.Schedule(BLOCK), remove_postproc=False)


def arrays():
    rng = np.random.default_rng(3)
    shapes = [(TOKENS, INNER), (INNER, OUTER), (OUTER,), (TOKENS, OUTER)]
    return [rng.standard_normal(shape).astype("float32") for shape in shapes]


class NoKernels:
    """In place of `KernelTuner`: kernels stay as they are."""

    def __init__(self, work_dir):
        self.work_dir = work_dir

    def tune(self, mods):
        """Nothing."""


def test_a_fault_costs_the_schedule_that_has_it(tmp_path, candidates, block):
    mod, _ = block
    good = candidates[0].sch.mod
    other = workload(block_adding(1.0))
    target = resolve_target("llvm", threads=cores_per_device(TP))
    with MeshRunner(target, NoKernels(tmp_path), tmp_path / "mesh.log", 60.0, mod["main"]) as worker:
        assert worker.prepare(mod).failure is None
        first, second, third = worker.measure_all([good, other, good])
        assert first.seconds and third.seconds
        assert "wrong result: out" in second.failure
        pid = worker._child.pid
        os.kill(pid, signal.SIGSTOP)  # it hangs
        worker._timeout = worker._calls = 0.2
        (hung,) = worker.measure_all([good])
        assert "no result within" in hung.failure
        worker._timeout = 60.0
        (after,) = worker.measure_all([good])
        assert after.seconds and worker._child.pid != pid


def test_what_cannot_be_tuned_is_said(tmp_path):
    @T.prim_func(s_tir=True)
    def double(A: T.Buffer((8,), "float32"), B: T.Buffer((8,), "float32")):
        for i in range(8):
            with T.sblock("B"):
                vi = T.axis.spatial(8, i)
                B[vi] = A[vi] * T.float32(2)

    with pytest.raises(axe.ScheduleError, match="nothing to share over tp=2"):
        tune_program(double, TP, work_dir=tmp_path, progress=False)
    with pytest.raises(axe.LowerError, match="name the mesh"):
        tune_program(BLOCK, work_dir=tmp_path)
    with pytest.raises(axe.LowerError, match="the schedule is for the mesh tp=2, not tp=3"):
        tune_program(axe.Schedule(BLOCK, mesh=TP), Mesh({"tp": 3}), work_dir=tmp_path)
    with pytest.raises(axe.TuneError, match="trials: at least one candidate is needed, not 0"):
        tune_program(BLOCK, TP, trials=0, work_dir=tmp_path)
