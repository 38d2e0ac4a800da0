"""What is decided about a tile program for a target before any code is made, and why.

A target decides step by step, and writes what it decides into `Decisions`. What it gives is a `Plan`, of a class of its
own with what its lowering needs: it is complete when it is made, and never changes. Every decision is recorded in
words, which is what ``tvm-axe tile explain`` prints. A function of several kernels has a plan for each.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import get_args

import tvm_ffi
from tvm import sym
from tvm.target import Target

from tvm_axe.tile.clocks import check_order
from tvm_axe.tile.nodes import Loop, Node
from tvm_axe.tile.program import TileProgram, TileSequence
from tvm_axe.tile.regions import Tile

GROUPS = ("kernel", "tiles", "loops", "operations")
"""What a decision may be about, in the order in which decisions are shown."""


@dataclass(frozen=True)
class Decision:
    """One thing decided.

    Attributes
    ----------
    subject : str
        What it is about: a tile, an operation, a loop, or the kernel.
    choice : str
        What was chosen.
    reason : str
        Why.
    group : str
        Where it is shown, one of `GROUPS`.
    """

    subject: str
    choice: str
    reason: str
    group: str = "kernel"

    def __str__(self) -> str:
        return f"{self.subject}: {self.choice}  ({self.reason})"


class Decisions:
    """The decisions about a program so far, in the order of deciding."""

    def __init__(self, program: TileProgram) -> None:
        self._tiles = {tile.name: tile for tile in reversed(program.tiles)}
        self._made: list[Decision] = []

    def add(self, subject: object, choice: object, reason: str) -> None:
        """Record a decision about a tile (or its name), a node, a loop (or ``"loop k"``), or what text says."""
        subject = self._tiles.get(subject, subject) if isinstance(subject, str) else subject
        self._made.append(Decision(str(subject), str(choice), reason, _group(subject)))

    def made(self) -> tuple[Decision, ...]:
        """All of them."""
        return tuple(self._made)


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """A program, a target, and what was decided.

    Attributes
    ----------
    program : TileProgram
        The program that was decided about.
    target : Target
        The target that it was decided for.
    decisions : tuple of Decision
        Every decision, in the order of deciding.
    """

    program: TileProgram
    target: Target
    decisions: tuple[Decision, ...]

    @property
    def overlaps(self) -> bool:
        """Whether the kernel itself waits for the one before it, and so may be launched before that one is over."""
        return False

    @property
    def resident(self) -> int | None:
        """How many blocks take all the points, each one after the other, so that they run at once; None if none do."""
        return None

    def explain(self) -> str:
        """The knobs, what is assumed, every decision with its reason, the kernel's first, and what flags order."""
        return "\n".join([*_settled(self.program), *self.decided()])

    def decided(self) -> list[str]:
        """Every decision with its reason, the kernel's first, and what flags order, a line each."""
        lines: list[str] = []
        for group in GROUPS:
            found = [f"    {decision}" for decision in self.decisions if decision.group == group]
            lines += [group, *found] if found else []
        order = check_order(self.program)
        return [*lines, *(["flags", f"    {order}"] if order else [])]


@dataclass(frozen=True, eq=False, kw_only=True)
class SequencePlan:
    """A function of several kernels, a target, and what was decided about each kernel.

    Attributes
    ----------
    program : TileSequence
        The function that was decided about.
    target : Target
        The target that it was decided for.
    kernels : tuple of Plan
        The plans of its kernels, in order.
    """

    program: TileSequence
    target: Target
    kernels: tuple[Plan, ...]

    @property
    def overlaps(self) -> bool:
        """Whether each kernel waits for the one before it, and so may be launched before that one is over."""
        return all(plan.overlaps for plan in self.kernels)

    def explain(self) -> str:
        """The knobs, what is assumed, the scratch, and the decisions about each kernel under its name."""
        lines = _settled(self.program)
        for tile in self.program.scratch:
            what = str(tile).removeprefix("global ")
            lines.append(f"    {what}  ({_bytes(tile)} bytes for a call, which hold anything when it begins)")
        if self.program.scratch:
            lines.insert(len(lines) - len(self.program.scratch), "scratch")
        for plan in self.kernels:
            lines += [plan.program.name, *(f"    {line}" for line in plan.decided())]
        return "\n".join(lines)


def _settled(program: TileProgram | TileSequence) -> list[str]:
    """What knobs are, and what is assumed, a line each."""
    lines: list[str] = ["knobs"] if program.knobs else []
    for setting in program.knobs:
        lines.append(f"    {setting}  ({setting.reason}; {setting.knob})")
    lines += ["assumptions"] if program.assumptions else []
    return lines + [f"    {each}  (calls with other sizes are refused)" for each in program.assumptions]


def _bytes(tile: Tile) -> str:
    """The bytes of a tensor whose extents may be variables."""
    bits = tvm_ffi.dtype(tile.dtype).bits
    elements = functools.reduce(operator.mul, tile.shape)
    whole = elements * bits // 8 if isinstance(elements, int) else sym.Analyzer().simplify(elements * bits // 8)
    return str(whole)


def _group(subject: object) -> str:
    if isinstance(subject, Tile) or str(subject).startswith("circular buffer of "):
        return "tiles"
    if isinstance(subject, Loop) or str(subject).startswith("loop "):
        return "loops"
    return "operations" if isinstance(subject, get_args(Node)) else "kernel"
