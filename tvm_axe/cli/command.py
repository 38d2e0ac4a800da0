"""What a command of `tvm-axe` is, and what several commands parse by."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["Command", "Group", "names", "plain_warnings", "positive"]

Subparsers = Any  # what `ArgumentParser.add_subparsers` returns; argparse has no public name of its type


@dataclass(frozen=True)
class Command:
    """A command.

    Modules of commands are imported whichever command is run, so that `run` itself imports what it needs: the compiler
    takes most of a second.
    """

    name: str
    help: str
    """What `tvm-axe --help` says of it."""
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]
    """Does it: prints to stdout and returns the exit code, 0 if None; raises what the user got wrong as an AxeError."""

    def add_to(self, commands: Subparsers) -> None:
        """Add it to a parser's commands."""
        parser = commands.add_parser(self.name, help=self.help, description=_sentence(self.help))
        self.add_arguments(parser)
        parser.set_defaults(command=self)


@dataclass(frozen=True)
class Group:
    """Commands of one kind, under a word of their own."""

    name: str
    help: str
    commands: tuple[Command, ...]

    def add_to(self, commands: Subparsers) -> None:
        """Add them to a parser's commands."""
        parser = commands.add_parser(self.name, help=self.help, description=_sentence(self.help))
        subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
        for command in self.commands:
            command.add_to(subparsers)


def _sentence(help: str) -> str:
    """What a command's own help begins with, where the list of commands has a line without a capital and a stop."""
    return f"{help[0].upper()}{help[1:]}."


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def names(text: str) -> list[str]:
    """The names in a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Say warnings as the command line says everything, without the place in this package, and each time."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"tvm-axe: warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        yield
