"""What a consumer warpgroup of the specialized model does, step by step, before it is made into code.

A step says when to wait for a ring's slot, issue a product, wait for products, free a slot: `waiting.schedule` makes
the steps from a program's nodes, `specialized` makes code of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvm import tirx

from tvm_axe.tile.program import Assign, Copy, Fill, Gemm, Let, Parallel, Reduce
from tvm_axe.tile.targets.cuda.specialized.rings import Ring


@dataclass(frozen=True, eq=False)
class Acquire:
    """Wait until the ring's next slot is full; it is the one read from now on."""

    ring: Ring

    def __str__(self) -> str:
        return f"acquire {self.ring.name}"


@dataclass(frozen=True, eq=False)
class Release:
    """Give back the slot acquired `lag` slots before the current one; only if `when`."""

    ring: Ring
    lag: int
    when: tirx.Expr | None

    def __str__(self) -> str:
        behind = f", {self.lag} behind" if self.lag else ""
        return f"release {self.ring.name}{behind}" + ("" if self.when is None else f" if {self.when}")


@dataclass(frozen=True, eq=False)
class Issue:
    """Start a product, a group of its own; it adds to its accumulator where `accumulate` holds."""

    gemm: Gemm
    accumulate: tirx.Expr | bool

    def __str__(self) -> str:
        if isinstance(self.accumulate, bool):
            return f"issue {self.gemm}" + ("" if self.accumulate else ", which sets")
        return f"issue {self.gemm}, which adds if {self.accumulate}"


@dataclass(frozen=True)
class Await:
    """Wait until no more than `pending` groups are in flight."""

    pending: int

    def __str__(self) -> str:
        return f"wait until {self.pending} in flight"


@dataclass(frozen=True)
class Sync:
    """Order what consumers did in shared and global memory before what they do next; `proxy`: for products too."""

    proxy: bool

    def __str__(self) -> str:
        return "synchronize consumers" + (" and the tensor cores" if self.proxy else "")


@dataclass(frozen=True)
class Turn:
    """Take one's turn at issuing products, or pass it on to the next warpgroup."""

    begins: bool

    def __str__(self) -> str:
        return "take the turn" if self.begins else "pass the turn on"


@dataclass(frozen=True, eq=False)
class Do:
    """A statement that threads do by themselves."""

    node: Copy | Fill | Parallel | Reduce | Assign

    def __str__(self) -> str:
        return str(self.node) if not isinstance(self.node, Assign) else f"set {self.node.tile.name}"


@dataclass(frozen=True, eq=False)
class Define:
    """A name for a scalar in the steps after it."""

    node: Let

    def __str__(self) -> str:
        return f"{self.node.var.name} = {self.node.value}"


@dataclass(frozen=True, eq=False)
class Given:
    """`body` with a variable's value: the iteration of a loop that is taken out of it."""

    var: tirx.Var
    value: tirx.Expr
    body: tuple[Step, ...]

    def __str__(self) -> str:
        return _block(f"with {self.var.name} = {self.value}", self.body)


@dataclass(frozen=True, eq=False)
class Repeat:
    var: tirx.Var
    start: tirx.Expr
    extent: tirx.Expr
    body: tuple[Step, ...]

    def __str__(self) -> str:
        return _block(f"for {self.var.name} from {self.start}, {self.extent} times", self.body)


@dataclass(frozen=True, eq=False)
class Choose:
    condition: tirx.Expr
    then: tuple[Step, ...]
    otherwise: tuple[Step, ...]

    def __str__(self) -> str:
        return _block(f"if {self.condition}", self.then) + (_block("\nelse", self.otherwise) if self.otherwise else "")


Step = Acquire | Release | Issue | Await | Sync | Turn | Do | Define | Given | Repeat | Choose


def walk(steps: Sequence[Step]) -> Iterator[Step]:
    """Every step, loops and branches before what is in them."""
    for step in steps:
        yield step
        if isinstance(step, Given | Repeat):
            yield from walk(step.body)
        elif isinstance(step, Choose):
            yield from walk(step.then + step.otherwise)


def _block(head: str, body: Sequence[Step]) -> str:
    return "\n".join([f"{head}:"] + [f"  {line}" for step in body for line in str(step).splitlines()])
