"""The program that most schedule tests schedule, and how they compare."""

from collections.abc import Callable

import pytest
import tvm
from tvm import s_tir, tirx
from tvm.s_tir.schedule import SBlockRV

from tvm_axe.layout import Mesh
from tvm_axe.schedule import Schedule


@pytest.fixture
def schedule(programs) -> Callable[..., Schedule]:
    """A schedule of out = relu(A W + bias) + residual, A being (m, k) and W (k, n), on a mesh of `tp` devices."""

    def make(m: int = 4, n: int = 2, k: int = 8, tp: int = 2) -> Schedule:
        return Schedule(programs.block(m, n, k).func, mesh=Mesh({"tp": tp}))

    return make


@pytest.fixture
def all_reduce() -> Callable[[Schedule], tuple]:
    """Shard the matmul's reduction: (partial, reduce)."""
    return lambda sch: sch.shard(sch.get_loops(sch.get_sblock("mm"))[2], "tp")


@pytest.fixture
def gathered() -> Callable[..., tuple[Schedule, SBlockRV]]:
    """The schedule of a program up to the gather behind its matmul, and the gather."""

    def make(program: tirx.PrimFunc, dim: int = 0, matmul: str = "mm") -> tuple[Schedule, SBlockRV]:
        sch = Schedule(program, mesh=Mesh({"tp": 2}))
        _, reduce = sch.shard(sch.get_loops(sch.get_sblock(matmul))[-1], "tp")
        return sch, sch.split_collective(reduce, dim)[1]

    return make


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
