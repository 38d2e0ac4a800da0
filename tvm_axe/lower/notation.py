"""A schedule as CoCoNet writes it: ``ol(MM, fuse(RS-C-AG))``.

MM is a product that sums (a matmul), each by itself, C any other computing, AR, RS, AG, R, B, A2A and P2P the
collectives; ``fuse`` has what one kernel does, ``ol`` the stages that overlap. (Jangda et al., ASPLOS 2022, section 6.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import ir, tirx

from tvm_axe.analysis.patterns import is_copy, is_product
from tvm_axe.layout.collectives import Collective
from tvm_axe.lower.derive import EXCHANGE, Step
from tvm_axe.lower.infer import Sharding
from tvm_axe.lower.order import regions
from tvm_axe.lower.program import Block
from tvm_axe.lower.reaching import push_axis, remote_axis

_PRODUCT = "MM"


def notation(steps: Sequence[Step], shardings: Mapping[tirx.Buffer, Sharding]) -> str:
    """The steps in one line."""
    parts = []
    for group in regions(steps):
        stages = [_stage(step, shardings) for step in group]
        parts.append(f"ol({', '.join(stages)})" if group[0].stage.overlap is not None else stages[0])
    return "-".join(_merged(parts))


def _stage(step: Step, shardings: Mapping[tirx.Buffer, Sharding]) -> str:
    if isinstance(step.kind, Collective):
        return step.kind.letters
    if step.kind == EXCHANGE:
        return "X"
    letters = _merged([letter for block in step.stage.blocks for letter in _block(block, shardings)])
    text = "-".join(letters)
    return f"fuse({text})" if step.axis is not None and len(letters) > 1 else text


def _block(block: Block, shardings: Mapping[tirx.Buffer, Sharding]) -> list[str]:
    """What a block does: how it communicates, then what it computes."""
    statement = block.realize.block
    (write,) = block.writes
    pulled = [access for access in block.reads if remote_axis(access, shardings[access.buffer]) is not None]
    if push_axis(write, shardings[write.buffer]) is not None:
        return [Collective.ALL_GATHER.letters]
    if not pulled:
        return [_PRODUCT if is_product(statement) else "C"]
    axis = remote_axis(pulled[0], shardings[pulled[0].buffer])
    if axis is not None and block.peer_dims(pulled[0], axis):
        scatters = axis in shardings[write.buffer].axes
        return [(Collective.REDUCE_SCATTER if scatters else Collective.ALL_REDUCE).letters]
    held = axis in shardings[pulled[0].buffer].axes and axis in shardings[write.buffer].axes
    if is_copy(statement):
        return [(Collective.ALL_TO_ALL if held else Collective.ALL_GATHER).letters]
    send = Collective.SEND.letters
    return [send] if isinstance(statement.body.value, ir.TensorLoad) else [send, "C"]


def _merged(parts: Sequence[str]) -> list[str]:
    """The parts, with neighbours that say the same said once, but for products: each of them is one."""
    return [part for i, part in enumerate(parts) if i == 0 or part != parts[i - 1] or _PRODUCT in part]
