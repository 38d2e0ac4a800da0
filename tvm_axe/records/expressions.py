"""What holds of a function's nodes beyond their fields: types that agree, extents that fit, no division by zero."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from tvm_axe.records.graph import Graph, Wrong, is_dtype, short

__all__ = ["check_function", "check_nodes"]

_SIDES = {f"prim.{name}" for name in ("Add", "Sub", "Mul", "Div", "Mod", "FloorDiv", "FloorMod", "Min", "Max")}
_BITS = {f"prim.{name}" for name in ("BitwiseAnd", "BitwiseOr", "BitwiseXor", "LShift", "RShift")}
_DIVISIONS = {"prim.Div", "prim.Mod", "prim.FloorDiv", "prim.FloorMod"}
_COMPARISONS = {f"prim.{name}" for name in ("EQ", "NE", "LT", "LE", "GT", "GE")}
_LARGEST = 2**40  # elements of a dimension, iterations of a loop
_ALL = 2**46  # elements of a buffer
_ITERATIONS = range(9)  # what a block's dimension can be: data parallel, reduction, ...
_LOOPS = range(5)  # serial, parallel, vectorized, unrolled, bound to threads


def check_function(graph: Graph) -> None:
    """Check the whole of a graph, whose root must be a module with a function ``main``.

    Raises
    ------
    Wrong
        If upstream would follow something in it that isn't so.
    """
    if graph.type(graph.root) != "ir.IRModule":
        raise Wrong(f"the root is of the type {graph.type(graph.root)}, not ir.IRModule")
    check_nodes(graph)


def check_nodes(graph: Graph) -> None:
    """Check a graph of something else, such as a map of indices.

    Raises
    ------
    Wrong
        As `check_function`.
    """
    for number in range(len(graph.nodes)):
        kind = graph.type(number)
        check = _CHECKS.get(kind)
        try:
            if check is not None:
                check(graph, number)
        except Wrong as error:
            raise Wrong(f"node {number} ({kind}): {error}") from error


def _module(graph: Graph, number: int) -> None:
    functions = graph.items(graph.field(number, "functions"))
    names = {graph.data(graph.field(variable, "name_hint")): variable for variable, _ in functions}
    _demand(len(names) == len(functions), "functions: a name is there twice")
    _demand("main" in names, "functions: there is no main")
    kind = graph.type(dict(functions)[names["main"]])
    _demand(kind == "tirx.PrimFunc", f"functions: main is of the type {kind}, not tirx.PrimFunc")
    by_name = {graph.data(name): variable for name, variable in graph.items(graph.field(number, "global_var_map_"))}
    _demand(by_name == names, "global_var_map_: isn't of the functions' variables")


def _int_imm(graph: Graph, number: int) -> None:
    dtype, value = _dtype(graph, number, "the constant"), graph.integer(number)
    assert value is not None
    if dtype == "bool":
        _demand(value in (0, 1), f"{value} is no truth value")
        return
    signed, unsigned = dtype.startswith("int"), dtype.startswith("uint")
    _demand(signed or unsigned, f"an integer is of the type {dtype}")
    bits = int(dtype.removeprefix("u").removeprefix("int").partition("x")[0])
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
    _demand(low <= value < high, f"{value} is out of the range of {dtype}")


def _float_imm(graph: Graph, number: int) -> None:
    dtype = _dtype(graph, number, "the constant")
    _demand(dtype.startswith(("float", "bfloat")), f"a floating-point constant is of the type {dtype}")


def _sides(graph: Graph, number: int) -> None:
    own = _dtype(graph, number, "the result")
    _equal(graph, number, "a", "b")
    side = _dtype(graph, graph.field(number, "a"), "a")
    _demand(side == own, f"its sides are of the type {side}, and it of {own}")
    if graph.type(number) in _DIVISIONS:
        _demand(graph.integer(graph.field(number, "b")) != 0, "divides by zero")


def _comparison(graph: Graph, number: int) -> None:
    own = _dtype(graph, number, "the result")
    _equal(graph, number, "a", "b")
    _demand(own.startswith(("bool", "uint1")), f"a comparison is of the type {own}")


def _logic(graph: Graph, number: int) -> None:
    for name in ("a", "b") if graph.type(number) != "prim.Not" else ("a",):
        _truth(graph, graph.field(number, name), name)
    _truth(graph, number, "the result")


def _select(graph: Graph, number: int) -> None:
    _truth(graph, graph.field(number, "condition"), "condition")
    _equal(graph, number, "true_value", "false_value")
    side, own = _dtype(graph, graph.field(number, "true_value"), "true_value"), _dtype(graph, number, "the result")
    _demand(side == own, f"its values are of the type {side}, and it of {own}")


def _conditional(graph: Graph, number: int) -> None:
    _truth(graph, graph.field(number, "condition"), "condition")


def _cast(graph: Graph, number: int) -> None:
    found, wanted = (_dtype(graph, n, name) for n, name in ((graph.field(number, "value"), "value"), (number, "it")))
    lanes = [text.partition("x")[2] for text in (found, wanted)]
    _demand(lanes[0] == lanes[1], f"converts {found} to {wanted}, of other lanes")
    _demand(wanted not in ("void", "handle"), f"converts {found} to {wanted}")


def _load(graph: Graph, number: int) -> None:
    buffer = _buffer(graph, graph.field(number, "source"), "source")
    if buffer is None:
        return
    _indices(graph, buffer, graph.data(graph.field(number, "indices")))
    _element(graph, buffer, number, "the result")


def _store(graph: Graph, number: int) -> None:
    buffer = _buffer(graph, graph.field(number, "buffer"), "buffer")
    if buffer is None:
        raise Wrong("buffer: isn't a buffer")
    _indices(graph, buffer, graph.data(graph.field(number, "indices")))
    _element(graph, buffer, graph.field(number, "value"), "value")


def _region(graph: Graph, number: int) -> None:
    buffer = _buffer(graph, graph.field(number, "source"), "source")
    if buffer is not None:
        _rank(graph, buffer, len(graph.data(graph.field(number, "region"))))


def _buffer_type(graph: Graph, number: int) -> None:
    shape = [graph.integer(extent) for extent in graph.data(graph.field(number, "shape"))]
    for extent in shape:
        _demand(extent is None or 0 < extent <= _LARGEST, f"shape: an extent of {extent}")
    _demand(prod(extent or 1 for extent in shape) <= _ALL, f"shape: {shape} has too many elements")
    for name in ("shape", "strides"):
        for item in graph.data(graph.field(number, name)):
            _whole(graph, item, name)
    strides = graph.data(graph.field(number, "strides"))
    _demand(len(strides) in (0, len(shape)), f"strides: {len(strides)} for {len(shape)} dimensions")
    _whole(graph, graph.field(number, "elem_offset"), "elem_offset")
    fields = graph.data(number)
    alignment, factor = fields["data_alignment"], fields["offset_factor"]
    _demand(0 < alignment <= 2**16 and alignment & (alignment - 1) == 0, f"data_alignment: {alignment}")
    _demand(0 <= factor <= 2**16, f"offset_factor: {factor}")


def _range(graph: Graph, number: int) -> None:
    for name in ("min", "extent"):
        _whole(graph, graph.field(number, name), name)
    _extent(graph, graph.field(number, "extent"))


def _for(graph: Graph, number: int) -> None:
    for name in ("loop_var", "min", "extent"):
        _whole(graph, graph.field(number, name), name)
    _equal(graph, number, "min", "extent")
    _equal(graph, number, "loop_var", "extent")
    _extent(graph, graph.field(number, "extent"))
    kind = graph.data(number)["kind"]
    _demand(kind in _LOOPS, f"kind: {kind} is no kind of loop")
    bound = graph.type(graph.field(number, "thread_binding")) != "None"
    _demand(bound == (kind == 4), f"thread_binding: {'is' if bound else 'is not'} there for a loop of the kind {kind}")
    step = graph.field(number, "step")
    if graph.type(step) != "None":
        _whole(graph, step, "step")
        _extent(graph, step)


def _iter_var(graph: Graph, number: int) -> None:
    kind = graph.data(number)["iter_type"]
    _demand(kind in _ITERATIONS, f"iter_type: {kind} is no kind of dimension")
    _whole(graph, graph.field(number, "var"), "var")
    if graph.type(graph.field(number, "dom")) != "None":
        found = graph.dtype(graph.field(number, "dom", "extent"))
        own = graph.dtype(graph.field(number, "var"))
        _demand(found == own, f"var: of the type {own}, and its domain of {found}")


def _realize(graph: Graph, number: int) -> None:
    values = graph.data(graph.field(number, "iter_values"))
    dimensions = graph.data(graph.field(number, "block", "iter_vars"))
    _demand(len(values) == len(dimensions), f"iter_values: {len(values)} for {len(dimensions)} dimensions")
    for value, dimension in zip(values, dimensions):
        _whole(graph, value, "iter_values")
        found, wanted = graph.dtype(value), graph.dtype(graph.field(dimension, "var"))
        _demand(found == wanted, f"iter_values: one of the type {found} for a dimension of {wanted}")
    _truth(graph, graph.field(number, "predicate"), "predicate")


def _block(graph: Graph, number: int) -> None:
    for buffer in graph.data(graph.field(number, "alloc_buffers")):
        _demand(_buffer(graph, buffer, "alloc_buffers") is not None, "alloc_buffers: isn't a buffer")
    variables = [graph.field(dimension, "var") for dimension in graph.data(graph.field(number, "iter_vars"))]
    _demand(len(set(variables)) == len(variables), "iter_vars: a variable is there twice")


def _sequence(graph: Graph, number: int) -> None:
    _demand(len(graph.data(graph.field(number, "seq"))) > 0, "seq: is empty")


def _function(graph: Graph, number: int) -> None:
    params = graph.data(graph.field(number, "params"))
    _demand(len(set(params)) == len(params), "params: one is there twice")


def _call(graph: Graph, number: int) -> None:
    operator = graph.field(number, "op")
    _demand(graph.type(operator) in ("ir.Op", "ir.GlobalVar"), f"op: {graph.type(operator)} cannot be called")


_CHECKS: dict[str, Callable[[Graph, int], None]] = {
    **dict.fromkeys(_SIDES | _BITS, _sides),
    **dict.fromkeys(_COMPARISONS, _comparison),
    **dict.fromkeys(("prim.And", "prim.Or", "prim.Not"), _logic),
    "prim.Select": _select,
    "prim.Cast": _cast,
    "ir.IRModule": _module,
    "ir.IntImm": _int_imm,
    "ir.FloatImm": _float_imm,
    "ir.TensorLoad": _load,
    "ir.TensorRegion": _region,
    "ir.Range": _range,
    "ir.Call": _call,
    "tirx.BufferStore": _store,
    "tirx.BufferType": _buffer_type,
    "tirx.For": _for,
    "tirx.While": _conditional,
    "tirx.IfThenElse": _conditional,
    "tirx.IterVar": _iter_var,
    "tirx.SeqStmt": _sequence,
    "tirx.PrimFunc": _function,
    "s_tir.SBlock": _block,
    "s_tir.SBlockRealize": _realize,
}


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Wrong(otherwise)


def _dtype(graph: Graph, number: int, name: str) -> str:
    found = graph.dtype(number)
    if found is None or not is_dtype(found):
        raise Wrong(f"{name}: node {number} ({graph.type(number)}) is no number")
    return found


def _equal(graph: Graph, number: int, first: str, second: str) -> None:
    a, b = (_dtype(graph, graph.field(number, name), name) for name in (first, second))
    _demand(a == b, f"{first} is of the type {a}, and {second} of {b}")


def _truth(graph: Graph, number: int, name: str) -> None:
    found = _dtype(graph, number, name)
    _demand(found.startswith(("bool", "uint1")) and not found.startswith("uint16"), f"{name}: is of the type {found}")


def _whole(graph: Graph, number: int, name: str) -> None:
    found = _dtype(graph, number, name)
    _demand(found.startswith(("int", "uint")), f"{name}: is of the type {found}, not a whole number")


def _extent(graph: Graph, number: int) -> None:
    extent = graph.integer(number)
    _demand(extent is None or 0 < extent <= _LARGEST, f"an extent of {extent}")


def _buffer(graph: Graph, number: int, name: str) -> int | None:
    """The type of a buffer, by its variable; None of a tensor of another sort."""
    if graph.type(number) != "ir.Var":
        raise Wrong(f"{name}: is of the type {short(graph.type(number))}, not a variable")
    ty: int = graph.field(number, "ty")
    return ty if graph.type(ty) == "tirx.BufferType" else None


def _rank(graph: Graph, buffer: int, count: int) -> None:
    rank = len(graph.data(graph.field(buffer, "shape")))
    _demand(count == rank, f"{count} indices of a buffer with {rank} dimensions")


def _indices(graph: Graph, buffer: int, indices: list[int]) -> None:
    _rank(graph, buffer, len(indices))
    for index in indices:
        _whole(graph, index, "indices")


def _element(graph: Graph, buffer: int, number: int, name: str) -> None:
    """Check that an expression is an element of a buffer, or several in a vector."""
    found, wanted = _dtype(graph, number, name), str(graph.field(buffer, "dtype", "dtype"))
    _demand(_one(found) == _one(wanted), f"{name}: is of the type {found}, and the buffer's elements of {wanted}")


def _one(dtype: str) -> str:
    return dtype.partition("x")[0]
