"""The judge of `fuzz_schedules`: what becomes of a case, and the smallest case that fails the same way.

The truth is the program by numpy on small integers, which every type holds exactly whatever the order of a sum; where
something differs from it, it is compared with the unscheduled function under stock TVM first.
"""

from __future__ import annotations

import ast
import contextlib
import os
import pickle
import re
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tvm
from fuzz_actions import OURS, Action, apply
from fuzz_evaluating import Malformed, evaluate, fitting_inputs
from fuzz_programs import Program, in_numbers, with_extent, without_stage
from fuzz_scheduling import Case
from limiting import limited
from tvm import s_tir, tirx

import tvm_axe as axe
from tvm_axe.collective import Workers
from tvm_axe.executable.mesh import MeshExecutable
from tvm_axe.layout import Mesh

RIGHT = "right"
REFUSED = "refused by lowering"
UPSTREAM = "wrong under stock TVM"
IGNORED = "wrong with annotations ignored"
WRONG = "wrong on the mesh"
RAW = "raw error"
CRASHED = "crashed or hung"
BUGS = (IGNORED, WRONG, RAW, CRASHED)
UNWRITTEN = "elements that nothing stores to are not what was passed"
LIMIT = 60.0
"""Seconds that a case may take."""

_Results = dict[str, object]


@dataclass(frozen=True)
class Verdict:
    """What became of a case: one of the kinds above; why, less names and numbers; and what was seen."""

    kind: str
    reason: str = ""
    detail: str = ""

    def like(self, other: Verdict) -> bool:
        """Whether both failed the same way."""
        return self.kind == other.kind and self.reason == other.reason


def stripped(error: BaseException) -> str:
    """An error's type and message, less names and numbers."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [""]
    message = lines[0]
    if isinstance(error, axe.WorkerError):  # the worker's traceback ends with what it raised
        message = lines[-1]
    message = re.sub(r"\(?S\[.*?\](?: \+ (?:R\[.*?\]|\d+(?:@\w+)?))*\)?", "LAYOUT", message)
    message = re.sub(r"\b[xyz]\b", "_", message)
    message = re.sub(r"'[^']*'|\"[^\"]*\"|0x[0-9a-f]+", "_", message)
    message = re.sub(r"\b[A-Za-z]*\d\w*\b", "_", message)
    return f"{type(error).__name__}: {re.sub(r'(_[, ]*)+', '_ ', message)[:220]}"


class Pool:
    """Workers on each mesh, launched at the first use."""

    def __init__(self, engine: str, timeout: float = 20.0) -> None:
        self.engine, self.timeout = engine, timeout
        self._workers: dict[tuple[tuple[str, int], ...], Workers] = {}

    def on(self, mesh: tuple[tuple[str, int], ...]) -> Workers:
        """The workers of a mesh."""
        if mesh not in self._workers or self._workers[mesh].closed:
            if self.engine == "mpi":
                self.close()  # the ranks serve one launch at a time
            self._workers[mesh] = axe.launch(Mesh(dict(mesh)), engine=self.engine, timeout=self.timeout)
        return self._workers[mesh]

    def drop(self, mesh: tuple[tuple[str, int], ...]) -> None:
        """Close the workers of a mesh: after a fault, new ones go on."""
        workers = self._workers.pop(mesh, None)
        if workers is not None:
            workers.close()

    def close(self) -> None:
        """Close all of them."""
        for mesh in list(self._workers):
            self.drop(mesh)


# ---- Runs ------------------------------------------------------------------------------------------------------------


def on_one_device(func: tirx.PrimFunc, program: Program, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What is written, after a run of a function under stock TVM with its annotations ignored.

    Intermediates are made parameters first, so that they are poisoned as outputs are.
    """
    root = func.body.block
    local = list(root.alloc_buffers)
    tensors = {name: tvm.runtime.tensor(array.copy()) for name, array in inputs.items()}
    poisoned = [
        tvm.runtime.tensor(np.full([int(n) for n in buffer.shape], poison(str(buffer.dtype)), str(buffer.dtype)))
        for buffer in local
    ]
    block = s_tir.SBlock(
        root.iter_vars, root.reads, root.writes, root.name_hint, root.body, root.init, [], root.match_buffers
    )
    body = s_tir.SBlockRealize([], True, block)
    module = tvm.IRModule({"main": tirx.PrimFunc([*func.params, *local], body, func.ret_type, func.attrs)})
    module = tvm.IRModule({"main": module["main"].with_attr("global_symbol", "main")})
    tvm.compile(module, target="llvm")["main"](*tensors.values(), *poisoned)
    return {name: tensors[name].numpy() for name in program.written}


def poison(dtype: str) -> object:
    """What no program computes."""
    if dtype == "bool":
        return True
    return np.nan if np.dtype(dtype).kind == "f" else np.iinfo(dtype).min + 5


def on_mesh(exe: MeshExecutable, program: Program, workers: Workers, inputs: Mapping[str, np.ndarray]) -> _Results:
    """The outputs of a run on the mesh, of which all slabs are poisoned before, also beyond their shares."""
    indices = {tensor.name for tensor in program.tensors if tensor.limit is not None}
    exe.fill(workers, lambda buffer: None if buffer.name in indices else poison(buffer.dtype))
    found = exe.run(workers, *(inputs[name] for name in exe.inputs))
    return dict(zip(exe.outputs, found if isinstance(found, tuple) else (found,), strict=True))


def difference(
    found: Mapping[str, object],
    expected: Mapping[str, np.ndarray],
    names: Sequence[str],
    among: Mapping[str, np.ndarray] | None = None,
) -> str | None:
    """The first element that differs, in words; where that is asked, only among some elements of each."""
    for name in names:
        if name not in found:
            return f"{name} is not among the outputs"
        have, want = np.asarray(found[name]), expected[name]
        if have.shape != want.shape:
            return f"{name} has shape {have.shape}, not {want.shape}"
        unlike = np.argwhere(~(have == want) if among is None else ~(have == want) & among[name])
        if len(unlike):
            at = tuple(int(i) for i in unlike[0])
            return f"{name}{list(at)} is {have[at]} and should be {want[at]}; {len(unlike)} of {want.size} differ"
    return None


# ---- Verdicts --------------------------------------------------------------------------------------------------------


def replayed(case: Case) -> tuple[Case, axe.Schedule]:
    """The case less what its schedule refuses, and the schedule."""
    sch = case.schedule()
    accepted = []
    for action in case.actions:
        with contextlib.suppress(Exception):
            apply(sch, action)
            accepted.append(action)
    return replace(case, actions=tuple(accepted)), sch


def judge(case: Case, sch: axe.Schedule, pool: Pool) -> Verdict:
    """What becomes of a case, `sch` its schedule."""
    try:
        with limited(LIMIT):
            return _judged(case, sch, pool)
    except Exception as error:
        pool.drop(case.mesh)
        return Verdict(RAW, stripped(error), "".join(traceback.format_exception(error))[-6000:])


def _judged(case: Case, sch: axe.Schedule, pool: Pool) -> Verdict:
    try:
        exe = axe.compile(sch, work_dir=None, redistribute="insert")
    except axe.AxeError as error:
        return Verdict(REFUSED, stripped(error), str(error))
    assert isinstance(exe, MeshExecutable)
    workers = pool.on(case.mesh)
    for run in range(2):
        inputs = fitting_inputs(case.program, run)
        stored: dict[str, np.ndarray] = {}
        truth = evaluate(case.program, inputs, stored)
        found = on_mesh(exe, case.program, workers, inputs)
        seen = difference(found, truth, case.program.written)
        for device, name, array in exe.copies(workers):  # what is returned is the first device's
            other = difference({**found, name: array}, truth, case.program.written)
            seen = seen or (None if other is None else f"device {device}: {other}")
        if seen is not None:
            elsewhere = difference(found, truth, case.program.written, stored)
            verdict = _blamed(case, elsewhere or seen, inputs, truth)
            if verdict.kind == WRONG and elsewhere is None:
                verdict = replace(verdict, reason=UNWRITTEN)
            return verdict
    return Verdict(RIGHT)


def _blamed(case: Case, seen: str, inputs: Mapping[str, np.ndarray], truth: Mapping[str, np.ndarray]) -> Verdict:
    """The verdict where the mesh gave a wrong answer."""
    sch = case.schedule()
    written = case.program.written
    unscheduled = difference(on_one_device(sch.mod["main"], case.program, inputs), truth, written)
    if unscheduled is not None:
        return Verdict(UPSTREAM, "unscheduled", unscheduled)
    if difference(on_one_device(replayed(case)[1].mod["main"], case.program, inputs), truth, written) is None:
        return Verdict(WRONG, "", seen)
    for action in case.actions:
        apply(sch, action)
        alone = difference(on_one_device(sch.mod["main"], case.program, inputs), truth, written)
        if alone is not None:
            kind = IGNORED if action.primitive in OURS else UPSTREAM
            return Verdict(kind, action.primitive, f"after {action}: {alone}")
    return Verdict(WRONG, "", seen)


def refused_raw(action: Action, error: Exception) -> Verdict | None:
    """The verdict on a refusal, if it isn't one: a primitive of the package that raised no error of the package."""
    if isinstance(error, axe.AxeError) or action.primitive not in OURS:
        return None
    return Verdict(RAW, f"{action.primitive}: {stripped(error)}", "".join(traceback.format_exception(error))[-6000:])


# ---- Smaller cases ---------------------------------------------------------------------------------------------------


def judged_anew(case: Case, pool: Pool) -> tuple[Case, Verdict]:
    """A case less what its schedule refuses, and the verdict; that of a raw primitive, if there is one."""
    sch = case.schedule()
    accepted = []
    for action in case.actions:
        try:
            apply(sch, action)
        except Exception as error:
            raw = refused_raw(action, error)
            if raw is not None:
                return replace(case, actions=(*accepted, action)), raw
        else:
            accepted.append(action)
    case = replace(case, actions=tuple(accepted))
    return case, judge(case, sch, pool)


def judged_apart(case: Case, engine: str) -> tuple[Case, Verdict]:
    """As `judged_anew`, in a child that may die of it; this process must not have launched workers or compiled."""
    receive, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(receive)
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)  # where the allocator would say what it saw
        try:
            answer = pickle.dumps(judged_anew(case, Pool(engine)))
        except (Malformed, axe.AxeError, ValueError, ZeroDivisionError):
            answer = pickle.dumps((case, Verdict(REFUSED)))
        os.write(tell, answer)
        os._exit(0)
    os.close(tell)
    with open(receive, "rb") as file:
        if not select.select([file], [], [], 2 * LIMIT)[0]:
            os.kill(child, signal.SIGKILL)
        answer = file.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 0 and answer:
        return pickle.loads(answer)
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
    return case, Verdict(CRASHED, "", f"the process {how}")


def minimized(
    case: Case, verdict: Verdict, judge_again: Callable[[Case], tuple[Case, Verdict]], seconds: float = 90.0
) -> tuple[Case, Verdict]:
    """A smaller case that fails the same way, and its verdict."""
    end = time.monotonic() + seconds
    going = True
    while going and time.monotonic() < end:
        going = False
        for smaller in _smaller(case):
            if time.monotonic() > end:
                break
            try:
                fitting_inputs(smaller.program, 0)
                fitting_inputs(smaller.program, 1)
                found, again = judge_again(smaller)
            except (Malformed, axe.AxeError, ValueError, ZeroDivisionError):
                continue
            if again.like(verdict):
                case, verdict, going = found, again, True
                break
    return case, verdict


def _smaller(case: Case) -> Iterator[Case]:
    program = case.program
    for index in reversed(range(len(program.stages))):
        if len(program.stages) > 1:
            fewer = without_stage(program, index)
            names = {tensor.name for tensor in fewer.parameters}
            kept = tuple((name, text) for name, text in case.layouts if name in names)
            yield replace(case, program=fewer, layouts=kept)
    for index in reversed(range(len(case.actions))):
        yield replace(case, actions=case.actions[:index] + case.actions[index + 1 :])
    for index in range(len(case.layouts)):
        yield replace(case, layouts=case.layouts[:index] + case.layouts[index + 1 :])
    for index, (axis, size) in enumerate(case.mesh):
        rest = case.mesh[:index] + case.mesh[index + 1 :]
        if rest and not any(f"@{axis}" in text for _, text in case.layouts):
            yield replace(case, mesh=rest)
        for less in range(2, size):
            yield replace(case, mesh=(*case.mesh[:index], (axis, less), *case.mesh[index + 1 :]))
    for name, value in program.extents:
        for less in range(1, value):
            yield replace(case, program=with_extent(program, name, less))
    for index, stage in enumerate(program.stages):
        for value in _simpler(stage.value):
            stages = (*program.stages[:index], replace(stage, value=value), *program.stages[index + 1 :])
            yield replace(case, program=_used(replace(program, stages=stages)))


def _simpler(text: str) -> Iterator[str]:
    """Values with an operation less."""
    tree = ast.parse(text, mode="eval")
    for node in ast.walk(tree):
        parts: list[ast.expr] = []
        if isinstance(node, ast.BinOp):
            parts = [node.left, node.right]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("max", "min"):
            parts = node.args
        if any("T." in ast.unparse(part) or "[" in ast.unparse(part) for part in parts):
            for part in parts:
                whole, old = text, ast.get_source_segment(text, node)
                new = ast.get_source_segment(text, part)
                if old is not None and new is not None and ("T." in new or "[" in new):
                    yield whole.replace(old, new, 1)


def _used(program: Program) -> Program:
    """The program less parameters that nothing touches."""
    texts = [f"{stage.target} {stage.value} {' '.join(stage.indices)}" for stage in program.stages]
    used = set(re.findall(r"\w+", " ".join(texts)))
    return replace(program, tensors=tuple(tensor for tensor in program.tensors if tensor.name in used))


# ---- In words --------------------------------------------------------------------------------------------------------


def described(case: Case) -> str:
    """A case as one can read and rebuild it."""
    lines = [case.program.source(), "", f"mesh {dict(case.mesh)}"]
    lines += [f"layout {name}: {text}" for name, text in case.layouts]
    lines += [str(action) for action in case.actions]
    return "\n".join(lines)


def family(case: Case, verdict: Verdict) -> str:
    """What a minimized failure is counted under: its reason, or its primitives and whether a store isn't plain."""
    if verdict.kind == RAW or verdict.reason == UNWRITTEN:
        return f"{verdict.kind}: {verdict.reason}"
    primitives = ", ".join(sorted({action.primitive for action in case.actions})) or "nothing scheduled"
    declared = " + layouts" if case.layouts else ""
    indices = [in_numbers(index, case.program.extents) for stage in case.program.stages for index in stage.indices]
    plain = all(re.fullmatch(r"v\d+|0", index) for index in indices)
    after = f"after {verdict.reason}: " if verdict.reason else ""
    return f"{verdict.kind}: {after}{primitives}{declared}{'' if plain else '; stores elsewhere than at iterators'}"
