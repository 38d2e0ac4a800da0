"""Laws of the codec, over lists of any raggedness."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.errors import StreamError
from tvm_axe.stream.codec import EMPTY, decode, encode, text


def nested(rank):
    """Lists nested `rank` deep, empty ones too."""
    element = st.integers(0, 99)
    for _ in range(rank):
        element = st.lists(element, max_size=3)
    return element


@st.composite
def ranked(draw):
    rank = draw(st.integers(1, 4))
    return rank, draw(nested(rank))


@st.composite
def split_stops(draw, tokens):
    """The same tokens with some of the stops sent late and alone."""
    found = []
    for value, stop in tokens:
        early = draw(st.integers(0, stop))
        if value is EMPTY or early == stop:
            found.append((value, stop))
        else:
            found += [(value, early), (EMPTY, stop)]
    return found


@settings(derandomize=True, max_examples=300)
@given(ranked())
def test_decode_is_the_inverse_of_encode(case):
    rank, lists = case
    assert decode(encode(lists, rank), rank) == lists


@settings(derandomize=True, max_examples=300)
@given(ranked(), st.data())
def test_late_stops_mean_the_same(case, data):
    rank, lists = case
    assert decode(data.draw(split_stops(encode(lists, rank))), rank) == lists


@settings(derandomize=True, max_examples=200)
@given(ranked())
def test_only_the_highest_stop_is_sent_where_nothing_is_empty(case):
    rank, lists = case
    tokens = encode(lists, rank)
    if not has_empty(lists, rank):
        assert all(value is not EMPTY for value, _ in tokens)
        assert [stop for _, stop in tokens].count(rank) == 1


def has_empty(lists, rank):
    return rank > 0 and (not lists or any(has_empty(inner, rank - 1) for inner in lists))


def test_different_lists_have_different_tokens():
    cases = [[], [[]], [[], []], [[1]], [[1], []], [[], [1]], [[1, 2]], [[1], [2]]]
    written = [text(encode(case, 2)) for case in cases]
    assert len(set(written)) == len(cases)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([(1, 2), (2, 0)], "2 comes after the stop S2"),
        ([(1, 3)], "1 S3 is no token of a stream of rank 2"),
        ([(1, 1)], "ends without S2"),
    ],
)
def test_malformed_streams(tokens, message):
    with pytest.raises(StreamError, match=message):
        decode(tokens, 2)


def test_too_shallow_lists():
    with pytest.raises(StreamError, match="3 is no list"):
        encode([[1], 3], 2)
