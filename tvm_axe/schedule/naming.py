"""Block names that stay unique: what upstream names alike is told apart, and found again by its place.

Upstream names a block that it makes after a buffer or another block, so that two may have one name. A trace has no
instruction that renames a block: it replays with upstream's names. So a block whose name is, or was, two blocks' in
upstream's view is recorded by its place below the root, not by its name.
"""

from __future__ import annotations

from collections import Counter

import tvm_ffi
from tvm import s_tir
from tvm.ir import IRModule
from tvm.s_tir.schedule import SBlockRV

from tvm_axe import _tvm

__all__ = ["block_at", "block_named", "block_names", "tell_apart"]


def block_names(mod: IRModule) -> list[str]:
    """Return the names of all blocks below the roots, in order."""
    return [str(block.name_hint) for block in _blocks(mod)]


def tell_apart(sch: s_tir.Schedule, before: IRModule) -> frozenset[str]:
    """Rename blocks that a primitive has given a name that another one has; return the names, old and new.

    Who had it `before` keeps it; of new ones the first. A new name is the old one with the first number behind it that
    is no block's.
    """
    known = {str(block.name_hint): block for block in _blocks(before)}
    touched: set[str] = set()
    while True:
        blocks = _blocks(sch.mod)  # those around a block that is renamed are others afterwards
        taken = Counter(str(block.name_hint) for block in blocks)
        name = next((name for name, number in taken.items() if number > 1), None)
        if name is None:
            return frozenset(touched)
        same = [block for block in blocks if str(block.name_hint) == name]
        kept = next((block for block in same if name in known and _is_made_of(block, known[name])), same[0])
        number = next(n for n in range(1, len(blocks) + 1) if f"{name}_{n}" not in taken)
        _tvm.rename_block(sch, next(block for block in same if block is not kept), f"{name}_{number}")
        touched |= {name, f"{name}_{number}"}


def block_named(mod: IRModule, name: str) -> s_tir.SBlock:
    """Return the block of that name.

    Raises
    ------
    KeyError
        If there is none.
    """
    for block in _blocks(mod):
        if str(block.name_hint) == name:
            return block
    raise KeyError(name)


def block_at(sch: s_tir.Schedule, block: s_tir.SBlock) -> SBlockRV:
    """Return the handle of a block, recorded as the so-manieth child of its parents."""
    root = next(
        func.body.block for _, func in sch.mod.functions_items() if any(own.same_as(block) for own in _below(func.body))
    )
    handle = s_tir.Schedule.get_sblock(sch, str(root.name_hint))
    while not _tvm.statement(sch, handle).same_as(block):
        children = s_tir.Schedule.get_child_blocks(sch, handle)
        handle = next(
            child for child in children if any(own.same_as(block) for own in _below(_tvm.statement(sch, child)))
        )
    return handle


def _blocks(mod: IRModule) -> list[s_tir.SBlock]:
    found: list[s_tir.SBlock] = []
    for _, func in mod.functions_items():
        if isinstance(getattr(func, "body", None), s_tir.SBlockRealize):
            found += _below(func.body)[:-1]
    return found


def _below(stmt: object) -> list[s_tir.SBlock]:
    """Return the blocks of a statement, itself included, inner ones first.

    Those that upstream's `blockize` puts into another's initialization are left out: no schedule has a handle of them.
    """
    found: list[s_tir.SBlock] = []
    tvm_ffi.structural_walk(stmt, (s_tir.SBlock, found.append))
    initial = {inner for block in found if block.init is not None for inner in _below(block.init)}
    return [block for block in found if block not in initial]


def _is_made_of(block: s_tir.SBlock, old: s_tir.SBlock) -> bool:
    """Return whether a block is the old one, rewritten: primitives keep its iterators, and give new blocks new ones."""
    return block.same_as(old) or any(
        mine.var.same_as(theirs.var) for mine in block.iter_vars for theirs in old.iter_vars
    )
