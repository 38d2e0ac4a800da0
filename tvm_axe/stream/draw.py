"""Pictures as SVG: a program's graph, a run's timeline, a search's Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from tvm_axe.errors import StreamError

if TYPE_CHECKING:
    from tvm_axe.stream.explore import Design
    from tvm_axe.stream.program import Node, StreamProgram
    from tvm_axe.stream.report import Report

_FAMILIES = {
    "off-chip memory": ("#f4b183", "LinearOffChipLoad RandomOffChipLoad LinearOffChipStore RandomOffChipStore"),
    "on-chip memory": ("#ffe08a", "Bufferize Streamify"),
    "routing": ("#c5b3e6", "Partition Reassemble EagerMerge Broadcast Feedback Loop LoopEnd"),
    "functions": ("#9fc5e8", "Map Accum Scan FlatMap"),
    "shape": ("#d9d9d9", "Flatten Reshape Promote Expand Zip"),
    "ends": ("#b6d7a8", "Input Output Discard"),
}
_COLORS = {kind: color for color, kinds in _FAMILIES.values() for kind in kinds.split()}
_BOX, _GAP, _ROW, _PITCH = 168, 46, 46, 60  # pixels: a box across, between columns, a box down, from row to row
_FONT = "font-family='Helvetica, Arial, sans-serif'"


def graph_svg(program: StreamProgram) -> str:
    """Return a picture of a program's graph: operators from left to right, with the types of what they send.

    A stream that several take is an edge to each; feedback is dashed.
    """
    columns = _columns(program)
    places: dict[Node, tuple[float, float]] = {}
    for number, column in enumerate(columns):
        if number:  # next to who feeds it
            column.sort(key=lambda node: _mean([places[s.node][1] for s in node.inputs if s.node in places]))
        for row, node in enumerate(column):
            places[node] = (20 + number * (_BOX + _GAP), 20.0 + row * _PITCH)
    tallest = max(map(len, columns), default=0)
    for column in columns:
        for node in column:
            x, y = places[node]
            # By whole rows, so that between rows there is room all the way across.
            places[node] = (x, y + (tallest - len(column)) // 2 * _PITCH)
    edges: list[str] = []
    boxes: list[str] = []
    for node in program.nodes:
        for stream in node.inputs:
            edges.append(_edge(places[stream.node], places[node], len(edges), node.kind == "Feedback"))
        boxes.append(_box(node, *places[node]))
    width, height = 40 + len(columns) * (_BOX + _GAP) - _GAP, 30 + tallest * _PITCH
    used = {_COLORS[node.kind] for node in program.nodes}
    return _document(width, height + 24, [*edges, *boxes, *_legend(height, used)])


def timeline_svg(report: Report, width: int = 960, units: Sequence[str] | None = None) -> str:
    """Return a picture of a run: a row a unit, dark where it worked or waited for memory, and on-chip bytes below.

    Parameters
    ----------
    report : Report
        The report of a run with ``trace=True``.
    width : int
        The picture's width in pixels.
    units : Sequence[str], optional
        The units to be shown; by default those that did anything.

    Raises
    ------
    StreamError
        If the run wasn't traced.
    """
    shown = [unit for unit in report.units if unit.spans and (units is None or unit.name in units)]
    if not shown:
        raise StreamError("timeline_svg: no unit's times were kept; run the program on an accelerator with trace=True")
    label, row = 8 + max(len(unit.name) for unit in shown) * 6, 16
    across = max(50, width - label - 16)
    scale = report.cycles / across
    parts = []
    for number, unit in enumerate(shown):
        y = 10 + number * row
        parts.append(f"<text x='{label - 6}' y='{y + 10}' text-anchor='end' font-size='10'>{escape(unit.name)}</text>")
        parts.append(f"<rect x='{label}' y='{y}' width='{across}' height='{row - 4}' fill='#f6f6f6'/>")
        for start, stop, share in _runs(unit.spans, across, scale):
            parts.append(
                f"<rect x='{label + start}' y='{y}' width='{stop - start}' height='{row - 4}' "
                f"fill='{_COLORS.get(unit.kind, '#999999')}' fill-opacity='{share:.2f}'/>"
            )
    bottom = 10 + len(shown) * row
    if report.peak_on_chip:
        parts += _usage(report, label, bottom, across, scale)
        bottom += 56
    for cycle in [0, *_ticks(report.cycles * 0.85)]:  # the end of the axis is labelled with the run's length
        x, anchor = label + across * cycle / report.cycles, "middle" if cycle else "start"
        parts.append(f"<text x='{x:.1f}' y='{bottom + 12}' text-anchor='{anchor}' font-size='10'>{cycle:,}</text>")
    parts.append(
        f"<text x='{label + across}' y='{bottom + 12}' text-anchor='end' font-size='10'>{report.cycles:,} cycles</text>"
    )
    used = {_COLORS.get(unit.kind, "#999999") for unit in shown}
    return _document(width, bottom + 44, [*parts, *_legend(bottom + 20, used)])


def pareto_svg(designs: Sequence[Design], front: Sequence[Design], width: int = 560, height: int = 380) -> str:
    """Return a picture of designs, cycles across and on-chip bytes up, with the front as a line."""
    if not designs:
        raise StreamError("pareto_svg: there are no designs")
    left, bottom = 84, height - 44
    most_cycles = max(design.cycles for design in designs) * 1.08
    most_bytes = max(design.on_chip for design in designs) * 1.12 or 1.0

    def place(design: Design) -> tuple[float, float]:
        x = left + (width - left - 20) * design.cycles / most_cycles
        return x, bottom - (bottom - 16) * design.on_chip / most_bytes

    parts = [
        f"<path d='M{left},16 L{left},{bottom} L{width - 20},{bottom}' fill='none' stroke='#444444'/>",
        f"<text x='{(left + width) / 2}' y='{height - 8}' text-anchor='middle' font-size='12'>cycles</text>",
        f"<text x='14' y='{bottom / 2}' text-anchor='middle' font-size='12' "
        f"transform='rotate(-90 14 {bottom / 2})'>bytes on chip</text>",
    ]
    for cycles in _ticks(most_cycles):
        x = left + (width - left - 20) * cycles / most_cycles
        parts.append(f"<text x='{x:.0f}' y='{bottom + 16}' text-anchor='middle' font-size='10'>{cycles:,}</text>")
    for size in _ticks(most_bytes):
        y = bottom - (bottom - 16) * size / most_bytes
        parts.append(f"<text x='{left - 6}' y='{y + 4:.0f}' text-anchor='end' font-size='10'>{size:,}</text>")
    points = [place(design) for design in sorted(front, key=lambda design: design.cycles)]
    steps = [f"{x:.1f},{y:.1f}" for x, y in points]
    parts.append(f"<polyline points='{' '.join(steps)}' fill='none' stroke='#c0504d' stroke-width='1.5'/>")
    for design in sorted(designs, key=lambda design: design in front):  # the front on top
        x, y = place(design)
        color = "#c0504d" if design in front else "#9fc5e8"
        parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='{color}'/>")
        label, far = escape(_choices(design.choices)), x > 0.7 * width
        at = f"x='{x - 6 if far else x + 6:.1f}' y='{y - 6:.1f}' text-anchor='{'end' if far else 'start'}'"
        parts.append(f"<text {at} font-size='10'>{label}</text>")
    return _document(width, height, parts)


def _choices(choices: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value}" for name, value in choices.items())


def _ticks(most: float) -> list[int]:
    """Round numbers up to `most`, from two to six of them: multiples of 1, 2 or 5 times a power of ten."""
    steps = (base * 10**power for power in range(18) for base in (1, 2, 5))
    step = next(step for step in steps if most / step < 6)
    return list(range(step, int(most) + 1, step))


def _columns(program: StreamProgram) -> list[list[Node]]:
    """Nodes by how many operators are before them at most; feedback counts as a beginning."""
    depth: dict[Node, int] = {}
    for node in program.nodes:  # in the order of construction, so after what feeds them
        fed = [] if node.kind == "Feedback" else [depth[stream.node] for stream in node.inputs]
        depth[node] = 1 + max(fed, default=-1)
    for node in reversed(program.nodes):  # what begins streams stands right before who takes them
        taken = [depth[taker] for stream in node.outputs for taker in stream.consumers if taker.kind != "Feedback"]
        if taken and (not node.inputs or node.kind == "Feedback"):
            depth[node] = max(0, min(taken) - 1)
    found: list[list[Node]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for node in program.nodes:
        found[depth[node]].append(node)
    return found


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else float("inf")


def _box(node: Node, x: float, y: float) -> str:
    label = node.operator.label
    name = node.name if label == node.kind and not node.name.startswith(node.kind) else label
    lines = [_cut(node.kind if name == node.kind else f"{node.kind} {name}", 26), ""]
    if node.outputs:
        lines[1] = _cut(str(node.outputs[0].type), 30)
    title = escape(f"{node.kind} {node.name}\n" + "\n".join(f"{s.name}: {s}" for s in node.outputs), quote=True)
    return (
        f"<g><title>{title}</title><rect x='{x}' y='{y}' width='{_BOX}' height='{_ROW}' rx='6' "
        f"fill='{_COLORS[node.kind]}' stroke='#555555'/>"
        f"<text x='{x + _BOX / 2}' y='{y + 19}' text-anchor='middle' font-size='11'>{escape(lines[0])}</text>"
        f"<text x='{x + _BOX / 2}' y='{y + 35}' text-anchor='middle' font-size='9' fill='#333333'>"
        f"{escape(lines[1])}</text></g>"
    )


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _edge(source: tuple[float, float], target: tuple[float, float], number: int, dashed: bool) -> str:
    """Return a line from box to box: straight to the next column, else between rows, each a bit beside the last."""
    x0, y0, x1, y1 = source[0] + _BOX, source[1] + _ROW / 2, target[0], target[1] + _ROW / 2
    if 0 < x1 - x0 <= _GAP:
        bend = _GAP / 2
        path = f"M{x0},{y0} C{x0 + bend},{y0} {x1 - bend},{y1} {x1},{y1}"
    else:
        lane = (source[1] if y1 <= y0 else source[1] + _PITCH) - (_PITCH - _ROW) / 2 + 2 * (number % 5 - 2)
        out, into = x0 + _GAP, x1 - _GAP
        path = (
            f"M{x0},{y0} C{x0 + _GAP / 2},{y0} {x0 + _GAP / 2},{lane} {out},{lane} L{into},{lane} "
            f"C{x1 - _GAP / 2},{lane} {x1 - _GAP / 2},{y1} {x1},{y1}"
        )
    style = " stroke-dasharray='5 4'" if dashed else ""
    return f"<path d='{path}' fill='none' stroke='#777777' marker-end='url(#arrow)'{style}/>"


def _runs(spans: Sequence[tuple[int, int]], across: int, scale: float) -> list[tuple[int, int, float]]:
    """Pixels (from, to, how much of the time), where neighbours are about as busy."""
    shares = [0.0] * across
    for start, stop in spans:
        first, last = start / scale, stop / scale
        for pixel in range(int(first), min(across - 1, int(last)) + 1):
            shares[pixel] += max(0.0, min(last, pixel + 1) - max(first, pixel))
    levels = [min(4, -int(-share * 4 // 1)) for share in shares]
    found, begin = [], 0
    for pixel in range(1, across + 1):
        if pixel == across or levels[pixel] != levels[begin]:
            if levels[begin]:
                found.append((begin, pixel, levels[begin] / 4))
            begin = pixel
    return found


def _usage(report: Report, left: int, top: int, across: int, scale: float) -> list[str]:
    """Return the bytes on chip over time, as an area."""
    height, points = 44, [(0.0, 0)]
    for time, used in report.occupancy:
        points += [(time / scale, points[-1][1]), (time / scale, used)]
    points.append((float(across), 0))
    drawn = " ".join(
        f"{left + min(x, across):.1f},{top + 4 + height * (1 - used / report.peak_on_chip):.1f}" for x, used in points
    )
    return [
        f"<polygon points='{left},{top + 4 + height} {drawn}' fill='#ffe08a' stroke='#bf9000' stroke-width='0.5'/>",
        f"<text x='{left - 6}' y='{top + 16}' text-anchor='end' font-size='10'>{report.peak_on_chip:,} B</text>",
        f"<text x='{left - 6}' y='{top + 30}' text-anchor='end' font-size='10'>on chip</text>",
    ]


def _legend(y: float, used: set[str]) -> list[str]:
    found, x = [], 20
    for name, (color, _) in _FAMILIES.items():
        if color in used:
            found.append(f"<rect x='{x}' y='{y}' width='12' height='12' fill='{color}' stroke='#555555'/>")
            found.append(f"<text x='{x + 17}' y='{y + 10}' font-size='11'>{name}</text>")
            x += 34 + 7 * len(name)
    return found


def _document(width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height:.0f}' "
        f"viewBox='0 0 {width:.0f} {height:.0f}' {_FONT}>"
        "<defs><marker id='arrow' viewBox='0 0 8 8' refX='8' refY='4' markerWidth='7' markerHeight='7' orient='auto'>"
        "<path d='M0,0 L8,4 L0,8 z' fill='#777777'/></marker></defs>"
        f"<rect width='100%' height='100%' fill='white'/>{''.join(parts)}</svg>\n"
    )
