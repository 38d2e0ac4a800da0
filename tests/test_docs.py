"""The tours in docs/tours/ run, and what they state holds; that of layouts has its test beside its pictures."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs" / "tours"


def test_communication(capsys):
    found = runpy.run_path(str(DOCS / "communication.py"))["found"]
    assert found.best.notation in capsys.readouterr().out


def test_tile(capsys):
    runpy.run_path(str(DOCS / "tile.py"))
    printed = capsys.readouterr().out
    assert printed.count("relative error") == 4 and "persistent" in printed


def test_stream(capsys, golden):
    pictures = runpy.run_path(str(DOCS / "stream.py"))["PICTURES"]
    assert "off-chip bytes: " in capsys.readouterr().out
    golden(DOCS / "pictures/stream", {f"{name}.svg": text for name, text in pictures.items()})


def test_tuning(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["tuning.py", str(tmp_path)])
    runpy.run_path(str(DOCS / "tuning.py"))
    printed = capsys.readouterr().out
    assert printed.count("relative error") == 6 and printed.count("ms tuned") == 3
    assert "ms by its knobs, 8 trials" in printed and "the fastest recorded" in printed


def test_several_gpus(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["several_gpus.py", str(tmp_path)])
    runpy.run_path(str(DOCS / "several_gpus.py"))
    printed = capsys.readouterr().out
    assert "one kernel, matmul_scatter" in printed and "sum2: an all-reduce beside back, part1" in printed
    kinds = ("sequential", "fused")
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{of}{kind}.json" for kind in kinds for of in ("", "expected_")
    }
