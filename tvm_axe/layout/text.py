"""The canonical text of layouts, and its parser. ::

    layout  := "S" run ("+" "R" run)? ("+" amount)*
    run     := "[" extents ":" amounts "]"
    extents := int | "(" (int ",")* int? ")"            amounts likewise
    amount  := int ("@" axis)?                          without an axis: linear memory, m

Spaces between tokens are free. A run of one iter is printed without parentheses, and read with or without them.

With a swizzle under it, a layout is written ::

    composed := "ComposeLayout" "(" int "," int "," int "," layout ("," "swizzle_inner" "=" ("True" | "False"))? ")"

The compiler's own notation, in which TVMScript prints its layouts, is read as well: it has ``T.`` before S, R and the
names of classes, ``Axis.`` before axes, ``T.TileLayout(...)`` around a layout, and may have its offsets in parentheses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import LINEAR_MEMORY
from tvm_axe.layout.iters import Iter, on_axis
from tvm_axe.layout.symbolic import Number

_TOKEN = re.compile(r"(?P<int>-?[0-9]+)|(?P<name>[A-Za-z_][A-Za-z0-9_]*)|(?P<mark>[][():,+@=])|(?P<other>\S)")
_MAX_DIGITS = 19  # of 2**63 - 1; int() itself raises ValueError for a text of thousands of digits

T = TypeVar("T")

Parts = tuple[tuple[Iter, ...], tuple[Iter, ...], dict[str, int]]
"""D, R and O."""


def format_layout(shard: Sequence[Iter], replica: Sequence[Iter], offset: Mapping[str, Number]) -> str:
    """Return the canonical text of a layout's parts."""
    terms = [f"S{_format_run(shard)}"]
    if replica:
        terms.append(f"R{_format_run(replica)}")
    terms += (on_axis(amount, axis) for axis, amount in offset.items())
    return " + ".join(terms)


def _format_run(iters: Sequence[Iter]) -> str:
    if len(iters) == 1:
        return f"[{iters[0]}]"
    extents = ", ".join(str(it.extent) for it in iters)
    return f"[({extents}) : ({', '.join(on_axis(it.stride, it.axis) for it in iters)})]"


def parse_layout(text: object) -> Parts:
    """Read the parts D, R and O of a layout from its text.

    Raises
    ------
    LayoutError
        If the text is malformed, with the position of the first token that doesn't fit.
    """
    if not isinstance(text, str):
        raise LayoutError(f"Layout.parse: text must be a str such as 'S[(4, 32) : (1@tp, 1)]', not {text!r}")
    parser = _Parser(text, "Layout.parse")
    parts = parser.layout()
    parser.end()
    return parts


def parse_composed(text: object) -> tuple[list[int], Parts, bool]:
    """Read the bits of the swizzle, the parts of the layout, and `swizzle_inner` of a layout with a swizzle.

    Raises
    ------
    LayoutError
        If the text is malformed, with the position of the first token that doesn't fit.
    """
    if not isinstance(text, str):
        raise LayoutError(f"ComposeLayout.parse: text must be a str such as 'ComposeLayout(...)', not {text!r}")
    parser = _Parser(text, "ComposeLayout.parse")
    composed = parser.composed()
    parser.end()
    return composed


class _Token(NamedTuple):
    kind: str
    text: str
    position: int


class _Parser:
    """Recursive descent over the tokens of one text, of which the last is the end."""

    def __init__(self, text: str, reader: str) -> None:
        self.text = text
        self.reader = reader
        self.tokens = [_Token(m.lastgroup or "", m[0], m.start()) for m in _TOKEN.finditer(text)]
        self.tokens.append(_Token("end", "", len(text)))
        self.seen = 0

    @property
    def next(self) -> _Token:
        return self.tokens[self.seen]

    def advance(self) -> _Token:
        """Step past the next token, and return it."""
        token = self.next
        self.seen += 1
        return token

    def error(self, message: str, position: int) -> LayoutError:
        return LayoutError(f"{self.reader}: at position {position} of {self.text!r}: {message}")

    def expected(self, what: str) -> LayoutError:
        found = repr(self.next.text) if self.next.text else "the end"
        return self.error(f"expected {what}, found {found}", self.next.position)

    def take(self, mark: str) -> None:
        if self.next.text != mark:
            raise self.expected(repr(mark))
        self.advance()

    def skip_prefix(self, name: str) -> None:
        """Step over the compiler's prefix ``name.``, if it is there."""
        if self.next.text == name and self.tokens[self.seen + 1].text == ".":
            self.seen += 2

    def end(self) -> None:
        if self.next.kind != "end":
            raise self.expected("the end")

    def integer(self) -> int:
        if self.next.kind != "int":
            raise self.expected("an int")
        token = self.advance()
        if len(token.text.lstrip("-0")) > _MAX_DIGITS:
            raise self.error("an int must fit in 64 bits", token.position)
        return int(token.text)

    def amount(self) -> tuple[int, str]:
        number = self.integer()
        if self.next.text != "@":
            return number, LINEAR_MEMORY
        self.advance()
        self.skip_prefix("Axis")
        if self.next.kind != "name":
            raise self.expected("the name of an axis")
        return number, self.advance().text

    def items(self, item: Callable[[], T]) -> list[T]:
        """One item, or any number of them in parentheses."""
        if self.next.text != "(":
            return [item()]
        self.advance()
        found: list[T] = []
        while self.next.text != ")":
            found.append(item())
            if self.next.text != ")":
                self.take(",")
        self.advance()
        return found

    def run(self) -> tuple[Iter, ...]:
        start = self.next.position
        self.take("[")
        extents = self.items(self.integer)
        self.take(":")
        amounts = self.items(self.amount)
        self.take("]")
        if len(extents) != len(amounts):
            raise self.error(f"as many strides as extents needed, found {len(extents)} : {len(amounts)}", start)
        try:
            return tuple(Iter(extent, stride, axis) for extent, (stride, axis) in zip(extents, amounts))
        except LayoutError as error:
            raise self.error(str(error), start) from None

    def layout(self) -> Parts:
        """Return a layout, in either notation; what follows it is not read."""
        self.skip_prefix("T")
        if self.next.text != "TileLayout":
            return self.parts()
        self.advance()
        self.take("(")
        parts = self.parts()
        self.take(")")
        return parts

    def parts(self) -> Parts:
        self.skip_prefix("T")
        self.take("S")
        shard = self.run()
        replica: tuple[Iter, ...] = ()
        offset: dict[str, int] = {}
        while self.next.text not in ("", ")", ","):
            self.take("+")
            self.skip_prefix("T")
            if self.next.text == "R" and not replica and not offset:
                self.advance()
                replica = self.run()
            elif self.next.text == "(":
                self.advance()
                self.offset(offset, "an offset such as 3@warpid")
                while self.next.text != ")":
                    self.take("+")
                    self.offset(offset, "an offset such as 3@warpid")
                self.advance()
            else:
                self.offset(offset, "an offset such as 3@warpid" if replica or offset else "R[...] or an offset")
        return shard, replica, offset

    def offset(self, offset: dict[str, int], what: str) -> None:
        """Read one term of the offset into `offset`."""
        start = self.next.position
        if self.next.kind != "int":
            raise self.expected(what)
        amount, axis = self.amount()
        if axis in offset:
            raise self.error(f"axis {axis!r} has an offset already", start)
        offset[axis] = amount

    def composed(self) -> tuple[list[int], Parts, bool]:
        self.skip_prefix("T")
        self.take("ComposeLayout")
        self.take("(")
        bits = []
        for _ in range(3):
            bits.append(self.integer())
            self.take(",")
        parts = self.layout()
        swizzle_inner = True
        if self.next.text == ",":
            self.advance()
            self.take("swizzle_inner")
            self.take("=")
            if self.next.text not in ("True", "False"):
                raise self.expected("True or False")
            swizzle_inner = self.advance().text == "True"
        self.take(")")
        return bits, parts, swizzle_inner
