"""One function of several variants of it: each for a range of values."""

from __future__ import annotations

from collections.abc import Sequence

import tvm_ffi
from tvm import s_tir, tirx

from tvm_axe.analysis.blocks import nested_blocks, statements
from tvm_axe.analysis.expressions import substitute
from tvm_axe.records.packing import PREPROC

__all__ = ["merged", "parts", "told"]


def told(name: str, ends: Sequence[int], forms: Sequence[str]) -> list[str]:
    """What is run for which values of a name, a line for each variant; `ends` are the variants' but the last one's."""
    said = [f"{name} <= {end}" for end in ends] + [f"{name} > {ends[-1]}" if ends else f"any {name}"]
    return [f"{values}: {form}" for values, form in zip(said, forms, strict=True)]


def merged(variants: Sequence[tuple[int, tirx.PrimFunc]], driving: tirx.Expr) -> tirx.PrimFunc:
    """The function that goes on as that variant does which is for the value of `driving`; what packs comes first."""
    first = variants[0][1]
    packed, body, buffers = parts(first)
    branches, bounds = [body], [value for value, _ in variants]
    for _, other in variants[1:]:
        own, body, more = parts(other)
        assert len(own) == len(packed)  # each packs as the first does
        fresh = {var: tirx.Var(var.name, var.ty) for var in _defined(body)}
        fresh |= {block.writes[0].source: ours.writes[0].source for (_, block), (_, ours) in zip(own, packed)}
        branches.append(substitute(body, fresh))
        buffers += [buffer for buffer in more if buffer not in fresh and buffer not in buffers]
    chosen = branches[-1]
    for bound, branch in reversed([*zip(bounds, branches[:-1])]):
        chosen = tirx.IfThenElse(driving <= bound, branch, chosen)
    root = first.body.block
    whole = tirx.SeqStmt([*(nest for nest, _ in packed), chosen]) if packed else chosen
    block = s_tir.SBlock([], root.reads, root.writes, root.name_hint, whole, None, buffers, [], root.annotations)
    return s_tir.renew_defs(first.with_body(s_tir.SBlockRealize([], True, block)))


def _defined(body: tirx.Stmt) -> list[tirx.Var]:
    """The variables of loops and blocks, which two schedules of a function may have in common."""
    found: list[tirx.Var] = []
    tvm_ffi.structural_walk(
        body,
        [(tirx.For, lambda loop: found.append(loop.loop_var)), (tirx.IterVar, lambda it: found.append(it.var))],
    )
    return found


def parts(func: tirx.PrimFunc) -> tuple[list[tuple[tirx.Stmt, s_tir.SBlock]], tirx.Stmt, list[tirx.Buffer]]:
    """The nests that pack weights, each with its block; all others; and what the root allocates."""
    root = func.body.block
    packing: list[tuple[tirx.Stmt, s_tir.SBlock]] = []
    rest = []
    for nest in statements(root.body):
        (block, *more) = [nested.block for nested in nested_blocks(nest)]
        if not more and PREPROC in block.annotations:
            packing.append((nest, block))
        else:
            rest.append(nest)
    return packing, tirx.SeqStmt(rest) if len(rest) > 1 else rest[0], list(root.alloc_buffers)
