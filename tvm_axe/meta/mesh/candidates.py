"""The schedules of a program that a job looks at, each of which is lowered once."""

from __future__ import annotations

import tvm_ffi
from tvm import tirx
from tvm.ir import IRModule

from tvm_axe.errors import LowerError
from tvm_axe.layout import Mesh
from tvm_axe.lower import Lowered
from tvm_axe.lower.cost import operations
from tvm_axe.meta.mesh.devices import Devices
from tvm_axe.meta.mesh.moves import Candidate
from tvm_axe.pipeline import lowered_for
from tvm_axe.records.database import with_only_attrs
from tvm_axe.records.folders import MESH
from tvm_axe.schedule import LAYOUTS

__all__ = ["Candidates", "mesh_of"]


def mesh_of(mod: IRModule) -> Mesh:
    """The mesh of a program's workload, or of a candidate for it."""
    return Mesh.parse(str(mod["main"].attrs[MESH]))


class Candidates:
    """What is known of a program's schedules, by the scheduled function.

    Upstream's searches, cost models and records pass schedules and modules on, with nothing beside them. So what a
    candidate was lowered to is kept here, for the space, the model, the finals, whoever compiles it and the report. A
    function that was met before isn't lowered again, whatever it is called and whatever its attributes but for declared
    layouts; one that the lowering refuses isn't tried again, either.

    It is lowered as `tvm_axe.compile` does it: copies that it needs are inserted (`tvm_axe.lower.inserting`), and are
    stages that cost what they move. No trace has them; who replays one inserts them again.

    Parameters
    ----------
    mesh
        The devices; None if the modules name them, as workloads do.
    devices
        What the devices are; processes of this machine if None.
    """

    def __init__(self, mesh: Mesh | None = None, devices: Devices | None = None) -> None:
        self.mesh, self.devices = mesh, devices or Devices()
        self._lowered: dict[int, tuple[tirx.PrimFunc, Lowered] | LowerError] = {}
        self._firsts: dict[int, int] = {}  # of what devices run, the candidate that was met first
        self._steps: dict[int, tuple[str, ...]] = {}

    def lowered(self, mod: IRModule) -> Lowered:
        """What the devices run of a scheduled module.

        Raises
        ------
        LowerError
            If the lowering refuses it: it is no schedule of the program then.
        """
        return self._found(mod)[1]

    def operations(self, mod: IRModule) -> tuple[float, float]:
        """What `tvm_axe.lower.cost.operations` counts in it; refused where `lowered` is."""
        function, lowered = self._found(mod)
        return operations(function, lowered.mesh)

    def lowered_or_none(self, mod: IRModule) -> Lowered | None:
        """The same; None where the lowering refuses it."""
        try:
            return self.lowered(mod)
        except LowerError:
            return None

    def with_lowered(self, candidate: Candidate) -> Candidate | None:
        """The candidate with what it is lowered to; None where that is refused, or is what one before is lowered to.

        Stages that were fused and communicate over two axes are taken apart again, and then nothing was fused.
        """
        self.note(candidate)
        lowered = self.lowered_or_none(candidate.sch.mod)
        if lowered is None:
            return None
        key = _key(candidate.sch.mod)
        first = self._firsts.setdefault(tvm_ffi.structural_hash(lowered.module), key)
        return Candidate(candidate.sch, candidate.steps, lowered) if first == key else None

    def note(self, candidate: Candidate) -> None:
        """Keep in mind which primitives lead to a candidate."""
        self._steps.setdefault(_key(candidate.sch.mod), candidate.steps)

    def steps(self, mod: IRModule) -> tuple[str, ...]:
        """The primitives that lead to a module, in words; none if it wasn't enumerated here."""
        return self._steps.get(_key(mod), ())

    def _found(self, mod: IRModule) -> tuple[tirx.PrimFunc, Lowered]:
        key = _key(mod)
        if key not in self._lowered:
            try:
                mesh, devices = self.mesh or mesh_of(mod), self.devices
                self._lowered[key] = lowered_for(mod["main"], mesh, devices.page, devices.target)
            except LowerError as error:
                self._lowered[key] = error
        found = self._lowered[key]
        if isinstance(found, LowerError):
            raise found
        return found


def _key(mod: IRModule) -> int:
    func = mod["main"]
    declared = {LAYOUTS: func.attrs[LAYOUTS]} if func.attrs and LAYOUTS in func.attrs else {}
    return tvm_ffi.structural_hash(with_only_attrs(func, declared))
