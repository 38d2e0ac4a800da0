"""`show` has what the search's model predicts beside what was measured, once there is a measurement."""

import re
import statistics

import numpy as np
import pytest
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.collective.engine import HOST
from tvm_axe.lower.cost import estimate, expected, operations
from tvm_axe.timeline import WAITING

TITLE = "predicted and measured on"
PLACES = 0.6e-4  # a time of four decimals is this near, whichever way its half was rounded


@T.prim_func(s_tir=True)
def block(A: T.Buffer((32, 48), "float32"), W: T.Buffer((48, 24), "float32"), out: T.Buffer((32, 24), "float32")):
    C = T.sblock_alloc_buffer((32, 24), "float32")
    for i, j, k in T.grid(32, 24, 48):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vk, vj]
    for i, j in T.grid(32, 24):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = T.max(C[vi, vj], T.float32(0))


def compiled() -> axe.Executable:
    sch = axe.Schedule(block, mesh={"tp": 2})
    sch.shard("mm", "k", "tp")
    sch.split_collective("mm")
    return axe.compile(sch, work_dir=None)


def arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.standard_normal(shape, "float32") for shape in ((32, 48), (48, 24))]


def table(exe: axe.Executable) -> dict[str, list[str]]:
    """The rows of the table: predicted, measured, their ratio."""
    _, _, rest = exe.show().partition(TITLE)
    rows = [line.split() for line in rest.partition("\n\n")[0].splitlines()[2:]]
    return {" ".join(row[:-3]): row[-3:] for row in rows}


def test_nothing_measured_nothing_shown() -> None:
    assert TITLE not in compiled().show()


@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_what_was_traced_and_timed_is_beside_what_was_predicted(engine: str) -> None:
    exe = compiled()
    with axe.launch(exe.mesh, engine=engine) as workers:
        timeline = exe.trace(workers, *arrays())
        traced = table(exe)
        assert f"{TITLE} {engine} (milliseconds" in exe.show()
        seconds = exe.time(workers, *arrays())
    names = [stage.name for stage in exe.stages]
    assert list(traced) == [*names, "waiting", "in all"]
    predicted = expected(exe.lowered)
    for stage, own in zip(exe.stages, predicted, strict=True):
        events = [event for event in timeline.events if (event.name, event.kind) == (stage.name, stage.kind)]
        taken = [sum(e.stop - e.start for e in events if e.worker == worker) / 1e6 for worker in range(2)]
        assert traced[stage.name][0] == f"{own * 1e3:.4f}"
        assert float(traced[stage.name][1]) == pytest.approx(max(taken), abs=PLACES)
        assert float(traced[stage.name][2]) == pytest.approx(max(taken) / own / 1e3, abs=0.006)
    waits = [event for event in timeline.events if event.kind == WAITING]
    assert float(traced["waiting"][1]) >= max(event.stop - event.start for event in waits) / 1e6 - PLACES
    assert traced["in all"][0] == f"{sum(predicted) * 1e3:.4f}"
    assert float(traced["in all"][1]) == pytest.approx(timeline.duration / 1e6, abs=PLACES)
    timed = table(exe)
    assert timed["in all"][1] == f"{statistics.median(seconds) * 1e3:.4f}"
    assert {name: timed[name] for name in names} == {name: traced[name] for name in names}


def test_what_was_only_timed_has_dashes_for_its_stages() -> None:
    exe = compiled()
    with axe.launch(exe.mesh, engine="threads") as workers:
        exe.time(workers, *arrays(), repeat=2, warmup=0)
    found = table(exe)
    assert all(found[stage.name][1:] == ["-", "-"] for stage in exe.stages)
    assert re.fullmatch(r"\d+\.\d{4}", found["in all"][1])


def test_another_engines_measurements_are_not_mixed_in() -> None:
    exe = compiled()
    with axe.launch(exe.mesh, engine="threads") as workers:
        exe.trace(workers, *arrays())
    with axe.launch(exe.mesh, engine="processes") as workers:
        exe.time(workers, *arrays(), repeat=2, warmup=0)
    assert f"{TITLE} processes" in exe.show()
    assert all(table(exe)[stage.name][1] == "-" for stage in exe.stages)


def test_the_stages_predictions_are_the_searchs() -> None:
    sch = axe.Schedule(block, mesh={"tp": 2})
    sch.shard("mm", "k", "tp")
    exe = axe.compile(sch, work_dir=None)
    own, _ = operations(sch.mod["main"], sch.mesh)
    assert sum(stage.operations for stage in exe.stages) == own == 2 * 32 * 24 * 24
    assert sum(expected(exe.lowered)) == pytest.approx(estimate(exe.lowered) + own / HOST.operations)
