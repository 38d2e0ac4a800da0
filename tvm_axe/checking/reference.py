"""What a function computes on one device, compiled by upstream alone: in its own types, and in float64."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.ir import IRModule
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.analysis.parameters import parameters
from tvm_axe.checking.comparing import difference, is_float, relative_error, summing_slack
from tvm_axe.checking.products import OwnProducts, own_products
from tvm_axe.checking.sampling import Sample
from tvm_axe.machines.maxima import PLAIN
from tvm_axe.tile.kernels.check import poison
from tvm_axe.tile.kernels.kernel import TOLERANCE

__all__ = ["Alone", "Expected", "Reference", "exposed"]

_OWN = 8.0  # times what the function itself is off by in its own types: rounding in another order is off by no more


class Alone:
    """A function compiled for one device by upstream, which its annotations mean nothing to.

    Parameters
    ----------
    func : PrimFunc
        The function, scheduled for a mesh or not.
    """

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.parameters = parameters(func)
        self._main = _compiled(func)

    def __call__(self, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """All the parameters after a call; those that aren't given begin poisoned."""
        tensors = {}
        for name, param in self.parameters.items():
            tensors[name] = tvm.runtime.empty(param.shape, param.dtype)
            array = given[name] if name in given else poison(param.shape, param.dtype)
            _tvm.as_array(tensors[name])[...] = array.astype(param.dtype, copy=False)
        self._main(*tensors.values())
        return {name: _tvm.as_array(tensor).copy() for name, tensor in tensors.items()}


class _WithProducts:
    """The same of a function that would take long, whose products numpy computes in float64."""

    def __init__(self, func: tirx.PrimFunc, products: OwnProducts, wide: bool) -> None:
        self.parameters, self._products, self._wide, self._main = parameters(func), products, wide, None
        if products.rest is not None:
            rest = products.rest["main"]
            self._main = _compiled(_tvm.widened(rest) if wide else rest)

    def __call__(self, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        arguments = {}
        for place, (name, param) in enumerate(self.parameters.items()):
            array = given[name] if name in given else poison(param.shape, param.dtype)
            arguments[place] = array.astype("float64") if self._wide and is_float(array.dtype) else array.copy()
        self._products.multiply(arguments, self._wide)
        if self._main is not None:
            tensors = [tvm.runtime.empty(arguments[n].shape, str(arguments[n].dtype)) for n in sorted(arguments)]
            for n, tensor in enumerate(tensors):
                _tvm.as_array(tensor)[...] = arguments[n]
            self._main(*tensors)
            arguments = {n: _tvm.as_array(tensor).copy() for n, tensor in enumerate(tensors)}
        return {name: arguments[n] for n, name in enumerate(self.parameters)}


@dataclass(frozen=True)
class Expected:
    """What a function must compute of certain arrays.

    Attributes
    ----------
    arrays : Mapping[str, numpy.ndarray]
        Each parameter after a call, in float64 where its type is one of floating point.
    slack : Mapping[str, float]
        How much more of its norm than its type explains each may be off by; see `Reference`.
    unsure : Mapping[str, numpy.ndarray]
        Where an element isn't judged: whether it is a finite number depends on rounding, or it is none of a sample.
    """

    arrays: Mapping[str, np.ndarray]
    slack: Mapping[str, float]
    unsure: Mapping[str, np.ndarray]

    def of(self, names: Collection[str]) -> Expected:
        """The same of some of the parameters."""
        return Expected(
            {name: self.arrays[name] for name in names},
            {name: self.slack[name] for name in names},
            {name: self.unsure[name] for name in names},
        )

    def fault(self, name: str, got: np.ndarray, exactly: bool = False) -> str:
        """What is wrong with a result, in words that follow its name; empty if it is right."""
        got, want = self.judged(name, got)
        if exactly:
            wrong = int((~_same(got, want)).sum())
            return f"differs in {wrong} of {want.size} elements, and nothing rounds" if wrong else ""
        if not is_float(got.dtype) and self.slack[name]:
            worst = float(np.abs(got.astype("float64") - want).max(initial=0.0))
            return (
                f"is off by {worst:g}, where rounding explains {self.slack[name]:g}" if worst > self.slack[name] else ""
            )
        return difference(got, want, self.slack[name])

    def judged(self, name: str, got: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A result and what it must be, the same where that isn't judged."""
        want, unsure = self.arrays[name], self.unsure[name]
        return (
            (np.where(unsure, np.zeros((), got.dtype), got), np.where(unsure, 0, want)) if unsure.any() else (got, want)
        )


class Reference:
    """Computes what a function must, by the function itself before any primitive.

    What counts is the function with float64 in the place of every type of floating point. A result may be off by what
    `tvm_axe.checking.comparing.difference` says that rounding explains of its own type and of the number of terms, plus

    - the tolerance of the narrowest type that the function computes in, where that isn't the result's own, and
    - 8 times what the function, in its own types and its own order, is off by: no schedule has to be better by far.

    Of integers that are made of floats the last alone counts, as a difference. Products of matrices in a function that
    would take long are computed by numpy in float64 (`tvm_axe.checking.products`).

    Parameters
    ----------
    func : PrimFunc
        The function before any primitive; of one that was scheduled, the annotations are ignored.
    sample : Sample, optional
        The same restricted to a sample of its results; the others aren't judged then.

    Attributes
    ----------
    wide : bool
        Whether float64 could take the place of the types. It can't where their bits are taken for another type's; then
        the function in its own types counts.
    """

    def __init__(self, func: tirx.PrimFunc, sample: Sample | None = None) -> None:
        products = own_products(func) if sample is None else None
        computed = func if sample is None else sample.func
        self._parameters, self._sample = parameters(func), sample
        self._own = Alone(computed) if products is None else _WithProducts(func, products, False)
        self.wide, self._wide = True, self._own
        if any(is_float(np.dtype(dtype)) for dtype in _dtypes(func)):
            try:
                self._wide = Alone(_tvm.widened(computed)) if products is None else _WithProducts(func, products, True)
            except _tvm.UPSTREAM_ERRORS as error:
                _tvm.raise_own_fault(error)
                self.wide = False
        narrow = max((TOLERANCE.get(dtype, 0.0) for dtype in _computed(func)), default=0.0)
        self._narrow, self._summing = narrow, summing_slack(func)

    def __call__(self, given: Mapping[str, np.ndarray]) -> Expected:
        """What the parameters must be after a call on these arrays; the others are poisoned before."""
        sample = self._sample
        taken = given if sample is None else {**given, **sample.rows}
        own = self._own(taken)
        wide = own if self._wide is self._own else self._wide(taken)
        arrays, slack, unsure = {}, {}, {}
        for name, param in self._parameters.items():
            mine, want = own[name], wide[name]
            out = np.zeros(param.shape, bool) if sample is None else sample.left_out(name, param.shape)
            if out.any():
                mine, want = (np.where(out, np.zeros((), array.dtype), array) for array in (mine, want))
            arrays[name], unsure[name] = want, out
            if is_float(mine.dtype):
                unsure[name] |= np.isfinite(mine.astype("float64")) != np.isfinite(want.astype("float64"))
                narrower = self._narrow if self._narrow > TOLERANCE.get(param.dtype, 0.0) else 0.0
                slack[name] = self._summing + narrower + _OWN * relative_error(mine, want)
            else:
                slack[name] = _OWN * float(np.abs(mine.astype("float64") - want.astype("float64")).max(initial=0.0))
        return Expected(arrays, slack, unsure)


def exposed(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with the buffers that it allocates as further parameters; those that share a name stay within."""
    root = func.body.block
    names = [str(buffer.name) for buffer in (*func.params, *root.alloc_buffers)]
    held = [buffer for buffer in root.alloc_buffers if names.count(str(buffer.name)) == 1]
    within = [buffer for buffer in root.alloc_buffers if names.count(str(buffer.name)) > 1]
    notes = dict(root.annotations.items())
    block = s_tir.SBlock([], [], [], root.name_hint, root.body, alloc_buffers=within, annotations=notes)
    shown = tirx.PrimFunc([*func.params, *held], s_tir.SBlockRealize([], True, block), func.ret_type)
    return s_tir.renew_defs(shown.with_attrs(dict(func.attrs.items())))


def _compiled(func: tirx.PrimFunc) -> Callable[..., None]:
    mod = IRModule({"main": func.with_attr("global_symbol", "main")})
    return _tvm.load_llvm(_tvm.compile_llvm(mod, Target("llvm"), PLAIN))["main"]


def _same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = (array.astype("float64") if is_float(array.dtype) else array for array in (a, b))
    return (a == b) | ((a != a) & (b != b))


def _computed(func: tirx.PrimFunc) -> set[str]:
    """The types of all that is stored or computed on the way; what is only read has been rounded before."""
    found: set[str] = set()
    kinds = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Cast, ir.Call)
    tvm_ffi.structural_walk(
        func.body,
        [
            (tirx.BufferStore, lambda store: found.add(str(store.buffer.dtype))),
            (kinds, lambda value: found.add(str(value.ty.dtype)) if hasattr(value.ty, "dtype") else None),
        ],
    )
    return found


def _dtypes(func: tirx.PrimFunc) -> set[str]:
    """The types of all buffers."""
    found = {str(param.dtype) for param in func.params}

    def on_block(block: s_tir.SBlock) -> None:
        found.update(str(buffer.dtype) for buffer in block.alloc_buffers)

    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, on_block))
    return found
