"""The steps of consumers, run by a judge beside the program that they were made of.

The judge knows no threads: what a tile holds is a term made of the statements that led to it, loads included. Steps and
program must end with the same terms; no statement may touch what a product in flight writes or overwrite what it reads,
no slot may be given back that one reads, and every slot taken is given back once, in order; what threads read of it is
fenced. What is sent stands behind a barrier that says so to TMA, and is overwritten behind one that waits for it. What
threads write is read, and written again, behind a barrier.
"""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import programs_hopper as programs
import pytest
import tvm_ffi
from programs_interleaved import interleaved, nested
from programs_sent import overwriting, sent
from tvm import ir, sym, tirx
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.tile.nodes import Branch, Copy, Fill, Gemm, Loop, Parallel
from tvm_axe.tile.targets.cuda.specialized import buffers
from tvm_axe.tile.targets.cuda.specialized.plan import SpecializedPlan
from tvm_axe.tile.targets.cuda.specialized.schedule import schedule
from tvm_axe.tile.targets.cuda.specialized.steps import (
    Acquire,
    Await,
    Choose,
    Define,
    Do,
    Fence,
    Given,
    Guard,
    Issue,
    PingPong,
    Release,
    Repeat,
    Send,
    Sync,
)
from tvm_axe.tile.walking import substitute_in

ZERO = "zero"
HOPPER = Target({"kind": "cuda", "arch": "sm_90a"})


def value(expr, names):
    """An expression's value; that of an element of a tensor is drawn from its text."""
    if isinstance(expr, (bool, int)):
        return int(expr)
    known = substitute_in(expr, {var: tirx.const(at, "int32") for var, at in names.items()})
    known = tvm_ffi.structural_map(known, (ir.TensorLoad, drawn))
    return int(sym.Analyzer().simplify(known))


def drawn(load):
    return tirx.const(sum(map(ord, str(sym.Analyzer().simplify(load)))) % 3, "int32")


@dataclass
class State:
    """What tiles hold."""

    terms: dict = field(default_factory=dict)

    def do(self, node, names, accumulate=None):
        if isinstance(node, Fill) and float(node.value) == 0:
            self.terms[node.dst.tile] = ZERO
            return
        inputs = [self.terms.get(read) for read in node.reads]
        if isinstance(node, Gemm):
            held = self.terms.get(node.c.tile) if accumulate else ZERO
            inputs = [self.terms.get(node.a.tile), self.terms.get(node.b.tile), held]
        old = [] if isinstance(node, Gemm) else [self.terms.get(written) for written in node.writes]
        for written in node.writes:
            self.terms[written] = hash((id(node), written.name, tuple(inputs), tuple(old)))


def in_order(program, loads):
    """What tiles hold at the program's end, and for every load what it loads, in order."""
    state, loaded = State(), {copy: [] for copy in loads}

    def run(nodes, names):
        for node in nodes:
            if isinstance(node, Loop):
                start = value(node.start, names)
                for at in range(start, start + value(node.extent, names)):
                    run(node.body, {**names, node.var: at})
            elif isinstance(node, Branch):
                run(node.then if value(node.condition, names) else node.otherwise, names)
            elif node in loaded:
                term = hash((id(node), tuple(value(start, names) for start in node.src.start)))
                loaded[node].append(term)
                state.terms[node.dst.tile] = term
            elif type(node).__name__ != "Let":
                state.do(node, names, isinstance(node, Gemm) and node.accumulate)

    run(program.body, {var: 0 for var, _ in program.grid})
    return state.terms, loaded


def boxes(node, names):
    """The places in global memory that a statement stores to, not atomically: first and last indices."""
    if isinstance(node, (Copy, Fill)) and node.dst.tile.scope == "global" and not getattr(node, "atomic", None):
        first = [value(start, names) for start in node.dst.start]
        yield node.dst.tile, first, [at + extent - 1 for at, extent in zip(first, node.dst.extents)]
    if isinstance(node, Parallel):
        joined = {tensor for tensor, _ in node.joins}
        for tensor, indices, stores in node.accesses:
            if stores and tensor.scope == "global" and tensor not in joined:
                ends = [dict(zip(node.vars, point)) for point in ([0, 0], [extent - 1 for extent in node.extents])]
                yield tensor, *([value(index, {**names, **end}) for index in indices] for end in ends)


def by_steps(program, slots, steps, loaded, by_tma=()):
    """What tiles hold at the steps' end."""
    state, flights = State(), []
    taken, given = dict.fromkeys(slots, 0), dict.fromkeys(slots, 0)
    written, read = set(), set()  # tiles that TMA doesn't see yet, and those that it may be reading
    stored, barriers = [], {"any": 0, "settling": 0}
    fetched = set()  # slots that threads have read and not fenced
    touched = {"reads": set(), "writes": set()}  # what threads share and have touched since the last barrier
    nodes = [node for node in program.nodes() if node not in loaded]
    shared = {tile for node in nodes for tile in node.reads if tile.scope in ("shared", "global")}
    shared &= {tile for node in nodes for tile in node.writes} - {tile for buffer in slots for tile in buffer.tiles}

    def meet(node, by_threads=True):
        reads, writes = shared & set(node.reads), shared & set(node.writes)
        assert not touched["writes"] & (reads | writes), f"{node} touches what another thread may be writing"
        assert not touched["reads"] & writes, f"{node} overwrites what another thread may be reading"
        touched["reads"].update(reads if by_threads else ())
        touched["writes"].update(writes)

    def check_stores(node, names):
        """What is stored again is behind a barrier, if TMA does so either time behind one that settles."""
        for tensor, first, last in boxes(node, names):
            for other, at, to, before, tma in stored:
                if other is tensor and all(a <= d and c <= b for a, b, c, d in zip(first, last, at, to)):
                    which = "settling" if tma or node in by_tma else "any"
                    assert before[which] < barriers[which], f"{node} overwrites what may be on its way"
            stored.append((tensor, first, last, dict(barriers), node in by_tma))

    def fetch(node):
        fetched.update((buffer, taken[buffer]) for buffer in slots if set(buffer.tiles) & set(node.reads))

    def check(node):
        overwritten = {tile for tile in node.writes if tile.scope == "shared"}
        assert not overwritten & read, f"{node} overwrites what is being sent"
        written.update(overwritten)
        for gemm, _ in flights:
            reads, writes = set(node.reads), set(node.writes)
            if not (isinstance(node, Gemm) and node.c.tile is gemm.c.tile):
                assert gemm.c.tile not in reads | writes, f"{node} touches what {gemm} writes"
            assert not writes & {gemm.a.tile, gemm.b.tile}, f"{node} overwrites what {gemm} reads"

    def run(steps, names):
        for step in steps:
            if isinstance(step, Acquire):
                assert taken[step.buffer] - given[step.buffer] < slots[step.buffer], f"{step}: every slot is held"
                for copy in step.buffer.copies:
                    state.terms[copy.dst.tile] = loaded[copy][taken[step.buffer]]
                taken[step.buffer] += 1
            elif isinstance(step, Release):
                if step.when is None or value(step.when, names):
                    number = taken[step.buffer] - step.lag
                    given[step.buffer] += 1
                    assert given[step.buffer] == number, f"{step}: slots are given back in the order taken, once"
                    assert not any(held.get(step.buffer) == number for _, held in flights), f"{step}: it is being read"
                    assert (step.buffer, number) not in fetched, f"{step}: what was read may be on its way"
            elif isinstance(step, Issue):
                check(step.gemm)
                meet(step.gemm)
                state.do(step.gemm, names, value(step.accumulate, names))
                flights.append((step.gemm, {r: taken[r] for r in slots if set(r.tiles) & set(step.gemm.reads)}))
            elif isinstance(step, Await):
                del flights[: max(0, len(flights) - step.pending)]
            elif isinstance(step, Do):
                check(step.node)
                meet(step.node)
                check_stores(step.node, names)
                state.do(step.node, names)
                fetch(step.node)
            elif isinstance(step, Send):
                check(step.node)
                meet(step.node, by_threads=False)
                check_stores(step.node, names)
                assert step.node.src.tile not in written, f"{step}: TMA may not see it"
                state.do(step.node, names)
                read.add(step.node.src.tile)
            elif isinstance(step, Sync):
                barriers["any"] += 1
                touched.update(reads=set(), writes=set())
                barriers["settling"] += step.settles
                written.difference_update(set(written) if step.proxy else ())
                read.difference_update(set(read) if step.drains else ())
                fetched.difference_update(set(fetched) if step.proxy or step.settles else ())
            elif isinstance(step, Fence):
                fetched.clear()
            elif isinstance(step, Given):
                run(step.body, {**names, step.var: value(step.value, names)})
            elif isinstance(step, Guard):
                if value(step.extent, names) > 0:
                    run(step.body, names)
            elif isinstance(step, Repeat):
                start, extent = value(step.start, names), value(step.extent, names)
                for at in range(start, start + extent):
                    run(step.body, {**names, step.var: at})
                if extent > 0:
                    run(step.behind, names)
            elif isinstance(step, Choose):
                run(step.then if value(step.condition, names) else step.otherwise, names)
            else:
                assert isinstance(step, (Define, PingPong))
                if isinstance(step, Define):
                    meet(step.node)
                    fetch(step.node)

    run(steps, {var: 0 for var, _ in program.grid})
    assert not flights and taken == given
    assert all(len(terms) == taken[buffer] for buffer in slots for copy in buffer.copies for terms in [loaded[copy]])
    return state.terms


PROGRAMS = {
    "matmul": programs.matmul(128, 256, 320),
    "one step": programs.matmul(128, 256, 64),
    "attention": programs.attention(1, 1, 512),
    "one block": programs.attention(1, 1, 128),
    "causal": programs.attention(1, 1, 512, causal=True, block=(128, 64)),
    "three": programs.attention(1, 1, 384, block=(192, 64)),
    "shared": programs.through_shared(128, 128, 256),
    "batched": programs.batched(2, 128, 64, 256),
    "chained": programs.chained(128, 256),
    "chained once": programs.chained(128, 64),
    "under a branch": programs.chained(128, 320, branch=True),
    **{f"a list of {count}": programs.listed(count) for count in range(3)},  # as its count is drawn
    "read the other way round": interleaved("as", "si"),
    "a barrier of two apart": interleaved("abs", "sg"),
    "a third between": interleaved("asb", "yhg"),
    "inner loops": interleaved("abs", "sgz", outer=3),
    "inner loops of any extent": interleaved("bs", "szh", extent="n[0]", outer=3),
    "inner loops of another extent": interleaved("ab", "ggi", "pipelined", "n[o]", outer=4),
}


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_steps_do_what_the_program_does(name, count, turns):
    program = tile.read(PROGRAMS[name])
    slots = {buffer: count if buffer.loop else 1 for buffer in buffers.find(program)}
    made = schedule(program, slots, turns)
    expected, loaded = in_order(program, [copy for buffer in slots for copy in buffer.copies])
    got = by_steps(program, slots, made.steps, loaded)
    outputs = [param for param in program.params if param in expected]
    assert outputs and all(got[param] == expected[param] for param in outputs)


@pytest.mark.parametrize("seed", range(4))
def test_steps_of_loops_in_loops_do_what_the_program_does(seed):
    """With the slots that fit, and proved to get on."""
    draw, judged = random.Random(seed), 0
    while judged < 12:
        program = tile.read(nested(draw))
        made = tile.plan(program, HOPPER)
        if not isinstance(made, SpecializedPlan):
            continue
        slots = made.memory.buffers
        expected, loaded = in_order(program, [copy for buffer in slots for copy in buffer.copies])
        got = by_steps(program, slots, made.schedule.steps, loaded)
        assert all(got[param] == expected[param] for param in program.params if param in expected)
        assert "schedule:" not in made.explain()
        judged += 1


@pytest.mark.parametrize("seed", range(40))
def test_steps_of_tiles_that_are_sent_do_what_the_program_does(seed):
    program = tile.read(sent(random.Random(seed)))
    made = tile.plan(program, HOPPER)
    slots = made.memory.buffers
    assert made.memory.sent == {node for node in program.nodes() if is_sent(node)}
    expected, loaded = in_order(program, [copy for buffer in slots for copy in buffer.copies])
    got = by_steps(program, slots, made.schedule.steps, loaded, {*made.memory.staging, *made.memory.sent})
    assert all(got[param] == expected[param] for param in program.params if param in expected)


@pytest.mark.parametrize("seed", range(60))
def test_what_is_stored_again_is_stored_in_order(seed):
    made = tile.plan(tile.read(overwriting(random.Random(seed))), HOPPER)
    program = made.program  # with copies in the place of parallels that store boxes
    slots = made.memory.buffers
    expected, loaded = in_order(program, [copy for buffer in slots for copy in buffer.copies])
    got = by_steps(program, slots, made.schedule.steps, loaded, {*made.memory.staging, *made.memory.sent})
    assert all(got[param] == expected[param] for param in program.params if param in expected)


def is_sent(node):
    return isinstance(node, Copy) and (node.src.tile.scope, node.dst.tile.scope) == ("shared", "global")


def test_a_step_without_a_barrier_is_found():
    """The judge of what is sent can fail: steps without their barriers, or that don't wait, are wrong."""
    found = Counter()
    for seed in range(12):
        for less in (Sync(False), Sync(True)):
            said = complaint(sent(random.Random(seed)), less)
            if said:
                found["TMA may not see it" in said, "is being sent" in said] += 1
    assert found[True, False] and found[False, True] and not found[False, False]


def test_a_step_without_a_fence_is_found():
    said = [complaint(sent(random.Random(seed)), PingPong(True), Fence) for seed in range(24)]
    assert any(said) and all("may be on its way" in each for each in said if each)


def test_a_step_without_a_barrier_between_threads_is_found():
    said = [complaint(overwriting(random.Random(seed)), PingPong(True)) for seed in range(24)]
    assert any("another thread" in each for each in said)


def complaint(func, barrier, kind=Sync):
    """What the judge says of a program whose steps have another barrier in place of each; nothing if it takes it."""
    made = tile.plan(tile.read(func), HOPPER)
    program = made.program
    slots = made.memory.buffers
    _, loaded = in_order(program, [copy for buffer in slots for copy in buffer.copies])
    try:
        by_steps(program, slots, _with(made.schedule.steps, barrier, kind), loaded)
    except AssertionError as error:
        return str(error)
    return ""


def _with(steps, barrier, kind=Sync):
    """Steps with another barrier in place of each."""
    made = []
    for step in steps:
        if isinstance(step, kind):
            made.append(barrier)
        elif isinstance(step, Repeat):
            made.append(replace(step, body=_with(step.body, barrier, kind), behind=_with(step.behind, barrier, kind)))
        elif isinstance(step, Choose):
            arms = (_with(arm, barrier, kind) for arm in (step.then, step.otherwise))
            made.append(replace(step, **dict(zip(("then", "otherwise"), arms))))
        else:
            made.append(step)
    return tuple(made)
