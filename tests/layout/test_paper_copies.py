"""The paper's statements on R and O (Axe, arXiv:2601.19092, appendices A.1, A.2.2 and A.2.3): rules, lemmas, theorems.

Sets of copies are enumerated, and R is worked out of a set alone as the proofs do; what the package has is compared
with that. A list of runs is one of (stride, extent) on one axis.
"""

import itertools
import math
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.layout import Iter, Layout

AXES = ("m", "lane")
quick = settings(derandomize=True, max_examples=100, deadline=None)
strides = st.integers(-6, 8).filter(bool)
iters = st.builds(Iter, st.integers(1, 4), strides, st.sampled_from(AXES))
replicas = st.lists(st.builds(Iter, st.integers(1, 4), strides, st.just("m")), max_size=4)
offsets = st.dictionaries(st.sampled_from(AXES), st.integers(-5, 5), max_size=2)
layouts = st.builds(Layout, st.lists(iters, max_size=3), st.lists(iters, max_size=2), offsets)


# ---- A.1: the rules, applied in any order -------------------------------------------------------------------------


def replica_rewrites(replica, offset, most=lambda q, extent: q <= extent):
    """Every (R, offset) on one axis that one use of C0, C1 or C2 makes; `most` is the condition on q of C2."""
    for k, it in enumerate(replica):
        rest = replica[:k] + replica[k + 1 :]
        if it.extent == 1:
            yield rest, offset
        elif it.stride < 0:
            yield [*rest, Iter(it.extent, -it.stride, it.axis)], offset + (it.extent - 1) * it.stride
    for a, b in itertools.permutations(range(len(replica)), 2):
        i, j = replica[a], replica[b]
        if 0 < i.stride <= j.stride and j.stride % i.stride == 0 and most(j.stride // i.stride, i.extent):
            extent = i.extent + j.stride // i.stride * (j.extent - 1)
            yield [it for k, it in enumerate(replica) if k not in (a, b)] + [Iter(extent, i.stride, i.axis)], offset


def every_end(replica, most=lambda q, extent: q <= extent):
    """Every (R, offset) to which the rules can lead, as sorted tuples."""
    ends, seen, todo = set(), set(), [(list(replica), 0)]
    while todo:
        state = todo.pop()
        key = (tuple(sorted((it.stride, it.extent) for it in state[0])), state[1])
        if key not in seen:
            seen.add(key)
            following = list(replica_rewrites(*state, most))
            todo += following
            if not following:
                ends.add(key)
    return ends


def copies(runs):
    """The set that (stride, extent) runs of positive strides reach."""
    return frozenset(map(sum, itertools.product(*(range(0, s * e, s) for s, e in runs))))


def has_gaps(runs):
    """The gap condition as the paper has it: E * sigma of every stride is less than the next stride."""
    return all(s * e < t for (s, e), (t, _) in itertools.pairwise(runs))


def is_separated(runs):
    """The weaker condition that is enough: every stride exceeds the reach of all smaller ones, as lemma A.9 has it."""
    reach = 0
    for stride, extent in runs:
        if stride <= reach:
            return False
        reach += stride * (extent - 1)
    return True


def is_saturated(runs):
    return not any(t % s == 0 and t // s <= e for (s, e), (t, _) in itertools.combinations(runs, 2))


def separated_lists(reach, before=()):
    """Every saturated list of (stride, extent) that is separated and reaches no farther than `reach`."""
    if before:
        yield list(before)
    done = sum(s * (e - 1) for s, e in before)
    for stride in range(done + 1, reach - done + 1):
        for extent in range(2, (reach - done) // stride + 2):
            runs = (*before, (stride, extent))
            if is_saturated(runs):
                yield from separated_lists(reach, runs)


def saturated_forms(target):
    """Every saturated list, however many runs, that reaches just the positions in `target`."""
    top, found = max(target), []

    def extend(before, reached):
        reach = max(reached)
        if reach == top:
            found.extend([list(before)] if reached == target else [])
            return
        for stride in sorted(target):
            if stride > (before[-1][0] if before else 0):
                for extent in range(2, (top - reach) // stride + 2):
                    runs, more = (*before, (stride, extent)), {a + k * stride for a in reached for k in range(extent)}
                    if not more <= target:
                        break
                    if is_saturated(runs):
                        extend(runs, more)

    extend((), {0})
    return found


@quick
@given(replicas)
def test_proposition_a_1_the_rules_for_r_end_and_keep_the_copies(whole_map, replica):
    (expected,) = whole_map(Layout([], replica))
    canonical = Layout([], replica).canonicalize()
    ends = every_end(replica)
    for runs, offset in ends:
        assert whole_map(Layout([], [Iter(e, s, "m") for s, e in runs], {"m": offset})) == (expected,)
    assert (tuple((it.stride, it.extent) for it in canonical.R), canonical.O["m"]) in ends
    if any(is_separated(runs) for runs, _ in ends):
        assert len(ends) == 1


def test_departure_a_1_the_rules_for_r_can_end_in_two_forms():
    """A run may be absorbed by either of two: the proof has multiples along one chain alone.

    Steps of 6 fill up steps of 2 as well as of 3. The gap condition fails, so no theorem is touched; `canonicalize`
    takes the smallest stride first, and `equivalent` compares the sets.
    """
    replica = [Iter(3, 2, "m"), Iter(2, 3, "m"), Iter(2, 6, "m")]
    assert every_end(replica) == {(((2, 6), (3, 2)), 0), (((2, 3), (3, 4)), 0)}
    assert str(Layout([], replica).canonicalize()) == "S[() : ()] + R[(6, 2) : (2, 3)]"
    forms = [Layout([], [Iter(e, s, "m") for s, e in runs]) for runs in (((2, 6), (3, 2)), ((2, 3), (3, 4)))]
    assert forms[0].canonicalize() != forms[1].canonicalize() and forms[0].equivalent(forms[1])
    # With q < e in C2, as the rule has it, it is the same for other extents.
    assert len(every_end([Iter(4, 2, "m"), Iter(3, 3, "m"), Iter(2, 6, "m")], lambda q, extent: q < extent)) == 2


@pytest.mark.parametrize("stride", [1, 3])
def test_c_2_is_exact(stride):
    """Up to q = E_1 two runs are one without a hole; beyond there is one."""
    for first, second, times in itertools.product(range(2, 6), range(2, 5), range(1, 9)):
        reached = copies([(stride, first), (times * stride, second)])
        whole = copies([(stride, first + times * (second - 1))])
        assert (reached == whole) == (times <= first)
        layout = Layout([], [Iter(first, stride, "m"), Iter(second, times * stride, "m")])
        assert len(layout.canonicalize().R) == (1 if times <= first else 2)


def test_departure_c_2_absorbs_up_to_q_equal_to_the_extent():
    """The rule has q < e, its proof q <= E_1. By the rule, 0 to 3 as 2 : 1 and 2 : 2 would stay, against A.14."""
    split = [Iter(2, 1, "m"), Iter(2, 2, "m")]
    assert every_end(split, lambda q, extent: q < extent) == {(((1, 2), (2, 2)), 0)}
    assert has_gaps([(1, 4)]) and copies([(1, 4)]) == copies([(1, 2), (2, 2)])
    assert Layout([], split).canonicalize() == Layout([], [Iter(4, 1, "m")])


# ---- A.2.2: R from its set ---------------------------------------------------------------------------------------


def gap_lists(reach):
    """The lists that meet the gap condition as the paper has it; each is saturated."""
    return [runs for runs in separated_lists(reach) if has_gaps(runs)]


def in_the_package(runs):
    """The positions that the package has for a list, after having seen that it takes the list for canonical."""
    layout = Layout([], [Iter(extent, stride, "m") for stride, extent in runs])
    assert layout.canonicalize() == layout
    return frozenset(point["m"] for point in layout.apply(0))


def lower_boundary(reached, stride):
    return frozenset(x for x in reached if x - stride not in reached)


def recover_runs(reached):
    """The runs of a set of copies, from the set alone: the recursion of theorem A.12."""
    found = []
    while len(reached) > 1:
        stride = min(reached - {0})
        extent = next(e for e in itertools.count(1) if e * stride not in reached)
        found.append((stride, extent))
        reached = lower_boundary(reached, stride)
    return found


@quick
@given(replicas)
def test_saturated_strides_differ(replica):
    """C2 with q = 1 joins equal strides, so that the gap condition never meets any."""
    found = [it.stride for it in Layout([], replica).canonicalize().R]
    assert len(set(found)) == len(found)


def test_lemma_a_9_cumulative_separation_and_a_10_unique_digits():
    lists = gap_lists(34)
    assert len(lists) > 1000 and max(map(len, lists)) == 4
    for runs in lists:
        for k in range(1, len(runs)):
            assert sum((e - 1) * s for s, e in runs[:k]) < runs[k][0]
    for runs in separated_lists(34):  # the condition of A.9 is all that A.10 needs
        assert len(in_the_package(runs)) == math.prod(e for _, e in runs)


def test_lemma_a_11_windows_and_boundaries():
    for runs in gap_lists(34):
        reached = [copies(runs[k:]) for k in range(len(runs) + 1)]
        assert reached[0] == in_the_package(runs)
        for k, (stride, extent) in enumerate(runs):
            window = {r * stride for r in range(extent)}
            below = runs[k + 1][0] if k + 1 < len(runs) else math.inf
            assert {x for x in reached[k] if x < below} == window
            parts = [{base + r for r in window} for base in reached[k + 1]]
            assert set().union(*parts) == reached[k] and sum(map(len, parts)) == len(reached[k])
            assert lower_boundary(reached[k], stride) == reached[k + 1]


def test_departure_a_11_needs_more_than_that_copies_do_not_meet():
    """Of 2 : 1, 2 : 3 and 2 : 5 no two copies meet, and yet 5 is no lower boundary: 4 is a copy as well."""
    runs = [(1, 2), (3, 2), (5, 2)]
    assert is_separated(runs) and not has_gaps(runs)
    assert lower_boundary(in_the_package(runs), 1) == {0, 3, 8} != copies(runs[1:])
    assert recover_runs(in_the_package(runs)) != runs
    assert saturated_forms(in_the_package(runs)) == [runs]


def test_theorem_a_12_r_is_recovered_from_its_set():
    for runs in gap_lists(34):
        assert recover_runs(in_the_package(runs)) == runs


def test_theorem_a_12_no_other_saturated_list_has_the_set():
    """However many runs it has, and whether or not it has gaps itself; copies that don't meet are enough."""
    for runs in separated_lists(24):
        assert saturated_forms(in_the_package(runs)) == [runs]


def test_departure_a_12_without_gaps_two_saturated_lists_have_a_set():
    one, two = [(2, 3), (3, 4)], [(2, 6), (3, 2)]
    assert in_the_package(one) == in_the_package(two) and not is_separated(one) and not is_separated(two)
    assert saturated_forms(copies(one)) == [one, two]


# ---- A.2.3: all of a layout --------------------------------------------------------------------------------------


@quick
@given(layouts, st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_lemma_a_13_fiber_minima(whole_map, layout, weights):
    """By any positive weights, the one least point of an element, once strides of R are positive, is f_D(x) + O."""
    canonical = layout.canonicalize()
    bases = whole_map(Layout(canonical.D, [], canonical.O))
    for points, (base,) in zip(whole_map(layout), bases, strict=True):
        weighed = sorted((sum(weights[AXES.index(a)] * p for a, p in point), point == base) for point in points)
        assert weighed[0][1] and all(weight > weighed[0][0] for weight, _ in weighed[1:])


def another_form(layout, random):
    """A layout with the same map: iters of D cut, units added, runs of R cut, turned round and shuffled."""
    shard, replica, offset = [], [], dict(layout.O)
    for it in layout.D:
        outer = random.choice([d for d in range(1, it.extent + 1) if it.extent % d == 0])
        inner = it.extent // outer
        shard += [Iter(outer, it.stride * inner, it.axis), Iter(inner, it.stride, it.axis), Iter(1, 7, "lane")]
    for it in layout.R:
        first = random.randint(1, it.extent)
        times = random.choice([q for q in range(1, first + 1) if (it.extent - first) % q == 0])
        for extent, stride in ((first, it.stride), ((it.extent - first) // times + 1, it.stride * times)):
            sign = random.choice([1, -1])
            replica.append(Iter(extent, sign * stride, it.axis))
            if sign < 0:
                offset[it.axis] = offset.get(it.axis, 0) + (extent - 1) * stride
    random.shuffle(replica)
    return Layout(shard, replica, offset)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(layouts, st.randoms(use_true_random=False))
def test_theorem_a_14_global_canonicality(whole_map, layout, random):
    """It is enough that one of the two forms has the gap condition, which the other then has too."""
    canonical = layout.canonicalize()
    other = another_form(canonical, random)
    assert whole_map(other) == whole_map(layout) and other.equivalent(layout)
    runs = {axis: [(it.stride, it.extent) for it in canonical.R if it.axis == axis] for axis in AXES}
    if all(map(is_separated, runs.values())):
        assert other.canonicalize() == canonical


def test_theorem_a_2_equal_maps_under_the_gap_condition_have_one_canonical_form():
    parts = [Iter(e, s, "m") for e in (1, 2, 3, 4) for s in (-2, -1, 1, 2, 3, 4, 5, 6, 8)]
    forms, sources = defaultdict(set), 0
    for replica in itertools.chain.from_iterable(itertools.combinations_with_replacement(parts, n) for n in range(4)):
        canonical = Layout([], replica).canonicalize()
        image = frozenset(map(sum, itertools.product(*(range(0, it.extent * it.stride, it.stride) for it in replica))))
        forms[image].add(canonical)
        sources += 1
    runs = [[[(it.stride, it.extent) for it in form.R] for form in equal] for equal in forms.values()]
    assert all(len(equal) == 1 for equal in runs if any(map(is_separated, equal)))
    assert sum(any(map(has_gaps, equal)) for equal in runs) > 150 and sources > 5 * len(forms)
