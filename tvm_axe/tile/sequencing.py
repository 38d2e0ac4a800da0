"""From the plan of several kernels to one function, which runs them one after the other.

The kernels' code is what each would have alone. On a GPU host code launches them on the stream of the call; on a CPU a
kernel's blocks are done before those of the next begin. Scratch is allocated by the function itself, or by who calls
it, and then is its last parameters.
"""

from __future__ import annotations

from tvm import tirx

from tvm_axe.machines import Built
from tvm_axe.tile.backend import tile_backend_of
from tvm_axe.tile.plans import Plan, SequencePlan
from tvm_axe.tile.strides import with_checks

__all__ = ["in_sequence", "kernels_of", "takes_scratch"]

_NO_ALIAS = "tirx.noalias"


def takes_scratch(decided: SequencePlan) -> bool:
    """Whether who calls the function allocates its scratch: where several streams may run calls of one thread at once.

    What a function allocates itself is its thread's, given back when the call returns. On a CPU that is when the call
    is over; on a GPU its kernels may still run then, and the next call use the same memory on another stream.
    """
    return bool(decided.program.scratch) and not tile_backend_of(decided.target).on_host


def in_sequence(decided: SequencePlan, given: bool = False) -> tirx.PrimFunc:
    """The function that upstream compiles for the target.

    Parameters
    ----------
    decided : SequencePlan
        The plan.
    given : bool
        Whether the scratch is given: one more parameter for each tensor, in order, behind the function's own.
    """
    program, backend = decided.program, tile_backend_of(decided.target)
    scratch = [tile.buffer for tile in program.scratch]
    body: list[tirx.Stmt] = [] if given else [tirx.AllocBuffer(buffer) for buffer in scratch]
    attrs: dict[str, object] = {}
    alone = True  # whether no two tensors share memory
    for plan in decided.kernels:
        made = backend.emit(plan)  # whose parameters are the function's own and its scratch
        body.append(made.body)
        attrs |= {str(key): value for key, value in made.attrs.items()}
        alone = alone and bool(made.attrs.get(_NO_ALIAS, True))
    if _NO_ALIAS in attrs:
        attrs[_NO_ALIAS] = alone
    params = [*program.func.params, *(scratch if given else [])]
    func = tirx.PrimFunc(params, tirx.SeqStmt(body) if len(body) > 1 else body[0], program.func.ret_type)
    written = {tile.buffer: tile for node in program.nodes() for tile in node.writes if tile.scope == "global"}
    return with_checks(func, written.values()).with_attrs({**attrs, "global_symbol": program.name})


def kernels_of(decided: Plan | SequencePlan, built: Built) -> list[tuple[Plan, Built]]:
    """The plan of each kernel, and what was built of it as if it had been alone."""
    if isinstance(decided, Plan):
        return [(decided, built)]
    found: list[tuple[Plan, Built]] = []
    for number, plan in enumerate(decided.kernels):
        # Upstream numbers the kernels of a function from the second on.
        there, own = f"{decided.program.name}_kernel{f'_{number}' * (number > 0)}", f"{plan.program.name}_kernel"
        resources = {own: built.resources[there]} if there in built.resources else {}
        remarks = {own: built.remarks[there]} if there in built.remarks else {}
        found.append((plan, built._replace(resources=resources, remarks=remarks)))
    return found
