"""A schedule as CoCoNet writes it: ``ol(MM, fuse(RS-C-AG))``.

MM is a product that sums (a matmul), C any other computing, AR, RS, AG, R, B, A2A and P2P the collectives; ``fuse`` has
what one kernel does, ``ol`` the stages that overlap. (Jangda et al., ASPLOS 2022, section 6.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import ir, tirx

from tvm_axe.lower.derive import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BROADCAST,
    EXCHANGE,
    REDUCE,
    REDUCE_SCATTER,
    SEND,
    Step,
    push_axis,
    remote_axis,
)
from tvm_axe.lower.infer import Sharding
from tvm_axe.lower.order import regions
from tvm_axe.lower.program import Block
from tvm_axe.schedule.query import is_copy, is_product

_LETTERS = {
    ALL_REDUCE: "AR",
    REDUCE_SCATTER: "RS",
    ALL_GATHER: "AG",
    REDUCE: "R",
    BROADCAST: "B",
    ALL_TO_ALL: "A2A",
    SEND: "P2P",
    EXCHANGE: "X",
}


def notation(steps: Sequence[Step], shardings: Mapping[tirx.Buffer, Sharding]) -> str:
    """The steps in one line."""
    parts = []
    for group in regions(steps):
        stages = [_stage(step, shardings) for step in group]
        parts.append(f"ol({', '.join(stages)})" if group[0].stage.overlap is not None else stages[0])
    return "-".join(_merged(parts))


def _stage(step: Step, shardings: Mapping[tirx.Buffer, Sharding]) -> str:
    if step.kind in _LETTERS:
        return _LETTERS[step.kind]
    letters = _merged([letter for block in step.stage.blocks for letter in _block(block, shardings)])
    text = "-".join(letters)
    return f"fuse({text})" if step.axis is not None and len(letters) > 1 else text


def _block(block: Block, shardings: Mapping[tirx.Buffer, Sharding]) -> list[str]:
    """What a block does: how it communicates, then what it computes."""
    statement = block.realize.block
    (write,) = block.writes
    pulled = [access for access in block.reads if remote_axis(access, shardings[access.buffer]) is not None]
    if push_axis(write, shardings[write.buffer]) is not None:
        return ["AG"]
    if not pulled:
        return ["MM" if is_product(statement) else "C"]
    axis = remote_axis(pulled[0], shardings[pulled[0].buffer])
    if axis is not None and block.peer_dims(pulled[0], axis):
        return ["RS" if axis in shardings[write.buffer].axes else "AR"]
    held = axis in shardings[pulled[0].buffer].axes and axis in shardings[write.buffer].axes
    if is_copy(statement):
        return ["A2A" if held else "AG"]
    return ["P2P"] if isinstance(statement.body.value, ir.TensorLoad) else ["P2P", "C"]


def _merged(parts: Sequence[str]) -> list[str]:
    """The parts, with neighbours that say the same said once."""
    return [part for i, part in enumerate(parts) if i == 0 or part != parts[i - 1]]
