"""The blocks of a module, and who produces what they read: asked of a schedule often, worked out once a module."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tvm_ffi
from tvm import ir, s_tir, tirx

from tvm_axe.analysis.blocks import NestedBlock, nested_blocks

__all__ = ["BlockTree", "is_one_of", "tree_of", "with_functions"]


@dataclass(frozen=True, eq=False)
class BlockTree:
    """The blocks of a module's functions, each with the loops around it up to the block that encloses it.

    Attributes
    ----------
    mod : IRModule
        The module; it is not changed while the tree is held.
    """

    mod: ir.IRModule

    @functools.cached_property
    def functions(self) -> tuple[tirx.PrimFunc, ...]:
        """The functions of the module that are made of blocks."""
        found = [func for _, func in self.mod.functions_items()]
        return tuple(func for func in found if isinstance(getattr(func, "body", None), s_tir.SBlockRealize))

    @functools.cached_property
    def blocks(self) -> tuple[NestedBlock, ...]:
        """The outermost blocks below the functions' roots, in order."""
        return tuple(block for func in self.functions for block in nested_blocks(func.body.block.body))

    @functools.cached_property
    def _scopes(self) -> dict[s_tir.SBlock, tuple[NestedBlock, tuple[NestedBlock, ...]]]:
        """Every block, with itself and its siblings in order, by its statement."""
        found: dict[s_tir.SBlock, tuple[NestedBlock, tuple[NestedBlock, ...]]] = {}

        def enter(siblings: tuple[NestedBlock, ...]) -> None:
            for nested in siblings:
                found[nested.block] = (nested, siblings)
                enter(tuple(nested_blocks(nested.block.body)))

        enter(tuple(NestedBlock(func.body, ()) for func in self.functions))
        return found

    def at(self, block: s_tir.SBlock) -> NestedBlock | None:
        """Return the block with its loops, or None where it stands below something else than loops and blocks."""
        found = self._scopes.get(block)
        return None if found is None else found[0]

    def named(self, name: str) -> NestedBlock:
        """Return the block of that name.

        Raises
        ------
        KeyError
            If not just one block has it.
        """
        found = self._named.get(name, [])
        if len(found) != 1:
            raise KeyError(f"{len(found)} blocks are called {name!r}")
        return found[0]

    @functools.cached_property
    def nested(self) -> tuple[NestedBlock, ...]:
        """All the blocks but the functions' roots, also those within others."""
        roots = {func.body.block for func in self.functions}
        return tuple(nested for nested, _ in self._scopes.values() if nested.block not in roots)

    @functools.cached_property
    def _named(self) -> dict[str, list[NestedBlock]]:
        found: dict[str, list[NestedBlock]] = {}
        for nested, _ in self._scopes.values():
            found.setdefault(str(nested.block.name_hint), []).append(nested)
        return found

    def producers(self, block: NestedBlock) -> list[NestedBlock]:
        """Return the blocks before `block`, of those that one block encloses, that write what it reads or writes."""
        return self._producers[block.block]

    def consumers(self, block: NestedBlock) -> list[NestedBlock]:
        """Return the blocks behind `block`, of those that one block encloses, that read or write what it writes."""
        return self._consumers[block.block]

    @functools.cached_property
    def _producers(self) -> dict[s_tir.SBlock, list[NestedBlock]]:
        written = {block: {region.source for region in block.writes} for block in self._scopes}
        touched = {block: written[block] | {region.source for region in block.reads} for block in self._scopes}
        found: dict[s_tir.SBlock, list[NestedBlock]] = {}
        for nested, siblings in self._scopes.values():
            before = siblings[: next(n for n, other in enumerate(siblings) if other is nested)]
            found[nested.block] = [other for other in before if touched[nested.block] & written[other.block]]
        return found

    @functools.cached_property
    def _consumers(self) -> dict[s_tir.SBlock, list[NestedBlock]]:
        found: dict[s_tir.SBlock, list[NestedBlock]] = {block: [] for block in self._scopes}
        for nested, _ in self._scopes.values():
            for producer in self._producers[nested.block]:
                found[producer.block].append(nested)
        return found

    def blocks_below(self, loop: tirx.For) -> list[NestedBlock]:
        """Return the blocks below `loop`, in order, those that one block encloses."""
        return [nested for nested, _ in self._scopes.values() if any(own.same_as(loop) for own in nested.loops)]

    def precedes(self, block: NestedBlock, other: NestedBlock) -> bool:
        """Return whether `block` comes before `other` in the program."""
        order = list(self._scopes)
        return order.index(block.block) < order.index(other.block)

    def is_parameter(self, buffer: tirx.Buffer) -> bool:
        """Return whether `buffer` is a parameter of one of the functions."""
        return any(buffer.same_as(param) for func in self.functions for param in func.params)


def is_one_of(block: NestedBlock, blocks: Sequence[NestedBlock]) -> bool:
    """Return whether `block` is one of `blocks`; two blocks of a function may have the same name."""
    return any(block.block.same_as(other.block) for other in blocks)


@functools.lru_cache(maxsize=128)
def why_unschedulable(func: tirx.PrimFunc) -> str | None:
    """Return why a function can't be scheduled, and what to write; None if it can."""
    if isinstance(func.body, s_tir.SBlockRealize):
        return None
    name = str((func.attrs or {}).get("global_symbol", "main"))
    return (
        f"function {name!r} is no schedulable one: it isn't made of blocks; write @T.prim_func(s_tir=True) and compute "
        'within `with T.sblock("name")` (a tile program is compiled by tvm_axe.tile.compile)'
    )


def has_threads(func: tirx.PrimFunc) -> bool:
    """Return whether loops of a function are bound to threads of a GPU."""
    found = False

    def on_loop(loop: tirx.For) -> None:
        nonlocal found
        found = found or loop.kind == tirx.ForKind.THREAD_BINDING

    tvm_ffi.structural_walk(func.body, (tirx.For, on_loop))
    return found


def tree_of(mod: ir.IRModule) -> BlockTree:
    """Return the tree of a module; that of one object is made once."""
    return BlockTree(mod)


def with_functions(mod: ir.IRModule, changed: Mapping[ir.GlobalVar, ir.BaseFunc]) -> ir.IRModule:
    """Return a module with other functions in the places of some; itself where none is changed."""
    if not changed:
        return mod
    functions: dict[ir.GlobalVar, ir.BaseFunc] = {**dict(mod.functions_items()), **changed}
    return ir.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)
