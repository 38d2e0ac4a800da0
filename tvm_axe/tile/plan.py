"""What is decided about a tile program for a target before any code is made, and why.

Each target's plan subclasses `Plan` with what its lowering needs; all record every decision in words, which is what
``tvm-axe tile explain`` prints.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tvm.target import Target

from tvm_axe.tile.program import Program


@dataclass(frozen=True)
class Decision:
    """One thing decided: `subject` (a tile, an operation, a loop, the kernel), the `choice`, and the `reason`."""

    subject: str
    choice: str
    reason: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.choice}  ({self.reason})"


@dataclass
class Plan:
    """A program, a target, and what was decided, in the order of deciding."""

    program: Program
    target: Target
    decisions: list[Decision] = field(default_factory=list)

    def decide(self, subject: object, choice: object, reason: str) -> None:
        """Record a decision."""
        self.decisions.append(Decision(str(subject), str(choice), reason))
