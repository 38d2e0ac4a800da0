"""The software pipelines of the uniform model: which loops' loads run ahead by ``cp.async``, and how far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tvm import ir, sym, tirx

from tvm_axe import _tvm
from tvm_axe.errors import TileError
from tvm_axe.tile.nodes import Assign, Copy, Let, Loop, Node, Wait
from tvm_axe.tile.plans import Decisions
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.targets.cuda.instructions import cp_async
from tvm_axe.tile.targets.cuda.residency import Residency
from tvm_axe.tile.targets.cuda.uniform.memory import Pipeline, UniformMemory
from tvm_axe.tile.walking import leaves, variables_in, walk

_STAGES = (4, 3, 2)


def decide_pipelines(
    program: TileProgram, memory: UniformMemory, residency: Residency, decisions: Decisions, able: bool = True
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
    able : bool
        Whether the GPU has copies that run ahead.

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
        waits = any(isinstance(node, Wait) for node in walk(loop.body))
        ahead = {} if waits or loop.until is not None or not able else _ahead(program, loop)
        copies = _sized(ahead, memory, analyzer)
        if not copies or loop.stages == 1:
            why = "they may depend on a wait in it" if waits else "as annotated" if copies else "none can"
            why = why if loop.until is None else "it may end early"
            why = why if able else "there are no copies that run ahead"
            decisions.add(f"loop {loop.var.name}", "loads don't run ahead", why)
            continue
        memory = _with_stages(memory, loop, (copies, {copy: ahead[copy] for copy in copies}), residency, decisions)
    if memory.bytes > residency.shared_bytes:
        tiles = ", ".join(f"{tile.name} {memory.slots(tile)} x {memory.slot_bytes(tile)}" for tile in memory.layouts)
        raise TileError(
            f"shared memory: {memory.bytes} bytes ({tiles}, exchanges {memory.scratch}); a block has {residency.share}"
        )
    return memory


def _with_stages(
    memory: UniformMemory,
    loop: Loop,
    loads: tuple[dict[Copy, int], dict[Copy, Copy]],
    residency: Residency,
    decisions: Decisions,
) -> UniformMemory:
    name = f"loop {loop.var.name}"
    if loop.stages:
        decisions.add(name, f"{loop.stages} stages of cp.async", "as annotated")
        return _pipelined(memory, loop, Pipeline(*loads, loop.stages))
    most = residency.shared_bytes
    shallow = most if residency.annotated else most // 2  # so that two blocks fit where nobody says how many
    longest = loop.extent if isinstance(loop.extent, int) else _STAGES[0]
    for stages in [s for s in _STAGES if s <= max(2, longest)]:
        deeper = _pipelined(memory, loop, Pipeline(*loads, stages))
        if deeper.bytes <= shallow or (stages == 2 and deeper.bytes <= most):
            decisions.add(name, f"{stages} stages of cp.async", f"{deeper.bytes} bytes of shared memory")
            return deeper
    decisions.add(name, "loads don't run ahead", "two stages don't fit shared memory")
    return memory


def _pipelined(memory: UniformMemory, loop: Loop, pipeline: Pipeline) -> UniformMemory:
    return replace(memory, pipelines={**memory.pipelines, loop: pipeline})


def _ahead(program: TileProgram, loop: Loop) -> dict[Copy, Copy]:
    """The loads that may be made before the iteration that they belong to, each as it is made then.

    All that fill a tile run ahead, or none. A load is from where names of its iteration say, and they of what the loop
    doesn't change, such as a table's entry: ``page = table[b, j]``.
    """
    inside = set(walk(loop.body))
    outside = [node for node in leaves(program.body) if node not in inside]
    written = {tile.buffer for tile in loop.writes}
    changing = {node.var for node in inside if isinstance(node, Let | Loop)}
    made = dict(_with_names(loop))
    found: dict[Copy, Copy] = {}
    for tile in dict.fromkeys(copy.dst.tile for copy in made):
        writers = [node for node in leaves(loop.body) if tile in node.writes]
        if any(tile in node.reads + node.writes for node in outside) or not all(node in made for node in writers):
            continue
        own = {node: made[node] for node in writers if isinstance(node, Copy)}
        used = [variables_in(*copy.src.start, *copy.dst.start) for copy in own.values()]
        steady = all(not variables & changing and not variables & written for variables in used)
        sources = [copy.src.tile for copy in own]
        if steady and not any(source in loop.writes for source in sources) and _first(loop.body, tile, own):
            found |= own
    return {copy: found[copy] for copy in made if copy in found}


def _with_names(loop: Loop) -> Iterator[tuple[Copy, Copy]]:
    """The copies to shared tiles in a loop's body itself, and the same with what names are in the place of names."""
    names: dict[tirx.Var, Any] = {}
    held: dict[tirx.Buffer, Any] = {}
    assigned = Counter(tile for node in leaves(loop.body) if isinstance(node, Assign) for tile in node.writes)

    def resolved(value: Any) -> Any:
        if isinstance(value, int) or not (names or held):
            return value
        rules = (
            (tirx.Var, lambda var: names.get(var, var)),
            (ir.TensorLoad, lambda load: held.get(load.source, load)),
        )
        return _tvm.structural_map(value, rules)

    for node in loop.body:
        if isinstance(node, Let):
            names[node.var] = resolved(node.value)
        elif isinstance(node, Assign) and node.tile.shape == (1,) and assigned[node.tile] == 1:
            if str(node.value.ty) == node.tile.dtype:
                held[node.tile.buffer] = resolved(node.value)
        elif isinstance(node, Copy) and node.dst.tile.scope == "shared":
            dst, src = (replace(side, start=tuple(map(resolved, side.start))) for side in (node.dst, node.src))
            yield node, replace(node, dst=dst, src=src)


def _sized(ahead: dict[Copy, Copy], memory: UniformMemory, analyzer: sym.Analyzer) -> dict[Copy, int]:
    """The bytes that a thread takes at once, of the loads into tiles all of whose loads ``cp.async`` does."""
    sizes = {copy: cp_async.piece_bytes(analyzer, made, memory.layouts[copy.dst.tile]) for copy, made in ahead.items()}
    whole = {copy.dst.tile for copy in ahead} - {copy.dst.tile for copy, size in sizes.items() if size is None}
    return {copy: size for copy, size in sizes.items() if size is not None and copy.dst.tile in whole}


def _first(body: Sequence[Node], tile: Tile, copies: Collection[Copy]) -> bool:
    """Whether nothing reads a tile before the last of the loads that fill it."""
    last = max(body.index(copy) for copy in copies)
    return all(tile not in node.reads for node in body[:last])
