"""Write docs/primitives.md: each schedule primitive with its rule, out of the docstrings.

python scripts/primitives.py
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from tvm_axe import Schedule, schedule

PAGE = Path(__file__).parent.parent / "docs/primitives.md"
PRIMITIVES = tuple(name for name in vars(Schedule) if inspect.isfunction(getattr(schedule, name, None)))
"""The methods of a schedule that are functions of `tvm_axe.schedule` too, in the order of the class."""

_HEAD = """# Schedule primitives

What `axe.Schedule` adds to upstream's primitives. Each is a rewrite of the program, which stays a function over whole
tensors: its annotations say what the devices share and how they communicate, and without them the function computes the
same on one device. A primitive checks its rule first. Where it doesn't hold, `ScheduleError` names the block, the rule,
what was seen and what would be valid, and the schedule and its trace stay as they were.

Each is a method of `axe.Schedule`, and a function of `tvm_axe.schedule` that takes the schedule (and the mesh) as well.
`help(axe.Schedule.shard)` has parameters, what is returned and raised, and an example. What the annotations mean is in
`tvm_axe.analysis.annotations`.

This page is written by `python scripts/primitives.py`, from the docstrings.

| primitive | what it does | valid when | leaves |
|---|---|---|---|
"""


def paragraph(doc: str, first: str) -> str:
    """The text of the paragraph of `doc` that begins with the word or words `first`, without them."""
    (found,) = (part for part in doc.split("\n\n") if part.startswith(first))
    return " ".join(found.removeprefix(first).split())


def row(name: str) -> str:
    """The line of the table for a primitive."""
    doc = inspect.getdoc(getattr(Schedule, name)) or ""
    summary = " ".join(doc.partition("\n\n")[0].split()).removesuffix(" ::").removesuffix(".")
    rule, left = (paragraph(doc, first).removesuffix(".") for first in ("Valid when ", "Leaves "))
    # In Markdown code has one backtick, whether it is a name of ours or a piece of a program.
    cells = (re.sub("``", "`", cell).replace("|", "\\|") for cell in (summary, rule, left))
    return f"| `{name}` | {' | '.join(cells)} |"


def page() -> str:
    """The whole page."""
    return _HEAD + "\n".join(row(name) for name in PRIMITIVES) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
