"""Derive collectives: reduce, broadcast, all-to-all, send, small sums over slices, and what only looks like one."""

import pytest
from tvm.script import tirx as T

from tvm_axe.errors import LowerError
from tvm_axe.layout import Layout, Mesh
from tvm_axe.schedule import Schedule

TP2 = Mesh({"tp": 2})
MESHES = [Mesh({"tp": 2}), Mesh({"tp": 3}), Mesh({"dp": 2, "tp": 2}), Mesh({"tp": 3, "dp": 2})]


def cut_otherwise(size, gathered, scattered, rest):
    """The bytes that the busiest of so many devices receives of a float32 tensor in an all-to-all."""

    def block(extent, rank):
        piece = -(-extent // size)
        return min(piece, max(0, extent - rank * piece))

    return max(4 * rest * block(scattered, rank) * (gathered - block(gathered, rank)) for rank in range(size))


def on_rows(sch, *names):
    """Share the first loop of blocks over dp, if the mesh has it; returns how many devices that is."""
    if "dp" not in sch.mesh.names:
        return 1
    for name in names:
        sch.shard(sch.get_loops(sch.get_sblock(name))[0], "dp")
    return sch.mesh.axis_size("dp")


@pytest.mark.parametrize("root", [0, 1])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_reduce_and_broadcast(programs, passes, mesh, root, table):
    """The root receives the others' terms, and each other one the sum; every group of the other axis has its rows."""
    sch = Schedule(programs.block(5, 3, 9).func, mesh=mesh)
    _, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    groups = on_rows(sch, "mm_rf", "mm", "epi")
    sch.cache_write(sch.get_sblock("epi"), 0, "global")
    sch.split_collective(reduce, root=root)
    program, shardings, steps = passes(sch)
    slab = 4 * -(-5 // groups) * 3
    assert table(program, steps)[1:3] == [
        ("mm", "reduce", "tp", (mesh["tp"] - 1) * slab, (root,), ["C_rf"], []),
        ("C_global", "broadcast", "tp", slab, (root,), ["C_global"], []),
    ]
    held = next(shardings[buffer] for buffer in shardings if program.names[buffer] == "C_global")
    assert held.root == ("tp", root)
    assert held.layout.O["tp"] == root and "tp" not in {it.axis for it in held.layout.R}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_norm(programs, passes, mesh, table, moved):
    """The sums of squares are a small all-reduce; what is scaled is gathered."""
    sch = Schedule(programs.norm(4, 7, 9).func, mesh=mesh)
    _, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    groups = on_rows(sch, "mm_rf", "mm", "squares", "scale")
    if groups > 1:
        sch.cache_write(sch.get_sblock("scale"), 0, "global")
    _, gather = sch.split_collective(reduce, 1)
    sch.reorder_collective(gather, [sch.get_sblock("squares"), sch.get_sblock("scale")])
    program, _, steps = passes(sch)
    found = {row[1]: row[3:5] for row in table(program, steps) if row[2] == "tp"}
    scattered, gathered = (moved([stage], 7, 4 // groups, mesh["tp"]) for stage in ("RS", "AG"))
    sums = moved(["AR"], 4 // groups, 1, mesh["tp"])
    assert found == {"reduce-scatter": (scattered, (1,)), "all-reduce": (sums, ()), "all-gather": (gathered, (1,))}


@pytest.mark.parametrize("mesh", [Mesh({"tp": 2}), Mesh({"tp": 3}), Mesh({"dp": 2, "tp": 2})], ids=str)
@pytest.mark.parametrize("shape", [(4, 6, 3, 2), (5, 7, 3, 2)])
def test_all_to_all(programs, passes, shape, mesh, table):
    """Of its block of one dimension a device receives all but its block of the other."""
    sources, count, tokens, width = shape
    out = Layout.sharded((sources, count, width), mesh, {0: "tp"})
    sch = Schedule(programs.experts(*shape).func, mesh=mesh)
    for name, dim in (("dispatch", 0), ("mm", 1), ("combine", 0)):
        sch.shard(sch.get_loops(sch.get_sblock(name))[dim], "tp")
    sch.redistribute(sch.get_sblock("mm"), "D", "tp", 1)
    sch.redistribute(sch.get_sblock("combine"), "H", "tp", 0)
    program, _, steps = passes(sch, Y=out)
    size = mesh.axis_size("tp")
    assert [row for row in table(program, steps) if row[1] != "local"] == [
        (
            "D_global",
            "all-to-all",
            "tp",
            cut_otherwise(size, sources, count, tokens),
            (0, 1),
            ["D"],
            [],
        ),
        (
            "H_global",
            "all-to-all",
            "tp",
            cut_otherwise(size, count, sources, width),
            (1, 0),
            ["H"],
            [],
        ),
    ]


def test_all_to_all_between_pieces_of_another_axis(programs, passes, table):
    """Tokens are shared over dp before and after: half of the bytes in each group."""
    mesh = Mesh({"dp": 2, "tp": 2})
    sch = Schedule(programs.experts(4, 6, 4, 2).func, mesh=mesh)
    dispatch, mm = sch.get_sblock("dispatch"), sch.get_sblock("mm")
    sch.shard(sch.get_loops(dispatch)[0], "tp")
    sch.shard(sch.get_loops(dispatch)[3], "dp")
    sch.shard(sch.get_loops(mm)[1], "tp")
    partial, _ = sch.shard(sch.get_loops(mm)[4], "dp")
    sch.shard(sch.get_loops(sch.get_sblock("combine"))[1], "tp")
    sch.cache_write(sch.get_sblock("combine"), 0, "global")
    sch.redistribute(partial, "D", "tp", 1)
    program, _, steps = passes(sch)
    rows = [row[:5] for row in table(program, steps) if row[1] != "local"]
    assert rows == [
        ("D_global", "all-to-all", "tp", 4 * 4 * 6 * 4 // 2 // 4, (0, 1)),
        ("mm", "all-reduce", "dp", 4 * 4 * 3 * 2, ()),
        ("Y_global", "all-gather", "tp", 4 * 4 * 6 * 2 // 2, (1,)),
    ]


def test_copy_that_is_shared_where_nobody_reads_it_so(programs, passes, table):
    """Every expert needs all tokens, so that sharing the copy over them only says who sends what: an all-gather."""
    mesh = Mesh({"tp": 3})
    sch = Schedule(programs.experts(4, 6, 3, 2).func, mesh=mesh)
    sch.shard(sch.get_loops(sch.get_sblock("dispatch"))[0], "tp")
    sch.shard(sch.get_loops(sch.get_sblock("mm"))[1], "tp")
    sch.shard(sch.get_loops(sch.get_sblock("combine"))[1], "tp")
    sch.cache_write(sch.get_sblock("combine"), 0, "global")
    sch.redistribute(sch.get_sblock("mm"), "D", "tp", 2)
    program, _, steps = passes(sch)
    # Of 4 sources in pieces of 2 the third device has none, and receives all.
    assert table(program, steps)[1] == ("D_global", "all-gather", "tp", 4 * 4 * 6 * 3, (0,), [], ["D_global"])


@pytest.mark.parametrize("shift", [1, 2, -1, 4, 0, 3, -3])
def test_send(programs, passes, shift, table):
    """Every stage's micro-batch goes as far as the shift says; all the way round it goes nowhere."""
    mesh = Mesh({"pp": 3})
    sch = Schedule(programs.pipeline(3, 5, shift).func, mesh=mesh)
    for name in ("double", "add"):
        sch.shard(sch.get_loops(sch.get_sblock(name))[0], "pp")
    sch.send(sch.get_sblock("send"), "pp")
    program, _, steps = passes(sch, out=Layout.sharded((3, 5), mesh, {0: "pp"}))
    sent = ("send", "send", "pp", 4 * 5, (shift % 3,), ["C"], [])
    stays = ("send", "local", None, 0, (), [], [])
    assert table(program, steps)[1] == (sent if shift % 3 else stays)


def test_send_between_pieces_of_another_axis(programs, passes, table):
    mesh = Mesh({"pp": 2, "tp": 3})
    sch = Schedule(programs.pipeline(2, 5).func, mesh=mesh)
    for name in ("double", "add"):
        sch.shard(sch.get_loops(sch.get_sblock(name))[0], "pp")
    sch.send(sch.get_sblock("send"), "pp")
    for name in ("double", "send", "add"):
        sch.shard(sch.get_loops(sch.get_sblock(name))[2], "tp")
    program, _, steps = passes(sch, out=Layout.sharded((2, 5), mesh, {0: "pp", 1: "tp"}))
    assert table(program, steps)[1] == ("send", "send", "pp", 4 * 2, (1,), ["C"], [])


def test_send_and_its_reader_are_a_mesh_kernel(programs, passes, table):
    """It counts what the devices read from another, which is all of it."""
    mesh = Mesh({"pp": 3})
    sch = Schedule(programs.pipeline(3, 5).func, mesh=mesh)
    for name in ("double", "add"):
        sch.shard(sch.get_loops(sch.get_sblock(name))[0], "pp")
    sch.send(sch.get_sblock("send"), "pp")
    sch.fuse_collective([sch.get_sblock("send"), sch.get_sblock("add")])
    program, _, steps = passes(sch, out=Layout.sharded((3, 5), mesh, {0: "pp"}))
    assert table(program, steps)[1] == ("send_add", "mesh kernel", "pp", 4 * 5, (), ["C"], [])


def reading_peers(statement, stages=3):
    """The schedule of `out[s, i] = statement(C, s, i)`, where stage s alone has C[s]."""

    @T.prim_func(s_tir=True)
    def program(X: T.Buffer((stages, 4), "float32"), out: T.Buffer((stages, 4), "float32")):
        C = T.sblock_alloc_buffer((stages, 4))
        for s, i in T.grid(stages, 4):
            with T.sblock("c"):
                vs, vi = T.axis.remap("SS", [s, i])
                C[vs, vi] = X[vs, vi] * T.float32(2)
        for s, i in T.grid(stages, 4):
            with T.sblock("out"):
                vs, vi = T.axis.remap("SS", [s, i])
                out[vs, vi] = statement(C, vs, vi)

    sch = Schedule(program, mesh=Mesh({"pp": stages}))
    for name in ("c", "out"):
        sch.shard(sch.get_loops(sch.get_sblock(name))[0], "pp")
    return sch


PEERS = {  # what is read of whom, and by how many of three devices from another one
    "the mirrored one": (lambda C, s, i: C[2 - s, i], 2),
    "the first": (lambda C, s, i: C[0, i] * T.float32(3), 2),
    "the one before, if any": (lambda C, s, i: T.if_then_else(s > 0, C[s - 1, i], T.float32(0)), 2),
    "itself and the next": (lambda C, s, i: C[s, i] + C[(s + 1) % 3, i], 3),
    "the next, shifted": (lambda C, s, i: C[(s + 1) % 3, (i + 1) % 4], 3),
}


@pytest.mark.parametrize("name", PEERS)
def test_reader_of_one_peer_is_a_mesh_kernel(passes, name, table):
    statement, remote = PEERS[name]
    program, _, steps = passes(reading_peers(statement), out=Layout.sharded((3, 4), Mesh({"pp": 3}), {0: "pp"}))
    assert table(program, steps)[1] == ("out", "mesh kernel", "pp", 4 * 4, (), ["C"], [])
    assert sorted(steps[1].received) == [0] * (3 - remote) + [4 * 4] * remote


def test_reader_of_peers_by_place(passes):
    """Which peer it is depends on the element, so that it is no peer's slab and no collective."""
    sch = reading_peers(lambda C, s, i: C[(s + i) % 3, i])
    with pytest.raises(LowerError, match=r"'out' reads 'C' across 'pp', .* outside a collective"):
        passes(sch, out=Layout.sharded((3, 4), Mesh({"pp": 3}), {0: "pp"}))


# ---- What looks like a collective of the engine's and isn't ---------------------------------------------------------


@pytest.mark.parametrize("split", [None, 0, 1, "root"])
@pytest.mark.parametrize("what", ["in the middle", "transposed", "cast", "from five"])
def test_sums_over_devices(passes, what, split):
    """The engine takes the devices' terms from anywhere among the dimensions; what it can't do, a kernel does."""
    shape = (4, 2, 4) if what == "in the middle" else (2, 4, 4)
    dtype = "float16" if what == "cast" else "float32"
    first = T.float32(5 if what == "from five" else 0)
    terms = {
        "in the middle": lambda g, i, j, k: g[i, k, j],
        "transposed": lambda g, i, j, k: g[k, j, i],
        "cast": lambda g, i, j, k: T.Cast("float32", g[k, i, j]),
        "from five": lambda g, i, j, k: g[k, i, j],
    }
    term = terms[what]

    @T.prim_func(s_tir=True)
    def program(g: T.Buffer(shape, dtype), s: T.Buffer((4, 4), "float32")):
        for i, j, k in T.grid(4, 4, 2):
            with T.sblock("sum"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    s[vi, vj] = first
                s[vi, vj] = s[vi, vj] + term(g, vi, vj, vk)

    sch = Schedule(program, mesh=Mesh({"dp": 2}))
    block = sch.all_reduce(sch.get_loops(sch.get_sblock("sum"))[2], "dp")
    if split is not None:
        sch.split_collective(block, **({"root": 1} if split == "root" else {"dim": split}))
    kinds = {None: ["all-reduce"], "root": ["reduce", "broadcast"]}.get(split, ["reduce-scatter", "all-gather"])
    if what != "in the middle":
        kinds[0] = "mesh kernel"
    assert [step.kind for step in passes(sch)[2]] == kinds


def test_sum_over_more_than_the_devices(passes):
    """Each term is added three times over, which no collective does."""

    @T.prim_func(s_tir=True)
    def program(g: T.Buffer((2, 4), "float32"), s: T.Buffer((4,), "float32")):
        for i, k, t in T.grid(4, 2, 3):
            with T.sblock("sum"):
                vi, vk, _vt = T.axis.remap("SRR", [i, k, t])
                with T.init():
                    s[vi] = T.float32(0)
                s[vi] = s[vi] + g[vk, vi]

    sch = Schedule(program, mesh=Mesh({"dp": 2}))
    sch.all_reduce(sch.get_loops(sch.get_sblock("sum"))[1], "dp")
    assert [step.kind for step in passes(sch)[2]] == ["mesh kernel"]


@pytest.mark.parametrize(("rows", "masked"), [(6, 4), (4, 6), (6, 6)])
def test_copy_of_some_rows(passes, rows, masked):
    """Only a copy of everything is the engine's: it would overwrite the other rows."""

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((6,), "float32"), out: T.Buffer((6,), "float32")):
        B = T.sblock_alloc_buffer((6,))
        for i in range(6):
            with T.sblock("b"):
                vi = T.axis.spatial(6, i)
                B[vi] = A[vi] * T.float32(2)
        for i in range(6):
            with T.sblock("ones"):
                vi = T.axis.spatial(6, i)
                out[vi] = T.float32(1)
        for i in range(rows):
            with T.sblock("copy"):
                vi = T.axis.spatial(6, i)
                T.where(i < masked)
                out[vi] = B[vi]

    sch = Schedule(program, mesh=TP2)
    sch.shard(sch.get_loops(sch.get_sblock("b"))[0], "tp")
    assert passes(sch)[2][2].kind == ("all-gather" if rows == masked == 6 else "mesh kernel")


def test_fused_broadcast(programs, passes):
    """The kernel would look for the rows with the device that they would belong to, not with the one that has them."""
    sch = Schedule(programs.block(6, 4, 8).func, mesh=Mesh({"dp": 2, "tp": 2}))
    _, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    on_rows(sch, "mm_rf", "mm", "epi")
    epi = sch.get_sblock("epi")
    sch.cache_write(epi, 0, "global")
    _, broadcast = sch.split_collective(reduce, root=1)
    sch.fuse_collective([broadcast, epi])
    words = "'C_global_epi' reads 'C_global', which device 1 of 'tp' alone holds, and does more than broadcast it"
    with pytest.raises(LowerError, match=words):
        passes(sch)


def test_reader_of_what_one_device_holds(programs, passes):
    sch = Schedule(programs.block(6, 4, 8).func, mesh=Mesh({"tp": 2}))
    _, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    _, broadcast = sch.split_collective(reduce, root=1)
    sch.compute_inline(broadcast)
    with pytest.raises(LowerError, match=r"'epi' reads 'C_global' across 'tp', .*1@tp\), outside a collective"):
        passes(sch)


def test_sum_over_two_axes_at_once(passes):
    @T.prim_func(s_tir=True)
    def program(g: T.Buffer((2, 2, 4), "float32"), s: T.Buffer((4,), "float32")):
        for i, k, t in T.grid(4, 2, 2):
            with T.sblock("sum"):
                vi, vk, vt = T.axis.remap("SRR", [i, k, t])
                with T.init():
                    s[vi] = T.float32(0)
                s[vi] = s[vi] + g[vk, vt, vi]

    sch = Schedule(program, mesh=Mesh({"dp": 2, "tp": 2}))
    _, k, t = sch.get_loops(sch.get_sblock("sum"))
    sch.all_reduce(k, "dp")
    sch.all_reduce(t, "tp")
    with pytest.raises(LowerError, match=r"'g' leaves its device's piece of 2 dimensions \(dp, tp\)"):
        passes(sch)
