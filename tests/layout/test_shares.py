"""Shares: what devices hold covers a dimension, is as much for each, and a layout says the same where it can."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tvm_axe.layout import Layout, Mesh
from tvm_axe.layout.holding import Holding
from tvm_axe.layout.shares import Share

blocks = st.builds(Share.blocks, st.integers(1, 20), st.just(3))
packed = st.lists(blocks, min_size=1, max_size=4).map(Share.joined)


@given(packed)
def test_every_index_is_held_and_owned_once(share):
    held = [share.indices(device) for device in range(3)]
    assert all(len(at) == len(set(at.tolist())) == share.local for at in held)
    assert set(np.concatenate(held).tolist()) == set(range(share.extent))
    for run in share.runs:
        mine = [range(start + owned, start + run.size) for start, owned in zip(run.starts, run.owned(), strict=True)]
        assert sorted(at for values in mine for at in values) == list(range(run.extent))


@given(packed)
def test_spans_are_the_indices(share):
    for device in range(3):
        found = np.concatenate([np.arange(span.start, span.stop) for span in share.spans(device)])
        assert found.tolist() == share.indices(device).tolist()


@given(packed, st.integers(1, 3), st.integers(1, 3))
def test_more_digits_around(share, outer, inner):
    wide = share.around(outer, inner)
    assert wide is not None
    for device in range(3):
        at = np.ix_(np.arange(outer), share.indices(device), np.arange(inner))
        assert wide.indices(device).tolist() == ((at[0] * share.extent + at[1]) * inner + at[2]).ravel().tolist()


@given(st.lists(blocks, min_size=1, max_size=4), st.data())
def test_parts_are_what_was_joined(shares, data):
    ends = np.cumsum([0, *(share.extent for share in shares)]).tolist()
    first = data.draw(st.integers(0, len(shares) - 1))
    last = data.draw(st.integers(first + 1, len(shares)))
    assert Share.joined(shares).part(ends[first], ends[last]) == Share.joined(shares[first:last])


def test_what_cuts_blocks_is_no_part():
    assert Share.blocks(8, 2).part(0, 3) is None
    assert Share.whole(8, 2).part(0, 3) == Share.whole(3, 2)


@pytest.mark.parametrize(("extent", "devices"), [(8, 2), (12, 4), (2, 4), (3, 6)])
def test_a_layout_says_the_same(extent, devices):
    share, mesh = Share.blocks(extent, devices), Mesh({"tp": devices})
    dim, copies = share.iters("tp", 1)
    holding = Holding.of(Layout(dim, copies), (extent,), mesh)
    for device in range(devices):
        assert holding.held(device).elements.tolist() == share.indices(device).tolist()


def test_blocks_that_overlap_or_differ_are_no_layout():
    assert Share.blocks(8, 3).iters("tp", 1) is None
    assert Share.joined([Share.blocks(8, 2), Share.blocks(4, 2)]).iters("tp", 1) is None


@pytest.mark.parametrize("extent", range(1, 24))
@pytest.mark.parametrize("devices", range(1, 8))
def test_blocks_hold_every_index_and_no_two_devices_the_same(extent: int, devices: int) -> None:
    share = Share.blocks(extent, devices)
    held = [share.indices(device).tolist() for device in range(devices)]
    assert {index for each in held for index in each} == set(range(extent))
    assert {len(each) for each in held} == {-(-extent // devices)}
    if extent >= devices:
        assert len({tuple(each) for each in held}) == devices or extent == 1
        assert all(abs(each[0] - device * extent / devices) < 1 for device, each in enumerate(held))
