"""fuse_collective: a chain of stages becomes one nest, and what is no chain is refused."""

from tvm.script import tirx as T

from tvm_axe.layout import Mesh
from tvm_axe.schedule import Schedule


@T.prim_func(s_tir=True)
def fused_rows_uneven(
    A: T.Buffer((5, 8), "float32"),
    W: T.Buffer((8, 3), "float32"),
    bias: T.Buffer((3,), "float32"),
    residual: T.Buffer((5, 3), "float32"),
    out: T.Buffer((5, 3), "float32"),
):
    C_rf = T.sblock_alloc_buffer((2, 5, 3))
    C_global = T.sblock_alloc_buffer((5, 3))
    out_global = T.sblock_alloc_buffer((5, 3))
    for i, j in T.grid(5, 3):
        for k_0 in T.serial(2, annotations={"axe.bind": "tp"}):
            for k_1 in range(4):
                with T.sblock("mm_rf"):
                    vk_0, vi, vj, vk_1 = T.axis.remap("SSSR", [k_0, i, j, k_1])
                    with T.init():
                        C_rf[vk_0, vi, vj] = T.float32(0.0)
                    C_rf[vk_0, vi, vj] = C_rf[vk_0, vi, vj] + A[vi, vk_0 * 4 + vk_1] * W[vk_0 * 4 + vk_1, vj]
    for i_0 in T.serial(2, annotations={"axe.bind": "tp"}):
        for i_1 in range(3):
            for k_0 in T.serial(2, annotations={"axe.bind": "tp"}):
                for j in range(3):
                    with T.sblock("mm"):
                        vk_0 = T.axis.reduce(2, k_0)
                        vi = T.axis.spatial(5, i_0 * 3 + i_1)
                        vj = T.axis.spatial(3, j)
                        T.where(i_0 * 3 + i_1 < 5)
                        with T.init():
                            C_global[vi, vj] = T.float32(0.0)
                        C_global[vi, vj] = C_global[vi, vj] + C_rf[vk_0, vi, vj]
            for ax0 in range(3):
                with T.sblock("epi"):
                    vi = T.axis.spatial(5, i_0 * 3 + i_1)
                    vj = T.axis.spatial(3, ax0)
                    T.where(i_0 * 3 + i_1 < 5)
                    out_global[vi, vj] = T.max(C_global[vi, vj] + bias[vj], T.float32(0.0)) + residual[vi, vj]
            for ax0 in range(3):
                with T.sblock("out_global"):
                    v0 = T.axis.spatial(5, i_0 * 3 + i_1)
                    v1 = T.axis.spatial(3, ax0)
                    T.where(i_0 * 3 + i_1 < 5)
                    out[v0, v1] = out_global[v0, v1]


@T.prim_func(s_tir=True)
def fused_columns_even(
    A: T.Buffer((4, 8), "float32"),
    W: T.Buffer((8, 2), "float32"),
    bias: T.Buffer((2,), "float32"),
    residual: T.Buffer((4, 2), "float32"),
    out: T.Buffer((4, 2), "float32"),
):
    C_rf = T.sblock_alloc_buffer((2, 4, 2))
    C_global = T.sblock_alloc_buffer((4, 2))
    out_global = T.sblock_alloc_buffer((4, 2))
    for i, j in T.grid(4, 2):
        for k_0 in T.serial(2, annotations={"axe.bind": "tp"}):
            for k_1 in range(4):
                with T.sblock("mm_rf"):
                    vk_0, vi, vj, vk_1 = T.axis.remap("SSSR", [k_0, i, j, k_1])
                    with T.init():
                        C_rf[vk_0, vi, vj] = T.float32(0.0)
                    C_rf[vk_0, vi, vj] = C_rf[vk_0, vi, vj] + A[vi, vk_0 * 4 + vk_1] * W[vk_0 * 4 + vk_1, vj]
    for j_0 in T.serial(2, annotations={"axe.bind": "tp"}):
        for i in range(4):
            for k_0 in T.serial(2, annotations={"axe.bind": "tp"}):
                for j_1 in range(1):
                    with T.sblock("mm"):
                        vk_0, vi = T.axis.remap("RS", [k_0, i])
                        vj = T.axis.spatial(2, j_0 + j_1)
                        with T.init():
                            C_global[vi, vj] = T.float32(0.0)
                        C_global[vi, vj] = C_global[vi, vj] + C_rf[vk_0, vi, vj]
            with T.sblock("epi"):
                vi, vj = T.axis.remap("SS", [i, j_0])
                out_global[vi, vj] = T.max(C_global[vi, vj] + bias[vj], T.float32(0.0)) + residual[vi, vj]
            with T.sblock("out_global"):
                v0, v1 = T.axis.remap("SS", [i, j_0])
                out[v0, v1] = out_global[v0, v1]


@T.prim_func(s_tir=True)
def diamond(A: T.Buffer((4, 8), "float32"), B: T.Buffer((4,), "float32"), out: T.Buffer((4,), "float32")):
    """`join` reads `left` and `right`, which read C, and `side`, which doesn't."""
    C = T.sblock_alloc_buffer((4,))
    L = T.sblock_alloc_buffer((4,))
    R = T.sblock_alloc_buffer((4,))
    S = T.sblock_alloc_buffer((4,))
    for i, k in T.grid(4, 8):
        with T.sblock("sum"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                C[vi] = T.float32(0)
            C[vi] = C[vi] + A[vi, vk]
    for i in range(4):
        with T.sblock("left"):
            vi = T.axis.spatial(4, i)
            L[vi] = C[vi] * T.float32(2)
    for i in range(4):
        with T.sblock("right"):
            vi = T.axis.spatial(4, i)
            R[vi] = C[vi] * T.float32(3)
    for i in range(4):
        with T.sblock("side"):
            vi = T.axis.spatial(4, i)
            S[vi] = B[vi] * T.float32(5)
    for i in range(4):
        with T.sblock("join"):
            vi = T.axis.spatial(4, i)
            out[vi] = L[vi] + R[vi] + S[vi]


def scattered(schedule, m, n, k, dim=0):
    """(schedule, the chain to fuse)."""
    sch = schedule(m, n, k)
    _, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    scatter, gather = sch.split_collective(reduce, dim)
    epi = sch.get_sblock("epi")
    (gather,) = sch.reorder_collective(gather, [epi])
    return sch, [scatter, epi, gather]


def reordered_diamond():
    sch = Schedule(diamond, mesh=Mesh({"tp": 2}))
    _, reduce = sch.shard(sch.get_loops(sch.get_sblock("sum"))[1], "tp")
    scatter, gather = sch.split_collective(reduce)
    blocks = {name: sch.get_sblock(name) for name in ("left", "right", "join")}
    (gather,) = sch.reorder_collective(gather, list(blocks.values()))
    return sch, {"sum": scatter, **blocks, "gather": gather}


def test_rows_that_do_not_divide(schedule, is_now):
    sch, chain = scattered(schedule, 5, 3, 8)
    device = sch.fuse_collective(chain)
    is_now(sch, fused_rows_uneven)
    assert sch.get(device).annotations["axe.bind"] == "tp"
    assert all(sch.get(sch.get_loops(block)[0]).same_as(sch.get(device)) for block in chain)


def test_columns(schedule, is_now):
    sch, chain = scattered(schedule, 4, 2, 8, dim=1)
    sch.fuse_collective(chain)
    is_now(sch, fused_columns_even)


def test_part_of_the_chain(schedule):
    sch, (scatter, epi, gather) = scattered(schedule, 4, 2, 8)
    sch.fuse_collective([scatter, epi])
    nests = [sch.get(sch.get_loops(block)[0]) for block in (scatter, epi, gather)]
    assert nests[0].same_as(nests[1]) and not nests[0].same_as(nests[2])


def test_one_block_is_no_chain(schedule, refused):
    sch, chain = scattered(schedule, 4, 2, 8)
    refused(sch, sch.fuse_collective, chain[:1], words=("at least two blocks", "got 1"))
    refused(sch, sch.fuse_collective, [], words=("at least two blocks", "got 0"))


def test_first_block_unbound(schedule, refused):
    sch, (_, epi, gather) = scattered(schedule, 4, 2, 8)
    words = ("'out_global' is not bound to a mesh axis by a data-parallel loop", "such as the reduce-scatter")
    refused(sch, sch.fuse_collective, [gather, epi], words=words)


def test_block_that_does_not_follow(schedule, refused):
    sch, (scatter, epi, gather) = scattered(schedule, 4, 2, 8)
    words = ("'out_global' reads nothing that mm write", "follows from an earlier one")
    refused(sch, sch.fuse_collective, [scatter, gather], words=words)
    refused(sch, sch.fuse_collective, [scatter, gather, epi], words=words)


@T.prim_func(s_tir=True)
def norm(g: T.Buffer((2, 8), "float32"), square: T.Buffer((1,), "float32"), last: T.Buffer((8,), "float32")):
    total, both = T.sblock_alloc_buffer((8,), "float32"), T.sblock_alloc_buffer((1,), "float32")
    for i, k in T.grid(8, 2):
        with T.sblock("sum"):
            v, r = T.axis.remap("SR", [i, k])
            with T.init():
                total[v] = T.float32(0)
            total[v] = total[v] + g[r, v]
    for i, k in T.grid(1, 8):
        with T.sblock("square"):
            v, r = T.axis.remap("SR", [i, k])
            with T.init():
                square[v] = T.float32(0)
            square[v] = square[v] + total[r] * total[r]
    for i, k in T.grid(1, 2):
        with T.sblock("both"):
            v, r = T.axis.remap("SR", [i, k])
            with T.init():
                both[v] = T.float32(0)
            both[v] = both[v] + g[r, 0]
    for i in range(8):
        with T.sblock("last"):
            v = T.axis.spatial(8, i)
            last[v] = total[v] * both[0]


def test_what_a_chain_lacks(refused):
    """The block that is named reads partials of the chain's; a sum lies between, which nobody can inline."""
    sch = Schedule(norm, mesh=Mesh({"dp": 2}))
    scatter, gather = sch.split_collective(sch.all_reduce("sum", "k", "dp"))
    square, last = sch.get_sblock("square"), sch.get_sblock("last")
    sch.reorder_collective(gather, [square, last])
    words = ("'square' reads nothing that sum write", "'square_rf' does, and 'square' reads it: name it too")
    refused(sch, sch.fuse_collective, [scatter, square], words=words)
    words = ("block 'both' lies between 'sum' and 'last'", "compute it in front of the chain")
    refused(sch, sch.fuse_collective, [scatter, last], words=words)


def test_block_named_twice(schedule, refused):
    sch, (scatter, epi, _) = scattered(schedule, 4, 2, 8)
    refused(sch, sch.fuse_collective, [scatter, epi, epi], words=("'epi' is named twice",))


def test_cycle(refused):
    """`right` reads the chain and is read by it, so it can come neither before nor after the kernel."""
    sch, blocks = reordered_diamond()
    sch.compute_inline(sch.get_sblock("side"))
    chain = [blocks["sum"], blocks["left"], blocks["join"]]
    words = ("a cycle: block 'right' lies between 'sum' and 'join'", "fuse it too")
    refused(sch, sch.fuse_collective, chain, words=words)
    sch.fuse_collective([blocks[name] for name in ("sum", "left", "right", "join", "gather")])


def test_producer_behind_the_nest(refused):
    sch, blocks = reordered_diamond()
    chain = [blocks[name] for name in ("sum", "left", "right", "join")]
    refused(sch, sch.fuse_collective, chain, words=("block 'side' lies between 'sum' and 'join'", "compute_inline"))


def test_other_axis(schedule, refused):
    sch = Schedule(schedule().mod, mesh=Mesh({"dp": 2, "tp": 2}))
    _, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    scatter, gather = sch.split_collective(reduce)
    sch.compute_inline(gather)
    epi = sch.get_sblock("epi")
    sch.shard(sch.get_loops(epi)[0], "dp")
    words = ("'epi' is bound to dp, the nest to tp", "the same axes")
    refused(sch, sch.fuse_collective, [scatter, epi], words=words)


@T.prim_func(s_tir=True)
def fused_on_two_axes(
    A: T.Buffer((4, 8), "float32"),
    W: T.Buffer((8, 6), "float32"),
    bias: T.Buffer((6,), "float32"),
    residual: T.Buffer((4, 6), "float32"),
    out: T.Buffer((4, 6), "float32"),
):
    C_rf = T.sblock_alloc_buffer((2, 4, 6))
    C_global = T.sblock_alloc_buffer((4, 6))
    out_global = T.sblock_alloc_buffer((4, 6))
    for j_0 in T.serial(2, annotations={"axe.bind": "dp"}):
        for i, j_1 in T.grid(4, 3):
            for k_0 in T.serial(2, annotations={"axe.bind": "tp"}):
                for k_1 in range(4):
                    with T.sblock("mm_rf"):
                        vk_0, vi = T.axis.remap("SS", [k_0, i])
                        vj = T.axis.spatial(6, j_0 * 3 + j_1)
                        vk_1 = T.axis.reduce(4, k_1)
                        with T.init():
                            C_rf[vk_0, vi, vj] = T.float32(0.0)
                        C_rf[vk_0, vi, vj] = C_rf[vk_0, vi, vj] + A[vi, vk_0 * 4 + vk_1] * W[vk_0 * 4 + vk_1, vj]
    for i_0 in T.serial(2, annotations={"axe.bind": "tp"}):
        for j_0 in T.serial(2, annotations={"axe.bind": "dp"}):
            for i_1 in range(2):
                for k_0 in T.serial(2, annotations={"axe.bind": "tp"}):
                    for j_1 in range(3):
                        with T.sblock("mm"):
                            vk_0 = T.axis.reduce(2, k_0)
                            vi = T.axis.spatial(4, i_0 * 2 + i_1)
                            vj = T.axis.spatial(6, j_0 * 3 + j_1)
                            with T.init():
                                C_global[vi, vj] = T.float32(0.0)
                            C_global[vi, vj] = C_global[vi, vj] + C_rf[vk_0, vi, vj]
                for ax0 in range(3):
                    with T.sblock("epi"):
                        vi = T.axis.spatial(4, i_0 * 2 + i_1)
                        vj = T.axis.spatial(6, j_0 * 3 + ax0)
                        out_global[vi, vj] = T.max(C_global[vi, vj] + bias[vj], T.float32(0.0)) + residual[vi, vj]
    for j_0 in T.serial(2, annotations={"axe.bind": "dp"}):
        for ax0, j_1 in T.grid(4, 3):
            with T.sblock("out_global"):
                v0 = T.axis.spatial(4, ax0)
                v1 = T.axis.spatial(6, j_0 * 3 + j_1)
                out[v0, v1] = out_global[v0, v1]


def on_two_axes(schedule):
    """Columns over dp, the reduction over tp, scattered in rows: (schedule, the chain to fuse)."""
    sch = Schedule(schedule(4, 6, 8).mod, mesh=Mesh({"dp": 2, "tp": 2}))
    partial, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    epi = sch.get_sblock("epi")
    for block in (partial, reduce, epi):
        device, _ = sch.shard(sch.get_loops(block)[1], "dp")
        sch.reorder(device, sch.get_loops(block)[0])
    scatter, gather = sch.split_collective(reduce)
    (gather,) = sch.reorder_collective(gather, [epi])
    return sch, [scatter, epi, gather]


def test_two_axes(schedule, is_now):
    sch, (scatter, epi, _) = on_two_axes(schedule)
    device = sch.fuse_collective([scatter, epi])
    is_now(sch, fused_on_two_axes)
    assert sch.get(device).annotations["axe.bind"] == "tp"


def test_axes_in_another_order(schedule):
    """The nest is the first block's, whatever the order of the others' device loops."""
    sch, (scatter, epi, gather) = on_two_axes(schedule)
    loops = sch.get_loops(epi)
    sch.reorder(loops[1], loops[0])
    sch.fuse_collective([scatter, epi, gather])
    nests = [sch.get(sch.get_loops(block)[0]) for block in (scatter, epi, gather)]
    assert all(nest.same_as(nests[0]) for nest in nests)


def norm_on_slices(programs, n):
    """The partial sums of squares over slices of n columns, behind a reduce-scatter."""
    sch = Schedule(programs.norm(4, n, 8).func, mesh=Mesh({"tp": 2}))
    _, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    scatter, gather = sch.split_collective(reduce, 1)
    sch.reorder_collective(gather, [sch.get_sblock("squares"), sch.get_sblock("scale")])
    return sch, [scatter, sch.get_sblock("squares_rf")]


def test_partial_sums_of_even_slices(programs, alone):
    sch, chain = norm_on_slices(programs, 6)
    sch.fuse_collective(chain)
    alone(sch.mod["main"], programs.norm(4, 6, 8).reference)


def test_partial_sums_of_uneven_slices(programs, refused):
    """Upstream would move the sum without its mask, and add what is beyond the slice or leave out what is in it."""
    sch, chain = norm_on_slices(programs, 5)
    words = ("'squares_rf' is masked (j_0 * 3 + j_1 < 5)", "beyond its iterators' domains", "pieces that divide")
    refused(sch, sch.fuse_collective, chain, words=words)


def test_masked_by_the_program(refused):
    """Upstream would move it without the mask, too."""

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((6,), "float32"), B: T.Buffer((6,), "float32"), C: T.Buffer((6,), "float32")):
        for i in range(6):
            with T.sblock("b"):
                vi = T.axis.spatial(6, i)
                B[vi] = A[vi] * T.float32(2)
        for i in range(6):
            with T.sblock("c"):
                vi = T.axis.spatial(6, i)
                T.where(i < 5)
                C[vi] = B[vi] + T.float32(1)

    sch = Schedule(program, mesh=Mesh({"tp": 2}))
    b, c = sch.get_sblock("b"), sch.get_sblock("c")
    sch.shard(sch.get_loops(b)[0], "tp")
    refused(sch, sch.fuse_collective, [b, c], words=("'c' is masked (i < 5)",))


def test_send_and_its_reader(programs, is_now):
    """The receiver computes with what it reads from its peer."""

    @T.prim_func(s_tir=True)
    def golden(X: T.Buffer((2, 3), "float32"), out: T.Buffer((2, 3), "float32")):
        C = T.sblock_alloc_buffer((2, 3))
        Z = T.sblock_alloc_buffer((2, 3))
        for s in T.serial(2, annotations={"axe.bind": "pp"}):
            for s_1, i in T.grid(1, 3):
                with T.sblock("double"):
                    vs = T.axis.spatial(2, s + s_1)
                    vi = T.axis.spatial(3, i)
                    C[vs, vi] = X[vs, vi] * T.float32(2)
        for s in T.serial(2, annotations={"axe.bind": "pp"}):
            for s_1 in range(1):
                for i in range(3):
                    with T.sblock("send"):
                        vs = T.axis.spatial(2, s + s_1)
                        vi = T.axis.spatial(3, i)
                        Z[vs, vi] = C[(vs - 1) % 2, vi]
                for ax0 in range(3):
                    with T.sblock("add"):
                        vs, vi = T.axis.remap("SS", [s, ax0])
                        out[vs, vi] = Z[vs, vi] + X[vs, vi]

    sch = Schedule(programs.pipeline(2, 3).func, mesh=Mesh({"pp": 2}))
    double, send, add = (sch.get_sblock(name) for name in ("double", "send", "add"))
    for block in (double, add):
        sch.shard(sch.get_loops(block)[0], "pp")
    sch.send(send, "pp")
    sch.fuse_collective([send, add])
    is_now(sch, golden)


def test_block_of_another_schedule(schedule, refused):
    sch, (scatter, _, _) = scattered(schedule, 4, 2, 8)
    _, (_, foreign, _) = scattered(schedule, 4, 2, 8)
    refused(sch, sch.fuse_collective, [scatter, foreign], words=("fuse_collective: the block given is not of this",))


def test_fused_already(schedule, refused):
    """Upstream's refusal comes with the block's name."""
    sch, chain = scattered(schedule, 4, 2, 8)
    sch.fuse_collective(chain)
    refused(sch, sch.fuse_collective, chain, words=("fuse_collective: block 'epi':",))
