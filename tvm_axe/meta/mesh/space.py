"""A distributed program as MetaSchedule's workload, and the design spaces of its schedules.

The workload is the function as the caller gave it, shared over the mesh already or not, with the mesh and all else that
its records hold for in its attributes. A space is what one choice of primitives leaves (which loop on which axis, AR or
RS-C-AG, fused or not, overlapped or not); what is sampled in it is the number of chunks. The primitives record stock
instructions only, so that any MetaSchedule reads the records and replays their traces.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tvm import s_tir, tirx
from tvm.ir import IRModule
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe.collective.side import BESIDE
from tvm_axe.layout import Mesh
from tvm_axe.lower import Lowered
from tvm_axe.lower.cost import estimate
from tvm_axe.machines import backend_of
from tvm_axe.machines.target import cores_per_device, resolve_target
from tvm_axe.meta.mesh.candidates import Candidates, mesh_of
from tvm_axe.meta.mesh.devices import Devices
from tvm_axe.meta.mesh.moves import Candidate, beside_others, in_one_meeting, one_after_other, spaces, structure
from tvm_axe.meta.mesh.seeds import sharings
from tvm_axe.meta.spaces.mutator import MutateChoice
from tvm_axe.records.database import with_only_attrs
from tvm_axe.records.folders import MESH
from tvm_axe.schedule import LAYOUTS
from tvm_axe.tile.backend import TileBackend

__all__ = [
    "CHUNKS",
    "Lowers",
    "devices_of",
    "first_schedules",
    "on_gpus",
    "program_space",
    "program_target",
    "program_workload",
]

ENGINE, KEEP = "axe.engine", "axe.keep"
"""A workload's attributes beside its mesh: what its devices are, and the outputs that may stay sharded."""

CHUNKS = (2, 4, 8)  # pieces of a device's slice; which of them divide it is seen for each schedule
SHARINGS, SCHEDULES = 16, 48  # ways to share, and schedules that go on to be overlapped: those expected to take least


def program_workload(
    func: tirx.PrimFunc, mesh: Mesh, devices: Devices | str | None = None, keep: Collection[str] = ()
) -> IRModule:
    """The workload of a program on a mesh; `axe.search` records schedules without saying what the devices were."""
    attrs = {"global_symbol": "main", "s_tir": True, MESH: str(mesh)}
    if devices is not None:
        attrs[ENGINE] = str(devices)
    if keep:
        attrs[KEEP] = ",".join(sorted(keep))
    if func.attrs and LAYOUTS in func.attrs:
        attrs[LAYOUTS] = func.attrs[LAYOUTS]
    # Functions that share a body aren't safe: upstream's schedule takes a body for its own and changes it in both.
    return IRModule({"main": s_tir.renew_defs(with_only_attrs(func, attrs))})


def program_target(mesh: Mesh, target: str | dict[str, Any] | Target) -> Target:
    """Return what a program on a mesh is compiled for while its schedules are tried, each device with its cores."""
    return resolve_target(target, threads=cores_per_device(mesh))


def devices_of(mod: IRModule, target: Target) -> Devices:
    """What the devices of a program's workload are."""
    return Devices.parse(str(mod["main"].attrs[ENGINE]), target)


def program_space(
    mod: IRModule, candidates: Candidates | None = None, chunks: Sequence[int] = CHUNKS
) -> ms.SpaceGenerator:
    """The design space of a program's workload, for upstream's searches: those that the link model likes best first.

    Parameters
    ----------
    mod
        What `program_workload` made.
    candidates
        What is known of its schedules, which gets to know these.
    chunks
        Into how many chunks overlapping stages may cut a device's slice, where that divides.
    """
    known = Candidates() if candidates is None else candidates

    def generate(base: s_tir.Schedule) -> list[s_tir.Schedule]:
        return [candidate.sch for candidate in first_schedules(base.mod, chunks, known)]

    return ms.space_generator.ScheduleFn(
        generate, sch_rules=[], postprocs=[Lowers(known)], mutator_probs={MutateChoice(): 1.0}
    )


def first_schedules(mod: IRModule, chunks: Sequence[int], candidates: Candidates | None = None) -> list[Candidate]:
    """A schedule of each space, what is expected to take least first; of many, those that are expected to take least.

    A mesh of several axes has a product's worth of ways to share a program, and so of schedules. Each cut leaves what
    the next step makes more of: the ways to share it, as they are, and the schedules of these that overlap nothing;
    overlapping isn't expected to take less than one stage after the other.
    """
    known = Candidates() if candidates is None else candidates
    attrs, mesh = mod["main"].attrs, mesh_of(mod)
    keep = str(attrs[KEEP]).split(",") if KEEP in attrs else ()
    # What can't be lowered yet may be with its gathers elsewhere.
    ways = sorted(sharings(mod["main"], mesh), key=lambda way: _cost(way.mod, known) or math.inf)[:SHARINGS]
    found = {structure(c.sch): c for way in ways for c in one_after_other(way, keep)}
    chosen = _cheapest(((c,) for c in found.values()), known)[:SCHEDULES]
    return _cheapest(spaces([*chosen, *on_gpus(chosen, known)], chunks), known)


def on_gpus(chosen: Sequence[Candidate], candidates: Candidates) -> Iterator[Candidate]:
    """What else becomes of schedules where kernels meet by themselves and devices have a stream beside theirs.

    Collectives beside others hide; and of a few rows an all-reduce is one kernel with what follows it.

    Parameters
    ----------
    chosen
        Schedules that were lowered.
    candidates
        What is known of the program's schedules, and what its devices are.
    """
    backend = None if candidates.devices.target is None else backend_of(candidates.devices.target)
    if not isinstance(backend, TileBackend) or not backend.meets:
        return
    for candidate in chosen:
        for made in (in_one_meeting(candidate), beside_others(candidate)):
            lowered = None if made is None else candidates.lowered_or_none(made.sch.mod)
            if made is not None and lowered is not None and _is_other(lowered):
                yield replace(made, lowered=lowered)


def _is_other(lowered: Lowered) -> bool:
    """Whether it has a collective beside others, or a kernel that meets by itself."""
    beside = any(call.function.endswith(BESIDE) for call in lowered.calls)
    return beside or any(buffer.is_flags for buffer in lowered.buffers.values())


def _cheapest(spaces: Iterable[tuple[Candidate, ...]], candidates: Candidates) -> list[Candidate]:
    """Of each space the first, if that can be lowered, what is expected to take least first."""
    costs = []
    for first, *others in spaces:
        for other in others:
            candidates.note(other)
        candidate = candidates.with_lowered(first)
        if candidate is not None:
            costs.append((_cost(candidate.sch.mod, candidates), candidate))
    return [candidate for _, candidate in sorted(costs, key=lambda pair: pair[0] or 0.0)]


def _cost(mod: IRModule, candidates: Candidates) -> float | None:
    """Seconds that a schedule is expected to take, None where it can't be lowered."""
    lowered = candidates.lowered_or_none(mod)
    if lowered is None:
        return None
    rates = candidates.devices.rates
    return estimate(lowered, rates) + candidates.operations(mod)[0] / rates.operations


@derived_object
class Lowers(ms.postproc.PyPostproc):
    """Refuses schedules that cannot be lowered to the mesh.

    Parameters
    ----------
    candidates
        What is known of the program's schedules.
    """

    def __init__(self, candidates: Candidates) -> None:
        super().__init__()
        self.candidates = candidates

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        """Nothing of the context is needed."""

    def apply(self, sch: s_tir.Schedule) -> bool:
        """Whether it can be lowered."""
        return self.candidates.lowered_or_none(sch.mod) is not None

    def clone(self) -> Lowers:
        """Another one, for another thread."""
        return Lowers(self.candidates)
