"""What a consumer warpgroup of the specialized model does, step by step, before it is made into code.

A step says when to wait for a circular buffer's slot, issue a product, wait for products, free a slot:
`specialized.schedule` makes the steps from a program's nodes, `specialized.consumer` makes code of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from tvm_axe.tile.dispatch import TypeTable
from tvm_axe.tile.nodes import Assign, Copy, Fill, Gemm, Let, Parallel, Print, Reduce, Scan, Sort
from tvm_axe.tile.targets.cuda.specialized.buffers import CircularBuffer


@dataclass(frozen=True, eq=False)
class Acquire:
    """Wait until the circular buffer's next slot is full; it is the one read from now on."""

    buffer: CircularBuffer

    def __str__(self) -> str:
        return f"acquire {self.buffer.name}"


@dataclass(frozen=True, eq=False)
class Release:
    """Give back the slot acquired `lag` slots before the current one; only if `when`, which the loop of `var` says."""

    buffer: CircularBuffer
    lag: int
    when: tirx.Expr | None
    var: tirx.Var | None = None

    def __str__(self) -> str:
        behind = f", {self.lag} behind" if self.lag else ""
        return f"release {self.buffer.name}{behind}" + ("" if self.when is None else f" if {self.when}")


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
    """Wait until no more than `pending` groups are in flight (PTX ISA, wgmma.wait_group)."""

    pending: int

    def __str__(self) -> str:
        return f"wait until {self.pending} in flight"


@dataclass(frozen=True)
class Sync:
    """Order what consumers did in shared and global memory before what they do next; `proxy`: for products too.

    With `drains`, TMA has read all tiles that were sent before it, so that they may be written again; if it `settles`,
    all that was stored to global memory before it is there, whether by threads or by TMA, and may be overwritten.
    """

    proxy: bool
    drains: bool = False
    settles: bool = False

    def __str__(self) -> str:
        text = "synchronize consumers" + (" and the tensor cores" if self.proxy else "")
        return text + ", sent tiles being read" * self.drains + ", stores being done" * self.settles


@dataclass(frozen=True)
class Fence:
    """Have what a warpgroup's threads have read of slots reach them, before TMA fills these again.

    What a thread reads may be on its way to it when a barrier is passed, and TMA writes by another proxy (PTX ISA,
    "Async proxy"). A `Sync` for products does as much.
    """

    def __str__(self) -> str:
        return "fence what is read"


@dataclass(frozen=True)
class PingPong:
    """Take one's turn at issuing products, or pass it on to the next warpgroup: ping-pong between warpgroups."""

    begins: bool

    def __str__(self) -> str:
        return "take the turn" if self.begins else "pass the turn on"


@dataclass(frozen=True, eq=False)
class Do:
    """A statement that threads do by themselves."""

    node: Copy | Fill | Parallel | Print | Reduce | Scan | Sort | Assign

    def __str__(self) -> str:
        return str(self.node) if not isinstance(self.node, Assign) else f"set {self.node.tile.name}"


@dataclass(frozen=True, eq=False)
class Send:
    """Start a copy of a shared tile to global memory by TMA, which reads the tile until a `Sync` that drains."""

    node: Copy

    def __str__(self) -> str:
        return f"send {self.node}"


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
class Guard:
    """`body`, which is what becomes of the loop of `var`, if that has an iteration: `extent` is how many it has."""

    var: tirx.Var
    extent: tirx.Expr
    body: tuple[Step, ...]

    def __str__(self) -> str:
        return _block(f"if {self.extent} > 0", self.body)


@dataclass(frozen=True, eq=False)
class Repeat:
    """A loop of `extent` iterations from `start` on, and `behind` it what is done if it has any."""

    var: tirx.Var
    start: tirx.Expr
    extent: tirx.Expr
    body: tuple[Step, ...]
    behind: tuple[Step, ...] = ()

    def __str__(self) -> str:
        loop = _block(f"for {self.var.name} from {self.start}, {self.extent} times", self.body)
        return loop + (_block(f"\nif {self.extent} > 0", self.behind) if self.behind else "")


@dataclass(frozen=True, eq=False)
class Choose:
    """A branch."""

    condition: tirx.Expr
    then: tuple[Step, ...]
    otherwise: tuple[Step, ...]

    def __str__(self) -> str:
        return _block(f"if {self.condition}", self.then) + (_block("\nelse", self.otherwise) if self.otherwise else "")


Step = (
    Acquire | Release | Issue | Await | Sync | Fence | PingPong | Do | Send | Define | Given | Guard | Repeat | Choose
)


def walk(steps: Sequence[Step]) -> Iterator[Step]:
    """Every step, loops and branches before what is in them."""
    for step in steps:
        yield step
        for inner in _BODIES.of(step)(step):
            yield from walk(inner)


_BODIES: TypeTable[Callable[[Any], tuple[tuple[Step, ...], ...]]] = TypeTable(
    "bodies of steps",
    {
        **dict.fromkeys((Acquire, Release, Issue, Await, Sync, Fence, PingPong, Do, Send, Define), lambda step: ()),
        Given: lambda step: (step.body,),
        Guard: lambda step: (step.body,),
        Repeat: lambda step: (step.body, step.behind),
        Choose: lambda step: (step.then, step.otherwise),
    },
)


def _block(head: str, body: Sequence[Step]) -> str:
    return "\n".join([f"{head}:"] + [f"  {line}" for step in body for line in str(step).splitlines()])
