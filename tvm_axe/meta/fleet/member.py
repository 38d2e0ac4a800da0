"""A server as a job sees it: who it is, what it does now, and the conversation that this takes.

A conversation is a generator: it gives what is to be asked and how many seconds the answer may take, None if it may
take for ever, and is sent the answer. Who drives it (`tvm_axe.meta.fleet.crew`) waits for many of them at once. If
there is no answer, the generator is thrown a `Lost`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

from tvm_axe.meta.fleet.fingerprint import Fingerprint
from tvm_axe.meta.fleet.link import ASK
from tvm_axe.meta.measure.child import Child, Fault

__all__ = ["Conversation", "Lost", "Member", "Refused", "WorkError"]

Conversation: TypeAlias = Generator[tuple[tuple[Any, ...], float | None], Any, None]

_NEXT = json.dumps(["next"])


class Lost(Exception):
    """A server is of no more use, and the message says why: it died, hangs, is cut off, or its process ended."""


class Refused(Exception):
    """A server is there, and is not to be used; the message says why."""


class WorkError(Exception):
    """A server couldn't do what it was asked for, in words, and is as good as before."""


class Member:
    """A server of a job; at first only the wish for one.

    Attributes
    ----------
    child
        The process that holds the connection.
    place
        Where it is; empty as long as the tracker hasn't given one.
    name, fingerprint, is_plain
        Who it is; the name is empty until it is known.
    scale
        What its times are multiplied by.
    probe
        Seconds that the probe took at first.
    probed, joined
        When it was probed last and when it joined, by `time.monotonic`.
    prepared
        What it is prepared for.
    hands
        Numbers of the items that it was given and hasn't given back.
    """

    def __init__(self, child: Child) -> None:
        self.child, self.place = child, ""
        self.name, self.fingerprint, self.is_plain = "", Fingerprint("", "", 0, 0, "", "", {}), False
        self.scale, self.probe = 1.0, 0.0
        self.probed = self.joined = time.monotonic()
        self.prepared = ""
        self.hands: list[int] = []
        self.is_in = False  # whether it may be given work
        self._talk: Conversation | None = None
        self._deadline: float | None = None
        self._limit: float | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a conversation goes on."""
        return self._talk is not None

    @property
    def is_waiting(self) -> bool:
        """Whether it is asked for at the tracker, which hasn't answered."""
        return self.is_busy and self._limit is None

    @property
    def deadline(self) -> float | None:
        """When it must have answered, by `time.monotonic`; None if it may take for ever, or isn't asked."""
        return self._deadline if self.is_busy else None

    def begin(self, talk: Conversation) -> None:
        """Start a conversation.

        Raises
        ------
        Lost, Refused, WorkError, Fault
            As the conversation does, whenever it is carried on.
        """
        assert self._talk is None
        self._talk = talk
        self._carry_on(lambda: next(talk))

    def hear(self) -> None:
        """Carry the conversation on by the answer that is there, or by there being none in time; see `begin`."""
        talk = self._talk
        assert talk is not None
        connection = self.child.connection
        if connection is not None and not connection.poll():
            self.child.close()
            reason = f"no word within {self._limit:g} s: it hangs, or is cut off"
            self._carry_on(lambda: talk.throw(Lost(reason)))
            return
        status, answer = self.child.receive(0)
        if status == "ok":
            self._carry_on(lambda: talk.send(answer))
        else:
            self._carry_on(lambda: talk.throw(Lost(_why(status, answer))))

    def work(
        self, kind: str, arguments: Sequence[Any], silent: float, longest: float, got: Callable[[Any], None]
    ) -> Conversation:
        """Have the server do work of a kind (`tvm_axe.meta.fleet.session`), and give `got` each result.

        Parameters
        ----------
        silent
            Seconds that an answer may take, whether or not there is a result.
        longest
            Seconds that there may be no result.
        """
        yield (ASK, json.dumps(["begin", kind, list(arguments)])), silent
        last = time.monotonic()
        while True:
            told = json.loads((yield (ASK, _NEXT), silent))
            for result in told["results"]:
                last = time.monotonic()
                got(result)
            if not told["over"]:
                if time.monotonic() - last > longest:
                    raise Lost(f"no result within {longest:.0f} s")
                continue
            if told["fault"]:
                raise Fault(f"on {self.name}:\n{told['fault']}")
            if told["error"]:
                raise WorkError(told["error"])
            return

    def note(self, silent: float, **about: Any) -> Conversation:
        """Tell the server something of this job."""
        yield (ASK, json.dumps(["note", about])), silent

    def close(self) -> None:
        """Let the server go."""
        self._talk = None
        self.is_in = False
        self.child.close()

    def _carry_on(self, step: Callable[[], tuple[tuple[Any, ...], float | None]]) -> None:
        try:
            request, self._limit = step()
        except StopIteration:
            self._talk = None
            return
        except BaseException:
            self._talk = None
            raise
        self._deadline = None if self._limit is None else time.monotonic() + self._limit
        self.child.send(request)


def _why(status: str, answer: Any) -> str:
    """Why there is no answer, of a server behind a process of ours."""
    return f"its connection's process {answer}" if status == "died" else str(answer)
