"""A schedule in one line, as CoCoNet writes it."""

import pytest
from tvm.script import tirx as T

from tvm_axe.demo.block import SCHEDULES
from tvm_axe.layout import Layout, Mesh
from tvm_axe.lower import lower
from tvm_axe.schedule import Schedule, with_layouts


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_called_what_they_are(scheduled, name):
    sch = scheduled(name)
    assert lower(sch.mod["main"], sch.mesh).notation == name


def test_unscheduled(scheduled):
    sch = scheduled(None)
    assert lower(sch.mod["main"], sch.mesh).notation == "MM-C"


def test_reduce_and_broadcast(scheduled):
    sch = scheduled("MM-AR-C")
    sch.split_collective(sch.get_sblock("mm"), root=1)
    assert lower(sch.mod["main"], sch.mesh).notation == "MM-R-B-C"


@pytest.mark.parametrize(("fuse", "expected"), [(False, "C-P2P-C"), (True, "C-fuse(P2P-C)")])
def test_send(programs, fuse, expected):
    mesh = Mesh({"pp": 3})
    layouts = {"out": Layout.sharded((3, 4), mesh, {0: "pp"})}
    sch = Schedule(with_layouts(programs.pipeline(3, 4).func, layouts), mesh=mesh)
    send, add = sch.get_sblock("send"), sch.get_sblock("add")
    for block in (sch.get_sblock("double"), add):
        sch.shard(sch.get_loops(block)[0], "pp")
    sch.send(send, "pp")
    if fuse:
        sch.fuse_collective([send, add])
    assert lower(sch.mod["main"], mesh).notation == expected


def test_overlap(scheduled):
    """Chunks of the matmul beside those of the fused kernel."""
    sch = scheduled("MM-fuse(RS-C-AG)")
    sch.overlap([sch.get_sblock("mm_rf"), sch.get_sblock("mm")], "tp", 2)
    assert lower(sch.mod["main"], sch.mesh).notation == "ol(MM, fuse(RS-C-AG))"


@T.prim_func(s_tir=True)
def three(
    X: T.Buffer((4, 4), "float32"),
    V: T.Buffer((4, 4), "float32"),
    W: T.Buffer((4, 4), "float32"),
    Y: T.Buffer((4, 4), "float32"),
    N: T.Buffer((4,), "float32"),
    M: T.Buffer((4,), "float32"),
):
    H = T.sblock_alloc_buffer((4, 4))
    for i, j, k in T.grid(4, 4, 4):
        with T.sblock("up"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                H[vi, vj] = T.float32(0)
            H[vi, vj] = H[vi, vj] + X[vi, vk] * V[vk, vj]
    for i, j, k in T.grid(4, 4, 4):
        with T.sblock("down"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                Y[vi, vj] = T.float32(0)
            Y[vi, vj] = Y[vi, vj] + H[vi, vk] * W[vk, vj]
    for i, k in T.grid(4, 4):
        with T.sblock("squares"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                N[vi] = T.float32(0)
            N[vi] = N[vi] + Y[vi, vk] * Y[vi, vk]
    for i, k in T.grid(4, 4):
        with T.sblock("largest"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                M[vi] = T.float32(0)
            M[vi] = T.max(M[vi], Y[vi, vk] * X[vi, vk])


def test_each_product_is_said_and_nothing_else_is_one():
    """Neither a sum of squares nor a maximum of products is; what else is computed in a row is said once."""
    assert lower(three, Mesh({"tp": 2})).notation == "MM-MM-C"


def test_one_device_communicates_nothing(scheduled):
    for name in SCHEDULES:
        sch = scheduled(name, tp=1)
        assert set(lower(sch.mod["main"], sch.mesh).notation.split("-")) == {"MM", "C"}
