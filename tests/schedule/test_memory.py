"""set_layout, pack and unpack: a layout decides where a buffer's elements lie, on every target."""

from pathlib import Path

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import s_tir
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.cli.inputs import load_file
from tvm_axe.errors import LayoutError, ScheduleError
from tvm_axe.layout import ComposeLayout, Iter, Layout, memory_size
from tvm_axe.schedule import set_layout

ROWS, COLUMNS = 8, 16
SHAPE = (ROWS, COLUMNS)
SWIZZLE = ComposeLayout(2, 2, 2, Layout.parse("S[(8, 16) : (16, 1)]"))


@T.prim_func(s_tir=True)
def chain(A: T.Buffer((ROWS, COLUMNS), "float32"), C: T.Buffer((ROWS, COLUMNS), "float32")):
    B = T.sblock_alloc_buffer((ROWS, COLUMNS), "float32")
    for i, j in T.grid(ROWS, COLUMNS):
        with T.sblock("double"):
            vi, vj = T.axis.remap("SS", [i, j])
            B[vi, vj] = A[vi, vj] * T.float32(2)
    for i, j in T.grid(ROWS, COLUMNS):
        with T.sblock("add"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = B[vi, vj] + A[vi, vj]


def run(sch, layouts, shape=SHAPE, seed=0):
    """The largest difference from numpy in float64, the parameters packed as `layouts` says, the output poisoned."""
    a = np.random.default_rng(seed).standard_normal(shape).astype("float32")
    packed = axe.pack(a, layouts["A"]) if "A" in layouts else a
    poisoned = np.full((memory_size(layouts["C"]),) if "C" in layouts else shape, np.nan, "float32")
    out = tvm.runtime.tensor(poisoned)
    tvm.compile(sch.mod, target="llvm")["main"](tvm.runtime.tensor(packed), out)
    result = axe.unpack(out.numpy(), layouts["C"], shape) if "C" in layouts else out.numpy()
    return np.abs(result - 3 * a.astype("float64")).max()


@pytest.mark.parametrize(
    "layouts",
    [
        {"B": "S[(8, 16) : (17, 1)]"},
        {"A": "S[(8, 16) : (1, 8)]", "B": "S[(8, 16) : (-16, 1)] + 112", "C": "S[(8, 4, 4) : (4, 32, 1)]"},
        {"A": SWIZZLE, "B": SWIZZLE, "C": "S[(8, 16) : (20, 1)]"},
    ],
)
def test_elements_lie_where_the_layout_says(layouts):
    layouts = {name: Layout.parse(text) if isinstance(text, str) else text for name, text in layouts.items()}
    sch = s_tir.Schedule(chain)
    for name, layout in layouts.items():
        set_layout(sch, name, layout)
    assert run(sch, layouts) < 1e-6
    replayed = s_tir.Schedule(chain)
    s_tir.schedule.Trace.apply_json_to_schedule(sch.trace.as_json(), replayed)
    tvm.ir.assert_structural_equal(replayed.mod, sch.mod)


def test_the_rewrite():
    @T.prim_func(s_tir=True)
    def expected(A: T.Buffer((ROWS, COLUMNS), "float32"), C: T.Buffer((ROWS, COLUMNS), "float32")):
        B = T.sblock_alloc_buffer((135,), "float32")
        for i, j in T.grid(ROWS, COLUMNS):
            with T.sblock("double"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi * 17 + vj] = A[vi, vj] * T.float32(2)
        for i, j in T.grid(ROWS, COLUMNS):
            with T.sblock("add"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = B[vi * 17 + vj] + A[vi, vj]

    sch = axe.Schedule(chain, mesh=axe.Mesh({"tp": 1}))
    sch.set_layout("B", "S[(8, 16) : (17, 1)]")
    tvm.ir.assert_structural_equal(
        sch.mod["main"].without_attr("global_symbol"), expected.without_attr("global_symbol")
    )


@st.composite
def memory_layouts(draw):
    """A permutation of split dimensions of SHAPE, with room between some of them, some run backwards."""
    factors = [draw(st.sampled_from([(8,), (2, 4), (2, 2, 2)])), draw(st.sampled_from([(16,), (4, 4), (2, 8)]))]
    extents = [e for parts in factors for e in parts]
    strides, distance, offset = [0] * len(extents), 1, 0
    for at in draw(st.permutations(range(len(extents)))):
        strides[at], distance = distance, distance * extents[at] + draw(st.integers(0, 3))
        if draw(st.booleans()):
            offset, strides[at] = offset + strides[at] * (extents[at] - 1), -strides[at]
    return Layout([Iter(e, s, "m") for e, s in zip(extents, strides)], (), {"m": offset})


@settings(derandomize=True, deadline=None, max_examples=25)
@given(layout=memory_layouts(), name=st.sampled_from("ABC"), seed=st.integers(0, 99))
def test_any_layout_of_any_buffer(layout, name, seed):
    sch = s_tir.Schedule(chain)
    set_layout(sch, name, layout)
    assert run(sch, {name: layout}, seed=seed) < 1e-6


@settings(derandomize=True, deadline=None, max_examples=50)
@given(layout=st.one_of(memory_layouts(), st.just(SWIZZLE)))
def test_pack_follows_apply_and_unpack_undoes_it(layout):
    array = np.arange(1, 129).reshape(SHAPE)
    memory = axe.pack(array, layout)
    for index in np.ndindex(SHAPE):
        (point,) = layout.apply(*index, shape=SHAPE)
        assert memory[point["m"]] == array[index]
    assert np.count_nonzero(memory) == array.size
    np.testing.assert_array_equal(axe.unpack(memory, layout, SHAPE), array)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("S[(8, 16) : (1@tp, 1)]", "names tp; memory has the axis 'm' alone"),
        ("S[(8, 16) : (16, 1)] + R[2 : 128]", "stores elements more than once"),
        ("S[(8, 16) : (8, 1)]", "two elements at one address"),
        ("S[(8, 16) : (16, 1)] + -4", "reaches address -4"),
    ],
)
def test_layouts_that_memory_cannot_have(layout, message):
    with pytest.raises(LayoutError, match=message):
        axe.pack(np.zeros(SHAPE), Layout.parse(layout))
    with pytest.raises(LayoutError, match=message):
        set_layout(s_tir.Schedule(chain), "B", layout)


def test_errors_name_what_was_given():
    sch = s_tir.Schedule(chain)
    with pytest.raises(ScheduleError, match="0 buffers that blocks touch are called 'D'"):
        set_layout(sch, "D", "S[(8, 16) : (16, 1)]")
    with pytest.raises(ScheduleError, match=r"the tile \(3, 16\) does not divide 'B', whose shape is \(8, 16\)"):
        set_layout(sch, "B", "S[(3, 16) : (16, 1)]", tile=(3, 16))
    with pytest.raises(LayoutError, match="starts at address 3; a buffer starts at 0"):
        set_layout(sch, "B", "S[(8, 16) : (16, 1)] + 3")
    with pytest.raises(LayoutError):
        set_layout(sch, "B", "S[(4, 4) : (4, 1)]")
    with pytest.raises(LayoutError, match=r"takes a one-dimensional memory of 135 elements, not \(128,\)"):
        axe.unpack(np.zeros(128), Layout.parse("S[(8, 16) : (17, 1)]"), SHAPE)
    with pytest.raises(LayoutError, match="128 elements; the shape"):
        axe.pack(np.zeros((4, 4)), SWIZZLE)


EXAMPLE = load_file(Path(__file__).parents[2] / "examples/transpose.py")


@pytest.mark.parametrize("name", EXAMPLE.LAYOUTS)
def test_a_shared_tile_is_as_large_as_its_layout(name):
    """What a block of the GPU allocates is one tile, not the whole buffer."""
    sch = EXAMPLE.tiled(128, 64, EXAMPLE.LAYOUTS[name])
    source = tvm.compile(sch.mod, target=tvm.target.Target({"kind": "cuda", "arch": "sm_90"}, host="llvm"))
    text = source.mod.imports[0].inspect_source()
    size = {"row-major": 1024, "padded": 1055, "swizzled": 1024}[name]
    assert f"A_shared_ptr[{size}];" in text
    assert ("^" in text) == (name == "swizzled")


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXAMPLE.LAYOUTS)
def test_on_cuda(name, cuda):
    rows, columns = 2048, 1024
    sch = EXAMPLE.tiled(rows, columns, EXAMPLE.LAYOUTS[name])
    a = np.random.default_rng(1).standard_normal((rows, columns)).astype("float32")
    out = tvm.runtime.tensor(np.full((columns, rows), np.nan, "float32"), cuda)
    executable = tvm.compile(sch.mod, target=tvm.target.Target("cuda", host="llvm"))
    executable["main"](tvm.runtime.tensor(a, cuda), out)
    np.testing.assert_array_equal(out.numpy(), a.T)


@pytest.mark.gpu
def test_parameters_on_cuda(cuda):
    layouts = {"A": Layout.parse("S[(8, 16) : (1, 8)]"), "B": SWIZZLE, "C": Layout.parse("S[(8, 16) : (20, 1)]")}
    sch = s_tir.Schedule(chain)
    for block in ("double", "add"):
        i, j = sch.get_loops(sch.get_sblock(block))
        sch.bind(i, "blockIdx.x")
        sch.bind(j, "threadIdx.x")
    for name, layout in layouts.items():
        set_layout(sch, name, layout)
    a = np.random.default_rng(2).standard_normal(SHAPE).astype("float32")
    out = tvm.runtime.tensor(np.full(memory_size(layouts["C"]), np.nan, "float32"), cuda)
    executable = tvm.compile(sch.mod, target=tvm.target.Target("cuda", host="llvm"))
    executable["main"](tvm.runtime.tensor(axe.pack(a, layouts["A"]), cuda), out)
    np.testing.assert_allclose(axe.unpack(out.numpy(), layouts["C"], SHAPE), 3 * a, rtol=1e-6)
