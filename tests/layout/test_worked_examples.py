"""Layouts of real hardware, by the tables that its makers publish, and what the algebra says of them.

The paper's examples are in test_paper_examples.
"""

import numpy as np
import pytest

from tvm_axe.layout import ComposeLayout, Layout


def one(layout, *index, shape):
    (point,) = layout.apply(*index, shape=shape)
    return point


def test_the_fragment_of_an_8_by_8_matrix():
    """Lane 4 * row + column / 2 holds two neighbours: PTX ISA, the fragments of mma.m16n8k8, one 8 by 8 matrix."""
    fragment = Layout.parse("S[(8, 4, 2) : (4@laneid, 1@laneid, 1)]")
    for row, column in np.ndindex(8, 8):
        place = one(fragment, row, column, shape=(8, 8))
        assert (place["laneid"], place["m"]) == (4 * row + column // 2, column % 2)
    assert fragment.is_injective() and fragment.covers({"laneid": 32, "m": 2})
    assert str(fragment.canonicalize()) == "S[(32, 2) : (1@laneid, 1)]"


def test_the_accumulator_of_mma_m16n8_is_two_of_them_on_top_of_each_other():
    """PTX ISA, mma.m16n8k16: register i of a lane is in row lane / 4 + 8 * (i / 2), column 2 * (lane % 4) + i % 2."""
    fragment = Layout.parse("S[(8, 4, 2) : (4@laneid, 1@laneid, 1)]")
    accumulator = fragment.tile_to((16, 8), (8, 8))
    for lane, register in np.ndindex(32, 4):
        row, column = lane // 4 + 8 * (register // 2), 2 * (lane % 4) + register % 2
        place = one(accumulator, row, column, shape=(16, 8))
        assert (place["laneid"], place["m"]) == (lane, register)
    inverse = accumulator.inverse({"laneid": 32, "m": 4})
    assert one(inverse, 5, 3, shape=(32, 4))["m"] == (5 // 4 + 8) * 8 + 2 * (5 % 4) + 1
    assert fragment.is_tile_inner(accumulator, (16, 8), (8, 8)).equivalent(Layout.parse("S[2 : 1]"))


def test_the_accumulator_of_wgmma_over_four_warps():
    """PTX ISA, wgmma.m64nNk16, D: warp w holds rows 16 * w and on, as mma accumulators side by side."""
    accumulator = Layout.parse("S[(8, 4, 2) : (4@laneid, 1@laneid, 1)]").tile_to((16, 8), (8, 8))
    across = accumulator.tile_to((16, 32), (16, 8))
    whole = across.tile(Layout.parse("S[4 : 1@wid_in_wg]"), (4, 1), (16, 32))
    for row, column in np.ndindex(64, 32):
        place = one(whole, row, column, shape=(64, 32))
        assert place["wid_in_wg"] == row // 16 and place["laneid"] == row % 8 * 4 + column % 8 // 2
        assert place["m"] == column // 8 * 4 + row % 16 // 8 * 2 + column % 2
    assert whole.is_injective() and whole.covers({"wid_in_wg": 4, "laneid": 32, "m": 16})


@pytest.mark.parametrize("rows", [64, 128])
def test_tensor_memory_datapaths(rows):
    """PTX ISA, tcgen05 data path layouts: 128 rows on 128 lanes; or 64, sixteen in each warp's 32 lanes."""
    text = "S[(128, 32) : (1@TLane, 1@TCol)]" if rows == 128 else "S[(4, 16, 32) : (32@TLane, 1@TLane, 1@TCol)]"
    layout = Layout.parse(text)
    for row in range(rows):
        lane = row if rows == 128 else row // 16 * 32 + row % 16
        place = one(layout, row, 3, shape=(rows, 32))
        assert (place["TLane"], place["TCol"]) == (lane, 3)
    assert layout.span("TLane") == (128 if rows == 128 else 112)


def test_a_128_byte_swizzle_is_free_of_conflicts_along_rows_and_columns():
    """Sixteen-byte pieces of rows of 128 bytes: any eight of a row, or of a column, are in different banks."""
    shared = ComposeLayout(3, 3, 3, Layout.parse("S[(8, 64) : (64, 1)]"))
    group = np.array([[one(shared, r, 8 * c, shape=(8, 64))["m"] // 8 % 8 for c in range(8)] for r in range(8)])
    assert all(set(line) == set(range(8)) for line in (*group, *group.T))
    assert (group == np.arange(8)[:, None] ^ np.arange(8)).all()
