"""Every primitive on meshes of 1, 2, 3, 4 and 2x2 devices: right after NaNs, and a trace that replays without it."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import tvm
from tvm import s_tir
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.layout import Layout, Mesh
from tvm_axe.schedule import Schedule

ONE_AXIS = [1, 2, 3, 4]
TWO_AXES = [("other", 2, 2), ("other", 2, 3), (2, "other", 2)]


def mesh_of(axis: str, sizes) -> Mesh:
    """A mesh of `axis` alone, or with another one before or behind it."""
    if isinstance(sizes, int):
        return Mesh({axis: sizes})
    if sizes[0] == "other":
        return Mesh({"other": sizes[1], axis: sizes[2]})
    return Mesh({axis: sizes[0], "other": sizes[2]})


class Case(NamedTuple):
    """A way to communicate: the axis, the program on a mesh of so many devices, and its schedule."""

    axis: str
    program: Callable
    schedule: Callable[[Schedule], object]
    declared: Callable = lambda mesh: {}


def blocks(sch: Schedule, *names: str) -> list:
    return [sch.get_sblock(name) for name in names]


def share(sch: Schedule, axis: str, *dims: tuple[str, int]) -> None:
    """Share a loop of each of the blocks over `axis`."""
    for name, dim in dims:
        sch.shard(sch.get_loops(sch.get_sblock(name))[dim], axis)


def product(sch: Schedule) -> list:
    """The all-reduce of the matmul's partial products."""
    return sch.shard(sch.get_loops(sch.get_sblock("mm"))[-1], "tp")[1]


def gradients(sch: Schedule):
    return sch.all_reduce(sch.get_loops(sch.get_sblock("sum"))[-1], "dp")


def on_slices(sch: Schedule, dim: int, keep: int, fuse: bool) -> None:
    """Gradients scattered along `dim`; `keep` of the two results stay slices."""
    consumers = blocks(sch, "state", "step")
    scatter, gather = sch.split_collective(gradients(sch), dim)
    gathers = sch.reorder_collective(gather, consumers)
    kept = [sch.as_slice(gather) for gather in gathers[:keep]]
    copies = [block for block in kept if "global" in sch.get(block).name_hint]  # the others compute what they keep
    if fuse:
        sch.fuse_collective([scatter, *consumers, *copies, *gathers[keep:]])


def norm(sch: Schedule, dim: int) -> None:
    _, gather = sch.split_collective(product(sch), dim)
    sch.reorder_collective(gather, blocks(sch, "squares", "scale"))


def pipe(sch: Schedule, fuse: bool) -> None:
    share(sch, "pp", ("double", 0), ("add", 0))
    sch.send(sch.get_sblock("send"), "pp")
    if fuse:
        sch.fuse_collective(blocks(sch, "send", "add"))


def dispatch(sch: Schedule, dims: tuple) -> None:
    """Sources to experts and back: the dimension on which each copy is sharded, or None."""
    share(sch, "ep", ("dispatch", 0), ("mm", 1), ("combine", 0))
    sch.redistribute(sch.get_sblock("mm"), "D", "ep", dims[0])
    sch.redistribute(sch.get_sblock("combine"), "H", "ep", dims[1])


def leading(name: str, shape: tuple, axis: str) -> Callable:
    """A parameter declared sharded on its first dimension."""
    return lambda mesh: {name: Layout.sharded([mesh[axis] if n is None else n for n in shape], mesh, {0: axis})}


EVEN, UNEVEN = (12, 24, 12), (7, 5, 11)
CASES = {
    "all-reduce": Case("dp", lambda p, n: p.update(n, 7, 5), gradients),
    "all-reduce, f16": Case("dp", lambda p, n: p.update(n, 7, 5, "float16"), gradients),
    "reduce-scatter, f16": Case("dp", lambda p, n: p.update(n, 7, 5, "float16"), lambda s: on_slices(s, 0, 0, False)),
    "reduce, f16": Case(
        "dp", lambda p, n: p.update(n, 7, 5, "float16"), lambda s: s.split_collective(gradients(s), root=0)
    ),
    "reduce and broadcast": Case(
        "dp", lambda p, n: p.update(n, 7, 5), lambda s: s.split_collective(gradients(s), root=0)
    ),
    "reduce and broadcast, last": Case(
        "tp", lambda p, n: p.block(*UNEVEN), lambda s: s.split_collective(product(s), root=s.mesh["tp"] - 1)
    ),
    "columns of gradients": Case("dp", lambda p, n: p.update(n, 7, 5), lambda s: on_slices(s, 1, 0, False)),
    "a state stays": Case("dp", lambda p, n: p.update(n, 7, 5), lambda s: on_slices(s, 0, 1, False)),
    "a state stays, columns": Case("dp", lambda p, n: p.update(n, 8, 12), lambda s: on_slices(s, 1, 1, False)),
    "both stay": Case("dp", lambda p, n: p.update(n, 7, 5), lambda s: on_slices(s, 0, 2, False)),
    "fused, a state stays": Case("dp", lambda p, n: p.update(n, 7, 5), lambda s: on_slices(s, 0, 1, True)),
    "fused columns, a state stays": Case("dp", lambda p, n: p.update(n, 8, 9), lambda s: on_slices(s, 1, 1, True)),
    "fused, both stay": Case("dp", lambda p, n: p.update(n, 7, 5), lambda s: on_slices(s, 0, 2, True)),
    "norm of rows": Case("tp", lambda p, n: p.norm(*UNEVEN[:2], 12), lambda s: norm(s, 0)),
    "norm across slices": Case("tp", lambda p, n: p.norm(7, 10, 12), lambda s: norm(s, 1)),
    "norm across even slices": Case("tp", lambda p, n: p.norm(*EVEN), lambda s: norm(s, 1)),
    "send": Case("pp", lambda p, n: p.pipeline(n, 5), lambda s: pipe(s, False), leading("out", (None, 5), "pp")),
    "send back": Case(
        "pp", lambda p, n: p.pipeline(n, 5, -1), lambda s: pipe(s, False), leading("out", (None, 5), "pp")
    ),
    "send two on": Case(
        "pp", lambda p, n: p.pipeline(n, 5, 2), lambda s: pipe(s, False), leading("out", (None, 5), "pp")
    ),
    "send nowhere": Case(
        "pp", lambda p, n: p.pipeline(n, 5, 0), lambda s: pipe(s, False), leading("out", (None, 5), "pp")
    ),
    "send, fused": Case("pp", lambda p, n: p.pipeline(n, 5), lambda s: pipe(s, True), leading("out", (None, 5), "pp")),
    "all-to-all": Case(
        "ep", lambda p, n: p.experts(4, 12, 3, 5), lambda s: dispatch(s, (1, 0)), leading("Y", (4, 12, 5), "ep")
    ),
    "all-to-all, uneven": Case(
        "ep", lambda p, n: p.experts(5, 7, 3, 2), lambda s: dispatch(s, (1, 0)), leading("Y", (5, 7, 2), "ep")
    ),
    "all-to-all, fewer than devices": Case(
        "ep", lambda p, n: p.experts(2, 3, 3, 2), lambda s: dispatch(s, (1, 0)), leading("Y", (2, 3, 2), "ep")
    ),
    "gathered experts": Case(
        "ep", lambda p, n: p.experts(5, 7, 3, 2), lambda s: dispatch(s, (None, None)), leading("Y", (5, 7, 2), "ep")
    ),
    "copy that nobody reads so": Case(
        "ep", lambda p, n: p.experts(5, 7, 3, 2), lambda s: dispatch(s, (2, 0)), leading("Y", (5, 7, 2), "ep")
    ),
}
ON_MESHES = [(name, sizes) for name in CASES for sizes in (*ONE_AXIS, TWO_AXES[len(name) % len(TWO_AXES)])]


def replays(sch: Schedule, func: tvm.tirx.PrimFunc) -> None:
    """Its trace, on a schedule that knows nothing of meshes."""
    plain = s_tir.Schedule(func)
    sch.trace.apply_to_schedule(plain, remove_postproc=False)
    tvm.ir.assert_structural_equal(plain.mod, sch.mod)


@pytest.mark.parametrize(("name", "sizes"), ON_MESHES, ids=str)
def test_primitive(programs, compiled, judge, name, sizes):
    case = CASES[name]
    mesh = mesh_of(case.axis, sizes)
    program = case.program(programs, mesh[case.axis])
    func = axe.with_layouts(program.func, case.declared(mesh))
    sch = Schedule(func, mesh=mesh)
    case.schedule(sch)
    replays(sch, func)
    judge(compiled(sch), sch.mod["main"], program.reference, 2e-3 if "f16" in name else 1e-5)


# ---- Both axes of a mesh -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "mesh", [Mesh({"dp": 2, "tp": 2}), Mesh({"tp": 2, "dp": 2}), Mesh({"tp": 3, "dp": 2})], ids=str
)
def test_two_axes_at_once(programs, compiled, judge, mesh, dim, fuse):
    """One dimension over dp, the reduction over tp, scattered along the other dimension; uneven in both."""
    program = programs.block(*UNEVEN)
    sch = Schedule(axe.with_layouts(program.func, {"out": Layout.sharded((7, 5), mesh, {1 - dim: "dp"})}), mesh=mesh)
    partial, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    epi = sch.get_sblock("epi")
    for block in (partial, reduce, epi):
        sch.shard(sch.get_loops(block)[1 - dim], "dp")
    scatter, gather = sch.split_collective(reduce, dim)
    (gather,) = sch.reorder_collective(gather, [epi])
    if fuse:
        sch.fuse_collective([scatter, epi, gather])
    replays(sch, axe.with_layouts(program.func, {"out": Layout.sharded((7, 5), mesh, {1 - dim: "dp"})}))
    judge(compiled(sch), sch.mod["main"], program.reference)


@pytest.mark.parametrize("root", [None, 1])
def test_norm_of_rows_that_another_axis_shares(programs, compiled, judge, root):
    """Every group of tp sums its own rows; gathered over tp, then over dp."""
    mesh = Mesh({"dp": 2, "tp": 2})
    program = programs.norm(6, 7, 9)
    sch = Schedule(program.func, mesh=mesh)
    partial, reduce = sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")
    consumers = blocks(sch, "squares", "scale")
    for block in (partial, reduce, *consumers):
        sch.shard(sch.get_loops(block)[0], "dp")
    sch.cache_write(consumers[-1], 0, "global")
    _, gather = sch.split_collective(reduce, 1, root)
    if root is None:
        sch.reorder_collective(gather, consumers)
    judge(compiled(sch), sch.mod["main"], program.reference)


def test_slices_that_are_sent(programs, compiled, judge):
    """RS-P2P-C-AG on a mesh of two pipeline stages with two devices each."""

    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((2, 5, 7), "float32"), W: T.Buffer((2, 7, 3), "float32"), out: T.Buffer((2, 5, 3), "float32")):
        C = T.sblock_alloc_buffer((2, 5, 3))
        Z = T.sblock_alloc_buffer((2, 5, 3))
        for s, i, j, k in T.grid(2, 5, 3, 7):
            with T.sblock("mm"):
                vs, vi, vj, vk = T.axis.remap("SSSR", [s, i, j, k])
                with T.init():
                    C[vs, vi, vj] = T.float32(0)
                C[vs, vi, vj] = C[vs, vi, vj] + A[vs, vi, vk] * W[vs, vk, vj]
        for s, i, j in T.grid(2, 5, 3):
            with T.sblock("send"):
                vs, vi, vj = T.axis.remap("SSS", [s, i, j])
                Z[vs, vi, vj] = C[(vs + 1) % 2, vi, vj]
        for s, i, j in T.grid(2, 5, 3):
            with T.sblock("use"):
                vs, vi, vj = T.axis.remap("SSS", [s, i, j])
                out[vs, vi, vj] = T.max(Z[vs, vi, vj], T.float32(0))

    mesh = Mesh({"pp": 2, "tp": 2})
    sch = Schedule(axe.with_layouts(func, {"out": Layout.sharded((2, 5, 3), mesh, {0: "pp"})}), mesh=mesh)
    mm, send, use = blocks(sch, "mm", "send", "use")
    partial, reduce = sch.shard(sch.get_loops(mm)[3], "tp")
    for block in (partial, reduce, use):
        sch.shard(sch.get_loops(block)[0], "pp")
    sch.send(send, "pp")
    _, gather = sch.split_collective(reduce, 1)
    sch.reorder_collective(gather, [send, use])
    sch.fuse_collective([send, use])
    exe = compiled(sch)
    assert [stage.kind for stage in exe.stages] == ["local", "reduce-scatter", "mesh kernel", "all-gather"]
    judge(exe, sch.mod["main"], lambda A, W: (np.maximum((A @ W)[::-1], 0),))


# ---- What looks like a collective and isn't, or is one in disguise ---------------------------------------------------


@pytest.mark.parametrize("rows", [3, 6])
def test_copy_of_some_rows_leaves_the_others(compiled, judge, rows):
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((6,), "float32"), out: T.Buffer((6,), "float32")):
        B = T.sblock_alloc_buffer((6,))
        for i in range(6):
            with T.sblock("double"):
                vi = T.axis.spatial(6, i)
                B[vi] = A[vi] * T.float32(2)
        for i in range(6):
            with T.sblock("ones"):
                vi = T.axis.spatial(6, i)
                out[vi] = T.float32(1)
        for i in range(rows):
            with T.sblock("copy"):
                vi = T.axis.spatial(6, i)
                T.where(i < 4)
                out[vi] = B[vi]

    sch = Schedule(func, mesh=Mesh({"tp": 2}))
    share(sch, "tp", ("double", 0))
    judge(compiled(sch), sch.mod["main"], lambda A: (np.where(np.arange(6) < min(rows, 4), 2 * A, 1),))


def test_terms_that_are_added_three_times_over(compiled, judge):
    @T.prim_func(s_tir=True)
    def func(g: T.Buffer((2, 5), "float32"), s: T.Buffer((5,), "float32")):
        for i, k, t in T.grid(5, 2, 3):
            with T.sblock("sum"):
                vi, vk, _vt = T.axis.remap("SRR", [i, k, t])
                with T.init():
                    s[vi] = T.float32(0)
                s[vi] = s[vi] + g[vk, vi]

    sch = Schedule(func, mesh=Mesh({"dp": 2}))
    sch.all_reduce(sch.get_loops(sch.get_sblock("sum"))[1], "dp")
    judge(compiled(sch), sch.mod["main"], lambda g: (3 * g.sum(axis=0),))


PEERS = {
    "the mirrored one": (lambda C, s, i, n: C[n - 1 - s, i], lambda c: c[::-1]),
    "the first": (lambda C, s, i, n: C[0, i] * T.float32(3), lambda c: 3 * np.repeat(c[:1], len(c), 0)),
    "the one before": (lambda C, s, i, n: C[T.max(s - 1, 0), i], lambda c: np.concatenate([c[:1], c[:-1]])),
    "itself and the next": (lambda C, s, i, n: C[s, i] + C[(s + 1) % n, i], lambda c: c + np.roll(c, -1, 0)),
    "the next, shifted": (lambda C, s, i, n: C[(s + 1) % n, (i + 1) % 5], lambda c: np.roll(c, (-1, -1), (0, 1))),
}


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", PEERS)
def test_reader_of_one_peer(compiled, judge, name, stages):
    statement, reference = PEERS[name]

    @T.prim_func(s_tir=True)
    def func(X: T.Buffer((stages, 5), "float32"), out: T.Buffer((stages, 5), "float32")):
        C = T.sblock_alloc_buffer((stages, 5))
        for s, i in T.grid(stages, 5):
            with T.sblock("double"):
                vs, vi = T.axis.remap("SS", [s, i])
                C[vs, vi] = X[vs, vi] * T.float32(2)
        for s, i in T.grid(stages, 5):
            with T.sblock("read"):
                vs, vi = T.axis.remap("SS", [s, i])
                out[vs, vi] = statement(C, vs, vi, stages)

    mesh = Mesh({"pp": stages})
    sch = Schedule(axe.with_layouts(func, {"out": Layout.sharded((stages, 5), mesh, {0: "pp"})}), mesh=mesh)
    share(sch, "pp", ("double", 0), ("read", 0))
    judge(compiled(sch), sch.mod["main"], lambda X: (reference(2 * X),))


@pytest.mark.parametrize("devices", [2, 3])
def test_output_that_is_left_on_another_dimension(programs, compiled, judge, devices):
    """Rows are computed, columns declared: the copy between them is an all-to-all."""
    program, mesh = programs.block(*UNEVEN), Mesh({"tp": devices})
    sch = Schedule(axe.with_layouts(program.func, {"out": Layout.sharded((7, 5), mesh, {1: "tp"})}), mesh=mesh)
    product(sch)
    epi = sch.get_sblock("epi")
    sch.shard(sch.get_loops(epi)[0], "tp")
    copy = sch.cache_write(epi, 0, "global")
    sch.shard(sch.get_loops(copy)[1], "tp")
    exe = compiled(sch)
    assert exe.stages[-1].kind == "all-to-all"
    judge(exe, sch.mod["main"], program.reference)


@pytest.mark.parametrize("dim", [None, 1, 2])
def test_partial_products_that_are_moved_and_then_summed(programs, compiled, judge, dim):
    """A reduce-scatter in two steps: the partials go to who sums them, or to all."""
    program = programs.block(*UNEVEN)
    sch = Schedule(program.func, mesh=Mesh({"tp": 3}))
    reduce = product(sch)
    if dim is not None:
        reduce, _ = sch.split_collective(reduce, dim - 1)
    sch.redistribute(reduce, "C.rf", "tp", dim)
    exe = compiled(sch)
    assert [stage.kind for stage in exe.stages[1:3]] == ["all-gather" if dim is None else "all-to-all", "local"]
    judge(exe, sch.mod["main"], program.reference)


def test_gather_that_two_stages_read(programs, compiled, judge):
    """Once pointwise and once backwards: it stays where it is, and both read all of it."""
    program = programs.chain(7, 5, 9)
    sch = Schedule(program.func, mesh=Mesh({"tp": 3}))
    _, gather = sch.split_collective(product(sch), 1)
    sch.reorder_collective(gather, blocks(sch, "double", "first", "second"))
    judge(compiled(sch), sch.mod["main"], program.reference)


@pytest.mark.parametrize("name", ["send", "all-to-all, uneven", "a state stays", "reduce and broadcast"])
def test_processes(programs, compiled, judge, name):
    """The other engine, on two of them."""
    case = CASES[name]
    mesh = Mesh({case.axis: 2})
    program = case.program(programs, 2)
    sch = Schedule(axe.with_layouts(program.func, case.declared(mesh)), mesh=mesh)
    case.schedule(sch)
    judge(compiled(sch), sch.mod["main"], program.reference, engine="processes")
