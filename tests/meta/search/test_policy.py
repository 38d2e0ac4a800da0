"""The one law of what is faster beyond noise: its two policies, and who has the right of way."""

from __future__ import annotations

import random
import statistics

import pytest

from tvm_axe.meta.search.policy import BETTER, KERNELS, PROGRAMS, Policy, is_faster, middle_half, winner


def drawn(noise: random.Random, turns: int) -> list[float]:
    return [noise.gauss(1, 0.05) for _ in range(turns)]


def test_quartiles_are_values_with_a_quarter_beyond_at_most():
    noise = random.Random(1)
    for count in range(1, 30):
        values = drawn(noise, count)
        low, high = middle_half(values)
        assert {low, high} <= {*values}
        assert sum(value < low for value in values) <= count / 4
        assert sum(value > high for value in values) <= count / 4
        assert low <= statistics.median(values) <= high


@pytest.mark.parametrize("policy", [KERNELS, PROGRAMS])
def test_nothing_is_faster_than_itself_and_no_two_than_each_other(policy):
    noise = random.Random(2)
    for _ in range(500):
        a, b = drawn(noise, 7), drawn(noise, 7)
        assert not is_faster(a, a, policy)
        assert not (is_faster(a, b, policy) and is_faster(b, a, policy))


def test_the_law_for_the_same_turns():
    """Faster by the least gain in the median of the ratios, and faster in three quarters of the turns."""
    noise = random.Random(3)
    for _ in range(1000):
        a, b = drawn(noise, 7), drawn(noise, 7)
        ratios = [x / y for x, y in zip(a, b)]
        wanted = statistics.median(ratios) < BETTER and sum(ratio < 1 for ratio in ratios) >= 6
        assert is_faster(a, b, KERNELS) == wanted


def test_the_law_for_times_of_different_turns():
    """The middle halves apart, or so much slower that no noise excuses it; times are in no order."""
    noise = random.Random(4)
    for _ in range(1000):
        a, b = drawn(noise, 5), drawn(noise, 5)
        apart = sorted(a)[3] < sorted(b)[1]
        plain = statistics.median(b) > 1.05 * statistics.median(a)
        assert is_faster(a, b, PROGRAMS) == (apart or plain)
        assert is_faster(sorted(a), b[::-1], PROGRAMS) == is_faster(a, b, PROGRAMS)


def test_the_right_of_way_costs_no_more_than_the_policy_says():
    noise = random.Random(5)
    for _ in range(300):
        times = [drawn(noise, 5) for _ in range(6)]
        medians = [statistics.median(each) for each in times]
        assert medians[winner(times, PROGRAMS)] <= 1.05 * min(medians)


def test_what_is_timed_once_is_judged_by_that_time():
    assert winner([[1.0], [0.999]], PROGRAMS) == 1
    assert winner([[1.0], [0.999]], KERNELS) == 0


def test_turns_that_differ_in_number_are_refused():
    with pytest.raises(ValueError, match="zip"):
        is_faster([1.0, 1.0], [1.0], KERNELS)
    assert not is_faster([1.0, 1.0], [1.0], Policy(same_turns=False, gain=0.0, plain=0.1))
