"""When things happen: the clocks of units, channels and off-chip memory, as a loop that TVM compiles.

What a unit does is written down for it as a script (see `tvm_axe.stream.engine`), of cells ``argument << 4 | step``. A
unit takes a token no earlier than the token's time, works for so many cycles, frees the token's slot in the channel and
sends what comes out, or waits until there is room. So the clocks need no common order, and a unit goes on for as long
as its channels let it. Order in time matters where units compete: for off-chip memory, and where what comes first is
taken. These wait until every other unit is blocked, and the earliest of them goes next; whatever happens because of it
happens later, so nothing that was decided has to be taken back.

Off-chip memory serves requests of a fixed size as one queue, as fast as its channels together. Requests are not
simulated one by one: while n are sent a cycle, the queue grows by n - rate, so what has to be known is when a unit
starts and stops to send, two events a tile, and when it sends what is left in its last cycle. A request crosses three
channels, to the memory, into its queue and back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import tvm
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import _tvm
from tvm_axe.machines import keeping
from tvm_axe.machines.cache import key

# The steps of scripts; the argument is a channel's number where nothing else is said.
GO: Final = 0  # on at another address; a cell of 0 is the end of what is known so far
PEEK: Final = 1  # wait for a token
FREE: Final = 2  # take the token that was looked at
TAKE: Final = 3  # both
ROOM: Final = 4  # wait for room
SEND: Final = 5  # wait for room, and send a token
WORK: Final = 6  # so many cycles
ACCESS: Final = 7  # so many requests to off-chip memory, until they are answered
READ: Final = 8  # be no earlier than the next token's time and the cycles in the next cell
FIRST: Final = 9  # wait for the first token of so many channels, in the next cells, and say which it is
OCCUPY: Final = 10  # a tenant of on-chip memory, by its number, begins
USE: Final = 11  # a tenant is in use
NOW: Final = 12  # say what time it is
END: Final = 13  # nothing follows; what is still sent to the inputs, in so many next cells, is thrown away

# Columns of units.
AT, TAIL, CLOCK, BUSY, BLOCKED, MEMORY, TOKENS, STATE, ANSWER, QUEUED, HELD, DUE, TURN = range(13)
# AT and TAIL are the addresses of a unit's next cell and of its last one, HELD says that more cells are to be had, DUE
# is when FIRST may be decided with what is there, and TURN in which order where that is the same.
RUNS, WAITS, ANSWERED, GRANTED, ENDED = range(5)  # the states of units: ANSWERED by memory, GRANTED the first there is

# Columns of channels: rings of the times from which on tokens can be seen and free slots filled.
BASE, DEPTH, HEAD, COUNT, FREED, SPACE, WAITER, THROWN, CLEARED = range(9)

# The state of the machine.
(
    HOP,
    ISSUE,
    LATENCY,
    LIMIT,
    TRACED,
    READY,
    READIES,
    SENDERS,
    TIME,
    SENDING,
    DECIDERS,
    TURNS,
    TOLD,
    SPANS,
    LATE,
    NEWS,
    NEW,
) = range(17)
RATE, QUEUED_REQUESTS, SERVED = range(3)

NEVER: Final = 1 << 62


@functools.cache
def machine() -> Callable[..., None]:
    """Return the function that goes on until scripts end, or something is known that they depend on.

    To read and compile it takes seconds, so what it is compiled to is kept on disk.
    """
    held = keeping.store()
    name = key("streams", Path(__file__).read_bytes(), tvm.__version__)
    code = _compiled() if held is None else held.get_or_make(name, _compiled)
    return _tvm.load_llvm(code)["main"]


def _compiled() -> bytes:
    return _tvm.save_llvm(tvm.compile(tvm.IRModule({"main": _program()}), target="llvm").mod)


def _program() -> tirx.PrimFunc:
    @T.prim_func(s_tir=True)
    def main(
        code: T.handle, units: T.handle, channels: T.handle, rings: T.handle, queues: T.handle, tenants: T.handle,
        spans: T.handle, state: T.handle, fluid: T.handle,
    ) -> None:  # fmt: skip
        cells, many, links, slots = T.int64(), T.int64(), T.int64(), T.int64()
        held, kept = T.int64(), T.int64()
        C = T.match_buffer(code, (cells,), "int64")
        U = T.match_buffer(units, (many, 13), "int64")
        X = T.match_buffer(channels, (links, 9), "int64")
        R = T.match_buffer(rings, (slots, 2), "int64")
        # Who is ready; of who sends requests the next time, what is left and sent then, and the unit; deciders; told.
        Q = T.match_buffer(queues, (many, 7), "int64")
        O = T.match_buffer(tenants, (held, 2), "int64")
        P = T.match_buffer(spans, (kept, 3), "int64")
        S = T.match_buffer(state, (17,), "int64")
        W = T.match_buffer(fluid, (3,), "float64")
        u = T.alloc_local((1,), "int64")
        at = T.alloc_local((1,), "int64")
        clock = T.alloc_local((1,), "int64")
        x = T.alloc_local((1,), "int64")
        i = T.alloc_local((1,), "int64")
        n = T.alloc_local((1,), "int64")
        best = T.alloc_local((1,), "int64")
        found = T.alloc_local((1,), "int64")
        until = T.alloc_local((1,), "int64")
        going = T.alloc_local((1,), "int64")
        most = T.alloc_local((1,), "float64")
        left = T.alloc_local((1,), "float64")

        @T.inline
        def ready(unit: Any) -> None:
            if U[unit, QUEUED] == 0:
                U[unit, QUEUED] = 1
                Q[(S[READY] + S[READIES]) % many, 0] = unit
                S[READIES] = S[READIES] + 1

        @T.inline
        def tell() -> None:
            Q[S[TOLD], 6] = u[0]
            S[TOLD] = S[TOLD] + 1

        @T.inline
        def wait(channel: Any) -> None:
            X[channel, WAITER] = u[0]
            going[0] = 0

        @T.inline
        def wake(channel: Any) -> None:
            if X[channel, WAITER] >= 0:
                ready(X[channel, WAITER])
                X[channel, WAITER] = -1

        @T.inline
        def span(start: Any, stop: Any) -> None:
            if S[TRACED] != 0:
                P[S[SPANS], 0] = u[0]
                P[S[SPANS], 1] = start
                P[S[SPANS], 2] = stop
                S[SPANS] = S[SPANS] + 1

        @T.inline
        def see(channel: Any) -> None:
            clock[0] = T.max(clock[0], R[X[channel, BASE] + X[channel, HEAD], 0])

        @T.inline
        def free(channel: Any, time: Any) -> None:
            X[channel, HEAD] = T.if_then_else(X[channel, HEAD] + 1 == X[channel, DEPTH], 0, X[channel, HEAD] + 1)
            X[channel, COUNT] = X[channel, COUNT] - 1
            R[X[channel, BASE] + T.truncmod(X[channel, FREED] + X[channel, SPACE], X[channel, DEPTH]), 1] = time
            X[channel, SPACE] = X[channel, SPACE] + 1
            wake(channel)

        @T.inline
        def throw_away(channel: Any) -> None:
            while X[channel, COUNT] > 0:
                X[channel, CLEARED] = T.max(X[channel, CLEARED], R[X[channel, BASE] + X[channel, HEAD], 0])
                free(channel, X[channel, CLEARED] + S[HOP])

        @T.inline
        def enter(channel: Any) -> None:
            if R[X[channel, BASE] + X[channel, FREED], 1] > clock[0]:
                U[u[0], BLOCKED] = U[u[0], BLOCKED] + R[X[channel, BASE] + X[channel, FREED], 1] - clock[0]
                clock[0] = R[X[channel, BASE] + X[channel, FREED], 1]

        @T.inline
        def send(channel: Any) -> None:
            X[channel, FREED] = T.if_then_else(X[channel, FREED] + 1 == X[channel, DEPTH], 0, X[channel, FREED] + 1)
            X[channel, SPACE] = X[channel, SPACE] - 1
            R[X[channel, BASE] + T.truncmod(X[channel, HEAD] + X[channel, COUNT], X[channel, DEPTH]), 0] = (
                clock[0] + S[HOP]
            )
            X[channel, COUNT] = X[channel, COUNT] + 1
            U[u[0], TOKENS] = U[u[0], TOKENS] + 1
            wake(channel)
            if X[channel, THROWN] != 0:
                throw_away(channel)

        # What was written down since the last time goes on where the last cell was.
        i[0] = 0
        at[0] = S[NEW]
        while i[0] < S[NEWS]:
            C[U[C[at[0]], TAIL]] = C[at[0] + 1] * 16
            U[C[at[0]], TAIL] = C[at[0] + 2]
            ready(C[at[0]])
            i[0] = i[0] + 1
            at[0] = at[0] + 3
        found[0] = 1
        while found[0] != 0:
            while S[READIES] > 0 and S[LATE] < 0:
                u[0] = Q[S[READY], 0]
                S[READY] = T.if_then_else(S[READY] + 1 == many, 0, S[READY] + 1)
                S[READIES] = S[READIES] - 1
                U[u[0], QUEUED] = 0
                at[0] = U[u[0], AT]
                clock[0] = U[u[0], CLOCK]
                going[0] = T.if_then_else(U[u[0], STATE] == WAITS or U[u[0], STATE] == ENDED, 0, 1)
                while going[0] != 0:
                    x[0] = T.shift_right(C[at[0]], T.int64(4))
                    n[0] = T.bitwise_and(C[at[0]], T.int64(15))
                    if n[0] == GO:
                        if x[0] != 0:
                            at[0] = x[0]
                        else:
                            going[0] = 0
                            if U[u[0], HELD] != 0:
                                U[u[0], HELD] = 0
                                tell()
                    elif n[0] <= TAKE:
                        if n[0] != FREE and X[x[0], COUNT] == 0:
                            wait(x[0])
                        else:
                            if n[0] != FREE:
                                see(x[0])
                            if n[0] != PEEK:
                                free(x[0], clock[0] + S[HOP])
                            at[0] = at[0] + 1
                    elif n[0] <= SEND:
                        if X[x[0], SPACE] == 0:
                            wait(x[0])
                        else:
                            enter(x[0])
                            if n[0] == SEND:
                                send(x[0])
                            at[0] = at[0] + 1
                    elif n[0] == WORK:
                        span(clock[0], clock[0] + x[0])
                        clock[0] = clock[0] + x[0]
                        U[u[0], BUSY] = U[u[0], BUSY] + x[0]
                        at[0] = at[0] + 1
                    elif n[0] == ACCESS:
                        if U[u[0], STATE] == ANSWERED:
                            U[u[0], STATE] = RUNS
                            U[u[0], MEMORY] = U[u[0], MEMORY] + U[u[0], ANSWER] - clock[0]
                            span(clock[0], U[u[0], ANSWER])
                            clock[0] = U[u[0], ANSWER]
                            at[0] = at[0] + 1
                        else:
                            U[u[0], STATE] = WAITS
                            going[0] = 0
                            Q[S[SENDERS], 1] = clock[0]
                            Q[S[SENDERS], 2] = x[0]
                            Q[S[SENDERS], 3] = 0
                            Q[S[SENDERS], 4] = u[0]
                            S[SENDERS] = S[SENDERS] + 1
                    elif n[0] == READ:
                        if X[x[0], COUNT] == 0:
                            wait(x[0])
                        else:
                            best[0] = R[X[x[0], BASE] + X[x[0], HEAD], 0]
                            if best[0] + C[at[0] + 1] > clock[0]:
                                U[u[0], BUSY] = U[u[0], BUSY] + best[0] + C[at[0] + 1] - T.max(clock[0], best[0])
                                clock[0] = best[0] + C[at[0] + 1]
                            at[0] = at[0] + 2
                    elif n[0] == FIRST:
                        best[0] = NEVER
                        found[0] = 0
                        i[0] = 0
                        while i[0] < x[0]:
                            n[0] = C[at[0] + 1 + i[0]]
                            if X[n[0], COUNT] > 0:
                                found[0] = found[0] + 1
                                if R[X[n[0], BASE] + X[n[0], HEAD], 0] < best[0]:
                                    best[0] = R[X[n[0], BASE] + X[n[0], HEAD], 0]
                                    U[u[0], ANSWER] = i[0]
                            i[0] = i[0] + 1
                        if found[0] == x[0] or U[u[0], STATE] == GRANTED:
                            i[0] = 0
                            while i[0] < x[0]:
                                if X[C[at[0] + 1 + i[0]], WAITER] == u[0]:
                                    X[C[at[0] + 1 + i[0]], WAITER] = -1
                                i[0] = i[0] + 1
                            U[u[0], STATE] = RUNS
                            U[u[0], DUE] = NEVER
                            clock[0] = T.max(clock[0], best[0])
                            at[0] = at[0] + 1 + x[0]
                            tell()
                        else:
                            going[0] = 0
                            i[0] = 0
                            while i[0] < x[0]:
                                if X[C[at[0] + 1 + i[0]], COUNT] == 0:
                                    X[C[at[0] + 1 + i[0]], WAITER] = u[0]
                                i[0] = i[0] + 1
                            if found[0] != 0:
                                if U[u[0], TURN] < 0:
                                    Q[S[DECIDERS], 5] = u[0]
                                    S[DECIDERS] = S[DECIDERS] + 1
                                U[u[0], DUE] = T.max(clock[0], best[0])
                                U[u[0], TURN] = S[TURNS]
                                S[TURNS] = S[TURNS] + 1
                    elif n[0] == OCCUPY:
                        O[x[0], 0] = clock[0]
                        O[x[0], 1] = clock[0]
                        at[0] = at[0] + 1
                    elif n[0] == USE:
                        O[x[0], 1] = T.max(O[x[0], 1], clock[0])
                        at[0] = at[0] + 1
                    elif n[0] == NOW:
                        U[u[0], ANSWER] = clock[0]
                        at[0] = at[0] + 1
                        tell()
                    else:
                        U[u[0], STATE] = ENDED
                        going[0] = 0
                        i[0] = 0
                        while i[0] < x[0]:
                            n[0] = C[at[0] + 1 + i[0]]
                            X[n[0], THROWN] = 1
                            throw_away(n[0])
                            i[0] = i[0] + 1
                U[u[0], AT] = at[0]
                U[u[0], CLOCK] = clock[0]
                if clock[0] > S[LIMIT]:
                    S[LATE] = u[0]
            # The earliest of what waits for its turn happens.
            found[0] = 0
            if S[TOLD] == 0 and S[LATE] < 0:
                until[0] = NEVER
                best[0] = -1
                i[0] = 0
                while i[0] < S[DECIDERS]:
                    n[0] = Q[i[0], 5]
                    if U[n[0], DUE] == NEVER:
                        U[n[0], TURN] = -1
                        S[DECIDERS] = S[DECIDERS] - 1
                        Q[i[0], 5] = Q[S[DECIDERS], 5]
                    else:
                        if U[n[0], DUE] < until[0] or (U[n[0], DUE] == until[0] and U[n[0], TURN] < U[best[0], TURN]):
                            until[0] = U[n[0], DUE]
                            best[0] = n[0]
                        i[0] = i[0] + 1
                going[0] = S[SENDERS]
                while going[0] != 0:
                    x[0] = 0
                    i[0] = 1
                    while i[0] < S[SENDERS]:
                        if Q[i[0], 1] < Q[x[0], 1]:
                            x[0] = i[0]
                        i[0] = i[0] + 1
                    n[0] = Q[x[0], 1]
                    if n[0] >= until[0]:
                        going[0] = 0
                    else:
                        if n[0] != S[TIME]:
                            most[0] = W[QUEUED_REQUESTS] + T.cast(S[SENDING] * (n[0] - S[TIME]), "float64")
                            left[0] = T.max(most[0] - W[RATE] * T.cast(n[0] - S[TIME], "float64"), T.float64(0))
                            W[SERVED] = W[SERVED] + (most[0] - left[0])
                            W[QUEUED_REQUESTS] = left[0]
                            S[TIME] = n[0]
                        S[SENDING] = S[SENDING] - Q[x[0], 3]
                        if Q[x[0], 2] == 0:
                            found[0] = 1
                            going[0] = 0
                            u[0] = Q[x[0], 4]
                            U[u[0], STATE] = ANSWERED
                            U[u[0], ANSWER] = n[0] - 1 + S[LATENCY] + T.cast(W[QUEUED_REQUESTS] / W[RATE], "int64")
                            ready(u[0])
                            S[SENDERS] = S[SENDERS] - 1
                            Q[x[0], 1] = Q[S[SENDERS], 1]
                            Q[x[0], 2] = Q[S[SENDERS], 2]
                            Q[x[0], 3] = Q[S[SENDERS], 3]
                            Q[x[0], 4] = Q[S[SENDERS], 4]
                        else:
                            Q[x[0], 3] = T.min(S[ISSUE], Q[x[0], 2])
                            Q[x[0], 1] = n[0] + T.truncdiv(Q[x[0], 2], Q[x[0], 3])
                            Q[x[0], 2] = T.truncmod(Q[x[0], 2], Q[x[0], 3])
                            S[SENDING] = S[SENDING] + Q[x[0], 3]
                if found[0] == 0 and best[0] >= 0:
                    found[0] = 1
                    U[best[0], STATE] = GRANTED
                    U[best[0], DUE] = NEVER
                    ready(best[0])

    return main.with_attr("global_symbol", "main")
