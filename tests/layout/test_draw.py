"""Pictures of layouts say what the layouts do, and the counts of conflicts and sectors are right, by enumeration."""

import argparse
import itertools
import re
import runpy
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tvm_axe
from tvm_axe.cli.layout import COMMAND
from tvm_axe.errors import AxeError
from tvm_axe.layout import ComposeLayout, Iter, Layout, LayoutError, Mesh
from tvm_axe.layout.draw import show
from tvm_axe.layout.memory import Access, bank_conflicts, sectors_touched
from tvm_axe.layout.picture import Cell, Entry, Picture, fills
from tvm_axe.layout.placement import Placement

DOCS = Path(tvm_axe.__file__).parents[1] / "docs" / "tours"
SVG = "{http://www.w3.org/2000/svg}"
quick = settings(derandomize=True, max_examples=60, deadline=None)


def numbers(text):
    """The numbers that '0-2,5' lists."""
    runs = [list(map(int, run.split("-"))) for run in text.split(",")]
    return [number for run in runs for number in range(run[0], run[-1] + 1)]


# ---- the mesh ------------------------------------------------------------------------------------------------------


def spans(heads):
    """The rows, or columns, that headings such as '0:4' or '7' stand for."""
    pairs = [list(map(int, head.split(":"))) for head in heads]
    return [range(pair[0], pair[-1] if len(pair) == 2 else pair[0] + 1) for pair in pairs]


def drawn_owners(picture):
    """(row, column) -> the devices that a picture of a matrix gives; padding is left out."""
    found = {}
    for rows, (_, cells) in zip(spans([head for head, _ in picture.rows]), picture.rows):
        for columns, cell in zip(spans(picture.columns), cells):
            for place in itertools.product(rows, columns):
                assert place not in found
                found[place] = [] if cell.lines == ("-",) else numbers(cell.lines[0])
    return found


mesh_iters = st.builds(Iter, st.integers(1, 4), st.integers(1, 3), st.sampled_from(["a", "b", "m"]))


@quick
@given(st.lists(mesh_iters, min_size=1, max_size=5), st.lists(mesh_iters, max_size=2), st.data())
def test_a_mesh_picture_gives_every_element_its_devices(shard, replica, data):
    layout = Layout(shard, replica, {"b": 1})
    size = layout.size()
    columns = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    shape = (size // columns, columns)
    points = [layout.apply(x) for x in range(size)]
    mesh = Mesh({axis: 1 + max(p[axis] for at in points for p in at) for axis in "ba"})
    found = drawn_owners(show(layout, shape, mesh, "mesh"))
    assert len(found) == size
    for x, at in enumerate(points):
        assert found[divmod(x, columns)] == sorted({mesh.device({"a": p["a"], "b": p["b"]}) for p in at})


@quick
@given(st.tuples(st.integers(2, 9), st.integers(2, 9)), st.sampled_from([{}, {0: "a"}, {1: "b"}, {0: "b", 1: "a"}]))
def test_a_mesh_picture_shows_padding(shape, dims):
    mesh = Mesh({"a": 3, "b": 2})
    layout = Layout.sharded(shape, mesh, dims)
    found = drawn_owners(show(layout, shape, mesh, "mesh"))
    for place, devices in found.items():
        regions = [layout.local_region(shape, mesh, device) for device in range(mesh.size)]
        holders = [d for d, region in enumerate(regions) if all(s.start <= i < s.stop for i, s in zip(place, region))]
        assert devices == holders
        assert bool(devices) == all(i < extent for i, extent in zip(place, shape))
    assert {place for place, devices in found.items() if devices} == set(itertools.product(*map(range, shape)))


def test_large_tensors_are_drawn_by_blocks_and_sums_by_terms():
    mesh = Mesh({"dp": 2, "tp": 4})
    layout = Layout.parse("S[(4, 2, 64, 768) : (1@tp, 1@dp, 768, 1)]")
    picture = show(layout, (512, 768), mesh)
    assert picture.columns == ("0:768",)
    assert [head for head, _ in picture.rows] == [f"{64 * n}:{64 * n + 64}" for n in range(8)]
    assert [cells[0].lines[0] for _, cells in picture.rows] == ["0", "4", "1", "5", "2", "6", "3", "7"]
    assert picture.legend[4].meaning == "device 4: dp=1 tp=0"
    terms = Placement(((), ()), frozenset({"tp"})).layout((8, 8), mesh)
    picture = show(terms, (8, 8), mesh)
    assert picture.notes[0].startswith("8x8 as 4x8x8 on dp=2,tp=4")
    assert [(head, cells[0].lines) for head, cells in picture.rows] == [
        ("0,0:1,0", ("0,4",)),
        ("1,0:2,0", ("1,5",)),
        ("2,0:3,0", ("2,6",)),
        ("3,0:4,0", ("3,7",)),
    ]
    assert picture.legend[1].meaning == "devices 1,5"


def test_the_text_of_a_picture():
    text = show(Layout.parse("S[(4, 2, 3) : (3, 1@tp, 1)] + R[2 : 1@dp]"), (4, 6)).text()
    assert text.splitlines() == [
        "S[(4, 2, 3) : (3, 1@tp, 1)] + R[2 : 1@dp]",
        "4x6 on tp=2,dp=2: the devices that hold each block, numbered row-major",
        "",
        "    0:3 3:6",
        "0:4 0-1 2-3",
    ]


# ---- threads -------------------------------------------------------------------------------------------------------


def test_a_fragment_shows_lane_and_register_of_each_element():
    layout = Layout.parse("S[(2, 8, 4, 2) : (2, 4@laneid, 1@laneid, 1)]")
    picture = show(layout, (16, 8))
    assert picture.columns == tuple("01234567") and [head for head, _ in picture.rows] == [str(n) for n in range(16)]
    for row, (_, cells) in enumerate(picture.rows):
        for column, cell in enumerate(cells):
            (point,) = layout.apply(row, column, shape=(16, 8))
            assert cell.lines == (f"t{point['laneid']}", f"r{point['m']}")
            assert picture.legend[cell.entry].meaning == f"laneid {point['laneid']}"
    assert picture.notes[1] == "t: laneid, r: register"


@pytest.mark.parametrize(
    ("text", "shape", "place", "lines", "coloured"),
    [
        ("S[(2, 8, 4) : (1@warpid, 4@laneid, 1@laneid)]", (16, 4), (9, 2), ("w1 t6", "r0"), "warpid"),
        ("S[(2, 2, 4) : (1@tp, 1@laneid, 1)]", (4, 4), (3, 1), ("d1 t1", "r1"), "device"),
        ("S[(2, 4) : (1@laneid, 1)] + R[3 : 2@laneid] + 1@laneid", (2, 4), (0, 2), ("t1,3,5", "r2"), "laneid"),
        ("S[(4, 4) : (1@P, 2@F)]", (4, 4), (1, 3), ("P1 F6",), "P"),
        ("S[(2, 4) : (1@TLane, 1@TCol)]", (2, 4), (1, 3), ("TLane1 TCol3",), "TLane"),
        ("S[(2, 4) : (1, 1@tid_in_wg)] + 3@wgid", (2, 4), (1, 2), ("g3 t2", "r1"), "tid_in_wg"),
    ],
)
def test_every_level_of_a_place_is_in_its_label(text, shape, place, lines, coloured):
    picture = show(Layout.parse(text), shape)
    assert picture.rows[place[0]][1][place[1]].lines == lines
    assert f"coloured by {coloured}" in picture.notes[0]
    owners = {cell.lines: picture.legend[cell.entry].meaning for _, cells in picture.rows for cell in cells}
    assert len(set(owners.values())) == len(picture.legend) == len({entry.fill for entry in picture.legend})


def test_a_long_dimension_is_folded():
    picture = show(Layout.parse("S[96 : 1@laneid]"), (96,))
    assert [head for head, _ in picture.rows] == ["+0", "+32", "+64"] and len(picture.columns) == 32
    assert picture.rows[2][1][5].lines[0] == "t69"
    assert len(show(Layout.parse("S[() : ()]"), (), kind="threads").rows) == 1


# ---- memory --------------------------------------------------------------------------------------------------------


@st.composite
def accesses(draw):
    """An injective layout of a tile, its shape, and an access that it allows."""
    rows, columns = draw(st.sampled_from([(8, 32), (32, 8), (4, 64), (16, 16), (3, 40)]))
    pitch = columns + draw(st.sampled_from([0, 1, 2, 4, 8, 32]))
    dtype = draw(st.sampled_from(["int8", "float16", "float32", "float64"]))
    by_columns = draw(st.booleans())
    if by_columns:
        layout = Layout([Iter(rows, 1, "m"), Iter(columns, rows + pitch - columns, "m")])
        return layout, (rows, columns), Access(dtype, draw(st.sampled_from(["row", "column"])))
    layout = Layout([Iter(rows, pitch, "m"), Iter(columns, 1, "m")])
    size = {"int8": 1, "float16": 2, "float32": 4, "float64": 8}[dtype]
    wide = [v for v in (1, 2, 4, 8) if v * size <= 16 and pitch % v == 0 and columns % v == 0]
    return layout, (rows, columns), Access(dtype, draw(st.sampled_from(["row", "column"])), draw(st.sampled_from(wide)))


def touched(layout, shape, access):
    """lane -> the set of bytes it touches, from the definition of the access."""
    size = {"int8": 1, "float16": 2, "float32": 4, "float64": 8}[access.dtype]
    rows, columns = shape
    places = list(itertools.product(range(rows), range(columns)))
    if access.lanes == "column":
        pieces = [
            [(row, column + k) for k in range(access.vector)]
            for column in range(0, columns - access.vector + 1, access.vector)
            for row in range(rows)
        ]
    else:
        pieces = [places[n : n + access.vector] for n in range(0, len(places), access.vector)]
    found = {}
    for lane, piece in enumerate(pieces[:32]):
        found[lane] = set()
        for place in piece:
            (point,) = layout.apply(*place, shape=shape)
            found[lane] |= set(range(point["m"] * size, (point["m"] + 1) * size))
    return found


@quick
@given(accesses())
def test_conflicts_and_sectors_are_counted_right(case):
    layout, shape, access = case
    lanes = touched(layout, shape, access)
    width = access.vector * {"int8": 1, "float16": 2, "float32": 4, "float64": 8}[access.dtype]
    together = {8: 16, 16: 8}.get(width, 32)
    cycles, ways, phases = 0, 1, 0
    for start in range(0, 32, together):
        words = {byte // 4 for lane in range(start, start + together) for byte in lanes.get(lane, ())}
        if words:
            most = max(sum(word % 32 == bank for word in words) for bank in range(32))
            cycles, ways, phases = cycles + most, max(ways, most), phases + 1
    served = bank_conflicts(layout, shape, access)
    assert (served.conflicts, served.ways, len(served.phases)) == (cycles - phases, ways, phases)
    moved = sectors_touched(layout, shape, access)
    touched_bytes = set().union(*lanes.values())
    assert moved.sectors == {byte // 32 for byte in touched_bytes}
    assert moved.useful == len(touched_bytes)
    assert moved.efficiency == pytest.approx(len(touched_bytes) / (32 * len(moved.sectors)))


@pytest.mark.parametrize(
    ("text", "shape", "access", "ways", "conflicts"),
    [
        ("S[(32, 32) : (32, 1)]", (32, 32), Access("float32", "column"), 32, 31),
        ("S[(32, 32) : (33, 1)]", (32, 32), Access("float32", "column"), 1, 0),
        ("S[(32, 32) : (32, 1)]", (32, 32), Access("float32", "row"), 1, 0),
        ("S[(32, 32) : (32, 1)]", (32, 32), Access("float16", "column"), 16, 15),
        ("S[(8, 64) : (64, 1)]", (8, 64), Access("float16", "column", 8), 8, 28),
        ("S[(8, 64) : (72, 1)]", (8, 64), Access("float16", "column", 8), 1, 0),
        ("S[(8, 64) : (64, 1)]", (8, 64), Access("float64", "row"), 1, 0),
        ("S[(8, 64) : (64, 1)]", (8, 64), Access("int4", "row", 32), 1, 0),
    ],
)
def test_known_conflicts(text, shape, access, ways, conflicts):
    served = bank_conflicts(Layout.parse(text), shape, access)
    assert (served.ways, served.conflicts) == (ways, conflicts)


def test_a_swizzle_takes_the_conflicts_away():
    tile, pieces = Layout.parse("S[(8, 64) : (64, 1)]"), Access("float16", "column", 8)
    swizzled = ComposeLayout(3, 3, 3, tile)
    assert bank_conflicts(tile, (8, 64), pieces).conflicts == 28
    assert bank_conflicts(swizzled, (8, 64), pieces).conflicts == 0
    picture = show(swizzled, (8, 64), access=pieces)
    assert picture.title == str(swizzled) and picture.notes[1].startswith("no conflict: 4 cycles for 4 phases")


def test_lanes_of_a_layout_and_broadcast():
    """Lanes 4 i to 4 i + 3 of a fragment's second operand read the same words of column i of the tile: no conflict."""
    tile = Layout.parse("S[(8, 32) : (32, 1)]")
    same = Layout.parse("S[(8, 32) : (4@laneid, 1)] + R[4 : 1@laneid]")
    served = bank_conflicts(tile, (8, 32), Access("float32", same))
    assert served.words == {lane: (32 * (lane // 4),) for lane in range(32)} and served.ways == 8
    spread = Layout.parse("S[(8, 8, 4) : (1, 1@laneid, 8@laneid)]")
    assert bank_conflicts(tile, (8, 32), Access("float32", spread)).conflicts == 0
    wide = Access("float16", Layout.parse("S[(8, 4, 8) : (4@laneid, 1@laneid, 1)]"), 4)
    assert sectors_touched(tile, (8, 32), wide).words[5] == (20, 21)


def test_pictures_of_memory_show_lanes_elements_and_counts():
    tile = Layout.parse("S[(8, 64) : (64, 1)]")
    banks = show(tile, (8, 64), access=Access("float16", "column", 8))
    assert banks.notes[1] == "8-way conflicts: 32 cycles for 4 phases, 28 of them conflicts"
    assert banks.columns == tuple(map(str, range(32)))
    head, cells = banks.rows[1]
    assert (head, cells[5].lines, cells[16]) == ("128", ("t9", "1,10-11"), Cell())
    assert banks.rows[-1][0] == "at once" and [c.lines for c in banks.rows[-1][1]] == [("8",)] * 16 + [()] * 16
    assert {cell.entry for _, row in banks.rows for cell in row} == {1, None}
    sectors = show(Layout.parse("S[(32, 32) : (32, 1)]"), (32, 32), None, "coalescing", Access("float32", "column"))
    assert sectors.notes[1] == "32 sectors, 1024 bytes moved for 128 bytes touched: efficiency 12.5%"
    assert sectors.group == 8 and len(sectors.rows) == 32
    assert all([cell.entry for cell in row] == [0] + [1] * 7 + [None] * 24 for _, row in sectors.rows)


# ---- SVG and HTML --------------------------------------------------------------------------------------------------

EXAMPLES = [
    show(Layout.sharded((10, 7), Mesh({"tp": 4}), {0: "tp"}), (10, 7), Mesh({"tp": 4})),
    show(Layout.parse("S[(2, 8, 4, 2) : (2, 4@laneid, 1@laneid, 1)]"), (16, 8)),
    show(Layout.parse("S[(2, 2, 4) : (1@tp, 1@laneid, 1)] + R[30 : 1@dp]"), (4, 4)),
    show(Layout.parse("S[(8, 64) : (64, 1)]"), (8, 64), access=Access("float16", "column", 8)),
    show(Layout.parse("S[(8, 64) : (64, 1)]"), (8, 64), kind="coalescing", access=Access("int8")),
    show(Layout.parse("S[() : ()]"), (), kind="mesh"),
    Picture(
        "a < b & c",
        ("x" * 200 + " " + "y" * 50,),
        ("<col>",),
        (('"row"', (Cell(("<&>",), 0),)),),
        (Entry("<e>", "#aabbcc"),),
    ),
]


@pytest.mark.parametrize("picture", EXAMPLES, ids=lambda picture: picture.title)
def test_an_svg_is_well_formed_and_its_labels_fit(picture):
    root = ElementTree.fromstring(picture.svg())
    width, height = float(root.get("width")), float(root.get("height"))
    assert root.get("viewBox") == f"0 0 {width:g} {height:g}"
    assert root.find(f"{SVG}title").text == picture.title
    assert "prefers-color-scheme: dark" in root.find(f"{SVG}style").text
    boxes = [r for r in root.iter(f"{SVG}rect") if "edge" in r.get("class", "")]
    cells = [cell for _, row in picture.rows for cell in row]
    assert len(boxes) == len(cells)
    corners = []
    for box, cell in zip(boxes, cells):
        x, y, w, h = (float(box.get(name)) for name in ("x", "y", "width", "height"))
        corners.append((x, y))
        assert x >= 0 and y >= 0 and x + w <= width and y + h <= height
        assert w >= 0.61 * 12 * max(map(len, cell.lines), default=0) and h >= 14 * len(cell.lines)
        assert box.get("fill") == (picture.legend[cell.entry].fill if cell.entry is not None else None)
    assert len(set(corners)) == len(corners)
    texts = list(root.iter(f"{SVG}text"))
    assert [t.text for t in texts if t.get("class") == "label" or t.text == "-"] == [
        line for cell in cells if cell.entry is not None or cell.lines for line in cell.lines
    ]
    assert all(0 < float(t.get("y")) < height for t in texts)
    for text in texts:
        if text.get("text-anchor") == "start" and " " in text.text:
            assert float(text.get("x")) + 0.6 * float(text.get("font-size")) * len(text.text) <= width


@pytest.mark.parametrize("picture", EXAMPLES, ids=lambda picture: picture.title)
def test_a_page_is_self_contained_and_has_the_table(picture):
    page = picture.html()
    assert page.count("<svg ") == page.count("<table>") == 1
    assert not re.search(r"<script|<link|<img|@import|url\(|src=", page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}
    assert page.count("<td") == sum(len(row) for _, row in picture.rows)
    assert page.count("<tr>") == 1 + len(picture.rows)


def test_fills_are_apart_and_light_enough_for_black_text():
    for number in (1, 8, 9, 32, 128):
        found = fills(number)
        assert len(set(found)) == number
        for fill in found:
            red, green, blue = (int(fill[at : at + 2], 16) / 255 for at in (1, 3, 5))
            assert 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 > 0.25


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shape", "options", "message"),
    [
        ("S[8 : 1]", (8,), {"kind": "pie"}, "kind must be one of mesh, threads, banks, coalescing, not 'pie'"),
        ("S[(2, 4) : (1@tp, 1)]", (9,), {}, "its extents multiply to 8, and the shape to 9"),
        ("S[(2, 4) : (1@tp, 1)]", (8,), {"mesh": Mesh({"dp": 2})}, "unknown mesh axis 'tp'; mesh dp=2 has dp"),
        ("S[(4, 4) : (1@tp, 1)]", (16,), {"mesh": Mesh({"tp": 2})}, r"coords\['tp'\] must be in \[0, 2\)"),
        ("S[(128, 128) : (1@laneid, 1)]", (128, 128), {}, "would have 128 x 128 cells, and at most 8192 are drawn"),
        ("S[(8, 4) : (1@tp, 1)]", (8, 4), {"kind": "banks"}, "must give each element one address in linear memory"),
        ("S[(8, 4) : (4, 1)]", (8, 5), {"kind": "banks"}, r"places 32 elements, and shape \(8, 5\) has 40"),
        ("S[(8, 4) : (4, 1)] + R[2 : 64]", (8, 4), {"kind": "coalescing"}, "must give each element one address"),
        (
            "S[(8, 4) : (1, 8)]",
            (8, 4),
            {"access": Access(vector=2)},
            r"neighbours .* at \[0, 8\]; take a smaller",
        ),
        ("S[(8, 6) : (6, 1)] + 1", (8, 6), {"access": Access(vector=2)}, r"from a multiple of 8 bytes on; .* \[1, 2\]"),
        ("S[(8, 4) : (4, 1)]", (8, 0), {}, r"shape\[1\] must be at least 1, not 0"),
    ],
)
def test_what_can_not_be_drawn_is_refused(text, shape, options, message):
    with pytest.raises(LayoutError, match=message):
        show(Layout.parse(text), shape, **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("float33x",), "dtype must be the name of a numeric type"),
        (("float32", "diagonal"), "lanes must be 'row', 'column' or a layout of threads, not 'diagonal'"),
        (("float32", "row", 0), "vector must be at least 1, not 0"),
        (("float32", "row", 3), "not vector=3 elements of float32, which are 96 bits"),
        (("float64", "row", 4), "not vector=4 elements of float64, which are 256 bits"),
        (("int4",), "not vector=1 elements of int4, which are 4 bits"),
    ],
)
def test_malformed_accesses_are_refused(arguments, message):
    with pytest.raises(LayoutError, match=message):
        Access(*arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("S[16 : 1@laneid]", r"doesn't place the 32 elements of shape \(8, 4\)"),
        ("S[(8, 4) : (8@laneid, 1)]", "must place elements on laneid 0 to 31, from register 0 on"),
        ("S[32 : 1@laneid] + 5", "must place elements on laneid 0 to 31, from register 0 on"),
    ],
)
def test_lanes_that_are_no_warp_are_refused(text, message):
    with pytest.raises(LayoutError, match=message):
        show(Layout.parse("S[(8, 4) : (4, 1)]"), (8, 4), access=Access(lanes=Layout.parse(text)))


def test_symbolic_layouts_are_refused():
    tirx = pytest.importorskip("tvm.tirx")
    rows = tirx.Var("n", "int32")
    layout = Layout([Iter(rows, 4, "m"), Iter(4, 1, "m")])
    with pytest.raises(LayoutError, match="must be of ints alone to be drawn"):
        show(layout, (4, 4))
    with pytest.raises(LayoutError, match="must be of ints alone to be read as blocks"):
        Placement.of(layout, (4, 4), Mesh({"tp": 2}))


# ---- the command and the documentation -----------------------------------------------------------------------------


def command(*arguments):
    parser = argparse.ArgumentParser()
    COMMAND.add_to(parser.add_subparsers(required=True))
    args = parser.parse_args(["layout", "show", *arguments])
    return args.command.run(args)


def test_the_command_prints_and_writes(tmp_path, capsys):
    svg, html = tmp_path / "a.svg", tmp_path / "a.html"
    text = "S[(4, 2, 8) : (8, 1@tp, 1)] + R[2 : 1@dp]"
    command(text, "--shape", "4x16", "--mesh", "dp=2,tp=2", "--svg", str(svg), "--html", str(html))
    picture = show(Layout.parse(text), (4, 16), Mesh({"dp": 2, "tp": 2}))
    assert capsys.readouterr().out == picture.text() + "\n"
    assert svg.read_text() == picture.svg() and html.read_text() == picture.html()
    options = ["--dtype", "float16", "--access", "column", "--vector", "8"]
    command("ComposeLayout(3, 3, 3, S[(8, 64) : (64, 1)])", "--shape", "8x64", *options)
    assert "no conflict: 4 cycles for 4 phases" in capsys.readouterr().out
    command(
        "S[(8, 64) : (64, 1)]", "--shape", "8x64", "--kind", "coalescing", "--access", "S[(16, 32) : (1, 1@laneid)]"
    )
    assert "4 sectors, 128 bytes moved for 128 bytes touched: efficiency 100%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("S[8 : 1", "--shape", "8"), "Layout.parse: at position 7"),
        (("ComposeLayout(1", "--shape", "8"), "ComposeLayout.parse: at position"),
        (("S[8 : 1]", "--shape", "2,4"), "--shape must be extents joined by x, such as 8x16, not '2,4'"),
        (("S[8 : 1]", "--shape", ""), "--shape must be extents joined by x"),
        (("S[8 : 1]", "--shape", "8", "--mesh", "tp"), "Mesh.parse: at position 0"),
        (("S[8 : 1]", "--shape", "8", "--access", "diagonal"), "Layout.parse: at position 0"),
        (("S[8 : 1]", "--shape", "8", "--dtype", "real"), "dtype must be the name of a numeric type"),
        (("S[8 : 1]", "--shape", "8", "--svg", "no/such/folder/a.svg"), "no/such/folder/a.svg: cannot be written"),
    ],
)
def test_the_command_refuses(arguments, message):
    with pytest.raises(AxeError) as caught:
        command(*arguments)
    assert message in str(caught.value)


def test_the_tour_runs_and_its_pictures_are_current(capsys, golden):
    pictures = runpy.run_path(str(DOCS / "layouts.py"))["PICTURES"]
    assert "total: 786,432 bytes a device" in capsys.readouterr().out
    golden(DOCS / "pictures", {f"{name}.svg": picture.svg() for name, picture in pictures.items()})
