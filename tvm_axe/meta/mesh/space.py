"""A distributed program as MetaSchedule's workload, and the design spaces of its schedules.

The workload is the function as the caller gave it, shared over the mesh already or not, with the mesh and all else that
its records hold for in its attributes. A space is what one choice of primitives leaves (which loop on which axis, AR or
RS-C-AG, fused or not, overlapped or not); what is sampled in it is the number of chunks. The primitives record stock
instructions only, so that any MetaSchedule reads the records and replays their traces.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from tvm import s_tir, tirx
from tvm.ir import IRModule
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from tvm_axe.errors import LowerError
from tvm_axe.layout import Mesh
from tvm_axe.lower import Lowered, lower
from tvm_axe.lower.cost import estimate, operations
from tvm_axe.meta.mesh.moves import Candidate, one_after_other, spaces, structure
from tvm_axe.meta.mesh.seeds import sharings
from tvm_axe.meta.spaces.mutator import MutateChoice
from tvm_axe.records.database import with_only_attrs
from tvm_axe.records.folders import MESH
from tvm_axe.schedule import LAYOUTS

__all__ = ["CHUNKS", "Lowers", "engine_of", "mesh_of", "program_space", "program_workload"]

ENGINE, KEEP = "axe.engine", "axe.keep"
"""A workload's attributes beside its mesh: what its devices are, and the outputs that may stay sharded."""

CHUNKS = (2, 4, 8)  # pieces of a device's slice; which of them divide it is seen for each schedule
SHARINGS, SCHEDULES = 16, 48  # ways to share, and schedules that go on to be overlapped: those expected to take least
OPERATIONS_PER_SECOND = 1e11  # of a device in a tuned matmul; where axes are left out, devices do more of them


def program_workload(func: tirx.PrimFunc, mesh: Mesh, engine: str, keep: Collection[str] = ()) -> IRModule:
    """The workload of a program on a mesh."""
    attrs = {"global_symbol": "main", "s_tir": True, MESH: str(mesh), ENGINE: engine}
    if keep:
        attrs[KEEP] = ",".join(sorted(keep))
    if func.attrs and LAYOUTS in func.attrs:
        attrs[LAYOUTS] = func.attrs[LAYOUTS]
    # Functions that share a body aren't safe: upstream's schedule takes a body for its own and changes it in both.
    return IRModule({"main": s_tir.renew_defs(with_only_attrs(func, attrs))})


def mesh_of(mod: IRModule) -> Mesh:
    """The mesh of a program's workload, or of a candidate for it."""
    return Mesh.parse(str(mod["main"].attrs[MESH]))


def engine_of(mod: IRModule) -> str:
    """What the devices of a program's workload are: see `tvm_axe.launch`."""
    return str(mod["main"].attrs[ENGINE])


def program_space(mod: IRModule, chunks: Sequence[int] = CHUNKS) -> ms.SpaceGenerator:
    """The design space of a program's workload, for upstream's searches: those that the link model likes best first.

    Parameters
    ----------
    mod
        What `program_workload` made.
    chunks
        Into how many chunks overlapping stages may cut a device's slice, where that divides.
    """
    mesh = mesh_of(mod)

    def generate(base: s_tir.Schedule) -> list[s_tir.Schedule]:
        return [candidate.sch for candidate in first_schedules(base.mod, chunks)]

    return ms.space_generator.ScheduleFn(
        generate, sch_rules=[], postprocs=[Lowers(mesh)], mutator_probs={MutateChoice(): 1.0}
    )


def first_schedules(mod: IRModule, chunks: Sequence[int]) -> list[Candidate]:
    """A schedule of each space, what is expected to take least first; of many, those that are expected to take least.

    A mesh of several axes has a product's worth of ways to share a program, and so of schedules. Each cut leaves what
    the next step makes more of: the ways to share it, as they are, and the schedules of these that overlap nothing;
    overlapping isn't expected to take less than one stage after the other.
    """
    attrs, mesh = mod["main"].attrs, mesh_of(mod)
    keep = str(attrs[KEEP]).split(",") if KEEP in attrs else ()
    # What can't be lowered yet may be with its gathers elsewhere.
    ways = sorted(sharings(mod["main"], mesh), key=lambda way: _cost(way, mesh) or math.inf)[:SHARINGS]
    found = {structure(c.sch): c for way in ways for c in one_after_other(way, keep)}
    return _cheapest(spaces(_cheapest(((c,) for c in found.values()), mesh)[:SCHEDULES], chunks), mesh)


def _cheapest(spaces: Iterable[tuple[Candidate, ...]], mesh: Mesh) -> list[Candidate]:
    """Of each space the first, if that can be lowered, what is expected to take least first."""
    costs = [(cost, space[0]) for space in spaces if (cost := _cost(space[0].sch, mesh)) is not None]
    return [candidate for _, candidate in sorted(costs, key=lambda pair: pair[0])]


def _cost(sch: s_tir.Schedule, mesh: Mesh) -> float | None:
    """Seconds that a schedule is expected to take, None where it can't be lowered."""
    lowered = lowered_or_none(sch, mesh)
    return None if lowered is None else estimate(lowered) + operations(sch.mod["main"], mesh)[0] / OPERATIONS_PER_SECOND


def lowered_or_none(sch: s_tir.Schedule, mesh: Mesh) -> Lowered | None:
    """The schedule lowered, or None where the lowering refuses it: it is none of the program then."""
    try:
        return lower(sch.mod["main"], mesh)
    except LowerError:
        return None


@derived_object
class Lowers(ms.postproc.PyPostproc):
    """Refuses schedules that cannot be lowered to the mesh."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.mesh = mesh

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        """Nothing of the context is needed."""

    def apply(self, sch: s_tir.Schedule) -> bool:
        """Whether it can be lowered."""
        return lowered_or_none(sch, self.mesh) is not None

    def clone(self) -> Lowers:
        """Another one, for another thread."""
        return Lowers(self.mesh)
