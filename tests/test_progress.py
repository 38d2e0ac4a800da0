"""Bars: on a terminal they move, elsewhere they are a line a minute and one at the end."""

import io

import pytest

from tvm_axe import progress
from tvm_axe.progress import Bar, counted


class Screen(io.StringIO):
    """Something to write to that is a terminal or isn't."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


@pytest.fixture
def stderr(monkeypatch):
    """Put a stderr that is a terminal, or isn't one, in the place of pytest's."""

    def put(terminal: bool) -> Screen:
        made = Screen(terminal)
        monkeypatch.setattr("sys.stderr", made)
        return made

    return put


def test_a_line_a_minute(clock, stderr):
    log = stderr(terminal=False)
    with Bar(300) as bar:
        for n in range(240):
            clock.now += 1.0
            bar.advance("mm", f"best {n} ms")
            assert len(log.getvalue().splitlines()) == (n + 1) // 60
    assert log.getvalue().splitlines() == [
        "mm: 20% 60/300 [01:00<04:00, best 59 ms]",
        "mm: 40% 120/300 [02:00<03:00, best 119 ms]",
        "mm: 60% 180/300 [03:00<02:00, best 179 ms]",
        "mm: 80% 240/300 [04:00<01:00, best 239 ms]",
    ]


def test_a_slow_step_has_a_line_of_its_own(clock, stderr):
    log = stderr(terminal=False)
    with Bar(3) as bar:
        clock.now += 200.0
        bar.advance("mm")
        bar.rename("mm, the best again")
        clock.now += 61.0
        bar.rename("mm, once more")
    assert [line.split(":")[0] for line in log.getvalue().splitlines()] == ["mm", "mm, once more"]


def test_a_short_job_is_one_line(clock, stderr):
    log = stderr(terminal=False)
    with Bar(8, done=2) as bar:
        for _ in range(3):
            clock.now += 10.0
            bar.advance("mm")
        bar.shorten(3)
    assert log.getvalue() == "mm: 100% 5/5 [00:30<00:00]\n"


def test_a_terminal_has_a_bar_that_moves(clock, stderr):
    screen = stderr(terminal=True)
    assert list(counted(range(5), "search")) == [0, 1, 2, 3, 4]
    assert "search: 100%|" in screen.getvalue() and "| 5/5 [" in screen.getvalue() and "\r" in screen.getvalue()
    assert screen.getvalue().count("\n") == 1


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_is_shown(clock, stderr, terminal):
    screen = stderr(terminal)
    for _ in counted([1, 2], "search", shown=False):
        clock.now += 100.0
    assert screen.getvalue() == ""


def test_what_is_counted_is_done(clock, stderr):
    log = stderr(terminal=False)
    for _ in counted(["a", "b"], "search"):
        clock.now += 61.0
    assert log.getvalue().splitlines() == [
        "search: 50% 1/2 [01:01<01:01]",
        "search: 100% 2/2 [02:02<00:00]",
    ]
