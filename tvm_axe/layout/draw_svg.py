"""Pictures as SVG and HTML, written by hand: nothing is loaded, and both follow the reader's light or dark theme."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvm_axe.layout.picture import Cell, Picture

# Pixels. A glyph of the monospaced fonts below is at most 0.61 of the font's size wide.
FONT, SMALL, TITLE = 12, 10, 14
GLYPH = 0.61
LINE, PAD, MARGIN, GAP = 15, 5, 16, 8
SWATCH = 14
LEAST_WIDTH, ROOMY_WIDTH, ROOMY_HEIGHT, WIDEST_PROSE = 480.0, 84.0, 44.0, 760.0
MOST_ENTRIES = 16  # in a legend that is drawn; beyond, the labels of the cells have to do

FAMILY = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
STYLE = f"""
svg {{ font-family: {FAMILY}; }}
.page {{ fill: #ffffff; }} .ink {{ fill: #1f2328; }} .faint {{ fill: #59636e; }}
.blank {{ fill: #f1f3f5; }} .edge {{ stroke: #ffffff; stroke-width: 1.5; }} .label {{ fill: #111111; }}
@media (prefers-color-scheme: dark) {{
.page {{ fill: #0d1117; }} .ink {{ fill: #e6edf3; }} .faint {{ fill: #9198a1; }}
.blank {{ fill: #21262d; }} .edge {{ stroke: #0d1117; }}
}}
"""


def svg_document(picture: Picture) -> str:
    """Return a picture as an SVG document; every label fits its cell."""
    cells = [cell for _, row in picture.rows for cell in row]
    labels = [line for cell in cells for line in cell.lines]
    # Labels fit; where there is room, cells are larger.
    width = max(_width(labels, FONT), _width(picture.columns, SMALL)) + 2 * PAD
    width = max(width, min(ROOMY_WIDTH, LEAST_WIDTH / len(picture.columns)))
    height: float = LINE * max((len(cell.lines) for cell in cells), default=1) + 2 * PAD
    height = max(height, min(ROOMY_HEIGHT, LEAST_WIDTH / 2 / len(picture.rows)))
    left = MARGIN + _width([head for head, _ in picture.rows], SMALL) + PAD
    gaps = (len(picture.columns) - 1) // picture.group if picture.group else 0
    grid = left + len(picture.columns) * width + gaps * GAP
    prose = max(_width([picture.title], TITLE), _width(picture.notes, FONT)) + 2 * MARGIN
    total = max(grid + MARGIN, LEAST_WIDTH, min(prose, WIDEST_PROSE))
    title = _wrapped(picture.title, TITLE, total)
    notes = [line for note in picture.notes for line in _wrapped(note, FONT, total)]

    body: list[str] = []
    top = float(MARGIN)
    for lines, size, kind in ((title, TITLE, "ink"), (notes, FONT, "faint")):
        for line in lines:
            top += size + 5
            weight = ' font-weight="bold"' if size == TITLE else ""
            body.append(_text(line, MARGIN, top, size, kind, "start", weight))
    top += SMALL + 2 * PAD

    lefts = [left + c * width + (c // picture.group * GAP if picture.group else 0) for c in range(len(picture.columns))]
    for head, x in zip(picture.columns, lefts):
        body.append(_text(head, x + width / 2, top, SMALL, "faint", "middle"))
    top += PAD
    for head, row in picture.rows:
        body.append(_text(head, left - PAD, top + height / 2 + SMALL / 3, SMALL, "faint", "end"))
        body += (_cell(cell, picture, x, top, width, height) for cell, x in zip(row, lefts))
        top += height
    top += MARGIN

    legend = picture.legend if len(picture.legend) <= MOST_ENTRIES else ()
    needed = SWATCH + PAD + _width([entry.meaning for entry in legend], FONT) + MARGIN
    abreast = max(1, int((total - MARGIN) / needed))
    for number, entry in enumerate(legend):
        x, y = MARGIN + number % abreast * needed, top + number // abreast * (SWATCH + PAD)
        body.append(f'<rect x="{x:g}" y="{y:g}" width="{SWATCH}" height="{SWATCH}" rx="2" fill="{entry.fill}"/>')
        body.append(_text(entry.meaning, x + SWATCH + PAD, y + SWATCH - 3, FONT, "ink", "start"))
    top += -(-len(legend) // abreast) * (SWATCH + PAD) + (MARGIN - PAD if legend else 0)
    extent = f'width="{total:g}" height="{top:g}" viewBox="0 0 {total:g} {top:g}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {extent} role="img">\n<title>{escape(picture.title)}</title>\n'
        f"<desc>{escape(' '.join(picture.notes))}</desc>\n<style>{STYLE}</style>\n"
        '<rect class="page" width="100%" height="100%"/>\n'
    )
    return head + "\n".join(body) + "\n</svg>\n"


def html_page(picture: Picture) -> str:
    """Return a self-contained page: a picture, and its cells as a table for search and copying."""
    table = ["<tr><th></th>" + "".join(f"<th>{escape(head)}</th>" for head in picture.columns) + "</tr>"]
    for head, row in picture.rows:
        cells = []
        for cell in row:
            meaning = f' title="{escape(picture.legend[cell.entry].meaning)}"' if cell.entry is not None else ""
            cells.append(f"<td{meaning}>{escape(' '.join(cell.lines))}</td>")
        table.append(f"<tr><th>{escape(head)}</th>{''.join(cells)}</tr>")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(picture.title)}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font-family: {FAMILY}; font-size: 12px; margin: 1rem; background: #fff; color: #1f2328; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
td, th {{ border: 1px solid #9198a1; padding: 2px 6px; text-align: right; white-space: nowrap; }}
@media (prefers-color-scheme: dark) {{ body {{ background: #0d1117; color: #e6edf3; }} }}
</style>
</head>
<body>
<div class="wide">
{svg_document(picture)}</div>
<details><summary>As a table</summary>
<div class="wide"><table>
{chr(10).join(table)}
</table></div></details>
</body>
</html>
"""


def _cell(cell: Cell, picture: Picture, x: float, y: float, width: float, height: float) -> str:
    box = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"'
    if cell.entry is None:
        parts, kind = [f'<rect class="blank edge" {box}/>'], "faint"
    else:
        parts, kind = [f'<rect class="edge" fill="{picture.legend[cell.entry].fill}" {box}/>'], "label"
    first = y + height / 2 - LINE * (len(cell.lines) - 1) / 2 + FONT / 3
    for number, line in enumerate(cell.lines):
        parts.append(_text(line, x + width / 2, first + number * LINE, FONT, kind, "middle"))
    return "".join(parts)


def _text(text: str, x: float, y: float, size: int, kind: str, anchor: str, more: str = "") -> str:
    how = f'class="{kind}" x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{more}'
    return f"<text {how}>{escape(text)}</text>"


def _width(lines: list[str] | tuple[str, ...], size: int) -> float:
    """Return how wide the longest line may become."""
    return GLYPH * size * max(map(len, lines), default=0)


def _wrapped(line: str, size: int, total: float) -> list[str]:
    """Return `line` in parts that fit between the margins, broken at spaces."""
    room = int((total - 2 * MARGIN) / (GLYPH * size))
    parts = [""]
    for word in line.split(" "):
        longer = f"{parts[-1]} {word}".lstrip()
        if len(longer) > room and parts[-1]:
            parts.append(word)
        else:
            parts[-1] = longer
    return parts
