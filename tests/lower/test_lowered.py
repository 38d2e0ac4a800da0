"""lower: the passes together, and what is known of the result."""

import pytest
import tvm
from tvm.script import tirx as T

from tvm_axe.errors import LowerError
from tvm_axe.layout import Mesh
from tvm_axe.lower import lower
from tvm_axe.schedule import Schedule, with_layouts


def test_buffers_on_the_mesh(scheduled):
    lowered = lower(scheduled("MM-RS-C-AG").mod["main"], Mesh({"tp": 2}))
    assert [buffer.name for buffer in lowered.inputs] == ["A", "W", "bias", "residual"]
    assert [buffer.name for buffer in lowered.outputs] == ["out"]
    assert set(lowered.buffers) == {"A", "W", "bias", "residual", "out", "C_rf"}
    assert str(lowered.layouts["C_global"]) == "S[(2, 2, 2) : (1@tp, 2, 1)]"


def test_declared_layouts_are_taken_from_the_function(scheduled):
    func = with_layouts(scheduled("MM-fuse(RS-C-AG)").mod["main"], {"out": "S[(2, 2, 2) : (1@tp, 2, 1)]"})
    lowered = lower(func, Mesh({"tp": 2}))
    assert str(lowered.buffers["out"].layout) == "S[(2, 2, 2) : (1@tp, 2, 1)]"
    assert lowered.stages[1].bytes == 16  # the reduce-scatter; the gather has gone


def test_axis_called_slab(scheduled):
    sch = Schedule(scheduled(None).mod, mesh=Mesh({"slab": 2}))
    with pytest.raises(LowerError, match=r"mesh slab=2: 'slab' is what a device's own share .* rename that axis"):
        lower(sch.mod["main"], sch.mesh)


def test_a_declared_layout_is_the_parameters_alone():
    """An intermediate may have a parameter's name; it doesn't lie where that is said to."""

    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((4, 6), "float32"), B: T.Buffer((4, 6), "float32")):
        twice = T.sblock_alloc_buffer((4, 6), "float32")
        for i, j in T.grid(4, 6):
            with T.sblock("double"):
                vi, vj = T.axis.remap("SS", [i, j])
                twice[vi, vj] = A[vi, vj] * T.float32(2)
        for i, j in T.grid(4, 6):
            with T.sblock("copy"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = twice[vi, vj] + T.float32(1)

    renamed = tvm.ir.load_json(tvm.ir.save_json(func).replace("twice", "A"))
    lowered = lower(with_layouts(renamed, {"A": "S[(4, 6) : (1, 4)]"}), Mesh({"tp": 1}))
    assert {name: str(layout) for name, layout in lowered.layouts.items()} == {
        "A": "S[(4, 6) : (1, 4)]",
        "B": "S[(4, 6) : (6, 1)]",
        "A_1": "S[(4, 6) : (6, 1)]",
    }
