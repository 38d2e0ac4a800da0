"""What a schedule says about its blocks and loops: the questions that the validity rules ask."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Concatenate, ParamSpec, TypeVar

import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.error import InternalError
from tvm.s_tir.schedule import LoopRV, SBlockRV
from tvm.sym import Analyzer

from tvm_axe import _tvm
from tvm_axe.analysis.annotations import BIND, ROOT
from tvm_axe.analysis.blocks import NestedBlock, nested_blocks
from tvm_axe.analysis.expressions import substitute as substitute
from tvm_axe.analysis.expressions import uses as uses
from tvm_axe.errors import ScheduleError

P = ParamSpec("P")
T = TypeVar("T")
SPATIAL, REDUCE = tirx.IterVar.DataPar, tirx.IterVar.CommReduce


_acting = threading.local()


@contextlib.contextmanager
def on_a_copy() -> Iterator[None]:
    """Have primitives act at once within it, on a schedule that is thrown away if one raises."""
    before = getattr(_acting, "at_once", False)
    _acting.at_once = True
    try:
        yield
    finally:
        _acting.at_once = before


def all_or_nothing(
    primitive: Callable[Concatenate[s_tir.Schedule, P], T],
) -> Callable[Concatenate[s_tir.Schedule, P], T]:
    """Have `primitive` leave the schedule and its trace as they are when it raises: it goes over a copy first."""

    @functools.wraps(primitive)
    def on_copy_first(sch: s_tir.Schedule, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not getattr(_acting, "at_once", False):
            with on_a_copy():
                primitive(sch.copy(), *args, **kwargs)
        with on_a_copy():  # the primitives that it is made of needn't be careful any more
            return primitive(sch, *args, **kwargs)

    return on_copy_first


def given(sch: s_tir.Schedule, rv: SBlockRV | LoopRV, primitive: str) -> s_tir.SBlock | tirx.For:
    """Return the statement of a block or loop that was given; an error if the schedule hasn't got it, or no longer."""
    try:
        return sch.get(rv)
    except (IndexError, ValueError) as error:  # upstream's: never of this schedule, and not any more
        kind, source = (
            ("block", "sch.get_sblock(name)") if isinstance(rv, SBlockRV) else ("loop", "sch.get_loops(block)")
        )
        raise ScheduleError(
            f"{primitive}: the {kind} given is not of this schedule, or was changed since; take it from {source}"
        ) from error


def among(sch: s_tir.Schedule, block: SBlockRV, blocks: Sequence[SBlockRV]) -> bool:
    """Return whether `block` is one of `blocks`; two blocks of a function may have the same name."""
    return any(sch.get(block).same_as(sch.get(other)) for other in blocks)


def precedes(sch: s_tir.Schedule, block: SBlockRV, other: SBlockRV) -> bool:
    """Return whether `block` comes before `other` in the program."""
    first, second = sch.get(block), sch.get(other)
    in_order: list[s_tir.SBlock] = []
    for _, func in sch.mod.functions_items():
        tvm_ffi.structural_walk(
            func, (s_tir.SBlock, lambda b: in_order.append(b) if b.same_as(first) or b.same_as(second) else None)
        )
    return in_order[0].same_as(first)


def name_of(sch: s_tir.Schedule, block: SBlockRV) -> str:
    """Return the block's name."""
    return str(sch.get(block).name_hint)


def loop_names(sch: s_tir.Schedule, block: SBlockRV) -> str:
    """Return the block's loops, outermost first, for messages."""
    return ", ".join(sch.get(loop).loop_var.name for loop in sch.get_loops(block)) or "none"


def bound_axis(loop: tirx.For) -> str | None:
    """Return the mesh axis that `loop` is bound to."""
    axis = loop.annotations.get(BIND)
    return None if axis is None else str(axis)


def root_of(block: s_tir.SBlock) -> int | None:
    """Return the coordinate of the one device that runs the cross-device reduction `block`, or None where all do."""
    root = block.annotations.get(ROOT)
    return None if root is None else int(str(root))


def bindings(sch: s_tir.Schedule, block: SBlockRV) -> list[tuple[tirx.IterVar, tirx.Expr]]:
    """Return the block's iterators, each with the expression of loop variables that it is bound to."""
    realize = _tvm.block_realize(sch, block)
    return list(zip(realize.block.iter_vars, realize.iter_values))


def predicate(sch: s_tir.Schedule, block: SBlockRV) -> tirx.Expr | None:
    """Return the condition under which an iteration of the block's loops runs, or None if all do."""
    condition = _tvm.block_realize(sch, block).predicate
    return None if isinstance(condition, tirx.IntImm) and condition.value else condition


def bound_loops(sch: s_tir.Schedule, block: SBlockRV, kind: int) -> dict[str, LoopRV]:
    """Return the block's mesh-bound loops that drive iterators of `kind` (SPATIAL or REDUCE), by mesh axis."""
    found = {}
    for loop in sch.get_loops(block):
        stmt = sch.get(loop)
        axis = bound_axis(stmt)
        driven = {iv.iter_type for iv, value in bindings(sch, block) if uses(value, stmt.loop_var)}
        # A loop of extent 1 (an axis of one device) may drive nothing; it then counts as data-parallel.
        if axis is not None and ((kind in driven) or (kind == SPATIAL and not driven)):
            found[axis] = loop
    return found


def is_sum(block: s_tir.SBlock) -> bool:
    """Return whether the block's body is ``C[..] = C[..] + x[..]`` with a zero init and nothing else."""
    store, init = block.body, block.init
    if not isinstance(store, tirx.BufferStore) or not isinstance(init, tirx.BufferStore):
        return False
    zero = isinstance(init.value, tirx.FloatImm | tirx.IntImm) and init.value.value == 0
    terms = [store.value.a, store.value.b] if isinstance(store.value, tirx.Add) else []
    own = [t for t in terms if isinstance(t, ir.TensorLoad) and t.source.same_as(store.buffer)]
    return bool(zero and len(own) == 1 and all(isinstance(t, ir.TensorLoad) for t in terms))


def summed(block: s_tir.SBlock) -> ir.TensorLoad | None:
    """Return the load x[..] of a block that is ``C[..] = C[..] + x[..]``, or that with a cast of it; else None."""
    store = block.body
    if block.init is None or not isinstance(store, tirx.BufferStore) or not isinstance(store.value, tirx.Add):
        return None
    terms = [term.value if isinstance(term, tirx.Cast) else term for term in (store.value.a, store.value.b)]
    if not all(isinstance(term, ir.TensorLoad) for term in terms):
        return None
    others = [term for term in terms if not term.source.same_as(store.buffer)]
    return others[0] if len(others) == 1 else None


def is_product(block: s_tir.SBlock) -> bool:
    """Return whether the block sums products of two buffers' elements, as a matmul does."""
    found: list[bool] = []

    def on_product(product: tirx.Mul) -> None:
        loads = all(isinstance(factor, ir.TensorLoad) for factor in (product.a, product.b))
        found.append(loads and not product.a.source.same_as(product.b.source))

    if block.init is not None:
        tvm_ffi.structural_walk(block.body, (tirx.Mul, on_product))
    return any(found)


def is_copy(block: s_tir.SBlock) -> bool:
    """Return whether the block's body is ``B[v...] = A[v...]``: the same elements of another buffer."""
    store = block.body
    if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, ir.TensorLoad) or block.init:
        return False
    return bool(tvm_ffi.structural_equal(list(store.indices), list(store.value.indices)))


def shift_of(block: s_tir.SBlock) -> int | None:
    """Return the places that ``Z[s, ...] = C[(s + k) % P, ...]`` moves what it copies along dimension 0; else None.

    ``Z[s] = C[(s + P - 1) % P]`` moves everything by 1, to the next place.
    """
    store = block.body
    if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, ir.TensorLoad) or block.init:
        return None
    written, read = list(store.indices), list(store.value.indices)
    leading = block.iter_vars[0] if block.iter_vars else None
    if leading is None or len(written) != len(read) or not written or not written[0].same_as(leading.var):
        return None
    if len(written) > 1 and not tvm_ffi.structural_equal(written[1:], read[1:]):
        return None
    size = int(leading.dom.extent)
    places = [Analyzer().simplify(substitute(read[0], {leading.var: tirx.IntImm("int32", s)})) for s in range(size)]
    if not all(isinstance(place, tirx.IntImm) for place in places) or int(store.value.source.shape[0]) != size:
        return None
    shift = -int(places[0]) % size
    return shift if all(int(place) == (s - shift) % size for s, place in enumerate(places)) else None


def gathered(sch: s_tir.Schedule, block: SBlockRV, primitive: str) -> tuple[str, int]:
    """Return the mesh axis and the dimension that the all-gather `block` gathers; an error if it is none."""
    producers = sch.get_producers(block)
    if is_copy(sch.get(block)) and len(producers) == 1:
        own = sharded_dims(sch, block)
        for axis, dim in sharded_dims(sch, producers[0]).items():
            if axis not in own:
                return axis, dim
    raise ScheduleError(
        f"{primitive}: block {name_of(sch, block)!r} is not an all-gather: valid is a copy of a buffer whose producer "
        "is bound to a mesh axis, as split_collective leaves it"
    )


def sharded_dims(sch: s_tir.Schedule, block: SBlockRV) -> dict[str, int]:
    """Return the dimension of the block's result that each mesh axis shares, by axis."""
    found = {}
    for axis, loop in bound_loops(sch, block, SPATIAL).items():
        for iv, value in bindings(sch, block):
            if uses(value, sch.get(loop).loop_var):
                dims = [dim for dim, index in enumerate(sch.get(block).body.indices) if iv.var.same_as(index)]
                found.update({axis: dims[0]} if dims else {})
    return found


def is_parameter(sch: s_tir.Schedule, buffer: tirx.Buffer) -> bool:
    """Return whether `buffer` is a parameter of the function."""
    return any(buffer.same_as(param) for _, func in sch.mod.functions_items() for param in func.params)


def nested(sch: s_tir.Schedule) -> list[NestedBlock]:
    """Return the outermost blocks of the schedule's functions, in order; nothing is recorded in its trace."""
    funcs = [func for _, func in sch.mod.functions_items() if isinstance(func.body, s_tir.SBlockRealize)]
    return [block for func in funcs for block in nested_blocks(func.body.block.body)]


def sole_block(sch: s_tir.Schedule, loop: LoopRV, primitive: str) -> SBlockRV:
    """Return the one block below `loop`; an error where there are several."""
    blocks = sch.get_child_blocks(loop)
    if len(blocks) != 1:
        names = ", ".join(name_of(sch, b) for b in blocks)
        raise ScheduleError(
            f"{primitive}: loop {sch.get(loop).loop_var.name!r} encloses the blocks {names}; name the one to act on"
        )
    return blocks[0]


def loop_of_block(sch: s_tir.Schedule, block: SBlockRV, loop: LoopRV, primitive: str) -> tirx.For:
    """Return `loop`'s statement, if it is one of `block`'s loops; an error that lists them if not."""
    stmt = given(sch, loop, primitive)
    if any(stmt.same_as(sch.get(own)) for own in sch.get_loops(block)):
        return stmt
    raise ScheduleError(
        f"{primitive}: the loop given is not one of block {name_of(sch, block)!r}'s loops "
        f"({loop_names(sch, block)}); take it from sch.get_loops(block)"
    )


def iterator_at(block: s_tir.SBlock, indices: object, dim: int) -> tirx.Var | None:
    """Return the iterator that alone is `indices[dim]`, or None."""
    for iv in block.iter_vars:
        if iv.var.same_as(indices[dim]):  # type: ignore[index]
            return iv.var
    return None


def outermost(sch: s_tir.Schedule, block: SBlockRV, loop: LoopRV) -> None:
    """Move `loop` in front of the block's other loops."""
    others = [other for other in sch.get_loops(block) if not sch.get(other).same_as(sch.get(loop))]
    if others:
        checked("reorder", name_of(sch, block), lambda: sch.reorder(loop, *others))


def loop_of(sch: s_tir.Schedule, block: SBlockRV, iterator: tirx.Var) -> LoopRV | None:
    """Return the loop whose variable alone drives `iterator`, or None."""
    value = next(value for iv, value in bindings(sch, block) if iv.var.same_as(iterator))
    for loop in sch.get_loops(block):
        if sch.get(loop).loop_var.same_as(value):
            return loop
    return None


def loads_of(block: s_tir.SBlock, buffer: tirx.Buffer) -> list[ir.TensorLoad]:
    """Return every load of `buffer` in the block's body."""
    found: list[ir.TensorLoad] = []
    tvm_ffi.structural_walk(
        block.body, (ir.TensorLoad, lambda load: found.append(load) if load.source.same_as(buffer) else None)
    )
    return found


def checked(primitive: str, block: str, rewrite: Callable[[], T]) -> T:
    """Run upstream's rewrite; what it refuses becomes this package's error with the block's name."""
    try:
        return rewrite()
    except ScheduleError:
        raise
    except (s_tir.ScheduleError, ValueError, InternalError) as error:  # the last two: what upstream didn't foresee
        raise ScheduleError(f"{primitive}: block {block!r}: {_tvm.schedule_error_reason(error)}") from error
