"""redistribute: a copy in front of the reader, gathered or sharded otherwise; what isn't sharded is refused."""

import pytest
from tvm.script import tirx as T

from tvm_axe.layout import Layout, Mesh
from tvm_axe.schedule import Schedule, with_layouts


@T.prim_func(s_tir=True)
def exchanged(X: T.Buffer((3, 4, 2), "float32"), W: T.Buffer((4, 2, 3), "float32"), Y: T.Buffer((3, 4, 3), "float32")):
    """Sources in pieces of two, experts in pieces of two; the copy of D is shared as its reader is."""
    D = T.sblock_alloc_buffer((3, 4, 2))
    H = T.sblock_alloc_buffer((3, 4, 3))
    D_global = T.sblock_alloc_buffer((3, 4, 2))
    for s_0 in T.serial(2, annotations={"axe.bind": "ep"}):
        for s_1, e, t in T.grid(2, 4, 2):
            with T.sblock("dispatch"):
                vs = T.axis.spatial(3, s_0 * 2 + s_1)
                ve, vt = T.axis.remap("SS", [e, t])
                T.where(s_0 * 2 + s_1 < 3)
                D[vs, ve, vt] = X[vs, ve, vt] * T.float32(2)
    for ax1_0 in T.serial(2, annotations={"axe.bind": "ep"}):
        for ax0, ax1_1, ax2 in T.grid(3, 2, 2):
            with T.sblock("D_global"):
                v0 = T.axis.spatial(3, ax0)
                v1 = T.axis.spatial(4, ax1_0 * 2 + ax1_1)
                v2 = T.axis.spatial(2, ax2)
                D_global[v0, v1, v2] = D[v0, v1, v2]
    for s in range(3):
        for e_0 in T.serial(2, annotations={"axe.bind": "ep"}):
            for e_1, h, t in T.grid(2, 3, 2):
                with T.sblock("mm"):
                    vs = T.axis.spatial(3, s)
                    ve = T.axis.spatial(4, e_0 * 2 + e_1)
                    vh, vt = T.axis.remap("SR", [h, t])
                    with T.init():
                        H[vs, ve, vh] = T.float32(0)
                    H[vs, ve, vh] = H[vs, ve, vh] + D_global[vs, ve, vt] * W[ve, vt, vh]
    for s, e, h in T.grid(3, 4, 3):
        with T.sblock("combine"):
            vs, ve, vh = T.axis.remap("SSS", [s, e, h])
            Y[vs, ve, vh] = H[vs, ve, vh] + T.float32(1)


@T.prim_func(s_tir=True)
def gathered_input(A: T.Buffer((5, 3), "float32"), B: T.Buffer((5, 3), "float32")):
    A_global = T.sblock_alloc_buffer((5, 3))
    for ax0, ax1 in T.grid(5, 3):
        with T.sblock("A_global"):
            v0, v1 = T.axis.remap("SS", [ax0, ax1])
            A_global[v0, v1] = A[v0, v1]
    for i, j in T.grid(5, 3):
        with T.sblock("flip"):
            vi, vj = T.axis.remap("SS", [i, j])
            B[vi, vj] = A_global[4 - vi, vj]


@T.prim_func(s_tir=True)
def flip(A: T.Buffer((5, 3), "float32"), B: T.Buffer((5, 3), "float32")):
    for i, j in T.grid(5, 3):
        with T.sblock("flip"):
            vi, vj = T.axis.remap("SS", [i, j])
            B[vi, vj] = A[4 - vi, vj]


def dispatched(programs, mesh=None, **extents):
    """Sources sharded where they dispatch, experts where they multiply."""
    program = programs.experts(**({"sources": 3, "count": 4, "tokens": 2, "width": 3} | extents))
    sch = Schedule(program.func, mesh=mesh or Mesh({"ep": 2}))
    sch.shard(sch.get_loops(sch.get_sblock("dispatch"))[0], "ep")
    sch.shard(sch.get_loops(sch.get_sblock("mm"))[1], "ep")
    return sch


def test_all_to_all(programs, is_now):
    sch = dispatched(programs)
    copy = sch.redistribute(sch.get_sblock("mm"), "D", "ep", 1)
    is_now(sch, exchanged)
    assert sch.get(copy).name_hint == "D_global"


def test_all_gather_of_an_input(is_now):
    mesh = Mesh({"tp": 2})
    sch = Schedule(with_layouts(flip, {"A": Layout.sharded((5, 3), mesh, {0: "tp"})}), mesh=mesh)
    sch.redistribute(sch.get_sblock("flip"), "A", "tp")
    is_now(sch, gathered_input.with_attr("axe.layouts", sch.mod["main"].attrs["axe.layouts"]))


@pytest.mark.parametrize("dim", [None, 1, 2])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_annotations_ignored(programs, alone, devices, dim):
    program = programs.experts(3, 4, 2, 3)
    sch = dispatched(programs, Mesh({"ep": devices}))
    sch.redistribute(sch.get_sblock("mm"), "D", "ep", dim)
    alone(sch.mod["main"], program.reference)


def test_the_other_axis_stays(programs):
    """Tokens over tp: each of its groups exchanges what it has."""
    sch = dispatched(programs, Mesh({"ep": 2, "tp": 2}))
    sch.shard(sch.get_loops(sch.get_sblock("dispatch"))[3], "tp")
    for dim, bound in ((1, ["ep", "tp"]), (None, ["tp"])):
        other = sch.copy()
        copy = other.redistribute(other.get_sblock("mm"), "D", "ep", dim)
        axes = [other.get(loop).annotations.get("axe.bind") for loop in other.get_loops(copy)]
        assert sorted(filter(None, axes)) == bound


def test_buffer_that_is_not_read(programs, refused):
    sch = dispatched(programs)
    words = ("redistribute: block 'mm' doesn't read 'X'", "it reads D, W")
    refused(sch, sch.redistribute, sch.get_sblock("mm"), "X", "ep", words=words)


def test_buffer_that_is_not_sharded(programs, refused):
    """W is read, and nothing says that it lies sharded; H is sharded over ep and not over tp."""
    sch = dispatched(programs, Mesh({"ep": 2, "tp": 2}))
    words = ("'W' is not sharded over 'ep'", "whose producer is bound to it", "with_layouts declares so")
    refused(sch, sch.redistribute, sch.get_sblock("mm"), "W", "ep", words=words)
    refused(sch, sch.redistribute, sch.get_sblock("combine"), "H", "tp", words=("'H' is not sharded over 'tp'",))


def test_input_that_is_declared_whole(refused):
    mesh = Mesh({"tp": 2})
    sch = Schedule(with_layouts(flip, {"A": Layout.sharded((5, 3), mesh, {})}), mesh=mesh)
    refused(sch, sch.redistribute, sch.get_sblock("flip"), "A", "tp", words=("'A' is not sharded over 'tp'",))


@pytest.mark.parametrize(("dim", "shared"), [(0, "shared: 0"), (3, "it has 3"), (-1, "it has 3")])
def test_dimension(programs, refused, dim, shared):
    sch = dispatched(programs)
    words = (f"redistribute: dim is {dim}", "a dimension of 'D'", shared)
    refused(sch, sch.redistribute, sch.get_sblock("mm"), "D", "ep", dim, words=words)


def test_dimension_that_another_axis_shares(programs, refused):
    sch = dispatched(programs, Mesh({"ep": 2, "tp": 2}))
    sch.shard(sch.get_loops(sch.get_sblock("dispatch"))[3], "tp")
    words = ("dim is 2", "that no axis shares yet (shared: 0, 2)")
    refused(sch, sch.redistribute, sch.get_sblock("mm"), "D", "ep", 2, words=words)


def test_unknown_axis(programs, refused):
    sch = dispatched(programs)
    refused(sch, sch.redistribute, sch.get_sblock("mm"), "D", "tp", words=("redistribute: the mesh has no axis 'tp'",))


def test_block_of_another_schedule(programs, refused):
    sch, other = dispatched(programs), dispatched(programs)
    words = ("redistribute: the block given is not of this schedule",)
    refused(sch, sch.redistribute, other.get_sblock("mm"), "D", "ep", words=words)
