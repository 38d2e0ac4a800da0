"""The engine ``"mpi"``: the ranks of a job that `mpiexec` started, by MPI."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from tvm_axe.collective import initialize, ranked
from tvm_axe.collective.engine import Engine, Finding
from tvm_axe.collective.mpi_messages import MpiMessages
from tvm_axe.collective.start import mpiexec
from tvm_axe.errors import InputError
from tvm_axe.layout import Mesh

LIBRARY = "MPI library"  # what the finding of it is called


class MpiEngine(Engine):
    """The workers are the ranks of the MPI job that this process is one of."""

    name = "mpi"
    has_ranks = True
    packages = ("mpi4py",)

    def findings(self) -> list[Finding]:
        found = super().findings()
        try:
            version: str | None = metadata.version("mpi4py")
        except metadata.PackageNotFoundError:
            version = None
        remedy = "pip install tvm-axe[mpi]"
        found.append(Finding("mpi4py", version or "missing", None if version else remedy))
        if version:
            found.append(_library(remedy))
        try:
            found.append(Finding("mpiexec", mpiexec()))
        except InputError:
            found.append(Finding("mpiexec", "missing", remedy))
        return found

    def launch(self, mesh: Mesh, timeout: float, **options: Any) -> ranked.RankedSession:
        """Launch workers as rank 0; on another rank, serve rank 0's launches and never return.

        Raises
        ------
        InputError
            If mpi4py isn't there, the number of ranks isn't the mesh's, or ranks were launched with other meshes.
        WorkerError
            If a worker didn't start, or the job has lost ranks.
        """
        self.options(options)
        return ranked.launch(MpiMessages.started, mesh, timeout)


def _library(remedy: str) -> Finding:
    """The library that mpi4py finds, which isn't started."""
    try:
        first, *_ = initialize.load_mpi().Get_library_version().splitlines()
    except InputError as error:
        return Finding(LIBRARY, f"missing: {error}", remedy)
    return Finding(LIBRARY, " ".join(first.strip("\0").partition(",")[0].split()))


MPI = MpiEngine()
