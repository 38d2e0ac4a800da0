"""Collectives on whole mesh tensors, as the host asks workers for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from tvm_axe.collective.fitting import check_block, check_dim, check_exchange, check_pair, check_root, check_same
from tvm_axe.collective.session import Session
from tvm_axe.collective.tensor import SLAB, MeshTensor
from tvm_axe.errors import InputError
from tvm_axe.layout import Mesh


class Operations(ABC):
    """The collectives of `tvm_axe.collective.Workers`, each of which returns when all workers have done it."""

    mesh: Mesh
    _session: Session

    def all_reduce(self, source: MeshTensor, target: MeshTensor, axis: str) -> None:
        """Make every slab of `target` the sum of the slabs of `source` along a mesh axis; they may be the same tensor.

        Raises
        ------
        InputError
            If shapes, types or the axis don't fit.
        """
        self._check_two(source, target, axis)
        check_same("all_reduce", source, target)
        self._collective("all_reduce", source.encode(axis), target.encode(axis), axis)

    def reduce_scatter(self, source: MeshTensor, target: MeshTensor, axis: str, dim: int) -> None:
        """Make each slab of `target` its device's block along `dim` of the sum of the slabs of `source`.

        A block has ceil(extent / size of the axis) rows; of the last blocks, what is past the extent is left as it is.
        """
        self._check_two(source, target, axis)
        check_pair("reduce_scatter", source, target)
        check_block("reduce_scatter", "target", source, target, self.mesh, axis, dim)
        self._collective("reduce_scatter", source.encode(axis), target.encode(SLAB), dim, axis)

    def all_gather(self, source: MeshTensor, target: MeshTensor, axis: str, dim: int) -> None:
        """Make every slab of `target` the blocks of `source` along a mesh axis one after the other along `dim`.

        A block has ceil(extent / size of the axis) rows; of the last blocks, what is past the extent is not read. If
        they are the same tensor, each device's block is already at its place in its own slab.
        """
        self._check_two(source, target, axis)
        check_pair("all_gather", source, target)
        if source is target:
            check_dim("all_gather", "dim", source, dim)
            self._collective("all_gather_in_place", source.encode(axis), target.encode(axis), dim, axis)
            return
        check_block("all_gather", "source", target, source, self.mesh, axis, dim)
        self._collective("all_gather", source.encode(SLAB), target.encode(axis), dim, axis)

    def all_to_all(self, source: MeshTensor, target: MeshTensor, axis: str, gathered: int, scattered: int) -> None:
        """Make `target`, sharded along dim `scattered`, what `source`, sharded along dim `gathered`, holds in all.

        A slab of `source` has ceil(extent / size of the axis) rows of `gathered` and all of `scattered`, a slab of
        `target` the other way round. What is past an extent is neither read nor written.
        """
        name = "all_to_all"
        self._check_two(source, target, axis)
        check_pair(name, source, target)
        check_exchange(name, source, target, self.mesh, axis, gathered, scattered)
        self._collective(name, source.encode(axis), target.encode(SLAB), gathered, scattered, axis)

    def send(self, source: MeshTensor, target: MeshTensor, axis: str, shift: int) -> None:
        """Send each slab of `source` to the slab of `target` that is `shift` devices further on a mesh axis, around."""
        self._check_two(source, target, axis)
        check_same("send", source, target)
        if source is target:
            raise InputError("send: target is the source, which would be read while it is written")
        self._collective("send", source.encode(axis), target.encode(SLAB), shift, axis)

    def reduce(self, source: MeshTensor, target: MeshTensor, axis: str, root: int) -> None:
        """Make the slab of `target` at coordinate `root` of a mesh axis the sum of the slabs of `source` along it.

        The other slabs of `target` are left as they are; it may be `source`.
        """
        self._check_two(source, target, axis)
        check_same("reduce", source, target)
        check_root("reduce", self.mesh, axis, root)
        self._collective("reduce", source.encode(axis), target.encode(SLAB), root, axis)

    def broadcast(self, source: MeshTensor, target: MeshTensor, axis: str, root: int) -> None:
        """Make every slab of `target` the slab of `source` at coordinate `root` of a mesh axis.

        They may be the same tensor.
        """
        self._check_two(source, target, axis)
        check_same("broadcast", source, target)
        check_root("broadcast", self.mesh, axis, root)
        self._collective("broadcast", source.encode(axis), target.encode(SLAB), root, axis)

    @abstractmethod
    def _check_own(self, tensor: object) -> MeshTensor:
        """Raise an InputError unless it is a mesh tensor of these workers."""

    @abstractmethod
    def _check_open(self) -> None:
        """Raise a WorkerError if the workers are closed."""

    def _check_two(self, source: MeshTensor, target: MeshTensor, axis: str) -> None:
        self._check_open()
        self.mesh.axis_size(axis)  # raises for an unknown axis
        self._check_own(source)
        self._check_own(target)

    def _collective(self, name: str, source: list[Any], target: list[Any], *arguments: int | str) -> None:
        self._session.run("collective", name, source, target, arguments)
