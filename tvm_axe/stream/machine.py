"""When things happen: the clocks of units, channels and off-chip memory, as a loop that TVM compiles.

What a unit does is written down for it as a script (`tvm_axe.stream.steps`). A unit takes a token no earlier than the
token's time, works for so many cycles, frees the token's slot in the channel and sends what comes out, or waits until
there is room. So the clocks need no common order, and a unit goes on for as long as its channels let it. Order in time
matters where units compete: for off-chip memory, and where what comes first is taken. These wait until every other unit
is blocked, and the earliest of them goes next; whatever happens because of it happens later, so nothing that was
decided has to be taken back.

Off-chip memory serves requests of a fixed size as one queue, as fast as its channels together. Requests are not
simulated one by one: while n are sent a cycle, the queue grows by n - rate, so what has to be known is when a unit
starts and stops to send, two events a tile, and when it sends what is left in its last cycle. A request crosses three
channels, to the memory, into its queue and back.

The arrays are those of `tvm_axe.stream.clocks`.
"""

# What TVMScript inlines assign to are the program's variables, which ruff takes for their own.
# ruff: noqa: F823, F841, SIM109

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.machines import keeping
from tvm_axe.machines.cache import key
from tvm_axe.stream.steps import ACCESS, FIRST, FREE, GO, NOW, OCCUPY, ORDER, PEEK, READ, SEND, TAKE, USE, WORK

# Columns of units. AT and TAIL are the addresses of a unit's next cell and of its last one, HELD says that more cells
# are to be had, DUE is when FIRST may be decided with what is there, and TURN in which order where that is the same.
# PORTS is the place of its first port in the array that says which channel a port is of.
AT, TAIL, CLOCK, BUSY, BLOCKED, MEMORY, TOKENS, STATE, ANSWER, QUEUED, HELD, DUE, TURN, PORTS = range(14)
RUNS, WAITS, ANSWERED, GRANTED, ENDED = range(5)  # the states of units: ANSWERED by memory, GRANTED the first there is

# Columns of channels, which are rings of the times from which on tokens can be SEEN and slots FILLED.
BASE, DEPTH, HEAD, COUNT, FREED, SPACE, WAITER, THROWN, CLEARED = range(9)
SEEN, FILLED = range(2)

# Columns of queues of units: those that are ready, as a ring; those that send requests, with the time of their next
# event, what is left then, and how many a cycle they send; those that decide what comes first; those that know more.
LINE, SENDER, EVENT, LEFT, SENT, DECIDER, TELL = range(7)

# The state of the machine.
HOP, ISSUE, LATENCY, LIMIT, TRACED = range(5)
READY, READIES, SENDERS, DECIDERS, TURNS, TOLD, SPANS, TIME, SENDING, LATE, SCRIPT, NEW, NEWS = range(5, 18)
RATE, PENDING, SERVED = range(3)  # of off-chip memory: requests

NEVER: Final = 1 << 62


@functools.cache
def machine() -> tuple[Callable[..., None], Callable[..., None]]:
    """Return two functions: `follow` goes on until scripts end or something is known that they depend on.

    The other, `tidy`, copies what is left of scripts to a new array, so that what was followed takes no memory. To read
    and compile them takes seconds, so what they are compiled to is kept on disk.
    """
    held = keeping.store()
    steps = Path(__file__).with_name("steps.py")
    name = key("streams", Path(__file__).read_bytes(), steps.read_bytes(), tvm.__version__)
    code = _compiled() if held is None else held.get_or_make(name, _compiled)
    module = _tvm.load_llvm(code)
    return module["follow"], module["tidy"]


def _compiled() -> bytes:
    functions = {"follow": _follow(), "tidy": _tidy()}
    named = {name: function.with_attr("global_symbol", name) for name, function in functions.items()}
    return _tvm.compile_llvm(tvm.IRModule(named), Target("llvm"))


def _after(place: Any, size: Any) -> Any:
    """Return the place behind another in a ring."""
    return T.if_then_else(place + 1 == size, 0, place + 1)


def _tidy() -> tirx.PrimFunc:
    cells, places, many = (tirx.Var(name, "int64") for name in ("cells", "places", "many"))

    @T.prim_func(s_tir=True)
    def tidy(
        code: T.Buffer((cells,), "int64"),
        kept: T.Buffer((places,), "int64"),
        units: T.Buffer((many, 14), "int64"),
        state: T.Buffer((18,), "int64"),
    ) -> None:
        to: T.int64 = 1
        for u in range(many):
            at: T.int64 = units[u, AT]
            units[u, AT] = to
            while code[at] != 0:
                x: T.int64 = T.shift_right(code[at], T.int64(4))
                step: T.int64 = T.bitwise_and(code[at], T.int64(15))
                if step == GO:
                    at = x
                else:
                    more: T.int64 = T.if_then_else(step == FIRST or step == ORDER, x, 0)
                    size: T.int64 = T.if_then_else(step == READ, 2, 1 + more)
                    for i in range(size):
                        kept[to + i] = code[at + i]
                    at += size
                    to += size
            kept[to] = 0
            units[u, TAIL] = to
            to += 1
        state[NEW] = to

    return tidy


def _follow() -> tirx.PrimFunc:
    cells, many, ends, ways, places, held, kept = (
        tirx.Var(name, "int64") for name in ("cells", "many", "ends", "ways", "places", "held", "kept")
    )

    @T.prim_func(s_tir=True)
    def follow(
        code: T.Buffer((cells,), "int64"),
        units: T.Buffer((many, 14), "int64"),
        ports: T.Buffer((ends,), "int64"),
        channels: T.Buffer((ways, 9), "int64"),
        slots: T.Buffer((places, 2), "int64"),
        queues: T.Buffer((many, 7), "int64"),
        tenants: T.Buffer((held, 2), "int64"),
        spans: T.Buffer((kept, 3), "int64"),
        state: T.Buffer((18,), "int64"),
        memory: T.Buffer((3,), "float64"),
    ) -> None:
        u: T.int64 = 0  # the unit whose turn it is
        clock: T.int64 = 0  # its time
        at: T.int64 = 0  # the address of its next cell
        x: T.int64 = 0  # that cell's argument
        first_port: T.int64 = 0  # the place of its ports
        way: T.int64 = 0  # the channel of a port
        step: T.int64 = 0
        goes: T.int64 = 0  # whether it goes on
        busy: T.int64 = 1  # whether anything happens
        best: T.int64 = 0  # the earliest time
        found: T.int64 = 0
        chosen: T.int64 = 0

        @T.inline
        def ready(unit: Any) -> None:
            if units[unit, QUEUED] == 0:
                units[unit, QUEUED] = 1
                queues[(state[READY] + state[READIES]) % many, LINE] = unit
                state[READIES] += 1

        @T.inline
        def tell() -> None:
            queues[state[TOLD], TELL] = u
            state[TOLD] += 1

        @T.inline
        def wait(channel: Any) -> None:
            channels[channel, WAITER] = u
            goes = 0

        @T.inline
        def wake(channel: Any) -> None:
            if channels[channel, WAITER] >= 0:
                ready(channels[channel, WAITER])
                channels[channel, WAITER] = -1

        @T.inline
        def span(start: Any, stop: Any) -> None:
            if state[TRACED] != 0:
                spans[state[SPANS], 0] = u
                spans[state[SPANS], 1] = start
                spans[state[SPANS], 2] = stop
                state[SPANS] += 1

        @T.inline
        def free(channel: Any, time: Any) -> None:
            channels[channel, HEAD] = _after(channels[channel, HEAD], channels[channel, DEPTH])
            channels[channel, COUNT] -= 1
            place: T.int64 = T.truncmod(channels[channel, FREED] + channels[channel, SPACE], channels[channel, DEPTH])
            slots[channels[channel, BASE] + place, FILLED] = time
            channels[channel, SPACE] += 1
            wake(channel)

        @T.inline
        def throw_away(channel: Any) -> None:
            while channels[channel, COUNT] > 0:
                seen: T.int64 = slots[channels[channel, BASE] + channels[channel, HEAD], SEEN]
                channels[channel, CLEARED] = T.max(channels[channel, CLEARED], seen)
                free(channel, channels[channel, CLEARED] + state[HOP])

        @T.inline
        def enter(channel: Any) -> None:
            filled: T.int64 = slots[channels[channel, BASE] + channels[channel, FREED], FILLED]
            if filled > clock:
                units[u, BLOCKED] += filled - clock
                clock = filled

        @T.inline
        def send(channel: Any) -> None:
            channels[channel, FREED] = _after(channels[channel, FREED], channels[channel, DEPTH])
            channels[channel, SPACE] -= 1
            place: T.int64 = T.truncmod(channels[channel, HEAD] + channels[channel, COUNT], channels[channel, DEPTH])
            slots[channels[channel, BASE] + place, SEEN] = clock + state[HOP]
            channels[channel, COUNT] += 1
            units[u, TOKENS] += 1
            wake(channel)
            if channels[channel, THROWN] != 0:
                throw_away(channel)

        @T.inline
        def go() -> None:
            if x != 0:
                at = x
            else:
                goes = 0
                if units[u, HELD] != 0:
                    units[u, HELD] = 0
                    tell()

        @T.inline
        def take() -> None:
            x = ports[first_port + x]
            if step != FREE and channels[x, COUNT] == 0:
                wait(x)
            else:
                if step != FREE:
                    clock = T.max(clock, slots[channels[x, BASE] + channels[x, HEAD], SEEN])
                if step != PEEK:
                    free(x, clock + state[HOP])
                at += 1

        @T.inline
        def put() -> None:
            x = ports[first_port + x]
            if channels[x, SPACE] == 0:
                wait(x)
            else:
                enter(x)
                if step == SEND:
                    send(x)
                at += 1

        @T.inline
        def work() -> None:
            span(clock, clock + x)
            clock += x
            units[u, BUSY] += x
            at += 1

        @T.inline
        def access() -> None:
            if units[u, STATE] == ANSWERED:
                units[u, STATE] = RUNS
                units[u, MEMORY] += units[u, ANSWER] - clock
                span(clock, units[u, ANSWER])
                clock = units[u, ANSWER]
                at += 1
            else:
                units[u, STATE] = WAITS
                goes = 0
                queues[state[SENDERS], SENDER] = u
                queues[state[SENDERS], EVENT] = clock
                queues[state[SENDERS], LEFT] = x
                queues[state[SENDERS], SENT] = 0
                state[SENDERS] += 1

        @T.inline
        def read() -> None:
            x = ports[first_port + x]
            if channels[x, COUNT] == 0:
                wait(x)
            else:
                came: T.int64 = slots[channels[x, BASE] + channels[x, HEAD], SEEN]
                if came + code[at + 1] > clock:
                    units[u, BUSY] += came + code[at + 1] - T.max(clock, came)
                    clock = came + code[at + 1]
                at += 2

        @T.inline
        def first() -> None:
            best = NEVER
            found = 0
            for i in range(x):
                way = ports[first_port + code[at + 1 + i]]
                if channels[way, COUNT] > 0:
                    found += 1
                    seen: T.int64 = slots[channels[way, BASE] + channels[way, HEAD], SEEN]
                    if seen < best:
                        best = seen
                        units[u, ANSWER] = i
            if found == x or units[u, STATE] == GRANTED:
                for i in range(x):
                    way = ports[first_port + code[at + 1 + i]]
                    if channels[way, WAITER] == u:
                        channels[way, WAITER] = -1
                units[u, STATE] = RUNS
                units[u, DUE] = NEVER
                clock = T.max(clock, best)
                at += 1 + x
                tell()
            else:
                goes = 0
                for i in range(x):
                    way = ports[first_port + code[at + 1 + i]]
                    if channels[way, COUNT] == 0:
                        channels[way, WAITER] = u
                if found != 0:
                    if units[u, TURN] < 0:
                        queues[state[DECIDERS], DECIDER] = u
                        state[DECIDERS] += 1
                    units[u, DUE] = T.max(clock, best)
                    units[u, TURN] = state[TURNS]
                    state[TURNS] += 1

        @T.inline
        def order() -> None:
            # All of them are there. What came first is read next; the others are in the next such step, or the last one
            # is read behind it.
            best = NEVER
            for i in range(x):
                way = ports[first_port + code[at + 1 + i]]
                came: T.int64 = slots[channels[way, BASE] + channels[way, HEAD], SEEN]
                if came < best:
                    best = came
                    found = i
            clock = T.max(clock, best)
            behind: T.int64 = at + 1 + x
            code[behind] = code[at + 1 + found] * 16 + READ
            code[behind + 2] = code[at + 1 + found] * 16 + TAKE
            if x == 2:
                code[behind + 4] = code[at + 2 - found] * 16 + READ
                code[behind + 6] = code[at + 2 - found] * 16 + TAKE
            else:
                for i in range(x - 1):
                    code[behind + 5 + i] = code[at + 1 + i + T.if_then_else(i >= found, 1, 0)]
            at = behind

        @T.inline
        def end() -> None:
            units[u, STATE] = ENDED
            goes = 0
            for i in range(x):
                way = ports[first_port + 2 * i]
                channels[way, THROWN] = 1
                throw_away(way)

        @T.inline
        def turn() -> None:
            at = units[u, AT]
            clock = units[u, CLOCK]
            first_port = units[u, PORTS]
            goes = T.if_then_else(units[u, STATE] == WAITS or units[u, STATE] == ENDED, 0, 1)
            while goes != 0:
                x = T.shift_right(code[at], T.int64(4))
                step = T.bitwise_and(code[at], T.int64(15))
                if step == GO:
                    go()
                elif step <= TAKE:
                    take()
                elif step <= SEND:
                    put()
                elif step == WORK:
                    work()
                elif step == ACCESS:
                    access()
                elif step == READ:
                    read()
                elif step == FIRST:
                    first()
                elif step == ORDER:
                    order()
                elif step == OCCUPY:
                    tenants[x, 0] = clock
                    tenants[x, 1] = clock
                    at += 1
                elif step == USE:
                    tenants[x, 1] = T.max(tenants[x, 1], clock)
                    at += 1
                elif step == NOW:
                    units[u, ANSWER] = clock
                    at += 1
                    tell()
                else:
                    end()
            units[u, AT] = at
            units[u, CLOCK] = clock
            if clock > state[LIMIT]:
                state[LATE] = u

        @T.inline
        def next_decision() -> None:
            best = NEVER
            chosen = -1
            i: T.int64 = 0
            while i < state[DECIDERS]:
                unit: T.int64 = queues[i, DECIDER]
                due: T.int64 = units[unit, DUE]
                if due == NEVER:
                    units[unit, TURN] = -1
                    state[DECIDERS] -= 1
                    queues[i, DECIDER] = queues[state[DECIDERS], DECIDER]
                else:
                    if due < best or (due == best and units[unit, TURN] < units[chosen, TURN]):
                        best = due
                        chosen = unit
                    i += 1

        @T.inline
        def serve(time: Any) -> None:
            if time != state[TIME]:
                passed: T.int64 = time - state[TIME]
                most: T.float64 = memory[PENDING] + T.cast(state[SENDING] * passed, "float64")
                left: T.float64 = T.max(most - memory[RATE] * T.cast(passed, "float64"), T.float64(0))
                memory[SERVED] += most - left
                memory[PENDING] = left
                state[TIME] = time

        @T.inline
        def answer(place: Any, time: Any) -> None:
            unit: T.int64 = queues[place, SENDER]
            units[unit, STATE] = ANSWERED
            units[unit, ANSWER] = time - 1 + state[LATENCY] + T.cast(memory[PENDING] / memory[RATE], "int64")
            ready(unit)
            state[SENDERS] -= 1
            for column in range(SENDER, SENT + 1):
                queues[place, column] = queues[state[SENDERS], column]

        @T.inline
        def request(until: Any) -> None:
            goes = state[SENDERS]
            while goes != 0:
                place: T.int64 = 0
                for i in range(1, state[SENDERS]):
                    if queues[i, EVENT] < queues[place, EVENT]:
                        place = i
                time: T.int64 = queues[place, EVENT]
                if time >= until:
                    goes = 0
                else:
                    serve(time)
                    state[SENDING] -= queues[place, SENT]
                    if queues[place, LEFT] == 0:
                        answer(place, time)
                        busy = 1
                        goes = 0
                    else:
                        sent: T.int64 = T.min(state[ISSUE], queues[place, LEFT])
                        queues[place, EVENT] = time + T.truncdiv(queues[place, LEFT], sent)
                        queues[place, LEFT] = T.truncmod(queues[place, LEFT], sent)
                        queues[place, SENT] = sent
                        state[SENDING] += sent

        # What was written down since the last time goes on where the last cell was.
        for i in range(state[NEWS]):
            piece: T.int64 = state[NEW] + i * 3
            code[units[code[piece], TAIL]] = (state[SCRIPT] + code[piece + 1]) * 16
            units[code[piece], TAIL] = state[SCRIPT] + code[piece + 2]
            ready(code[piece])
        while busy != 0:
            while state[READIES] > 0 and state[LATE] < 0:
                u = queues[state[READY], LINE]
                state[READY] = _after(state[READY], many)
                state[READIES] -= 1
                units[u, QUEUED] = 0
                turn()
            # The earliest of what waits for its turn happens.
            busy = 0
            if state[TOLD] == 0 and state[LATE] < 0:
                next_decision()
                request(best)
                if busy == 0 and chosen >= 0:
                    busy = 1
                    units[chosen, STATE] = GRANTED
                    units[chosen, DUE] = NEVER
                    ready(chosen)

    return follow
