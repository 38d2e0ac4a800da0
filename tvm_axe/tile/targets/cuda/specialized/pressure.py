"""What a consumer's steps are as far as registers go: products in flight keep theirs until they are waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_axe.tile.dispatch import TypeTable
from tvm_axe.tile.nodes import Gemm
from tvm_axe.tile.targets.cuda.fragments.pressure import Again, Either, Use, Uses, uses_of
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
    Step,
    Sync,
)


def uses_of_steps(steps: Sequence[Step]) -> tuple[Uses, ...]:
    """The uses of fragments that a consumer's steps are."""
    return _Uses().body(steps)


class _Uses:
    def __init__(self) -> None:
        self.flights: list[Gemm] = []

    def body(self, steps: Sequence[Step]) -> tuple[Uses, ...]:
        return tuple(use for step in steps for use in _USES.of(step)(self, step))

    def nothing(self, step: Step) -> tuple[Uses, ...]:
        return ()

    def do(self, step: Do) -> tuple[Uses, ...]:
        return uses_of((step.node,))

    def define(self, step: Define) -> tuple[Uses, ...]:
        return uses_of((step.node,))

    def issue(self, step: Issue) -> tuple[Uses, ...]:
        gemm, self.flights = step.gemm, [*self.flights, step.gemm]
        a, c = gemm.a.tile, frozenset({gemm.c.tile})
        sets = c if isinstance(step.accumulate, bool) and not step.accumulate else frozenset()
        return (Use(str(gemm), c - sets | {a}, c, sets, c | {a}, True),)

    def wait(self, step: Await) -> tuple[Uses, ...]:
        done = len(self.flights) - step.pending
        reads = frozenset(tile for gemm in self.flights[: max(done, 0)] for tile in (gemm.a.tile, gemm.c.tile))
        self.flights = self.flights[max(done, 0) :]
        return (Use(str(step), reads),)

    def given(self, step: Given) -> tuple[Uses, ...]:
        return self.body(step.body)

    def guard(self, step: Guard) -> tuple[Uses, ...]:
        """It leaves nothing in flight, so what is behind it is the same either way."""
        return (Either((self.body(step.body), ())),)

    def repeat(self, step: Repeat) -> tuple[Uses, ...]:
        """A loop, with what an iteration before has left in flight."""
        self.body(step.body)
        return (Again(self.body(step.body)),)

    def choose(self, step: Choose) -> tuple[Uses, ...]:
        before, arms, left = self.flights, [], []
        for arm in (step.then, step.otherwise):
            self.flights = before
            arms.append(self.body(arm))
            left.append(self.flights)
        self.flights = max(left, key=len)
        return (Either(tuple(arms)),)


_USES: TypeTable[Callable[[_Uses, Any], tuple[Uses, ...]]] = TypeTable(
    "uses of fragments by steps",
    {
        Acquire: _Uses.nothing,
        Await: _Uses.wait,
        Choose: _Uses.choose,
        Define: _Uses.define,
        Do: _Uses.do,
        Fence: _Uses.nothing,
        Given: _Uses.given,
        Guard: _Uses.guard,
        Issue: _Uses.issue,
        PingPong: _Uses.nothing,
        Release: _Uses.nothing,
        Repeat: _Uses.repeat,
        Send: _Uses.nothing,
        Sync: _Uses.nothing,
    },
)
