"""Every plan is proved to get on: what would stall is found, and a judge goes through every order of events."""

import random
from dataclasses import replace

import programs_flags
import programs_hopper as programs
import pytest
from programs_interleaved import LOOPS, USES, interleaved
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.tile.targets.cuda.specialized import plan as plans
from tvm_axe.tile.targets.cuda.specialized.buffers import Order
from tvm_axe.tile.targets.cuda.specialized.events import Roles
from tvm_axe.tile.targets.cuda.specialized.plan import SpecializedPlan
from tvm_axe.tile.targets.cuda.specialized.progress import Stall, all_ways, find_stall, run
from tvm_axe.tile.targets.cuda.specialized.schedule import schedule
from tvm_axe.tile.targets.cuda.specialized.steps import Acquire, Given, Guard, PingPong, Release, Repeat, Sync

HOPPER = Target({"kind": "cuda", "arch": "sm_90a"})

READ = {"g": "ab", "h": "b", "i": "a", "s": "s", "t": "t", "x": "st", "y": "sa", "z": "sb"}

KNOWN = [
    ("as", "si"),
    ("abs", "sg"),
    ("bta", "tgh"),
    ("sbt", "xhh"),
    ("atb", "tghi"),
    ("asbt", "ytgh"),
]
"""Loads and uses whose threads take a tile while a product has the one that is loaded before it."""


def planned(func):
    made = tile.plan(func, HOPPER)
    assert isinstance(made, SpecializedPlan), made.explain()
    return made


def stall(made, steps=None):
    return find_stall(made.program, made.memory, steps or made.schedule.steps, made.warpgroups, made.grid.persistent)


# ---- What was known to stall -------------------------------------------------------------------------------------


@pytest.mark.parametrize("extent", [1, 2, 7, "n[0]"])
@pytest.mark.parametrize("loop", ["range", "one stage"])
@pytest.mark.parametrize(("loads", "uses"), KNOWN)
def test_loads_in_another_order_than_reads_get_on(loads, uses, loop, extent):
    made = planned(interleaved(loads, uses, loop, extent))
    assert set(made.memory.buffers.values()) == {1} and stall(made) is None


@pytest.mark.parametrize(("loads", "uses"), KNOWN)
def test_without_slots_given_back_early_the_proof_refuses(loads, uses, monkeypatch):
    """As it was: products in flight keep a slot while consumers wait for what is loaded behind it."""
    monkeypatch.setattr(Order, "stands_before", lambda *_: False)
    with pytest.raises(TileError, match=r"circular buffers of .*would wait for ever: the producer waits for a slot of"):
        planned(interleaved(loads, uses))


def test_a_refusal_names_who_waits_for_what_and_the_remedy(monkeypatch):
    monkeypatch.setattr(Order, "stands_before", lambda *_: False)
    with pytest.raises(
        TileError,
        match=r"circular buffers of a, s: .*the producer waits for a slot of a to be given back; consumer 0 waits for "
        r"s to be loaded; valid is to load tiles in the order in which they are read, more stages, or roles='uniform'",
    ):
        planned(interleaved("as", "si"))


@pytest.mark.parametrize("extent", ["n[0]", "n[o]"])
def test_an_inner_loop_without_iterations_gives_nothing_back(extent):
    """What the inner loop left in flight was given back by the next outer iteration, whether it had run or not."""
    made = planned(interleaved("ab", "gg", "one stage", extent, outer=3))
    assert stall(made) is None
    (outer,) = (step for step in made.schedule.steps if isinstance(step, Repeat))
    (inner,) = (step for step in outer.body if isinstance(step, Repeat))
    assert str(inner.behind[-1]) == "release a, b" and inner is outer.body[-1]


def test_loops_of_one_extent_are_told_apart():
    """The inner one's condition is written with the same expression as the outer one's extent."""
    for loads, uses in (("ab", "gg"), ("bs", "szh")):
        made = planned(interleaved(loads, uses, "one stage", "n[0]", outer="n[0]"))
        assert stall(made) is None and "schedule:" not in made.explain()


def test_turns_and_deferred_products_are_given_up_where_they_stall(monkeypatch):
    for count, expected in ((1, "warpgroups don't take turns"), (2, "no product is deferred")):
        found = [Stall(("someone waits",), ("k",))] * count

        def first_stalls(*args, found=found):
            return found.pop() if found else find_stall(*args)

        monkeypatch.setattr(plans, "find_stall", first_stalls)
        made = planned(programs.attention(1, 1, 512))
        text = f"schedule: {expected}  (with it, circular buffers of k: the kernel would wait for ever: someone waits"
        assert text in made.explain()
        assert bool(made.schedule.deferred) == (count == 1) and not made.schedule.takes_turns


# ---- The proof and every order of events --------------------------------------------------------------------------


def stalls_in_some_order(events, arrivals, most=10000):
    """Whether roles may stop before their ends, by every order of their events; copies arrive when they like.

    Waits are as the hardware has them, for a parity. Returns None if there are too many orders.
    """
    roles, barriers = list(events), list(arrivals)
    number = {barrier: at for at, barrier in enumerate(barriers)}
    start = (tuple(0 for _ in roles), tuple((0, 0) for _ in barriers), frozenset(), ())
    seen, todo, ends = {start}, [start], set()

    def arrived(phases, at):
        complete, count = phases[at]
        count += 1
        made = (complete + 1, 0) if count == arrivals[barriers[at]] else (complete, count)
        return (*phases[:at], made, *phases[at + 1 :])

    while todo:
        state = todo.pop()
        places, phases, joined, flying = state
        following = []
        for at in set(flying):
            rest = list(flying)
            rest.remove(at)
            following.append((places, arrived(phases, at), joined, tuple(rest)))
        for role, name in enumerate(roles):
            if places[role] == len(events[name]):
                continue
            event = events[name][places[role]]
            at = number[event.barrier]
            gone = (*places[:role], places[role] + 1, *places[role + 1 :])
            if event.kind == "arrive":
                if event.barrier.kind == "full":
                    following.append((gone, phases, joined, tuple(sorted((*flying, at)))))
                else:
                    following.append((gone, arrived(phases, at), joined, flying))
            elif event.kind == "wait":
                if phases[at][0] % 2 == event.phase % 2:
                    following.append((gone, phases, joined, flying))
            else:
                mine = next((entry for entry in joined if entry[0] == role), None)
                if mine is None:
                    following.append((places, arrived(phases, at), joined | {(role, phases[at][0])}, flying))
                elif phases[at][0] > mine[1]:
                    following.append((gone, phases, joined - {mine}, flying))
        if not following:
            ends.add(all(place == len(events[name]) for place, name in zip(places, roles)))
        for new in following:
            if new not in seen:
                seen.add(new)
                todo.append(new)
        if len(seen) > most:
            return None
    assert len(ends) == 1, "the end depends on the order"
    return not ends.pop()


def shuffled(steps, draw):
    """The same steps with one that has to do with barriers moved to another place of its body."""
    places = []

    def look(body, path):
        for at, step in enumerate(body):
            if isinstance(step, (Repeat, Given, Guard)):
                look(step.body, (*path, at))
            if isinstance(step, (Acquire, Release, PingPong, Sync)):
                places.append((*path, at))

    def changed(body, path):
        at, *deeper = path
        if deeper:
            return (*body[:at], replace(body[at], body=changed(body[at].body, deeper)), *body[at + 1 :])
        rest = [*body[:at], *body[at + 1 :]]
        rest.insert(draw.randint(0, len(rest)), body[at])
        return tuple(rest)

    look(steps, ())
    return changed(steps, draw.choice(places))


SMALL = [
    programs.matmul(128, 256, 192, stages=2),
    programs.attention(1, 1, 256),
    programs.attention(1, 1, 384, block=(64, 128)),
    programs.chained(128, 192),
    programs.listed(0),
    programs.through_shared(128, 128, 128),
]


def drawn(draw):
    """A small program: one of the above, or loads and uses in any order."""
    if draw.random() < 0.3:
        return draw.choice(SMALL)
    loads = draw.sample("abst", draw.randint(2, 4))
    uses = [use for use in USES if set(READ[use]) <= set(loads)]
    if not set(loads) & set("ab") or not uses:
        return drawn(draw)
    products = [use for use in uses if use in "ghi"]
    chosen = [draw.choice(products), *(draw.choice(uses) for _ in range(draw.randint(0, 2)))]
    draw.shuffle(chosen)
    loop = draw.choice(list(LOOPS))
    extent = draw.choice([2, 3, "n[0]"])
    return interleaved("".join(loads), "".join(chosen), loop, extent, draw.choice([0, 0, 2]))


@pytest.mark.parametrize("seed", range(4))
def test_the_proof_agrees_with_every_order(seed, monkeypatch):
    """Of plans as made, as they were made without giving slots back early, and with steps moved to other places."""
    draw = random.Random(seed)
    found = {kind: [0, 0] for kind in ("made", "as it was", "moved")}
    while sum(map(sum, found.values())) < 24:
        kind = draw.choice(list(found))
        known = kind == "as it was" and draw.random() < 0.5
        func = interleaved(*draw.choice(KNOWN), "range", draw.choice([2, 3])) if known else drawn(draw)
        made = tile.plan(func, HOPPER)
        if not isinstance(made, SpecializedPlan):
            continue  # a tile is loaded and not read
        steps = made.schedule.steps
        if kind == "as it was":
            with monkeypatch.context() as before:
                before.setattr(Order, "stands_before", lambda *_: False)
                steps = schedule(made.program, made.memory.buffers, made.warpgroups > 1).steps
        elif kind == "moved":
            steps = shuffled(steps, draw)
        roles = Roles(made.program, made.memory, steps, made.warpgroups)
        ways = draw.choice(list(all_ways(made.program, made.memory.buffers, made.grid.persistent)))
        if roles.faults(ways):
            assert kind == "moved"
            continue
        events = roles.events(ways, 1)
        expected = stalls_in_some_order(events, roles.arrivals)
        if expected is not None:
            assert (run(events, roles.arrivals) is not None) == expected
            found[kind][expected] += 1
    assert found["made"][True] == 0 and found["made"][False] and found["moved"][False]
    assert found["as it was"][True]


# ---- Doctored plans ----------------------------------------------------------------------------------------------


def in_loop(made, change):
    """The steps with the body of the last loop changed."""
    at = max(at for at, step in enumerate(made.schedule.steps) if isinstance(step, Repeat))
    steps = list(made.schedule.steps)
    steps[at] = replace(steps[at], body=tuple(change(list(steps[at].body))))
    return tuple(steps)


def test_a_slot_that_is_given_back_behind_the_next_wait_stalls():
    made = planned(programs.matmul(128, 256, 256, stages=1))

    def late(body):
        release = next(step for step in body if isinstance(step, Release))
        body.remove(release)
        body.insert(next(at for at, step in enumerate(body) if isinstance(step, Acquire)) + 1, release)
        return body

    found = stall(made, in_loop(made, late))
    assert found is not None and "a slot of a, b" in str(found)


@pytest.mark.parametrize("kind", ["dropped", "twice"])
def test_slots_are_given_back_once(kind):
    made = planned(programs.matmul(128, 256, 256, stages=2))

    def change(body):
        at = next(at for at, step in enumerate(body) if isinstance(step, Release))
        return body[:at] + body[at + 1 :] if kind == "dropped" else [*body[: at + 1], *body[at:]]

    found = stall(made, in_loop(made, change))
    assert found is not None and "a slot of a, b" in str(found)


def test_a_slot_of_a_later_iteration_is_not_given_back_before_its_time():
    made = planned(programs.matmul(128, 256, 256, stages=2))

    def nearer(body):
        return [replace(step, lag=0) if isinstance(step, Release) else step for step in body]

    assert "out of turn" in str(stall(made, in_loop(made, nearer)))


def test_consumers_that_meet_within_a_turn_stall():
    made = planned(programs.attention(1, 1, 512))
    assert made.schedule.takes_turns and stall(made) is None

    def meet(body):
        at = next(at for at, step in enumerate(body) if isinstance(step, PingPong))
        return [*body[: at + 1], Sync(False), *body[at + 1 :]]

    found = stall(made, in_loop(made, meet))
    assert found is not None and "for its turn" in str(found) and "for the other consumers" in str(found)


def test_a_turn_that_is_not_passed_on_stalls():
    made = planned(programs.attention(1, 1, 512))
    kept = in_loop(made, lambda body: [s for s in body if not (isinstance(s, PingPong) and not s.begins)])
    assert "consumer 1 waits for its turn" in str(stall(made, kept))


# ---- Programs of all kinds ---------------------------------------------------------------------------------------

KINDS = {
    "persistent": programs.matmul(4096, 4096, 4096),
    "persistent attention": programs.attention(4, 32, 4096),
    "causal": programs.attention(2, 3, 768, causal=True),
    "three warpgroups": programs.attention(2, 3, 768, block=(192, 64)),
    "any extent": programs.batched(2, 256, 64, 256),
    "branch": programs.chained(128, 320, branch=True),
    "through shared": programs.through_shared(256, 256, 256),
    "storing warp": programs_flags.product_scatter(4, 4096, 1024, 512),
    "pieces": programs_flags.product_scatter(4, 4096, 1024, 512, (64, 64)),
}


@pytest.mark.parametrize("name", KINDS)
def test_all_kinds_of_programs_get_on(name):
    made = planned(KINDS[name])
    roles = Roles(made.program, made.memory, made.schedule.steps, made.warpgroups)
    for ways in all_ways(made.program, made.memory.buffers, made.grid.persistent):
        events = roles.events(ways, 2)
        assert run(events, roles.arrivals) is None
    assert stall(made) is None


def test_the_storing_warp_is_a_role():
    made = planned(KINDS["storing warp"])
    roles = Roles(made.program, made.memory, made.schedule.steps, made.warpgroups)
    ways = next(all_ways(made.program, made.memory.buffers, made.grid.persistent))
    events = roles.events(ways, 2)
    assert len(events["the storing warp"]) == 4
    events["the storing warp"] = events["the storing warp"][:1]  # it never says that it has stored the first tile
    assert "waits for copy c to parts" in str(run(events, roles.arrivals))
