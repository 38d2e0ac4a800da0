"""Which regions are pairs, what becomes of the others and why, and what their calls touch."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.layout import Layout, Mesh
from tvm_axe.lower import Lowered, lower, pairs
from tvm_axe.lower.calls import Box, Touch, Touches
from tvm_axe.lower.emit import Emitter
from tvm_axe.machines import resolve_target
from tvm_axe.programs import PROGRAMS
from tvm_axe.schedule import Schedule, with_layouts

TWO = Mesh({"tp": 2})
HOPPER = resolve_target("cuda:sm_90a")
PAGE = 2 << 20


pytestmark = pytest.mark.usefixtures("pairs_at_any_size")


def lowered(sch: Schedule, target: object = HOPPER) -> Lowered:
    return lower(sch.mod["main"], sch.mesh, PAGE, target)


def scattered(
    m: int = 256,
    n: int = 128,
    k: int = 256,
    dtype: str = "float16",
    partial: str = "float16",
    dim: int = 0,
    chunks: int = 2,
    kernel: str | None = "matmul",
    mesh: Mesh = TWO,
) -> Schedule:
    """A product whose rows, or columns, are reduced and scattered."""

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((m, k), dtype), W: T.Buffer((n, k), dtype), out: T.Buffer((m, n), partial)) -> None:
        for i, j, l in T.grid(m, n, k):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, l])
                with T.init():
                    out[vi, vj] = T.cast(0, partial)
                out[vi, vj] = out[vi, vj] + T.cast(X[vi, vk], partial) * T.cast(W[vj, vk], partial)

    sch = Schedule(with_layouts(func, {"out": Layout.sharded((m, n), mesh, {dim: "tp"})}), mesh=mesh)
    partials, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    if kernel is not None:
        sch.tile_kernel(partials, kernel)
    sch.shard(sch.get_loops(reduce)[dim], "tp")
    sch.overlap([partials, reduce], "tp", chunks)
    return sch


def gathered(m: int = 256, n: int = 128, k: int = 64, dtype: str = "float16", reads: str = "Z") -> Schedule:
    """A product of rows that are gathered, with a pointwise block in its nest."""

    @T.prim_func(s_tir=True)
    def func(
        X: T.Buffer((m, k), dtype), W: T.Buffer((n, k), dtype), Z: T.Buffer((m, n), dtype), Y: T.Buffer((m, n), dtype)
    ) -> None:
        C = T.sblock_alloc_buffer((m, n), dtype)
        for i, j, l in T.grid(m, n, k):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, l])
                with T.init():
                    C[vi, vj] = T.cast(0, dtype)
                C[vi, vj] = C[vi, vj] + X[vi, vk] * W[vj, vk]
        for i, j in T.grid(m, n):
            with T.sblock("epi"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = C[vi, vj] * Z[vi, vj]

    func = with_layouts(
        func, {"X": Layout.sharded((m, k), TWO, {0: "tp"}), "Y": Layout.sharded((m, n), TWO, {1: "tp"})}
    )
    sch = Schedule(func, mesh=TWO)
    mm, epi = sch.get_sblock("mm"), sch.get_sblock("epi")
    sch.shard(sch.get_loops(mm)[1], "tp")
    sch.shard(sch.get_loops(epi)[1], "tp")
    gather = sch.redistribute(mm, "X", "tp")
    sch.reorder(*(sch.get_loops(mm)[at] for at in (1, 0)))
    sch.reverse_compute_at(epi, sch.get_loops(mm)[1])
    sch.overlap((gather, mm), "tp", 2)
    return sch


def functions(found: Lowered) -> list[str]:
    return [call.function for call in found.calls]


def test_a_product_before_a_reduce_scatter() -> None:
    found = lowered(scattered())
    sends = ["axe.wait_count", "axe.copy", "axe.flag"] * 2
    assert functions(found) == ["mm_rf_prepare", "axe.barrier", "axe.fork", "mm_rf", *sends, "axe.join"]
    (form,) = found.forms
    assert form.startswith("mm_rf, mm: one kernel, matmul_scatter(block_m=") and form.endswith("in 2 groups of columns")
    assert [stage.kernel for stage in found.stages] == ["mm_rf", None]
    assert found.buffers["out_rf_words"].sharding.slab == (2, 2, 2)
    assert found.buffers["out_rf_arrived"].sharding.slab == (2, 128, 128)
    assert not (found.buffers["out_rf_words"].is_input or found.buffers["out_rf_words"].is_output)


def test_a_product_behind_an_all_gather_with_an_epilogue() -> None:
    found = lowered(gathered())
    assert functions(found) == [
        "mm_epi_prepare", "axe.barrier", "axe.fork", "axe.copy", "axe.flag", "mm_epi", "axe.join",
    ]  # fmt: skip
    assert "gather_matmul" in found.forms[0]
    kernel = next(call for call in found.calls if call.function == "mm_epi")
    assert [getattr(argument, "buffer", argument) for argument in kernel.arguments] == [
        "X", "W", "X_global", "X_global_words", "Y", "Z", "tp",
    ]  # fmt: skip


@pytest.mark.parametrize("chunks", [1, 2])
def test_partial_sums_of_float32(chunks: int) -> None:
    """They are sent as three numbers of bfloat16, and what they are on the way is nowhere."""
    found = lowered(scattered(dtype="bfloat16", partial="float32", chunks=chunks))
    assert found.forms[0].endswith("partial sums as 3 numbers of bfloat16")
    assert found.buffers["out_rf_pieces"].sharding.slab == (2, 3, 128, 128) and "out_rf" not in found.buffers
    (rows, *_), *others = (
        [a for a in c.arguments if isinstance(a, int)] for c in found.calls if c.function == "axe.copy"
    )
    assert rows == 3 * 128 and len(others) == chunks - 1
    assert sum(stage.bytes for stage in found.stages) == 128 * 128 * 3 * 2


def reduced(way: str, dtype: str = "float16", mesh: Mesh = TWO, m: int = 256) -> Schedule:
    """A product, its all-reduce in a way of saying it, and a stage behind it that isn't overlapped."""
    n, k = 128, 256

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((m, k), dtype), W: T.Buffer((n, k), dtype), Y: T.Buffer((m, n), dtype)) -> None:
        C = T.sblock_alloc_buffer((m, n), dtype)
        for i, j, l in T.grid(m, n, k):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, l])
                with T.init():
                    C[vi, vj] = T.cast(0, dtype)
                C[vi, vj] = C[vi, vj] + X[vi, vk] * W[vj, vk]
        for i, j in T.grid(m, n):
            with T.sblock("behind"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = T.max(C[vi, vj], T.cast(0, dtype))

    sch = Schedule(func, mesh=mesh)
    stages = [*sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")]
    if way != "whole":
        stages[1:] = sch.split_collective(stages[1])
        if way == "fused":
            sch.fuse_collective(stages[1:])
            stages = stages[:2]
    sch.overlap(stages, "tp", 2)
    return sch


@pytest.mark.parametrize(("way", "notation"), [("fused", "fuse(RS-AG)"), ("stages", "RS, AG"), ("whole", "AR")])
def test_a_product_before_an_all_reduce(way: str, notation: str) -> None:
    """However it is said, copies send partial sums to their owners and sums to all, which a barrier waits for."""
    found = lowered(reduced(way))
    assert found.notation == f"ol(MM, {notation})-C"
    assert "one kernel, matmul_scatter" in found.forms[0] and found.forms[0].endswith("are copied to all")
    scatters, gives = ["axe.wait_count", "axe.copy", "axe.flag"] * 2, ["axe.wait_count", "axe.copy"] * 2
    assert functions(found) == [
        "mm_rf_prepare", "axe.barrier", "axe.fork", "mm_rf", *scatters, *gives, "axe.join", "axe.barrier", "behind",
    ]  # fmt: skip
    assert sum(stage.bytes for stage in found.stages) == 2 * 256 * 128 * 2 // 2
    assert not any("global" in name for name in found.buffers)  # what is scattered is nowhere
    touches, stages = Touches(TWO, found.module, found.buffers), [stage.name for stage in found.stages]
    told = [(stages[call.stage], touches.of(call, 0)) for call in found.calls if call.function == "axe.copy"]
    assert {name for name, _ in told} == ({stages[1], stages[2]} if way == "stages" else {stages[1]})
    assert all({touch.device for touch in touched if touch.is_write} == {1} for _, touched in told)


def test_an_all_reduce_of_rows_that_devices_do_not_divide() -> None:
    found = lowered(reduced("whole", m=255, mesh=Mesh({"tp": 2})))
    assert "isn't divided by tp" in found.forms[0] or "do not divide" in found.forms[0], found.forms


@pytest.mark.parametrize("devices", [2, 3])
def test_an_all_reduce_in_chunks_on_cores(devices: int) -> None:
    mesh, rng = Mesh({"tp": devices}), np.random.default_rng(devices)
    rows = 252 if devices == 2 else 250  # of three devices, the last has less
    exe = axe.compile(reduced("whole", "float32", mesh, rows), work_dir=None)
    x, w = (rng.standard_normal(shape).astype("float32") for shape in ((rows, 256), (128, 256)))
    with axe.launch(mesh, engine="threads") as workers:
        found = exe.run(workers, x, w)
    wanted = np.maximum(x.astype("float64") @ w.T.astype("float64"), 0)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_group_has_whole_tiles() -> None:
    """Three chunks of five tiles of columns: two groups of two, one of one."""
    sch = scattered(n=5 * 64 - 8, chunks=4)
    waits = [call.arguments[1:4] for call in lowered(sch).calls if call.function == "axe.wait_count"]
    copies = [call.arguments[-3:-1] for call in lowered(sch).calls if call.function == "axe.copy"]
    assert [first for first, _ in copies] == sorted({first for first, _ in copies}) and copies[-1][1] == 312
    assert len(waits) == len(copies) <= 4 and all(stop == first for (_, stop), (first, _) in pairwise(copies))


@pytest.mark.parametrize(
    ("sch", "why"),
    [
        (lambda: scattered(dtype="float32", partial="float32"), "multiplies float32; valid are float16 and bfloat16"),
        (
            lambda: scattered(partial="float32"),
            "partial sums are float32, .* type, float16, which doesn't hold as large",
        ),
        (lambda: scattered(kernel="split_k_matmul"), "the kernel split_k_matmul was chosen .*; valid is matmul"),
        (lambda: scattered(m=254, chunks=1, mesh=Mesh({"tp": 4})), "equal pieces of the leading dimension"),
        (lambda: scattered(dim=1), "equal pieces of the leading dimension over the one axis"),
        (lambda: PROGRAMS["mlp"](TWO).schedule("ol(MM, fuse(RS-C-AG))"), "multiplies float32"),
        (lambda: PROGRAMS["ag_mm"](TWO).schedule("ol(AG, MM)"), "multiplies float32"),
        (lambda: PROGRAMS["norm"](TWO).schedule("ol(MM, fuse(RS-Norm-AG))"), "valid is one pointwise block behind"),
        (
            lambda: PROGRAMS["pipeline"](Mesh({"pp": 2, "tp": 2})).schedule("ol(RS, fuse(P2P-C), AG)"),
            "not a product before a sum over devices, or behind an all-gather",
        ),
    ],
)
def test_others_stay_in_chunks(sch, why) -> None:
    made = sch()
    found, chunked = lowered(made), lowered(made, None)
    (form,) = found.forms
    assert f" in {found.stages[-1].chunks} chunks: " in form
    assert re.search(why, form), form
    assert found.calls == chunked.calls and chunked.forms == ()


def test_other_targets_have_chunks() -> None:
    for name in ("llvm", "cuda:sm_80"):
        assert lowered(scattered(), resolve_target(name)).forms == ()
    assert "axe.arrive" in functions(lowered(scattered(), None))


def test_without_a_choice_the_default_is_a_pair() -> None:
    assert "one kernel" in lowered(scattered(kernel=None)).forms[0]


def test_pairs_on_one_axis_of_two() -> None:
    mesh = Mesh({"dp": 2, "tp": 2})
    found = lowered(scattered(mesh=mesh))
    assert "one kernel" in found.forms[0]
    assert found.buffers["out_rf_arrived"].sharding.slab == (2, 128, 128)
    touches = Touches(mesh, found.module, found.buffers)
    copy = next(call for call in found.calls if call.function == "axe.copy")
    assert {touch.device for touch in touches.of(copy, 2) if touch.is_write} == {3}


def test_what_calls_touch() -> None:
    found = lowered(gathered())
    touches = Touches(TWO, found.module, found.buffers)
    by_name = {call.function: touches.of(call, 1) for call in found.calls}
    rows = Box((128, 64), (0, 0), (128, 64))
    assert by_name["axe.copy"] == {
        Touch("X", 1, rows, False),
        Touch("X_global", 0, Box((256, 64), (128, 0), (256, 64)), True),
    }
    assert {(touch.buffer, touch.is_write) for touch in by_name["mm_epi"]} == {
        ("X", False), ("W", False), ("X_global", False), ("X_global_words", False), ("Z", False), ("Y", True),
    }  # fmt: skip
    assert all(touch.device == 1 for touch in by_name["mm_epi"])
    assert not by_name["axe.join"] and not by_name["axe.fork"] and not by_name["axe.flag"]


# ---- Which are none although they could be ----------------------------------------------------------------------


@pytest.fixture
def by_size(pairs_at_any_size: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is by default: a product of few tiles and its collective are one behind the other."""
    monkeypatch.setattr(pairs, "WAVES", 1)


@pytest.mark.usefixtures("by_size")
def test_a_product_of_few_tiles_is_before_its_collective() -> None:
    found = lowered(scattered(m=512, n=256))
    assert functions(found) == ["mm_rf", "axe.barrier", "axe.reduce_scatter"] and found.notation == "MM-RS"
    (form,) = found.forms
    assert re.fullmatch(r"mm_rf, mm: one behind the other: the product's \d+ tiles run at once, so that .*", form)
    assert found.stages[-1].bytes == 512 * 256 // 2 * 2 and not any("words" in name for name in found.buffers)


@pytest.mark.usefixtures("by_size")
@pytest.mark.parametrize(("way", "names"), [("fused", ["all_reduce"]), ("whole", ["all_reduce"]), ("stages", [])])
def test_so_is_one_before_an_all_reduce(way: str, names: list[str]) -> None:
    found = lowered(reduced(way))
    names = names or ["reduce_scatter", "all_gather"]
    assert functions(found) == ["mm_rf", "axe.barrier", *(f"axe.{name}" for name in names), "axe.barrier", "behind"]
    assert sum(stage.bytes for stage in found.stages) == 2 * 256 * 128 * 2 // 2
    if way != "stages":
        (stage,) = (stage for stage in found.stages if stage.kind == "all-reduce")
        assert stage.memory == 3 * 256 * 128 * 2 - 256 * 128 * 2 and "C" in found.buffers


@pytest.mark.usefixtures("by_size")
def test_a_gather_is_before_a_product_of_few_tiles_if_it_is_short() -> None:
    short, long = lowered(gathered()), lowered(gathered(k=pairs.LONG // 128 // 2))
    assert functions(short) == ["axe.all_gather", "axe.barrier", "mm_epi"]
    assert short.forms[0].endswith("tiles run at once, and would wait for the copies")
    assert "one kernel, gather_matmul" in long.forms[0]


@pytest.mark.usefixtures("by_size")
@pytest.mark.parametrize("made", [lambda: scattered(m=4096, n=2048), lambda: gathered(m=4096, n=4096)])
def test_a_product_of_many_tiles_is_a_pair(made) -> None:
    assert "one kernel" in lowered(made()).forms[0]


@pytest.mark.usefixtures("by_size")
def test_partial_sums_in_pieces_are_a_pair_at_any_size() -> None:
    """No collective of the engine's adds them as they are."""
    assert "one kernel" in lowered(scattered(dtype="bfloat16", partial="float32")).forms[0]


class InSequence(Emitter):
    """Takes no overlapping stages, whatever they are."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        overlaps = [group[0].stage.overlap for group in self.groups]
        self.sequential |= {overlap.region: "in sequence" for overlap in overlaps if overlap is not None}


IN_SEQUENCE = [
    ("mlp", {"tp": 3}, "ol(MM, fuse(RS-C-AG))", "MM-fuse(RS-C-AG)"),
    ("ag_mm", {"tp": 2}, "ol(AG, MM)", "AG-MM"),
    ("norm", {"tp": 2}, "ol(MM, fuse(RS-Norm-AG))", "MM-fuse(RS-C-AG)"),
    ("pipeline", {"pp": 2, "tp": 2}, "ol(RS, fuse(P2P-C), AG)", "MM-RS-fuse(P2P-C)-AG"),
]


@pytest.mark.parametrize(("name", "sizes", "schedule", "notation"), IN_SEQUENCE)
def test_stages_in_sequence_are_right(name, sizes, schedule, notation, monkeypatch) -> None:
    """On cores, where all regions that overlap are lowered as if they didn't."""
    monkeypatch.setattr("tvm_axe.lower.lowered.Emitter", InSequence)
    mesh, rng = Mesh(sizes), np.random.default_rng()
    program = PROGRAMS[name](mesh)
    exe = axe.compile(program.schedule(schedule), work_dir=None, keep=False)
    assert exe.notation == notation and exe.lowered.forms == ("in sequence",)
    with axe.launch(mesh, engine="threads") as workers:
        for _ in range(3):
            arrays = program.inputs(rng)
            found = exe.run(workers, *arrays)
            found = found if isinstance(found, tuple) else (found,)
            assert program.error(found, program.reference(*arrays)) < program.tolerance


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize(("way", "notation"), [("fused", "MM-AR-C"), ("whole", "MM-AR-C"), ("stages", "MM-RS-AG-C")])
def test_an_all_reduce_in_sequence_is_right(way: str, notation: str, devices: int, monkeypatch) -> None:
    monkeypatch.setattr("tvm_axe.lower.lowered.Emitter", InSequence)
    mesh, rng = Mesh({"tp": devices}), np.random.default_rng()
    rows = 252 if devices == 2 or way != "whole" else 250  # of three devices, the last has less
    exe = axe.compile(reduced(way, "float32", mesh, rows), work_dir=None, keep=False)
    assert exe.notation == notation
    x, w = (rng.standard_normal(shape).astype("float32") for shape in ((rows, 256), (128, 256)))
    with axe.launch(mesh, engine="threads") as workers:
        found = exe.run(workers, x, w)
    wanted = np.maximum(x.astype("float64") @ w.T.astype("float64"), 0)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_saved_pair_is_the_same(tmp_path) -> None:
    exe = axe.compile(scattered(), target="cuda:sm_90a", work_dir=None)
    exe.save(tmp_path / "pair.axe")
    again = axe.Executable.load(tmp_path / "pair.axe")
    assert again.lowered.calls == exe.lowered.calls and again.lowered.forms == exe.lowered.forms
    assert again.lowered.page == exe.lowered.page == PAGE and again.show() == exe.show()


def batched(gathers: bool, batch: tuple[int, ...]) -> Schedule:
    """A product of rows that have more dimensions, of extent 1 in front, or more of them behind."""
    rows, n, k, dtype = (*batch, 128), 96, 64, "float16"
    dim = next(at for at, extent in enumerate(rows) if extent > 1)

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((*rows, k), dtype), W: T.Buffer((k, n), dtype), out: T.Buffer((*rows, n), dtype)) -> None:
        for b, i, l, j in T.grid(*rows, k, n):
            with T.sblock("mm"):
                vb, vi, vk, vj = T.axis.remap("SSRS", [b, i, l, j])
                with T.init():
                    out[vb, vi, vj] = T.cast(0, dtype)
                out[vb, vi, vj] = out[vb, vi, vj] + X[vb, vi, vk] * W[vk, vj]

    layouts = {"out": Layout.sharded((*rows, n), TWO, {2 if gathers else dim: "tp"})}
    if gathers:
        layouts["X"] = Layout.sharded((*rows, k), TWO, {dim: "tp"})
    sch = Schedule(with_layouts(func, layouts), mesh=TWO)
    mm = sch.get_sblock("mm")
    if gathers:
        sch.shard(sch.get_loops(mm)[3], "tp")
        sch.overlap((sch.redistribute(mm, "X", "tp"), mm), "tp", 2)
        return sch
    partials, reduce = sch.shard(sch.get_loops(mm)[2], "tp")
    sch.shard(sch.get_loops(reduce)[dim], "tp")
    sch.overlap([partials, reduce], "tp", 2)
    return sch


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("batch", [(1,), (4,)])
def test_rows_of_more_dimensions(gathers: bool, batch: tuple[int, ...]) -> None:
    """Copies move as much as of rows of one dimension, and slabs that are seen as matrices are the same."""
    found = lowered(batched(gathers, batch))
    assert "one kernel" in found.forms[0], found.forms
    (rows, slot, shift, first, stop), *_ = (
        [argument for argument in call.arguments if isinstance(argument, int)]
        for call in found.calls
        if call.function == "axe.copy"
    )
    assert (rows, shift, first) == (64 * batch[0], 1, 0) and slot == (0 if gathers else 1) and stop <= 96
    touches = Touches(TWO, found.module, found.buffers)
    for call in found.calls:
        if call.function == "axe.copy":
            assert {touch.box.stop[0] - touch.box.start[0] for touch in touches.of(call, 0)} == {rows}


def test_a_leading_extent_of_1_takes_tile_kernels() -> None:
    """Lowering puts 0 in the place of such an iterator, and a product and its epilogue are what they were."""
    m, n, k = 12, 24, 40

    @T.prim_func(s_tir=True)
    def func(
        X: T.Buffer((1, m, k), "float32"),
        W: T.Buffer((k, n), "float32"),
        bias: T.Buffer((n,), "float32"),
        out: T.Buffer((1, m, n), "float32"),
    ) -> None:
        C = T.sblock_alloc_buffer((1, m, n), "float32")
        for b, i, l, j in T.grid(1, m, k, n):
            with T.sblock("mm"):
                vb, vi, vk, vj = T.axis.remap("SSRS", [b, i, l, j])
                with T.init():
                    C[vb, vi, vj] = T.float32(0)
                C[vb, vi, vj] = C[vb, vi, vj] + X[vb, vi, vk] * W[vk, vj]
        for b, i, j in T.grid(1, m, n):
            with T.sblock("epi"):
                vb, vi, vj = T.axis.remap("SSS", [b, i, j])
                out[vb, vi, vj] = T.max(C[vb, vi, vj] + bias[vj], T.float32(0))

    shared = {"out": Layout.sharded((1, m, n), TWO, {1: "tp"})}
    sch = Schedule(with_layouts(func, shared), mesh=TWO)
    mm, epi = sch.get_sblock("mm"), sch.get_sblock("epi")
    sch.shard(sch.get_loops(mm)[1], "tp")
    sch.shard(sch.get_loops(epi)[1], "tp")
    sch.tile_kernel(mm, "matmul", epilogue=epi)
    exe = axe.compile(sch, work_dir=None)
    rng = np.random.default_rng(0)
    x, w, bias = (rng.standard_normal(shape).astype("float32") for shape in ((1, m, k), (k, n), (n,)))
    with axe.launch(TWO, engine="threads") as workers:
        found = exe.run(workers, x, w, bias)
    wanted = np.maximum(x.astype("float64") @ w.astype("float64") + bias, 0)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    assert "axe.tile" in exe.module.script() and "axe.tile" not in exe.runnable.script()
