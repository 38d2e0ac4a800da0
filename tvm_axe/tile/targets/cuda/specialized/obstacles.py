"""Why a program can't be specialized: products that aren't wgmma's, loads that aren't TMA's, control flow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.target import Target

from tvm_axe.machines.registry import described
from tvm_axe.tile.dispatch import TypeTable
from tvm_axe.tile.nodes import (
    Assign,
    Branch,
    Copy,
    Fill,
    Gemm,
    Let,
    Loop,
    Node,
    Parallel,
    Print,
    Reduce,
    Scan,
    Signal,
    Sort,
    Wait,
)
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.targets.cuda.instructions import tma, wgmma
from tvm_axe.tile.targets.cuda.plan import gpu_of
from tvm_axe.tile.targets.cuda.specialized import buffers
from tvm_axe.tile.targets.cuda.specialized.staging import has_storing_warp
from tvm_axe.tile.walking import leaves, substitute, variables_in, walk


def obstacle(program: TileProgram, target: Target) -> str | None:
    """Why a program isn't specialized, as a sentence; None if it can be."""
    if gpu_of(target).tensor_cores != "wgmma":
        return f"{described(target)} has no asynchronous products and copies of tiles"
    gemms = [node for node in program.nodes() if isinstance(node, Gemm)]
    if not gemms:
        return "there is no gemm"
    for gemm in gemms:
        why = _unfit(gemm)
        if why:
            return f"{gemm}: {why}"
    held = _held_operand(program.body, tuple(var for var, _ in program.grid))
    if held is not None:
        return (
            f"{held}: its left operand {held.a.tile.name} is in registers, and no other in each iteration; "
            "ptxas before CUDA 13.3 overwrites it then. A tile.shared has it all the time"
        )
    ending = next((node for node in program.nodes() if isinstance(node, Loop) and node.until is not None), None)
    if ending is not None:
        return f"`{ending}` may end early (while, break), and the producer's loads run ahead of it"
    found = buffers.find(program)
    if isinstance(found, str):
        return found
    if not found:
        return "nothing is loaded from global memory into shared memory"
    written = {tile for node in leaves(program.body) for tile in node.writes}
    analyzer = program.analyzer()
    for buffer in found:
        for copy in buffer.copies + buffer.others:
            why = tma.obstacle(copy.src, copy.dst.tile, analyzer)
            # Of a mesh tensor, what peers have stored is loaded, behind a wait (`tvm_axe.tile.peers`).
            alone = not copy.src.tile.is_mesh and copy.src.tile in written
            why = why or ("it is written in the same kernel" if alone else None)
            if why:
                return f"{copy}: {why}"
    return _steering(program)


def _held_operand(body: tuple[Node, ...], around: tuple[tirx.Var, ...]) -> Gemm | None:
    """The first product whose left operand, a fragment, isn't of the iteration that it is in; or None.

    `around` are the variables of the loop whose body it is, or of the grid. An operand is of the iteration if it is
    written before the product for certain, with something that iterations differ in: what they don't differ in,
    compilers move out of a loop.
    """
    if not any(isinstance(node, Gemm) and node.a.tile.scope == "fragment" for node in walk(body)):
        return None
    return _not_of(body, frozenset(), _varying(body, around))


def _not_of(body: tuple[Node, ...], written: frozenset[Tile], varying: frozenset[Tile]) -> Gemm | None:
    """The first such product of a body, before which `written` is, of an iteration in which `varying` are other."""
    for node in body:
        if isinstance(node, Gemm) and node.a.tile.scope == "fragment" and node.a.tile not in written & varying:
            return node
        for inner in node.bodies:
            found = _held_operand(inner, (node.var,)) if isinstance(node, Loop) else _not_of(inner, written, varying)
            if found is not None:
                return found
        if not node.bodies:
            written |= set(node.writes)
    return None


def _varying(body: tuple[Node, ...], around: tuple[tirx.Var, ...]) -> frozenset[Tile]:
    """The tiles that a body leaves different things in from one value of `around` to the next."""
    names = {*around, *(node.var for node in walk(body) if isinstance(node, Loop))}
    tiles, before = frozenset[Tile](), -1
    while before < len(tiles) + len(names):
        before = len(tiles) + len(names)
        for node in leaves(body):
            own = tiles | set(node.writes)  # what adds to a tile leaves something else there each time
            if own & set(node.reads) or substitute((node,), {name: name + 1 for name in names})[0] is not node:
                tiles |= set(node.writes)
                names |= {node.var} if isinstance(node, Let) else set()
    return tiles


def _unfit(gemm: Gemm) -> str | None:
    why = wgmma.obstacle(gemm)
    if why:
        return f"wgmma: {why}"
    if gemm.instruction not in (None, "wgmma"):
        return f"instruction {gemm.instruction} is annotated"
    if gemm.a.tile.dtype == "float32" and gemm.instruction is None:
        return "wgmma rounds float32 to tf32, which instruction='wgmma' allows"
    return None


def _steering(program: TileProgram) -> str | None:
    """Why a role that waits for no consumer's results can't follow the control flow; None if all can."""
    apart = has_storing_warp(program)
    steering: list[Any] = []
    for node in program.nodes():
        steering += _STEERING.of(node)(node, apart)
    # Every role computes names and local tiles for itself; what all else writes, consumers alone know.
    followed = {tile for node in program.nodes() if isinstance(node, Let | Assign) for tile in node.writes}
    others = (node for node in leaves(program.body) if not isinstance(node, Let | Assign | Wait | Signal))
    unknown = {tile for node in others for tile in node.writes}
    unknown |= {tile for tile in program.tiles if tile not in followed}
    read = variables_in(*steering)
    blocking = [tile for tile in (*program.tiles, *program.params) if tile in unknown and tile.buffer in read]
    steered = "loops, loads, stores or flags" if apart else "loops or loads"
    return f"{blocking[0]}, which only consumers know, steers {steered}" if blocking else None


def _none(node: Node, apart: bool) -> tuple[Any, ...]:
    return ()


def _operands(node: Loop | Branch, apart: bool) -> tuple[Any, ...]:
    return node.operands


def _scalars(node: Wait | Signal, apart: bool) -> tuple[Any, ...]:
    return node.scalars


def _value(node: Let | Assign, apart: bool) -> tuple[Any, ...]:
    return (node.value,)


def _place(node: Copy, apart: bool) -> tuple[Any, ...]:
    """Where TMA loads from, and where a storing warp stores to."""
    if node.src.tile.scope == "global" and node.dst.tile.scope == "shared":
        return node.src.start
    return node.dst.start if node.dst.tile.scope == "global" and apart else ()


_STEERING: TypeTable[Callable[[Any, bool], tuple[Any, ...]]] = TypeTable(
    "what steers roles",
    {
        Assign: _value,
        Branch: _operands,
        Copy: _place,
        Fill: _none,
        Gemm: _none,
        Let: _value,
        Loop: _operands,
        Parallel: _none,
        Print: _none,
        Reduce: _none,
        Scan: _none,
        Sort: _none,
        Signal: _scalars,
        Wait: _scalars,
    },
)
"""The expressions of a node that the producer, and the storing warp if there is one (`apart`), compute."""
