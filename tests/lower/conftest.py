"""The scheduled programs that the lowering tests take through the passes; `small` lies beside it, found by name."""

from collections.abc import Callable, Mapping

import pytest
from tvm import tirx

from tvm_axe.demo.block import SCHEDULES
from tvm_axe.layout import Layout, Mesh
from tvm_axe.lower.derive import Step, derive_steps
from tvm_axe.lower.infer import Sharding, infer_shardings
from tvm_axe.lower.parsing import parse_program
from tvm_axe.lower.program import ScheduledProgram
from tvm_axe.schedule import Schedule


@pytest.fixture
def scheduled(programs) -> Callable[..., Schedule]:
    """The program under one of the demo's schedules, or none; on a mesh of `tp` devices."""

    def make(name: str | None, m: int = 4, n: int = 2, k: int = 8, tp: int = 2) -> Schedule:
        sch = Schedule(programs.block(m, n, k).func, mesh=Mesh({"tp": tp}))
        if name is not None:
            SCHEDULES[name](sch)
        return sch

    return make


Passed = tuple[ScheduledProgram, dict[tirx.Buffer, Sharding], list[Step]]


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
        return {parsed.names[b]: (_axes(shardings[b]), set(shardings[b].partial)) for b in parsed.buffers()}

    return run


def _axes(sharding: Sharding) -> dict[int, str]:
    """The axis, or the axes, of each dimension that is shared."""
    return {dim: ", ".join(cut) for dim, cut in enumerate(sharding.cuts) if cut}


@pytest.fixture
def table() -> Callable[[ScheduledProgram, list[Step]], list[tuple]]:
    """(name, kind, axis, bytes, arguments, pulled, pushed) of each step."""

    def of(program: ScheduledProgram, steps: list[Step]) -> list[tuple]:
        rows = []
        for step in steps:
            sides = [sorted(program.names[buffer] for buffer in side) for side in (step.pulled, step.pushed)]
            rows.append((step.name, step.kind, step.axis, step.bytes, step.arguments, *sides))
        return rows

    return of
