"""The scheduled programs that the lowering tests take through the passes."""

from collections.abc import Callable, Mapping

import pytest
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe.demo.block import SCHEDULES
from tvm_axe.layout import Layout, Mesh
from tvm_axe.lower.derive import Step, derive_steps
from tvm_axe.lower.infer import Sharding, infer_shardings
from tvm_axe.lower.program import Program, parse_program
from tvm_axe.schedule import Schedule


def matmul_epilogue(M: int, N: int, K: int) -> tirx.PrimFunc:
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


@pytest.fixture
def scheduled() -> Callable[..., Schedule]:
    """The program under one of the demo's schedules, or none; on a mesh of `tp` devices."""

    def make(name: str | None, m: int = 4, n: int = 2, k: int = 8, tp: int = 2) -> Schedule:
        sch = Schedule(matmul_epilogue(m, n, k), mesh=Mesh({"tp": tp}))
        if name is not None:
            SCHEDULES[name](sch)
        return sch

    return make


Passed = tuple[Program, dict[tirx.Buffer, Sharding], list[Step]]


@pytest.fixture
def passes() -> Callable[..., Passed]:
    """Take a schedule, or a function and a mesh, up to the derived steps."""

    def run(program: Schedule | tirx.PrimFunc, mesh: Mesh | None = None, **declared: Layout) -> Passed:
        if isinstance(program, Schedule):
            program, mesh = program.mod["main"], program.mesh
        parsed = parse_program(program, mesh)
        shardings = infer_shardings(parsed, declared)
        return parsed, shardings, derive_steps(parsed, shardings)

    return run


@pytest.fixture
def layouts(passes: Callable[..., Passed]) -> Callable[..., Mapping[str, str]]:
    """The dimensions of each buffer that are sharded, and those that count partials, by the buffer's name."""

    def run(*args: object, **declared: Layout) -> dict[str, tuple[dict[int, str], set[int]]]:
        parsed, shardings, _ = passes(*args, **declared)
        return {parsed.names[b]: (dict(shardings[b].axes), set(shardings[b].partial)) for b in parsed.buffers()}

    return run
