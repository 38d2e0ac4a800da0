"""Where the slabs of a mesh tensor lie, and what each worker sees of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tvm_ffi
from hypothesis import given, settings
from hypothesis import strategies as st

from tvm_axe import _tvm
from tvm_axe.collective.arena import Arena
from tvm_axe.collective.tensor import MeshTensor, decode_view, slab_stride
from tvm_axe.errors import InputError, WorkerError
from tvm_axe.layout import Mesh

DTYPES = ["bool", "int8", "uint16", "int64", "float16", "bfloat16", "float32", "float64", "float8_e4m3fn"]
MESHES = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(lambda sizes: Mesh(dict(zip("abc", sizes))))
SHAPES = st.lists(st.integers(1, 40), max_size=3).map(tuple)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create()
    yield arena
    arena.close()


@settings(max_examples=40)
@given(MESHES, SHAPES, st.sampled_from(DTYPES), st.booleans())
def test_views_are_the_slabs(mesh: Mesh, shape: tuple[int, ...], dtype: str, shared: bool) -> None:
    arena = Arena.create()
    arena.allocate(1)
    tensor = MeshTensor(arena, mesh, shape, dtype, shared)
    for device in range(mesh.size):
        assert shared or not tensor.slab(device).any()
        tensor.slab(device)[...] = 1 if shared else device % 2 if dtype == "bool" else device
    for device in range(mesh.size):
        coords = mesh.coords(device)
        own = decode_view(tensor.encode("slab"), mesh, coords).array(arena)
        assert own.shape == shape and own.flags.c_contiguous and np.shares_memory(own, tensor.slab(device))
        np.testing.assert_array_equal(own, tensor.slab(device))
        for axis in mesh.names:
            view = decode_view(tensor.encode(axis), mesh, coords).array(arena)
            assert view.shape == (mesh[axis], *shape)
            distance = int(np.prod(mesh.shape[mesh.names.index(axis) + 1 :]))
            stride = 0 if shared else distance * slab_stride(shape, dtype)
            assert view.strides[0] == stride * view.itemsize
            for i, peer in enumerate(mesh.group(device, axis)):
                np.testing.assert_array_equal(view[i], tensor.slab(peer))
                assert np.shares_memory(view[i, ...], tensor.slab(peer))
    assert tensor.nbytes == tensor.slab(0).nbytes
    arena.close()


@given(SHAPES, st.sampled_from(DTYPES), st.booleans())
def test_a_compiler_tensor_is_the_array_itself(shape: tuple[int, ...], dtype: str, apart: bool) -> None:
    array = np.zeros((2, *shape) if apart else shape, dtype)[:1] if apart else np.zeros(shape, dtype)
    tensor = _tvm.as_tensor(array)
    assert (str(tensor.dtype), tuple(tensor.shape)) == (dtype, array.shape)
    assert tensor.data_ptr() == array.ctypes.data
    assert tuple(n * array.itemsize for n in tensor.strides) == array.strides
    back = _tvm.as_array(tensor)
    assert back.dtype == array.dtype and back.strides == array.strides
    back[...] = 1
    assert (array == 1).all()


def test_a_tensor_keeps_its_memory() -> None:
    back = _tvm.as_array(_tvm.as_tensor(np.arange(100_000.0)))
    others = [np.full(100_000, np.nan) for _ in range(20)]
    np.testing.assert_array_equal(back, np.arange(100_000.0))
    assert not any(np.shares_memory(back, other) for other in others)


def test_a_transposed_array_keeps_its_strides() -> None:
    array = np.arange(24, dtype="float32").reshape(4, 6).T
    tensor = _tvm.as_tensor(array)
    assert tuple(tensor.strides) == (1, 6)
    np.testing.assert_array_equal(np.from_dlpack(tensor), array)


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((2, 0), "float32", "shape must be a sequence of positive ints, not (2, 0)"),
        ((2.0,), "float32", "shape must be a sequence of positive ints, not (2.0,)"),
        (3, "float32", "shape must be a sequence of positive ints, not 3"),
        ((2,), "float31", "dtype 'float31' is not a type"),
        ((2,), "complex64", "dtype 'complex64' is not a type"),
        ((2,), "int4", "dtype 'int4': elements must take whole bytes"),
    ],
)
def test_bad_tensors_are_refused(arena: Arena, shape: tuple[int, ...], dtype: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        MeshTensor(arena, Mesh({"tp": 2}), shape, dtype, False)
    assert message in str(caught.value)


def test_freed_and_foreign_slabs_are_refused(arena: Arena) -> None:
    tensor = MeshTensor(arena, Mesh({"tp": 2}), (3,), "float32", False)
    with pytest.raises(InputError, match=r"device must be in \[0, 2\), not 2"):
        tensor.slab(2)
    tensor.release()
    with pytest.raises(WorkerError, match=r"of shape \(3,\) was freed"):
        tensor.slab(0)
    assert tvm_ffi.dtype(tensor.dtype).bits == 32


def test_slabs_of_another_shape(arena: Arena) -> None:
    tensor = MeshTensor(arena, Mesh({"tp": 2}), (8, 4), "float32", False)
    apart = tensor.slab(1).ctypes.data - tensor.slab(0).ctypes.data
    tensor.resize((3, 5))
    assert tensor.slab(0).shape == (3, 5)
    assert tensor.slab(1).ctypes.data - tensor.slab(0).ctypes.data == apart
    tensor.resize((0, 7))
    assert tensor.slab(1).size == 0
    tensor.resize((tensor.room // 4,))
    with pytest.raises(InputError, match=r"don't fit where those of \(8, 4\) were; make another"):
        tensor.resize((tensor.room // 4 + 1,))
    with pytest.raises(InputError, match=r"can't have slabs of shape \(-1,\)"):
        tensor.resize((-1,))
    tensor.release()
    with pytest.raises(WorkerError, match="was freed"):
        tensor.resize((1,))
