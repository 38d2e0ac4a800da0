"""What a notebook shows at the end of a cell is what is printed, escaped."""

import base64
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html.parser import HTMLParser

import numpy as np
import pytest
import tvm
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe import tile
from tvm_axe.checking import Mismatch
from tvm_axe.collective import Event, Timeline
from tvm_axe.demo import DemoReport, DemoRow
from tvm_axe.layout import Layout, Mesh
from tvm_axe.layout.redistributing import plan_redistribution
from tvm_axe.layout.swizzle import ComposeLayout
from tvm_axe.meta.result import Found, TuneResult
from tvm_axe.notebook import preformatted
from tvm_axe.programs.report import ProgramRow, ProgramsReport
from tvm_axe.schedule.showing import described
from tvm_axe.stream import Accelerator, StreamProgram, StreamType, Tile, functions

MESH = Mesh({"tp": 2})
NAME = '<b>&"it\'s"</b>'
"""What would be markup if nobody escaped it."""


class Shown(HTMLParser):
    """The text of all that is preformatted, every tag, and the pictures."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.tags, self.pictures = "", list[str](), list[bytes]()
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "img":
            self.pictures.append(base64.b64decode((dict(attrs)["src"] or "").partition("base64,")[2]))

    def handle_data(self, data: str) -> None:
        self.text += data


@T.prim_func(s_tir=True)
def block(A: T.Buffer((8, 16), "float32"), W: T.Buffer((16, 4), "float32"), out: T.Buffer((8, 4), "float32")):
    for i, j, k in T.grid(8, 4, 16):
        with T.sblock("<b>mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                out[vi, vj] = T.float32(0)
            out[vi, vj] = out[vi, vj] + A[vi, vk] * W[vk, vj]


@T.prim_func
def twice(A: T.Buffer((64,), "float32"), B: T.Buffer((64,), "float32")):
    with tile.kernel(2) as m:
        a = tile.shared((32,), "float32")
        b = tile.fragment((32,), "float32")
        tile.copy(A[m * 32], a)
        with tile.parallel(32) as i:
            b[i] = a[i] + a[i]
        tile.copy(b, B[m * 32])


@tvm.script.ir_module
class Model:
    @R.function
    def main(x: R.Tensor((4, 4), "float32")) -> R.Tensor((4, 4), "float32"):
        with R.dataflow():
            y = R.nn.relu(x)
            R.output(y)
        return y


def schedule() -> axe.Schedule:
    sch = axe.Schedule(block, mesh=MESH)
    sch.shard("<b>mm", "k", "tp")
    return sch


def closed() -> axe.Executable:
    exe = axe.compile(schedule(), work_dir=None)
    rng = np.random.default_rng(0)
    exe(*(rng.standard_normal(shape, dtype="float32") for shape in [(8, 16), (16, 4)]))
    exe.close()
    return exe


def saved(tmp_path) -> axe.Executable:
    path = tmp_path / "exe"
    axe.compile(schedule(), work_dir=None).save(path)
    return axe.Executable.load(path)


def found(median_ms: float | None, why_not: str) -> Found:
    return Found("MM-AR", (f"shard {NAME}",), schedule(), 1024, 0.5, median_ms, why_not, (f"{NAME}: 12 bytes",))


def result(*schedules: Found) -> TuneResult:
    return TuneResult(tvm.target.Target("llvm"), (), {}, {}, None, schedules)  # type: ignore[arg-type]


def report(mismatch: Mismatch | None) -> axe.CheckReport:
    return axe.CheckReport(NAME, ("a mesh",), 3, 8, {"out": 1e-7}, {"out": 0.0}, mismatch)


WRONG = Mismatch("a mesh", "integers", NAME, (1, 2), 3.0, 4.0, "is < 4", "<i>", "shard")
ROW = ProgramRow("adam", NAME, "dp=2", "processes", 1e-7, 64, 64, 0.5, 0.25)

TEXTS: dict[str, tuple[Callable[[], object], Callable[..., str]]] = {
    "layout": (lambda: Layout.parse("S[(2, 4) : (1@tp, 1)]"), str),
    "swizzled layout": (lambda: ComposeLayout(3, 3, 3, Layout.parse("S[(8, 64) : (64, 1)]")), str),
    "mesh": (lambda: MESH, str),
    "plan": (
        lambda: plan_redistribution(
            Layout.sharded((4, 4), MESH, {0: "tp"}), Layout.sharded((4, 4), MESH, {}), MESH, "float32", (4, 4)
        ),
        lambda plan: plan.explain(),
    ),
    "schedule": (schedule, described),
    "program on a mesh": (lambda: axe.compile(schedule(), work_dir=None), lambda exe: exe.show()),
    "program that was closed": (closed, lambda exe: exe.show()),
    "function": (lambda: axe.compile(block, work_dir=None), lambda exe: exe.show()),
    "model": (lambda: axe.compile(Model, work_dir=None), lambda exe: exe.show()),
    "search": (lambda: result(found(0.25, ""), found(None, "<crashed>")), lambda search: search.table()),
    "tuning of kernels": (result, lambda tuned: tuned.table()),
    "check": (lambda: report(None), str),
    "check that found something": (lambda: report(WRONG), str),
    "timeline": (
        lambda: Timeline(NAME, ("w" * 200,), (Event(0, NAME, "local", 0, 60_000),), ()),
        lambda timeline: timeline.text(280),
    ),
    "tile program": (lambda: tile.read(twice), str),
    "tile executable": (lambda: tile.compile(twice, "llvm"), lambda exe: exe.explain()),
    "programs": (lambda: ProgramsReport([ROW], []), lambda programs: programs.table()),
    "demo": (
        lambda: DemoReport([DemoRow(NAME, True, 1e-7, 0.5, 64)], NAME, 1.0, 2.0),
        lambda demo: demo.table(),
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_cell_shows_the_text(name):
    make, text = TEXTS[name]
    value = make()
    shown = Shown(value._repr_html_())
    assert shown.text == text(value)
    assert shown.tags == ["pre"]


def test_a_program_that_was_read_from_a_file_is_shown(tmp_path):
    exe = saved(tmp_path)
    assert Shown(exe._repr_html_()).text == exe.show()


def test_markup_is_escaped():
    assert Shown(preformatted(NAME)).text == NAME
    assert "<b>" not in preformatted(NAME)
    for value in (schedule(), report(WRONG), found(1.0, ""), axe.compile(block, work_dir=None)):
        html = value._repr_html_()
        assert "<b>" not in html and "&lt;b&gt;" in html


def test_a_schedule_says_its_notation_its_primitives_and_its_trace():
    sch = schedule()
    shown = Shown(sch._repr_html_()).text
    assert shown.startswith("schedule of block on mesh tp=2: MM-AR\n")
    assert "primitives: shard" in shown
    assert str(sch.trace) in shown
    assert "primitives: none yet" in Shown(axe.Schedule(block, mesh=MESH)._repr_html_()).text


def test_a_schedule_that_cannot_be_lowered_says_why():
    sch = schedule()
    before = str(sch.trace)
    # Another axis than the mesh has, by hand.
    sch.annotate(sch.get_loops(sch.get_sblock("<b>mm"))[0], "axe.bind", "dp")
    with pytest.raises(axe.AxeError) as refused:
        axe.compile(sch, work_dir=None)
    shown = Shown(sch._repr_html_()).text
    assert f"not to be lowered as it is: {refused.value}" in shown
    assert before in shown


def test_one_schedule_that_was_found_says_how_it_is_made():
    shown = Shown(found(0.25, "")._repr_html_()).text
    assert f"shard {NAME}" in shown and "0.250" in shown and f"redistributed: {NAME}: 12 bytes" in shown
    assert "<crashed>" in Shown(found(None, "<crashed>")._repr_html_()).text


# ---- Pictures ------------------------------------------------------------------------------------------------------


def check_picture(value: object, text: str, title: str) -> None:
    """Assert that a picture is shown, one document of SVG apart from the page, and the text below it."""
    shown = Shown(value._repr_html_())  # type: ignore[attr-defined]
    assert shown.tags == ["img", "pre"]
    assert shown.text == text
    (picture,) = shown.pictures
    root = ElementTree.fromstring(picture)
    assert root.tag.endswith("svg")
    assert title in "".join(root.itertext())


def test_a_picture_of_a_layout_is_drawn():
    picture = Layout.parse("S[(2, 4) : (1@tp, 1)]").show((2, 4))
    check_picture(picture, picture.text(), picture.title)


@pytest.fixture(scope="module")
def stream() -> StreamProgram:
    program = StreamProgram(NAME)
    x = program.input("x", StreamType((4,), Tile(2, 2)))
    x.map(functions.add(), x).accum(functions.sum_tiles()).output("doubled")
    return program


def test_a_streaming_program_is_drawn(stream):
    check_picture(stream, str(stream), "doubled")


def test_a_simulation_says_its_counters(stream):
    values = {"x": [np.ones((2, 2), "float32")] * 4}
    run = stream.run(values, Accelerator())
    assert Shown(run._repr_html_()).text == str(run)
    traced = stream.run(values, Accelerator(), trace=True)
    check_picture(traced, str(traced), "sum_tiles")
