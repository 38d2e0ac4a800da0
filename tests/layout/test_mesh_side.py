"""What the devices of a mesh hold: owners, projections, partial sums and masks, by enumeration."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.layout import Coordinate, Iter, Layout, LayoutError, Mesh

iters = st.builds(Iter, st.integers(1, 3), st.integers(-3, 4).filter(bool), st.sampled_from(["m", "tp", "laneid"]))
layouts = st.builds(
    Layout,
    st.lists(iters, max_size=4),
    st.lists(iters, max_size=2),
    st.dictionaries(st.sampled_from(["m", "dp"]), st.integers(-3, 3), max_size=2),
)
quick = settings(derandomize=True, max_examples=100, deadline=None)


@st.composite
def shardings(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=2)))
    mesh = Mesh({name: draw(st.integers(1, 4)) for name in ("tp", "dp")})
    cut = draw(st.permutations(range(len(shape))))[: draw(st.integers(0, 2))]
    return shape, mesh, dict(zip(cut, draw(st.permutations(mesh.names))))


@quick
@given(layouts, st.sets(st.sampled_from(["m", "tp", "laneid", "dp"])))
def test_a_projection_is_the_map_with_the_other_axes_left_out(layout, axes):
    part = layout.project(axes)
    extents = [it.extent for it in layout.D]
    for digits in np.ndindex(*extents):
        kept = [d for d, it in zip(digits, layout.D) if it.axis in axes]
        there = part.apply(*kept, shape=[it.extent for it in part.D]) if kept else part.apply(0)
        whole = layout.apply(*digits, shape=extents) if extents else layout.apply(0)
        assert there == {Coordinate({a: v for a, v in p.items() if a in axes}) for p in whole}


@quick
@given(shardings())
def test_the_owners_of_an_element_are_the_devices_whose_region_has_it(case):
    shape, mesh, dims = case
    layout = Layout.sharded(shape, mesh, dims)
    whole = [mesh[dims[d]] * -(-e // mesh[dims[d]]) if d in dims else e for d, e in enumerate(shape)]
    regions = [layout.local_region(shape, mesh, device) for device in range(mesh.size)]
    for index in np.ndindex(*shape):
        holders = [d for d, region in enumerate(regions) if all(s.start <= i < s.stop for i, s in zip(index, region))]
        assert layout.owner(*index, shape=whole, mesh=mesh) == tuple(holders)


@quick
@given(shardings())
def test_a_mask_is_true_on_as_much_as_the_region_has(case):
    shape, mesh, dims = case
    layout = Layout.sharded(shape, mesh, dims)
    covered = np.zeros(shape, int)
    for device in range(mesh.size):
        inside = layout.mask(shape, mesh, device)
        region = layout.local_region(shape, mesh, device)
        assert inside.shape == layout.local_shape(shape, mesh) and inside.dtype == bool
        block = np.full(inside.shape, -1)
        block[inside] = np.arange(inside.sum())
        assert inside.sum() == covered[region].size
        assert (block[tuple(slice(s.stop - s.start) for s in region)].reshape(-1) == np.arange(inside.sum())).all()
        covered[region] += 1
    assert covered.min() >= 1


@quick
@given(shardings())
def test_a_partial_sum_is_a_leading_dimension_of_addends(case):
    shape, mesh, dims = case
    axis = next((name for name in mesh.names if name not in dims.values()), None)
    if axis is None:
        return
    layout = Layout.partial(shape, mesh, axis, dims)
    addends = (mesh[axis], *shape)
    assert layout.local_shape(addends, mesh) == (1, *Layout.sharded(shape, mesh, dims).local_shape(shape, mesh))
    data = np.random.default_rng(0).random(addends)
    total = np.zeros(shape)
    for device in range(mesh.size):
        first, *rest = layout.local_region(addends, mesh, device)
        others = [mesh.coords(device)[n] for n in mesh.names if n != axis and n not in dims.values()]
        if first.stop > first.start and not any(others):
            assert (first.start, first.stop) == (mesh.coords(device)[axis], mesh.coords(device)[axis] + 1)
            total[tuple(rest)] += data[(first, *rest)].sum(axis=0)
    assert np.allclose(total, data.sum(axis=0))


MESH = Mesh({"tp": 4, "dp": 2})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x.project("tp"), "axes must be a collection of names"),
        (lambda x: x.project(["t p"]), "an axis in axes must be an ASCII identifier"),
        (lambda x: x.owner(0, mesh=Mesh({"dp": 2})), "names mesh axis 'tp', and mesh dp=2 has dp"),
        (lambda x: x.owner(99, mesh=MESH), "is not inside"),
        (lambda x: Layout.parse("S[8 : 1@tp]").owner(5, mesh=MESH), r"coords\['tp'\] must be in \[0, 4\)"),
        (lambda x: x.mask((4, 8), MESH, 9), "device must be in"),
        (lambda x: Layout.partial((4, 8), MESH, "pp"), "unknown mesh axis 'pp'"),
        (lambda x: Layout.partial((4, 8), MESH, "tp", {0: "tp"}), "mesh axis 'tp' can cut one dimension only"),
        (lambda x: Layout.partial((4, 8), MESH, "tp", [0]), "dims must be a mapping from dimension to mesh axis"),
        (lambda x: Layout.partial((4, 8), MESH, "tp", {-1: "dp"}), "a dimension in dims must be at least 0, not -1"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(LayoutError, match=message):
        call(Layout.parse("S[(4, 8) : (1@tp, 1)] + R[2 : 1@dp]"))
