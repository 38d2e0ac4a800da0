"""To and from PyTorch's and JAX's shardings, judged by the packages themselves: which device holds what.

Neither is a dependency, and neither are these tests' results: without a package its tests are skipped. The compiler is
not needed: without it, what imports it in the package's front door is left out.
"""

import importlib.util
import itertools
import math
import sys
import types

import numpy as np
import pytest

if importlib.util.find_spec("tvm") is None:
    package = types.ModuleType("tvm_axe")
    package.__path__ = list(importlib.util.find_spec("tvm_axe").submodule_search_locations)
    sys.modules["tvm_axe"] = package

from tvm_axe.layout import LayoutError, Mesh, convert
from tvm_axe.layout.placement import Placement

MESH = Mesh({"dp": 2, "tp": 4})
SHAPES = ((8, 16), (16, 8, 3))


def blocks(layout, shape, mesh):
    """What each device holds: its buffer in the shape of a block, with -1 where there is padding, read by `apply`."""
    placement = Placement.of(layout, shape, mesh)
    local = placement.local_shape(shape, mesh)
    counts = [math.prod(mesh[axis] for axis in cut) for cut in placement.cuts]
    padded = tuple(extent * count for extent, count in zip(local, counts))
    held = {device: np.full(math.prod(local), -1) for device in range(mesh.size)}
    for index in np.ndindex(*shape):
        for point in layout.apply(*map(int, index), shape=padded):
            device = mesh.device({name: point[name] for name in mesh.names})
            held[device][point["m"]] = np.ravel_multi_index(index, shape)
    return {device: buffer.reshape(local) for device, buffer in held.items()}


@pytest.fixture
def torch_ranks():
    """Run a function as every rank of a group that doesn't communicate; gives the list of what it returned."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg", reason="PyTorch has no fake group")
    from torch import distributed

    def run(function, size=MESH.size):
        found = []
        for rank in range(size):
            distributed.init_process_group("fake", rank=rank, world_size=size, store=fake.FakeStore())
            try:
                found.append(function(torch))
            finally:
                distributed.destroy_process_group()
        return found

    return run


def test_torch_ranks_hold_what_the_layout_says(torch_ranks):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    cases = [
        (shape, kinds) for shape in SHAPES for kinds in itertools.product([Shard(0), Shard(1), Replicate()], repeat=2)
    ]
    cases += [((10, 6), (Shard(0), Shard(1))), ((3, 5), (Replicate(), Shard(0))), ((5, 7), (Shard(1), Replicate()))]

    def local_parts(torch):
        mesh = convert.to_torch_mesh(MESH)
        assert convert.from_torch_mesh(mesh) == MESH
        whole = [torch.arange(math.prod(shape)).reshape(shape) for shape, _ in cases]
        parts = [distribute_tensor(t, mesh, kinds, src_data_rank=None) for t, (_, kinds) in zip(whole, cases)]
        return [part.to_local().numpy() for part in parts]

    found = torch_ranks(local_parts)
    for k, (shape, kinds) in enumerate(cases):
        layout = convert.from_torch_placements(kinds, shape, MESH)
        ours = blocks(layout, shape, MESH)
        for rank, parts in enumerate(found):
            inside = ours[rank][tuple(slice(extent) for extent in parts[k].shape)]
            np.testing.assert_array_equal(inside, parts[k])
            assert (ours[rank] >= 0).sum() == parts[k].size


def test_torch_placements_come_back():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from torch.distributed.tensor import Partial, Replicate, Shard

    for kinds in itertools.product([Shard(0), Shard(1), Replicate(), Partial()], repeat=2):
        layout = convert.from_torch_placements(kinds, (8, 16), MESH)
        assert convert.to_torch_placements(layout, (8, 16), MESH) == kinds
    with pytest.raises(LayoutError, match="is no sum"):
        convert.from_torch_placements((Partial("max"), Replicate()), (8, 16), MESH)


def test_strided_shards_of_torch_are_refused():
    types_of = pytest.importorskip("torch.distributed.tensor.placement_types", reason="PyTorch is not installed")
    strided = types_of._StridedShard(0, split_factor=2)
    with pytest.raises(LayoutError, match=r"a placement must be Shard\(dim\)"):
        convert.from_torch_placements((strided, types_of.Shard(0)), (8, 16), MESH)


def test_torch_meshes_of_other_orders_and_without_names(torch_ranks):
    def read(torch):
        from torch.distributed.device_mesh import DeviceMesh

        turned = convert.from_torch_mesh(DeviceMesh("cpu", [[1, 0]], mesh_dim_names=("a", "b")))
        assert turned == Mesh({"a": 1, "b": 2}, order=(1, 0))
        assert convert.to_torch_mesh(turned).mesh.tolist() == [[1, 0]]
        with pytest.raises(LayoutError, match="give mesh_dim_names"):
            convert.from_torch_mesh(DeviceMesh("cpu", [[0, 1]]))
        return True

    assert torch_ranks(read, 2) == [True, True]


@pytest.fixture(scope="module")
def jax():
    found = pytest.importorskip("jax", reason="JAX is not installed")
    found.config.update("jax_platforms", "cpu")
    found.config.update("jax_num_cpu_devices", MESH.size)
    return found


SPECS = [
    (None, None),
    ("dp", None),
    ("tp", "dp"),
    (None, ("dp", "tp")),
    (("tp", "dp"), None),
    (("tp",),),
    (),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("entries", SPECS, ids=str)
def test_jax_devices_hold_what_the_layout_says(jax, entries, shape):
    mesh = convert.to_jax_mesh(MESH)
    spec = jax.sharding.PartitionSpec(*entries)
    layout = convert.from_partition_spec(spec, shape, MESH)
    ours = blocks(layout, shape, MESH)
    array = jax.device_put(np.arange(math.prod(shape)).reshape(shape), jax.sharding.NamedSharding(mesh, spec))
    assert len(array.addressable_shards) == MESH.size
    for shard in array.addressable_shards:
        device = list(mesh.devices.flat).index(shard.device)
        np.testing.assert_array_equal(ours[device], np.asarray(shard.data))
    back = jax.sharding.PartitionSpec(*convert.to_partition_spec(layout, shape, MESH))
    same = jax.sharding.NamedSharding(mesh, back)
    assert same.is_equivalent_to(array.sharding, len(shape))


def test_jax_meshes_come_back(jax):
    assert convert.from_jax_mesh(convert.to_jax_mesh(MESH)) == MESH
    assert convert.from_jax_mesh(jax.sharding.AbstractMesh(MESH.shape, MESH.names)) == MESH
    with pytest.raises(LayoutError, match="has 16 devices, and JAX has 8"):
        convert.to_jax_mesh(Mesh({"dp": 16}))


def test_specs_that_state_no_layout_are_refused(jax):
    spec = jax.sharding.PartitionSpec
    with pytest.raises(LayoutError, match="an axis, a tuple of them or None"):
        convert.from_partition_spec(spec(spec.UNCONSTRAINED, None), (8, 16), MESH)
    with pytest.raises(LayoutError, match="unreduced axes tp"):
        convert.from_partition_spec(spec("dp", unreduced={"tp"}), (8, 16), MESH)
