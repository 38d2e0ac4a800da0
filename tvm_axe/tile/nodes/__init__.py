"""The nodes of a tile program, which say what a block does.

Nodes keep upstream's variables and expressions. What every node has (`Statement`, with `reads` and `writes`) says which
tiles and tensors it touches, so that checks and targets find dependences without looking at what kind of node it is;
where the kind matters, they have a table with an entry a kind (`tvm_axe.tile.dispatch`).

To add a node takes

1. its class in this package, a frozen dataclass that derives from `Statement`, in the union `Node`: `reads`, `writes`,
   `__str__`, and what it has of `regions`, `operands` and `bodies`;
2. its word in `tvm_axe.tile.language`, and an entry in a table of `tvm_axe.tile.reading`, by what upstream makes of it;
   a word that upstream has no primitive for is a call (`tvm_axe.tile.calls`);
3. its rules, an entry in a table each: `tvm_axe.tile.checks` (what must hold on every target) and `tvm_axe.tile.races`
   (what it stores, from several blocks);
4. an entry in the tables of each target: for CPUs in ``targets/llvm/emit.py``; for GPUs in ``targets/cuda/fragments``
   (`emit` the code, `infer` what follows for layouts, `scratch` the memory for exchanges), ``uniform`` (`emit`,
   `hazards`, `memory`) and ``specialized`` (`obstacles`, `ordering`, `schedule` for consumers, `one_thread` for the
   other roles, with an entry in `producer` or `storer` where one of these does it);
5. its meaning in the judge of the tests, ``tests/tile/interpreter.py``. ``tests/tile/test_dispatch.py`` knows all
   tables, and fails for each that has no entry for a node.
"""

from tvm_axe.tile.nodes.control import Assign, Branch, Let, Loop
from tvm_axe.tile.nodes.elements import Copy, Fill, Parallel, Print
from tvm_axe.tile.nodes.flags import Signal, Wait
from tvm_axe.tile.nodes.statement import Statement
from tvm_axe.tile.nodes.tiles import Gemm, Reduce, Scan, Sort

__all__ = [
    "Assign",
    "Branch",
    "Copy",
    "Fill",
    "Gemm",
    "Let",
    "Loop",
    "Node",
    "Parallel",
    "Print",
    "Reduce",
    "Scan",
    "Signal",
    "Sort",
    "Statement",
    "Wait",
]

Node = Copy | Fill | Gemm | Reduce | Sort | Scan | Parallel | Loop | Branch | Let | Assign | Wait | Signal | Print
