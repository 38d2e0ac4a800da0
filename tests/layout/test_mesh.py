"""The mesh: numbering of devices, groups, text, and what is refused."""

import itertools
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe.layout import Layout, LayoutError, Mesh

names = st.sampled_from(["tp", "dp", "pp", "node", "gpu_0"])
meshes = st.dictionaries(names, st.integers(1, 4), min_size=1, max_size=3).map(Mesh)
quick = settings(derandomize=True, max_examples=50, deadline=None)


@quick
@given(meshes)
def test_devices_count_through_coordinates_row_major(mesh):
    expected = [dict(zip(mesh.names, c)) for c in itertools.product(*(range(n) for n in mesh.shape))]
    assert mesh.size == len(expected)
    assert [mesh.coords(d) for d in range(mesh.size)] == expected
    assert [mesh.device(c) for c in expected] == list(range(mesh.size))


@quick
@given(meshes, st.data())
def test_group_is_the_devices_that_differ_along_one_axis(mesh, data):
    device = data.draw(st.integers(0, mesh.size - 1))
    axis = data.draw(st.sampled_from(mesh.names))
    others = [n for n in mesh.names if n != axis]
    here = mesh.coords(device)
    expected = [d for d in range(mesh.size) if all(mesh.coords(d)[n] == here[n] for n in others)]
    assert list(mesh.group(device, axis)) == expected
    assert mesh.group(device, axis)[here[axis]] == device


@quick
@given(meshes)
def test_text_repr_and_pickle_give_the_mesh_back(mesh):
    assert Mesh.parse(str(mesh)) == mesh
    assert eval(repr(mesh), {"Mesh": Mesh}) == mesh
    copy = pickle.loads(pickle.dumps(mesh))
    assert copy == mesh and hash(copy) == hash(mesh)


def test_order_of_axes_matters():
    mesh = Mesh({"tp": 2, "dp": 3})
    assert mesh != Mesh({"dp": 3, "tp": 2})
    assert (mesh.names, mesh.shape, dict(mesh.axes)) == (("tp", "dp"), (2, 3), {"tp": 2, "dp": 3})
    assert "tp" in mesh and "pp" not in mesh
    assert Mesh.parse(" tp = 2 , dp=3 ") == mesh


def test_the_mesh_cannot_be_changed():
    sizes = {"tp": 2}
    mesh = Mesh(sizes)
    sizes["tp"] = 3
    assert mesh["tp"] == 2
    with pytest.raises(TypeError):
        mesh.axes["tp"] = 3


def test_unknown_axis_is_named_with_the_known_ones():
    mesh = Mesh({"tp": 2, "dp": 2})
    for ask in (mesh.axis_size, mesh.__getitem__, lambda name: mesh.group(0, name)):
        with pytest.raises(LayoutError, match="unknown mesh axis 'pp'; mesh tp=2,dp=2 has tp, dp"):
            ask("pp")


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({}, "needs a mapping from axis to size"),
        ([("tp", 2)], "needs a mapping from axis to size"),
        ({"tp": 0}, "size of mesh axis 'tp' must be at least 1, not 0"),
        ({"tp": -2}, "must be at least 1, not -2"),
        ({"tp": 2.0}, "size of mesh axis 'tp' must be an int, not 2.0 of type float"),
        ({"tp": True}, "must be an int, not True of type bool"),
        ({"tp": 2**63}, "must fit in 64 bits"),
        ({"t p": 2}, "a mesh axis must be an ASCII identifier such as 'tp' or 'laneid', not 't p'"),
        ({"ä": 2}, "must be an ASCII identifier"),
        ({3: 2}, "must be an ASCII identifier"),
        ({"laneid": 2}, "mesh axis 'laneid' has the name of a thread axis"),
        ({"m": 2}, "mesh axis 'm' has the name of a memory axis"),
    ],
)
def test_malformed_mesh_is_refused(axes, message):
    with pytest.raises(LayoutError, match=message):
        Mesh(axes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at position 0 of '': expected axis=size"),
        ("tp", "at position 0 of 'tp': expected axis=size, found 'tp'"),
        ("tp=2,", "at position 5 of 'tp=2,'"),
        ("tp=2,dp=x", "at position 5"),
        ("tp=2,tp=3", "at position 5 of 'tp=2,tp=3': axis 'tp' is named twice"),
        ("tp=0", "must be at least 1"),
        ("tp=" + "9" * 5000, "expected axis=size"),
        ("tp=٢", "expected axis=size"),
        (None, "text must be a str"),
    ],
)
def test_malformed_mesh_text_is_refused(text, message):
    with pytest.raises(LayoutError, match=message):
        Mesh.parse(text)


def test_devices_and_coordinates_outside_the_mesh_are_refused():
    mesh = Mesh({"tp": 2, "dp": 2})
    for device in (-1, 4):
        with pytest.raises(LayoutError, match=rf"device must be in \[0, 4\) on mesh tp=2,dp=2, not {device}"):
            mesh.coords(device)
    with pytest.raises(LayoutError, match="device must be an int"):
        mesh.coords(True)
    for coords in ({"tp": 0}, {"tp": 0, "dp": 0, "pp": 0}, {}):
        with pytest.raises(LayoutError, match="must give a position on each of the axes tp, dp"):
            mesh.device(coords)
    with pytest.raises(LayoutError, match=r"coords\['dp'\] must be in \[0, 2\) on mesh tp=2,dp=2, not 2"):
        mesh.device({"tp": 0, "dp": 2})


@quick
@given(meshes, st.data())
def test_devices_have_the_order_that_is_given(mesh, data):
    order = tuple(data.draw(st.permutations(range(mesh.size))))
    ordered = Mesh(mesh.axes, order)
    assert Mesh.parse(str(ordered)) == ordered == eval(repr(ordered))
    assert (ordered == mesh) == (order == tuple(range(mesh.size))) == ordered.is_row_major
    for position, device in enumerate(order):
        assert ordered.coords(device) == mesh.coords(position)
        assert ordered.device(ordered.coords(device)) == device
        for axis in mesh.names:
            assert ordered.group(device, axis) == tuple(order[p] for p in mesh.group(position, axis))


def test_each_device_of_an_ordered_mesh_holds_its_own_block():
    mesh = Mesh({"tp": 4}, order=(2, 0, 3, 1))
    layout = Layout.sharded((8, 2), mesh, {0: "tp"})
    regions = [layout.local_region((8, 2), mesh, device)[0] for device in range(4)]
    assert regions == [slice(2, 4), slice(6, 8), slice(0, 2), slice(4, 6)]
    assert layout.owner(5, 0, mesh=mesh, shape=(8, 2)) == (3,)


@pytest.mark.parametrize("order", [(0, 1), (0, 1, 2, 2), (1, 2, 3, 4), (0, 1, 2, 3, 4)])
def test_an_order_names_each_device_once(order):
    with pytest.raises(LayoutError, match="each of the devices 0 to 3 once"):
        Mesh({"dp": 2, "tp": 2}, order)


@pytest.mark.parametrize("text", ["dp=2@", "dp=2@0", "dp=2@0,1", "dp=2@1.x", "dp=2@1.0@", "@0.1"])
def test_a_malformed_order_is_refused(text):
    with pytest.raises(LayoutError):
        Mesh.parse(text)
