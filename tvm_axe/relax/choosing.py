"""The form of every value of a model on a mesh axis, chosen by cost, with weights that fit a device's memory.

The search goes along the calls. A state says in which forms each value that is still needed is held; a call takes one
of its strategies, and what it needs in another form is moved to it (`tvm_axe.relax.forms.move`). States that a cheaper
one reaches by moves are dropped, so that the result is exact but for a bound on the number of states. Where one value
alone is needed, or no fewer are for a while, the function is cut; equal segments, as layers are, are solved once. So
are the steps of a recurrence, each of which hands over what it leaves (`tvm_axe.relax.collecting`).

Weights cost nothing to hold, and with free weights every device would have them all, so that there is a limit on their
bytes. What they and bytes that are moved cost in the search is `tvm_axe.relax.tradeoffs`' to say.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from tvm_axe.layout.dtypes import dtype_bytes
from tvm_axe.relax.chosen import Choice, Chosen, Moved, moves_of, seconds_of
from tvm_axe.relax.collecting import SearchStep, collected, joined
from tvm_axe.relax.forms import WHOLE, Form
from tvm_axe.relax.graph import Graph, Node, Value
from tvm_axe.relax.moving import Moving
from tvm_axe.relax.operators import Operators
from tvm_axe.relax.strategies import Operator
from tvm_axe.relax.tradeoffs import Call, Found, Point, fewest_bytes
from tvm_axe.relax.ways import Strategy

__all__ = ["choose"]

BEAM = 128
"""States that are kept at most."""
FEWER, MORE = 16, 32
"""States that are kept where a function is cut; and where that is behind what hands over a value, beside which others
are needed."""
AHEAD, FEW = 48, 4
"""Calls that are looked at behind a place for one where fewer values are needed, and how many these may be."""
LONG = 0.4
"""The part of the calls through which a value is needed that isn't what goes on from one to the next, as a mask."""
TOGETHER = 32
"""States whose moves to all others are worked out at once."""
MOST_FORMS = 24
"""Forms of a value that are tried at most."""

State = tuple[int, ...]
"""In which forms each of some values is held, by its number (`tvm_axe.relax.moving`)."""


def choose(
    graph: Graph,
    operators: Operators,
    limit: float | None = None,
    pinned: Mapping[int, Form] | None = None,
) -> Chosen:
    """Choose a form for every value of a function.

    Parameters
    ----------
    graph : Graph
        The function.
    operators : Operators
        Its operators on the devices.
    limit : float, optional
        Bytes of weights that a device may hold; the least that is found if it can't be met.
    pinned : Mapping[int, Form], optional
        Forms that inputs and weights are to be placed in, by the number of the value.
    """
    search = _Search(graph, operators, pinned or {})
    return fewest_bytes(search, search.weights, math.inf if limit is None else limit, search.met())


class _Search:
    def __init__(self, graph: Graph, operators: Operators, pinned: Mapping[int, Form]) -> None:
        self.graph, self.operators, self.pinned = graph, operators, pinned
        self.link, self.devices = operators.rates.link, operators.devices
        self.price = 0.0  # seconds a byte of weights
        self._solutions: dict[Any, dict[State, tuple[float, list[Any]]]] = {}
        self._numbers: dict[Any, int] = {}  # of segments: equal ones have one
        self.values: Sequence[Value] = graph.values
        self.calls = [self._step(node) for node in graph.nodes]
        self._spread_forms()
        self.steps, self.values = collected(self.calls, graph.values)
        self.sizes = [dtype_bytes(value.dtype, value.size) for value in self.values]
        self.moving = Moving(self.values, self.devices, self.link)
        self.weights = sum(size for size, value in zip(self.sizes, self.values) if value.kind == "weight")
        self._group()
        self.segments = self._segments()
        self._weighing: dict[int, bool] = {}
        self._met: dict[Any, list[tuple[float, int, State, Any]]] = {}

    def _moves(self, value: int) -> bool:
        """Whether a value is moved to the form that is wanted; another is placed in it from the start."""
        return self.values[value].kind == "value" or value in self.pinned

    def _is_placed(self, value: int) -> bool:
        """Whether a value is a weight that lies from the start as it is wanted, so that its price counts."""
        return self.values[value].kind == "weight" and not self._moves(value)

    def _weighs(self, step: SearchStep) -> bool:
        """Whether the price of weights makes a difference between ways to make a call: of small ones all is held."""
        if step.group not in self._weighing:
            placed = [at for at, v in enumerate(step.ins) if self._is_placed(v)]
            self._weighing[step.group] = any(way.ins[at] != WHOLE for way in step.strategies for at in placed)
        return self._weighing[step.group]

    # ---- Strategies

    def _step(self, node: Node) -> SearchStep:
        operator = self.operators.of_node(self.graph, node)
        whole = Strategy((WHOLE,) * len(node.ins), (WHOLE,) * len(node.outs))
        return SearchStep(node, operator, node.ins, node.outs, [whole])

    def _spread_forms(self) -> None:
        """Have forms spread from call to call until there is nothing new."""
        offered: dict[int, dict[Form, None]] = defaultdict(dict)
        users: dict[int, set[int]] = defaultdict(set)
        for value, form in self.pinned.items():
            offered[value][form] = None
        for at, step in enumerate(self.calls):
            for value in (*step.ins, *step.outs):
                users[value].add(at)
        waiting = dict.fromkeys(range(len(self.calls)))
        while waiting:
            at = next(iter(waiting))
            del waiting[at]
            step = self.calls[at]
            if step.operator is None:
                continue
            values = [*step.ins, *step.outs]
            seeds = frozenset((p, form) for p, v in enumerate(values) if self._moves(v) for form in offered[v])
            step.strategies = step.operator.strategies(seeds)
            for strategy in step.strategies:
                for value, form in zip(values, (*strategy.ins, *strategy.outs)):
                    known = offered[value]
                    if self._moves(value) and form.share and form not in known and len(known) < MOST_FORMS:
                        known[form] = None
                        waiting.update(dict.fromkeys(users[value] - {at}))
        results = set(self.graph.results)
        for step in self.calls:
            step.strategies = [s for s in step.strategies if not self._leaves_terms(step, s, results)]

    def _group(self) -> None:
        """Number the groups of calls that have the same ways and costs, whichever operators they are.

        Steps of a recurrence that is unrolled each read another part of one value, by functions of their own.
        """
        groups: dict[tuple[object, ...], int] = {}
        for step in self.steps:
            group = (
                tuple((s.ins, s.outs, s.seconds, s.share, s.stages) for s in step.strategies),
                tuple(self._is(v) for v in (*step.ins, *step.outs)),
                tuple(step.ins.index(v) for v in step.ins),
            )
            step.group = groups.setdefault(group, len(groups))

    def _is(self, value: int) -> tuple[object, ...]:
        """What moves of a value cost by, and holding it."""
        of = self.values[value]
        return of.kind, of.typical, of.dtype, self.pinned.get(value)

    def _leaves_terms(self, step: SearchStep, strategy: Strategy, results: set[int]) -> bool:
        return any(form.partial and value in results for form, value in zip(strategy.outs, step.outs))

    # ---- Costs

    def _placed(self, value: int) -> int:
        """How a value is held from the start."""
        return self.moving.number(frozenset({self.pinned.get(value, WHOLE)}))

    def _met_by(
        self, step: SearchStep, held: State, needed: Sequence[int], price: float
    ) -> list[tuple[float, int, State, Any]]:
        """The ways to make a call: the time, which strategy, what is held after of what it takes and makes, and moves.

        Of ways that differ in nothing that is needed later, by its place in what a call takes and makes, the cheapest.
        """
        key = step.group, held, needed, price, self.moving.toll
        if key not in self._met:
            best: dict[State, tuple[float, int, State, Any]] = {}
            for at, strategy in enumerate(step.strategies):
                weights = price * sum(
                    self.sizes[v] * form.fraction() for v, form in zip(step.ins, strategy.ins) if self._is_placed(v)
                )
                made = tuple([self.moving.number(frozenset({form})) for form in strategy.outs])
                for seconds, taken, moves in self._ways(step, strategy, held, needed):
                    after = taken + made
                    kept = tuple([after[place] for place in needed])
                    if kept not in best or seconds + weights < best[kept][0]:
                        best[kept] = seconds + weights, at, after, moves
            self._met[key] = list(best.values())
        return self._met[key]

    def _ways(
        self, step: SearchStep, strategy: Strategy, held: State, needed: Sequence[int]
    ) -> list[tuple[float, State, tuple[Any, ...]]]:
        toll = self.moving.toll
        inside = toll * sum(stage.how.bytes for stage in strategy.stages)
        ways: list[tuple[float, State, tuple[Any, ...]]] = [(strategy.seconds + inside, held, ())]
        for position, need in enumerate(strategy.ins):
            value = step.ins[position]
            if not self._moves(value):
                continue
            first, more = step.ins.index(value), []
            # How a value is held that isn't needed later doesn't matter: the cheapest way to have it is enough.
            later = {step.ins[at] for at in needed if at < len(step.ins)}.union(step.ins[position + 1 :])
            for seconds, forms, moves in ways:
                options = list[tuple[float, State, tuple[Any, ...]]]()
                for target in dict.fromkeys([need, WHOLE] if need.share else [need]):
                    made = self.moving.cheapest(value, forms[first], target)
                    if made is None:
                        continue
                    how = made.how
                    # What is held whole is as good as any share: it's sliced where it is needed.
                    then = moves + (((first, made.source, target, how),) if how.kind else ())
                    extra = how.seconds
                    if target != need:
                        cut = self.moving.between(value, target, need)
                        assert cut is not None  # a slice
                        then += ((first, target, need, cut),)
                        extra += cut.seconds
                    after = tuple([made.after if v == value else f for v, f in zip(step.ins, forms)])
                    options.append((seconds + extra + toll * how.bytes, after, then))
                    if not how.kind and target == need:
                        break
                more += options if value in later else sorted(options, key=itemgetter(0))[:1]
            ways = more
        return ways

    # ---- Dynamic programming

    def _segments(self) -> list[tuple[list[SearchStep], list[list[int]]]]:
        """The function, cut where the fewest values are needed: calls, and the values needed before the first and after
        each.

        Where one alone is, or no more than anywhere in the calls that follow: what all layers read, as a mask or the
        angles of positions, is needed beside what goes from one to the next. And behind what hands over a value, where
        a step of a recurrence ends. A result is what a call leaves, so that
        behind those who read it nothing has to be known of it; what is pinned is as it is until it is moved.
        """
        last = {v: at for at, step in enumerate(self.steps) for v in step.ins}
        live: list[list[int]] = [[]]
        for at, step in enumerate(self.steps):
            pinned = (v for v in dict.fromkeys(step.ins) if v in self.pinned and v not in live[-1])
            live.append([v for v in (*live[-1], *pinned, *step.outs) if last.get(v, -1) > at])
        counts = [len(each) for each in live]
        found, begin = [], 0
        for end in range(1, len(live)):
            least = min(counts[end : end + AHEAD])
            fewest = counts[end] < 2 or counts[end] == least <= FEW or self.steps[end - 1].hands_over
            if fewest or end == len(self.steps):
                found.append((self.steps[begin:end], live[begin : end + 1]))
                begin = end
        return found

    def met(self) -> float:
        """Bytes that a device receives where all meet behind products: Megatron's closed form, of any function.

        They meet where one value alone goes on, beside what is needed through much of the function, as a mask or the
        angles of positions: an all-reduce of it makes what follows any device's, and where what lies between two such
        places divides, nothing there need be moved. What the first product takes is gathered.
        """
        weights = {v for v, value in enumerate(self.graph.values) if value.kind == "weight"}
        last = {v: at for at, step in enumerate(self.calls) for v in step.ins if v not in weights}
        first = {v: at for at, step in reversed([*enumerate(self.calls)]) for v in (*step.ins, *step.outs)}
        going, start, behind, fresh = set[int](), 0, list[int](), False
        for at, step in enumerate(self.calls):
            fresh |= not weights.isdisjoint(step.ins) and step.operator is not None and any(step.operator.operations)
            going = {v for v in (*going, *step.ins, *step.outs) if last.get(v, -1) > at}
            alone = [self.sizes[v] for v in going if last[v] - first[v] < LONG * len(self.calls)]
            if len(alone) == 1 and fresh:
                behind, fresh = [*behind, *alone], False
            elif len(alone) == 1 and not behind:
                (start,) = alone
        return (self.devices - 1) / self.devices * (start + 2 * sum(behind))

    def solved(self, price: float, toll: float) -> Found:
        """The cheapest choice where weights have a price and bytes cost more than their time."""
        self.price, self.moving.toll, segments = price, toll, self.segments
        table: dict[State, tuple[float, State | None, list[Any]]] = {(): (0.0, None, [])}
        history = []
        for steps, live in segments:
            number: dict[int, int] = {}  # values by their first appearance: equal segments are solved once

            def local(values: Sequence[int], number: dict[int, int] = number) -> tuple[int, ...]:
                return tuple(number.setdefault(v, len(number)) for v in values)

            calls = tuple((s.group, local(before), local(s.ins), local(s.outs)) for s, before in zip(steps, live))
            # Hashed once, and not for each state at its begin.
            segment = self._numbers.setdefault((calls, local(live[-1])), len(self._numbers))
            new: dict[State, tuple[float, State | None, list[Any]]] = {}
            asked = price if any(map(self._weighs, steps)) else 0.0
            for entry, (cost, *_) in table.items():
                key = segment, entry, asked, toll
                if key not in self._solutions:
                    self._solutions[key] = self._segment(steps, live, entry)
                for state, (seconds, ways) in self._solutions[key].items():
                    if state not in new or cost + seconds < new[state][0]:
                        new[state] = cost + seconds, entry, ways
            table = self._pruned(new, live[-1], MORE if steps[-1].hands_over else FEWER)
            history.append(table)
        state = min(table, key=lambda each: table[each][0])
        made: list[Call] = []
        for (steps, _), reached in zip(reversed(segments), reversed(history)):
            _, before, ways = reached[state]
            made += map(self._call, steps[::-1], ways[::-1])
            assert before is not None
            state = before
        return self.found(made[::-1])

    def _call(self, step: SearchStep, way: tuple[int, tuple[Any, ...], State]) -> Call:
        at, moves, after = way
        strategy = step.strategies[at]  # the call's own: that of an equal one may share factors of other names
        assert step.node is not None
        choice = Choice(step.node, strategy, tuple(Moved(step.ins[first], *rest) for first, *rest in moves))
        held = {(v, form) for v, form in zip(step.ins, strategy.ins) if self._is_placed(v)}
        seconds, moved = seconds_of([choice]), sum(how.bytes for how in moves_of([choice], self.link))
        return Call(choice, after, Point(seconds, moved, sum(self.sizes[v] * form.fraction() for v, form in held)))

    def _segment(
        self, steps: Sequence[SearchStep], live: Sequence[Sequence[int]], entry: State
    ) -> dict[State, tuple[float, list[Any]]]:
        table: dict[State, tuple[float, State | None, Any, Any]] = {entry: (0.0, None, None, ())}
        history = []
        for step, before, after in zip(steps, live, live[1:]):
            # Of a state with what isn't held yet, which is as it was placed, what a call takes.
            where = {v: at for at, v in enumerate(dict.fromkeys((*before, *step.ins)))}
            placed = tuple([self._placed(v) for v in [*where][len(before) :]])
            price = self.price if self._weighs(step) else 0.0
            taken_from = _picked([where[v] for v in step.ins])
            new: dict[State, tuple[float, State | None, Any, Any]] = {}
            # Where what is needed later is: among what a call takes and makes or, from the end, what was held before.
            places = {v: at for at, v in enumerate((*before, *step.ins, *step.outs), -len(before))}
            needed = [places[v] for v in after]
            own, pick = tuple(sorted(at for at in needed if at >= 0)), _picked(needed)
            for state, (cost, *_) in table.items():
                for seconds, way, forms, moves in self._met_by(step, taken_from(state + placed), own, price):
                    now, taken = pick(forms + state), cost + seconds
                    known = new.get(now)
                    if known is None or taken < known[0]:
                        new[now] = taken, state, way, moves
            table = self._pruned(new, after, BEAM)
            history.append(table)
        exits = {}
        for last, (cost, *_) in table.items():
            state, ways = last, []
            for reached in reversed(history):
                _, previous, way, moves = reached[state]
                ways.append((way, moves, state))
                assert previous is not None
                state = previous
            exits[last] = cost, ways[::-1]
        return exits

    def _pruned(self, states: dict[State, Any], values: Sequence[int], most: int) -> dict[State, Any]:
        """The states without those that cost no less than a cheaper one and moves from it; the cheapest `most`."""
        ordered = sorted(states.items(), key=lambda each: each[1][0])
        if len(ordered) < 2 or not values:
            return dict(ordered[:1])
        costs = np.array([entry[0] for _, entry in ordered])
        held, tables = [], []
        for value, forms in zip(values, zip(*(state for state, _ in ordered))):
            number = {each: at for at, each in enumerate(dict.fromkeys(forms))}
            if len(number) == 1:
                continue  # all hold it alike
            held.append(np.array([number[each] for each in forms]))
            tables.append(self.moving.reaches(value, tuple(number))[:, held[-1]])
        free = np.ones(len(ordered), dtype=bool)
        kept, begin = list[int](), 0
        while len(kept) < most:
            # What some that aren't dropped yet reach is worked out together; of them one may still drop another.
            some = begin + np.flatnonzero(free[begin:])[:TOGETHER]
            if not len(some):
                break
            begin = some[-1] + 1
            reached = costs[some, None]
            for table, column in zip(tables, held):
                reached = reached + table[column[some]]
            dearer = reached > costs
            for at, stays in zip(some, dearer):
                if free[at]:
                    kept.append(at)
                    free &= stays
        return dict([ordered[at] for at in kept[:most]])

    def keep_shared(self, found: Found) -> None:
        """Have products that a choice has devices share be shared from here on."""
        shared = {id(choice.node) for choice in found.chosen.choices if choice.strategy.share < 1}
        for step in self.steps:
            ways = [strategy for strategy in step.strategies if strategy.share < 1]
            if id(step.node) in shared and len(ways) < len(step.strategies):
                step.strategies, step.group = ways, ~step.group  # a group of its own

    def found(self, calls: Sequence[Call]) -> Found:
        """These calls as a choice for the function."""
        chosen = self._chosen([*joined(self.steps, [call.choice for call in calls])])
        return Found(chosen, calls, Point(chosen.seconds, chosen.bytes, chosen.weights[0]))

    def _chosen(self, choices: Sequence[Choice]) -> Chosen:
        held: dict[int, dict[Form, None]] = {number: {} for number in self.graph.params}
        operations: dict[str, tuple[int, float]] = {}
        whole: dict[str, str] = {}
        forms: dict[int, Form] = {}
        for value, form in self.pinned.items():
            held.setdefault(value, {})[form] = None
        for step, choice in zip(self.calls, choices):
            forms.update(zip(choice.node.outs, choice.strategy.outs))
            for value, form in zip(choice.node.ins, choice.strategy.ins):
                if not self._moves(value):
                    held.setdefault(value, {})[form] = None
            operator, left = step.operator, choice.node.left
            count = 0 if operator is None else sum(operator.operations)
            if count:
                operations[choice.node.name] = round(count / left), left * choice.strategy.share
                if choice.strategy.share >= 1 and isinstance(operator, Operator):
                    whole[choice.node.name] = operator.whole_because()
        for number in (*self.graph.params, *self.graph.results):
            if self.graph.values[number].kind != "value" and not held.get(number):
                held.setdefault(number, {})[WHOLE] = None
        results = tuple(forms[number] if number in forms else next(iter(held[number])) for number in self.graph.results)
        return Chosen(
            self.graph,
            tuple(choices),
            {v: tuple(f) for v, f in held.items()},
            results,
            self.link,
            self.operators.axis,
            operations,
            whole,
        )


def _picked(places: Sequence[int]) -> Callable[[State], State]:
    """What takes some places of a tuple, as a tuple; in C, since the search does it most."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda state: tuple([state[at] for at in places])
