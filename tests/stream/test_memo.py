"""Units that are alike share what they did of equal streams, and nobody can tell."""

from dataclasses import replace

import pytest

from tvm_axe.stream import Accelerator, Scalar, StreamError, StreamProgram, StreamType, functions
from tvm_axe.stream.memo import Memo
from tvm_axe.stream.operators import routing
from tvm_axe.stream.programs.samples import PROGRAMS, SMALL, make_sample


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("changed", [{}, {"hop": 0}, {"depth": 4, "hop": 3}, {"banked": True, "on_chip_bandwidth": 32}])
def test_runs_are_what_they_are_without_sharing(monkeypatch, name, changed):
    sample = make_sample(name, SMALL, batch=24, seed=1)
    sample = replace(sample, accelerator=replace(sample.accelerator, **changed))
    shared = sample.run(values=False, trace=True)
    monkeypatch.setattr(Memo, "streams", lambda *_: None)
    monkeypatch.setattr(routing, "_same_reading", lambda *_: None)
    assert sample.run(values=False, trace=True) == shared


def branches(function, type=None, copies=2):
    """The same function on several inputs."""
    program = StreamProgram("branches")
    for number in range(copies):
        program.input(f"x{number}", type or StreamType((3,), Scalar())).map(function).output(f"y{number}")
    return program


def test_a_function_is_called_once_for_equal_streams():
    called = []
    program = branches(functions.number("square", lambda x: called.append(x) or x * x), copies=3)
    report = program.run({"x0": [1, 2, 3], "x1": [1, 2, 3], "x2": [1, 2, 4]}, Accelerator(), values=False)
    assert report.outputs == {"y0": [1, 4, 9], "y1": [1, 4, 9], "y2": [1, 4, 16]}
    assert called == [1, 2, 3, 1, 2, 4]


def test_values_that_are_only_equal_are_not_taken_for_the_same():
    program = branches(functions.number("kind", lambda x: len(type(x).__name__)))
    report = program.run({"x0": [0, 1, 2], "x1": [False, True, 2]}, Accelerator(), values=False)
    assert report.outputs == {"y0": [3, 3, 3], "y1": [4, 4, 3]}


def test_an_error_has_the_name_of_the_unit_that_made_it():
    program = branches(functions.number("reciprocal", lambda x: 6 // x))
    with pytest.raises(StreamError, match=r"Map 'reciprocal1': reciprocal raised ZeroDivisionError"):
        program.run({"x0": [1, 2, 3], "x1": [1, 0, 3]}, Accelerator(), values=False)


def test_functions_that_cannot_be_hashed_are_like_no_other():
    class Unhashable:
        __hash__ = None

        def __call__(self, x):
            return [x] * 2

    program = StreamProgram("pairs")
    for number in range(2):
        made = program.input(f"x{number}", StreamType((2,), Scalar())).flat_map(
            Unhashable(), StreamType((2,), Scalar())
        )
        made.output(f"y{number}")
    report = program.run({"x0": [1, 2], "x1": [1, 2]}, Accelerator(), values=False)
    assert report.outputs == {"y0": [[1, 1], [2, 2]], "y1": [[1, 1], [2, 2]]}
