"""The software pipelines of the uniform model: which loops' loads run ahead by ``cp.async``, and how far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm_axe.errors import TileError
from tvm_axe.tile.nodes import Copy, Let, Loop, Node, Wait
from tvm_axe.tile.plans import Decisions
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.targets.cuda.instructions import cp_async
from tvm_axe.tile.targets.cuda.residency import Residency
from tvm_axe.tile.targets.cuda.uniform.memory import Pipeline, UniformMemory
from tvm_axe.tile.walking import variables_in, walk

_STAGES = (4, 3, 2)


def decide_pipelines(
    program: TileProgram, memory: UniformMemory, residency: Residency, decisions: Decisions
) -> UniformMemory:
    """Decide which loops' loads run ahead, and how far.

    Parameters
    ----------
    program : TileProgram
        The program.
    memory : UniformMemory
        The tiles, of which there is one slot each.
    residency : Residency
        How much shared memory a block may have.
    decisions : Decisions
        Where the decisions are written.

    Returns
    -------
    UniformMemory
        The same tiles with their slots.

    Raises
    ------
    TileError
        They take more than that.
    """
    analyzer = program.analyzer()
    for loop in program.nodes():
        if not isinstance(loop, Loop) or loop.stages is None:
            continue
        copies = {}
        waits = any(isinstance(node, Wait) for node in walk(loop.body))
        for node in () if waits or loop.until is not None else loop.body:
            if isinstance(node, Copy) and _runs_ahead(program, loop, node):
                size = cp_async.piece_bytes(analyzer, node, memory.layouts[node.dst.tile])
                if size is not None:
                    copies[node] = size
        if not copies or loop.stages == 1:
            why = "they may depend on a wait in it" if waits else "as annotated" if copies else "none can"
            why = why if loop.until is None else "it may end early"
            decisions.add(f"loop {loop.var.name}", "loads don't run ahead", why)
            continue
        memory = _with_stages(memory, loop, copies, residency, decisions)
    if memory.bytes > residency.shared_bytes:
        tiles = ", ".join(f"{tile.name} {memory.slots(tile)} x {memory.slot_bytes(tile)}" for tile in memory.layouts)
        raise TileError(
            f"shared memory: {memory.bytes} bytes ({tiles}, exchanges {memory.scratch}); a block has {residency.share}"
        )
    return memory


def _with_stages(
    memory: UniformMemory, loop: Loop, copies: dict[Copy, int], residency: Residency, decisions: Decisions
) -> UniformMemory:
    name = f"loop {loop.var.name}"
    if loop.stages:
        decisions.add(name, f"{loop.stages} stages of cp.async", "as annotated")
        return _pipelined(memory, loop, Pipeline(copies, loop.stages))
    most = residency.shared_bytes
    shallow = most if residency.annotated else most // 2  # so that two blocks fit where nobody says how many
    longest = loop.extent if isinstance(loop.extent, int) else _STAGES[0]
    for stages in [s for s in _STAGES if s <= max(2, longest)]:
        deeper = _pipelined(memory, loop, Pipeline(copies, stages))
        if deeper.bytes <= shallow or (stages == 2 and deeper.bytes <= most):
            decisions.add(name, f"{stages} stages of cp.async", f"{deeper.bytes} bytes of shared memory")
            return deeper
    decisions.add(name, "loads don't run ahead", "two stages don't fit shared memory")
    return memory


def _pipelined(memory: UniformMemory, loop: Loop, pipeline: Pipeline) -> UniformMemory:
    return replace(memory, pipelines={**memory.pipelines, loop: pipeline})


def _runs_ahead(program: TileProgram, loop: Loop, copy: Copy) -> bool:
    """Whether a load may be made before the iteration it belongs to."""
    tile = copy.dst.tile
    elsewhere = [node for node in program.nodes() if not isinstance(node, Loop) and tile in node.reads + node.writes]
    inside = set(walk(loop.body))
    writers = [node for node in elsewhere if tile in node.writes]
    if not all(node in inside for node in elsewhere) or writers != [copy] or copy.src.tile in loop.writes:
        return False
    changing = {node.var for node in inside if isinstance(node, Let | Loop)}
    used = variables_in(*copy.src.start)
    return not used & changing and not used & {written.buffer for written in loop.writes} and _first(loop.body, copy)


def _first(body: Sequence[Node], copy: Copy) -> bool:
    """Whether no node before the load reads what it loads."""
    before = body[: body.index(copy)]
    return all(copy.dst.tile not in node.reads for node in before)
