"""send: a copy that shifts its stages goes point to point; anything else is refused."""

import pytest
from tvm.script import tirx as T

from tvm_axe.layout import Mesh
from tvm_axe.schedule import Schedule


@T.prim_func(s_tir=True)
def sent(X: T.Buffer((3, 4), "float32"), out: T.Buffer((3, 4), "float32")):
    C = T.sblock_alloc_buffer((3, 4))
    Z = T.sblock_alloc_buffer((3, 4))
    for s, i in T.grid(3, 4):
        with T.sblock("double"):
            vs, vi = T.axis.remap("SS", [s, i])
            C[vs, vi] = X[vs, vi] * T.float32(2)
    for s_0 in T.serial(3, annotations={"axe.bind": "pp"}):
        for s_1, i in T.grid(1, 4):
            with T.sblock("send"):
                vs = T.axis.spatial(3, s_0 + s_1)
                vi = T.axis.spatial(4, i)
                Z[vs, vi] = C[(vs - 1) % 3, vi]
    for s, i in T.grid(3, 4):
        with T.sblock("add"):
            vs, vi = T.axis.remap("SS", [s, i])
            out[vs, vi] = Z[vs, vi] + X[vs, vi]


def copying(index, stages=3):
    """A copy of C into Z, which reads C at `index(s, i)`."""

    @T.prim_func(s_tir=True)
    def program(C: T.Buffer((stages, 4), "float32"), Z: T.Buffer((stages, 4), "float32")):
        for s, i in T.grid(stages, 4):
            with T.sblock("copy"):
                vs, vi = T.axis.remap("SS", [s, i])
                Z[vs, vi] = C[index(vs, vi)]

    return Schedule(program, mesh=Mesh({"pp": stages}))


def test_shift(programs, is_now):
    sch = Schedule(programs.pipeline(3, 4).func, mesh=Mesh({"pp": 3}))
    device = sch.send(sch.get_sblock("send"), "pp")
    is_now(sch, sent)
    assert sch.get(device).annotations["axe.bind"] == "pp"


def test_device_loop_is_outermost():
    sch = copying(lambda s, i: ((s + 1) % 3, i))
    block = sch.get_sblock("copy")
    sch.reorder(*reversed(sch.get_loops(block)))
    sch.send(block, "pp")
    assert [sch.get(loop).annotations.get("axe.bind") for loop in sch.get_loops(block)] == ["pp", None, None]


@pytest.mark.parametrize("shift", [-4, -1, 0, 1, 2, 3, 7])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_any_shift(programs, alone, stages, shift):
    program = programs.pipeline(stages, 4, shift)
    sch = Schedule(program.func, mesh=Mesh({"pp": stages}))
    sch.send(sch.get_sblock("send"), "pp")
    alone(sch.mod["main"], program.reference)


NO_SHIFT = {
    "mirrored": lambda s, i: (2 - s, i),
    "one stage's": lambda s, i: (T.int32(0), i),
    "clamped": lambda s, i: (T.max(s - 1, 0), i),
    "other indices too": lambda s, i: ((s + 1) % 3, (i + 1) % 4),
    "by place": lambda s, i: ((s + i) % 3, i),
    "strided": lambda s, i: (s * 2 % 3, i),
}


@pytest.mark.parametrize("name", NO_SHIFT)
def test_copy_that_does_not_shift(refused, name):
    sch = copying(NO_SHIFT[name])
    words = ("send: block 'copy' is not a copy that shifts its leading dimension", "Z[s, ...] = C[(s + k) % P, ...]")
    refused(sch, sch.send, sch.get_sblock("copy"), "pp", words=words)


def test_block_that_computes(programs, refused):
    sch = Schedule(programs.pipeline(3, 4).func, mesh=Mesh({"pp": 3}))
    for name in ("double", "add"):
        refused(sch, sch.send, sch.get_sblock(name), "pp", words=(f"{name!r} is not a copy",))


def test_axis_of_another_size(programs, refused):
    sch = Schedule(programs.pipeline(3, 4).func, mesh=Mesh({"pp": 2}))
    words = ("'send'", "has 3 stages and 'pp' has 2 devices", "one device a stage")
    refused(sch, sch.send, sch.get_sblock("send"), "pp", words=words)


def test_unknown_axis(programs, refused):
    sch = Schedule(programs.pipeline(3, 4).func, mesh=Mesh({"pp": 3}))
    refused(sch, sch.send, sch.get_sblock("send"), "tp", words=("send: the mesh has no axis 'tp'; its axes are pp",))


def test_stages_that_two_loops_drive(programs, refused):
    sch = Schedule(programs.pipeline(4, 2).func, mesh=Mesh({"pp": 4}))
    block = sch.get_sblock("send")
    sch.split(sch.get_loops(block)[0], [2, None])
    refused(sch, sch.send, block, "pp", words=("its leading dimension is not driven by one loop", "send it first"))


def test_sent_already(programs, refused):
    sch = Schedule(programs.pipeline(3, 4).func, mesh=Mesh({"pp": 3}))
    sch.send(sch.get_sblock("send"), "pp")
    refused(sch, sch.send, sch.get_sblock("send"), "pp", words=("not driven by one loop",))


def test_block_of_another_schedule(programs, refused):
    sch, other = (Schedule(programs.pipeline(3, 4).func, mesh=Mesh({"pp": 3})) for _ in range(2))
    refused(sch, sch.send, other.get_sblock("send"), "pp", words=("send: the block given is not of this schedule",))


def test_among_the_consumers_of_a_gather():
    """Slices are sent, and gathered behind the last consumer."""

    @T.prim_func(s_tir=True)
    def program(
        A: T.Buffer((2, 4, 6), "float32"), W: T.Buffer((2, 6, 3), "float32"), out: T.Buffer((2, 4, 3), "float32")
    ):
        C = T.sblock_alloc_buffer((2, 4, 3))
        Z = T.sblock_alloc_buffer((2, 4, 3))
        for s, i, j, k in T.grid(2, 4, 3, 6):
            with T.sblock("mm"):
                vs, vi, vj, vk = T.axis.remap("SSSR", [s, i, j, k])
                with T.init():
                    C[vs, vi, vj] = T.float32(0)
                C[vs, vi, vj] = C[vs, vi, vj] + A[vs, vi, vk] * W[vs, vk, vj]
        for s, i, j in T.grid(2, 4, 3):
            with T.sblock("send"):
                vs, vi, vj = T.axis.remap("SSS", [s, i, j])
                Z[vs, vi, vj] = C[(vs + 1) % 2, vi, vj]
        for s, i, j in T.grid(2, 4, 3):
            with T.sblock("use"):
                vs, vi, vj = T.axis.remap("SSS", [s, i, j])
                out[vs, vi, vj] = Z[vs, vi, vj] * T.float32(2)

    sch = Schedule(program, mesh=Mesh({"pp": 2, "tp": 2}))
    mm, send, use = (sch.get_sblock(name) for name in ("mm", "send", "use"))
    partial, reduce = sch.shard(sch.get_loops(mm)[3], "tp")
    for block in (partial, reduce, use):
        sch.shard(sch.get_loops(block)[0], "pp")
    sch.send(send, "pp")
    _, gather = sch.split_collective(reduce, 1)
    (gather,) = sch.reorder_collective(gather, [send, use])
    bound = [
        {sch.get(loop).annotations.get("axe.bind") for loop in sch.get_loops(block)} - {None}
        for block in (send, use, gather)
    ]
    assert bound == [{"pp", "tp"}, {"pp", "tp"}, {"pp"}]
