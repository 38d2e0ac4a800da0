"""Which algorithm is chosen: tables, where they come from, and how they are measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from apart import launched
from hypothesis import given
from hypothesis import strategies as st

from tvm_axe.cli import main
from tvm_axe.collective import choice, registry
from tvm_axe.collective.algorithms import Algorithm, offered
from tvm_axe.collective.choice import Machine, Table, find, forced, read, ruled, shipped
from tvm_axe.collective.engine import Measured
from tvm_axe.collective.measuring import SIZES, Time, measure, table_of
from tvm_axe.collective.plan import VIEWS
from tvm_axe.errors import InputError
from tvm_axe.layout import Link, Mesh

H200 = Machine("NVIDIA H200", 4, "NVLink")
LINK = Link(latency=5e-6, bandwidth=360e9)


@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8, 72])
@given(st.sampled_from(sorted(VIEWS)), st.integers(0, 1 << 34), st.booleans())
def test_what_is_chosen_is_offered(parts: int, name: str, nbytes: int, in_place: bool) -> None:
    for table in (ruled(LINK, parts, "a rule"), *map(forced, map(str, Algorithm))):
        assert table.chosen(name, nbytes, in_place) in offered(name, in_place)
        assert Table.decode(json.loads(json.dumps(table.encode()))) == table


def test_a_table_goes_by_size() -> None:
    table = ruled(LINK, 4, "a rule")
    limit = table.rows["all_reduce"][0][0]
    assert limit is not None
    assert table.chosen("all_reduce", limit - 1, False) == Algorithm.ONE_SHOT
    assert table.chosen("all_reduce", limit, False) == Algorithm.TWO_SHOT
    assert table.chosen("all_reduce", 1, True) == Algorithm.TWO_SHOT
    assert table.chosen("all_gather", 16 << 20, False) == Algorithm.COPY_ENGINE
    two = ruled(LINK, 2, "a rule")  # which take as many bytes in one shot as in two
    assert two.chosen("all_reduce", 1 << 30, False) == Algorithm.ONE_SHOT
    assert forced("copy-engine").chosen("reduce", 1, False) == Algorithm.ONE_SHOT  # the only one that it has


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"all_reduce": [(1, Algorithm.ONE_SHOT)]}, "the limits of all_reduce must rise and end with none, not .1."),
        ({"all_reduce": []}, "the limits of all_reduce must rise"),
        ({"send": [(2, Algorithm.ONE_SHOT), (1, Algorithm.ONE_SHOT), (None, Algorithm.ONE_SHOT)]}, "must rise"),
        ({"ring": [(None, Algorithm.ONE_SHOT)]}, "'ring' is none; valid: all_reduce"),
        ({"reduce": [(None, Algorithm.TWO_SHOT)]}, "two-shot is no algorithm of reduce"),
    ],
)
def test_bad_tables_are_refused(rows: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Table(rows, "a test")


def test_what_was_measured_goes_before_what_is_shipped(tmp_path: Path) -> None:
    """And a file that is broken is said, and not used."""
    assert find(H200, LINK, tmp_path) == shipped(H200)
    assert shipped(Machine("NVIDIA H200", 4, "PCIe")) is None and shipped(Machine("NVIDIA A100", 4, "NVLink")) is None
    other = Machine("NVIDIA A100-SXM4-80GB", 4, "PCIe")
    assert find(other, LINK, tmp_path) == ruled(LINK, 4, "the rule of PCIe")
    measured = forced("two-shot")
    path = tmp_path / choice.FOLDER / H200.file
    path.parent.mkdir()
    path.write_text(json.dumps({**measured.encode(), "more": "is left alone"}))
    assert find(H200, LINK, tmp_path) == measured
    for broken in (path.read_text()[:40], "[]", '{"rows": {"all_reduce": [[1, "ring"]]}, "source": ""}'):
        path.write_text(broken)
        with pytest.warns(UserWarning, match=r"can't be read .*; tvm-axe doctor --measure writes it anew"):
            assert read(H200, tmp_path) is None


def test_two_on_nvlink_have_what_was_measured_on_two() -> None:
    two = shipped(Machine("NVIDIA H200", 2, "NVLink"))
    assert two is not None and two == shipped(Machine("NVIDIA H100 80GB HBM3", 2, "NVLink"))
    assert two.chosen("all_gather", 64 << 20, in_place=False) == Algorithm.ONE_SHOT
    assert two.chosen("all_gather", 1 << 30, in_place=False) == Algorithm.COPY_ENGINE
    assert two.chosen("all_reduce", 64 << 20, in_place=False) == Algorithm.TWO_SHOT
    assert Table.decode(json.loads(json.dumps(two.encode()))) == two


def test_four_on_nvlink_sum_in_two_steps_between_one_shot_and_two() -> None:
    four = shipped(Machine("NVIDIA H200", 4, "NVLink"))
    assert four is not None
    sizes = (128 << 10, 256 << 10, 1 << 20, 2 << 20)
    chosen = [str(four.chosen("all_reduce", nbytes, in_place=False)) for nbytes in sizes]
    assert chosen == ["one-shot", "two-step", "two-step", "two-shot"]


def test_the_fastest_is_taken_and_noise_changes_nothing() -> None:
    taken = {
        "one-shot": {1 << 10: 3.0, 1 << 14: 3.2, 1 << 16: 4.0, 1 << 20: 12.0},
        "two-shot": {1 << 10: 2.95, 1 << 14: 3.15, 1 << 16: 3.5, 1 << 20: 8.0},
        "copy-engine": {1 << 10: 9.0, 1 << 14: 9.0, 1 << 16: 9.0, 1 << 20: 7.9},
    }
    times = [Time("all_reduce", name, nbytes, us * 1e-6) for name, row in taken.items() for nbytes, us in row.items()]
    assert table_of(times, "").rows["all_reduce"] == [(None, Algorithm.TWO_SHOT)]
    one = [time._replace(seconds=2.5e-6) if time[:3] == ("all_reduce", "one-shot", 1 << 10) else time for time in times]
    rows = table_of(one, "").rows["all_reduce"]
    assert rows == [(1 << 16, Algorithm.ONE_SHOT), (None, Algorithm.TWO_SHOT)]


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 3}], ids=str)
def test_every_collective_is_measured(sizes: dict[str, int]) -> None:
    """On devices that meet by themselves, and have one way for all: the programs run, and all are timed."""
    times = measure(lambda _: launched(Mesh(sizes), "apart-meeting"), sizes=[64, 4096], repeat=2, times=3)
    expected = {
        (name, str(algorithm), nbytes)
        for name in VIEWS
        if len(offered(name, False)) > 1
        for algorithm in offered(name, False)
        for nbytes in (64, 4096)
    }
    assert {time[:3] for time in times} == expected and len(times) == len(expected)
    assert all(time.seconds > 0 for time in times)
    assert set(table_of(times, "").rows) == {name for name, *_ in expected}


def test_doctor_keeps_what_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.chdir(tmp_path)
    taken = [Time("all_reduce", "one-shot", 1024, 3e-6), Time("all_reduce", "two-shot", 1024, 4e-6)]
    engine = registry.find("cuda")
    result = [Measured(H200, table_of(taken, "what was measured here"), taken)]
    monkeypatch.setattr(type(engine), "measure", lambda self, tell: result)
    assert main(["doctor", "--measure"]) == 0
    assert "all_reduce: one-shot" in capsys.readouterr().out
    assert main(["doctor", "--measure", "--json"]) == 0
    (kept,) = json.loads(capsys.readouterr().out)["collectives"]
    assert kept["times"] == [time._asdict() for time in taken]
    assert kept["origin"]["versions"]["tvm-axe"] and kept["machine"]["devices"] == 4
    found = find(H200, LINK)  # where a launch looks
    assert found.rows == result[0].table.rows
    assert str(found).endswith(f"from what was measured here on {kept['origin']['date']}")


def test_what_cannot_be_measured_is_said(capsys: pytest.CaptureFixture) -> None:
    assert main(["doctor", "--measure", "--engine", "threads"]) != 0
    assert "engine 'threads' does each collective in one way" in capsys.readouterr().err


def test_sizes_rise() -> None:
    assert list(SIZES) == sorted(set(SIZES))
