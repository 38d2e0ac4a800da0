"""The paper's statements on D (Axe, arXiv:2601.19092, appendices A.1 and A.2.1): its rules, and D from its map alone.

`whole_map` enumerates the definition, and the proofs' constructions are worked out here; what the package has is
compared with them. Lemmas about a proof are tested as what they say of the maps of layouts.
"""

import itertools
import math
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.layout import Iter, Layout

AXES = ("m", "lane")
quick = settings(derandomize=True, max_examples=100, deadline=None)
strides = st.integers(-6, 8).filter(bool)
iters = st.builds(Iter, st.integers(1, 4), strides, st.sampled_from(AXES))
shards = st.lists(iters, max_size=4)


# ---- A.1: the rules, applied in any order ------------------------------------------------------------------------


def shard_rewrites(shard):
    """Every list that one use of D0 or D1 makes of D."""
    for k, it in enumerate(shard):
        if it.extent == 1:
            yield shard[:k] + shard[k + 1 :]
    for k, (a, b) in enumerate(itertools.pairwise(shard)):
        if a.axis == b.axis and a.stride == b.extent * b.stride:
            yield [*shard[:k], Iter(a.extent * b.extent, b.stride, a.axis), *shard[k + 2 :]]


@quick
@given(shards, st.randoms(use_true_random=False))
def test_proposition_a_1_the_rules_for_d_end_in_one_form(whole_map, shard, random):
    expected = whole_map(Layout(shard))
    ends = set()
    for _ in range(4):
        rewritten = list(shard)
        while following := list(shard_rewrites(rewritten)):
            assert all(len(other) < len(rewritten) for other in following)
            rewritten = random.choice(following)
            assert whole_map(Layout(rewritten)) == expected
        ends.add(tuple(rewritten))
    assert ends == {Layout(shard).canonicalize().D}


# ---- A.2.1: D from its map ---------------------------------------------------------------------------------------


def axis_values(whole_map, shard):
    """v_a(x) of the lemmas, by axis: one number for each x, by enumeration."""
    table = [dict(next(iter(points))) for points in whole_map(Layout(shard))]
    return {axis: [point.get(axis, 0) for point in table] for axis in AXES}


def coefficients(shard):
    """c_i^(a): the stride of iter i where it is on the axis, less extent times stride of the next where that is."""
    after = [*shard[1:], None]
    return [
        {a: (it.stride if it.axis == a else 0) - (n.extent * n.stride if n and n.axis == a else 0) for a in AXES}
        for it, n in zip(shard, after)
    ]


def places(shard):
    """p_i: the product of the extents after iter i."""
    return [math.prod(it.extent for it in shard[k + 1 :]) for k in range(len(shard))]


def isolate(values, size):
    """C_a(d) of lemma A.6 for the divisors d < size: the Moebius inverse of G_a(m) = v_a(m) - v_a(m - 1).

    The inversion is done by subtraction: G_a(m) is the sum of C_a over the divisors of m.
    """
    found = {}
    for m in (m for m in range(1, size) if size % m == 0):
        found[m] = values[m] - values[m - 1] - sum(c for d, c in found.items() if m % d == 0)
    return found


def recover_shard(values, size):
    """The normalized D with a map, from its values alone: the proof of theorem A.8."""
    isolated = {axis: isolate(v, size) for axis, v in values.items()}
    levels = sorted((d for d in isolated[AXES[0]] if any(isolated[a][d] for a in AXES)), reverse=True)
    found = []
    for k in range(len(levels) - 1, -1, -1):  # from the fastest iter on
        extent = (levels[k - 1] if k else size) // levels[k]
        after = found[0] if found else None
        moved = {a: isolated[a][levels[k]] for a in AXES}
        if after:
            moved[after.axis] += after.extent * after.stride
        ((axis, stride),) = [(a, s) for a, s in moved.items() if s]
        found.insert(0, Iter(extent, stride, axis))
    return tuple(found)


@quick
@given(shards)
def test_lemma_a_3_exact_digit_identity(whole_map, shard):
    """Digit i is floor(x / p_i) - e_i * floor(x / p_(i-1)); alone on an axis of its own, its iter shows it."""
    own = [Iter(it.extent, 1, f"axis{k}") for k, it in enumerate(shard)]
    p, size = places(own), math.prod(it.extent for it in own)
    for x, (point,) in enumerate(whole_map(Layout(own))):
        for k, it in enumerate(own):
            before = x // p[k - 1] if k else 0
            assert dict(point).get(it.axis, 0) == x // p[k] - it.extent * before
    assert size == len(whole_map(Layout(own)))


@quick
@given(shards)
def test_lemma_a_4_coefficient_expansion_and_a_5_first_differences(whole_map, shard):
    """v_a(x) is the sum of c_i floor(x / p_i); its step to x + 1 the sum of the c_i of which p_i divides x + 1."""
    canonical = Layout(shard).canonicalize().D
    p, c = places(canonical), coefficients(canonical)
    for axis, values in axis_values(whole_map, canonical).items():
        assert values == [sum(ci[axis] * (x // pi) for ci, pi in zip(c, p)) for x in range(len(values))]
        for x in range(len(values) - 1):
            assert values[x + 1] - values[x] == sum(ci[axis] for ci, pi in zip(c, p) if (x + 1) % pi == 0)


@quick
@given(shards)
def test_lemma_a_6_moebius_isolation_and_corollary_a_7_levels(whole_map, shard):
    """Of the map alone, C_a is c_i at p_i and 0 elsewhere; where it isn't 0 are the levels, their ratios the extents.

    For m = E there is no step, for the map ends at E - 1: the paper's "for all m | E" is for m < E.
    """
    canonical = Layout(shard).canonicalize().D
    size = math.prod(it.extent for it in canonical)
    at = dict(zip(places(canonical), coefficients(canonical)))
    isolated = {axis: isolate(values, size) for axis, values in axis_values(whole_map, canonical).items()}
    for axis, found in isolated.items():
        assert found == {d: at.get(d, {axis: 0})[axis] for d in found}
    levels = sorted((d for d in range(1, size) if any(isolated[a].get(d) for a in AXES)), reverse=True)
    assert levels == places(canonical)
    assert [a // b for a, b in itertools.pairwise([size, *levels])] == [it.extent for it in canonical]


@settings(derandomize=True, max_examples=400, deadline=None)
@given(shards)
def test_theorem_a_8_d_is_recovered_from_its_map(whole_map, shard):
    size = math.prod(it.extent for it in shard)
    assert recover_shard(axis_values(whole_map, shard), size) == Layout(shard).canonicalize().D


def test_theorem_a_8_equal_maps_have_one_normalized_d():
    """Of all lists of up to three iters from a few, those of equal maps, and they alone, have equal canonical forms."""
    parts = [Iter(e, s, a) for e in (1, 2, 4) for s in (-1, 1, 2, 4) for a in AXES]
    steps = {
        it: [(k * it.stride, 0) if it.axis == "m" else (0, k * it.stride) for k in range(it.extent)] for it in parts
    }
    forms = defaultdict(set)
    for shard in itertools.chain.from_iterable(itertools.product(parts, repeat=n) for n in range(4)):
        digits = itertools.product(*(steps[it] for it in shard))
        image = tuple((sum(p[0] for p in d), sum(p[1] for p in d)) for d in digits)
        forms[image].add(Layout(shard).canonicalize())
    assert all(len(equal) == 1 for equal in forms.values())
    assert len(set().union(*forms.values())) == len(forms) > 1000
