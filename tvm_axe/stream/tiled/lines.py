"""Where the statements of a tile program stand in its source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from tvm import tirx
from tvm.ir.base import SequentialSpan

from tvm_axe.errors import StreamError
from tvm_axe.tile import calls
from tvm_axe.tile.arithmetic import plain
from tvm_axe.tile.ending import structured
from tvm_axe.tile.language import GRID
from tvm_axe.tile.nodes import Node
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.walking import walk


class Lines:
    """The lines of a program's statements.

    Parameters
    ----------
    program : TileProgram
        The program; one whose function was made without source has none.
    """

    def __init__(self, program: TileProgram) -> None:
        nodes, spans = list(program.nodes()), list(_spans(program.func.body))
        if len(nodes) != len(spans):
            # Loops that end early are read as other statements than were written, of which some have no place.
            spans = list(_spans(structured(plain(program.func.body))))
        even = len(nodes) == len(spans)
        self._spans = {node: span for node, span in zip(nodes, spans) if span is not None} if even else {}
        self._program = program

    def same(self, node: Node, written: Node) -> None:
        """Let a node stand where the one stands that it was made of."""
        if written in self._spans:
            self._spans[node] = self._spans[written]

    def place(self, node: Node) -> str:
        """Return a statement as the program prints it, with its file and line where these are known."""
        found = [(each, self._spans[each]) for each in walk((node,)) if each in self._spans]
        if not found:
            return f"{node}"
        first, span = found[0]
        span = span.spans[0] if isinstance(span, SequentialSpan) else span  # of several places, the first
        near = "" if first is node else "near "
        return f"{PurePath(str(span.source_name.name)).name}, {near}line {int(span.line)}: {node}"

    def refuse(self, node: Node, why: str) -> StreamError:
        """Return the error that says why a statement can't be translated, and what can be done."""
        return StreamError(f"tile program {self._program.name!r}, {self.place(node)}: {why}")


def _spans(stmt: Any) -> Iterator[Any]:
    """Return the places of the statements that are nodes, in the order of a program's nodes."""
    if isinstance(stmt, tirx.SeqStmt):
        for inner in stmt.seq:
            yield from _spans(inner)
    elif isinstance(stmt, tirx.AllocBuffer) or calls.is_nothing(stmt):
        return
    elif isinstance(stmt, tirx.For) and GRID in stmt.annotations:
        yield from _spans(stmt.body)
    else:
        yield stmt.span
        if isinstance(stmt, tirx.For) and stmt.kind != tirx.ForKind.PARALLEL:
            yield from _spans(stmt.body)
        elif isinstance(stmt, tirx.IfThenElse):
            yield from _spans(stmt.then_case)
            if stmt.else_case is not None:
                yield from _spans(stmt.else_case)
