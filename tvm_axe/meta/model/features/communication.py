"""Columns about a distributed program: what its schedule has the devices exchange."""

from __future__ import annotations

from tvm import tirx

from tvm_axe.errors import AxeError
from tvm_axe.layout import Mesh
from tvm_axe.lower.cost import features_of_program
from tvm_axe.meta.model.features.locality import log
from tvm_axe.pipeline import lowered_for
from tvm_axe.records.folders import MESH

__all__ = ["communication_columns"]

_NAMES = (
    "bytes",
    "memory",
    "waits",
    "messages",
    "peers",
    "chunks",
    "stages",
    "overlapping",
    "mesh_kernels",
    "collectives",
    "link_seconds",
)


def communication_columns(func: tirx.PrimFunc) -> dict[str, float]:
    """The columns, by name; all 0 for a kernel of one device, and for a program that cannot be lowered.

    Parameters
    ----------
    func
        A scheduled function; one that has the attribute ``axe.mesh`` is a distributed program.
    """
    mesh = func.attrs.get(MESH) if func.attrs else None
    found: dict[str, float] = {}
    if mesh is not None:
        try:
            found = features_of_program(lowered_for(func, Mesh.parse(str(mesh)))[1])
        except AxeError:  # a candidate that fails when it is measured, too
            found = {}
    values = {f"mesh_{name}": log(found.get(name, 0.0)) for name in _NAMES[:-1]}
    return {**values, "mesh_link_us": log(1e6 * found.get(_NAMES[-1], 0.0))}
