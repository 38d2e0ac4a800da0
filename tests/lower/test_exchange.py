"""Layouts that run: tensors from one layout to another, and parameters declared in any."""

import random
from pathlib import Path

import numpy as np
import pytest
from small import product
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.errors import InputError, LayoutError, LowerError
from tvm_axe.layout import Layout, Mesh, plan_redistribution
from tvm_axe.layout import holding as holdings

SCRIPTS = Path(__file__).parents[2] / "scripts"
X2Y3 = Mesh({"x": 2, "y": 3})


@pytest.fixture(scope="module")
def fuzz():
    import fuzz_layouts

    yield fuzz_layouts


@pytest.mark.parametrize(
    ("text", "engine", "count"),
    [(text, "threads", 25) for text in ("tp=2", "tp=3", "tp=4", "x=2,y=2", "x=2,y=3")] + [("x=2,y=3", "processes", 10)],
)
def test_layouts_drawn_at_random(fuzz, launched, text, engine, count):
    """Values as numpy has them, copies alike, the source as it was, and the bytes those of the plan."""
    mesh = Mesh.parse(text)
    workers = launched(mesh, engine)
    for seed in range(count):
        pair = fuzz.draw_pair(random.Random(seed), mesh)
        assert fuzz.check(pair, workers, np.random.default_rng(seed)) is None, f"seed {seed}: {pair}"


def test_the_check_of_drawn_layouts_can_fail(fuzz, monkeypatch):
    """A holding that takes a cyclic layout for blocks is found out, by values or by bytes."""
    whole = holdings._number

    def wrong(digit, digits, index):
        return whole(digit, digits, index + (digit.radix == 2))

    monkeypatch.setattr(holdings, "_number", wrong)
    mesh = Mesh({"tp": 3})
    with axe.launch(mesh, engine="threads") as workers:  # new ones, which have no kernels yet
        found = [
            fuzz.check(fuzz.draw_pair(random.Random(seed), mesh), workers, np.random.default_rng(seed))
            for seed in range(40)
        ]
    assert any(found)


# ---- What axe.redistribute says ----------------------------------------------------------------------------------


def test_a_tensor_goes_round(launched):
    """Blocks, cyclic blocks over two axes, a device alone, and back."""
    array = np.arange(19 * 6, dtype="float32").reshape(19, 6)
    texts = [
        "S[(2, 3, 4, 6) : (1@x, 1@y, 6, 1)]",  # two axes on a dimension that they don't divide
        "S[(4, 3, 2, 6) : (12, 1@y, 6, 1)] + R[2 : 1@x]",
        "S[(19, 6) : (1, 19)] + 1@x + 2@y",
        "S[(19, 6) : (6, 1)] + R[(2, 3) : (1@x, 1@y)]",
    ]
    at = first = launched(X2Y3).mesh_tensor((19, 6), "float32", layout=Layout.parse(texts[0]))
    at.scatter(array)
    for text in [*texts[1:], texts[0]]:
        at = axe.redistribute(at, Layout.parse(text))
        np.testing.assert_array_equal(at.gather(), array)
        assert at.layout == Layout.parse(text) and at.whole == (19, 6)
    for device in range(6):
        np.testing.assert_array_equal(at.slab(device), first.slab(device))


def test_what_redistribute_refuses(launched):
    workers = launched(Mesh({"tp": 2}))
    slabs = workers.mesh_tensor((4,), "float32")
    with pytest.raises(InputError, match="made of slabs; give mesh_tensor the whole shape and a layout"):
        axe.redistribute(slabs, Layout.parse("S[4 : 1] + R[2 : 1@tp]"))
    rows = workers.mesh_tensor((4,), "float32", layout=Layout.parse("S[(2, 2) : (1@tp, 1)]"))
    with pytest.raises(InputError, match=r"the tensor is of shape \(4,\), not \(5,\)"):
        rows.scatter(np.zeros(5, "float32"))
    with pytest.raises(InputError, match="leave shared out"):
        workers.mesh_tensor((4,), "float32", shared=True, layout=rows.layout)
    for text, why in [
        ("S[(3, 2) : (1@tp, 1)]", "reaches from 0 to 2 on 'tp'"),
        ("S[(2, 3) : (1@tp, 1)]", r"doesn't fit shape \(4,\)"),
        ("S[(2, 2) : (1@xy, 1)]", "names mesh axis 'xy'"),
        ("S[(2, 2) : (1@tp, 1)] + R[2 : 2]", "replicas in linear memory"),
        ("S[(2, 2) : (1, 1)]", "puts two elements at one address"),
        ("S[4 : -1]", "reaches from -3 to 0 on 'm'"),
        ("S[(2, 2) : (1@laneid, 1)]", "on a mesh only its axes and memory hold"),
    ]:
        with pytest.raises(LayoutError, match=why):
            axe.redistribute(rows, Layout.parse(text))


def test_a_plan_of_what_is_in_no_blocks_is_one_exchange():
    mesh = Mesh({"tp": 2})
    cyclic, blocks = Layout.parse("S[(3, 2, 2) : (2, 1@tp, 1)]"), Layout.parse("S[(2, 6) : (1@tp, 1)]")
    (step,) = plan_redistribution(cyclic, blocks, mesh, "float32", (12,)).steps
    assert (step.kind, step.axes, step.bytes, step.layout) == ("exchange", ("tp",), 2 * 4, blocks)
    assert plan_redistribution(cyclic, cyclic, mesh, "float32", (12,)).steps == ()


# ---- Parameters --------------------------------------------------------------------------------------------------


matmul = product(12, 12, 8)


@T.prim_func(s_tir=True)
def step(W: T.Buffer((12, 8), "float32"), G: T.Buffer((12, 8), "float32")):
    for i, j in T.grid(12, 8):
        with T.sblock("update"):
            vi, vj = T.axis.remap("SS", [i, j])
            W[vi, vj] = W[vi, vj] - G[vi, vj]


FOREIGN = {
    "cyclic": lambda m, n: f"S[(3, 2, 2, {n}) : ({2 * n}, 1@x, {n}, 1)] + R[3 : 1@y]",
    "two axes": lambda m, n: f"S[(2, 3, 2, {n}) : (1@x, 1@y, {n}, 1)]",
    "one device": lambda m, n: f"S[({m}, {n}) : ({n}, 1)] + 1@x + 2@y",
    "the last device first": lambda m, n: f"S[(2, 6, {n}) : (-1@x, {n}, 1)] + R[3 : 1@y] + 1@x",
    "columns first on one axis": lambda m, n: f"S[({m}, 2, {n // 2}) : (1, 1@x, {m})] + R[3 : 1@y]",
}


def foreign(name: str, m: int, n: int) -> Layout:
    return Layout.parse(FOREIGN[name](m, n))


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("loop", [None, 0, 1])
def test_parameters_in_any_layout(launched, name, loop):
    layouts = {"A": foreign(name, 12, 8), "C": foreign(name, 12, 12)}
    sch = axe.Schedule(axe.with_layouts(matmul, layouts), mesh=X2Y3)
    if loop is not None:
        sch.shard(sch.get_loops("mm")[loop], "y")
    exe = axe.compile(sch, work_dir=None)
    assert {key: exe.layouts[key] for key in layouts} == layouts
    rng = np.random.default_rng(5)
    A, B = (rng.integers(-9, 10, shape).astype("float32") for shape in ((12, 8), (8, 12)))
    exe.run(launched(X2Y3), np.full_like(A, np.nan), np.full_like(B, np.nan))
    np.testing.assert_array_equal(exe.run(launched(X2Y3), A, B), A @ B)


@pytest.mark.parametrize("name", FOREIGN)
def test_a_state_in_any_layout(launched, name, tmp_path):
    """It is taken over and given back, and a saved program does the same."""
    sch = axe.Schedule(axe.with_layouts(step, {"W": foreign(name, 12, 8)}), mesh=X2Y3)
    sch.shard(sch.get_loops("update")[1], "x")
    axe.compile(sch, work_dir=None).save(tmp_path / "exe")
    exe = axe.Executable.load(tmp_path / "exe")
    W, G = (np.random.default_rng(seed).integers(-9, 10, (12, 8)).astype("float32") for seed in (1, 2))
    np.testing.assert_array_equal(exe.run(launched(X2Y3), W=W, G=G), W - G)


def test_who_schedules_every_byte_is_told(caplog):
    sch = axe.Schedule(axe.with_layouts(matmul, {"A": foreign("cyclic", 12, 8)}), mesh=X2Y3)
    with pytest.raises(LowerError, match=r"'mm' touches 'A', which axe.layouts declares as .*: no contiguous"):
        axe.compile(sch, work_dir=None, redistribute="refuse")
    assert not caplog.records
    exe = axe.compile(sch, work_dir=None)
    (record,) = caplog.records
    moved = next(stage.bytes for stage in exe.stages if stage.inserted)
    assert record.getMessage() == f"matmul: redistributed, relay A for mm: {moved:,} bytes" and moved == 12 * 8 * 4 // 2
