"""Products by transposed matrices, each in one function that reads the matrix as it lies."""

from __future__ import annotations

from collections import Counter

from tvm import ir, relax
from tvm.ir import IRModule
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm.relax.transform.fuse_transpose_matmul import _pattern, _TransposeMatmulFuser

__all__ = ["fuse_transposed_products"]

_COMPOSITE = "transpose_matmul_fuse"  # upstream's name of what it fuses


def fuse_transposed_products() -> ir.transform.Pass:
    """Upstream's FuseTransposeMatmul, which fails at a transpose with two readers, and at ``x @ x.T``."""

    @ir.transform.module_pass(opt_level=0, name="FuseTransposedProducts")
    def fuse(mod: IRModule, _context: ir.transform.PassContext) -> IRModule:
        apart = _Apart(mod)
        for variable, func in mod.functions_items():
            if isinstance(func, relax.Function) and (shared := _shared(func)):
                apart.builder_.update_func(variable, apart.of(func, shared))
        mod = relax.transform.FuseOpsByPattern([(_COMPOSITE, *_pattern())], bind_constants=False)(apart.builder_.get())
        fuser = _Fuser(mod)
        for variable, func in mod.functions_items():
            if isinstance(func, relax.Function):
                fuser.builder_.update_func(variable, fuser.visit_expr(func))
        return fuser.builder_.get()

    return fuse


def _shared(func: relax.Function) -> dict[relax.Var, relax.Call]:
    """The transposes that are read more than once, by their variables."""
    readers: Counter[relax.Var] = Counter()
    found: dict[relax.Var, relax.Call] = {}

    def visit(node: relax.Expr) -> None:
        if isinstance(node, relax.Call):
            readers.update(each for each in node.args if isinstance(each, relax.Var))
        elif isinstance(node, relax.Tuple):
            readers.update(each for each in node.fields if isinstance(each, relax.Var))
        elif isinstance(node, relax.SeqExpr):
            readers.update([node.body] if isinstance(node.body, relax.Var) else [])
            bindings = [each for block in node.blocks for each in block.bindings]
            found.update(
                (each.var, each.value) for each in bindings if _is(getattr(each, "value", None), "permute_dims")
            )

    relax.analysis.post_order_visit(func, visit)
    return {variable: call for variable, call in found.items() if readers[variable] > 1}


def _is(value: relax.Expr, operator: str) -> bool:
    return isinstance(value, relax.Call) and isinstance(value.op, ir.Op) and value.op.name == f"relax.{operator}"


@mutator
class _Apart(PyExprMutator):
    """Gives each product a transpose of its own."""

    shared: dict[relax.Var, relax.Call]

    def of(self, func: relax.Function, shared: dict[relax.Var, relax.Call]) -> relax.Function:
        self.shared = shared
        return self.visit_expr(func)

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        transposed = self.shared.get(call.args[1]) if _is(call, "matmul") else None
        if transposed is not None:
            own = self.builder_.emit(self.visit_expr(transposed))
            call = relax.Call(call.op, [call.args[0], own], call.attrs)
        return self.visit_expr_post_order(call)


@mutator
class _Fuser(_TransposeMatmulFuser._cls):
    """Upstream's, which takes a product to be of two matrices, and none of them to be another variable by now.

    One is where the shape of what it is made of is written otherwise, as ``n * 2`` for ``2 * n``.
    """

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        if isinstance(call.op, ir.GlobalVar):
            func = self.builder_.get()[call.op]
            if func.attrs is not None and func.attrs.get("Composite") == _COMPOSITE:
                args = [self.visit_expr(arg) for arg in call.args]
                call = relax.Call(call.op, args * 2 if len(args) == 1 else args)
        return super().visit_call_(call)
