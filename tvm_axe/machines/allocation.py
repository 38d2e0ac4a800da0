"""Memory inside a function of symbolic extents: as much as is declared.

Upstream allocates of a buffer that lives inside of a function what it sees to be touched, an interval in each
dimension. Of a loop that runs over several dimensions at once an index is a quotient, ``i // n``. The interval of a
quotient by what may be negative or 0, for all that upstream knows, is a choice among quotients by the same. The
compiler divides by 0 when it simplifies such choices one inside the other. So does the compiled function, which works
out of them how much to allocate, of a dimension of no elements, too. And quotients of quotients are taken for a single
index, with the loops' variables in it. So what several nests have in common, which is declared as they need it, is
indexed here in a way in which upstream sees no interval: by the bits of the same number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import tvm_ffi
from tvm import ir, s_tir, tirx

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import substitute, variables_of

__all__ = ["allocated_as_declared"]

_QUOTIENTS = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)


@tirx.transform.prim_func_pass(opt_level=0)
def allocated_as_declared(func: tirx.PrimFunc, _mod: ir.IRModule, _context: ir.transform.PassContext) -> tirx.PrimFunc:
    """The pass that has upstream allocate whole what several nests of a function of blocks have in common.

    It concerns buffers that are indexed by quotients of which the divisor isn't known.
    """
    common = _common(func)
    if not common:
        return func
    values = _values(func.body)

    def hidden(index: tirx.Expr) -> tirx.Expr:
        """The index with the bits of its quotients in their place; they are of the bits of loops' variables."""
        on_quotient = [(kind, lambda expr: expr if _is_known(expr) else _bits(_of_loops(expr))) for kind in _QUOTIENTS]
        return _tvm.structural_map(index, [*on_quotient, (tirx.Var, on_iterator)])

    def on_iterator(var: tirx.Var) -> tirx.Expr:
        return _bits(values[var]) if var in values and _has_quotient(values[var]) else var

    def _of_loops(expr: tirx.Expr) -> tirx.Expr:
        return substitute(_without_bits(expr), values)

    def on_load(load: ir.TensorLoad) -> ir.TensorLoad:
        return tirx.BufferLoad(load.source, [*map(hidden, load.indices)]) if load.source in common else load

    def on_store(store: tirx.BufferStore) -> tirx.BufferStore:
        if store.buffer not in common:
            return store
        return tirx.BufferStore(store.buffer, store.value, [*map(hidden, store.indices)])

    return func.with_body(_tvm.structural_map(func.body, [(ir.TensorLoad, on_load), (tirx.BufferStore, on_store)]))


def _common(func: tirx.PrimFunc) -> set[tirx.Buffer]:
    """The buffers inside of a function that more than one of its nests touches."""
    if not isinstance(func.body, s_tir.SBlockRealize):
        return set()
    counts: Counter[tirx.Buffer] = Counter()
    for nest in _nests(func.body.block.body):
        touched: list[tirx.Buffer] = []
        on_load = ir.TensorLoad, lambda load, touched=touched: touched.append(load.source)
        on_store = tirx.BufferStore, lambda store, touched=touched: touched.append(store.buffer)
        tvm_ffi.structural_walk(nest, [on_load, on_store])
        counts.update({*touched})
    return {buffer for buffer in func.body.block.alloc_buffers if counts[buffer] > 1}


def _nests(stmt: tirx.Stmt) -> Iterator[tirx.Stmt]:
    """The statements that aren't made of others, but by loops: also those of branches, of which one runs."""
    if isinstance(stmt, tirx.IfThenElse):
        yield from _nests(stmt.then_case)
        if stmt.else_case is not None:
            yield from _nests(stmt.else_case)
    elif isinstance(stmt, tirx.SeqStmt):
        for each in stmt.seq:
            yield from _nests(each)
    else:
        yield stmt


def _values(stmt: tirx.Stmt) -> Mapping[tirx.Var, tirx.Expr]:
    """What the iterators of all blocks are in terms of loops' variables, and these, of each its bits."""
    loops: list[tirx.For] = []
    realizes: list[s_tir.SBlockRealize] = []
    tvm_ffi.structural_walk(stmt, [(tirx.For, loops.append), (s_tir.SBlockRealize, realizes.append)])
    bound = {iv.var: value for each in realizes for iv, value in zip(each.block.iter_vars, each.iter_values)}
    while inner := {var: value for var, value in bound.items() if variables_of(value) & {*bound}}:
        bound |= {var: substitute(value, bound) for var, value in inner.items()}
    bits: dict[tirx.Var, tirx.Expr] = {loop.loop_var: _bits(loop.loop_var) for loop in loops}
    return {**bits, **{var: substitute(value, bits) for var, value in bound.items()}}


def _has_quotient(expr: tirx.Expr) -> bool:
    found: list[tirx.Expr] = []
    tvm_ffi.structural_walk(expr, [(kind, found.append) for kind in _QUOTIENTS])
    return not all(map(_is_known, found))


def _is_known(quotient: tirx.Expr) -> bool:
    return isinstance(quotient.b, tirx.IntImm)


_BITS = "tirx.reinterpret"


def _bits(index: tirx.Expr) -> tirx.Expr:
    """The bits of an index as one of the same type, which are no instruction."""
    return tirx.call_intrin(str(index.ty), _BITS, index)


def _without_bits(expr: tirx.Expr) -> tirx.Expr:
    """What `_bits` is of, anywhere in an expression."""

    def on_call(call: ir.Call) -> tirx.Expr:
        same = isinstance(call.op, ir.Op) and call.op.name == _BITS and str(call.ty) == str(call.args[0].ty)
        return call.args[0] if same else call

    return _tvm.structural_map(expr, (ir.Call, on_call))
