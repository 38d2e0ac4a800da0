"""A function cut at its kernels: one function for each, of what that kernel uses.

What stands at the top of a function, beside kernels, is scratch and what is said of sizes. A kernel's own function has
the parameters and the scratch that it touches, in order, as its parameters, and the assumptions on their sizes; so all
that is known of functions of one kernel holds of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tvm import tirx

from tvm_axe.errors import TileError
from tvm_axe.tile.assuming import ASSUME, separated
from tvm_axe.tile.calls import called, is_nothing
from tvm_axe.tile.language import GRID
from tvm_axe.tile.program import name_of
from tvm_axe.tile.walking import variables_in

__all__ = ["Cut", "cut", "is_sequence", "unused"]

_VALID = (
    "valid are kernels one after the other, and before them tile.scratch, tile.assume, tile.knob and tile.require; a "
    "name for a value is T.meta_var(value)"
)


@dataclass(frozen=True, eq=False)
class Cut:
    """A function in parts.

    Attributes
    ----------
    scratch : tuple of Buffer
        The scratch that its kernels touch, in order.
    kernels : tuple of PrimFunc
        The functions of the kernels, in order.
    """

    scratch: tuple[tirx.Buffer, ...]
    kernels: tuple[tirx.PrimFunc, ...]


def is_sequence(func: tirx.PrimFunc) -> bool:
    """Whether a function has scratch or several kernels, of which a knob may leave one."""
    has_scratch = any(isinstance(stmt, tirx.AllocBuffer) and _is_scratch(stmt.buffer) for stmt in _flat(func.body))
    return has_scratch or len(_kernels(func.body)) > 1


def unused(func: tirx.PrimFunc) -> list[str]:
    """The names of scratch that no kernel touches, whatever knobs are."""
    allocated = [stmt.buffer for stmt in _flat(func.body) if isinstance(stmt, tirx.AllocBuffer)]
    touched = variables_in(*(stmt for stmt in _flat(func.body) if not isinstance(stmt, tirx.AllocBuffer)))
    return [str(buffer.name) for buffer in allocated if _is_scratch(buffer) and buffer not in touched]


def cut(func: tirx.PrimFunc) -> Cut:
    """Cut a function, whose knobs are numbers, at its kernels.

    Raises
    ------
    TileError
        There is something else beside its kernels; a kernel stands in a loop or under a condition of more than knobs;
        scratch has the name of another tensor, no positive extent, or one that isn't known from the parameters.
    """
    scratch: list[tirx.Buffer] = []
    kernels: list[tirx.For] = []
    assumed: list[tirx.Expr] = []
    for stmt in _flat(func.body):
        if isinstance(stmt, tirx.For) and GRID in stmt.annotations:
            kernels.append(stmt)
        elif isinstance(stmt, tirx.AllocBuffer) and _is_scratch(stmt.buffer):
            scratch.append(stmt.buffer)
        elif called(stmt) == ASSUME:
            assumed += separated(stmt.value.args[1])
        elif not is_nothing(stmt):
            raise TileError(f"{name_of(func)}: {_what(stmt)} beside its kernels; {_VALID}")
    _check_scratch(func, scratch)
    parts = [_part(func, number, kernel, scratch, assumed) for number, kernel in enumerate(kernels, 1)]
    touched = {param for part in parts for param in part.params}
    return Cut(tuple(buffer for buffer in scratch if buffer in touched), tuple(parts))


def _part(
    func: tirx.PrimFunc, number: int, kernel: tirx.For, scratch: list[tirx.Buffer], assumed: list[tirx.Expr]
) -> tirx.PrimFunc:
    """The function of one kernel, of what that uses."""
    used = set(variables_in(kernel))
    tensors = [*filter(tirx.is_buffer_var, func.params), *scratch]
    kept = {tensor for tensor in tensors if tensor in used}
    for tensor in kept:
        used |= variables_in(*tensor.shape, *tensor.strides)
    # A size is known from a tensor that has it, also where the kernel touches none that does.
    while missing := (_sizes(tensors) & used) - _sizes(kept):
        tensor = next(tensor for tensor in tensors if _sizes([tensor]) & missing)
        kept.add(tensor)
        used |= variables_in(*tensor.shape, *tensor.strides)
    params = [
        param for param in (*func.params, *scratch) if (param in kept if tirx.is_buffer_var(param) else param in used)
    ]
    known = _sizes(kept) | {param for param in params if not tirx.is_buffer_var(param)}
    said = [
        tirx.Evaluate(tirx.call_extern("int32", ASSUME, condition))
        for condition in assumed
        if variables_in(condition) <= known
    ]
    body = tirx.SeqStmt([*said, kernel]) if said else kernel
    return tirx.PrimFunc(params, body, func.ret_type, func.attrs).with_attr(
        "global_symbol", f"{name_of(func)}_{number}"
    )


def _check_scratch(func: tirx.PrimFunc, scratch: list[tirx.Buffer]) -> None:
    names = [str(param.name) for param in func.params]
    given = _extents(filter(tirx.is_buffer_var, func.params)) | {p for p in func.params if not tirx.is_buffer_var(p)}
    for buffer in scratch:
        name = str(buffer.name)
        if name in names:
            raise TileError(f"scratch {name}: another tensor has this name; valid is one of its own")
        names.append(name)
        for extent in buffer.shape:
            unknown = sorted(str(var.name) for var in variables_in(extent) - given)
            if unknown:
                raise TileError(
                    f"scratch {name}: its extent {extent} is of {', '.join(unknown)}; valid are constants, and what is "
                    "computed of the parameters' extents and scalars"
                )
            if isinstance(extent, tirx.IntImm) and int(extent) < 1:
                raise TileError(f"scratch {name}: its extent {extent} isn't positive")


def _extents(tensors: Iterable[tirx.Buffer]) -> frozenset[tirx.Var]:
    """The variables that are extents of tensors, which a caller's tensors give a value."""
    return frozenset(extent for tensor in tensors for extent in tensor.shape if isinstance(extent, tirx.Var))


def _sizes(tensors: Iterable[tirx.Buffer]) -> frozenset[tirx.Var]:
    """The variables that are extents or strides of tensors, which a caller's tensors give a value."""
    tensors = list(tensors)
    steps = frozenset(stride for tensor in tensors for stride in tensor.strides if isinstance(stride, tirx.Var))
    return _extents(tensors) | steps


def _is_scratch(buffer: tirx.Buffer) -> bool:
    return str(buffer.scope()) == "global"


def _what(stmt: tirx.Stmt) -> str:
    """What a statement beside kernels is, in words."""
    if _kernels(stmt):
        where = "under a condition" if isinstance(stmt, tirx.IfThenElse) else "in a loop"
        return f"a kernel {where}"
    if isinstance(stmt, tirx.AllocBuffer):
        return f"the tile {stmt.buffer.name} of scope {str(stmt.buffer.scope())!r}"
    return f"{type(stmt).__name__}"


def _kernels(stmt: tirx.Stmt) -> list[tirx.For]:
    """The kernels in a statement, in order, without what is within them."""
    if isinstance(stmt, tirx.For):
        return [stmt] if GRID in stmt.annotations else _kernels(stmt.body)
    if isinstance(stmt, tirx.While):
        return _kernels(stmt.body)
    if isinstance(stmt, tirx.IfThenElse):
        cases = [stmt.then_case, *([] if stmt.else_case is None else [stmt.else_case])]
        return [kernel for case in cases for kernel in _kernels(case)]
    return [kernel for inner in stmt.seq for kernel in _kernels(inner)] if isinstance(stmt, tirx.SeqStmt) else []


def _flat(stmt: tirx.Stmt) -> Iterator[tirx.Stmt]:
    """The statements at the top."""
    if isinstance(stmt, tirx.SeqStmt):
        for inner in stmt.seq:
            yield from _flat(inner)
    else:
        yield stmt
