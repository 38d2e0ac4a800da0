"""Memory inside a function of symbolic extents: as much as is declared.

Upstream allocates of a buffer that lives inside of a function what is seen to be touched, an interval in each dimension.
Of a loop that runs over several dimensions at once an index is a quotient, ``i // n``; of a quotient by what may be
negative or 0, for all that upstream knows, the interval is a choice among quotients by the same. The compiler divides by 0
when it simplifies such choices one inside the other, and the compiled function does so where it works out how much to
allocate, since it does that of a dimension of no elements, too. So what several nests have in common, which is declared as
they need it, is indexed in a way that upstream sees no interval in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

import tvm_ffi
from tvm import ir, s_tir, tirx

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import variables_of

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
    iterators = _quotients(func.body)

    def hidden(index: tirx.Expr) -> tirx.Expr:
        on_quotient = [(kind, lambda expr: expr if _is_known(expr) else _opaque(_shown(expr))) for kind in _QUOTIENTS]
        return _tvm.structural_map(
            index, [*on_quotient, (tirx.Var, lambda var: _opaque(var) if var in iterators else var)]
        )

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
        touched: set[tirx.Buffer] = set()
        tvm_ffi.structural_walk(
            nest,
            [
                (ir.TensorLoad, lambda load, touched=touched: touched.add(load.source)),
                (tirx.BufferStore, lambda store, touched=touched: touched.add(store.buffer)),
            ],
        )
        counts.update(touched)
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


def _quotients(stmt: tirx.Stmt) -> Collection[tirx.Var]:
    """The iterators of blocks that are bound to quotients of which the divisor isn't known, or to what is made of such."""
    bound: list[tuple[tirx.Var, tirx.Expr]] = []
    tvm_ffi.structural_walk(
        stmt,
        (
            s_tir.SBlockRealize,
            lambda realize: bound.extend(zip((iv.var for iv in realize.block.iter_vars), realize.iter_values)),
        ),
    )
    found = {var for var, value in bound if _has_quotient(value)}
    while more := {var for var, value in bound if var not in found and variables_of(value) & found}:
        found |= more
    return found


def _has_quotient(expr: tirx.Expr) -> bool:
    found: list[tirx.Expr] = []
    tvm_ffi.structural_walk(expr, [(kind, lambda each: _is_known(each) or found.append(each)) for kind in _QUOTIENTS])
    return bool(found)


def _is_known(quotient: tirx.Expr) -> bool:
    return isinstance(quotient.b, tirx.IntImm)


_HIDES = "tirx.reinterpret"


def _opaque(index: tirx.Expr) -> tirx.Expr:
    """The index as bits of the same type, which are no instruction and of no interval."""
    return tirx.call_intrin(str(index.ty), _HIDES, index)


def _shown(expr: tirx.Expr) -> tirx.Expr:
    """What is inside of `_opaque`, anywhere in an expression."""

    def on_call(call: ir.Call) -> tirx.Expr:
        same = isinstance(call.op, ir.Op) and call.op.name == _HIDES and str(call.ty) == str(call.args[0].ty)
        return call.args[0] if same else call

    return _tvm.structural_map(expr, (ir.Call, on_call))
