"""Layouts with a swizzle under them: the map, the operations that keep it, the text, and what is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.layout import ComposeLayout, Iter, Layout, LayoutError

iters = st.builds(Iter, st.integers(1, 4), st.integers(1, 40), st.sampled_from(["m", "m", "tp"]))
tiles = st.builds(
    Layout, st.lists(iters, max_size=3), st.lists(iters, max_size=1), st.fixed_dictionaries({"m": st.integers(0, 9)})
)


@st.composite
def swizzled(draw):
    length = draw(st.integers(0, 3))
    atom = draw(st.integers(length, length + 2))
    return ComposeLayout(draw(st.integers(0, 3)), length, atom, draw(tiles), draw(st.booleans()))


quick = settings(derandomize=True, max_examples=100, deadline=None)


def by_bits(layout, address):
    """The address by its bits, independently of the package: a list, the lowest first."""
    bits = [address >> k & 1 for k in range(40)]
    low, length, atom = layout.per_element, layout.swizzle_len, layout.atom_len
    for k in range(length):
        source, target = (low + atom + k, low + k) if layout.swizzle_inner else (low + k, low + atom + k)
        bits[target] ^= address >> source & 1
    return sum(bit << k for k, bit in enumerate(bits))


@quick
@given(swizzled())
def test_the_address_of_each_point_is_swizzled_and_the_rest_stays(layout):
    for x in range(layout.size()):
        expected = {
            frozenset((a, v) for a in ("m", "tp") if (v := by_bits(layout, p["m"]) if a == "m" else p[a]))
            for p in layout.tile_layout.apply(x)
        }
        assert {frozenset(p.items()) for p in layout.apply(x)} == expected
    reached = [p["m"] for x in range(layout.size()) for p in layout.apply(x)]
    assert layout.span() == max(reached) - min(reached) + 1
    assert layout.span("tp") == layout.tile_layout.span("tp")


@quick
@given(swizzled())
def test_a_swizzle_permutes_each_aligned_block(layout):
    block = 2 ** (layout.per_element + layout.swizzle_len + layout.atom_len)
    assert sorted(layout.address(a) for a in range(block, 2 * block)) == list(range(block, 2 * block))
    assert layout.is_injective() == layout.tile_layout.is_injective()


@quick
@given(swizzled())
def test_canonical_forms_and_texts_keep_the_map(layout):
    canonical = layout.canonicalize()
    assert isinstance(canonical, Layout) == (layout.swizzle_len == 0)
    assert all(canonical.apply(x) == layout.apply(x) for x in range(layout.size()))
    assert layout.equivalent(canonical)
    assert ComposeLayout.parse(str(layout)) == layout


@quick
@given(swizzled(), swizzled())
def test_equivalent_iff_the_maps_are_equal(one, other):
    other = ComposeLayout(other.per_element, other.swizzle_len, other.atom_len, one.tile_layout, other.swizzle_inner)
    same = all(one.apply(x) == other.apply(x) for x in range(one.size()))
    assert one.equivalent(other) == same
    plain = all(one.apply(x) == one.tile_layout.apply(x) for x in range(one.size()))
    assert one.equivalent(one.tile_layout) == one.tile_layout.equivalent(one) == plain


def test_the_operations_act_on_the_tiles_and_keep_the_swizzle_innermost():
    shared = ComposeLayout(3, 3, 3, Layout.parse("S[(8, 64) : (64, 1)]"))
    table = np.array([[next(iter(shared.apply(r, c, shape=(8, 64))))["m"] for c in range(64)] for r in range(8)])

    def addresses(layout, *shape):
        return np.array([next(iter(layout.apply(x)))["m"] for x in range(layout.size())]).reshape(shape)

    assert (addresses(shared.slice((8, 64), [(2, 4), (16, 32)]), 2, 16) == table[2:4, 16:32]).all()
    assert (addresses(shared.permute((8, 64), (1, 0)), 64, 8) == table.T).all()
    assert (addresses(shared.group((2, 4, 64))[0], 8, 64) == table).all()
    tiled = addresses(shared.tile_to((16, 128), (8, 64)), 2, 8, 2, 64)
    assert all((tiled[i, :, j] == table + 512 * (2 * i + j)).all() for i in range(2) for j in range(2))
    summed = shared.direct_sum(Layout.parse("S[(1, 2) : (1, 512)]"), (1, 2), (8, 64))
    assert (addresses(summed, 8, 2, 64)[:, 1] == table + 512).all()
    narrow = addresses(shared.unpack(2), 8, 64, 2)
    assert (narrow == 2 * table[..., None] + np.arange(2)).all()
    assert shared.unpack(2).pack(2).equivalent(shared)
    copies = shared.broadcast(2, "tp").apply(65)
    assert copies == {p for p in copies if p["m"] == table[1, 1]} and len(copies) == 2
    lanes = ComposeLayout(0, 1, 1, Layout.parse("S[(4, 4) : (1@laneid, 1)]"))
    assert lanes.project(["m"]) == ComposeLayout(0, 1, 1, Layout.parse("S[4 : 1]"))
    assert lanes.project(["laneid"]) == Layout.parse("S[4 : 1@laneid]")


def test_down_a_column_of_pieces_every_bank_group_is_used():
    shared = ComposeLayout(3, 3, 3, Layout.parse("S[(8, 64) : (64, 1)]"))
    pieces = {next(iter(shared.apply(row, 0, shape=(8, 64))))["m"] % 64 // 8 for row in range(8)}
    assert pieces == set(range(8))


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        (
            "T.ComposeLayout(3, 3, 3, T.TileLayout(T.S[(8, 64):(64, 1)]))",
            "ComposeLayout(3, 3, 3, S[(8, 64) : (64, 1)])",
        ),
        (
            "T.ComposeLayout(3, 2, 3, T.TileLayout(T.S[(8, 64):(64, 1)] + 4), swizzle_inner=False)",
            "ComposeLayout(3, 2, 3, S[(8, 64) : (64, 1)] + 4, swizzle_inner=False)",
        ),
        ("ComposeLayout(0,0,0,S[4:1],swizzle_inner=True)", "ComposeLayout(0, 0, 0, S[4 : 1])"),
    ],
)
def test_both_notations_are_read(text, canonical):
    assert str(ComposeLayout.parse(text)) == canonical


TILE = Layout.parse("S[(8, 64) : (64, 1)]")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ComposeLayout(-1, 0, 0, TILE), "per_element must be at least 0, not -1"),
        (lambda: ComposeLayout(0, 3, 2, TILE), "atom_len must be at least swizzle_len = 3, .* not 2"),
        (lambda: ComposeLayout(50, 5, 10, TILE), "must be at most 62 bits"),
        (lambda: ComposeLayout(0, 0, 0, "S[4 : 1]"), "tile_layout must be a Layout, not 'S"),
        (lambda: ComposeLayout(0, 0, 0, TILE, 1), "swizzle_inner must be a bool, not 1"),
        (lambda: ComposeLayout(3, 3, 3, TILE).pack(16), r"keeps 2\*\*3 elements together, and num is 16"),
        (lambda: ComposeLayout(3, 3, 3, TILE).unpack(3), "num must be a power of two under a swizzle, not 3"),
        (
            lambda: ComposeLayout.parse("ComposeLayout(3, 3, S[4 : 1])"),
            "at position 20 of .*: expected an int, found 'S'",
        ),
        (lambda: ComposeLayout.parse("ComposeLayout(3, 3, 3, S[4 : 1]) x"), "expected the end, found 'x'"),
        (lambda: ComposeLayout.parse("ComposeLayout(3, 3, 3, S[4 : 1], swizzle_inner=1)"), "expected True or False"),
        (lambda: ComposeLayout.parse(3), "text must be a str"),
        (
            lambda: ComposeLayout(0, 1, 1, Layout.parse("S[131072 : 1]")).equivalent(Layout.parse("S[131072 : 1]")),
            "differ in their swizzles, and have 131072 elements to compare",
        ),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(LayoutError, match=message):
        call()


@settings(derandomize=True, max_examples=500, deadline=None)
@given(st.text("SRT.ComposeLayout()[]:,+@=0139 ", max_size=40))
def test_any_text_is_a_layout_or_a_layout_error(text):
    for damaged in (text, "ComposeLayout(3, 3, 3, " + text, "T.TileLayout(" + text):
        for reader in (Layout, ComposeLayout):
            try:
                read = reader.parse(damaged)
            except LayoutError:
                continue
            assert reader.parse(str(read)) == read
