"""In what order a device runs its steps: where it must wait for the others, and how chunks interleave."""

import pytest
import tvm
from tvm.script import tirx as T

from tvm_axe.layout import Layout, Mesh
from tvm_axe.lower.order import Work, barriers_before, pipeline, regions, touched_by
from tvm_axe.schedule import Schedule

TP2 = Mesh({"tp": 2})


def waits(passes, program, **declared):
    """Whether a barrier stands before each step."""
    _, shardings, steps = passes(program, TP2, **declared)
    return barriers_before(regions(steps), shardings)


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
    assert waits(passes, scheduled("MM-RS-C-AG").mod["main"]) == [False, True, False, False]


def test_sent_data_is_kept_until_it_has_arrived(passes):
    """What peers pull is written before and overwritten after: a barrier each time."""

    @T.prim_func(s_tir=True)
    def program(X: T.Buffer((2, 4), "float32"), out: T.Buffer((2, 4), "float32")):
        C = T.sblock_alloc_buffer((2, 4))
        Z = T.sblock_alloc_buffer((2, 4))
        for s in T.serial(2, annotations={"axe.bind": "tp"}):
            for i in range(4):
                with T.sblock("first"):
                    vs, vi = T.axis.remap("SS", [s, i])
                    C[vs, vi] = X[vs, vi] * T.float32(2)
        for s in T.serial(2, annotations={"axe.bind": "tp"}):
            for i in range(4):
                with T.sblock("send"):
                    vs, vi = T.axis.remap("SS", [s, i])
                    Z[vs, vi] = C[(vs + 1) % 2, vi]
        for s in T.serial(2, annotations={"axe.bind": "tp"}):
            for i in range(4):
                with T.sblock("second"):
                    vs, vi = T.axis.remap("SS", [s, i])
                    C[vs, vi] = X[vs, vi] * T.float32(3)
        for s in T.serial(2, annotations={"axe.bind": "tp"}):
            for i in range(4):
                with T.sblock("add"):
                    vs, vi = T.axis.remap("SS", [s, i])
                    out[vs, vi] = C[vs, vi] + Z[vs, vi]

    out = Layout.sharded((2, 4), TP2, {0: "tp"})
    assert waits(passes, program, out=out) == [False, True, True, False]


# ---- Chunks ------------------------------------------------------------------------------------------------------


def overlapped(programs, tp, chunks, fuse):
    """ol(MM, fuse(RS-C-AG)), or each stage for itself."""
    sch = Schedule(programs.block(4 * tp * chunks, 3, 8).func, mesh=Mesh({"tp": tp}))
    partial, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    scatter, gather = sch.split_collective(reduce)
    epi = sch.get_sblock("epi")
    (gather,) = sch.reorder_collective(gather, [epi])
    if fuse:
        sch.fuse_collective([scatter, epi, gather])
    sch.overlap([partial, scatter] if fuse else [partial, scatter, epi, gather], "tp", chunks)
    return sch


def test_chunks_of_a_matmul_and_of_its_collective(programs, passes):
    """Each device makes its neighbour's slice first and its own last, and the collective lags a chunk behind."""
    _, shardings, steps = passes(overlapped(programs, 2, 2, fuse=True))
    assert pipeline(steps, shardings) == [
        Work(0, 1, 0, None, True),
        Work(0, 0, 0, None, False),
        Work(0, 1, 1, None, True),
        Work(0, 0, 1, None, False),
        Work(1, 0, 0, 1, False),
        Work(1, 0, 1, 0, False),
    ]


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_nobody_pulls_what_is_not_there_yet(programs, passes, tp, chunks, fuse):
    """Whatever a device has waited for so far, its peers have done all that it pulls, however slow they are."""
    _, shardings, steps = passes(overlapped(programs, tp, chunks, fuse))
    touched, order = [touched_by(step, shardings) for step in steps], pipeline(steps, shardings)
    turns = [tp if step.stage.overlap.ring is not None else 1 for step in steps]
    assert sorted((w.stage, w.step, w.chunk) for w in order) == [
        (stage, step, chunk) for stage in range(len(steps)) for step in range(turns[stage]) for chunk in range(chunks)
    ]
    arrivals, awaited, checked = [], 0, 0  # places in the order where a device arrives; how many of a peer's are sure
    for at, work in enumerate(order):
        if work.behind is not None:
            awaited = max(awaited, len(arrivals) - work.behind)
        done = arrivals[awaited - 1] if awaited else -1  # the peers are at least so far
        for earlier in range(work.stage):
            if touched[work.stage]["pull"] & touched[earlier]["write"]:
                needed = [
                    place
                    for place, other in enumerate(order)
                    if (other.stage, other.chunk) == (earlier, work.chunk) and (other.step or turns[earlier] == 1)
                ]
                assert max(needed) <= done < at
                checked += 1
        # One's own share of it is made by then, too.
        assert all(
            place < at
            for place, other in enumerate(order)
            if other.chunk == work.chunk and touched[work.stage]["read"] & touched[other.stage]["write"]
            and other.stage < work.stage and other.step == work.step
        )  # fmt: skip
        if work.arrives:
            arrivals.append(at)
    assert checked


def test_devices_along_another_axis_pull_every_slice(passes):
    """Slices go around x and the sum is over y, so that a device's own slice is wanted by its peers, too."""

    @T.prim_func(s_tir=True)
    def sums(X: T.Buffer((2, 4), "float32"), Y: T.Buffer((2, 4), "float32"), Z: T.Buffer((4,), "float32")):
        for i, j, k in T.grid(2, 4, 2):
            with T.sblock("s0"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    Y[vi, vj] = T.float32(0)
                Y[vi, vj] = Y[vi, vj] + X[vk, vi]
        for i, j in T.grid(2, 4):
            with T.sblock("s1"):
                vi, vj = T.axis.remap("RS", [i, j])
                with T.init():
                    Z[vj] = T.float32(0)
                Z[vj] = Z[vj] + Y[vi, vj]

    sch = Schedule(sums, mesh=Mesh({"x": 2, "y": 2}))
    partial, reduce = sch.shard(sch.get_loops("s0")[2], "x")
    scatter, gather = sch.split_collective(reduce, dim=1)
    sch.overlap([partial, scatter, gather, sch.get_sblock("s1")], "x", 2)
    sch.shard(sch.get_loops("s1")[2], "y")
    sch.cache_write(scatter, 0, "global")  # what is behind it overlaps for itself
    _, shardings, steps = passes(sch)
    steps = regions(steps)[-1]
    order = pipeline(steps, shardings)
    terms = [work for work in order if steps[work.stage].name == "s1_rf"]
    assert [(work.step, work.chunk, work.arrives) for work in terms] == [
        (1, 0, False),
        (0, 0, True),
        (1, 1, False),
        (0, 1, True),
    ]
