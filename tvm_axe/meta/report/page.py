"""A tuning job on one page of HTML: what became of each function, how it got there, and what its best schedule is.

It is made of what lies in the databases, so it tells of all the calls that worked on them. It needs nothing beside it.
"""

from __future__ import annotations

import html
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tvm import s_tir
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.meta.fleet.crew import Machine
from tvm_axe.meta.report.curves import curve
from tvm_axe.meta.task import TaskResult
from tvm_axe.records.database import FAILED_SECONDS, Record, read_records, read_workloads
from tvm_axe.records.files import locked, replace_file
from tvm_axe.records.provenance import read_runs
from tvm_axe.records.trials import Trial, key_of, read_trials
from tvm_axe.tile.sequences import read_function
from tvm_axe.tile.tunable import knobs_in, program_of

__all__ = ["page", "write_report"]

_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --text: #1c2024; --quiet: #60646c; --line: #d9d9e0;
  --best: #0d74ce; --dot: #8b8d98; --failed: #ce2c31; }
@media (prefers-color-scheme: dark) { :root { --ground: #111113; --text: #edeef0; --quiet: #b0b4ba; --line: #363a3f;
  --best: #70b8ff; --dot: #777b84; --failed: #ff9592; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem;
  background: var(--ground); color: var(--text); }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; } p, dd { color: var(--quiet); }
table { border-collapse: collapse; width: 100%; } th, td { padding: .3rem .6rem; text-align: right;
  border-bottom: 1px solid var(--line); } th:first-child, td:first-child { text-align: left; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: var(--quiet); }
.grid { stroke: var(--line); } .before { stroke: var(--quiet); stroke-dasharray: 5 4; } .dot { fill: var(--dot); }
.failed { fill: var(--failed); } .best { fill: none; stroke: var(--best); stroke-width: 2; }
pre { overflow-x: auto; font-size: 12px; border: 1px solid var(--line); border-radius: 6px; padding: .6rem; }
summary { cursor: pointer; }
"""


def write_report(
    path: Path,
    target: Target,
    tasks: Sequence[TaskResult],
    left_out: Mapping[str, str],
    seconds: Mapping[str, float],
    machines: Sequence[Machine] = (),
) -> None:
    """Write the page; what was there before is replaced at once.

    Parameters
    ----------
    path
        Its folder is made if needed.
    target
        The records' target.
    tasks, left_out, seconds, machines
        As in `tvm_axe.meta.result.TuneResult`.

    Raises
    ------
    TuneError
        If it cannot be written.
    """
    with locked(path.parent):
        replace_file(path, page(target, tasks, left_out, seconds, machines))


def page(
    target: Target,
    tasks: Sequence[TaskResult],
    left_out: Mapping[str, str],
    seconds: Mapping[str, float],
    machines: Sequence[Machine] = (),
) -> str:
    """The page's text; see `write_report`."""
    spent = ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
    rows = "".join(_row(task) for task in tasks)
    before = sum(task.weight * task.before_ms for task in tasks if task.before_ms is not None)
    now = sum(task.weight * (_now(task) or 0.0) for task in tasks)
    if len(tasks) > 1 and before and now:
        rows += f"<tr><td>all calls</td><td></td>{_cells(before, now, None)}<td></td><td></td></tr>"
    not_tuned = "".join(f"<li>{html.escape(name)}: {html.escape(why)}</li>" for name, why in left_out.items())
    names = ", ".join(task.name for task in tasks)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Tuning of {html.escape(names)}</title><style>{_STYLE}</style></head><body>
<h1>Tuning of {html.escape(names)}</h1>
<p>{html.escape(json.dumps(json.loads(str(target))))}<br>{_made(tasks)}<br>the last call: {html.escape(spent)}</p>
<table><tr><th>function</th><th>calls</th><th>untuned ms</th><th>best ms</th><th>faster</th><th>GFLOP/s</th>
<th>trials</th><th>failed</th></tr>{rows}</table>
{f"<p>Not tuned:</p><ul>{not_tuned}</ul>" if not_tuned else ""}
{_machines(machines)}
{"".join(_section(task, target) for task in tasks)}
</body></html>
"""


def _machines(machines: Sequence[Machine]) -> str:
    """What each machine of a fleet did in the last call."""
    if not machines:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(machine.name)}</td><td>{machine.measured}</td><td>{machine.failed}</td>"
        f"<td>{machine.scale:.3f}</td><td>{html.escape('; '.join(machine.events)) or 'all well'}</td></tr>"
        for machine in machines
    )
    head = "<tr><th>machine</th><th>measured</th><th>failed</th><th>times by</th><th>what happened</th></tr>"
    return f"<h2>Machines of the last call</h2><table>{head}{rows}</table>"


def _now(task: TaskResult) -> float | None:
    """Milliseconds of what is used from now on."""
    return min((ms for ms in (task.before_ms, task.best_ms) if ms is not None), default=None)


def _cells(before: float | None, best: float | None, gflops: float | None) -> str:
    ratio = before / best if before is not None and best else None
    values = ((before, ".4g"), (best, ".4g"), (ratio, ".2f"), (gflops, ".1f"))
    return "".join(f"<td>{'–' if value is None else format(value, form)}</td>" for value, form in values)


def _row(task: TaskResult) -> str:
    failed = sum(trial.failure is not None for trial in read_trials(task.folder))
    return (
        f"<tr><td>{html.escape(task.name)}</td><td>{task.weight}</td>"
        f"{_cells(task.before_ms, task.best_ms, task.gflops)}<td>{task.trials}</td><td>{failed}</td></tr>"
    )


def _made(tasks: Sequence[TaskResult]) -> str:
    """Where and by what, of the last run that any of the tasks knows."""
    runs = [run for task in tasks for run in read_runs(task.folder) or []]
    if not runs:
        return "nothing was measured"
    run = max(runs, key=lambda run: run["date"])
    versions = " ".join(f"{name} {version}" for name, version in run["versions"].items())
    return html.escape(f"{run['date']} on {run['host']} ({run['cpu']}), seed {run['seed']}; {versions}")


def _section(task: TaskResult, target: Target) -> str:
    parts = [f"<h2>{html.escape(task.name)}</h2>"]
    if task.failures and not task.trials:
        parts.append(f"<p>{html.escape(task.failures[0])}</p>")
    found = [r for r in read_records(task.folder, read_workloads(task.folder)) if r.is_for(target) and r.trace[0]]
    if not found:
        return "".join(parts)
    told = {trial.record: trial for trial in read_trials(task.folder)}
    trials = [told.get(key_of(record.entry)) for record in found]
    parts.append(_curves(found, trials, task.before_ms))
    parts.append(_failures(trials))
    best = min(found, key=lambda record: record.seconds)
    if best.seconds < FAILED_SECONDS:
        parts.append(_schedule(best, task, told.get(key_of(best.entry))))
    return "".join(parts)


def _curves(records: Sequence[Record], trials: Sequence[Trial | None], before_ms: float | None) -> str:
    before = None if before_ms is None else before_ms / 1e3
    times = [record.seconds if record.seconds < FAILED_SECONDS else None for record in records]
    by_number = curve(range(1, len(times) + 1), times, before, "trials")
    # Records that other tools wrote have no time of day.
    timed = [(t.elapsed, s) for t, s in zip(trials, times) if t is not None and t.elapsed is not None]
    timed.sort(key=lambda pair: pair[0])
    by_time = curve([x for x, _ in timed], [s for _, s in timed], before, "seconds of tuning") if timed else ""
    return f'<div class="pair">{by_number}{by_time}</div>'


def _failures(trials: Sequence[Trial | None]) -> str:
    """How often each reason; numbers in reasons don't make them different."""
    reasons = Counter(
        re.sub(r"\d[\d.e+-]*", "#", trial.failure)
        for trial in trials
        if trial is not None and trial.failure is not None
    )
    if not reasons:
        return "<p>No candidate failed.</p>"
    rows = "".join(
        f"<tr><td>{html.escape(reason)}</td><td>{count}</td></tr>" for reason, count in reasons.most_common()
    )
    return f"<table><tr><th>why candidates failed</th><th>how many</th></tr>{rows}</table>"


def _schedule(best: Record, task: TaskResult, trial: Trial | None) -> str:
    """The best candidate as the steps that make it, and as the function that it is."""
    line = read_workloads(task.folder)[best.workload]
    assert line is not None
    mod = ms.database.Workload.from_json(list(line)).mod
    sch = s_tir.Schedule(mod)
    try:
        s_tir.schedule.Trace.apply_json_to_schedule(best.trace, sch)
    except _tvm.UPSTREAM_ERRORS as error:  # traces come from a file
        reason = html.escape(_tvm.why_refused(error))
        return f"<p>The best record, {html.escape(best.place)}, no longer applies: {reason}</p>"
    program = program_of(mod["main"])
    scheduled = sch.mod.script() if program is None else str(read_function(program, knobs_in(sch.mod["main"])))
    steps = str(sch.trace.simplified(remove_postproc=True))
    turns = f", the median of {trial.turns} turns with the next best" if trial is not None and trial.turns else ""
    return (
        f"<p>The best schedule, {best.seconds * 1e3:.4g} ms{turns}, is {html.escape(best.place)}:</p>"
        f"<details><summary>its steps</summary><pre>{html.escape(steps)}</pre></details>"
        f"<details><summary>the scheduled function</summary><pre>{html.escape(scheduled)}</pre></details>"
    )
