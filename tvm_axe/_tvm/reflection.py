"""What upstream says of its own node types, operators and instructions, for reading its JSON without trusting it."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi.core
from tvm.s_tir.schedule import InstructionKind


@dataclass(frozen=True)
class NodeType:
    """A type of nodes as upstream registers it.

    Attributes
    ----------
    ancestors
        The names of the type itself and of all that it is derived from.
    fields
        The schema of each field by name, its parents' included: ``{"type": name, "args": [schema, ...]}``.
    """

    ancestors: frozenset[str]
    fields: Mapping[str, Any]


@functools.cache
def node_type(name: str) -> NodeType | None:
    """The type of this name; None if upstream knows none, or doesn't say what its fields are."""
    try:
        info = tvm_ffi.core._lookup_or_register_type_info_from_type_key(name)
    except (ValueError, TypeError):
        return None
    ancestors: set[str] = set()
    fields: dict[str, Any] = {}
    while info is not None:
        ancestors.add(str(info.type_key))
        for field in info.fields or ():
            fields.setdefault(str(field.name), json.loads(field.metadata["type_schema"]))
        info = info.parent_type_info
    return NodeType(frozenset(ancestors), fields)


@functools.cache
def operators() -> frozenset[str]:
    """The names of all operators that an ``ir.Op`` can be."""
    return frozenset(map(str, tvm.ir.Op.list_op_names()))


@functools.cache
def is_instruction(name: str) -> bool:
    """Whether a schedule has a primitive of this name."""
    try:
        InstructionKind.get(name)
    except (AttributeError, RuntimeError, ValueError):
        return False
    return True
