"""How long jobs say where they stand: a bar that moves on a terminal, a line a minute where nobody sees it move."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator
from types import TracebackType
from typing import TypeVar

from tqdm import tqdm

__all__ = ["Bar", "counted", "say"]

MINUTE = 60.0
"""Seconds between two lines, at least."""

_COUNT = "{n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"

Item = TypeVar("Item")


class Bar:
    """A bar over the steps of a job, on stderr.

    Where stderr isn't a terminal, a log for example, what the bar would show is written as a line instead: at most
    one each minute, and one at the end.

    Parameters
    ----------
    total : int
        The number of steps.
    done : int
        How many of them were done before.
    shown : bool
        Whether anything is shown at all.
    """

    def __init__(self, total: int, done: int = 0, shown: bool = True) -> None:
        self._moves = sys.stderr.isatty()
        self._shown = shown
        self._total, self._done, self._now_done = total, done, done
        self._name, self._words, self._line = "", "", ""
        self._start = self._written = time.monotonic()
        form = "{desc}{percentage:3.0f}%|{bar}| " + _COUNT
        self._bar = tqdm(total=total, initial=done, bar_format=form, disable=not (shown and self._moves))

    def advance(self, name: str, words: str = "") -> None:
        """Count a step of what is called `name`, and show some words behind the count."""
        self._now_done += 1
        self._name, self._words = name, words
        self._bar.set_description(name, refresh=False)
        self._bar.set_postfix_str(words, refresh=False)
        self._bar.update()
        self._write_if_due()

    def rename(self, name: str) -> None:
        """Show what is being done now."""
        self._name = name
        self._bar.set_description(name, refresh=False)
        self._bar.refresh()
        self._write_if_due()

    def shorten(self, steps: int) -> None:
        """Take steps out of the total that will not be made."""
        self._total -= steps
        self._bar.total = self._total
        self._bar.refresh()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._bar.close()
        if self._shown and not self._moves:
            self._write()

    def _write_if_due(self) -> None:
        if self._shown and not self._moves and time.monotonic() - self._written >= MINUTE:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        line = tqdm.format_meter(
            self._now_done,
            self._total,
            self._written - self._start,
            prefix=f"{self._name}: " if self._name else "",
            postfix=self._words or None,
            initial=self._done,
            bar_format="{desc}{percentage:.0f}% " + _COUNT,
        )
        if line != self._line:  # the end of a job may have been said already
            print(line, file=sys.stderr, flush=True)
        self._line = line


def counted(items: Collection[Item], name: str, shown: bool = True) -> Iterator[Item]:
    """Give the items one after the other, with a bar that counts those that are done."""
    with Bar(len(items), shown=shown) as bar:
        for item in items:
            yield item
            bar.advance(name)


def say(line: str) -> None:
    """Say something on stderr, above the bar if there is one."""
    tqdm.write(line, file=sys.stderr)
