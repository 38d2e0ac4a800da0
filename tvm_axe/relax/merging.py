"""One TensorIR function out of a Relax function, so that a model is scheduled like any other program.

``LegalizeOps`` gives each operator its nest; `merge` puts the nests of the whole model one behind the other over whole
tensors. Parameters keep their names and order, what the model returns follows them, and a nest that computes the Relax
variable ``v`` writes the buffer ``v`` in the block ``v``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod

import tvm
from tvm import ir, relax, s_tir, tirx

from tvm_axe import _tvm
from tvm_axe.errors import LowerError

_INT32_MAX = 2**31 - 1


def merge(mod: tvm.IRModule) -> tirx.PrimFunc:
    """The Relax function of `mod` as one schedulable function over whole tensors.

    Parameters
    ----------
    mod : IRModule
        A module with one Relax function: straight-line code over tensors of constant shapes.

    Returns
    -------
    func : PrimFunc
        It takes the function's parameters in their order, then a buffer for each tensor that it returns.

    Raises
    ------
    LowerError
        If the module has not one Relax function; a parameter isn't a tensor of constant shape; a tensor is too large
        for 32-bit indices or holds int64; a binding is no call that has a TensorIR form; or a result is a parameter or
        returned twice. The message names the parameter, variable or operator.
    """
    # Dropout and the like have a form for inference only; what is left unlegalized is refused below, by name.
    passes = [
        relax.transform.DecomposeOpsForInference(),
        relax.transform.CanonicalizeBindings(),
        relax.transform.LegalizeOps(),
        relax.transform.DeadCodeElimination(),
    ]
    names = [str(var.name_hint) for var, func in mod.functions_items() if isinstance(func, relax.Function)]
    if len(names) != 1:
        raise LowerError(f"a model is a module with one Relax function; the module's are: {', '.join(names) or 'none'}")
    return _Merger(tvm.transform.Sequential(passes)(mod), names[0]).function()


class _Merger:
    def __init__(self, mod: tvm.IRModule, name: str) -> None:
        self.mod, self.name = mod, name
        self.source: relax.Function = mod[name]
        self.names: set[str] = set()  # of buffers
        self.blocks: set[str] = set()
        self.nests: list[tirx.Stmt] = []
        self.allocated: list[tirx.Buffer] = []
        # A variable of tuple type stands for the buffers of its fields.
        self.values: dict[relax.Var, tirx.Buffer | tuple[tirx.Buffer, ...]] = {}

    def function(self) -> tirx.PrimFunc:
        params = []
        for var in self.source.params:
            self.values[var] = self.buffer(var.name, var.ty, f"parameter {var.name!r}")
            params.append(self.values[var])
        body = self.source.body
        for block in body.blocks:
            for binding in block.bindings:
                self.bind(binding)
        outputs = self.outputs(body.body, params)
        if not outputs:
            raise LowerError(f"{self.name}: it returns no tensor; return what the mesh should compute")
        allocated = [buffer for buffer in self.allocated if not any(buffer.same_as(out) for out in outputs)]
        root = s_tir.SBlock([], [], [], "root", tirx.stmt_seq(*self.nests), alloc_buffers=allocated)
        func = tirx.PrimFunc([*params, *outputs], s_tir.SBlockRealize([], True, root))
        func = func.with_attrs({"global_symbol": self.name, "s_tir": True, "tirx.noalias": True})
        # Relax counts in 64 bits, mesh coordinates in 32.
        return tirx.transform.ForceNarrowIndexToInt32()(tvm.IRModule({self.name: func}))[self.name]

    def buffer(self, name: str, ty: ir.Type, what: str) -> tirx.Buffer:
        if not isinstance(ty, relax.TensorType):
            raise LowerError(f"{self.name}: {what} is a {type(ty).__name__}; valid is a tensor")
        shape = list(ty.shape) if isinstance(ty.shape, relax.ShapeExpr) else None
        if shape is None or not all(isinstance(extent, tirx.IntImm) for extent in shape):
            raise LowerError(
                f"{self.name}: {what} has {'no known shape' if shape is None else f'the shape {ty.shape}'}; every "
                "extent must be a number: bind the symbolic ones first (relax.transform.BindSymbolicVars)"
            )
        return self.declare(name, [int(extent) for extent in shape], str(ty.dtype), what)

    def declare(self, name: str, shape: Sequence[int], dtype: str, what: str) -> tirx.Buffer:
        """A buffer that 32-bit indices can address and hold, which is what a mesh kernel computes with."""
        if prod(shape) > _INT32_MAX:
            raise LowerError(f"{self.name}: {what} has {prod(shape)} elements; at most {_INT32_MAX} can be indexed")
        if dtype == "int64":
            raise LowerError(f"{self.name}: {what} holds int64, as Relax's indices do, which become int32; use int32")
        return tirx.decl_buffer(shape, dtype, _unique(name, self.names), layout=None)

    def bind(self, binding: relax.Binding) -> None:
        var, value = binding.var, binding.value if isinstance(binding, relax.VarBinding) else binding
        if isinstance(value, relax.Var):
            self.values[var] = self.values[value]
        elif isinstance(value, relax.Tuple):
            self.values[var] = tuple(self.operand(field, var) for field in value.fields)
        elif isinstance(value, relax.TupleGetItem):
            self.values[var] = self.values[value.tuple_value][value.index]
        elif isinstance(value, relax.Call) and value.op == ir.Op.get("relax.call_tir") and len(value.args) == 2:
            self.call(var, value)
        else:
            raise LowerError(
                f"{self.name}: {var.name} = {_described(value)} has no TensorIR form that can be merged with the others"
                "; valid are operators that LegalizeOps knows, and call_tir"
            )

    def call(self, var: relax.Var, value: relax.Call) -> None:
        """Append the nests of a ``call_tir``, with its own variables, buffers and names."""
        callee, operands = value.args
        func = s_tir.renew_defs(self.mod[callee])
        if not isinstance(func.body, s_tir.SBlockRealize):
            raise LowerError(
                f"{self.name}: {var.name} calls {callee.name_hint}, which isn't a @T.prim_func(s_tir=True)"
            )
        given = [self.operand(field, var) for field in operands.fields]
        types = list(var.ty.fields) if isinstance(var.ty, relax.TupleType) else [var.ty]
        what = f"variable {var.name!r}"
        results = [self.buffer(var.name, ty, what) for ty in types]
        self.values[var] = tuple(results) if isinstance(var.ty, relax.TupleType) else results[0]
        own = [
            self.declare(f"{results[0].name}_{b.name}", [int(extent) for extent in b.shape], b.dtype, what)
            for b in func.body.block.alloc_buffers
        ]
        self.allocated += [*own, *results]
        buffers = dict(zip([*func.params, *func.body.block.alloc_buffers], [*given, *results, *own]))
        self.nests.append(self.renamed(func.body.block.body, buffers))

    def renamed(self, stmt: tirx.Stmt, buffers: Mapping[tirx.Var, tirx.Buffer]) -> tirx.Stmt:
        """`stmt` on other buffers, each block called as the buffer that it writes."""

        def on_block(block: s_tir.SBlock) -> s_tir.SBlock:
            name = _unique(block.writes[0].source.name if block.writes else block.name_hint, self.blocks)
            return s_tir.SBlock(
                block.iter_vars, block.reads, block.writes, name, block.body, block.init, block.alloc_buffers,
                block.match_buffers, block.annotations,
            )  # fmt: skip

        callbacks = [(s_tir.SBlock, on_block), (tirx.Var, lambda var: buffers.get(var, var))]
        return _tvm.structural_map(stmt, callbacks)

    def operand(self, value: relax.Expr, user: relax.Var) -> tirx.Buffer:
        found = self.values.get(value) if isinstance(value, relax.Var) else None
        if not isinstance(found, tirx.Var):
            raise LowerError(
                f"{self.name}: {user.name} takes a {type(value).__name__} beside plain tensors; make a constant a "
                "parameter of the function, and unpack tuples"
            )
        return found

    def outputs(self, result: relax.Expr, params: Sequence[tirx.Buffer]) -> list[tirx.Buffer]:
        found: list[tirx.Buffer] = []
        for buffer in self.flattened(result):
            if any(buffer.same_as(other) for other in (*params, *found)):
                raise LowerError(
                    f"{self.name}: {buffer.name!r} is returned and is a parameter or returned before; return each "
                    "computed tensor once"
                )
            found.append(buffer)
        return found

    def flattened(self, value: relax.Expr) -> list[tirx.Buffer]:
        if isinstance(value, relax.Tuple):
            return [buffer for field in value.fields for buffer in self.flattened(field)]
        found = self.values.get(value) if isinstance(value, relax.Var) else None
        if found is None:
            raise LowerError(f"{self.name}: it returns a {type(value).__name__}; valid are tensors that it computes")
        return list(found) if isinstance(found, tuple) else [found]


def _described(value: relax.Expr | relax.Binding) -> str:
    """What is bound, in a word."""
    op = value.op if isinstance(value, relax.Call) else value
    if isinstance(op, ir.Op):
        return f"{op.name}(...)"
    return f'call_packed("{op.global_symbol}", ...)' if isinstance(op, relax.ExternFunc) else type(op).__name__


def _unique(name: str, taken: set[str]) -> str:
    """`name` as an identifier that isn't `taken`, which it then is."""
    base = re.sub(r"\W", "_", name)
    found, count = base, 0
    while found in taken:
        count += 1
        found = f"{base}_{count}"
    taken.add(found)
    return found
