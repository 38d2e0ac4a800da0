"""Derivations: what they state is so, and their last line is the operation's own result."""

import re
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.layout import ComposeLayout, Iter, Layout, LayoutError, Mesh
from tvm_axe.layout.explaining import explain

quick = settings(derandomize=True, max_examples=60, deadline=None)
iters = st.builds(Iter, st.integers(1, 4), st.integers(-4, 6).filter(bool), st.sampled_from(["m", "tp", "laneid"]))
offsets = st.dictionaries(st.sampled_from(["m", "dp"]), st.integers(-5, 5), max_size=2)


def amounts(text):
    """axis -> amount, of '3 + 1@tp'."""
    total = Counter()
    for number, axis in re.findall(r"(-?[0-9]+)(?:@(\w+))?", text):
        total[axis or "m"] += int(number)
    return {axis: amount for axis, amount in total.items() if amount}


@quick
@given(st.lists(iters, max_size=4), offsets, st.data())
def test_the_parts_of_a_point_add_up(shard, offset, data):
    layout = Layout(shard, (), offset)
    shape = data.draw(st.sampled_from([(layout.size(),), (1, layout.size()), tuple(it.extent for it in shard)]))
    index = [data.draw(st.integers(0, extent - 1)) for extent in shape]
    lines = explain(layout, "apply", *index, shape=shape).splitlines()
    (point,) = layout.apply(*index, shape=shape)
    parts = [line.split("  ")[-1].split(" = ")[-1] for line in lines if line.startswith("  ")]
    assert len(parts) == len(shard) + bool(layout.O)
    assert amounts(" + ".join(parts)) == dict(point) == amounts(lines[-1].removeprefix("points: "))
    position, formula = re.fullmatch(r"row-major position in .*: ([0-9]+) = (.*)", lines[1]).groups()
    assert eval(formula or "0") == int(position) and layout.apply(int(position)) == {point}


@quick
@given(st.lists(iters, max_size=3), st.lists(iters, max_size=3), offsets)
def test_every_iter_is_accounted_for_on_the_way_to_the_canonical_form(shard, replica, offset):
    layout = Layout(shard, replica, offset)
    lines = explain(layout, "canonicalize").splitlines()
    assert lines[0] == f"canonicalize {layout}" and lines[-1] == f"result: {layout.canonicalize()}"
    told = [line.split(": ")[0] for line in lines[1:-1]]
    assert len(told) == len(layout.D) + len(layout.R)
    dropped = sum("of one step, dropped" in line for line in lines)
    assert dropped == sum(it.extent == 1 for it in (*shard, *replica))


def test_canonical_forms_are_told_as_they_come_about():
    layout = Layout.parse("S[(4, 8, 1, 2) : (16, 2, 1@tp, 1)] + R[(3, 2, 2) : (1@dp, 3@dp, -1@tp)]")
    assert explain(layout, "canonicalize").splitlines()[1:] == [
        "  D 4 : 16: stays",
        "  D 8 : 2: with 4 : 16 makes 32 : 2",
        "  D 1 : 1@tp: of one step, dropped",
        "  D 2 : 1: with 32 : 2 makes 64 : 1",
        "  R 3 : 1@dp: stays",
        "  R 2 : 3@dp: with 3 : 1@dp makes 6 : 1@dp",
        "  R 2 : -1@tp: becomes 2 : 1@tp, and O moves by -1@tp",
        "result: S[64 : 1] + R[(6, 2) : (1@dp, 1@tp)] + -1@tp",
    ]


@quick
@given(st.tuples(st.integers(1, 9), st.integers(1, 9)), st.sampled_from([{}, {0: "a"}, {1: "b"}, {0: "b", 1: "a"}]))
def test_a_region_is_told_with_its_blocks(shape, dims):
    mesh = Mesh({"a": 3, "b": 2})
    layout = Layout.sharded(shape, mesh, dims)
    for device in range(mesh.size):
        lines = explain(layout, "local_region", shape, mesh, device).splitlines()
        region = layout.local_region(shape, mesh, device)
        assert lines[-1] == f"region: {region[0].start}:{region[0].stop}, {region[1].start}:{region[1].stop}"
        for line, part in zip(lines[2:4], region):
            assert line.endswith(f"{part.start}:{part.stop}")


def test_other_operations_are_recorded_as_they_run():
    lanes, outer = Layout.parse("S[(8, 4, 2) : (4@laneid, 1@laneid, 1)]"), Layout.parse("S[(2, 2) : (1@warpid, 1)]")
    lines = explain(lanes, "tile", outer, (2, 2), (8, 8)).splitlines()
    assert lines[0] == f"tile({lanes}, outer={outer}, outer_shape=(2, 2), inner_shape=(8, 8))"
    assert lines[1].startswith("law: with w[a] the span of this layout on axis a") and "`" not in lines[1]
    assert lines[-1] == f"result: {lanes.tile(outer, (2, 2), (8, 8))}"
    assert f"  span({lanes}, axis_name=laneid) = {lanes.span('laneid')}" in lines
    assert len(lines) == len(set(lines)) > 5
    depths = {len(line) - len(line.lstrip()) for line in lines[2:-1]}
    assert depths <= {2, 4}


def test_operations_of_swizzles_and_static_ones_are_explained_too():
    swizzled = ComposeLayout(3, 3, 3, Layout.parse("S[(8, 64) : (64, 1)]"))
    assert explain(swizzled, "apply", 65).splitlines()[-1] == "result: {73}" == f"result: {{{swizzled.address(65)}}}"
    lines = explain(Layout([]), "replicated", (4, 6), Mesh({"tp": 2})).splitlines()
    assert lines[-1] == "result: S[(4, 6) : (6, 1)] + R[2 : 1@tp]"


def test_a_profiler_is_left_as_it_was():
    layout = Layout.parse("S[(2, 4) : (1@tp, 1)]")
    events = []

    def profiler(*event):
        events.append(event)

    previous = sys.getprofile()
    sys.setprofile(profiler)
    try:
        explain(layout, "group", (2, 4))
        after = sys.getprofile()
        with pytest.raises(LayoutError):
            explain(layout, "group", (3, 4))
        failed = sys.getprofile()
    finally:
        sys.setprofile(previous)
    assert after is profiler and failed is profiler


def test_what_is_no_operation_is_refused():
    layout = Layout.parse("S[4 : 1]")
    for name in ("transmute", "D", "_like", "__str__"):
        with pytest.raises(LayoutError, match=rf"a Layout has no operation '{name}'; it has .*apply, .*tile"):
            explain(layout, name)
    with pytest.raises(LayoutError, match=r"index \(9,\) is not inside \(4,\)"):
        explain(layout, "apply", 9)
