"""Code for what threads do by themselves, all but products, flags and control flow, given where everything lives.

Both models of a CUDA kernel use it, inside upstream's IR builder::

    threads = Threads(256, tx, lambda: T.evaluate(T.cuda.cta_sync()))
    emitter = Emitter(threads, storages, analyzer, scratch)
    emit(emitter, node)

No synchronisation is emitted but around uses of the emitter's scratch: what one node wrote to shared memory and another
reads is the caller's to separate. What is stored to memory by several threads that hold copies is stored by the first
of them. Expressions may hold any variable that is defined where a node is emitted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_axe.tile.dispatch import TypeTable
from tvm_axe.tile.nodes import Assign, Copy, Fill, Let, Node, Parallel, Print, Reduce, Scan, Sort
from tvm_axe.tile.targets.cuda.fragments.copies import copy, fill
from tvm_axe.tile.targets.cuda.fragments.emitter import Emitter
from tvm_axe.tile.targets.cuda.fragments.layout import linear
from tvm_axe.tile.targets.cuda.fragments.points import parallel
from tvm_axe.tile.targets.cuda.fragments.prints import print_lines
from tvm_axe.tile.targets.cuda.fragments.reductions import reduce
from tvm_axe.tile.targets.cuda.fragments.scans import scan
from tvm_axe.tile.targets.cuda.fragments.sorts import sort

Names = dict[tirx.Var, tirx.Expr]


def emit(emitter: Emitter, node: Node) -> Names:
    """Emit a node; of a Let, returns the variable that stands for its name from here on, to be substituted.

    Raises
    ------
    TileError
        A thread would need what another holds.
    """
    return NODES.of(node)(emitter, node) or {}


def _let(emitter: Emitter, node: Let) -> Names:
    return {node.var: T.bind(emitter.expression(node.value))}


def _assign(emitter: Emitter, node: Assign) -> None:
    held = emitter.registers(node.tile)
    register = linear([emitter.expression(i) for i in node.indices], node.tile.shape)
    T.buffer_store(held.buffer, emitter.expression(node.value), [register])


NODES: TypeTable[Callable[[Emitter, Any], Names | None]] = TypeTable(
    "code of a block's threads",
    {
        Assign: _assign,
        Copy: copy,
        Fill: fill,
        Let: _let,
        Parallel: parallel,
        Print: print_lines,
        Reduce: reduce,
        Scan: scan,
        Sort: sort,
    },
)
