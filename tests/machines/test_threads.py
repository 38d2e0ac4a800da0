"""Blocks and threads for functions that nobody scheduled for a GPU; what they compute is run here, thread by thread."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
import tvm_ffi
from threaded import GPU, bound, launches, one_by_one
from tvm import s_tir, te, tirx, topi
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.errors import LowerError
from tvm_axe.layout import Mesh
from tvm_axe.machines import backend_of, builder, lanes
from tvm_axe.machines.builder import build_program
from tvm_axe.machines.threads import with_threads
from tvm_axe.programs import PROGRAMS

CASES = [
    (name, schedule)
    for name in PROGRAMS
    for schedule in PROGRAMS[name](Mesh(dict.fromkeys(PROGRAMS[name].axes, 2))).schedules
]


@pytest.mark.parametrize("size", ["uneven", "test"])
@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_programs_are_what_they_were(
    launched, monkeypatch: pytest.MonkeyPatch, name: str, schedule: str, size: str
) -> None:
    """Also where threads have several elements, as many as the extents allow."""
    monkeypatch.setattr(lanes, "_ENOUGH", 1)
    mesh = Mesh(dict.fromkeys(PROGRAMS[name].axes, 2))
    program = PROGRAMS[name](mesh, size)
    exe = axe.compile(program.schedule(schedule), work_dir=None)
    exe.runnable = one_by_one(with_threads(exe.runnable))
    arrays = program.inputs(np.random.default_rng())
    exe.run(launched(mesh), *(np.full_like(array, np.nan) if array.dtype.kind == "f" else array for array in arrays))
    outputs = exe.run(launched(mesh), *arrays)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    assert program.error(outputs, program.reference(*arrays)) <= program.tolerance


def test_each_iteration_is_a_threads() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((30, 50), "float32"), B: T.Buffer((30, 50), "float32")):
        for i, j in T.grid(30, 50):
            with T.sblock("double"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = A[vi, vj] * T.float32(2)

    assert launches(bound(func)) == [(6, 256)]


def test_loops_of_64_bits_keep_their_type() -> None:
    """Upstream compares what a padding's condition asks of them with numbers of their type."""
    source = te.placeholder((4, 8, 8), "float32", name="source")
    padded = topi.nn.pad(source, [tirx.IntImm("int64", n) for n in (0, 1, 1)])
    func = te.create_prim_func([source, padded], index_dtype_override="int64")
    found: list[tirx.Expr] = []
    tvm_ffi.structural_walk(bound(func).body, (s_tir.SBlockRealize, lambda block: found.extend(block.iter_values)))
    assert [str(value.ty) for value in found] == ["int64"] * 3
    backend_of(GPU).build(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), GPU)


def test_a_sum_to_few_elements_is_a_blocks() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((30, 5000), "float32"), B: T.Buffer((30,), "float32")):
        for i, j in T.grid(30, 5000):
            with T.sblock("sum"):
                vi, vj = T.axis.remap("SR", [i, j])
                with T.init():
                    B[vi] = T.float32(0)
                B[vi] = B[vi] + A[vi, vj]

    assert launches(bound(func)) == [(30, 512)]
    backend_of(GPU).build(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), GPU)


EXTREMES = [
    ("max", "float32", "T.min_value('float32')", True),
    ("min", "float32", "T.max_value('float32')", True),
    ("max", "float32", "T.float32('-inf')", True),
    ("min", "float32", "T.float32('inf')", True),
    ("max", "int32", "T.min_value('int32')", True),
    ("min", "int32", "T.max_value('int32')", True),
    ("max", "int32", "0", False),
]


@pytest.mark.parametrize(("name", "dtype", "begun", "together"), EXTREMES)
def test_an_extreme_of_few_elements_is_a_blocks(name: str, dtype: str, begun: str, together: bool) -> None:
    """If it begins as upstream's or our reducer does: its threads begin so, too."""
    func = tvm.script.from_source(
        f"""@T.prim_func(s_tir=True)
def main(A: T.Buffer((30, 5000), "{dtype}"), B: T.Buffer((30,), "{dtype}")):
    for i, j in T.grid(30, 5000):
        with T.sblock("extreme"):
            vi, vj = T.axis.remap("SR", [i, j])
            with T.init():
                B[vi] = {begun}
            B[vi] = T.{name}(B[vi], A[vi, vj] * A[vi, vj])
""",
        {"T": T},
    )
    assert launches(bound(func)) == [(30, 512) if together else (1, 30)]
    backend_of(GPU).build(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), GPU)


def test_what_is_reduced_over_shared_loops_is_apart() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((8, 9), "float32"), B: T.Buffer((8, 9), "float32"), S: T.Buffer((1,), "float32")):
        for i, j in T.grid(8, 9):
            with T.sblock("double"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = A[vi, vj] * T.float32(2)
            with T.sblock("sum"):
                vi, vj = T.axis.remap("RR", [i, j])
                with T.init():
                    S[0] = T.float32(0)
                S[0] = S[0] + B[vi, vj]

    assert launches(bound(func)) == [(1, 72), (1, 128)]


@pytest.mark.parametrize(("start", "step", "expected"), [(0, 1, (6, 256)), (49, -1, (1, 30))])
def test_rows_of_elements_are_elements(start: int, step: int, expected: tuple[int, int]) -> None:
    """Of parts in loops of their own that leave each other elements; not where one reads others' than it has."""

    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((30, 50), "float32"), C: T.Buffer((30, 50), "float32")):
        B = T.sblock_alloc_buffer((30, 50))
        for i in range(30):
            for j in range(50):
                with T.sblock("double"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    B[vi, vj] = A[vi, vj] * T.float32(2)
            for j in range(50):
                with T.sblock("add"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    C[vi, vj] = B[vi, start + step * vj] + A[vi, vj]

    assert launches(bound(func)) == [expected]
    array = np.random.default_rng().standard_normal((30, 50)).astype("float32")
    target = tvm.runtime.tensor(np.full((30, 50), np.nan, "float32"))
    tvm.compile(one_by_one(tvm.IRModule({"main": bound(func)})), target="llvm")["main"](
        tvm.runtime.tensor(array), target
    )
    np.testing.assert_array_equal(target.numpy(), 2 * array[:, ::step] + array)


def test_what_reads_what_comes_later_is_refused() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((8,), "float32"), S: T.Buffer((1,), "float32")):
        for i in range(8):
            with T.sblock("scale"):
                vi = T.axis.spatial(8, i)
                A[vi] = A[vi] * S[0]
            with T.sblock("sum"):
                vi = T.axis.reduce(8, i)
                with T.init():
                    S[0] = T.float32(0)
                S[0] = S[0] + A[vi]

    with pytest.raises(LowerError, match="main: block 'scale' reads 'S', which a later block of the same loops writes"):
        bound(func)


def test_more_iterations_than_numbers_are_refused() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((1 << 16, 1 << 16), "int8")):
        for i, j in T.grid(1 << 16, 1 << 16):
            with T.sblock("fill"):
                vi, vj = T.axis.remap("SS", [i, j])
                A[vi, vj] = T.int8(1)

    with pytest.raises(LowerError, match="main: a nest of 4294967296 iterations, more than fit into 31 bits"):
        bound(func)


def test_what_has_threads_is_left_alone() -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((8,), "float32")):
        for i in T.thread_binding(8, "threadIdx.x"):
            with T.sblock("fill"):
                vi = T.axis.spatial(8, i)
                A[vi] = T.float32(1)

    mod = tvm.IRModule({"main": func})
    assert with_threads(mod).same_as(mod)


def test_a_program_without_kernels_builds() -> None:
    @I.ir_module
    class Meeting:
        @R.function(pure=False)
        def main(x: R.Tensor((2,), "float32")):
            R.func_attr({"relax.force_pure": False})
            _: R.Tuple() = R.call_packed("axe.barrier", sinfo_args=(R.Tuple(),))
            return R.tuple()

    assert "axe.barrier" in build_program(Meeting, GPU).stats()


def test_a_function_that_calls_another_is_compiled_with_it() -> None:
    """Those that call a chunk's kernel on windows of the tensors have no blocks themselves."""
    program = PROGRAMS["pipeline"](Mesh(dict(zip(PROGRAMS["pipeline"].axes, (2, 1)))), "uneven")
    exe = axe.compile(program.schedule("ol(RS, fuse(P2P-C), AG)"), target=GPU, work_dir=None)
    functions = {var: func for var, func in exe.runnable.functions_items() if isinstance(func, tirx.PrimFunc)}
    callers = [str(var.name_hint) for var, func in functions.items() if builder.called_by(func)]
    assert callers == ["mm_chunk", "out_global_chunk"]
    assert all("s_tir" not in functions[exe.runnable.get_global_var(name)].attrs for name in callers)
    built = builder.build_kernels(tvm.IRModule(functions), exe.target)
    for name in callers:  # which looks for what it calls
        assert built.get_function(name) is not None


@pytest.mark.parametrize("kind", ["int32", "int64"])
def test_the_threads_of_a_block_add_up_a_sum_whatever_its_loops_are_of(kind):
    """Loops of Relax have 64 bits. Where upstream doesn't see that threads reduce, each stores a sum of its own."""
    number = getattr(T, kind)

    @T.prim_func(s_tir=True)
    def columns(
        x: T.Buffer((number(8), number(128), number(96)), "float32"), y: T.Buffer((number(8), number(96)), "float32")
    ):
        for a, b, k in T.grid(number(8), number(96), number(128)):
            with T.sblock("y"):
                va, vb, vk = T.axis.remap("SSR", [a, b, k])
                with T.init():
                    y[va, vb] = T.float32(0)
                y[va, vb] = y[va, vb] + x[va, vk, vb]

    scheduled = with_threads(tvm.IRModule({"main": columns.with_attr("global_symbol", "main")}))
    assert "threadIdx.x" in scheduled.script()
    lowered = s_tir.transform.LowerCrossThreadReduction()(scheduled)
    assert "tvm_thread_allreduce" in lowered.script()
