"""The text of layouts: it reads back, both forms are read, and malformed text is refused with a position."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.layout import Iter, Layout, LayoutError

axes = st.sampled_from(["m", "tp", "R", "S", "laneid", "_x1"])
iters = st.builds(Iter, st.integers(1, 10**6), st.integers(-(10**6), 10**6).filter(bool), axes)
offsets = st.dictionaries(axes, st.integers(-(10**9), 10**9), max_size=3)
layouts = st.builds(Layout, st.lists(iters, max_size=3), st.lists(iters, max_size=3), offsets)
quick = settings(derandomize=True, max_examples=200, deadline=None)


@quick
@given(layouts)
def test_text_reads_back(layout):
    assert Layout.parse(str(layout)) == layout
    assert str(Layout.parse(str(layout))) == str(layout)


@quick
@given(layouts, st.data())
def test_spaces_between_tokens_are_free(layout, data):
    spaced = "".join(data.draw(st.sampled_from(["", " ", "\t\n"])) + c if c in "[]():,+@" else c for c in str(layout))
    assert Layout.parse(spaced) == layout
    assert Layout.parse(str(layout).replace(" ", "")) == layout


@pytest.mark.parametrize(
    "text",
    [
        "S[(4, 32, 128) : (1@tp, 128, 1)] + R[2 : 1@dp] + 3@warpid",
        "S[4 : 1@tp]",
        "S[() : ()]",
        "S[2 : -1] + -3",
        "S[2 : 1] + R[(2, 3) : (1@dp, -2@tp)] + 4 + 1@tp",
    ],
)
def test_canonical_text_is_printed_as_it_is_read(text):
    assert str(Layout.parse(text)) == text


@pytest.mark.parametrize("text", ["S[4 : 1@tp]", "S[(4) : (1@tp)]", "S[(4,) : (1@tp,)]", "S[4 : (1@tp)]"])
def test_one_iter_is_read_with_or_without_parentheses(text):
    assert Layout.parse(text) == Layout([Iter(4, 1, "tp")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at position 0 of '': expected 'S', found the end"),
        ("T[4 : 1]", "at position 0 of .*: expected 'S', found 'T'"),
        ("S(4 : 1)", r"at position 1 of .*: expected '\[', found '\('"),
        ("S[4]", "at position 3 of .*: expected ':', found ']'"),
        ("S[4 : ]", "at position 6 of .*: expected an int, found ']'"),
        ("S[4 : 1@]", "at position 8 of .*: expected the name of an axis, found ']'"),
        ("S[4 : 1@2]", "at position 8 of .*: expected the name of an axis, found '2'"),
        ("S[4 : 1", "at position 7 of .*: expected ']', found the end"),
        ("S[(4, 2 : 1]", r"at position 8 of .*: expected ',', found ':'"),
        ("S[(4,, 2) : (1, 1)]", "at position 5 of .*: expected an int, found ','"),
        ("S[4.0 : 1]", "at position 3 of .*: expected ':', found '.'"),
        ("S[- 4 : 1]", "at position 2 of .*: expected an int, found '-'"),
        ("S[٤ : 1]", "at position 2 of .*: expected an int"),
        ("S[(8, 2) : (1, 2, 3)]", "at position 1 of .*: as many strides as extents needed, found 2 : 3"),
        ("S[0 : 1]", "at position 1 of .*: an iter's extent must be at least 1, not 0"),
        ("S[4 : 0@tp]", "at position 1 of .*: an iter's stride must not be 0"),
        ("S[99999999999999999999 : 1]", "at position 2 of .*: an int must fit in 64 bits"),
        ("S[9999999999999999999 : 1]", "at position 1 of .*: an iter's extent must fit in 64 bits"),
        ("S[4 : 1] R[2 : 1]", r"at position 9 of .*: expected '\+', found 'R'"),
        ("S[4 : 1] +", r"at position 10 of .*: expected R\[\.\.\.\] or an offset, found the end"),
        ("S[4 : 1] + x", r"at position 11 of .*: expected R\[\.\.\.\] or an offset, found 'x'"),
        ("S[4 : 1] + R[2 : 1@dp] + R[2 : 1@tp]", "at position 25 of .*: expected an offset such as 3@warpid"),
        ("S[4 : 1] + 3 + R[2 : 1@dp]", "at position 15 of .*: expected an offset such as 3@warpid, found 'R'"),
        ("S[4 : 1] + 3@tp + 4@tp", "at position 18 of .*: axis 'tp' has an offset already"),
        ("S[4 : 1] + 9999999999999999999@tp", "the position on axis 'tp' must fit in 64 bits"),
        (4, "text must be a str such as"),
    ],
)
def test_malformed_text_is_refused_with_its_position(text, message):
    with pytest.raises(LayoutError, match=message):
        Layout.parse(text)


def test_a_text_of_thousands_of_digits_is_refused():
    with pytest.raises(LayoutError, match="an int must fit in 64 bits"):
        Layout.parse(f"S[{'9' * 5000} : 1]")


@settings(derandomize=True, max_examples=1500, deadline=None)
@given(st.one_of(st.text(), st.text("S R[]():,+-@0123456789tpm", max_size=30)))
def test_any_text_is_a_layout_or_a_layout_error(text):
    try:
        layout = Layout.parse(text)
    except LayoutError:
        return
    assert Layout.parse(str(layout)) == layout


@settings(derandomize=True, max_examples=1500, deadline=None)
@given(layouts, st.data())
def test_a_damaged_layout_text_is_a_layout_or_a_layout_error(layout, data):
    text = str(layout)
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, min(len(text), start + 3)))
    damaged = text[:start] + data.draw(st.text("S R[]():,+-@09tm.\x00é", max_size=3)) + text[stop:]
    try:
        read = Layout.parse(damaged)
    except LayoutError:
        return
    assert Layout.parse(str(read)) == read
