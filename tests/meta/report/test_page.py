"""The page on a job, and its drawings."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from tvm_axe.meta import tune
from tvm_axe.meta.measure.protocol import Measurement
from tvm_axe.meta.measure.runner import Runner
from tvm_axe.meta.report.curves import curve
from tvm_axe.meta.report.page import page


def _drawing(xs, seconds, before=None):
    return ET.fromstring(curve(xs, seconds, before, "trials"))


def _of_class(drawing, name):
    return [element for element in drawing.iter() if element.get("class") == name]


def test_a_dot_for_each_candidate_and_a_step_down_for_each_better_one():
    drawing = _drawing([1, 2, 3, 4], [4e-3, 5e-3, None, 1e-3])
    dots = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in _of_class(drawing, "dot")]
    assert len(dots) == 3
    assert dots[2][1] > dots[0][1] > dots[1][1]  # faster is lower
    assert len(_of_class(drawing, "failed")) == 1
    (line,) = _of_class(drawing, "best")
    (x1, y1), _, (x4, y4) = dots
    assert line.get("d") == f"M{x1:.1f} {y1:.1f}H{x4:.1f}V{y4:.1f}H{x4:.1f}"


def test_the_untuned_function_is_drawn_where_it_hides_nothing():
    assert len(_of_class(_drawing([1, 2], [4e-3, 2e-3], 8e-3), "before")) == 1
    assert not _of_class(_drawing([1, 2], [4e-3, 2e-3], 8.0), "before")


@pytest.mark.parametrize("seconds", [[1e-3], [1e-9, 1e3], [1e-3, 1.001e-3]])
def test_every_scale_has_some_marks(seconds):
    drawing = _drawing(list(range(1, len(seconds) + 1)), seconds)
    assert 2 <= len(_of_class(drawing, "grid")) <= 9
    for dot in _of_class(drawing, "dot"):
        assert 0 < float(dot.get("cy")) < 230


def test_nothing_to_draw():
    assert curve([1], [None], None, "trials") == "<p>no candidate ran</p>"


class _Text(HTMLParser):
    """The page's words, and what it loads."""

    def __init__(self):
        super().__init__()
        self.words, self.open, self.loads = [], [], []

    def handle_starttag(self, tag, attrs):
        self.loads += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br", "line", "circle", "path"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_tells_of_times_failures_and_the_best_schedule(tmp_path, matmul, target, monkeypatch):
    measure_all = Runner.measure_all

    def sometimes(self, mods):
        for n, measured in enumerate(measure_all(self, mods)):
            yield measured if n % 2 else Measurement(None, f"wrong result: <off> by {n}.5")

    monkeypatch.setattr(Runner, "measure_all", sometimes)
    path = tmp_path / "pages" / "job.html"
    result = tune(matmul(16, 16, 16), target=target, trials=4, work_dir=tmp_path, report=path, seed=1, progress=False)
    assert result.report == path
    reader = _Text()
    reader.feed(path.read_text())
    assert not reader.open
    assert not reader.loads  # it stands alone
    text = " ".join(" ".join(reader.words).split())
    (task,) = result.tasks
    assert f"{task.best_ms:.4g}" in text
    assert f"{task.before_ms / task.best_ms:.2f}" in text
    assert "wrong result: <off> by # 2" in text
    assert "sch.get_sblock" in text
    assert "@T.prim_func" in text
    assert "seed 1" in text
    assert path.read_text().count("<svg") == 2
    assert "Not tuned" not in text
    other = page(target, result.tasks, {"odd": "it has no block"}, result.seconds)
    assert "odd: it has no block" in other


def test_the_page_lies_beside_the_databases_by_default(tmp_path, matmul, target):
    result = tune(matmul(16, 16, 16), target=target, trials=1, work_dir=tmp_path, progress=False)
    assert result.report == result.tasks[0].folder.parent / "report.html"
    assert result.report.exists()
