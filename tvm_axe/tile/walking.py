"""Bodies of nodes walked and rewritten, and what their expressions are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import tvm_ffi
from tvm import ir, tirx

from tvm_axe import _tvm
from tvm_axe.tile.nodes import Node
from tvm_axe.tile.regions import Region, Tile


def walk(body: tuple[Node, ...]) -> Iterator[Node]:
    """Every node of a body, loops and branches before what is in them."""
    for node in body:
        yield node
        for inner in node.bodies:
            yield from walk(inner)


def leaves(body: tuple[Node, ...]) -> Iterator[Node]:
    """Every node of a body but loops and branches."""
    return (node for node in walk(body) if not node.bodies)


def tiles_of(value: object, known: Mapping[tirx.Buffer, Tile]) -> tuple[Tile, ...]:
    """The tiles and tensors that an expression loads from."""
    found: dict[Tile, None] = {}
    tvm_ffi.structural_walk(value, (ir.TensorLoad, lambda load: found.setdefault(known[load.source])))
    return tuple(found)


def substitute(nodes: tuple[Node, ...], values: Mapping[tirx.Var, tirx.Expr]) -> tuple[Node, ...]:
    """The nodes with variables replaced by expressions; tiles stay, and nodes in which nothing changes do too."""

    def replaced(value: Any) -> Any:
        if isinstance(value, Tile | str | int | None):
            return value
        if isinstance(value, tuple):
            mapped = tuple(replaced(item) for item in value)
            return value if all(a is b for a, b in zip(mapped, value)) else mapped
        if isinstance(value, Region | Node):
            changes = {f.name: replaced(getattr(value, f.name)) for f in fields(value)}
            changed = {name: new for name, new in changes.items() if new is not getattr(value, name)}
            return replace(value, **changed) if changed else value
        mapped = substitute_in(value, values)
        return value if mapped.same_as(value) else mapped

    return tuple(replaced(node) for node in nodes) if values else nodes


def substitute_in(value: Any, values: Mapping[tirx.Var, tirx.Expr]) -> Any:
    """An expression or a statement with variables, and the tensors it loads from, replaced."""
    return _tvm.structural_map(value, (tirx.Var, lambda var: values.get(var, var)))


def variables_in(*values: Any) -> frozenset[tirx.Var]:
    """The variables in expressions; the tensors that they load from are among them."""
    found: set[tirx.Var] = set()
    for value in values:
        if not isinstance(value, int):
            tvm_ffi.structural_walk(value, (tirx.Var, found.add))
    return frozenset(found)
