"""Blocks by their names, loops by their variables', meshes as mappings; and what can't be scheduled."""

import numpy as np
import pytest
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.demo.block import SCHEDULES


@T.prim_func(s_tir=True)
def block(A: T.Buffer((8, 12), "float32"), W: T.Buffer((12, 6), "float32"), out: T.Buffer((8, 6), "float32")):
    C = T.sblock_alloc_buffer((8, 6), "float32")
    for i, j, k in T.grid(8, 6, 12):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
    for i, j in T.grid(8, 6):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = T.max(C[vi, vj], T.float32(0))


def by_names() -> axe.Schedule:
    sch = axe.Schedule(block, mesh={"tp": 2})
    sch.shard("mm", "k", "tp")
    _, gather = sch.split_collective("mm")
    (gather,) = sch.reorder_collective(sch.get(gather).name_hint, ["epi"])
    sch.fuse_collective(["mm", "epi", sch.get(gather).name_hint])
    return sch


def by_handles() -> axe.Schedule:
    sch = axe.Schedule(block, mesh=axe.Mesh({"tp": 2}))
    mm, epi = sch.get_sblock("mm"), sch.get_sblock("epi")
    _, reduce = sch.shard(sch.get_loops(mm)[2], "tp")
    scatter, gather = sch.split_collective(reduce)
    (gather,) = sch.reorder_collective(gather, [epi])
    sch.fuse_collective([scatter, epi, gather])
    return sch


def test_names_are_handles():
    """The same program, and a trace that replays without names."""
    named, handled = by_names(), by_handles()
    assert named.mod.script() == handled.mod.script()
    assert [each.name for each in named.applied] == [each.name for each in handled.applied]
    exe = axe.compile(named, work_dir=None)
    assert exe.notation in SCHEDULES and exe.mesh == axe.Mesh({"tp": 2})
    a, w = (np.random.default_rng(0).standard_normal(shape, dtype="float32") for shape in ((8, 12), (12, 6)))
    with axe.launch({"tp": 2}, engine="threads") as workers:
        found = exe.run(workers, a, w)
    np.testing.assert_allclose(found, np.maximum(a.astype("float64") @ w, 0), rtol=1e-5, atol=1e-5)


def test_meshes_are_mappings():
    assert axe.compile(block, {"tp": 2}, work_dir=None).mesh == axe.Mesh({"tp": 2})
    sch = axe.Schedule(block, mesh={"tp": 2})
    assert axe.compile(sch, mesh={"tp": 2}, work_dir=None).mesh == sch.mesh
    with pytest.raises(axe.LowerError, match="is for the mesh tp=2, not tp=3"):
        axe.compile(sch, mesh={"tp": 3})
    with pytest.raises(axe.LayoutError, match="must be at least 1, not 0"):
        axe.Schedule(block, mesh={"tp": 0})


WRONG = {
    "a block": (
        lambda sch: sch.shard("eip", "k", "tp"),
        r"'eip' is no block of the function \(did you mean 'epi'\?\); it has mm, epi",
    ),
    "a loop": (
        lambda sch: sch.shard("mm", "kk", "tp"),
        r"'kk' is no loop of block 'mm' \(did you mean 'k'\?\); it has i, j, k",
    ),
    "a block for a loop": (
        lambda sch: sch.shard(sch.get_sblock("mm"), "tp"),
        r"block 'mm' was given where a loop is due; valid is .* loops i, j, k: sch\.shard\(\"mm\", \"i\", \"tp\"\)",
    ),
    "its name": (lambda sch: sch.shard("mm", "tp"), "block 'mm' was given where a loop is due"),
    "a block as its loop": (
        lambda sch: sch.shard("mm", sch.get_sblock("epi"), "tp"),
        "a block was given where a loop of block 'mm' is due",
    ),
    "an axis": (lambda sch: sch.shard(sch.get_loops("mm")[0], 3), "a mesh axis is due behind the loop, not a int"),
    "a loop for a block": (
        lambda sch: sch.split_collective(sch.get_loops("mm")[0]),
        r"a loop was given where a block is due; valid is what sch\.get_sblock\(name\) gives, or its name: mm, epi",
    ),
    "a consumer": (lambda sch: sch.reorder_collective("epi", ["none"]), "reorder_collective: 'none' is no block"),
    "a number": (lambda sch: sch.overlap(["mm", 3], "tp", 2), "overlap: a int was given where a block is due"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_given_wrong(what):
    use, message = WRONG[what]
    sch = axe.Schedule(block, mesh={"tp": 2})
    before = sch.mod.script()
    with pytest.raises(axe.ScheduleError, match=message):
        use(sch)
    assert sch.mod.script() == before


def test_a_name_of_two_loops_is_refused():
    sch = axe.Schedule(block, mesh={"tp": 2})
    outer, _ = sch.split(sch.get_loops("mm")[0], [2, 4])
    inner = sch.get_loops("mm")[1]
    assert sch.get(outer).loop_var.name != sch.get(inner).loop_var.name  # upstream's names differ here
    sch.shard("mm", "i_0", "tp")


@T.prim_func
def plain(A: T.Buffer((8, 8), "float32")):
    for i, j in T.grid(8, 8):
        A[i, j] = T.float32(1)


@T.prim_func(s_tir=True)
def without_blocks(A: T.Buffer((8, 8), "float32")):
    for i, j in T.grid(8, 8):
        A[i, j] = T.float32(1)


@T.prim_func(s_tir=True)
def empty(A: T.Buffer((8, 0), "float32"), B: T.Buffer((8,), "float32")):
    for i, k in T.grid(8, 0):
        with T.sblock("sum"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                B[vi] = T.float32(0)
            B[vi] = B[vi] + A[vi, vk]


@pytest.mark.parametrize("func", [plain, without_blocks])
def test_functions_that_cannot_be_scheduled(func):
    message = r"is no schedulable one: it isn't made of blocks; write @T\.prim_func\(s_tir=True\)"
    for use in (
        lambda: axe.Schedule(func, mesh={"tp": 2}),
        lambda: axe.compile(func),
        lambda: axe.compile(func, {"tp": 2}),
    ):
        with pytest.raises(axe.AxeError, match=message):
            use()


def test_an_empty_reduction_is_refused():
    sch = axe.Schedule(empty, mesh={"tp": 2})
    with pytest.raises(axe.ScheduleError, match="shard: block 'sum': loop 'k' has no iterations"):
        sch.shard("sum", "k", "tp")
