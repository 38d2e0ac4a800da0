"""Where trials go, and when a task is left."""

from __future__ import annotations

import math

import pytest

from tvm_axe.meta.search.scheduler import expected_gain, stalled
from tvm_axe.records.database import FAILED_SECONDS


def test_a_task_without_trials_comes_first():
    assert expected_gain(1, 5.0, []) == math.inf


def test_the_gain_is_proportional_to_weight_and_time():
    gain = expected_gain(1, 9.0, [4.0, 2.0])
    assert gain == pytest.approx(2.0 / 2)
    assert expected_gain(3, 9.0, [4.0, 2.0]) == pytest.approx(3 * gain)
    assert expected_gain(1, 90.0, [40.0, 20.0]) == pytest.approx(10 * gain)


def test_while_no_candidate_is_faster_the_untuned_function_counts():
    assert expected_gain(1, 1.0, [4.0, 2.0]) == pytest.approx(1.0 / 2)
    assert expected_gain(1, 1.0, [FAILED_SECONDS] * 4) == pytest.approx(1.0 / 4)


def test_of_two_equal_tasks_the_one_that_has_just_improved_is_preferred():
    idle = [1.0] * 100
    improving = [2.0] * 60 + [1.0] * 40
    assert expected_gain(1, 3.0, improving) > expected_gain(1, 3.0, idle)
    # The window's part is alpha, 0.2, of the improvement over 48 trials.
    assert expected_gain(1, 3.0, improving) - expected_gain(1, 3.0, idle) == pytest.approx(0.2 * 1.0 / 48)


def test_a_task_that_never_runs_is_tried_for_a_while_only():
    assert expected_gain(1, None, [FAILED_SECONDS] * 10) == math.inf
    assert expected_gain(1, None, [FAILED_SECONDS] * 48) == 0.0


def test_stalled_counts_candidates_since_the_last_improvement_by_a_percent():
    assert not stalled([1.0] * 3, patience=3)
    assert stalled([1.0] * 4, patience=3)
    assert stalled([1.0, 0.995, 0.993, 1.2], patience=3)
    assert not stalled([1.0, 1.0, 0.98, 1.2], patience=3)
    assert stalled([FAILED_SECONDS] * 5, patience=3)
    assert not stalled([FAILED_SECONDS] * 4 + [1.0], patience=3)
