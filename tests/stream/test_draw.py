"""Pictures: everything that should be seen is in them, within their bounds."""

import re
from xml.etree import ElementTree

import pytest

from tvm_axe.stream import Accelerator, Selector, StreamError, StreamProgram, StreamType, functions, symbol
from tvm_axe.stream.draw import graph_svg, pareto_svg, timeline_svg
from tvm_axe.stream.explore import Design, front

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def program():
    p = StreamProgram("dispatch")
    free = p.feedback("free", StreamType((symbol("n"),), Selector(2)), 4, initial=[(0,), (1,)])
    parts = p.load(p.tensor("x", 12, 64), (1, 64)).flatten().partition(free.stream)
    done = [part.promote(0).bufferize().streamify().accum(functions.exp()) for part in parts]
    data, origin = p.eager_merge(done)
    data.output("y <1>")
    free.close(origin)
    return p


def rectangles(svg):
    root = ElementTree.fromstring(svg)
    width, height = float(root.get("width")), float(root.get("height"))
    found = [box for box in root.iter(f"{SVG}rect") if not str(box.get("width")).endswith("%")]
    for box in found:
        assert float(box.get("x")) >= 0 and float(box.get("x")) + float(box.get("width")) <= width
        assert float(box.get("y")) >= 0 and float(box.get("y")) + float(box.get("height")) <= height
    return found


def test_a_graph_has_a_box_an_operator_and_an_edge_an_input(program):
    svg = graph_svg(program)
    boxes = [box for box in rectangles(svg) if box.get("rx")]
    assert len(boxes) == len(program.nodes)
    places = {(box.get("x"), box.get("y")) for box in boxes}
    assert len(places) == len(boxes)
    assert svg.count("marker-end") == sum(len(node.inputs) for node in program.nodes)
    assert svg.count("stroke-dasharray") == 1  # the feedback
    titles = [title.text for title in ElementTree.fromstring(svg).iter(f"{SVG}title")]
    assert "Output y <1>\n" in titles


def test_a_timeline_shows_who_worked_when(program):
    report = program.run({}, Accelerator(), values=False, trace=True)
    svg = timeline_svg(report, width=500)
    assert rectangles(svg)
    words = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert {unit.name for unit in report.units if unit.spans} <= set(words)
    assert f"{report.peak_on_chip:,} B" in words and f"{report.cycles:,} cycles" in words
    only = timeline_svg(report, units=["exp0"])
    assert "exp0" in only and "exp1" not in only
    # As many pixels are coloured as the unit was busy.
    busy = report.unit("x0").memory / report.cycles
    rows = re.findall(r"<rect x='[\d.]+' y='10' width='(\d+)' height='12' fill='#f4b183' fill-opacity='([\d.]+)'", svg)
    (whole,) = re.findall(r"<rect x='[\d.]+' y='10' width='(\d+)' height='12' fill='#f6f6f6'", svg)
    assert sum(int(width) * float(share) for width, share in rows) / int(whole) == pytest.approx(busy, abs=0.1)


def test_a_run_that_was_not_traced_has_no_timeline(program):
    with pytest.raises(StreamError, match="run the program on an accelerator with trace=True"):
        timeline_svg(program.run({}, Accelerator(), values=False))


def test_a_front_is_drawn_as_a_line():
    designs = [Design({"tile": n}, 100 // n + n, 10 * n, 0, 0.0) for n in (1, 2, 5, 20)]
    svg = pareto_svg(designs, front(designs))
    assert svg.count("<circle") == 4 and "tile=20" in svg
    (points,) = re.findall(r"polyline points='([^']*)'", svg)
    assert len(points.split()) == len(front(designs)) == 3
    with pytest.raises(StreamError, match="there are no designs"):
        pareto_svg([], [])
