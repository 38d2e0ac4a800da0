"""The program that the schedule tests schedule, and how they compare."""

from collections.abc import Callable

import pytest
import tvm
from tvm import s_tir, tirx
from tvm.script import tirx as T

from tvm_axe.layout import Mesh
from tvm_axe.schedule import Schedule


def _matmul_epilogue(M: int, N: int, K: int) -> tirx.PrimFunc:
    """out = relu(A W + bias) + residual."""

    @T.prim_func(s_tir=True)
    def block(
        A: T.Buffer((M, K), "float32"),
        W: T.Buffer((K, N), "float32"),
        bias: T.Buffer((N,), "float32"),
        residual: T.Buffer((M, N), "float32"),
        out: T.Buffer((M, N), "float32"),
    ):
        C = T.sblock_alloc_buffer((M, N), "float32")
        for i, j, k in T.grid(M, N, K):
            with T.sblock("mm"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
        for i, j in T.grid(M, N):
            with T.sblock("epi"):
                vi, vj = T.axis.remap("SS", [i, j])
                out[vi, vj] = T.max(C[vi, vj] + bias[vj], T.float32(0)) + residual[vi, vj]

    return block


@pytest.fixture(scope="module")
def matmul_epilogue() -> Callable[[int, int, int], tirx.PrimFunc]:
    """The program itself, by its extents m, n and k."""
    return _matmul_epilogue


@pytest.fixture
def schedule() -> Callable[..., Schedule]:
    """A schedule of out = relu(A W + bias) + residual, A being (m, k) and W (k, n), on a mesh of `tp` devices."""

    def make(m: int = 4, n: int = 2, k: int = 8, tp: int = 2) -> Schedule:
        return Schedule(_matmul_epilogue(m, n, k), mesh=Mesh({"tp": tp}))

    return make


@pytest.fixture
def all_reduce() -> Callable[[Schedule], tuple]:
    """Shard the matmul's reduction: (partial, reduce)."""
    return lambda sch: sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")


@pytest.fixture
def is_now() -> Callable[[s_tir.Schedule, tirx.PrimFunc], None]:
    """Assert that a schedule's function is structurally the golden one."""

    def check(sch: s_tir.Schedule, golden: tirx.PrimFunc) -> None:
        bare = [func.without_attr("global_symbol") for func in (sch.mod["main"], golden)]
        tvm.ir.assert_structural_equal(*bare)

    return check


@pytest.fixture
def refused() -> Callable[..., None]:
    """Assert that a primitive refuses with all of the words in its message, and leaves the schedule as it was."""

    def check(sch: s_tir.Schedule, primitive: Callable, *args: object, words: tuple[str, ...]) -> None:
        before, trace = sch.mod, str(sch.trace)
        with pytest.raises(ValueError) as caught:
            primitive(*args)
        assert type(caught.value).__name__ == "ScheduleError"
        missing = [word for word in words if word not in str(caught.value)]
        assert not missing, f"{missing} not in: {caught.value}"
        assert str(sch.trace) == trace
        tvm.ir.assert_structural_equal(sch.mod, before)

    return check
