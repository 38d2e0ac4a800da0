"""Where the statements of a tile program stand in its source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from tvm import tirx

from tvm_axe.errors import StreamError
from tvm_axe.tile import calls
from tvm_axe.tile.language import GRID
from tvm_axe.tile.nodes import Node
from tvm_axe.tile.program import TileProgram


class Lines:
    """The lines of a program's statements.

    Parameters
    ----------
    program : TileProgram
        The program; one whose function was made without source has none.
    """

    def __init__(self, program: TileProgram) -> None:
        nodes, spans = list(program.nodes()), list(_spans(program.func.body))
        # What ends a loop early is read as other statements than were written; then nothing is said of lines.
        even = len(nodes) == len(spans)
        self._spans = {id(node): span for node, span in zip(nodes, spans)} if even else {}
        self._program = program

    def place(self, node: Node) -> str:
        """Return a statement as the program prints it, with its file and line where these are known."""
        span = self._spans.get(id(node))
        where = "" if span is None else f"{PurePath(str(span.source_name.name)).name}, line {int(span.line)}: "
        return f"{where}{node}"

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
