"""Upstream's parser of TVMScript, without the source lines of every caller.

Each function that is parsed asks Python for the whole stack, with the line of source that each frame is in: with some
forty frames that takes longer than parsing does, and lowering a tile kernel parses dozens of functions. What is asked
of the stack are frames, and the line of one of them.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from types import FrameType
from typing import Any

__all__ = ["keep_stacks_short"]


class _Frame:
    """What the parser asks of one of `inspect.stack`'s."""

    def __init__(self, frame: FrameType) -> None:
        self.frame = frame

    @property
    def lineno(self) -> int:
        return self.frame.f_lineno

    @property
    def code_context(self) -> list[str] | None:
        return inspect.getframeinfo(self.frame).code_context


class _Inspect:
    """Python's module of that name, with such a stack."""

    def __getattr__(self, name: str) -> Any:
        return getattr(inspect, name)

    @staticmethod
    def stack() -> list[_Frame]:
        found: list[_Frame] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            found.append(_Frame(frame))
            frame = frame.f_back
        return found


def keep_stacks_short() -> None:
    """Have upstream's ``prim_func`` look up the lines of those frames alone that it asks for them."""
    vars(importlib.import_module("tvm.tirx.script.parser.entry"))["inspect"] = _Inspect()
