"""The choice among the fastest schedules: timed in turns, and the simplest of those that noise can't tell apart."""

import pytest
from tvm import s_tir
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe.layout import Mesh
from tvm_axe.lower import lower
from tvm_axe.meta.measure.protocol import Measurement
from tvm_axe.meta.mesh.finals import TURNS, chosen, run_finals, with_best
from tvm_axe.meta.mesh.moves import schedules
from tvm_axe.meta.mesh.seeds import seed_schedule
from tvm_axe.meta.mesh.space import program_workload
from tvm_axe.meta.task import TaskResult
from tvm_axe.programs import PROGRAMS
from tvm_axe.records.database import FAILED_SECONDS, Database

TP = Mesh({"tp": 2})
TARGET = Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 1})


class Case:
    """A database of one program, and its schedules by what they are in short."""

    def __init__(self, folder):
        self.mod = program_workload(PROGRAMS["mlp"](TP).func, TP, "threads")
        self.database = Database(folder)
        self.workload = self.database.commit_workload(self.mod)
        seed = seed_schedule(self.mod["main"], TP)
        self.traces = {"as it is": s_tir.Schedule(self.workload.mod).trace}
        for candidate in schedules(seed, chunks=(2,)):
            self.traces.setdefault(self.notation(candidate.sch.mod), candidate.sch.trace)

    def notation(self, mod):
        return lower(mod["main"], TP).notation

    def record(self, notation, *seconds):
        infos = ms.arg_info.ArgInfo.from_entry_func(self.mod)
        trace = self.traces[notation]
        self.database.commit_tuning_record(ms.database.TuningRecord(trace, self.workload, seconds, TARGET, infos))

    def records(self):
        return self.database.records(self.workload, TARGET)

    def choice(self):
        record = chosen(self.records())
        if record is None:
            return None
        sch = s_tir.Schedule(self.workload.mod)
        record.trace.apply_to_schedule(sch, remove_postproc=True)
        return self.notation(sch.mod)


class InTurns:
    """A worker whose schedules take what they took before, times what the machine's moment costs; or fail."""

    def __init__(self, case, seconds, moments):
        self.conditions, self.machines = {"clock": "made up"}, {}
        self.case, self.seconds, self.moments, self.turns = case, seconds, list(moments), []

    def prepare(self, mod):
        return Measurement(1.0)

    def measure_all(self, mods):
        moment = self.moments.pop(0)
        self.turns.append([self.case.notation(mod) for mod in mods])
        for notation in self.turns[-1]:
            seconds = self.seconds[notation]
            yield Measurement(seconds and seconds * moment, None if seconds else "died")


@pytest.fixture
def case(tmp_path):
    return Case(tmp_path)


FUSED, SPLIT, PLAIN, OVERLAPPED = "MM-fuse(RS-C-AG)", "MM-RS-C-AG", "MM-AR-C", "ol(MM, fuse(RS-C-AG))"


def test_the_fastest_run_in_turns_and_those_times_count(case):
    """Of four timed alone one was lucky; in turns all have the same moments."""
    alone = {SPLIT: 1.0, FUSED: 1.3, PLAIN: 1.6, OVERLAPPED: 1.9}
    case.record("as it is", 0.9)  # which shares nothing, and doesn't count beside what does
    for notation, seconds in alone.items():
        case.record(notation, seconds)
    assert case.choice() == case.notation(case.mod)
    worker = InTurns(case, {SPLIT: 1.5, FUSED: 1.2, PLAIN: 1.6, OVERLAPPED: 1.9}, [1.0, 1.01, 3.0, 1.02, 0.99])
    run_finals(worker, case.database, case.mod, TARGET)
    assert worker.turns == [list(alone)] * TURNS
    assert case.choice() == FUSED
    times = [record.run_secs for record in case.records()[5:]]
    assert [len(t) for t in times] == [TURNS] * 4
    assert float(times[1][0]) == pytest.approx(1.2 * 1.01), "the median first"


def test_more_finalists_where_more_are_near_and_none_that_failed(case):
    near = [FUSED, SPLIT, PLAIN, OVERLAPPED, "MM-RS-fuse(C-AG)", "MM-R-B-C"]
    for n, notation in enumerate(near):
        case.record(notation, 1.0 + 0.01 * n)
    case.record("MM-RS-AG-C", 1.2)
    case.record("MM-fuse(RS-AG)-C", FAILED_SECONDS)
    worker = InTurns(case, dict.fromkeys(near, 1.0) | {FUSED: None}, [1.0] * TURNS)
    run_finals(worker, case.database, case.mod, TARGET)
    assert worker.turns[0] == near
    assert case.choice() == OVERLAPPED, "two stages; the simpler one, of two too, died"


def test_the_simplest_of_those_that_noise_cannot_tell(case):
    case.record(SPLIT, 1.00, 0.98, 0.99, 1.01, 1.03)
    case.record(OVERLAPPED, 1.01, 0.99, 1.00, 1.02, 1.03)
    case.record(FUSED, 1.02, 0.99, 1.005, 1.03, 1.04)
    assert case.choice() == FUSED, "fewer stages than one, less overlapping than the other"
    case.record(FUSED, 1.03, 1.02, 1.025, 1.04, 1.05)
    assert case.choice() == OVERLAPPED, "its times don't overlap any more"
    case.record(SPLIT, 1.00, 0.5, 0.6, 1.3, 1.5)
    case.record(FUSED, 1.06, 0.5, 0.6, 1.3, 1.5)
    case.record(OVERLAPPED, 1.06, 0.5, 0.6, 1.3, 1.5)
    assert case.choice() == SPLIT, "however noisy, not more than a twentieth is given away"


def test_of_equals_the_first_recorded(case):
    """Two of the same shape, one scattering rows and one columns."""
    both = [c.sch.trace for c in schedules(seed_schedule(case.mod["main"], TP), chunks=())]
    pair = [trace for trace in both if case.notation(replayed(case, trace)) == FUSED]
    case.traces |= {"rows": pair[0], "columns": pair[1]}
    for name in ("columns", "rows", "columns"):
        case.record(name, 1.0, 0.9, 1.1)
    assert str(chosen(case.records()).trace) == str(pair[1])


def replayed(case, trace):
    sch = s_tir.Schedule(case.workload.mod)
    trace.apply_to_schedule(sch, remove_postproc=True)
    return sch.mod


def test_what_a_job_measured_since_and_none_at_all(case):
    assert case.choice() is None
    case.record(PLAIN, FAILED_SECONDS)
    assert case.choice() is None
    case.record(SPLIT, 1.0)
    case.record(FUSED, 1.4, 1.39, 1.41)
    assert case.choice() == FUSED, "a time taken alone doesn't count beside those taken in turns"
    case.record(OVERLAPPED, 1.2)
    assert case.choice() == OVERLAPPED, "but a job that was interrupted since may have found a better one"


@pytest.mark.parametrize(
    ("before", "best", "told"), [(2.0, 1.0, (2.0, 1.0)), (1.0, 1.01, (1.01, 1.01)), (None, 1.0, (None, 1.0))]
)
def test_what_is_kept_is_never_said_to_be_slower_than_what_was(tmp_path, before, best, told):
    """The program as it was takes part in finals; faster by less than noise, it wasn't faster."""
    result = TaskResult("program", 3, before, 0.5, None, (), 1, tmp_path)
    found = with_best(result, best)
    assert (found.before_ms, found.best_ms) == told
