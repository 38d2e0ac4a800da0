"""Windows: a chunk's kernel sees its rows of each tensor as a tensor of its own, so that it is an ordinary kernel.

It has no argument that says which chunk it is, its extents are numbers, and tuning finds it as it finds any other. Who
calls it is a function that takes the whole tensors and the chunk's number and passes on the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from tvm import DataType, tirx

from tvm_axe import _tvm

_ALIGNMENT = 64  # bytes; what compiled code takes for granted of a tensor's first element


@dataclass(frozen=True)
class Window:
    """Rows ``[slice_rows * slice + chunk_rows * chunk, ... + rows)`` of a buffer's leading dimension."""

    slice_rows: int
    chunk_rows: int

    @property
    def rows(self) -> int:
        return self.chunk_rows or self.slice_rows

    def start(self, at: Mapping[str, tirx.Expr]) -> tirx.Expr:
        """The first row, where `at` says which slice and which chunk."""
        return at["slice"] * self.slice_rows + at["chunk"] * self.chunk_rows

    def can_be_passed(self, shape: Sequence[int], dtype: str) -> bool:
        """Whether every window of a buffer of this shape can be an argument: a tensor that compiled code takes.

        It starts where that may expect a tensor to start, and isn't of a type that code for a host has as integers:
        upstream then says of an argument that it is of these, too.
        """
        if dtype == "bfloat16" or dtype.startswith("float8"):
            return False
        row = prod(shape[1:]) * DataType(dtype).itemsize
        return (self.slice_rows * row) % _ALIGNMENT == 0 and (self.chunk_rows * row) % _ALIGNMENT == 0


def calling(
    callee: str,
    buffers: Sequence[tirx.Buffer],
    windows: Sequence[Window | None],
    scalars: Sequence[tirx.Var],
    at: Mapping[str, tirx.Expr],
) -> tirx.PrimFunc:
    """The function of whole `buffers` and `scalars` that calls `callee` on windows of them."""
    arguments = []
    for buffer, window in zip(buffers, windows):
        start = None if window is None else window.start(at)
        shape = list(buffer.shape) if window is None else [window.rows, *list(buffer.shape)[1:]]
        arguments.append(_tvm.tensor_argument(buffer, start, shape))
    body = tirx.Evaluate(tirx.call_cpacked(callee, *arguments))
    return tirx.PrimFunc([*buffers, *scalars], body).with_attr("tirx.noalias", True)
