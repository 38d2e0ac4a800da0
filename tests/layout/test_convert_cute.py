"""To and from CuTe's text, judged by an evaluation of CuTe layouts as CUTLASS defines it."""

import ast
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.layout import ComposeLayout, Iter, Layout, LayoutError
from tvm_axe.layout.convert import from_cute, to_cute

quick = settings(derandomize=True, max_examples=150, deadline=None)


def size(tree):
    return tree if isinstance(tree, int) else int(np.prod([size(part) for part in tree], dtype=np.int64))


def position(coordinate, shape, stride):
    """CuTe's crd2idx: an int into a tuple is taken apart colexicographically, the leftmost part the fastest."""
    if isinstance(shape, int):
        return coordinate * stride
    total = 0
    for part, step in zip(shape, stride):
        total += position(coordinate % size(part), part, step)
        coordinate //= size(part)
    return total


def address(text, coordinate):
    """The address to which a CuTe layout, as text, takes a coordinate of one int a mode."""
    swizzle = re.match(r"Sw<(\d+),(\d+),(-?\d+)> o (-?\d+) o ", text)
    lists = text[swizzle.end() if swizzle else 0 :].replace("(", "[").replace(")", "]").replace("_", "")
    shape, stride = map(ast.literal_eval, lists.split(":"))
    if isinstance(shape, int):
        shape, stride = [shape], [stride]
    found = sum(position(c, s, d) for c, s, d in zip(coordinate, shape, stride))
    if swizzle:
        bits, base, shift = (int(swizzle[k]) for k in (1, 2, 3))
        found += int(swizzle[4])
        mask = ((1 << bits) - 1) << (base + max(0, shift))
        moved = found & mask
        found ^= moved >> shift if shift >= 0 else moved << -shift
    return found


@st.composite
def shaped_layouts(draw):
    shape = tuple(draw(st.lists(st.integers(1, 8), max_size=3)))
    shard = []
    for extent in shape:
        inner = draw(st.sampled_from([d for d in range(1, extent + 1) if extent % d == 0]))
        shard += [Iter(e, draw(st.integers(-9, 30).filter(bool)), "m") for e in (extent // inner, inner)]
    return Layout(shard, (), {"m": draw(st.sampled_from([0, 0, 5, 300]))}), shape


@quick
@given(shaped_layouts())
def test_a_layout_is_what_its_text_says_and_comes_back(case):
    layout, shape = case
    text = to_cute(layout, shape)
    back, same = from_cute(text)
    assert same == shape and back.equivalent(layout)
    for index in np.ndindex(*shape):
        (point,) = layout.apply(*map(int, index), shape=shape)
        assert address(text, list(map(int, index))) == point["m"]


@quick
@given(shaped_layouts(), st.integers(0, 3), st.integers(0, 3), st.integers(0, 2), st.booleans())
def test_a_swizzled_layout_is_what_its_text_says_and_comes_back(case, base, bits, more, inner):
    tile, shape = case
    low = min(0, tile.bounds("m")[0])
    layout = ComposeLayout(base, bits, bits + more, Layout(tile.D, (), {"m": tile.O["m"] - low}), inner)
    text = to_cute(layout, shape)
    back, same = from_cute(text)
    assert same == shape and (back if bits else ComposeLayout(0, 0, 0, back)).equivalent(layout)
    for index in np.ndindex(*shape):
        (point,) = layout.apply(*map(int, index), shape=shape)
        assert address(text, list(map(int, index))) == point["m"]


trees = st.recursive(st.integers(1, 4), lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)


@st.composite
def texts(draw):
    """A CuTe layout of any nesting: its text, and the sizes of its modes."""
    shape = draw(trees)

    def strides(tree):
        if isinstance(tree, int):
            return draw(st.integers(1, 40)) if tree > 1 else draw(st.integers(0, 40))
        return tuple(strides(part) for part in tree)

    def write(tree):
        if isinstance(tree, int):
            return ("_" if draw(st.booleans()) else "") + str(tree)
        return f"({','.join(write(part) for part in tree)})"

    stride = strides(shape)
    modes = (shape,) if isinstance(shape, int) else shape
    return f"{write(shape)}:{write(stride)}", tuple(size(mode) for mode in modes)


@quick
@given(texts())
def test_a_text_is_read_as_cute_evaluates_it(case):
    text, sizes = case
    layout, shape = from_cute(text)
    assert shape == sizes
    for index in np.ndindex(*shape):
        (point,) = layout.apply(*map(int, index), shape=shape)
        assert address(text, list(map(int, index))) == point["m"]


@settings(derandomize=True, max_examples=400, deadline=None)
@given(st.text(alphabet="0123456789(),:_Sw<>o -", max_size=30))
def test_any_text_is_a_layout_or_an_error_of_ours(text):
    try:
        layout, shape = from_cute(text)
    except LayoutError:
        return
    assert layout.size() == size(shape)


@pytest.mark.parametrize(
    ("layout", "shape", "text"),
    [
        ("S[(4, 8) : (8, 1)]", (4, 8), "(4,8):(8,1)"),
        ("S[32 : 1]", (4, 8), "(4,8):(8,1)"),
        ("S[32 : 1]", (32,), "32:1"),
        ("S[(2, 8) : (1, 2)]", (16,), "((8,2)):((2,1))"),
        ("S[(2, 4, 8) : (1, 2, 8)]", (8, 8), "((4,2),8):((2,1),8)"),
        ("S[8 : 1]", (8, 1), "(8,1):(1,0)"),
        ("S[8 : 1] + 4", (8,), "Sw<0,0,0> o 4 o 8:1"),
        ("S[]", (), "():()"),
    ],
)
def test_texts_by_hand(layout, shape, text):
    parsed = Layout([]) if layout == "S[]" else Layout.parse(layout)
    assert to_cute(parsed, shape) == text
    assert from_cute(text)[1] == shape and from_cute(text)[0].equivalent(parsed)


def test_the_atom_of_a_128_byte_swizzle():
    layout, shape = from_cute("Sw<3,4,3> o 0 o (_8,_128):(_128,_1)")
    assert (layout, shape) == (ComposeLayout(4, 3, 3, Layout.parse("S[(8, 128) : (128, 1)]")), (8, 128))


@pytest.mark.parametrize("swizzle", ["Sw<2,4,{}>", "S<2,4,{}>", "SW_2_4_{}"])
@pytest.mark.parametrize(
    ("rest", "shape"), [(" o 0 o (8,128):(128,1)", (8, 128)), (" o _16 o (8, 64):(64, 1)", (8, 64))]
)
@pytest.mark.parametrize("shift", [3, -3])
def test_swizzles_as_c_and_both_pythons_write_them(swizzle, rest, shape, shift):
    layout, found = from_cute(swizzle.format(shift) + rest)
    assert found == shape and layout == from_cute(f"Sw<2,4,{shift}>{rest}")[0]
    for python, name in ((False, "Sw"), (True, "S")):
        text = to_cute(layout, shape, python=python)
        assert text.startswith(f"{name}<2,4,{shift}> o ") and from_cute(text) == (layout, shape)


def test_only_swizzles_are_written_in_another_way():
    assert to_cute(Layout.parse("S[8 : 1] + 4"), (8,), python=True) == "S<0,0,0> o 4 o 8:1"
    assert to_cute(Layout.parse("S[8 : 1]"), (8,), python=True) == "8:1"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: to_cute(Layout.parse("S[8 : 1@laneid]"), (8,)),
            "one address .* is on axis 'laneid'",
        ),
        (lambda: to_cute(Layout.parse("S[8 : 1] + R[2 : 8]"), (8,)), "has replicas"),
        (lambda: to_cute(Layout.parse("S[8 : 1]"), (4,)), r"can not be grouped by \(4,\)"),
        (lambda: from_cute(8), "text must be a str"),
        (lambda: from_cute("(4,8):(0,1)"), "4 elements .* have one address, by a stride of 0"),
        (lambda: from_cute("(4,8):(1,(2,3))"), "must be trees of one form"),
        (lambda: from_cute("(4,8):1"), "must be trees of one form"),
        (lambda: from_cute("(4,8)(1,2)"), "at position 5 of .*: expected ':'"),
        (lambda: from_cute("(4,8:(1,2)"), "at position 4 of .*: expected ','"),
        (lambda: from_cute("4:1:1"), "expected the end"),
        (lambda: from_cute("4:"), "at the end of '4:': expected an int"),
        (lambda: from_cute("(" * 1000), "expected an int of 64 bits or a tuple"),
        (lambda: from_cute("4:" + "1" * 30), "expected an int of 64 bits"),
        (lambda: from_cute("0:1"), "an iter's extent must be at least 1"),
        (lambda: from_cute("SW<3,4,3> o 0 o 8:1"), "expected an int of 64 bits or a tuple"),
        (lambda: from_cute("SW_3,4,3 o 0 o 8:1"), "expected an int of 64 bits or a tuple"),
        (lambda: from_cute("Sw<3,4,2> o 0 o 8:1"), "atom_len must be at least swizzle_len"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(LayoutError, match=message):
        call()
