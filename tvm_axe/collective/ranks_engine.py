"""The engine ``"ranks"``: the ranks of a job, whose messages go by TCP or MPI, as they were started."""

from __future__ import annotations

from typing import Any

from tvm_axe.collective import ranked, start
from tvm_axe.collective.engine import Engine, Finding
from tvm_axe.collective.messages import Messages
from tvm_axe.collective.mpi_messages import MpiMessages
from tvm_axe.collective.rendezvous import Variables, meet
from tvm_axe.collective.tcp import TcpMessages
from tvm_axe.errors import InputError
from tvm_axe.layout import Mesh


def start_messages(timeout: float) -> Messages:
    """Return messages with the other ranks of the job that this process was started in, however that was.

    Raises
    ------
    InputError
        If it was started in none.
    WorkerError
        If ranks don't come in time.
    """
    variables = Variables.told()
    if variables is not None:
        return TcpMessages(variables.rank, meet(variables, timeout))
    if start.is_rank():
        return MpiMessages.started(timeout)
    raise InputError(
        "launch: this process is no rank of a job: start it by torchrun, by mpiexec, or by tvm-axe run --hosts, or set "
        "RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each"
    )


def of_job() -> bool:
    """Whether this process was started as a rank of a job of several."""
    return Variables.told() is not None or start.ranks() > 1


class RanksEngine(Engine):
    """The workers are the ranks of the job that this process is one of, however it was started."""

    name = "ranks"
    has_ranks = True

    def findings(self) -> list[Finding]:
        found = super().findings()
        try:
            variables = Variables.told()
        except InputError as error:
            return [*found, Finding("job", str(error), "start the ranks by torchrun, mpiexec or tvm-axe run --hosts")]
        if variables is not None:
            where = f"{variables.address}:{variables.port}"
            return [*found, Finding("job", f"rank {variables.rank} of {variables.size}, by TCP, which meet at {where}")]
        return [*found, Finding("job", "a rank of mpiexec's" if start.is_rank() else "this process is no rank of one")]

    def launch(self, mesh: Mesh, timeout: float, **options: Any) -> ranked.RankedSession:
        self.options(options)
        return ranked.launch(start_messages, mesh, timeout)


RANKS = RanksEngine()
