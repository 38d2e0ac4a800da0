"""From a Relax function to the graph that is shared over a mesh (`tvm_axe.relax.graph`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import tvm
from tvm import ir, relax, tirx
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.analysis.blocks import all_blocks
from tvm_axe.analysis.expressions import substitute, uses, variables_of
from tvm_axe.analysis.patterns import Pattern, pattern_of
from tvm_axe.errors import LowerError
from tvm_axe.relax.extents import with_reduced_extents
from tvm_axe.relax.graph import Count, Graph, Node, Value
from tvm_axe.relax.objects import TAKERS, cache_of, called
from tvm_axe.relax.operators_of_attention import APART, saying_what_is_left, with_repeated_heads
from tvm_axe.relax.ordering import in_order_of_use
from tvm_axe.relax.pins import dims_of
from tvm_axe.relax.shapes import SAID, says_shapes, with_known_shapes
from tvm_axe.relax.simplify import simplified
from tvm_axe.relax.sizes import Extent, defines, exprs, typical_of
from tvm_axe.relax.solving import with_solved_sizes
from tvm_axe.relax.statistics import with_batch_statistics
from tvm_axe.relax.values import is_call
from tvm_axe.relax.widening import widened, with_wide_attention

__all__ = ["graph_of", "legalized"]

_CALL_TIR, _IN_PLACE = "relax.call_tir", "relax.call_tir_inplace"
_PATTERN, _OPAQUE = "op_pattern", 8  # what FuseOps leaves alone


def legalized(
    model: tvm.IRModule, whole: Callable[[tvm.IRModule], tvm.IRModule] | None = None, on_host: bool = True
) -> tvm.IRModule:
    """The model with a function of TensorIR for each operator, and for pointwise ones with what they follow.

    Products read transposed weights as they lie, and stay apart from what follows: with a bias or a residual behind it
    a sum of the devices' terms could no longer be scattered.

    Parameters
    ----------
    model : IRModule
        The model.
    whole : Callable, optional
        What puts a function of its own into the place of several operators, such as attention.
    on_host : bool
        Whether devices are CPUs.
    """
    model = with_known_shapes(with_repeated_heads(with_reduced_extents(with_solved_sizes(model))))
    model = widened(with_batch_statistics(model), matmuls=on_host)
    # Upstream takes what is said of a tensor's shape for the tensor, and what follows loses its shape.
    canonical = [] if says_shapes(model) else [relax.transform.CanonicalizeBindings()]
    first = [relax.transform.DecomposeOpsForInference(), *canonical]
    model = tvm.transform.Sequential(first)(model)
    passes = [
        _tvm.fuse_transposed_products(),
        # Importers flatten tokens in front of each product that reads them: they are gathered once, not thrice.
        relax.transform.EliminateCommonSubexpr(),
        *canonical,
        _tvm.legalize_ops(),
        relax.transform.FoldConstant(),
        relax.transform.DeadCodeElimination(),
        relax.transform.AnnotateTIROpPattern(),
    ]
    # What is shared is followed through reshapes, but for those of rows that are made of several unknown extents.
    model = with_wide_attention(simplified(model if whole is None else whole(model), known=False))
    module = tvm.transform.Sequential(passes)(saying_what_is_left(model))
    in_place = _called_in_place(module)
    for variable, func in module.functions_items():
        if isinstance(func, tirx.PrimFunc) and (_is_product(func) or variable in in_place):
            module[variable] = func.with_attr(_PATTERN, _OPAQUE)
    return tvm.transform.Sequential([relax.transform.FuseOps(), relax.transform.FuseTIR()])(module)


def _called_in_place(model: tvm.IRModule) -> set[ir.GlobalVar]:
    """The functions that store to what they take."""
    found: set[ir.GlobalVar] = set()

    def visit(node: relax.Expr) -> None:
        if is_call(node, _IN_PLACE):
            found.add(node.args[0])

    for _, func in model.functions_items():
        if isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, visit)
    return found


def _is_product(func: tirx.PrimFunc) -> bool:
    return any(pattern_of(block) is Pattern.CONTRACTION for block in all_blocks(func.body))


def graph_of(
    model: tvm.IRModule,
    name: str,
    typical: Mapping[str, int] | None = None,
    pins: Mapping[int, Mapping[str, int | None]] | None = None,
    gpu: Target | None = None,
) -> Graph:
    """The function `name` of a legalized model.

    Parameters
    ----------
    model : IRModule
        The model.
    name : str
        Which function.
    typical : mapping, optional
        What sizes are taken to be where costs are compared, by the names of the variables of symbolic shapes.
    pins : mapping, optional
        What parameters are pinned to, by their numbers.
    gpu : Target, optional
        What the devices are, if they are GPUs, whose caches in pages call functions of their own.

    Raises
    ------
    LowerError
        If it isn't straight-line code over tensors; names the variable, what it is, and a remedy.
    """
    graph = _Reader(model, name, typical or {}, gpu).graph
    graph.nodes = in_order_of_use(graph.nodes, graph.values)
    numbers = {graph.values[number].param: number for number in graph.params}
    for at, dims in (pins or {}).items():
        number = numbers[at]
        graph.values[number] = replace(graph.values[number], pins=dims)
    return graph


class _Reader:
    def __init__(self, model: tvm.IRModule, name: str, typical: Mapping[str, int], gpu: Target | None) -> None:
        self.model, self.graph, self.given, self.gpu = model, Graph(name), typical, gpu
        # Tensors by number, objects by name.
        self.env: dict[relax.Var, int | str | tuple[int | str, ...]] = {}
        self.constants: list[tuple[ir.GenericConst, int]] = []
        self.known: dict[object, tirx.PrimFunc] = {}
        source: relax.Function = model[name]
        attrs = source.attrs or {}
        self.graph.most = {str(n): int(most) for n, most in dict(attrs.get("tir_var_upper_bound") or {}).items()}
        self.graph.apart = tuple(map(str, attrs.get(APART) or ()))
        inputs = int(attrs["num_input"]) if "num_input" in attrs else len(source.params)
        self.defined = {each for param in source.params for each in defines(param)}
        for at, param in enumerate(source.params):
            if isinstance(param.ty, relax.AnyType):
                self.env[param] = str(param.name)
                self.graph.counts.append(Count(at, str(param.name), "object", ()))
                continue
            if isinstance(param.ty, relax.ShapeType | ir.PrimType):
                self.count(at, param)
                continue
            self.env[param] = self.new(param.name, param.ty, "input" if at < inputs else "weight", "parameter", at)
            self.graph.params.append(self.number(param))
        for true, said, whose in attrs.get(SAID) or ():
            for each in (*true.values, *said.values):
                self.require_known(each, f"variable {str(whose)!r}")
            shape, other = (tuple(map(self.extent, each.values)) for each in (true, said))
            self.graph.checks.append((shape, other, str(whose)))
        for block in source.body.blocks:
            for binding in block.bindings:
                self.bind(binding)
        for at, each in enumerate(self.flat(source.body.body, "its result")):
            if isinstance(each, int):
                self.graph.results.append(each)
            else:
                self.graph.left.append((at, each))

    def number(self, value: relax.Expr) -> int:
        found = self.env[value]
        assert isinstance(found, int)
        return found

    def new(self, name: str, ty: ir.Type, kind: str, what: str, param: int | None = None) -> int:
        if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
            raise LowerError(
                f"{self.graph.name}: {what} {name!r} is a {type(ty).__name__} without a shape; on a mesh values are "
                "tensors whose shapes follow from those of the parameters: split the function where it becomes known, "
                "or compile for one device"
            )
        for extent in ty.shape:
            self.require_known(extent, f"{what} {name!r}")
        shape = tuple(map(self.extent, ty.shape))
        known = tuple(self.typically(extent) for extent in ty.shape)
        self.graph.values.append(Value(name, shape, str(ty.dtype), kind, known, None, shape, (), param))
        return len(self.graph.values) - 1

    def count(self, at: int, param: relax.Var) -> None:
        """Take note of a parameter that is a shape or a number."""
        values = [param] if isinstance(param.ty, ir.PrimType) else param.ty.values
        if values is None or "int" not in str(values[0].ty if values else "int"):
            raise LowerError(
                f"{self.graph.name}: parameter {param.name!r} is a {param.ty}; on a mesh parameters are tensors, "
                "shapes of so many extents, and whole numbers"
            )
        for extent in values:
            self.require_known(extent, f"parameter {param.name!r}")
        kind = "number" if isinstance(param.ty, ir.PrimType) else "shape"
        self.graph.counts.append(Count(at, str(param.name), kind, tuple(map(self.extent, values))))

    def require_known(self, extent: tirx.Expr, what: str) -> None:
        """Refuse an extent that calls don't bring."""
        unknown = [str(variable.name) for variable in variables_of(extent) if variable not in self.defined]
        if unknown:
            raise LowerError(
                f"{self.graph.name}: {what} has the extent {extent}, and {', '.join(unknown)} isn't the extent of any "
                "parameter; on a mesh sizes are known when a function is called: make it a parameter (R.Shape), split "
                "the function where it becomes known, or compile for one device"
            )

    def extent(self, expr: tirx.Expr) -> int | Extent:
        """An extent of a tensor; the variables that it is made of become known."""
        # By their names, as a set has another order in each process: sizes are parameters of what is compiled and kept.
        for variable in sorted(variables_of(expr), key=lambda variable: str(variable.name)):
            name = str(variable.name)
            if not self.graph.sizes.setdefault(name, variable).same_as(variable):
                raise LowerError(
                    f"{self.graph.name}: two variables of its shapes are called {name!r}; give each a name of its own"
                )
            self.graph.typical |= typical_of([name], self.given, self.graph.most)
        return int(expr) if isinstance(expr, tirx.IntImm) else Extent.of(expr)

    def typically(self, expr: tirx.Expr) -> int:
        """What an extent or a number of the model's sizes typically is."""
        extent = self.extent(expr)
        return extent if isinstance(extent, int) else extent.at(self.graph.typical)

    def bind(self, binding: relax.Binding) -> None:
        if isinstance(binding, relax.MatchCast):
            self.cast(binding)
            return
        var, value = binding.var, binding.value
        if isinstance(value, relax.ShapeExpr) or isinstance(var.ty, relax.ShapeType | ir.PrimType):
            return  # what uses it says what it is
        if isinstance(value, relax.Var):
            self.env[var] = self.env[value]
        elif isinstance(value, relax.Tuple):
            self.env[var] = tuple(self.flat(value, f"variable {var.name!r}"))
        elif isinstance(value, relax.TupleGetItem):
            fields = self.env[value.tuple_value]
            assert isinstance(fields, tuple)
            self.env[var] = fields[value.index]
        elif isinstance(value, ir.GenericConst):
            self.env[var] = self.constant(value)
        elif isinstance(value, relax.Call):
            self.call(var, value)
        else:
            raise LowerError(
                f"{self.graph.name}: {var.name} is bound by a {type(value).__name__}; on a mesh a function is "
                "straight-line code of calls: compile what branches for one device, or lift it out of the function"
            )

    def cast(self, binding: relax.MatchCast) -> None:
        """A tensor is the same under another name: what is said of its shape is known (`SAID`)."""
        value, ty = binding.value, binding.ty
        if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr) or value not in self.env:
            raise LowerError(
                f"{self.graph.name}: variable {binding.var.name!r} is said to be a {ty}; on a mesh this is said of "
                "tensors of known shapes: leave out what follows from the parameters' shapes, or compile for one device"
            )
        self.env[binding.var] = self.env[value]

    def call(self, var: relax.Var, value: relax.Call) -> None:
        if isinstance(var.ty, relax.AnyType):
            self.make(var, value)
            return
        in_place = is_call(value, _IN_PLACE)
        is_tir = in_place or is_call(value, _CALL_TIR)
        given = [a for a in value.args if not isinstance(a, ir.GlobalVar | relax.ExternFunc)]
        numbers: tuple[tirx.Expr, ...] = ()
        if is_tir:
            fields = list(value.args[1].fields) if isinstance(value.args[1], relax.Tuple) else [value.args[1]]
            numbers = tuple(each for each in fields if _is_number(each))
            given = [each for each in fields if not _is_number(each)]
        shapes = [extent for each in given if isinstance(each, relax.ShapeExpr) for extent in each.values]
        for each in (*numbers, *shapes):
            self.require_known(each, f"variable {var.name!r}")
        found = [each for argument in given for each in self.flat(argument, f"variable {var.name!r}")]
        ins, takes = tuple(n for n in found if isinstance(n, int)), tuple(n for n in found if isinstance(n, str))
        if takes and called(value) not in TAKERS:
            raise LowerError(f"{self.graph.name}: variable {var.name!r} is made by {self.of_object(value, takes[0])}")
        is_tuple = isinstance(var.ty, relax.TupleType)
        types = list(var.ty.fields) if is_tuple else [var.ty]
        outs = tuple(self.new(var.name, ty, "value", f"the result of {called(value)},") for ty in types)
        self.env[var] = outs if is_tuple else outs[0]
        func = self.model[value.args[0]] if is_tir else None
        if in_place:
            ins, func = self.overwriting(var, value, ins, func)
        values = [self.graph.values[n] for n in (*ins, *outs)]
        func = None if func is None else self.counted(func, values, numbers)
        known = self.graph.sizes
        sizes = () if func is None else tuple((v, self.graph.typical[n]) for n, v in known.items() if uses(func, v))
        over = len(outs) if in_place else 0
        self.graph.nodes.append(
            Node(
                var.name, ins, outs, func, value, is_tuple, pins=dims_of(value), sizes=sizes, overwrites=over,
                takes=takes,
            )
        )  # fmt: skip

    def make(self, var: relax.Var, value: relax.Call) -> None:
        """Take note of an object that a call makes."""
        name, what = str(var.name), f"variable {var.name!r}"
        if called(value) != _tvm.PAGED_CREATES:
            taken = [each for own in value.args for each in self.objects(own)]
            raise LowerError(f"{self.graph.name}: {what} is made by {self.of_object(value, *taken[:1])}")
        while name in self.env.values():
            name = f"{name}_"
        tensors = [
            each for each in value.args if isinstance(each, relax.Var | ir.GenericConst) and not _is_number(each)
        ]
        for shape in (each for each in value.args if isinstance(each, relax.ShapeExpr)):
            for extent in shape.values:
                self.require_known(extent, what)
        ins = tuple(n for each in tensors for n in self.flat(each, what) if isinstance(n, int))
        cache = cache_of(value, self.model, self.gpu, f"{self.graph.name}: {what}")
        self.env[var] = name
        self.graph.nodes.append(Node(var.name, ins, (), None, value, makes=name, cache=cache))

    def objects(self, value: relax.Expr) -> Iterable[str]:
        """The objects that an expression is made of."""
        if isinstance(value, relax.Tuple):
            for each in value.fields:
                yield from self.objects(each)
        elif isinstance(value, relax.Var) and isinstance(self.env.get(value), str):
            yield str(self.env[value])

    def of_object(self, value: relax.Call, taken: str = "") -> str:
        """Why a call of an object is refused, and what takes its place."""
        takes = f", which takes {taken!r}, an object of the runtime" if taken else ", an object of the runtime"
        return (
            f"{called(value)}{takes}; on a mesh objects are paged caches that TIRPagedKVCache makes, and what takes "
            "them is attention_with_fused_qkv or get_query_positions: call these, have functions take and return "
            "caches as tensors, or store to them (R.call_tir_inplace), or compile for one device"
        )

    def overwriting(
        self, var: relax.Var, value: relax.Call, ins: tuple[int, ...], func: tirx.PrimFunc
    ) -> tuple[tuple[int, ...], tirx.PrimFunc]:
        """What a call in place takes, and its function, with what it stores to behind all else."""
        over = [int(at) for at in value.attrs.inplace_indices]
        buffers = [param for param in func.params if tirx.is_buffer_var(param)]
        if min(over) < 0 or len(ins) != len(buffers):
            raise LowerError(
                f"{self.graph.name}: {var.name} is made by {called(value)}, some of whose results are new, and others "
                "what it takes; on a mesh all are one or the other: make two calls of it (call_tir, call_tir_inplace)"
            )
        order = [*(at for at in range(len(ins)) if at not in over), *over]
        others = [param for param in func.params if not tirx.is_buffer_var(param)]
        params = [*(buffers[at] for at in order), *others]
        return tuple(ins[at] for at in order), tirx.PrimFunc(params, func.body, func.ret_type, func.attrs)

    def counted(self, func: tirx.PrimFunc, values: list[Value], numbers: tuple[tirx.Expr, ...]) -> tirx.PrimFunc:
        """A function that is called with values and numbers as one of the values, counted in the graph's sizes."""
        params = [param for param in func.params if tirx.is_buffer_var(param)]
        of = dict(zip((param for param in func.params if not tirx.is_buffer_var(param)), numbers))
        for extent in numbers:
            self.extent(extent)  # its variables become known
        for param, value in zip(params, values):
            for extent, given in zip(param.shape, exprs(value.shape)):
                if isinstance(extent, tirx.Var):
                    of.setdefault(extent, given)
        if not of:
            return func
        key = func, tuple(map(str, of.values()))  # in a function of the model each name is one variable's
        if key not in self.known:
            self.known[key] = substitute(tirx.PrimFunc(params, func.body, func.ret_type, func.attrs), of)
        return self.known[key]

    def constant(self, value: ir.GenericConst) -> int:
        for other, number in self.constants:
            if other.same_as(value):
                return number
        number = self.new(f"constant_{len(self.constants)}", value.ty, "weight", "constant")
        old = self.graph.values[number]
        self.graph.values[number] = replace(old, constant=value.value)
        self.constants.append((value, number))
        return number

    def flat(self, value: relax.Expr, what: str) -> Iterable[int | str]:
        """The numbers of the tensors, and the names of the objects, that an expression is made of."""
        if isinstance(value, relax.Tuple):
            for each in value.fields:
                yield from self.flat(each, what)
        elif isinstance(value, ir.GenericConst):
            yield self.constant(value)
        elif isinstance(value, relax.Var) and value in self.env:
            found = self.env[value]
            yield from [found] if isinstance(found, int | str) else found
        elif isinstance(value, relax.ShapeExpr | ir.Constant | ir.StringImm) or _is_number(value):
            return
        else:
            raise LowerError(
                f"{self.graph.name}: {what} takes a {type(value).__name__}; on a mesh calls take tensors and constants"
            )


def _is_number(value: relax.Expr) -> bool:
    """Whether an argument is a number instead of tensors."""
    return isinstance(value.ty, ir.PrimType)
