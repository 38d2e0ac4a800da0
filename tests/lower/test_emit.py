"""Emit: what a device runs in order, and what it is given."""

import pytest
import tvm
from tvm import relax
from tvm.script import tirx as T

from tvm_axe.layout import Mesh
from tvm_axe.lower import lower
from tvm_axe.schedule import Schedule, with_layouts

TP2 = Mesh({"tp": 2})


def calls(module):
    """`main`, a call a line: a kernel's or collective's name and its arguments."""
    found = []
    for binding in module["main"].body.blocks[0].bindings:
        call = binding.value
        if isinstance(call, relax.Call) and isinstance(call.op, relax.ExternFunc | tvm.ir.GlobalVar):
            name = call.op.global_symbol if isinstance(call.op, relax.ExternFunc) else call.op.name_hint
            args = [arg.name if isinstance(arg, relax.Var) else str(arg.value) for arg in call.args]
            found.append(f"{name}({', '.join(args)})")
    return found


GOLDEN = {
    "MM-AR-C": [
        "mm_rf(A, W, C_rf, tp)",
        "axe.barrier()",
        "axe.all_reduce(C_rf_tp, C_tp, tp)",
        "axe.barrier()",
        "epi(C, bias, residual, out)",
    ],
    "MM-RS-C-AG": [
        "mm_rf(A, W, C_rf, tp)",
        "axe.barrier()",
        "axe.reduce_scatter(C_rf_tp, C_global, 0, tp)",
        "epi(C_global, bias, residual, out_global, tp)",
        "axe.all_gather(out_global, out_tp, 0, tp)",
    ],
    "MM-fuse(RS-C-AG)": [
        "mm_rf(A, W, C_rf, tp)",
        "axe.barrier()",
        "mm_epi_out_global(C_rf_tp, bias, residual, out_tp, tp)",
    ],
}


@pytest.mark.parametrize("k", [8, 7])
@pytest.mark.parametrize("name", GOLDEN)
def test_main(scheduled, name, k):
    """Whether k divides or not shows in `mm_rf` only: only a masked kernel asks for the device's coordinate."""
    sch = scheduled(name, 5, 3, k)
    first = "mm_rf(A, W, C_rf, tp)" if k == 7 else "mm_rf(A, W, C_rf)"
    assert calls(lower(sch.mod["main"], sch.mesh).module) == [first, *GOLDEN[name][1:]]


def test_arguments_of_main(scheduled):
    """Parameters in order, then what is exchanged, as slab or as view; the rest is allocated inside."""
    lowered = lower(scheduled("MM-RS-C-AG", 5, 3, 8).mod["main"], TP2)
    assert lowered.arguments[:5] == tuple((name, "slab") for name in ("A", "W", "bias", "residual", "out"))
    assert set(lowered.arguments[5:]) == {("C_rf", "slab"), ("C_rf", "tp"), ("out", "tp")}
    assert lowered.coordinates == ("tp",)
    params = [(var.name, [int(n) for n in var.ty.shape]) for var in lowered.module["main"].params[:-1]]
    assert dict(params) == {
        "A": [5, 4],
        "W": [4, 3],
        "bias": [3],
        "residual": [3, 3],
        "out": [5, 3],
        "C_rf": [5, 3],
        "C_rf_tp": [2, 5, 3],
        "out_tp": [2, 5, 3],
    }


def test_module_is_well_formed_and_survives_json(scheduled):
    for name in GOLDEN:
        module = lower(scheduled(name, 5, 3, 7).mod["main"], TP2).module
        relax.analysis.well_formed(module)  # raises if not
        tvm.ir.assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(module)), module)


def test_one_device_neither_waits_nor_calls(scheduled):
    for name in GOLDEN:
        assert not [
            call for call in calls(lower(scheduled(name, tp=1).mod["main"], Mesh({"tp": 1})).module) if "axe." in call
        ]


def test_stages_of_one_name_have_kernels_of_their_own():
    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32"), C: T.Buffer((4,), "float32")):
        for i in range(4):
            with T.sblock("step"):
                vi = T.axis.spatial(4, i)
                B[vi] = A[vi] + T.float32(1)
        for i in range(4):
            with T.sblock("step"):
                vi = T.axis.spatial(4, i)
                C[vi] = B[vi] * T.float32(2)

    lowered = lower(program, TP2)
    kernels = [stage.kernel for stage in lowered.stages]
    assert len(set(kernels)) == 2
    assert [call.split("(")[0] for call in calls(lowered.module)] == kernels


def test_reduce_and_broadcast(scheduled):
    """From the peers' slabs to one's own, with the root."""
    sch = scheduled("MM-AR-C", 5, 3, 8)
    sch.split_collective(sch.get_sblock("mm"), root=1)
    assert calls(lower(sch.mod["main"], sch.mesh).module) == [
        "mm_rf(A, W, C_rf)",
        "axe.barrier()",
        "axe.reduce(C_rf_tp, C_global, 1, tp)",
        "axe.barrier()",
        "axe.broadcast(C_global_tp, C, 1, tp)",
        "epi(C, bias, residual, out)",
    ]


def test_send(programs):
    """What is sent is pulled by who receives it."""
    mesh = Mesh({"pp": 3})
    sch = Schedule(with_layouts(programs.pipeline(3, 4, 2).func, {"out": "S[(3, 4) : (1@pp, 1)]"}), mesh=mesh)
    for name in ("double", "add"):
        sch.shard(sch.get_loops(sch.get_sblock(name))[0], "pp")
    sch.send(sch.get_sblock("send"), "pp")
    lowered = lower(sch.mod["main"], mesh)
    assert calls(lowered.module) == [
        "double(X, C)",
        "axe.barrier()",
        "axe.send(C_pp, Z, 2, pp)",
        "add(Z, X, out)",
    ]
    assert set(lowered.buffers) == {"X", "out", "C"}  # Z is nobody else's


def test_all_to_all(programs):
    """The dimensions are those of the slabs: gathered, then scattered."""
    mesh = Mesh({"ep": 2})
    program = programs.experts(4, 6, 3, 2).func
    sch = Schedule(with_layouts(program, {"Y": "S[(2, 2, 6, 2) : (1@ep, 12, 2, 1)]"}), mesh=mesh)
    for name, dim in (("dispatch", 0), ("mm", 1), ("combine", 0)):
        sch.shard(sch.get_loops(sch.get_sblock(name))[dim], "ep")
    sch.redistribute(sch.get_sblock("mm"), "D", "ep", 1)
    sch.redistribute(sch.get_sblock("combine"), "H", "ep", 0)
    lowered = lower(sch.mod["main"], mesh)
    assert calls(lowered.module) == [
        "dispatch(X, D)",
        "axe.barrier()",
        "axe.all_to_all(D_ep, D_global, 0, 1, ep)",
        "mm(D_global, W, H)",
        "axe.barrier()",
        "axe.all_to_all(H_ep, H_global, 1, 0, ep)",
        "combine(H_global, Y)",
    ]
    assert lowered.notation == "C-A2A-MM-A2A-C"


def test_dimension_that_counts_devices_is_not_among_those_of_a_slab(programs):
    """Gradients (2, 4, 6) are slabs of (4, 6), whose columns are scattered."""
    mesh = Mesh({"dp": 2})
    sch = Schedule(programs.update(2, 4, 6).func, mesh=mesh)
    reduce = sch.all_reduce(sch.get_loops(sch.get_sblock("sum"))[2], "dp")
    sch.split_collective(reduce, 1)
    lowered = lower(sch.mod["main"], mesh)
    assert calls(lowered.module)[:2] == [
        "axe.reduce_scatter(g_dp, s_global, 1, dp)",
        "axe.all_gather(s_global, s_dp, 1, dp)",
    ]
    shapes = {var.name: [int(extent) for extent in var.ty.shape] for var in lowered.module["main"].params}
    assert shapes["g_dp"] == [2, 4, 6]


def test_collectives_over_two_axes(programs):
    """Each takes the name of its axis, which says which view it is given."""
    mesh = Mesh({"dp": 2, "tp": 2})
    sch = Schedule(programs.norm(4, 6, 8).func, mesh=mesh)
    partial, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    blocks = [partial, reduce, sch.get_sblock("squares"), sch.get_sblock("scale")]
    for block in blocks:
        sch.shard(sch.get_loops(block)[0], "dp")
    sch.cache_write(blocks[-1], 0, "global")
    _, gather = sch.split_collective(reduce, 1)
    sch.reorder_collective(gather, blocks[2:])
    collectives = [call for call in calls(lower(sch.mod["main"], mesh).module) if call.startswith("axe.")]
    assert [call for call in collectives if call != "axe.barrier()"] == [
        "axe.reduce_scatter(C_rf_tp, C_global, 1, tp)",
        "axe.all_reduce(S_rf_tp, S_tp, tp)",
        "axe.all_gather(out_global_global, out_global_tp, 1, tp)",
        "axe.all_gather(out_global, out_dp, 0, dp)",
    ]
