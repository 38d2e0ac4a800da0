"""Whether two mesh tensors fit a collective: each check says what they would have to be."""

from __future__ import annotations

from collections.abc import Sequence

from tvm_axe.collective.tensor import MeshTensor
from tvm_axe.errors import InputError
from tvm_axe.layout import Mesh
from tvm_axe.layout.traffic import chunk


def check_pair(name: str, source: MeshTensor, target: MeshTensor) -> None:
    """Raise an InputError unless `target` has the type of `source` and may be written."""
    if source.dtype != target.dtype:
        raise InputError(f"{name}: target has dtype {target.dtype}, not the source's {source.dtype}")
    if target.shared:
        raise InputError(f"{name}: target is shared, which workers may only read")


def check_same(name: str, source: MeshTensor, target: MeshTensor) -> None:
    """Raise an InputError unless `target` has the type and the shape of `source`, and may be written."""
    check_pair(name, source, target)
    if source.shape != target.shape:
        raise InputError(f"{name}: target has shape {target.shape}, not the source's {source.shape}")


def check_dim(name: str, which: str, tensor: MeshTensor, dim: int) -> None:
    """Raise an InputError unless `dim` is one of the tensor's dimensions."""
    if dim not in range(len(tensor.shape)):
        raise InputError(f"{name}: {which} must be in [0, {len(tensor.shape)}), not {dim}")


def check_root(name: str, mesh: Mesh, axis: str, root: int) -> None:
    """Raise an InputError unless `root` is a coordinate on the mesh axis."""
    if root not in range(mesh[axis]):
        raise InputError(f"{name}: root must be in [0, {mesh[axis]}), a coordinate on {axis!r}, not {root}")


def check_block(name: str, which: str, whole: MeshTensor, block: MeshTensor, mesh: Mesh, axis: str, dim: int) -> None:
    """Raise an InputError unless a slab of `block` is a device's part, along `dim`, of a slab of `whole`."""
    check_dim(name, "dim", whole, dim)
    expected = _block(whole.shape, mesh[axis], dim)
    if block.shape != expected:
        raise InputError(f"{name}: {which} has shape {block.shape}; a block of {whole.shape} is {expected}")


def check_exchange(
    name: str, source: MeshTensor, target: MeshTensor, mesh: Mesh, axis: str, gathered: int, scattered: int
) -> None:
    """Raise an InputError unless they are a gathered and a scattered form of one tensor."""
    rank = len(source.shape)
    for which, dim in (("gathered", gathered), ("scattered", scattered)):
        check_dim(name, which, source, dim)
    if gathered == scattered:
        raise InputError(f"{name}: gathered and scattered must be two dims, not {gathered} both")
    if len(target.shape) != rank:
        raise InputError(f"{name}: target has shape {target.shape}, of other dims than the source's {source.shape}")
    whole = list(source.shape)
    whole[gathered] = target.shape[gathered]
    for which, tensor, dim in (("source", source, gathered), ("target", target, scattered)):
        expected = _block(whole, mesh[axis], dim)
        if tensor.shape != expected:
            raise InputError(
                f"{name}: {which} has shape {tensor.shape}; a block of {tuple(whole)} along {dim} is {expected}"
            )


def _block(whole: Sequence[int], size: int, dim: int) -> tuple[int, ...]:
    """The shape of a device's block of a slab, of as many blocks as a mesh axis has devices."""
    rows = chunk(whole[dim], size, 0).stop
    return (*whole[:dim], rows, *whole[dim + 1 :])
