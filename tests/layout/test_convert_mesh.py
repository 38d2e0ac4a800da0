"""To and from the shardings of Relax, PyTorch and JAX; the latter two by stand-ins with their names and attributes.

The packages themselves judge in test_convert_packages.py, where they are installed.
"""

import itertools
from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.layout import Layout, LayoutError, Mesh
from tvm_axe.layout.convert import (
    from_jax_mesh,
    from_partition_spec,
    from_relax_mesh,
    from_relax_placement,
    from_torch_mesh,
    from_torch_placements,
    to_partition_spec,
    to_relax_mesh,
    to_relax_placement,
)
from tvm_axe.layout.convert.by_axis import actions_of, layout_of
from tvm_axe.layout.placement import Placement

Shard, Replicate, Partial = namedtuple("Shard", "dim"), namedtuple("Replicate", ""), namedtuple("Partial", "reduce_op")
MESH = Mesh({"dp": 2, "tp": 4})
quick = settings(derandomize=True, max_examples=120, deadline=None)


@st.composite
def placed(draw, partial=False, in_order=False):
    """A mesh, a shape that its axes divide, and what cuts each dimension."""
    names = draw(st.permutations(["dp", "tp", "pp"]))[: draw(st.integers(1, 3))]
    mesh = Mesh({name: draw(st.integers(1, 3)) for name in names})
    axes = [name for name in draw(st.permutations(names)) if mesh[name] > 1]
    if in_order:
        axes = [name for name in names if mesh[name] > 1]
    rank = draw(st.integers(1, 3))
    cuts = [()] * rank
    sums = set()
    for axis in axes:
        where = draw(st.integers(-1 - partial, rank - 1))
        if where == -2:
            sums.add(axis)
        elif where >= 0:
            cuts[where] += (axis,)
    shape = tuple(draw(st.integers(2, 3)) * int(np.prod([mesh[axis] for axis in cut])) for cut in cuts)
    return mesh, shape, Placement(tuple(cuts), frozenset(sums))


def devices_of_blocks(layout, shape, mesh):
    """For each device what it holds: address -> row-major number of the element."""
    held = {device: {} for device in range(mesh.size)}
    for index in np.ndindex(*shape):
        for point in layout.apply(*map(int, index), shape=shape):
            device = mesh.device({name: point[name] for name in mesh.names})
            held[device][point["m"]] = int(np.ravel_multi_index(index, shape))
    return held


@quick
@given(placed())
def test_a_partition_spec_comes_back_and_is_read_as_blocks(case):
    mesh, shape, placement = case
    layout = placement.layout(shape, mesh)
    spec = to_partition_spec(layout, shape, mesh)
    assert len(spec) == len(shape)
    back = from_partition_spec(spec, shape, mesh)
    assert back.equivalent(layout)
    whole = np.arange(np.prod(shape)).reshape(shape)
    for device, addresses in devices_of_blocks(back, shape, mesh).items():
        coords, part = mesh.coords(device), whole
        for dim, entry in enumerate(spec):
            axes = (entry,) if isinstance(entry, str) else entry or ()
            for axis in axes:  # the first axis cuts first
                part = np.split(part, mesh[axis], dim)[coords[axis]]
        assert [addresses[m] for m in sorted(addresses)] == part.flatten().tolist()
        assert sorted(addresses) == list(range(part.size))


@quick
@given(placed(in_order=True))
def test_a_relax_placement_comes_back_and_is_read_as_blocks(case):
    mesh, shape, placement = case
    layout = placement.layout(shape, mesh)
    relax = to_relax_placement(layout, shape, mesh)
    back = from_relax_placement(relax, shape, mesh)
    assert back.equivalent(layout) and from_relax_placement(str(relax), shape, mesh) == back
    whole = np.arange(np.prod(shape)).reshape(shape)
    for device, addresses in devices_of_blocks(back, shape, mesh).items():
        coords, part = mesh.coords(device), whole
        for axis, spec in zip(mesh.names, relax.dim_specs):
            if int(spec.kind) == 0:  # kSharding
                part = np.split(part, mesh[axis], int(spec.axis))[coords[axis]]
        assert [addresses[m] for m in sorted(addresses)] == part.flatten().tolist()


@quick
@given(placed(partial=True, in_order=True))
def test_placements_by_axis_come_back(case):
    mesh, shape, placement = case
    layout = placement.layout(shape, mesh)
    actions = actions_of(layout, shape, mesh, "a test")
    assert layout_of(actions, shape, mesh, "a test").equivalent(layout)
    sums = [axis for axis, action in zip(mesh.names, actions) if action == "partial"]
    assert set(sums) == placement.partial


@pytest.mark.parametrize("kinds", [*itertools.product([Shard(0), Shard(-1), Replicate(), Partial("sum")], repeat=2)])
def test_torch_placements_by_their_names(kinds):
    layout = from_torch_placements(kinds, (8, 8), MESH)
    cuts = [tuple(a for a, k in zip(MESH.names, kinds) if isinstance(k, Shard) and k.dim % 2 == d) for d in range(2)]
    sums = frozenset(a for a, k in zip(MESH.names, kinds) if isinstance(k, Partial))
    assert Placement.of(layout, (8, 8), MESH) == Placement(tuple(cuts), sums)


def test_uneven_blocks_of_torch_are_those_of_a_block_sharding():
    assert from_torch_placements([Replicate(), Shard(0)], (10, 4), MESH) == Layout.sharded((10, 4), MESH, {0: "tp"})


def test_meshes():
    assert from_relax_mesh(to_relax_mesh(MESH), MESH.names) == MESH
    torch_mesh = SimpleNamespace(mesh=np.arange(8).reshape(2, 4), mesh_dim_names=("dp", "tp"))
    assert from_torch_mesh(torch_mesh) == MESH
    assert from_jax_mesh(SimpleNamespace(shape={"dp": 2, "tp": 4})) == MESH


def torch_mesh(ranks, names):
    return SimpleNamespace(mesh=np.array(ranks), mesh_dim_names=names)


TP_FIRST = Placement((("tp", "dp"), ())).layout((8, 8), MESH)
SUM = Layout.partial((8, 8), MESH, "tp")
CYCLIC = Layout.parse("S[(2, 4, 8) : (8, 1@tp, 1)] + R[2 : 1@dp]")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: to_relax_placement(TP_FIRST, (8, 8), MESH), "a Relax placement cuts a dimension .* over tp, dp"),
        (lambda: to_relax_placement(SUM, (8, 8), MESH), "shards or replicates, and .* holds the terms of a sum on tp"),
        (
            lambda: to_relax_placement(Layout.sharded((6, 8), MESH, {0: "tp"}), (6, 8), MESH),
            "equal shards, and 4 don't divide dimension 0 of extent 6",
        ),
        (lambda: to_relax_placement(CYCLIC, (8, 8), MESH), "doesn't place shape .* in blocks"),
        (lambda: from_relax_placement("S[0]", (8, 8), MESH), "one placement for each axis of mesh dp=2,tp=4, not 1"),
        (lambda: from_relax_placement("S[0], P", (8, 8), MESH), "terms such as .*, not ' P'"),
        (lambda: from_relax_placement("S[2], R", (8, 8), MESH), r"shards dimension 2, and shape \(8, 8\) has 2"),
        (lambda: from_relax_placement("R, S[0]", (6, 8), MESH), "4 don't divide dimension 0 of extent 6"),
        (lambda: from_relax_mesh(to_relax_mesh(MESH), ("dp",)), "names must be 2 different names"),
        (lambda: from_relax_mesh(to_relax_mesh(MESH), ("dp", "dp")), "names must be 2 different names"),
        (
            lambda: from_relax_mesh(SimpleNamespace(shape=(2,), device_ids=[4, 5]), ("dp",)),
            r"each of the devices 0 to 1 once, not \(4, 5\)",
        ),
        (lambda: from_torch_mesh(torch_mesh([[1, 1]], ("a", "b"))), r"each of the devices 0 to 1 once, not \(1, 1\)"),
        (lambda: from_torch_mesh(torch_mesh([[0, 1]], None)), "has none: give mesh_dim_names"),
        (lambda: from_torch_placements([Partial("avg"), Replicate()], (8, 8), MESH), "reduce_op='avg'.* is no sum"),
        (lambda: from_torch_placements(["R", "R"], (8, 8), MESH), r"a placement must be Shard\(dim\)"),
        (lambda: from_torch_placements([Shard(2), Replicate()], (8, 8), MESH), "shards dimension 2"),
        (lambda: from_torch_placements([Shard(0)] * 2, (10, 8), MESH), "into 8 blocks, which must divide it"),
        (lambda: from_torch_placements(None, (8, 8), MESH), "placements must be a sequence"),
        (lambda: to_partition_spec(SUM, (8, 8), MESH), "an entry for each dimension, and .* holds a sum over tp"),
        (lambda: to_partition_spec(CYCLIC, (8, 8), MESH), "doesn't place shape .* in blocks"),
        (lambda: from_partition_spec("tp", (8, 8), MESH), "spec must be a PartitionSpec or a tuple"),
        (lambda: from_partition_spec((None,) * 3, (8, 8), MESH), "has 3 entries, and shape"),
        (lambda: from_partition_spec(("pp",), (8, 8), MESH), "unknown mesh axis 'pp'"),
        (lambda: from_partition_spec(("tp", "tp"), (8, 8), MESH), "mesh axis 'tp' can cut one dimension"),
        (lambda: from_partition_spec((object(),), (8, 8), MESH), "an axis, a tuple of them or None"),
        (lambda: from_partition_spec((None, "tp"), (8, 6), MESH), "4 don't divide dimension 1 of extent 6"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(LayoutError, match=message):
        call()


def test_the_order_of_devices_goes_both_ways():
    mesh = Mesh({"dp": 2, "tp": 2}, order=(0, 1, 3, 2))
    assert from_relax_mesh(to_relax_mesh(mesh), mesh.names) == mesh
    assert from_torch_mesh(torch_mesh([[0, 1], [3, 2]], ("dp", "tp"))) == mesh
    devices = np.array([SimpleNamespace(id=number) for number in mesh.order]).reshape(mesh.shape)
    assert from_jax_mesh(SimpleNamespace(shape={"dp": 2, "tp": 2}, devices=devices)) == mesh
    others = np.array([SimpleNamespace(id=number) for number in (8, 9, 11, 10)]).reshape(mesh.shape)
    assert from_jax_mesh(SimpleNamespace(shape={"dp": 2, "tp": 2}, devices=others)) == Mesh({"dp": 2, "tp": 2})
