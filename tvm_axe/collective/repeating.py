"""Whether a program tells devices the same each time, so that what it told them once can be told again as it is."""

from __future__ import annotations

import tvm
from tvm.ir import IRModule

__all__ = ["repeats"]


def repeats(mod: IRModule) -> bool:
    """Return whether a program always tells devices the same, if its arguments are.

    What allocates may get other memory the next time, and functions that aren't the program's or the workers' may do
    anything.
    """
    found: list[str] = []

    def visit(node: tvm.relax.Expr) -> None:
        if isinstance(node, tvm.relax.ExternFunc) and not str(node.global_symbol).startswith("axe."):
            found.append(str(node.global_symbol))
        elif isinstance(node, tvm.relax.Call) and "alloc_tensor" in str(getattr(node.op, "name", "")):
            found.append(str(node.op.name))

    for _, function in mod.functions_items():
        if isinstance(function, tvm.relax.Function):
            tvm.relax.analysis.post_order_visit(function, visit)
    return not found
