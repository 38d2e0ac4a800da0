"""Reading upstream's JSON of an IRModule without trusting it: what is wrong with one, and where.

``tvm.ir.save_json`` writes ``{"root_index": n, "nodes": [{"type": name, "data": ...}, ...], "metadata": ...}``, every
node behind those that it refers to. Its counterpart fills in what it reads and follows it: a number of no node, a null
where there must be an expression, or a sum of two types ends the process. So a graph is checked here before it is read:
the fields of each node against upstream's own description of its type, then what no description has, such as the types
of both sides of a sum (`tvm_axe.records.expressions`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tvm_axe import _tvm

__all__ = ["Graph", "Wrong", "is_dtype", "parse_graph", "short", "strict_json"]

_INT64 = range(-(2**63), 2**63)
_INT32 = range(-(2**31), 2**31)
_NULLABLE = {("ir.Call", "attrs"), ("ir.SequentialSpan", "source_name")}  # besides all spans and what is optional
_DEEP = 400  # nesting; upstream follows expressions by recursion


class Wrong(Exception):
    """What is wrong with a line, in words."""


def strict_json(text: str, constants: bool = False) -> Any:
    """JSON as every parser reads it: no key twice, no number out of range, no text that isn't Unicode.

    Parameters
    ----------
    constants
        Whether ``NaN`` and ``Infinity`` are numbers, which upstream writes for constants of programs.

    Raises
    ------
    Wrong
        If it isn't that.
    """

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            keys = [key for key, _ in items]
            raise Wrong(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is there twice")
        return found

    def constant(name: str) -> float:
        if not constants:
            raise Wrong(f"{name} is no number of JSON")
        return float(name)

    def integer(digits: str) -> int:
        if len(digits) > 20 or int(digits) not in _INT64:
            raise Wrong(f"the integer {digits[:24]} takes more than 64 bits")
        return int(digits)

    def real(digits: str) -> float:
        if not math.isfinite(float(digits)):
            raise Wrong(f"the number {digits[:24]} is out of range")
        return float(digits)

    try:
        text.encode()
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_int=integer, parse_float=real)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Wrong("a text in it isn't Unicode") from error
    except RecursionError as error:
        raise Wrong("its lists are nested too deep") from error
    except ValueError as error:
        raise Wrong(f"isn't JSON: {error}") from error
    return value


class Graph:
    """The nodes of a graph whose fields are as upstream describes them, with ways to ask about them by number."""

    def __init__(self, nodes: Sequence[Mapping[str, Any]], root: int) -> None:
        self.nodes, self.root = nodes, root

    def type(self, number: int) -> str:
        """The name of a node's type."""
        return str(self.nodes[number]["type"])

    def data(self, number: int) -> Any:
        """A node's contents: fields by name, the numbers of an array's nodes, a text, a number."""
        return self.nodes[number].get("data")

    def field(self, number: int, *names: str) -> Any:
        """What a path of fields from a node leads to."""
        found: Any = number
        for name in names:
            found = self.data(found)[name]
        return found

    def items(self, number: int) -> list[tuple[int, int]]:
        """The numbers of a map's keys and values."""
        flat = self.data(number)
        return list(zip(flat[::2], flat[1::2]))

    def integer(self, number: int) -> int | None:
        """The value of an integer constant; None of another expression."""
        return int(self.data(self.field(number, "value"))) if self.type(number) == "ir.IntImm" else None

    def dtype(self, number: int) -> str | None:
        """The type of an expression of numbers; None of another node."""
        fields = self.data(number)
        ty = fields.get("ty") if isinstance(fields, Mapping) else None
        return str(self.data(ty)["dtype"]) if ty is not None and self.type(ty) == "ir.PrimType" else None


def parse_graph(text: str) -> Graph:
    """The graph that a text is.

    Raises
    ------
    Wrong
        If it isn't one, or a node isn't what upstream says that its type is.
    """
    graph = strict_json(text, constants=True)
    if not isinstance(graph, dict) or set(graph) != {"root_index", "nodes", "metadata"}:
        raise Wrong("the function isn't an object of root_index, nodes and metadata")
    nodes, root, metadata = graph["nodes"], graph["root_index"], graph["metadata"]
    if not isinstance(nodes, list) or not isinstance(metadata, dict):
        raise Wrong("nodes isn't a list, or metadata no object")
    if type(root) is not int or not 0 <= root < len(nodes):
        raise Wrong(f"root_index: {short(root)} is no node; there are {len(nodes)}")
    deep: list[int] = []
    for number, node in enumerate(nodes):
        try:
            if not isinstance(node, dict) or not isinstance(node.get("type"), str) or set(node) - {"type", "data"}:
                raise Wrong("isn't an object of a type and data")
            references = _Node(nodes, number).check()
        except Wrong as error:
            kind = node.get("type") if isinstance(node, dict) else None
            raise Wrong(f"node {number}{f' ({short(kind)})' if kind else ''}: {error}") from error
        deep.append(1 + max((deep[n] for n in references), default=0))
        if deep[-1] > _DEEP:
            raise Wrong(f"node {number}: is nested more than {_DEEP} deep")
    return Graph(nodes, root)


class _Node:
    """One node that is checked; those before it were."""

    def __init__(self, nodes: Sequence[Mapping[str, Any]], number: int) -> None:
        self.nodes, self.number = nodes, number
        self.type: str = nodes[number]["type"]
        self.data: Any = nodes[number].get("data")
        self.references: list[int] = []

    def check(self) -> list[int]:
        """The numbers that the node refers to."""
        match self.type:
            case "None":
                self._demand(self.data is None, "has data")
            case "bool":
                self._demand(isinstance(self.data, bool), f"{short(self.data)} is neither true nor false")
            case "int":
                self._demand(type(self.data) is int, f"{short(self.data)} is no integer")
            case "float":
                self._demand(type(self.data) in (int, float), f"{short(self.data)} is no number")
            case "ffi.String" | "ir.SourceName" | "tirx.Axis":
                self._demand(isinstance(self.data, str), f"{short(self.data)} is no text")
            case "ir.Op":
                named = isinstance(self.data, str) and self.data in _tvm.operators()
                self._demand(named, f"{short(self.data)} is no operator")
            case "ffi.Array" | "ffi.Map":
                self._demand(isinstance(self.data, list), f"{short(self.data)} is no list")
                even = self.type == "ffi.Array" or len(self.data) % 2 == 0
                self._demand(even, "has a key without a value")
                for item in self.data:
                    self._refer("an item", item)
                if self.type == "ffi.Map":
                    self._distinct([self.nodes[key] for key in self.data[::2]])
            case _:
                self._object()
        return self.references

    def _object(self) -> None:
        described = _tvm.node_type(self.type)
        if described is None or self.type.startswith("ffi."):
            raise Wrong("there is no such type of nodes")
        fields = self.data if self.data is not None else {}
        self._demand(isinstance(fields, dict), f"{short(fields)} isn't an object of fields")
        for name in (*described.fields, *fields):
            self._demand(name in fields, f"{name}: is missing")
            self._demand(name in described.fields, f"{name}: is no field of it")
        for name, schema in described.fields.items():
            self._field(name, fields[name], schema)

    def _field(self, name: str, value: Any, schema: Mapping[str, Any]) -> None:
        """Check a field, which is a number, a text or truth value itself, or refers to a node."""
        match schema["type"]:
            case "bool":
                self._demand(isinstance(value, bool), f"{name}: {short(value)} is neither true nor false")
            case "int":
                self._demand(type(value) is int and value in _INT32, f"{name}: {short(value)} is no 32-bit integer")
            case "float":
                self._demand(type(value) in (int, float), f"{name}: {short(value)} is no number")
            case "DataType":
                self._demand(isinstance(value, str) and is_dtype(value), f"{name}: {short(value)} is no dtype")
            case _:
                self._refer(name, value)
                null = name == "span" or (self.type, name) in _NULLABLE
                if not (null and self.nodes[value]["type"] == "None"):
                    self._matches(name, value, schema)

    def _matches(self, name: str, number: int, schema: Mapping[str, Any]) -> None:
        """Check that a node is of the type that a field wants."""
        wanted, arguments, found = schema["type"], schema.get("args", ()), self.nodes[number]["type"]
        match wanted:
            case "Any":
                return
            case "Optional":
                if found != "None":
                    self._matches(name, number, arguments[0])
                return
            case "ffi.BigInt" | "int":
                fits = found == "int"
            case "float":
                fits = found in ("int", "float")
            case "ffi.Array" | "ffi.Map":
                fits = found == wanted
            case "ffi.Object":
                fits = found not in ("None", "bool", "int", "float")
            case _:
                known = _tvm.node_type(found)
                fits = found == wanted or (known is not None and wanted in known.ancestors)
        self._demand(fits, f"{name}: node {number} is of the type {short(found)}, not {wanted}")
        if wanted in ("ffi.Array", "ffi.Map") and arguments:
            for at, item in enumerate(self.nodes[number]["data"]):
                self._matches(f"{name}[{at // len(arguments)}]", item, arguments[at % len(arguments)])

    def _refer(self, name: str, value: Any) -> None:
        valid = type(value) is int and 0 <= value < self.number
        self._demand(valid, f"{name}: {short(value)} isn't the number of a node before it")
        self.references.append(value)

    def _distinct(self, keys: list[Mapping[str, Any]]) -> None:
        texts = [key["data"] for key in keys if key["type"] == "ffi.String"]
        self._demand(len(set(texts)) == len(texts), "has a key twice")

    def _demand(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise Wrong(otherwise)


def is_dtype(name: str) -> bool:
    """Whether it is the name of a type of numbers as upstream has them, such as ``float32`` or ``int8x4``."""
    base, _, lanes = name.partition("x")
    if lanes and not (lanes.isdecimal() and lanes.isascii() and 2 <= int(lanes[:6]) <= 4096 and lanes[0] != "0"):
        return False
    return base in _DTYPES


_DTYPES = {"void", "handle", "bool", "bfloat16", "float16", "float32", "float64"}
_DTYPES |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (1, 2, 4, 8, 16, 32, 64)}
_DTYPES |= {f"float8_{kind}" for kind in ("e3m4", "e4m3", "e4m3b11fnuz", "e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz")}
_DTYPES |= {"float8_e8m0fnu", "float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn"}


def short(value: Any) -> str:
    """A value as a message shows it."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
