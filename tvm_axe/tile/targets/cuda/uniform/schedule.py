"""The software pipelines of the uniform model: which loops' loads run ahead by ``cp.async``, and how far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tvm import ir, sym, tirx

from tvm_axe import _tvm
from tvm_axe.errors import TileError
from tvm_axe.tile.nodes import Assign, Copy, Let, Loop, Node, Parallel, Wait
from tvm_axe.tile.plans import Decisions
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.targets.cuda.instructions import cp_async
from tvm_axe.tile.targets.cuda.residency import Residency
from tvm_axe.tile.targets.cuda.uniform.gathers import gather_of
from tvm_axe.tile.targets.cuda.uniform.memory import Load, Pipeline, UniformMemory
from tvm_axe.tile.walking import leaves, substitute, variables_in, walk

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
        memory = _with_stages(memory, loop, (copies, {load: ahead[load] for load in copies}), residency, decisions)
    if memory.bytes > residency.shared_bytes:
        tiles = ", ".join(f"{tile.name} {memory.slots(tile)} x {memory.slot_bytes(tile)}" for tile in memory.layouts)
        raise TileError(
            f"shared memory: {memory.bytes} bytes ({tiles}, exchanges {memory.scratch}); a block has {residency.share}"
        )
    return memory


def _with_stages(
    memory: UniformMemory,
    loop: Loop,
    loads: tuple[dict[Load, int], dict[Load, Load]],
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


def _ahead(program: TileProgram, loop: Loop) -> dict[Load, Load]:
    """The loads that may be made before the iteration that they belong to, each as it is made then.

    All that fill a tile run ahead, or none. A load is from where names of its iteration say, and they of what the loop
    doesn't change, such as a table's entry: ``page = table[b, j]``.
    """
    inside = set(walk(loop.body))
    outside = [node for node in leaves(program.body) if node not in inside]
    written = {tile.buffer for tile in loop.writes}
    changing = {node.var for node in inside if isinstance(node, Let | Loop)}
    made = dict(_with_names(loop))
    found: dict[Load, Load] = {}
    for tile in dict.fromkeys(tile for load in made for tile in load.writes):
        writers = [node for node in leaves(loop.body) if tile in node.writes]
        if any(tile in node.reads + node.writes for node in outside) or not all(node in made for node in writers):
            continue
        own = {node: made[node] for node in writers if isinstance(node, Copy | Parallel)}
        used = [_variables(load) for load in own.values()]
        steady = all(not variables & changing and not variables & written for variables in used)
        sources = [source for load in own for source in load.reads]
        if steady and not any(source in loop.writes for source in sources) and _first(loop.body, tile, own):
            found |= own
    return {load: found[load] for load in made if load in found}


def _variables(load: Load) -> frozenset[tirx.Var]:
    """The variables that say from where a load is, and to where."""
    if isinstance(load, Copy):
        return variables_in(*load.src.start, *load.dst.start)
    gather = gather_of(load)
    assert gather is not None, load
    return gather.used


def _with_names(loop: Loop) -> Iterator[tuple[Load, Load]]:
    """The loads of shared tiles in a loop's body itself, and the same with what names are in the place of names."""
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
        elif isinstance(node, Parallel) and gather_of(node) is not None:
            (changed,) = substitute((node,), names)
            # A name may stand for what is loaded, and a gather's places are none of data.
            if isinstance(changed, Parallel) and gather_of(changed) is not None:
                yield node, changed


def _sized(ahead: dict[Load, Load], memory: UniformMemory, analyzer: sym.Analyzer) -> dict[Load, int]:
    """The bytes that a thread takes at once, of the loads into tiles all of whose loads ``cp.async`` does."""
    sizes = {load: _piece_bytes(made, memory, analyzer) for load, made in ahead.items()}
    whole = {tile for load, size in sizes.items() if size is not None for tile in load.writes}
    whole -= {tile for load, size in sizes.items() if size is None for tile in load.writes}
    return {load: size for load, size in sizes.items() if size is not None and whole.issuperset(load.writes)}


def _piece_bytes(load: Load, memory: UniformMemory, analyzer: sym.Analyzer) -> int | None:
    (tile,) = load.writes
    if isinstance(load, Copy):
        return cp_async.piece_bytes(analyzer, load, memory.layouts[tile])
    gather = gather_of(load)
    return None if gather is None else gather.piece_bytes(analyzer, memory.layouts[tile])


def _first(body: Sequence[Node], tile: Tile, loads: Collection[Load]) -> bool:
    """Whether nothing reads a tile before the last of the loads that fill it."""
    last = max(body.index(load) for load in loads)
    return all(tile not in node.reads for node in body[:last])
