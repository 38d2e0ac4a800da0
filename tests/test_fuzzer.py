"""scripts/fuzz_schedules.py itself: a seed is one case, the judge sees what is wrong, cases are made small."""

import itertools
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tvm

SCRIPTS = Path(__file__).parents[1] / "scripts"
SEEDS = range(20)


@pytest.fixture(scope="module")
def fuzz() -> Iterator[SimpleNamespace]:
    """The fuzzer's modules, and workers on threads."""
    import fuzz_actions
    import fuzz_drawing
    import fuzz_evaluating
    import fuzz_judging
    import fuzz_mistakes
    import fuzz_programs
    import fuzz_scheduling
    import fuzz_stages

    pool = fuzz_judging.Pool("threads")
    yield SimpleNamespace(
        actions=fuzz_actions,
        drawing=fuzz_drawing,
        evaluating=fuzz_evaluating,
        judging=fuzz_judging,
        mistakes=fuzz_mistakes,
        programs=fuzz_programs,
        scheduling=fuzz_scheduling,
        stages=fuzz_stages,
        pool=pool,
    )
    pool.close()


def case_of(fuzz, program, mesh, *actions, layouts=()):
    """A case, its schedule, and the actions that it accepted."""
    case = fuzz.scheduling.Case(program, mesh, layouts, tuple(fuzz.actions.Action(*action) for action in actions))
    found, sch = fuzz.judging.replayed(case)
    assert found == case, "an action was refused"
    return case, sch


def chained(fuzz, rows=6, columns=4):
    """Two stages: a sum over k, and a pointwise one on its result."""
    programs = fuzz.programs
    return programs.Program(
        (("a", rows), ("b", columns), ("c", 4)),
        (
            programs.Tensor("X", ("a", "c"), "float32"),
            programs.Tensor("W", ("c", "b"), "float32"),
            programs.Tensor("C", ("a", "b"), "float32", local=True),
            programs.Tensor("Y", ("a", "b"), "float32"),
        ),
        (
            programs.Stage("mm", ("a", "b", "c"), "SSR", "C", ("v0", "v1"), "X[v0, v2] * W[v2, v1]", "sum"),
            programs.Stage("epi", ("a", "b"), "SS", "Y", ("v0", "v1"), "C[v0, v1] + T.float32(2)"),
        ),
    )


SPLIT = (
    ("shard", ("mm", 2, "x")),
    ("split_collective", ("mm", 0, None)),
    ("reorder_collective", ("C_global", ("epi",))),
)


# ---- Programs --------------------------------------------------------------------------------------------------------


def test_a_seed_is_one_case(fuzz):
    for seed in SEEDS:
        (first, sch, refused), (second, again, _) = (fuzz.scheduling.draw_case(seed) for _ in range(2))
        assert first == second
        tvm.ir.assert_structural_equal(sch.mod, again.mod)
        if not any(fuzz.judging.refused_raw(each.action, each.error) for each in refused):
            replayed, third = fuzz.judging.replayed(first)
            assert replayed == first
            tvm.ir.assert_structural_equal(sch.mod, third.mod)


def drawn_program(fuzz, seed):
    """A program of a seed; every fourth has a loop that carries state."""
    draw = fuzz.stages.draw_program if seed % 4 else fuzz.stages.draw_steps
    return draw(random.Random(seed), [2, 3])


def test_text_and_function_are_one_program(fuzz):
    for seed in SEEDS:
        program = drawn_program(fuzz, seed)
        tvm.ir.assert_structural_equal(program.function(), tvm.script.from_source(program.source()))
        rebuilt = eval(repr(program), vars(fuzz.programs))
        assert rebuilt == program


def test_numpy_agrees_with_stock_tvm(fuzz):
    for seed in SEEDS:
        program = drawn_program(fuzz, seed)
        inputs = fuzz.evaluating.fitting_inputs(program, seed)
        truth = fuzz.evaluating.evaluate(program, inputs)
        found = fuzz.judging.on_one_device(program.function(), program, inputs)
        assert fuzz.judging.difference(found, truth, program.written) is None


def test_every_kind_of_stage_is_drawn(fuzz):
    """Each kind by itself makes programs that mean something."""
    for kind in fuzz.stages.KINDS:
        made = 0
        for seed in range(30):
            drawing = fuzz.drawing.Drawing(random.Random(seed), [2])
            kind(drawing)
            try:
                fuzz.evaluating.fitting_inputs(fuzz.stages._finished(drawing), 0)
            except fuzz.evaluating.Malformed:
                continue
            made += 1
        assert made >= 10, kind.__name__


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"indices": ("v0 + 1", "v1")}, "leaves Y"),
        ({"indices": ("v0 // 2", "v1")}, "stores an element twice"),
        ({"value": "C[v0 + 1, v1]"}, "leaves C"),
        ({"value": "C[v0, v1] * T.float32(16777216)"}, "leaves what its type holds"),
    ],
)
def test_what_means_nothing_is_refused(fuzz, stage, message):
    program = chained(fuzz)
    mm, epi = program.stages
    broken = replace(program, stages=(mm, replace(epi, **stage)))
    with pytest.raises(fuzz.evaluating.Malformed, match=message):
        fuzz.evaluating.evaluate(broken, fuzz.evaluating.inputs_of(program, 0, 9))


def test_a_product_whose_parts_leave_the_type_is_drawn_again(fuzz):
    """An order that meets the zero last has an infinity before, and their product is no number."""
    programs = fuzz.programs
    program = programs.Program(
        (("a", 81),),
        (programs.Tensor("X", ("a",), "float32"), programs.Tensor("Y", (), "float32")),
        (programs.Stage("all", ("a",), "R", "Y", (), "X[v0]", "prod"),),
    )
    inputs = {"X": np.full(81, 3, "float32"), "Y": np.zeros((), "float32")}
    inputs["X"][0] = 0
    with pytest.raises(fuzz.evaluating.Malformed, match="leaves what its type holds"):
        fuzz.evaluating.evaluate(program, inputs)


def test_what_is_read_before_it_is_written_is_refused(fuzz):
    program = chained(fuzz)
    with pytest.raises(fuzz.evaluating.Malformed, match="never written of C"):
        fuzz.evaluating.evaluate(
            replace(program, stages=program.stages[::-1]), fuzz.evaluating.inputs_of(program, 0, 9)
        )


# ---- The judge -------------------------------------------------------------------------------------------------------


def test_what_is_right_is_right(fuzz):
    for actions in ((), SPLIT[:1], SPLIT[:2], SPLIT, (*SPLIT, ("fuse_collective", (("mm", "epi", "Y_global"),)))):
        case, sch = case_of(fuzz, chained(fuzz), (("x", 2),), *actions)
        assert fuzz.judging.judge(case, sch, fuzz.pool) == fuzz.judging.Verdict(fuzz.judging.RIGHT)


def test_a_collective_that_takes_the_wrong_slice_is_wrong_on_the_mesh(fuzz, monkeypatch):
    """A reduce-scatter that gives each device its neighbour's slice."""
    from tvm_axe.collective import ops

    case, sch = case_of(fuzz, chained(fuzz), (("x", 2),), *SPLIT)
    whole = ops.collective

    def shifted(name, source, target, *numbers, rank):
        whole(name, source, target, *numbers, rank=1 - rank if name == "reduce_scatter" else rank)

    monkeypatch.setattr(ops, "collective", shifted)
    verdict = fuzz.judging.judge(case, sch, fuzz.pool)
    assert verdict.kind == fuzz.judging.WRONG
    assert verdict.detail.startswith("Y[0, 0] is ")


def test_a_barrier_that_is_missing_shows_with_delays(fuzz, monkeypatch):
    import fuzz_delays

    from tvm_axe.collective import local, worker
    from tvm_axe.lower import emit

    monkeypatch.setitem(worker.COMMANDS, "load", worker.COMMANDS["load"])  # as before, when this test is done
    monkeypatch.setattr(local, "_ENTRY", local._ENTRY)
    monkeypatch.setenv("PYTHONPATH", "")
    # Worker 0 never sleeps, worker 1 round every call and longer than worker 0 waits for a core on a busy machine.
    monkeypatch.setattr(fuzz_delays, "LONGEST", 0.25)
    rolls = ({"random": lambda: 0.9}, {"random": itertools.cycle((0.0, 1.0)).__next__})
    monkeypatch.setattr(fuzz_delays, "random", SimpleNamespace(Random=lambda rank: SimpleNamespace(**rolls[rank])))
    fuzz_delays.install()
    case, sch = case_of(fuzz, chained(fuzz), (("x", 2),), *SPLIT)
    assert fuzz.judging.judge(case, sch, fuzz.pool).kind == fuzz.judging.RIGHT
    before = emit.barriers_before
    monkeypatch.setattr(emit, "barriers_before", lambda *arguments: [False for _ in before(*arguments)])
    assert fuzz.judging.judge(case, sch, fuzz.pool).kind == fuzz.judging.WRONG


def test_kernels_on_gpus_meet_behind_delays(fuzz):
    """All functions by which CUDA source meets others, whoever wrote it; other source is as it was."""
    import fuzz_delays

    from tvm_axe.collective.cuda import meeting, source
    from tvm_axe.tile.targets.cuda.instructions import flags

    heads = {"axe_await": source.MEET, "axe_tell": source.MEET, "axe_wait": flags._WAIT}
    heads |= {f"axe_{name}": flags._SIGNAL.replace("SET", name) for name, _ in flags._SETS.values()}
    for name, text in heads.items():
        (begins,) = re.findall(rf"{name}\(.*?\) \{{ axe_stumble\(\);", fuzz_delays.stumbling(text), re.DOTALL)
        assert "asm" not in begins
    for text in (meeting._SOURCE, source.source()):
        assert fuzz_delays.stumbling(text).count("{ axe_stumble();") == 2
    quiet = text.replace("axe_await", "axe_a").replace("axe_tell", "axe_t")
    assert fuzz_delays.stumbling(quiet) == quiet


def test_a_store_that_nobody_makes_is_seen(fuzz, monkeypatch):
    """Outputs are poisoned: a kernel that does nothing leaves no old answer."""
    case, sch = case_of(fuzz, chained(fuzz), (("x", 2),))
    from tvm_axe.collective import Workers

    monkeypatch.setattr(Workers, "call", lambda *_: None)
    verdict = fuzz.judging.judge(case, sch, fuzz.pool)
    assert (verdict.kind, verdict.detail.split(" and ")[0]) == (fuzz.judging.WRONG, "Y[0, 0] is nan")


def test_a_wrong_primitive_is_blamed(fuzz, monkeypatch):
    """What is wrong on one device too is the fault of the action behind which it is: upstream's, or the package's."""
    program = chained(fuzz)

    def rows_on_one_place(sch):
        sch.transform_layout("mm", ("write", 0), lambda i, j: [i // 2, j], assume_injective_transform=True)

    for primitive, kind in (("split", fuzz.judging.UPSTREAM), ("as_slice", fuzz.judging.IGNORED)):
        monkeypatch.setitem(fuzz.actions._APPLY, primitive, rows_on_one_place)
        action = fuzz.actions.Action(primitive, ())
        case = fuzz.scheduling.Case(program, (("x", 2),), (), (action,))
        _, sch = fuzz.judging.replayed(case)
        verdict = fuzz.judging.judge(case, sch, fuzz.pool)
        assert (verdict.kind, verdict.reason) == (kind, primitive)


def test_errors_that_are_not_the_packages_are_bugs(fuzz, monkeypatch):
    case, sch = case_of(fuzz, chained(fuzz), (("x", 2),), *SPLIT[:1])

    def broken(*_, **__):
        raise KeyError("C of 24 elements")

    from tvm_axe.executable.mesh import MeshExecutable

    monkeypatch.setattr(MeshExecutable, "of", broken)
    verdict = fuzz.judging.judge(case, sch, fuzz.pool)
    assert (verdict.kind, verdict.reason) == (fuzz.judging.RAW, "KeyError: _ ")


def test_a_process_that_dies_is_the_bug_of_its_seed():
    """Each seed is judged in a process of its own making; here the second one ends it."""
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1]); import fuzz_schedules as fuzz\n"
        "def dies(tell, seeds, *_):\n"
        "    for seed in seeds:\n"
        "        tell.send(seed)\n"
        "        if seed == 1: os.abort()\n"
        "        tell.send(fuzz.Record(seed, 'right'))\n"
        "    tell.send(None)\n"
        "import multiprocessing; multiprocessing.get_context = lambda _: fork\n"
        "fork = multiprocessing.context.ForkContext(); fuzz._judge_all = dies\n"
        "options = fuzz.argparse.Namespace(seed=0, count=4, processes=1, engine='threads', delays=False, minimize=0,\n"
        "    mistake=None)\n"
        "print([(record.seed, record.kind) for record in fuzz.records(options)])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(SCRIPTS)], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[(0, 'right'), (1, 'crashed or hung'), (2, 'right'), (3, 'right')]", done.stderr


# ---- Mistakes in the package: see scripts/fuzz_injecting.py for all of them, and how soon each is found -------------

FOUND_SOON = ("push unseen", "read unseen", "masks dropped", "gathered to one place")


@pytest.fixture(scope="module")
def drawn(fuzz) -> list[tuple]:
    """The first cases, with their schedules."""
    return [fuzz.scheduling.draw_case(seed)[:2] for seed in range(10)]


@pytest.mark.parametrize("name", FOUND_SOON)
def test_mistakes_are_found(fuzz, drawn, name):
    """A mistake in lowering or in a collective makes one of the first cases a bug, which without it is none."""
    pool = fuzz.judging.Pool("threads", timeout=3)
    try:
        for case, sch in drawn:
            with fuzz.mistakes.MISTAKES[name].patch():
                found = fuzz.judging.judge(case, sch, pool)
            if found.kind in fuzz.judging.BUGS:
                break
        else:
            pytest.fail(f"{name} is in none of {len(drawn)} cases")
        assert fuzz.judging.judge(case, sch, pool).kind in (fuzz.judging.RIGHT, fuzz.judging.REFUSED)
    finally:
        pool.close()


def test_a_mistake_in_a_primitive_is_found(fuzz):
    """What fuse_collective lets through is wrong on one device, too."""
    programs = fuzz.programs
    program = programs.Program(
        (("a", 4), ("b", 6), ("c", 4)),
        (
            programs.Tensor("X", ("a", "c"), "float32"),
            programs.Tensor("W", ("c", "b"), "float32"),
            programs.Tensor("C", ("a", "b"), "float32", local=True),
            programs.Tensor("s", ("b",), "float32", local=True),
            programs.Tensor("Y", ("a", "b"), "float32"),
        ),
        (
            programs.Stage("mm", ("a", "b", "c"), "SSR", "C", ("v0", "v1"), "X[v0, v2] * W[v2, v1]", "sum"),
            programs.Stage("s", ("a", "b"), "RS", "s", ("v1",), "C[v0, v1]", "sum"),
            programs.Stage("y", ("a", "b"), "SS", "Y", ("v0", "v1"), "C[v0, v1] - s[v1]"),
        ),
    )
    split = (("shard", ("mm", 2, "x")), ("split_collective", ("mm", 1, None)))
    moved = ("reorder_collective", ("C_global", ("s", "y")))
    fused = ("fuse_collective", (("mm", "s", "y"),))
    actions = tuple(fuzz.actions.Action(*action) for action in (*split, moved, fused))
    case = fuzz.scheduling.Case(program, (("x", 2),), (), actions)
    with fuzz.mistakes.MISTAKES["fuse: unfinished sums"].patch():
        accepted, sch = fuzz.judging.replayed(case)
        assert accepted == case
        verdict = fuzz.judging.judge(case, sch, fuzz.pool)
    assert (verdict.kind, verdict.reason) == (fuzz.judging.IGNORED, "fuse_collective")
    assert fuzz.judging.replayed(case)[0].actions == actions[:-1]


# ---- The minimizer ---------------------------------------------------------------------------------------------------


def test_a_failure_is_made_small(fuzz):
    """Of a case that fails whenever its sum is shared, only that is left."""
    judging = fuzz.judging
    actions = (("unroll", ("epi", 1)), *SPLIT, ("fuse_collective", (("mm", "epi", "Y_global"),)))
    case, _ = case_of(fuzz, chained(fuzz), (("x", 2), ("y", 2)), *actions)
    fails = judging.Verdict(judging.WRONG)

    def judge_again(smaller):
        found, _ = judging.replayed(smaller)
        shared = any(action.primitive == "shard" for action in found.actions)
        return found, fails if shared else judging.Verdict(judging.RIGHT)

    small, verdict = judging.minimized(case, fails, judge_again)
    assert verdict == fails
    assert [stage.name for stage in small.program.stages] == ["mm"]
    assert [str(action) for action in small.actions] == ["shard('mm', 2, 'x')"]
    assert small.mesh == (("x", 2),)
    assert small.program.sizes | {"c": 0} == {"a": 1, "b": 1, "c": 0}
    assert "mm" in judging.described(small) and "shard" in judging.family(small, verdict)
    inputs = fuzz.evaluating.fitting_inputs(small.program, 0)
    assert all(isinstance(array, np.ndarray) for array in fuzz.evaluating.evaluate(small.program, inputs).values())
