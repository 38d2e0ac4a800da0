"""Redistribution: plans do what they say on arrays, none is cheaper, and what is refused."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.layout import Layout, LayoutError, Mesh
from tvm_axe.layout.dtypes import dtype_bits
from tvm_axe.layout.placement import Placement
from tvm_axe.layout.redistributing import Link
from tvm_axe.layout.redistributing import plan_redistribution as plan_of

quick = settings(derandomize=True, max_examples=120, deadline=None)
AXES = "abc"


def placements(mesh, dims):
    """Every placement on `mesh` of a tensor with `dims` dimensions."""
    axes = [axis for axis, size in mesh.axes.items() if size > 1]
    for roles in itertools.product([-2, -1, *range(dims)], repeat=len(axes)):  # -2: replicas, -1: a sum, or a dimension
        partial = frozenset(axis for axis, role in zip(axes, roles) if role == -1)
        cutting = [[axis for axis, role in zip(axes, roles) if role == dim] for dim in range(dims)]
        for cuts in itertools.product(*map(itertools.permutations, cutting)):
            yield Placement(cuts, partial)


# ---- plans, carried out on one array a device ----------------------------------------------------------------------


def grown(array, dim, extent):
    """`array` with dimension `dim` grown to `extent`, or cut down to it; what is new is poison."""
    shape = [*array.shape]
    shape[dim] = extent
    result = np.full(shape, np.nan)
    both = tuple(slice(0, min(old, new)) for old, new in zip(array.shape, shape))
    result[both] = array[both]
    return result


def carry_out(plan, arrays):
    """The arrays after all the steps of a plan, each of the local shape of its placement."""
    mesh = plan.mesh
    for step in plan.steps:
        local = step.after.local_shape(plan.shape, mesh)
        before = arrays
        if step.kind == "permute":
            arrays = [before[source] for source in step.sources(mesh)]
            continue
        (axis,) = step.axes

        def block(array, rank):
            return np.split(grown(array, step.cut, mesh[axis] * local[step.cut]), mesh[axis], step.cut)[rank]  # noqa: B023

        arrays = []
        for device in range(mesh.size):
            group, rank = [before[peer] for peer in mesh.group(device, axis)], mesh.coords(device)[axis]
            if step.kind == "all_gather":
                result = grown(np.concatenate(group, step.gathered), step.gathered, local[step.gathered])
            elif step.kind == "reduce_scatter":
                result = block(sum(group), rank)
            elif step.kind == "all_reduce":
                result = sum(group)
            elif step.kind == "all_to_all":
                joined = np.concatenate([block(array, rank) for array in group], step.gathered)
                result = grown(joined, step.gathered, local[step.gathered])
            elif step.kind == "slice":
                result = block(before[device], rank)
            elif step.gathered is None:
                result = before[device] if rank == 0 else np.zeros_like(before[device])
            else:
                parts = [array if peer == rank else np.zeros_like(array) for peer, array in enumerate(group)]
                result = grown(np.concatenate(parts, step.gathered), step.gathered, local[step.gathered])
            arrays.append(result)
        assert {array.shape for array in arrays} == {local}
    return arrays


def places(layout, place, shape, mesh):
    """By the layout's own map: for each element, the (term, device, address) triples where it is held."""
    local = place.local_shape(shape, mesh)
    terms = math.prod(mesh[axis] for axis in place.partial)
    padded = tuple(extent * math.prod(mesh[a] for a in cut) for extent, cut in zip(local, place.cuts))
    for term in range(terms):
        for index in np.ndindex(*shape):
            for point in layout.apply(term, *index, shape=(terms, *padded)):
                yield index, term, mesh.device({axis: point[axis] for axis in mesh.names}), point["m"]


@st.composite
def moving(draw):
    """A mesh, a shape, and two placements that fit."""
    mesh = Mesh({axis: draw(st.integers(1, 3)) for axis in AXES[: draw(st.integers(1, 3))]})
    shape = tuple(draw(st.lists(st.sampled_from([2, 3, 4, 5, 6, 12]), min_size=1, max_size=3)))
    fitting = [place for place in placements(mesh, len(shape)) if place.fits(shape, mesh)]
    return mesh, shape, draw(st.sampled_from(fitting)), draw(st.sampled_from(fitting))


@quick
@given(moving(), st.integers(0, 2**32 - 1))
def test_a_plan_leaves_every_device_with_what_the_layout_says(case, seed):
    mesh, shape, src, dst = case
    start, goal = src.layout(shape, mesh), dst.layout(shape, mesh)
    plan = plan_of(start, goal, mesh, "float64", shape)
    rng = np.random.default_rng(seed)
    terms = rng.standard_normal((math.prod(mesh[axis] for axis in src.partial), *shape))
    arrays = [np.full(src.local_shape(shape, mesh), np.nan) for _ in range(mesh.size)]
    for index, term, device, address in places(start, src, shape, mesh):
        arrays[device].reshape(-1)[address] = terms[(term, *index)]
    arrays = carry_out(plan, arrays)
    found = np.zeros((mesh.size, *shape))
    copies = np.zeros(shape, int)
    for index, _, device, address in places(goal, dst, shape, mesh):
        found[(device, *index)] = arrays[device].reshape(-1)[address]
        copies[index] += 1
    held = math.prod(size for axis, size in mesh.axes.items() if axis not in sum(dst.cuts, ()))
    assert (copies == held).all()
    summed = terms.sum(axis=0)
    for coords in itertools.product(*(range(mesh[axis]) if axis not in dst.partial else [0] for axis in mesh.names)):
        group = [mesh.device(dict(zip(mesh.names, coords)))]
        for axis in dst.partial:
            group = [peer for device in group for peer in mesh.group(device, axis)]
        region = tuple(
            slice(number * size, (number + 1) * size)
            for number, size in zip(dst.blocks(mesh, group[0]), dst.local_shape(shape, mesh))
        )
        np.testing.assert_allclose(found[group].sum(axis=0)[region], summed[region], rtol=1e-12, atol=1e-12)
    steps = [src, *(step.after for step in plan.steps)]
    assert [step.before for step in plan.steps] == steps[:-1] and steps[-1] == dst
    assert all(step.layout == step.after.layout(shape, mesh) for step in plan.steps)


# ---- no plan is cheaper --------------------------------------------------------------------------------------------


def one_step(src, dst, shape, mesh, links, sums):
    """(seconds, bytes) of the one step that leads from one placement to another, by what differs between them."""

    def role(place, axis):
        found = [(dim, len(cut) - cut.index(axis)) for dim, cut in enumerate(place.cuts) if axis in cut]
        return found[0] if found else "sum" if axis in place.partial else "copies"

    def digit(place, axis):
        cuts = [(dim, cut[cut.index(axis) :]) for dim, cut in enumerate(place.cuts) if axis in cut]
        return [(dim, math.prod(mesh[minor] for minor in cut)) for dim, cut in cuts] or role(place, axis)

    def without(place, axis):
        return [[a for a in cut if a != axis] for cut in place.cuts], place.partial - {axis}

    def holds(place, device, dim):
        size, number = place.local_shape(shape, mesh)[dim], place.blocks(mesh, device)[dim]
        return {i for i in range(shape[dim]) if i // size == number}

    def elements(*of_dims):
        return math.prod(map(len, of_dims))

    def received(terms):
        """Bytes that the busiest device takes of others, where the terms of all that it is to hold are summed."""
        found = []
        for device in range(mesh.size):
            wanted = [holds(dst, device, dim) for dim in range(len(shape))]
            kept = [part & holds(src, device, dim) for dim, part in enumerate(wanted)]
            found.append(terms * elements(*wanted) - elements(*kept))
        return 4 * max(found)

    axes = [axis for axis, size in mesh.axes.items() if size > 1]
    for axis in axes:
        before, after, n, link = role(src, axis), role(dst, axis), mesh[axis], links[axis]
        if before == after or without(src, axis) != without(dst, axis):
            continue
        kinds = [kind if isinstance(kind, str) else "minor" if kind[1] == 1 else "major" for kind in (before, after)]
        if kinds == ["sum", "copies"]:
            size = math.prod(src.local_shape(shape, mesh))
            part = min(size, -(-size // 64 // n) * 64 if size % 64 == 0 else -(-(size // 64 + 1) // n) * 64)
            hops, total = 2 * (n - 1), 4 * ((n - 1) * part + size - part)
        elif kinds == ["sum", "minor"]:
            hops, total = n - 1, received(n)
        elif kinds == ["minor", "copies"] or (kinds == ["minor", "minor"] and before[0] != after[0]):
            hops, total = n - 1, received(1)
        elif kinds == ["copies", "minor"] or (kinds in (["minor", "sum"], ["copies", "sum"]) and axis in sums):
            hops, total = 0, 0
        else:
            continue
        return hops * link.latency + total / link.bandwidth, total
    if src.partial == dst.partial and src.local_shape(shape, mesh) == dst.local_shape(shape, mesh):
        crossed = [links[axis] for axis in axes if digit(src, axis) != digit(dst, axis)]
        if crossed:
            # Whoever has to take another block than its own takes the whole; the first block is cut by no padding.
            old = received(1)
            return sum(link.latency for link in crossed) + old / min(link.bandwidth for link in crossed), old
    return math.inf, math.inf


SLOW, FAST = Link(latency=2e-5, bandwidth=1e9), Link(latency=1e-6, bandwidth=5e10)


@pytest.mark.parametrize(
    ("sizes", "shape", "links"),
    [
        ((4,), (8,), (SLOW,)),
        ((4,), (6, 5), (FAST,)),
        ((4,), (8, 4, 4), (SLOW,)),
        ((2, 2), (12,), (SLOW, FAST)),
        ((2, 2), (1200, 800), (SLOW, FAST)),
        ((2, 2), (12, 8), (FAST, FAST)),
        ((2, 2), (400, 8, 4), (FAST, SLOW)),
        ((2, 3), (12,), (FAST, SLOW)),
        ((2, 3), (1200, 1800), (FAST, SLOW)),
        ((2, 3), (4, 300), (Link(0.0, 1e9), FAST)),
        ((2, 3), (7, 5, 6), (SLOW, FAST)),
    ],
)
def test_exhaustive_search_finds_nothing_cheaper(sizes, shape, links):
    mesh = Mesh(dict(zip(AXES, sizes)))
    links = dict(zip(AXES, links))
    states = [place for place in placements(mesh, len(shape)) if place.fits(shape, mesh)]
    layouts = [place.layout(shape, mesh) for place in states]
    searched = {}
    for sums in {place.partial for place in states}:
        table = np.array([[one_step(s, t, shape, mesh, links, sums)[0] for t in states] for s in states])
        np.fill_diagonal(table, 0)
        for via in range(len(states)):
            table = np.minimum(table, table[:, via, None] + table[None, via, :])
        searched[sums] = table
    assert all(np.isfinite(table[:, [t.partial == sums for t in states]]).all() for sums, table in searched.items())
    for (i, src), (j, dst) in itertools.product(enumerate(states), repeat=2):
        plan = plan_of(layouts[i], layouts[j], mesh, "float32", shape, links)
        assert plan.seconds == pytest.approx(searched[dst.partial][i, j], rel=1e-12, abs=1e-18)
        taken = [one_step(step.before, step.after, shape, mesh, links, dst.partial) for step in plan.steps]
        assert [(step.seconds, step.bytes) for step in plan.steps] == [pytest.approx(t, rel=1e-12) for t in taken]
        assert (plan.steps == ()) == (src == dst)


@pytest.mark.parametrize("sums", [frozenset(), frozenset("b")])
@pytest.mark.parametrize("shape", [(8, 16), (400, 800)])
def test_exhaustive_search_finds_nothing_cheaper_on_three_axes(shape, sums):
    """Every 37th pair of placements: there are too many for all of them."""
    mesh, links = Mesh({"a": 2, "b": 2, "c": 2}), {"a": SLOW, "b": FAST, "c": Link(latency=5e-6, bandwidth=1e10)}
    states = [p for p in placements(mesh, 2) if p.fits(shape, mesh) and p.partial <= sums | {"a"}]
    table = np.array([[one_step(s, t, shape, mesh, links, sums)[0] for t in states] for s in states])
    np.fill_diagonal(table, 0)
    for via in range(len(states)):
        table = np.minimum(table, table[:, via, None] + table[None, via, :])
    pairs = [(i, j) for i in range(len(states)) for j, dst in enumerate(states) if dst.partial == sums]
    for i, j in pairs[::37]:
        src, dst = states[i].layout(shape, mesh), states[j].layout(shape, mesh)
        plan = plan_of(src, dst, mesh, "float32", shape, links)
        assert plan.seconds == pytest.approx(table[i, j], rel=1e-12, abs=1e-18)
        assert (plan.steps == ()) == (i == j)


def test_bytes_are_the_closed_forms():
    mesh, shape = Mesh({"tp": 4}), (512, 768)
    whole = 4 * 512 * 768
    copies, terms = Placement(((), ())), Placement(((), ()), frozenset({"tp"}))
    rows, columns = Placement((("tp",), ())), Placement(((), ("tp",)))
    for src, dst, kind, size in [
        (terms, copies, "all_reduce", 2 * 3 * whole // 4),
        (terms, rows, "reduce_scatter", 3 * whole // 4),
        (rows, copies, "all_gather", 3 * whole // 4),
        (rows, columns, "all_to_all", 3 * whole // 16),
        (copies, rows, "slice", 0),
        (copies, terms, "mask", 0),
        (rows, terms, "mask", 0),
    ]:
        plan = plan_of(src.layout(shape, mesh), dst.layout(shape, mesh), mesh, "float32", shape)
        assert [step.kind for step in plan.steps] == [kind] and plan.bytes == size


def test_a_fast_axis_carries_what_a_slow_one_would():
    """A sum over the slow axis of what the fast one holds twice: halve it, sum it, join it again."""
    mesh, shape = Mesh({"slow": 2, "fast": 2}), (1024, 1024)
    src, dst = Placement(((), ()), frozenset({"slow"})), Placement(((), ()))
    start, goal = src.layout(shape, mesh), dst.layout(shape, mesh)
    plan = plan_of(start, goal, mesh, "float32", shape, {"slow": SLOW, "fast": FAST})
    assert [(step.kind, step.axes) for step in plan.steps] == [
        ("slice", ("fast",)),
        ("all_reduce", ("slow",)),
        ("all_gather", ("fast",)),
    ]
    plain = plan_of(start, goal, mesh, "float32", shape, SLOW)
    assert [step.kind for step in plain.steps] == ["all_reduce"]


def test_explain_says_it_all():
    mesh, shape = Mesh({"dp": 2, "tp": 4}), (512, 768)
    src = Placement(((), ()), frozenset({"tp"})).layout(shape, mesh)
    dst = Placement((("tp", "dp"), ())).layout(shape, mesh)
    plan = plan_of(src, dst, mesh, "float32", shape, Link(latency=1e-5, bandwidth=1e11))
    assert plan.explain().splitlines() == [
        "float32 512x768 on dp=2,tp=4",
        "   S[(4, 512, 768) : (1@tp, 768, 1)] + R[2 : 1@dp]",
        "1. reduce_scatter over tp; cuts dimension 0: 1,179,648 bytes, 41.8 us",
        "   S[(4, 128, 768) : (1@tp, 768, 1)] + R[2 : 1@dp]",
        "2. slice over dp; cuts dimension 0: local",
        "   S[(4, 2, 64, 768) : (1@tp, 1@dp, 768, 1)]",
        "total: 1,179,648 bytes a device, 41.8 us",
    ]
    assert plan.seconds == pytest.approx(3 * (1e-5 + 128 * 768 * 4 / 1e11))
    assert plan_of(src, src, mesh, "float32", shape).explain().splitlines()[1:] == [
        f"   {src}",
        "total: 0 bytes a device, 0.0 us",
    ]


def test_only_a_permute_has_sources():
    mesh, shape = Mesh({"dp": 2, "tp": 2}), (8,)
    layouts = [Placement((cut,)).layout(shape, mesh) for cut in (("dp", "tp"), ("tp", "dp"), ("dp",))]
    (swap,) = plan_of(layouts[0], layouts[1], mesh, "int8", shape).steps
    assert (swap.kind, swap.axes, swap.sources(mesh), swap.bytes) == ("permute", ("dp", "tp"), (0, 2, 1, 3), 2)
    (gather,) = plan_of(layouts[0], layouts[2], mesh, "int8", shape).steps
    with pytest.raises(LayoutError, match="only a permute has one source for each device, not all_gather"):
        gather.sources(mesh)


# ---- placements ----------------------------------------------------------------------------------------------------


@quick
@given(moving())
def test_a_placement_is_read_back_from_its_layout(case):
    mesh, shape, place, _ = case
    layout = place.layout(shape, mesh)
    assert Placement.of(layout, shape, mesh) == place
    assert Placement.of(layout.canonicalize(), shape, mesh) == place
    assert Placement.of(Layout.parse(str(layout)), shape, mesh) == place


def test_placements_agree_with_block_shardings():
    mesh = Mesh({"tp": 4, "dp": 2, "one": 1})
    for dims in ({}, {0: "tp"}, {1: "dp"}, {0: "dp", 1: "tp"}, {0: "one"}):
        layout = Layout.sharded((10, 7), mesh, dims)
        place = Placement.of(layout, (10, 7), mesh)
        assert place.cuts == tuple((dims[d],) if dims.get(d, "one") != "one" else () for d in range(2))
        assert place.layout((10, 7), mesh) == layout
        assert place.local_shape((10, 7), mesh) == layout.local_shape((10, 7), mesh)


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("S[(2, 30) : (1@tp, 1)]", (64,), "its extents multiply to 60, and the shape to 64, which .* makes 64 or 128"),
        ("S[(2, 32) : (1@pp, 1)]", (64,), "names mesh axis 'pp', and mesh tp=2 has tp"),
        ("S[(2, 32) : (1@tp, 2)]", (64,), r"row-major on the device, such as S\[\(2, 32\) : \(1@tp, 1\)\]"),
        ("S[(32, 2) : (1, 1@tp)]", (64,), "blocks are contiguous in their dimension"),
        ("S[(2, 32) : (1@tp, 1@laneid)]", (64,), "32 : 1@laneid is on axis 'laneid', and only mesh axes"),
        ("S[(2, 32) : (1@tp, 1)] + 5", (64,), r"it has the offset \{'m': 5\}, and blocks start at 0"),
        ("S[64 : 1]", (64,), "mesh axis 'tp' holds nothing, and needs the one iter 2 : 1@tp in D or in R"),
        ("S[(2, 32) : (1@tp, 1)] + R[2 : 1@tp]", (64,), "mesh axis 'tp' holds 2 : 1@tp, 2 : 1@tp"),
        ("S[(2, 32) : (1@tp, 1)] + R[2 : 32]", (64,), "it has replicas in linear memory"),
        ("S[(2, 8) : (1@tp, 1)]", (1, 8), "may hold a sum over 'tp' of shape .* leave out the dimensions of extent 1"),
        ("S[2 : 2@tp]", (), "mesh axis 'tp' holds 2 : 2@tp"),
        ("S[(2, 32) : (1@tp, 1)]", (64, 0), r"shape\[1\] must be at least 1, not 0"),
    ],
)
def test_what_is_not_in_blocks_is_exchanged_or_refused_with_the_reason(text, shape, message):
    exchanged = text in ("S[(2, 32) : (1@tp, 2)]", "S[(32, 2) : (1, 1@tp)]", "S[(2, 32) : (1@tp, 1)] + 5", "S[64 : 1]")
    mesh = Mesh({"tp": 2})
    layout = Layout.parse(text)
    good = Layout.replicated((64,), mesh)
    with pytest.raises(LayoutError, match=message):
        Placement.of(layout, shape, mesh)
    if not exchanged:
        for src, dst in ((layout, good), (good, layout)):
            with pytest.raises(LayoutError):
                plan_of(src, dst, mesh, "float32", shape)
        return
    (step,) = plan_of(layout, good, mesh, "float32", shape).steps
    assert (step.kind, step.bytes, step.layout) == ("exchange", 4 * (32 if "tp" in text else 64), good)


def test_several_axes_must_divide_the_dimension_that_they_cut():
    mesh = Mesh({"a": 2, "b": 3})
    layout = Layout.parse("S[(2, 3, 2) : (1@a, 1@b, 1)]")
    assert Placement.of(layout, (12,), mesh).cuts == (("a", "b"),)
    for shape in [(7,), (11,)]:
        with pytest.raises(LayoutError, match=f"dimension 0 of extent {shape[0]} into 6 blocks, which must"):
            Placement.of(layout, shape, mesh)
        with pytest.raises(LayoutError, match="mesh axes a, b cut dimension 0"):
            Placement((("a", "b"),)).layout(shape, mesh)


def test_a_scalar_is_summed():
    mesh = Mesh({"tp": 3})
    terms, copies = Placement((), frozenset({"tp"})), Placement(())
    plan = plan_of(terms.layout((), mesh), copies.layout((), mesh), mesh, "float64", ())
    assert [(step.kind, step.bytes) for step in plan.steps] == [("all_reduce", 16)]
    assert plan.explain().startswith("float64 a scalar on tp=3")


def test_malformed_placements_are_refused():
    mesh = Mesh({"tp": 2})
    with pytest.raises(LayoutError, match="mesh axis 'tp' can cut one dimension or hold one sum, once"):
        Placement((("tp",), ("tp",)))
    with pytest.raises(LayoutError, match="mesh axis 'tp' can cut one dimension or hold one sum, once"):
        Placement((("tp",),), frozenset({"tp"}))
    with pytest.raises(LayoutError, match="unknown mesh axis 'pp'; mesh tp=2 has tp"):
        Placement((("pp",),)).layout((4,), mesh)
    with pytest.raises(LayoutError, match=r"shape \(4,\) has 1 dimensions, and the placement cuts 2"):
        Placement(((), ())).layout((4,), mesh)


@pytest.mark.parametrize(
    ("link", "message"),
    [
        (3.0, "link must be a Link, or a mapping from mesh axis to Link, not 3.0"),
        ({"tp": 1.0}, "link must be a Link, or a mapping"),
        ({"tp": Link(), "pp": Link()}, "unknown mesh axis 'pp'"),
        ({"tp": Link()}, "link has nothing for mesh axis 'dp'; mesh tp=2,dp=2,one=1 needs one for tp, dp"),
    ],
)
def test_malformed_link_models_are_refused(link, message):
    mesh = Mesh({"tp": 2, "dp": 2, "one": 1})
    layout = Layout.replicated((4,), mesh)
    with pytest.raises(LayoutError, match=message):
        plan_of(layout, layout, mesh, "float32", (4,), link)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1e-6, 1e9), "a link's latency must be a finite number at least 0, not -1e-06"),
        ((1e-6, 0), "a link's bandwidth must be a finite number above 0, not 0"),
        ((math.nan, 1e9), "a link's latency must be a finite number at least 0, not nan"),
        ((0, math.inf), "a link's bandwidth must be a finite number above 0, not inf"),
        ((0, True), "a link's bandwidth must be a finite number above 0, not True"),
        (("fast", 1e9), "a link's latency must be a finite number at least 0, not 'fast'"),
    ],
)
def test_malformed_links_are_refused(arguments, message):
    with pytest.raises(LayoutError, match=message):
        Link(*arguments)


def test_sizes_of_types():
    names = {"float32": 32, "int8": 8, "uint64": 64, "bfloat16": 16, "float8_e5m2": 8, "float4_e2m1fn": 4, "int4x8": 32}
    assert {name: dtype_bits(name) for name in names} == names
    mesh = Mesh({"tp": 2})
    rows, copies = Layout.sharded((10,), mesh, {0: "tp"}), Layout.replicated((10,), mesh)
    assert plan_of(rows, copies, mesh, "int4", (10,)).bytes == 3
    for bad in ("handle", "float", "f32", "int0", "float32 ", "", None, np.float32):
        with pytest.raises(LayoutError, match="dtype must be the name of a numeric type"):
            plan_of(copies, copies, mesh, bad, (10,))
