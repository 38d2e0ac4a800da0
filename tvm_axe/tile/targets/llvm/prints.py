"""`print` on a CPU: each line by C's ``printf``, which takes any number of arguments, so LLVM's language has the call.

Lines are written out at once, so that they stand where they belong among those of Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from tvm_axe.tile import printing
from tvm_axe.tile.nodes import Print
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.targets.llvm.writer import Writer, nest

_LIBRARY = "declare i32 @printf(ptr, ...)\ndeclare i32 @fflush(ptr)\n"


def source(program: TileProgram) -> list[str]:
    """The functions that a program prints its lines by."""
    made = {printing.function(node): _function(node) for node in program.nodes() if isinstance(node, Print)}
    return [_LIBRARY, *made.values()] if made else []


def _function(node: Print) -> str:
    name, text = printing.function(node), printing.line(node).encode() + b"\0"
    held = "".join(f"\\{byte:02x}" for byte in text)
    value = "double" if printing.kind(node) == "float64" else "i64"
    place = 0 if node.region is None else len(node.region.extents)
    types = ["i64"] * place + [value] + ["i64"] * len(node.block)
    given = ", ".join(f"{of} %a{number}" for number, of in enumerate(types))
    return f"""
@{name}_line = private unnamed_addr constant [{len(text)} x i8] c"{held}"
define linkonce_odr void @{name}({given}) {{
  %count = call i32 (ptr, ...) @printf(ptr @{name}_line, {given})
  %done = call i32 @fflush(ptr null)
  ret void
}}
"""


def write_print(writer: Writer, node: Print) -> None:
    """Emit the lines, in the order of the elements."""
    block = writer.exprs(node.block)

    def emit(place: Sequence[Any], value: Any) -> None:
        given = printing.arguments(node, place, value, block)
        T.evaluate(T.call_extern("void", printing.function(node), *given))

    region = node.region
    if region is None:
        emit([], writer.expr(node.value))
        return
    start = writer.exprs(region.start)
    with nest([(0, extent) for extent in region.extents]) as at:
        place = [first + step for first, step in zip(start, at)]
        outside = region.overruns(writer.analyzer) if region.tile.scope == "global" else ()
        if not outside:
            emit(place, writer.load(region.tile, place))
            return
        with T.If(tirx.all(*(place[d] < writer.expr(region.tile.shape[d]) for d in outside))), T.Then():
            emit(place, writer.load(region.tile, place))
