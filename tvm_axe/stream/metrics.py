"""Symbolic metrics: off-chip traffic, FLOPs and on-chip memory of a program, in the symbols of its dynamic dims.

>>> from tvm_axe.stream import StreamProgram, Selector, StreamType, functions
>>> p = StreamProgram("experts")
>>> rows = p.load(p.tensor("x", 64, 32), (1, 32)).flatten()
>>> parts = rows.partition(p.input("routing", StreamType((64,), Selector(2))))
>>> for part in parts:
...     tiles = part.reshape(None).accum(functions.retile())
...     tiles.load(p.tensor(f"w{len(p.tensors)}", 32, 16), (32, 16)).discard()
>>> print(off_chip_read(p))
2048*Min(1, routing_0) + 2048*Min(1, routing_1) + 8192

A run says what the symbols were, `Report.bindings`, and `evaluate` puts them in: the numbers are those that the run
counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import sympy

from tvm_axe.errors import StreamError
from tvm_axe.stream.operators.higher import Accum, Map, Scan
from tvm_axe.stream.operators.off_chip import LinearLoad, LinearStore, RandomLoad, RandomStore
from tvm_axe.stream.operators.on_chip import Bufferize
from tvm_axe.stream.types import Buffer, StreamType, Tile, Tuple, product

if TYPE_CHECKING:
    from tvm_axe.stream.program import Node, StreamProgram


def off_chip_read(program: StreamProgram) -> sympy.Expr:
    """Return the bytes that a program loads from off-chip memory."""
    loads = (LinearLoad, RandomLoad)
    return _total(node.outputs[0].type.bytes for node in program.nodes if isinstance(node.operator, loads))


def off_chip_written(program: StreamProgram) -> sympy.Expr:
    """Return the bytes that a program stores to off-chip memory; of tiles that are stored in part, those of all."""
    found = []
    for node in program.nodes:
        if isinstance(node.operator, (LinearStore, RandomStore)):
            type = node.inputs[0].type
            assert isinstance(type.data, Tile)
            element = Tile(1, 1, node.operator.tensor.dtype).itemsize
            found.append(product((type.count, type.data.rows, type.data.columns, element)))
    return _total(found)


def off_chip_traffic(program: StreamProgram) -> sympy.Expr:
    """Return the bytes that a program loads from and stores to off-chip memory."""
    return off_chip_read(program) + off_chip_written(program)


def flops(program: StreamProgram) -> sympy.Expr:
    """Return the FLOPs of all of a program's functions."""
    found = []
    for node in program.nodes:
        if isinstance(node.operator, (Map, Accum, Scan)):
            first = node.inputs[0].type
            whole = len(node.inputs) == 1 and isinstance(first.data, Tuple)
            data: Any = first.data.items if whole else [stream.type.data for stream in node.inputs]  # type: ignore[union-attr]
            found.append(product((first.count, node.operator.function.flops(*data))))
    return _total(found)


def on_chip_memory(program: StreamProgram) -> sympy.Expr:
    """Return the bytes of on-chip memory that a program's operators need.

    A load needs room for a tile, an accumulation or scan for its state, what buffers for a buffer; tiles that are
    in channels and those that functions work on aren't counted. Of a ragged buffer or tile that is the mean.
    """
    return _total(_held(node) for node in program.nodes)


def evaluate(expression: Any, bindings: Mapping[sympy.Symbol, Any]) -> int:
    """Return the number that an expression is for these values of its symbols.

    Raises
    ------
    StreamError
        If one of its symbols has none.
    """
    found = sympy.sympify(expression).subs(dict(bindings))
    if found.free_symbols:
        missing = ", ".join(sorted(map(str, found.free_symbols)))
        raise StreamError(f"evaluate: {missing} have no values; `Report.bindings` has those of a run")
    return int(sympy.ceiling(found))


def _held(node: Node) -> Any:
    operator = node.operator
    if isinstance(operator, (LinearLoad, RandomLoad, Scan)):
        return node.outputs[0].type.data.bytes
    if isinstance(operator, Bufferize):
        type = node.outputs[0].type
        assert isinstance(type.data, Buffer)
        return sympy.sympify(type.bytes) / _elements(type) if type.has_ragged_buffers else type.data.bytes
    return 0


def _elements(type: StreamType) -> Any:
    return sympy.Max(1, type.count)


def _total(sizes: Any) -> sympy.Expr:
    return sympy.expand(sum((sympy.sympify(size) for size in sizes), sympy.Integer(0)))
