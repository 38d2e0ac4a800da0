"""What is decided about a tile program for a target before any code is made, and why.

Each target's plan subclasses `Plan` with what its lowering needs; all record every decision in words, which is what
``tvm-axe tile explain`` prints.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm.target import Target

from tvm_axe.tile.program import Loop, Node, Program, Tile

GROUPS = ("kernel", "tiles", "loops", "operations")
"""What a decision may be about, in the order in which decisions are shown."""


@dataclass(frozen=True)
class Decision:
    """One thing decided: `subject` (a tile, an operation, a loop, the kernel), the `choice`, and the `reason`."""

    subject: str
    choice: str
    reason: str
    group: str = "kernel"

    def __str__(self) -> str:
        return f"{self.subject}: {self.choice}  ({self.reason})"


@dataclass
class Plan:
    """A program, a target, and what was decided, in the order of deciding.

    Attributes
    ----------
    overlaps : whether the kernel itself waits for the one before it, and so may be launched before that one is over
    """

    program: Program
    target: Target
    decisions: list[Decision] = field(default_factory=list)
    overlaps: bool = False

    def decide(self, subject: object, choice: object, reason: str) -> None:
        """Record a decision about a tile (or its name), a node, a loop (or ``"loop k"``), or what text says."""
        named = {tile.name: tile for tile in reversed(self.program.tiles)}
        subject = named.get(subject, subject) if isinstance(subject, str) else subject
        self.decisions.append(Decision(str(subject), str(choice), reason, _group(subject)))

    def explain(self) -> str:
        """Every decision, a line each, with its reason; those about the kernel first."""
        lines: list[str] = []
        for group in GROUPS:
            found = [f"    {decision}" for decision in self.decisions if decision.group == group]
            lines += [group, *found] if found else []
        return "\n".join(lines)


def _group(subject: object) -> str:
    if isinstance(subject, Tile) or str(subject).startswith("ring of "):
        return "tiles"
    if isinstance(subject, Loop) or str(subject).startswith("loop "):
        return "loops"
    return "operations" if isinstance(subject, Node) else "kernel"
