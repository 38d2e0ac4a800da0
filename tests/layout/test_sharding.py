"""Block shardings on a mesh: what each device holds, by enumeration of the layout's points, and what is refused."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.layout import Layout, LayoutError, Mesh

quick = settings(derandomize=True, max_examples=60, deadline=None)


@st.composite
def shardings(draw, least=1, most=6):
    """A shape, a mesh, and which mesh axis cuts which dimension."""
    shape = tuple(draw(st.lists(st.integers(least, most), min_size=1, max_size=3)))
    mesh = Mesh({name: draw(st.integers(1, 4)) for name in draw(st.permutations(["tp", "dp"]))})
    cut = draw(st.permutations(range(len(shape))))[: draw(st.integers(0, min(2, len(shape))))]
    return shape, mesh, dict(zip(cut, draw(st.permutations(mesh.names))))


def padded(shape, mesh, dims):
    return tuple(mesh[dims[d]] * math.ceil(e / mesh[dims[d]]) if d in dims else e for d, e in enumerate(shape))


@quick
@given(shardings())
def test_a_device_holds_an_element_iff_it_is_in_its_region_at_its_row_major_address(case):
    shape, mesh, dims = case
    layout = Layout.sharded(shape, mesh, dims)
    local = layout.local_shape(shape, mesh)
    regions = [layout.local_region(shape, mesh, device) for device in range(mesh.size)]
    for index in np.ndindex(*shape):
        held = {}
        for point in layout.apply(*index, shape=padded(shape, mesh, dims)):
            assert set(point) <= {*mesh.names, "m"}
            held[mesh.device({name: point[name] for name in mesh.names})] = point["m"]
        for device, region in enumerate(regions):
            inside = all(s.start <= i < s.stop for i, s in zip(index, region))
            assert inside == (device in held)
            if inside:
                position = [i - s.start for i, s in zip(index, region)]
                assert held[device] == np.ravel_multi_index(position, local)


@quick
@given(shardings())
def test_blocks_have_the_local_shape_and_are_clipped(case):
    shape, mesh, dims = case
    layout = Layout.sharded(shape, mesh, dims)
    local = layout.local_shape(shape, mesh)
    assert local == tuple(e // (mesh[dims[d]] if d in dims else 1) for d, e in enumerate(padded(shape, mesh, dims)))
    assert layout.size() == math.prod(padded(shape, mesh, dims))
    data = np.arange(math.prod(shape)).reshape(shape)
    count = np.zeros(shape, int)
    for device in range(mesh.size):
        region = layout.local_region(shape, mesh, device)
        assert all(0 <= s.start <= s.stop <= e and s.stop - s.start <= b for s, e, b in zip(region, shape, local))
        assert data[region].size <= math.prod(local)
        count[region] += 1
    replicas = math.prod(size for name, size in mesh.axes.items() if name not in dims.values())
    assert (count == replicas).all()


@quick
@given(shardings(least=2, most=7))
def test_sharding_is_the_inverse_of_sharded(case):
    shape, mesh, dims = case
    layout = Layout.sharded(shape, mesh, dims)
    cuts = {dim: axis for dim, axis in dims.items() if mesh[axis] > 1}
    assert layout.sharding(shape, mesh) == cuts
    assert layout.canonicalize().sharding(shape, mesh) == cuts
    assert Layout.sharded(shape, mesh, cuts) == layout


@quick
@given(shardings(most=2))
def test_sharding_of_unit_dimensions_gives_the_same_map(case):
    shape, mesh, dims = case
    layout = Layout.sharded(shape, mesh, dims)
    found = layout.sharding(shape, mesh)
    assert Layout.sharded(shape, mesh, found).canonicalize() == layout.canonicalize()


@quick
@given(shardings())
def test_the_text_keeps_what_each_device_holds(case):
    shape, mesh, dims = case
    layout = Layout.sharded(shape, mesh, dims)
    read = Layout.parse(str(layout))
    for device in range(mesh.size):
        assert read.local_region(shape, mesh, device) == layout.local_region(shape, mesh, device)


def test_replicated_is_sharded_over_nothing():
    mesh = Mesh({"tp": 2, "dp": 3, "one": 1})
    layout = Layout.replicated((4, 6), mesh)
    assert str(layout) == "S[(4, 6) : (6, 1)] + R[(3, 2) : (1@dp, 1@tp)]"
    assert layout == Layout.sharded((4, 6), mesh, {}) == Layout.sharded((4, 6), mesh, {0: "one"})
    assert layout.sharding((4, 6), mesh) == {}
    assert [layout.local_region((4, 6), mesh, d) for d in range(6)] == [(slice(0, 4), slice(0, 6))] * 6
    assert str(Layout.replicated((), mesh)) == "S[() : ()] + R[(3, 2) : (1@dp, 1@tp)]"


def test_sharding_looks_at_the_map_and_not_at_the_iters():
    mesh = Mesh({"tp": 2, "dp": 4})
    layout = Layout.parse("S[(2, 4, 1, 2) : (1@tp, 2, 7@dp, 1)] + R[(2, 2) : (-1@dp, 2@dp)] + 1@dp")
    assert layout.sharding((2, 8), mesh) == {0: "tp"}


def test_uneven_extents_leave_the_last_devices_less_or_nothing():
    mesh = Mesh({"tp": 4})
    layout = Layout.sharded((5, 3), mesh, {0: "tp"})
    assert str(layout) == "S[(4, 2, 3) : (1@tp, 3, 1)]"
    assert layout.local_shape((5, 3), mesh) == (2, 3)
    rows = [layout.local_region((5, 3), mesh, d)[0] for d in range(4)]
    assert rows == [slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 5)]


def test_a_mesh_axis_of_size_one_cuts_nothing():
    mesh = Mesh({"tp": 1})
    layout = Layout.parse("S[(1, 8) : (1@tp, 1)] + R[1 : 1@tp]")
    assert layout.sharding((8,), mesh) == {}
    assert layout.local_region((8,), mesh, 0) == (slice(0, 8),)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("S[(32, 2) : (1, 1@tp)]", r"such as S\[\(2, 32\) : \(1@tp, 1\)\]"),
        ("S[(2, 2, 16) : (16, 1@tp, 1)]", "blocks are contiguous in their dimension"),
        ("S[(2, 32) : (1@tp, -1)] + 31", r"it has the offset \{'m': 31\}"),
        ("S[(2, 32) : (1@tp, 1)] + R[2 : -8] + 8", "it has replicas in linear memory"),
        ("S[(2, 32) : (1@tp, 1)] + 1@tp", r"it has the offset \{'tp': 1\}"),
        ("S[(2, 32) : (1@tp, 2)]", "row-major on the device"),
        ("S[(2, 32) : (1@tp, 1)] + R[2 : 32]", "it has replicas in linear memory, and a device holds a block once"),
        ("S[(2, 32) : (-1@tp, 1)]", "mesh axis 'tp' holds 2 : -1@tp, and needs the one iter 2 : 1@tp in D or in R"),
        ("S[64 : 1]", "mesh axis 'tp' holds nothing, and needs the one iter 2 : 1@tp in D or in R"),
        ("S[(4, 16) : (1@tp, 1)]", "mesh axis 'tp' holds 4 : 1@tp, and needs the one iter 2 : 1@tp"),
        ("S[(2, 32) : (1@tp, 1)] + R[2 : 1@tp]", "mesh axis 'tp' holds 2 : 1@tp, 2 : 1@tp, and needs the one iter"),
        ("S[(2, 32) : (1@tp, 1@laneid)]", "32 : 1@laneid is on axis 'laneid', and only mesh axes and linear memory"),
        ("S[(2, 31) : (1@tp, 1)]", "its extents multiply to 62, and the shape padded to whole blocks has 64 elements"),
    ],
)
def test_what_is_not_a_block_sharding_is_refused_with_the_reason(text, reason):
    mesh = Mesh({"tp": 2})
    layout = Layout.parse(text)
    for ask in (layout.sharding, layout.local_shape, lambda shape, mesh: layout.local_region(shape, mesh, 0)):
        with pytest.raises(LayoutError, match=reason) as error:
            ask((64,), mesh)
        assert str(layout) in str(error.value) and "shape (64,) on mesh tp=2" in str(error.value)


def test_more_mesh_axes_than_dimensions_are_refused():
    mesh = Mesh({"tp": 2, "dp": 2})
    layout = Layout.parse("S[(2, 2, 2) : (1@tp, 1@dp, 1)]")
    with pytest.raises(LayoutError, match="D has more mesh axes than the shape has dimensions"):
        layout.sharding((8,), mesh)
    with pytest.raises(LayoutError, match="D has more mesh axes than the shape has dimensions"):
        Layout.parse("S[2 : 1@tp] + R[2 : 1@dp]").sharding((), mesh)


@pytest.mark.parametrize(
    "text", ["S[(2, 2) : (1@pp, 1)]", "S[4 : 1] + R[2 : 1@pp]", "S[4 : 1] + 1@pp", "S[(4, 1) : (1, 1@pp)]"]
)
def test_a_mesh_axis_that_the_mesh_lacks_is_refused(text):
    with pytest.raises(LayoutError, match="names mesh axis 'pp', and mesh tp=2,dp=2 has tp, dp"):
        Layout.parse(text).sharding((4,), Mesh({"tp": 2, "dp": 2}))


@pytest.mark.parametrize(
    ("shape", "dims", "message"),
    [
        ((4, 4), {2: "tp"}, r"dims: dimension 2 is not one of shape \(4, 4\), which has 2"),
        ((4, 4), {-1: "tp"}, "dims: dimension -1 is not one of shape"),
        ((4, 4), {"0": "tp"}, "a dimension in dims must be an int, not '0'"),
        ((4, 4), {0: "pp"}, "unknown mesh axis 'pp'; mesh tp=2 has tp"),
        ((4, 4), {0: "tp", 1: "tp"}, "dims: mesh axis 'tp' can cut one dimension only"),
        ((4, 4), [(0, "tp")], "dims must be a mapping from dimension to mesh axis"),
        ((4, 0), {0: "tp"}, r"shape\[1\] must be at least 1, not 0"),
        ((4, True), {0: "tp"}, r"shape\[1\] must be an int, not True"),
        (4, {0: "tp"}, r"shape must be a sequence of ints such as \(64, 128\), not 4"),
        ("44", {0: "tp"}, "shape must be a sequence of ints"),
    ],
)
def test_malformed_sharding_is_refused(shape, dims, message):
    with pytest.raises(LayoutError, match=message):
        Layout.sharded(shape, Mesh({"tp": 2}), dims)


def test_a_device_outside_the_mesh_is_refused():
    mesh = Mesh({"tp": 2})
    layout = Layout.sharded((4,), mesh, {0: "tp"})
    with pytest.raises(LayoutError, match=r"device must be in \[0, 2\)"):
        layout.local_region((4,), mesh, 2)


def test_every_assignment_of_three_axes_to_three_dimensions_is_told_apart():
    mesh, shape = Mesh({"a": 2, "b": 3, "c": 2}), (4, 7, 5)
    seen = {}
    for count in range(4):
        for cut in itertools.permutations(range(3), count):
            for axes in itertools.combinations(mesh.names, count):
                dims = dict(zip(cut, axes))
                layout = Layout.sharded(shape, mesh, dims)
                assert layout.sharding(shape, mesh) == dims
                seen[layout.canonicalize()] = dims
    assert len(seen) == 1 + 9 + 18 + 6


# ---- Several axes a dimension --------------------------------------------------------------------------------------


@st.composite
def several(draw):
    """A shape, a mesh, and the axes that cut each dimension, the major one first."""
    shape = tuple(draw(st.lists(st.integers(2, 13), min_size=1, max_size=2)))
    mesh = Mesh({name: draw(st.integers(2, 3)) for name in ("x", "y", "z")})
    cuts = [()] * len(shape)
    for axis in draw(st.permutations(mesh.names)):
        dim = draw(st.integers(-1, len(shape) - 1))
        if dim >= 0:
            cuts[dim] += (axis,)
    return shape, mesh, tuple(cuts)


@quick
@given(several())
def test_several_axes_cut_as_one_axis_of_all_their_devices(case):
    """Each device has its block of ceil(extent / devices), and cuts are read back from the map."""
    shape, mesh, cuts = case
    layout = Layout.sharded(shape, mesh, dict(enumerate(cuts)))
    sizes = [math.prod(mesh[axis] for axis in cut) for cut in cuts]
    block = tuple(-(-extent // size) for extent, size in zip(shape, sizes))
    assert layout.local_shape(shape, mesh) == block
    found = layout.cuts(shape, mesh)
    assert Layout.sharded(shape, mesh, dict(enumerate(found))).canonicalize() == layout.canonicalize()
    domain = [size * extent for size, extent in zip(sizes, block)]
    for device in range(mesh.size):
        region = layout.local_region(shape, mesh, device)
        for index in np.ndindex(*shape):
            points = layout.apply(*index, shape=domain)
            inside = all(part.start <= at < part.stop for part, at in zip(region, index))
            here = [point for point in points if mesh.device({a: point[a] for a in mesh.names}) == device]
            assert inside == bool(here)


def test_the_one_axis_of_a_dimension_is_asked_for_in_vain():
    mesh = Mesh({"x": 2, "y": 2})
    layout = Layout.sharded((8, 3), mesh, {0: ("y", "x")})
    assert layout.cuts((8, 3), mesh) == (("y", "x"), ())
    with pytest.raises(LayoutError, match="mesh axes y, x cut dimension 0 together; see `cuts`"):
        layout.sharding((8, 3), mesh)
    with pytest.raises(LayoutError, match="mesh axis 'x' can cut one dimension only"):
        Layout.sharded((8, 3), mesh, {0: ("x", "x")})
