"""Emit: what a device runs in order, and where it must wait for the others."""

import pytest
import tvm
from tvm import relax
from tvm.script import tirx as T

from tvm_axe.layout import Layout, Mesh
from tvm_axe.lower import lower
from tvm_axe.lower.emit import barriers_before, emit_module

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


def waits(passes, program, **declared):
    """Whether a barrier stands before each step."""
    _, shardings, steps = passes(program, TP2, **declared)
    return barriers_before(steps, shardings)


ROWS = Layout.sharded((4,), TP2, {0: "tp"})


def test_read_after_write_over_pull_and_write_after_read(passes):
    """P is written, read by the peers, and written again: each time somebody else must be done first."""

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((2, 4), "float32"), X: T.Buffer((4,), "float32"), Y: T.Buffer((4,), "float32")):
        P = T.sblock_alloc_buffer((2, 4))
        for d in T.serial(2, annotations={"axe.bind": "tp"}):
            for i in range(4):
                with T.sblock("first"):
                    vd, vi = T.axis.remap("SS", [d, i])
                    P[vd, vi] = A[vd, vi] * T.float32(2)
        for i in range(4):
            for d in T.serial(2, annotations={"axe.bind": "tp"}):
                with T.sblock("x"):
                    vd, vi = T.axis.remap("RS", [d, i])
                    with T.init():
                        X[vi] = T.float32(1)
                    X[vi] = X[vi] * P[vd, vi]
        for d in T.serial(2, annotations={"axe.bind": "tp"}):
            for i in range(4):
                with T.sblock("second"):
                    vd, vi = T.axis.remap("SS", [d, i])
                    P[vd, vi] = A[vd, vi] * T.float32(3)
        for i in range(4):
            for d in T.serial(2, annotations={"axe.bind": "tp"}):
                with T.sblock("y"):
                    vd, vi = T.axis.remap("RS", [d, i])
                    with T.init():
                        Y[vi] = T.float32(1)
                    Y[vi] = Y[vi] * P[vd, vi]

    assert waits(passes, program) == [False, True, True, True]


def test_two_readers_of_the_peers_wait_once(passes):
    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((2, 4), "float32"), X: T.Buffer((4,), "float32"), Y: T.Buffer((4,), "float32")):
        P = T.sblock_alloc_buffer((2, 4))
        for d in T.serial(2, annotations={"axe.bind": "tp"}):
            for i in range(4):
                with T.sblock("first"):
                    vd, vi = T.axis.remap("SS", [d, i])
                    P[vd, vi] = A[vd, vi] * T.float32(2)
        for i in range(4):
            for d in T.serial(2, annotations={"axe.bind": "tp"}):
                with T.sblock("x"):
                    vd, vi = T.axis.remap("RS", [d, i])
                    with T.init():
                        X[vi] = T.float32(1)
                    X[vi] = X[vi] * P[vd, vi]
        for i in range(4):
            for d in T.serial(2, annotations={"axe.bind": "tp"}):
                with T.sblock("y"):
                    vd, vi = T.axis.remap("RS", [d, i])
                    with T.init():
                        Y[vi] = T.float32(2)
                    Y[vi] = Y[vi] * P[vd, vi]

    assert waits(passes, program) == [False, True, False]


def pushes(first, second):
    """A program of two stages made of: g(ather A into X), G(ather A twice over), r(ead X), w(rite X)."""
    stages = {
        "gather": ("X[vi] = A[vi]", True),
        "read": ("Y[vi] = X[vi] * T.float32(2)", False),
        "write": ("X[vi] = B[vi] * T.float32(3)", False),
        "own": ("Z[vi] = B[vi] * T.float32(3)", False),
    }
    lines = ["@T.prim_func(s_tir=True)", "def program("]
    lines += [f'    {name}: T.Buffer((4,), "float32"),' for name in "ABXYZ"]
    lines += ["):"]
    for name in (first, second):
        store, bound = stages[name]
        annotation = '{"axe.bind": "tp"}' if bound else "{}"
        lines += [
            f"    for i_0 in T.serial(2, annotations={annotation}):",
            "        for i_1 in range(2):",
            f'            with T.sblock("{name}"):',
            "                vi = T.axis.spatial(4, i_0 * 2 + i_1)",
            f"                {store}",
        ]
    return tvm.script.from_source("\n".join(lines))


@pytest.mark.parametrize(
    ("first", "second", "wait"),
    [
        ("gather", "read", True),  # read after write by a peer
        ("read", "gather", True),  # a peer writes after the read
        ("gather", "write", True),  # write after write by a peer
        ("write", "gather", True),  # a peer writes after the write
        ("gather", "gather", True),  # two peers write in turn
        ("gather", "own", False),
        ("own", "gather", False),
        ("read", "write", False),  # both on one's own slab
        ("write", "read", False),
    ],
)
def test_push(passes, first, second, wait):
    assert waits(passes, pushes(first, second), A=ROWS) == [False, wait]


def test_barrier_starts_a_new_count(passes, scheduled):
    """After a barrier only what comes behind it counts: no two in a row without cause."""
    program, shardings, steps = passes(scheduled("MM-RS-C-AG"))
    assert barriers_before(steps, shardings) == [False, True, False, False]
    assert emit_module(program, steps, shardings).coordinates == ("tp",)
