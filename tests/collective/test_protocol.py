"""The barrier's protocol, every order of events of a few workers: nobody leaves early, nobody waits for ever.

The model has what `native` and the slow path in `sync` do, a step for each access to shared memory and each system
call: store the own word (it may reach the others later, as x86-64's store buffer lets it, but not after a system call),
wake who sleeps on it, look at the others' words, compare and sleep. Sleeps time out only once the command was called
off: without that, a lost wake is a state that nothing leads out of. Rules that the protocol rests on can be taken out
of the model, one at a time; each time the search finds out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest


@dataclass(frozen=True)
class Worker:
    step: str = "store"  # what it does next
    round: int = 1
    peer: int = 0  # whom it is waiting for
    seen: int = 0
    pending: bool = False  # its last store is not in memory yet
    checked: bool = False  # it has looked at all once, and is in the slow path


@dataclass(frozen=True)
class State:
    words: tuple[int, ...]
    workers: tuple[Worker, ...]
    aborted: bool = False

    def change(self, rank: int, **changes: object) -> State:
        """Change a worker."""
        workers = list(self.workers)
        workers[rank] = replace(workers[rank], **changes)
        return replace(self, workers=tuple(workers))


class Model:
    """`size` workers that meet `rounds` times.

    Parameters
    ----------
    dies : bool
        The last worker may die at any moment, on which the command is called off.
    without : str
        The rule to leave out.
    """

    def __init__(self, size: int, rounds: int, dies: bool = False, without: str = "") -> None:
        self.size, self.rounds, self.dies, self.without = size, rounds, dies, without
        self.arrival = ("wake", "store") if without == "store before wake" else ("store", "wake")

    def successors(self, state: State) -> Iterator[State]:
        for rank, worker in enumerate(state.workers):
            if worker.pending:
                words = list(state.words)
                words[rank] = worker.round
                yield replace(state.change(rank, pending=False), words=tuple(words))
            if worker.step == "asleep" and state.aborted and self.without != "timeouts":
                yield self._onward(state, rank)
            if worker.step not in ("asleep", "done", "gone"):
                yield from self._step(state, rank, worker)
        last = state.workers[-1].step
        if self.dies and last not in ("done", "gone"):
            yield replace(state.change(self.size - 1, step="gone"), aborted=True)

    def _step(self, state: State, rank: int, worker: Worker) -> Iterator[State]:
        step = worker.step
        following = self.arrival[1] if step == self.arrival[0] else "look"
        if step == "store":
            yield state.change(rank, step=following, pending=True)
        elif step == "wake" and (not worker.pending or self.without == "fence"):
            for sleeper, other in enumerate(state.workers):
                if other.step == "asleep" and other.peer == rank:
                    state = self._onward(state, sleeper)
            yield state.change(rank, step=following)
        elif step == "look":
            yield self._leave(state, rank) if self._reached(state, rank) else state.change(rank, step="load")
        elif step == "load":
            yield state.change(rank, step="check", seen=state.words[worker.peer])
        elif step == "check":
            if self._reached(state, rank):
                yield self._leave(state, rank)
            elif state.aborted:
                yield state.change(rank, step="gone")
            else:
                yield state.change(rank, step="sleep")
        elif step == "sleep" and not worker.pending:
            unchanged = state.words[worker.peer] == worker.seen
            if unchanged or self.without == "compare":
                yield state.change(rank, step="asleep")
            else:
                yield self._onward(state, rank)

    def _reached(self, state: State, rank: int) -> bool:
        worker = state.workers[rank]
        word = worker.round if worker.peer == rank else state.words[worker.peer]
        return word >= worker.round

    def _onward(self, state: State, rank: int) -> State:
        """After a sleep the slow path looks at the same word again, compiled code at the next; then it looks at all."""
        return state.change(rank, step="look") if state.workers[rank].checked else self._leave(state, rank)

    def _leave(self, state: State, rank: int) -> State:
        """Turn to the next peer; after the last one look at all again, and after that leave the barrier."""
        worker = state.workers[rank]
        if worker.peer + 1 < self.size:
            return state.change(rank, step="look", peer=worker.peer + 1)
        if not worker.checked and self.without != "second look":
            return state.change(rank, step="look", peer=0, checked=True)
        for peer, word in enumerate(state.words):
            here = word if peer != rank else worker.round
            assert here >= worker.round, f"worker {rank} left round {worker.round} before worker {peer} came"
        if worker.round == self.rounds:
            return state.change(rank, step="done")
        return state.change(rank, step=self.arrival[0], round=worker.round + 1, peer=0, checked=False)

    def explore(self) -> int:
        """Visit every state; returns how many there are."""
        first = State((0,) * self.size, (Worker(step=self.arrival[0]),) * self.size)
        seen, todo = {first}, [first]
        while todo:
            state = todo.pop()
            following = list(self.successors(state))
            if not following:
                ended = all(worker.step in ("done", "gone") for worker in state.workers)
                assert ended, f"stuck: {state}"
            for successor in following:
                if successor not in seen:
                    seen.add(successor)
                    todo.append(successor)
        return len(seen)


@pytest.mark.parametrize(("size", "rounds", "dies"), [(2, 3, False), (2, 3, True), (3, 2, False), (3, 1, True)])
def test_every_order_of_events_ends_well(size: int, rounds: int, dies: bool) -> None:
    assert Model(size, rounds, dies).explore() > 500


@pytest.mark.parametrize(
    ("without", "dies", "what"),
    [
        ("store before wake", False, "stuck"),
        ("fence", False, "stuck"),
        ("compare", False, "stuck"),
        ("second look", False, "left round"),
        ("timeouts", True, "stuck"),
    ],
)
def test_each_rule_is_needed(without: str, dies: bool, what: str) -> None:
    with pytest.raises(AssertionError, match=what):
        Model(2, 3, dies, without).explore()
