"""axe.check: right schedules are right, and of a wrong one it names the element, the stage and the primitive."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import IRModule
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe import _tvm
from tvm_axe.checking import oracle
from tvm_axe.checking.tracing import up_to
from tvm_axe.executable import base
from tvm_axe.executable.mesh import MeshExecutable
from tvm_axe.layout import Mesh
from tvm_axe.programs import PROGRAMS

PAIR = Mesh({"x": 2})


@T.prim_func(s_tir=True)
def center(A: T.Buffer((8, 6), "float32"), Y: T.Buffer((8, 6), "float32")):
    """Twice A less the mean of its columns."""
    C = T.sblock_alloc_buffer((8, 6))
    s = T.sblock_alloc_buffer((6,))
    for i, j in T.grid(8, 6):
        with T.sblock("c"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = A[vi, vj] * T.float32(2)
    for j, i in T.grid(6, 8):
        with T.sblock("s"):
            vj, vi = T.axis.remap("SR", [j, i])
            with T.init():
                s[vj] = T.float32(0)
            s[vj] = s[vj] + C[vi, vj]
    for i, j in T.grid(8, 6):
        with T.sblock("y"):
            vi, vj = T.axis.remap("SS", [i, j])
            Y[vi, vj] = C[vi, vj] - s[vj] * T.float32(0.125)


def product(dtype: str, out: str, depth: int = 8) -> tirx.PrimFunc:
    zero = tirx.const(0, out)

    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((6, depth), dtype), B: T.Buffer((depth, 4), dtype), C: T.Buffer((6, 4), out)):
        for i, j, k in T.grid(6, 4, depth):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi, vj] = zero
                C[vi, vj] = C[vi, vj] + T.Cast(out, A[vi, vk]) * T.Cast(out, B[vk, vj])

    return func


@T.prim_func(s_tir=True)
def scale(X: T.Buffer((8, 6), "float32"), Y: T.Buffer((8, 6), "float32")):
    """X is doubled where it lies, and Y is three of that."""
    for i, j in T.grid(8, 6):
        with T.sblock("double"):
            vi, vj = T.axis.remap("SS", [i, j])
            X[vi, vj] = X[vi, vj] * T.float32(2)
    for i, j in T.grid(8, 6):
        with T.sblock("three"):
            vi, vj = T.axis.remap("SS", [i, j])
            Y[vi, vj] = X[vi, vj] * T.float32(3)


def reduced(func: tirx.PrimFunc, mesh: Mesh = PAIR) -> axe.Schedule:
    """A product whose terms are shared, reduce-scattered and gathered."""
    sch = axe.Schedule(func, mesh=mesh)
    _, reduce = sch.shard(sch.get_loops("mm")[2], "x")
    sch.split_collective(reduce)
    return sch


def wrong(program, **options) -> oracle.CheckReport:
    with pytest.raises(axe.CheckError) as caught:
        axe.check(program, work_dir=None, **options)
    report = caught.value.report
    assert not report.ok and str(report) == str(caught.value)
    return report


# ---- Right ones --------------------------------------------------------------------------------------------------

CASES = [("sgd", "fuse(RS-C-AG)"), ("mlp", "ol(MM, fuse(RS-C-AG))"), ("norm", "MM-RS-Norm-AG"), ("ag_mm", "ol(AG, MM)")]


@pytest.mark.parametrize(("name", "schedule"), [*CASES, ("moe", "A2A-MM-A2A")])
def test_schedules_of_programs_are_right(launched, name, schedule):
    factory = PROGRAMS[name]
    program = factory(Mesh(dict.fromkeys(factory.axes, 3)), "uneven" if name != "moe" else "test")
    workers = launched(program.mesh)
    report = axe.check(program.schedule(schedule), engine=workers, seeds=1, work_dir=None)
    assert report.ok and report.ran == ("one device, its annotations ignored", f"the mesh {program.mesh}")
    assert report.rounds == 2 and not workers.closed
    assert 0 < max(report.errors.values()) < 1e-6
    assert f"right on {report.ran[0]} and on the mesh" in str(report)


def test_copies_of_other_devices_are_judged(launched, monkeypatch):
    """A run returns what the first device holds of a result that all hold; the others' copies are results too."""
    plain = MeshExecutable._run

    def one_copy_spoilt(exe, workers, arrays):
        found = plain(exe, workers, arrays)
        exe._loaded[workers].tensors["C"].slab(1)[2, 3] += 1
        return found

    monkeypatch.setattr(MeshExecutable, "_run", one_copy_spoilt)
    report = wrong(reduced(product("float32", "float32")), engine=launched(PAIR), seeds=1)
    assert report.mismatch.output == "C" and report.mismatch.index == (2, 3)
    assert report.mismatch.data.endswith("in the copy of device 1") and "other devices hold is right" in str(report)


def test_processes():
    report = axe.check(reduced(product("float32", "float32")), engine="processes", seeds=1, work_dir=None)
    assert report.ok and report.exact == 50 and report.errors["C"] < 1e-6


@pytest.mark.parametrize(
    ("dtype", "out", "magnitude"),
    [
        ("float16", "float32", 50),
        ("float16", "float16", 9),
        ("bfloat16", "float32", 50),
        ("bfloat16", "bfloat16", 5),
        ("int8", "int32", 50),
        ("uint8", "int32", 50),
        ("int32", "int32", 50),
        ("float64", "float64", 50),
    ],
)
def test_types(launched, dtype, out, magnitude):
    report = axe.check(reduced(product(dtype, out)), engine=launched(PAIR), seeds=1, work_dir=None)
    assert report.ok and report.exact == magnitude
    assert report.allowed["C"] < 0.1, "what rounding explains is a part of the result"


def test_what_is_in_and_out_is_passed_and_compared(launched):
    sch = axe.Schedule(scale, mesh=PAIR)
    report = axe.check(sch, engine=launched(PAIR), seeds=1, work_dir=None)
    assert report.ok and set(report.errors) == {"X", "Y"}


def test_on_one_device_a_function_is_its_own_reference():
    sch = s_tir.Schedule(product("float32", "float32"))
    sch.reorder(*reversed(sch.get_loops("mm")))
    for program in (sch, sch.mod, sch.mod["main"], axe.compile(sch, work_dir=None)):
        report = axe.check(program, origin=product("float32", "float32"), seeds=1, work_dir=None)
        assert report.ok and report.ran == ("one device",)


def test_executables_know_what_they_were_made_of(launched, tmp_path):
    sch = reduced(product("float32", "float32"))
    exe = axe.compile(sch, work_dir=None)
    assert axe.check(exe, engine=launched(PAIR), seeds=1).ok
    sch.vectorize(sch.get_loops("mm")[-1])
    assert "vectorized" not in str(exe.source.mod), "it is as it was when it was compiled"
    exe.save(tmp_path / "exe")
    loaded = axe.Executable.load(tmp_path / "exe")
    with pytest.raises(axe.InputError, match=r"name the function: check\(exe, origin=function\)"):
        axe.check(loaded)
    report = axe.check(loaded, origin=sch.origin, engine=launched(PAIR), seeds=1)
    assert report.ok and report.ran == ("the mesh x=2",)


# ---- Wrong ones --------------------------------------------------------------------------------------------------


def within_its_sum() -> axe.Schedule:
    """What reads a sum is moved into the loop over which that is summed, which upstream allows."""
    sch = axe.Schedule(center, mesh=PAIR)
    sch.reverse_compute_at("s", sch.get_loops("c")[0])
    sch.reverse_compute_at("y", sch.get_loops("c")[0])
    sch.split(sch.get_loops("c")[0], [2, 4])
    return sch


def test_what_is_wrong_under_stock_tvm_is_said_to_be(launched):
    report = wrong(within_its_sum(), engine=launched(PAIR))
    found = report.mismatch
    assert found.where == "one device, its annotations ignored"
    assert (found.output, found.index) == ("Y", (0, 0)) and found.got != found.expected
    assert found.stage == "block 'y', which computes Y; C, s before it are right"
    assert found.blame.startswith(
        'already wrong under stock TVM after `reverse_compute_at(block="y", loop=loop 0 of "c"'
    )
    assert f"Y[0, 0] is {found.got}, and should be {found.expected}" in str(report)


def test_the_first_wrong_element_is_of_the_first_wrong_array(monkeypatch):
    """On the mesh, of a run that leaves two elements off: the first of them, exactly."""
    run = base.Executable.run

    def off(self, *arguments):
        out = run(self, *arguments)
        out[3, 1] += 1
        out[4, 0] += 1
        return out

    monkeypatch.setattr(base.Executable, "run", off)
    sch = reduced(product("float32", "float32"))
    found = wrong(sch, seeds=1).mismatch
    assert (found.where, found.index, found.got) == ("the mesh x=2", (3, 1), found.expected + 1)
    assert found.data == "integers up to 50, seed 0" and "differs in 2 of 24 elements" in found.why


def test_a_wrong_lowering_is_blamed_on_the_first_primitive_that_meets_it(launched, monkeypatch):
    """A gather that leaves each device's share in the place of the next one's."""
    right = MeshExecutable._run

    def shifted(self, workers, arrays):
        right(self, workers, arrays)
        loaded = self._loaded[workers]
        if any(stage.kind == "all-gather" for stage in self.stages):
            slabs = [loaded.tensors["C"].slab(device) for device in range(2)]
            for slab in slabs:
                slab[...] = np.roll(slab, 3, axis=0)
        return tuple(loaded.gather(buffer) for buffer in self.lowered.outputs)

    monkeypatch.setattr(MeshExecutable, "_run", shifted)
    sch = reduced(product("float32", "float32"))
    found = wrong(sch, engine=launched(PAIR), seeds=1).mismatch
    assert found.where == "the mesh x=2" and found.output == "C"
    assert "(all-gather over x), which leaves C" in found.stage
    assert found.blame.startswith("wrong on the mesh after `split_collective(...)`: `")


def test_what_is_left_of_another_run_shows(launched, monkeypatch):
    """A stage that reads what the run before left is right only if nothing ran before."""
    held = {}
    run = MeshExecutable._run

    def late(self, workers, arrays):
        before, held["last"] = held.get("last"), run(self, workers, arrays)
        return held["last"] if before is None else before

    monkeypatch.setattr(MeshExecutable, "_run", late)
    found = wrong(reduced(product("float32", "float32")), engine=launched(PAIR), seeds=1).mismatch
    assert np.isnan(found.got)


def test_a_parameter_written_in_part_is_compared_whole():
    """What isn't given to the program isn't given to the reference either, and stays poison there."""

    @T.prim_func(s_tir=True)
    def half(A: T.Buffer((8,), "float32"), Y: T.Buffer((8,), "float32")):
        for i in range(4):
            with T.sblock("y"):
                vi = T.axis.spatial(4, i)
                Y[vi + 4] = A[vi]

    given = {"A": np.arange(8, dtype="float32")}
    expected = oracle.Reference(half)(given)
    poisoned = np.full(8, np.nan, "float32")
    poisoned[4:] = np.arange(4)
    assert expected.fault("Y", poisoned, exactly=True) == ""
    zeros = np.nan_to_num(poisoned)
    assert "differs in 4 of 8" in expected.fault("Y", zeros, exactly=True)
    assert "inf or NaN" in expected.fault("Y", zeros)


def test_an_array_that_should_have_been_passed(launched, monkeypatch):
    """A parameter that is written in part is in and out; taken for an output alone, its other rows aren't right."""

    @T.prim_func(s_tir=True)
    def half(A: T.Buffer((4,), "float32"), Y: T.Buffer((8,), "float32")):
        for i in range(4):
            with T.sblock("y"):
                vi = T.axis.spatial(4, i)
                Y[vi + 4] = A[vi]

    monkeypatch.setattr(MeshExecutable, "_inputs", lambda self: [base.Input("A", (4,), "float32")])
    monkeypatch.setattr(MeshExecutable, "_run", lambda self, workers, arrays: (np.append(np.zeros(4, "f"), arrays[0]),))
    monkeypatch.setattr(MeshExecutable, "held", lambda self, workers: {})
    found = wrong(half, mesh=PAIR, engine=launched(PAIR), seeds=1).mismatch
    assert found.index == (0,) and "leaves that element as it was" in found.why


def test_a_mistake_within_rounding_of_floats_shows_in_integers(launched, monkeypatch):
    run = base.Executable.run

    def off(self, *arguments):
        out = run(self, *arguments)
        return out * np.float32(1 + 3e-7)

    monkeypatch.setattr(base.Executable, "run", off)
    found = wrong(reduced(product("float32", "float32")), engine=launched(PAIR), seeds=1).mismatch
    assert "nothing rounds" in found.why


def test_a_function_without_a_trace(launched, monkeypatch):
    monkeypatch.setattr(MeshExecutable, "_run", lambda self, workers, arrays: (np.zeros((6, 4), "float32"),))
    monkeypatch.setattr(MeshExecutable, "held", lambda self, workers: {})
    report = wrong(product("float32", "float32"), mesh=PAIR, engine=launched(PAIR), seeds=1)
    assert report.mismatch.blame == "not known, as there is no trace of an axe.Schedule"
    assert report.mismatch.stage == "block 'mm', which computes C"


def test_an_origin_that_is_another_function(launched):
    sch = reduced(product("float32", "float32"))

    @T.prim_func(s_tir=True)
    def other(A: T.Buffer((6, 8), "float32"), B: T.Buffer((8, 4), "float32"), C: T.Buffer((6, 4), "float32")):
        for i, j in T.grid(6, 4):
            with T.sblock("mm"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = A[vi, vj] + B[vj, vj]

    found = wrong(sch, origin=other, engine=launched(PAIR), seeds=1).mismatch
    assert found.blame.startswith("none of its instructions")


# ---- Refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        (center, {"seeds": 0}, "seeds must be at least 1, not 0"),
        ("center", {}, "a schedule, an executable, a function or a module of one is checked, not a str"),
        (
            center,
            {"origin": scale},
            "origin must have the parameters of center, of the same shapes and types; A is not among X, Y",
        ),
        (center, {"origin": IRModule({"f": center, "g": center})}, "the module has 2"),
    ],
)
def test_refusals(program, options, message):
    with pytest.raises(axe.InputError, match=message):
        axe.check(program, work_dir=None, **options)


def test_a_mesh_that_an_executable_was_not_compiled_for():
    exe = axe.compile(center, PAIR, work_dir=None)
    with pytest.raises(axe.InputError, match="was compiled for x=2, not x=3; leave mesh out"):
        axe.check(exe, Mesh({"x": 3}))


def test_what_is_refused_is_not_wrong():
    sch = axe.Schedule(center, mesh=PAIR)
    sch.annotate(sch.get_loops("y")[0], "axe.bind", "another")
    with pytest.raises(axe.LowerError, match="is bound to 'another', which the mesh"):
        axe.check(sch, work_dir=None)


# ---- Parts -------------------------------------------------------------------------------------------------------


def test_primitives_are_known_by_their_instructions():
    sch = reduced(product("float32", "float32"))
    assert [each.name for each in sch.applied] == ["shard", "split_collective"]
    shard, split = sch.applied
    assert shard.first < shard.end <= split.first < split.end == len(sch.trace.insts)
    assert sch.copy().applied == sch.applied
    assert _tvm.structural_equal(IRModule({"main": up_to(sch, len(sch.trace.insts))}), sch.mod)
    assert _tvm.structural_equal(IRModule({"main": up_to(sch, 0)}), sch.origin)


# ---- What lies beyond a device's share ---------------------------------------------------------------------------


def test_padding_that_is_read_shows():
    """A device with three terms of a sum that goes on to a fourth: beyond its share lie zeros, if nobody sees to it."""

    @T.prim_func(s_tir=True)
    def rows(X: T.Buffer((7, 4), "float32"), s: T.Buffer((4,), "float32")):
        for j, i in T.grid(4, 7):
            with T.sblock("s"):
                vj, vi = T.axis.remap("SR", [j, i])
                with T.init():
                    s[vj] = T.float32(0)
                s[vj] = s[vj] + X[vi, vj]

    sch = axe.Schedule(rows, mesh=PAIR)
    sch.shard(sch.get_loops("s")[1], "x")
    exe = axe.compile(sch, work_dir=None)
    assert axe.check(exe, seeds=1).ok

    def unmasked(realize: s_tir.SBlockRealize) -> s_tir.SBlockRealize:
        return s_tir.SBlockRealize(realize.iter_values, tirx.IntImm("bool", 1), realize.block)

    functions = {
        var: tvm_ffi.structural_map(func, (s_tir.SBlockRealize, unmasked)) if isinstance(func, tirx.PrimFunc) else func
        for var, func in exe.runnable.functions.items()
    }
    exe.runnable = IRModule(functions)
    with axe.launch(PAIR, engine="threads") as workers:
        given = np.arange(28, dtype="float32").reshape(7, 4)
        np.testing.assert_array_equal(exe.run(workers, given), given.sum(axis=0))  # by chance
        report = wrong(exe, engine=workers, seeds=1)
    assert report.mismatch.where == f"the mesh {PAIR}" and np.isnan(report.mismatch.got)
