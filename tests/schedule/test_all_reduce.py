"""all_reduce: a sum of one term a device; any other reduction is refused."""

import pytest
from tvm.script import tirx as T

from tvm_axe.layout import Mesh
from tvm_axe.schedule import Schedule


@T.prim_func(s_tir=True)
def summed_over_devices(A: T.Buffer((4, 2), "float32"), B: T.Buffer((4,), "float32")):
    for i in range(4):
        for k in T.serial(2, annotations={"axe.bind": "dp"}):
            with T.sblock("sum"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    B[vi] = T.float32(0)
                B[vi] = B[vi] + A[vi, vk]


def sum_of(statement, extent=2, dtype="float32"):
    """The schedule of `B[i] += statement(A, i, k)` with k the devices of dp."""

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((4, 4), dtype), B: T.Buffer((4,), "float32")):
        for i, k in T.grid(4, extent):
            with T.sblock("sum"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    B[vi] = T.float32(0)
                B[vi] = statement(A, B, vi, vk)

    return Schedule(program, mesh=Mesh({"dp": 2}))


def test_all_reduce(is_now):
    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((4, 2), "float32"), B: T.Buffer((4,), "float32")):
        for i, k in T.grid(4, 2):
            with T.sblock("sum"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    B[vi] = T.float32(0)
                B[vi] = B[vi] + A[vi, vk]

    sch = Schedule(program, mesh=Mesh({"dp": 2}))
    block = sch.all_reduce(sch.get_loops(sch.get_sblock("sum"))[1], "dp")
    is_now(sch, summed_over_devices)
    assert sch.get(block).name_hint == "sum"


def test_all_reduce_of_a_cast():
    sch = sum_of(lambda A, B, i, k: B[i] + T.Cast("float32", A[i, k]), dtype="float16")
    block = sch.all_reduce(sch.get_loops(sch.get_sblock("sum"))[1], "dp")
    assert len(sch.split_collective(block)) == 2


def test_all_reduce_on_one_device(programs):
    sch = Schedule(programs.update(1, 4, 3).func, mesh=Mesh({"dp": 1}))
    block = sch.all_reduce(sch.get_loops(sch.get_sblock("sum"))[2], "dp")
    assert len(sch.split_collective(block)) == 2


@pytest.mark.parametrize("extent", [1, 3, 4])
def test_all_reduce_over_another_extent(refused, extent):
    sch = sum_of(lambda A, B, i, k: B[i] + A[i, k], extent)
    loop = sch.get_loops(sch.get_sblock("sum"))[1]
    words = (f"'k' has {extent} iterations and 'dp' has 2 devices", "one term on each")
    refused(sch, sch.all_reduce, loop, "dp", words=words)


NO_TERM = {
    "a product": lambda A, B, i, k: B[i] + A[i, k] * A[k, i],
    "a maximum": lambda A, B, i, k: T.max(B[i], A[i, k]),
    "scaled": lambda A, B, i, k: B[i] + A[i, k] * T.float32(2),
    "no device's": lambda A, B, i, k: B[i] + A[i, i],
    "twice a device's": lambda A, B, i, k: B[i] + A[k, k],
    "a neighbour's": lambda A, B, i, k: B[i] + A[i, (k + 1) % 2],
}


@pytest.mark.parametrize("name", NO_TERM)
def test_all_reduce_of_something_else(refused, name):
    sch = sum_of(NO_TERM[name])
    words = ("'sum' does not sum one term a device over loop 'k'", "share any other reduction with shard")
    refused(sch, sch.all_reduce, sch.get_loops(sch.get_sblock("sum"))[1], "dp", words=words)


def test_all_reduce_over_a_data_parallel_loop(programs, refused):
    sch = Schedule(programs.update(2, 2, 3).func, mesh=Mesh({"dp": 2}))
    loop = sch.get_loops(sch.get_sblock("sum"))[0]
    refused(sch, sch.all_reduce, loop, "dp", words=("'sum' does not sum one term a device over loop 'i'",))


def test_all_reduce_twice(programs, refused):
    sch = Schedule(programs.update(2, 4, 3).func, mesh=Mesh({"dp": 2}))
    loop = sch.get_loops(sch.get_sblock("sum"))[2]
    sch.all_reduce(loop, "dp")
    refused(sch, sch.all_reduce, loop, "dp", words=("'sum': loop 'k' is already bound to 'dp'",))


def test_all_reduce_of_what_the_axis_shares(programs, refused):
    sch = Schedule(programs.update(2, 4, 3).func, mesh=Mesh({"dp": 2}))
    total = sch.get_sblock("sum")
    sch.shard(sch.get_loops(total)[0], "dp")
    loop = sch.get_loops(total)[3]
    refused(sch, sch.all_reduce, loop, "dp", words=("'sum' has a loop bound to 'dp' already",))


def test_all_reduce_over_two_axes(refused):
    """The loop is bound once; another axis of the same size doesn't take it too."""

    @T.prim_func(s_tir=True)
    def program(A: T.Buffer((4, 2), "float32"), B: T.Buffer((4,), "float32")):
        for i, k in T.grid(4, 2):
            with T.sblock("sum"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    B[vi] = T.float32(0)
                B[vi] = B[vi] + A[vi, vk]

    sch = Schedule(program, mesh=Mesh({"dp": 2, "tp": 2}))
    loop = sch.get_loops(sch.get_sblock("sum"))[1]
    sch.all_reduce(loop, "dp")
    refused(sch, sch.all_reduce, loop, "tp", words=("'k' is already bound to 'dp'",))


def test_all_reduce_over_an_unknown_axis(programs, refused):
    sch = Schedule(programs.update(2, 4, 3).func, mesh=Mesh({"dp": 2}))
    loop = sch.get_loops(sch.get_sblock("sum"))[2]
    refused(sch, sch.all_reduce, loop, "tp", words=("all_reduce: the mesh has no axis 'tp'; its axes are dp",))


def test_all_reduce_of_another_schedule(programs, refused):
    sch, other = (Schedule(programs.update(2, 4, 3).func, mesh=Mesh({"dp": 2})) for _ in range(2))
    loop = other.get_loops(other.get_sblock("sum"))[2]
    refused(sch, sch.all_reduce, loop, "dp", words=("all_reduce: the loop given is not of this schedule",))
