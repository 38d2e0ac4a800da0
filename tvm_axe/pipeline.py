"""The passes that a program takes on its way from a function over whole tensors to what runs: the list, in order.

Everybody who compiles takes passes from here: `tvm_axe.compile` all of them, the Relax pipeline ``"axe"`` those that
leave a module, the tuner's measurer those behind the records, the search over a program's schedules the first two
(`lowered_for`). A model for one device has two of its own between them (`tvm_axe.relax.alone`).

>>> for each in PASSES:
...     print(each)
redistribute   where that is asked for, copies between the stages move what a device touches and doesn't own
lower          a scheduled function becomes the module that each device of the mesh runs
apply records  functions that were tuned become as the best record says
ranges         functions of unknown extents have a schedule for each range of their values
schedules      functions that nobody scheduled take the schedule that suits the target
tile kernels   nests that chose a tile kernel become its programs, lowered for the target
build          functions become machine code

A pass is a function of the `Work` so far, and says nothing to the next one but in that:

>>> from tvm_axe.layout import Mesh
>>> from tvm_axe.machines import resolve_target
>>> from tvm_axe.programs import PROGRAMS
>>> program = PROGRAMS["sgd"](Mesh({"dp": 2}))
>>> func = program.schedule("AR-C").mod["main"]
>>> work = LOWER(Work.of(func, resolve_target("llvm"), program.mesh))
>>> work.lowered.notation
'AR-C'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from tvm import relax, tirx
from tvm.ir import IRModule
from tvm.runtime import Module
from tvm.target import Target

from tvm_axe.collective.arena import PAGE
from tvm_axe.layout import Mesh
from tvm_axe.lower import Lowered, lower
from tvm_axe.lower.defaults import with_default_kernels
from tvm_axe.lower.inserting import redistributed
from tvm_axe.lower.tiles import overlaps, with_tile_kernels
from tvm_axe.machines import backend_of
from tvm_axe.machines.cache import Cache
from tvm_axe.nests import Values, with_default_schedules, with_equal_ones_once, with_ranges
from tvm_axe.records import apply_best

__all__ = [
    "APPLY_RECORDS",
    "BUILD",
    "DEVICE_PASSES",
    "LOWER",
    "PASSES",
    "RANGES",
    "REDISTRIBUTE",
    "SCHEDULES",
    "TILE_KERNELS",
    "Pass",
    "Work",
    "build",
    "lowered_for",
    "run",
]


@dataclass(frozen=True)
class Work:
    """A program on its way, and what has become known of it.

    Attributes
    ----------
    module : IRModule
        The program: before it is lowered for a mesh, one scheduled function, ``main``.
    target : Target
        What it is compiled for, resolved.
    mesh : Mesh or None
        The devices; None for one device, which takes the function as it is.
    work_dir : Path or None
        Where tuning results lie; None leaves all untuned.
    redistribute : bool
        Whether copies may be inserted where devices touch what they don't own.
    apart : frozenset of str
        The mesh axes whose devices don't see each other's memory.
    values : mapping or None
        Representatives of unknown extents, by the names of their variables (`tvm_axe.nests.ranges`).
    lowered : Lowered or None
        What each device of the mesh runs.
    tuned : Mapping[str, float]
        The functions that a record was found for, with the seconds it was measured at.
    scheduled : IRModule or None
        The module as records left it, with what chose tile kernels, before these took the place of nests and other
        functions their default schedules.
    built : Module or VMExecutable or None
        What runs; None where workers are still to build it (`tvm_axe.machines.builder.PROGRAM_BUILDER`).
    store : Cache or None
        Where compiled code is kept; None as of `tvm_axe.machines.Backend.build`.
    """

    module: IRModule
    target: Target
    mesh: Mesh | None = None
    work_dir: str | Path | None = None
    redistribute: bool = False
    apart: frozenset[str] = frozenset()
    values: Values | None = None
    lowered: Lowered | None = None
    tuned: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    scheduled: IRModule | None = None
    built: Module | relax.VMExecutable | None = None
    store: Cache | None = None

    @classmethod
    def of(
        cls, func: tirx.PrimFunc, target: Target, mesh: Mesh | None = None, work_dir: str | Path | None = None
    ) -> Work:
        """A function on its way."""
        return cls(IRModule({"main": func}), target, mesh, work_dir)

    @classmethod
    def from_lowered(cls, lowered: Lowered, target: Target, work_dir: str | Path | None = None) -> Work:
        """A program that was lowered before, by whoever had to look at what it communicates."""
        return cls(lowered.module, target, lowered.mesh, work_dir, lowered=lowered)


@dataclass(frozen=True)
class Pass:
    """One step of the way, by name.

    Attributes
    ----------
    name : str
        What it is called.
    about : str
        What it does, in a line.
    apply : Callable[[Work], Work]
        What it does.
    """

    name: str
    about: str
    apply: Callable[[Work], Work] = field(repr=False)

    def __call__(self, work: Work) -> Work:
        """The work one step on."""
        return self.apply(work)

    def __str__(self) -> str:
        return f"{self.name:<13}  {self.about}"


def run(work: Work, passes: Sequence[Pass]) -> Work:
    """The work after all of these passes, in their order."""
    for each in passes:
        work = each(work)
    return work


def _redistribute(work: Work) -> Work:
    if work.mesh is None or not work.redistribute:
        return work
    return replace(work, module=IRModule({"main": redistributed(work.module["main"], work.mesh, work.apart)}))


def _lower(work: Work) -> Work:
    if work.mesh is None or work.lowered is not None:
        return work
    lowered = lower(work.module["main"], work.mesh, backend_of(work.target).page, work.target, work.apart)
    return replace(work, module=lowered.module, lowered=lowered)


def _apply_records(work: Work) -> Work:
    if work.work_dir is None:
        return work
    module, tuned = apply_best(work.module, work.target, work.work_dir)
    return replace(work, module=module, tuned=MappingProxyType(tuned))


def _ranges(work: Work) -> Work:
    module, tuned = with_ranges(work.module, work.target, work.values, work.tuned, work.work_dir)
    return replace(work, module=module, tuned=MappingProxyType({**work.tuned, **tuned}))


def _schedules(work: Work) -> Work:
    chosen = with_default_kernels(work.module, work.target, work.tuned)
    # What can be tuned is kept: of a function with a default schedule there is nothing left to choose.
    return replace(work, module=with_default_schedules(chosen, work.target, work.tuned), scheduled=chosen)


def _tile_kernels(work: Work) -> Work:
    scheduled = work.module if work.scheduled is None else work.scheduled
    module = with_equal_ones_once(with_tile_kernels(work.module, work.target))
    return replace(work, module=module, scheduled=scheduled)


def _build(work: Work) -> Work:
    backend = backend_of(work.target)
    return replace(work, built=backend.build(work.module, work.target, work.store, overlaps(work.module)).module)


REDISTRIBUTE = Pass(
    "redistribute",
    "where that is asked for, copies between the stages move what a device touches and doesn't own",
    _redistribute,
)
LOWER = Pass("lower", "a scheduled function becomes the module that each device of the mesh runs", _lower)
APPLY_RECORDS = Pass("apply records", "functions that were tuned become as the best record says", _apply_records)
RANGES = Pass("ranges", "functions of unknown extents have a schedule for each range of their values", _ranges)
SCHEDULES = Pass("schedules", "functions that nobody scheduled take the schedule that suits the target", _schedules)
TILE_KERNELS = Pass(
    "tile kernels", "nests that chose a tile kernel become its programs, lowered for the target", _tile_kernels
)
BUILD = Pass("build", "functions become machine code", _build)

PASSES = (REDISTRIBUTE, LOWER, APPLY_RECORDS, RANGES, SCHEDULES, TILE_KERNELS, BUILD)
"""The way of a function. On a mesh each worker does the last step for itself, told the builder by name."""

DEVICE_PASSES = (APPLY_RECORDS, RANGES, SCHEDULES, TILE_KERNELS)
"""The way of the module that each device of a mesh runs of a model."""


def lowered_for(
    func: tirx.PrimFunc, mesh: Mesh, page: int = PAGE, target: Target | None = None
) -> tuple[tirx.PrimFunc, Lowered]:
    """Lower a function as `tvm_axe.compile` does unless told otherwise: with copies where a device needs them.

    Parameters
    ----------
    func : PrimFunc
        A function over whole tensors, scheduled for `mesh` or not.
    mesh : Mesh
        The devices.
    page : int
        Bytes of which the distance between slabs is a multiple; the host's page if left out.
    target : Target, optional
        As `tvm_axe.lower.lower` takes it.

    Returns
    -------
    function : PrimFunc
        The function with what was inserted.
    lowered : Lowered
        What each device runs.

    Raises
    ------
    LowerError, LayoutError
        See `tvm_axe.lower.inserting.redistributed` and `tvm_axe.lower.lower`.
    """
    scheduled = redistributed(func, mesh)
    return scheduled, lower(scheduled, mesh, page, target)


def build(mod: IRModule, target: Target) -> Module:
    """What runs a module of scheduled functions on one device: the passes behind the records.

    Parameters
    ----------
    mod : IRModule
        Functions, scheduled for the target as a whole or with nests that chose tile kernels.
    target : Target
        Resolved.

    Raises
    ------
    LowerError
        A block chose a tile kernel that can't compute it.
    TileError
        There is no compiler for CUDA source.
    """
    built = run(Work(mod, target), (TILE_KERNELS, BUILD)).built
    assert isinstance(built, Module)  # no program of Relax
    return built
