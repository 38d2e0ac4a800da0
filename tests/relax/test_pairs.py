"""What is inlined, which matmuls are paired, and how a kernel takes in what was computed before its chain."""

import itertools

import numpy as np
import pytest
import tvm
from tvm import s_tir
from tvm.relax.frontend import nn
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.lower import lower
from tvm_axe.relax import Pair, find_pairs, merge, schedule_model
from tvm_axe.schedule.inline import inline_pointwise
from tvm_axe.schedule.query import bound_loops, name_of


def inlined(mod):
    sch = s_tir.Schedule(tvm.IRModule({"main": merge(mod)}))
    inline_pointwise(sch)
    return sch


def names(sch):
    return [name_of(sch, block) for block in sch.get_child_blocks(sch.get_sblock("root"))]


# ---- inlining ----------------------------------------------------------------------------------------------------


def test_transposes_vanish_and_chains_fold_into_their_last_block(export):
    layers = {"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}
    mod = export(layers, lambda m, x: m.down(nn.op.gelu(m.up(x))) + x, x=(6, 8))
    assert names(inlined(mod)) == ["matmul", "gelu", "matmul1", "gv"]


def test_what_two_blocks_read_is_computed_once(export):
    def forward(model, x):
        total = x + x
        return nn.op.relu(total), nn.op.silu(total)

    assert names(inlined(export({}, forward, x=(6, 8)))) == ["add", "relu", "silu"]


def test_squaring_on_and_on_does_not_double_on_and_on(export, draw, alone):
    def forward(model, x):
        for _ in range(40):
            x = x * x
        return x

    mod = export({}, forward, x=(2, 3))
    sch, arrays = inlined(mod), draw(mod)
    assert 40 / 5 <= len(names(sch)) < 40
    out = tvm.runtime.tensor(np.full((2, 3), np.nan, "float32"))
    tvm.compile(sch.mod, target="llvm")["main"](tvm.runtime.tensor(arrays[0]), out)
    np.testing.assert_allclose(out.numpy(), alone(mod, arrays))


# ---- pairs -------------------------------------------------------------------------------------------------------


def chain(export, *widths, between=nn.op.relu):
    layers = {f"layer{n}": nn.Linear(a, b, bias=False) for n, (a, b) in enumerate(itertools.pairwise(widths))}

    def forward(model, x):
        for n in range(len(layers)):
            x = getattr(model, f"layer{n}")(x if n == 0 else between(x))
        return x

    return export(layers, forward, x=(6, widths[0]))


def test_pairs_are_taken_in_order(export):
    assert find_pairs(inlined(chain(export, 8, 12, 8, 12, 8))) == [
        Pair({"matmul": 1, "relu": 1}, "matmul1", 2),
        Pair({"matmul2": 1, "relu2": 1}, "gv", 2),
    ]


def test_a_matmul_alone_is_no_pair(export):
    assert find_pairs(inlined(chain(export, 8, 12))) == []
    assert [pair.rows for pair in find_pairs(inlined(chain(export, 8, 12, 8, 12)))] == ["matmul1"]


def test_matmuls_of_activations_are_no_pair(export):
    layers = {"q": nn.Linear(8, 8), "k": nn.Linear(8, 8)}
    mod = export(layers, lambda m, x: nn.op.matmul(m.q(x), nn.op.permute_dims(m.k(x), [1, 0])), x=(6, 8))
    assert find_pairs(inlined(mod)) == []


# ---- kernels that also read what came before them ----------------------------------------------------------------


@T.prim_func(s_tir=True)
def late(
    A: T.Buffer((5, 8), "float32"),
    W: T.Buffer((8, 3), "float32"),
    residual: T.Buffer((5, 3), "float32"),
    out: T.Buffer((5, 3), "float32"),
):
    """A matmul whose epilogue reads a tensor that another nest computes."""
    before = T.sblock_alloc_buffer((5, 3))
    C = T.sblock_alloc_buffer((5, 3))
    for i, j in T.grid(5, 3):
        with T.sblock("before"):
            vi, vj = T.axis.remap("SS", [i, j])
            before[vi, vj] = residual[vi, vj] * T.float32(2)
    for i, j, k in T.grid(5, 3, 8):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
    for i, j in T.grid(5, 3):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = C[vi, vj] + before[vi, vj]


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1])
def test_epilogue_takes_the_chain_into_its_nest(workers, devices, dim, moved):
    mesh = axe.Mesh({"tp": devices})
    sch = axe.Schedule(late, mesh=mesh)
    mm, epi = sch.get_sblock("mm"), sch.get_sblock("epi")
    _, reduce = sch.shard(sch.get_loops(mm)[2], "tp")
    scatter, gather = sch.split_collective(reduce, dim)
    (gather,) = sch.reorder_collective(gather, [epi])
    device = sch.fuse_collective([scatter, epi, gather])
    inside = [name_of(sch, block) for block in sch.get_child_blocks(device)]
    assert inside == ["mm", "epi", "out_global"]
    if devices > 1:
        assert list(bound_loops(sch, scatter, tvm.tirx.IterVar.CommReduce)) == ["tp"]

    # Stock instructions only: the trace replays on a plain schedule.
    replayed = s_tir.Schedule(late)
    s_tir.schedule.Trace.apply_json_to_schedule(sch.trace.as_json(), replayed)
    tvm.ir.assert_structural_equal(replayed.mod, sch.mod)

    rng = np.random.default_rng(devices)
    arrays = [rng.standard_normal(shape, dtype="float32") for shape in [(5, 8), (8, 3), (5, 3)]]
    want = arrays[0].astype("float64") @ arrays[1] + 2 * arrays[2]
    exe = axe.compile(sch)
    assert exe.bytes == moved(["RS+AG"], *((5, 3) if dim == 0 else (3, 5)), devices)
    np.testing.assert_allclose(exe.run(workers(devices), *arrays), want, rtol=1e-5, atol=1e-5)
    ignored = tvm.runtime.tensor(np.full((5, 3), np.nan, "float32"))
    tvm.compile(sch.mod, target="llvm")["main"](*[tvm.runtime.tensor(array) for array in arrays], ignored)
    np.testing.assert_allclose(ignored.numpy(), want, rtol=1e-5, atol=1e-5)


def test_what_a_kernel_gathers_for_a_later_stage_is_whole(export):
    mesh = axe.Mesh({"tp": 2})
    layers = {name: nn.Linear(8, 8) for name in ("up0", "down0", "up1", "down1")}

    def forward(model, x):
        x = model.down0(nn.op.relu(model.up0(x))) + x
        return model.down1(nn.op.relu(model.up1(x))) + x

    lowered = lower(schedule_model(export(layers, forward, x=(6, 8)), mesh), mesh)
    assert lowered.layouts["add2"].sharding((6, 8), mesh) == {}  # read by the next matmul, and pushed by the kernel
    assert lowered.layouts["add2_global"].sharding((6, 8), mesh) == {0: "tp"}
    assert {name for name, view in lowered.arguments if view == "tp"} >= {"add2", "gv"}
