"""Pictures: a titled grid of labelled, coloured cells with a legend, as text, SVG and HTML.

What is drawn is decided elsewhere (`draw`); a picture only knows cells. It is plain data, so that its three forms show
the same thing.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tvm_axe.notebook import with_picture


class Cell(NamedTuple):
    """What one cell shows: lines of text, and the number of its legend entry; a cell without one is blank."""

    lines: tuple[str, ...] = ()
    entry: int | None = None


class Entry(NamedTuple):
    """A line of the legend: what a colour means, and the colour as #rrggbb."""

    meaning: str
    fill: str


@dataclass(frozen=True)
class Picture:
    """A grid of cells with its headings.

    Attributes
    ----------
    title : str
        What is drawn: a layout's canonical text.
    notes : tuple[str, ...]
        What the picture shows, and what it counts; a line each.
    columns : tuple[str, ...]
        A heading for each column.
    rows : tuple[tuple[str, tuple[Cell, ...]], ...]
        A heading and as many cells as there are columns, for each row.
    legend : tuple[Entry, ...]
        What the colours mean; cells point into it.
    group : int
        Columns that stand together: a gap follows each group. 0 for no gaps.
    """

    title: str
    notes: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    legend: tuple[Entry, ...] = ()
    group: int = 0

    def text(self) -> str:
        """Return the picture as lines of text: a cell without a label is a dot."""
        table = [["", *self.columns]]
        table += [[head, *(" ".join(cell.lines) or "." for cell in cells)] for head, cells in self.rows]
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = [self.title, *self.notes, ""]
        for row in table:
            parts = []
            for column, (word, width) in enumerate(zip(row, widths)):
                gap = "  " if self.group and column > 1 and (column - 1) % self.group == 0 else ""
                parts.append(gap + word.rjust(width))
            lines.append(" ".join(parts).rstrip())
        return "\n".join(lines)

    def svg(self) -> str:
        """Return the picture as an SVG document of its own, for light and dark backgrounds."""
        from tvm_axe.layout.draw_svg import svg_document

        return svg_document(self)

    def html(self) -> str:
        """Return a page that needs nothing else: the picture, and the same as a table."""
        from tvm_axe.layout.draw_svg import html_page

        return html_page(self)

    def _repr_html_(self) -> str:
        return with_picture(self.svg(), self.text())


NAMED = ("#8ecae6", "#ffd166", "#a7d8a0", "#f4a6a0", "#cdb4db", "#f6bd8b", "#b8c0cc", "#e6d5a8")
"""Eight fills that stay apart for most kinds of colour vision; black text can be read on each of them."""


def fills(number: int) -> tuple[str, ...]:
    """Return that many fills on which black text can be read: the named ones, or hues around the circle.

    >>> len(set(fills(32)))
    32
    """
    if number <= len(NAMED):
        return NAMED[:number]
    hues = []
    for index in range(number):
        # Neighbours on the circle differ in lightness as well.
        rgb = colorsys.hls_to_rgb(index / number, 0.84 if index % 2 else 0.72, 0.62)
        hues.append("#" + "".join(f"{round(255 * part):02x}" for part in rgb))
    return tuple(hues)


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted, distinct numbers as text in which runs are shortened.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
