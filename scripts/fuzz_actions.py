"""The primitives that `fuzz_schedules` draws, as actions that can be printed and done again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_axe as axe

OURS = frozenset(
    (
        "shard",
        "all_reduce",
        "split_collective",
        "reorder_collective",
        "as_slice",
        "redistribute",
        "send",
        "fuse_collective",
        "overlap",
        "set_layout",
    )
)
"""The primitives of this package; the others are upstream's."""


@dataclass(frozen=True)
class Action:
    """A primitive and its arguments: names of blocks, places of loops, numbers."""

    primitive: str
    arguments: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.primitive}({', '.join(map(repr, self.arguments))})"


def apply(sch: axe.Schedule, action: Action) -> None:
    """Do an action; raises what the primitive raises."""
    _APPLY[action.primitive](sch, *action.arguments)


def labelled(sch: axe.Schedule) -> dict[str, Any]:
    """The blocks by name, in program order."""
    return {str(sch.get(block).name_hint): block for block in sch.get_child_blocks(sch.get_sblock("root"))}


def _block(sch: axe.Schedule, label: str) -> Any:
    return labelled(sch)[label]


def _loop(sch: axe.Schedule, block: str, at: int) -> Any:
    return sch.get_loops(_block(sch, block))[at]


def _blocks(sch: axe.Schedule, labels: Sequence[str]) -> list[Any]:
    found = labelled(sch)
    return [found[label] for label in labels]


def _reorder(sch: axe.Schedule, block: str, order: Sequence[int]) -> None:
    loops = sch.get_loops(_block(sch, block))
    sch.reorder(*(loops[at] for at in order))


def _fuse(sch: axe.Schedule, block: str, at: int) -> None:
    loops = sch.get_loops(_block(sch, block))
    sch.fuse(loops[at], loops[at + 1])


_APPLY: dict[str, Callable[..., Any]] = {
    "shard": lambda sch, block, at, axis: sch.shard(_loop(sch, block, at), axis, _block(sch, block)),
    "all_reduce": lambda sch, block, at, axis: sch.all_reduce(_loop(sch, block, at), axis),
    "split_collective": lambda sch, block, dim, root: sch.split_collective(_block(sch, block), dim, root),
    "reorder_collective": lambda sch, gather, readers: sch.reorder_collective(
        _block(sch, gather), _blocks(sch, readers)
    ),
    "as_slice": lambda sch, gather: sch.as_slice(_block(sch, gather)),
    "redistribute": lambda sch, block, buffer, axis, dim: sch.redistribute(_block(sch, block), buffer, axis, dim),
    "send": lambda sch, block, axis: sch.send(_block(sch, block), axis),
    "fuse_collective": lambda sch, blocks: sch.fuse_collective(_blocks(sch, blocks)),
    "overlap": lambda sch, blocks, axis, chunks: sch.overlap(_blocks(sch, blocks), axis, chunks),
    "set_layout": lambda sch, buffer, layout: sch.set_layout(buffer, layout),
    "split": lambda sch, block, at, factor: sch.split(_loop(sch, block, at), [None, factor]),
    "reorder": _reorder,
    "fuse": _fuse,
    "unroll": lambda sch, block, at: sch.unroll(_loop(sch, block, at)),
    "vectorize": lambda sch, block, at: sch.vectorize(_loop(sch, block, at)),
    "parallel": lambda sch, block, at: sch.parallel(_loop(sch, block, at)),
    "cache_read": lambda sch, block, at: sch.cache_read(_block(sch, block), at, "global"),
    "cache_write": lambda sch, block: sch.cache_write(_block(sch, block), 0, "global"),
    "compute_at": lambda sch, block, other, at: sch.compute_at(_block(sch, block), _loop(sch, other, at)),
    "reverse_compute_at": lambda sch, block, other, at: sch.reverse_compute_at(
        _block(sch, block), _loop(sch, other, at)
    ),
    "compute_inline": lambda sch, block: sch.compute_inline(_block(sch, block)),
    "reverse_compute_inline": lambda sch, block: sch.reverse_compute_inline(_block(sch, block)),
    "rfactor": lambda sch, block, at: sch.rfactor(_loop(sch, block, at), 0),
    "decompose_reduction": lambda sch, block, at: sch.decompose_reduction(_block(sch, block), _loop(sch, block, at)),
}
