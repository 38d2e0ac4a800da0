"""Rewriting what upstream's objects hold, by functions of Python that may raise."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import ir, relax, runtime, tirx, transform
from tvm_ffi.serialization import from_json_graph_str
from tvm_ffi.structural import _normalize_callbacks

from tvm_axe.interrupts import uninterrupted


def structural_map(value: Any, callbacks: Any) -> Any:
    """Rewrite `value` as `tvm_ffi.structural_map` does, by callbacks that may raise.

    Upstream's frees what is still in use when an error leaves a callback, after another has returned a new object: the
    heap is broken, and the process ends some time later. So none leaves one: what a callback raises first is raised
    when the walk is done, as it was; and Ctrl-C's exception, which comes before a callback could catch it, waits too.
    """
    raised: list[BaseException] = []

    def caught(callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(node: Any) -> Any:
            if raised:
                return node
            try:
                return callback(node)
            except BaseException as error:
                raised.append(error)
                return node

        return call

    entries = [(kind, caught(each)) for kind, each in _normalize_callbacks(callbacks, api_name="structural_map")]
    with uninterrupted():
        mapped = tvm_ffi.structural_map(value, entries)
    if raised:
        raise raised[0]
    return mapped


def body_pass(name: str, rewritten: Callable[[tirx.Stmt], tirx.Stmt]) -> ir.transform.Pass:
    """A pass that rewrites the body of each TensorIR function."""

    def run(mod: ir.IRModule, _context: ir.transform.PassContext) -> ir.IRModule:
        mod = mod.clone()
        for variable, func in mod.functions_items():
            if isinstance(func, tirx.PrimFunc):
                mod[variable] = func.with_body(rewritten(func.body))
        return mod

    return ir.transform.module_pass(run, opt_level=0, name=name)


_PLACE = re.compile(r'\{"type":"ir\.Span","data":\{[^{}]*\}\}|\{"type":"ir\.SourceName","data":"(?:[^"\\]|\\.)*"\}')


def content(value: Any) -> str:
    """All that an IRModule or a function says, as text, but for the places in files where it was written.

    Within a string of JSON quotes are escaped, so that what is taken for a place is one.
    """
    return _PLACE.sub("{}", str(ir.save_json(value)))


def without_places(value: Any) -> Any:
    """An IRModule or a function without the places in files where it was written: what `content` is of."""
    return load_json(_PLACE.sub('{"type":"None"}', str(ir.save_json(value))))


def load_json(text: str) -> Any:
    """What ``tvm.ir.save_json`` of this very version wrote: `tvm.ir.load_json` without its rewriting of older texts.

    That reads the text and writes it in Python, which takes most of the time.
    """
    return from_json_graph_str(text)


def constant_bytes(mod: ir.IRModule) -> int:
    """Bytes of the constants of a module's Relax functions."""
    sizes: list[int] = []

    def on_constant(constant: ir.GenericConst) -> None:
        if isinstance(constant.value, runtime.Tensor):
            sizes.append(math.prod(map(int, constant.value.shape)) * constant.value.dtype.itemsize)

    with uninterrupted():
        for _, func in mod.functions_items():
            if isinstance(func, relax.Function):
                tvm_ffi.structural_walk(func.body, (ir.GenericConst, on_constant))
    return sum(sizes)


def is_plain_context() -> bool:
    """Whether nobody has said how passes are to run, by a ``PassContext``."""
    now, plain = transform.PassContext.current(), transform.PassContext()
    parts = ("opt_level", "required_pass", "disabled_pass", "instruments", "config")
    return all(_listed(getattr(now, part)) == _listed(getattr(plain, part)) for part in parts)


def _listed(value: Any) -> Any:
    return value if isinstance(value, int) else list(value.items() if hasattr(value, "items") else value)


def variables_of(expr: object) -> set[tirx.Var]:
    """Return the variables that occur in `expr`."""
    if isinstance(expr, tirx.Var):
        return {expr}
    found: set[tirx.Var] = set()
    tvm_ffi.structural_walk(expr, (tirx.Var, found.add))
    return found


def put_around(home: Any, name: str, passes: Callable[..., list[ir.transform.Pass]]) -> None:
    """Have one of upstream's passes stand between others, in every pipeline of this process.

    Pipelines are upstream's functions, which make a pass by its name in `home` when they run. `passes` gives all, of
    what makes upstream's and its arguments. What stands there already stays.
    """
    own = getattr(home, name)
    if own.__module__ == __name__:
        return

    def made(*told: Any, **named: Any) -> ir.transform.Pass:
        return ir.transform.Sequential(passes(own, *told, **named))

    setattr(home, name, made)


def is_float(value: tirx.Expr) -> bool:
    """Return whether an expression is of floats, or of vectors of them."""
    return str(value.ty).startswith(("float", "bfloat"))


def is_zero(value: object) -> bool:
    """Return whether an expression is the number 0, of whatever type."""
    return isinstance(value, tirx.IntImm | tirx.FloatImm) and value.value == 0
