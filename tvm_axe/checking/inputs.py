"""Arrays to check a function on: small integers, distinct numbers, and indices that are within what they index."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import tvm_ffi
from tvm import ir, s_tir, tirx
from tvm.sym import Analyzer

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import loads_in
from tvm_axe.analysis.parameters import Param, parameters
from tvm_axe.checking.comparing import is_float
from tvm_axe.tile.kernels.check import poison
from tvm_axe.tile.knobs import settled
from tvm_axe.tile.tunable import program_of

__all__ = ["Indices", "distinct_values", "index_values", "indices_of", "other_data", "padding", "small_integers"]


@dataclass(frozen=True)
class Indices:
    """Which integer parameters of a function are indices.

    Attributes
    ----------
    most : Mapping[str, int]
        By the name of a parameter that is used in an index, the largest value that is within all that it indexes.
    computed : bool
        Whether something is indexed by numbers that the function computes, of any of its parameters. Its integer
        parameters are then 0 or 1, as far as that is known to be within.
    """

    most: Mapping[str, int]
    computed: bool


def indices_of(func: tirx.PrimFunc) -> Indices:
    """Find the parameters of a function, or of the tile program that it stands for, that index others."""
    written = program_of(func)
    func = func if written is None else settled(written, {})
    params = {param.name: param for param in func.params}
    integers = [name for name, param in params.items() if str(param.dtype).startswith(("int", "uint"))]
    most: dict[str, int] = {}
    computed: list[int] = []
    analyzer = Analyzer()

    def on_loop(loop: tirx.For) -> None:
        analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent), allow_override=True)

    def on_block(block: s_tir.SBlock) -> None:
        for iterator in block.iter_vars:
            analyzer.bind(iterator.var, iterator.dom, allow_override=True)

    def on_access(buffer: tirx.Buffer, indices: list[tirx.Expr]) -> None:
        for extent, index in zip(buffer.shape, indices):
            for load in _outermost(loads_in(index)):
                names = [name for name in integers if load.source.same_as(params[name])]
                largest = _largest(index, load, int(extent), analyzer)
                if names:
                    most[names[0]] = min(largest, most.get(names[0], largest))
                else:
                    computed.append(largest)

    def on_primitive(call: tirx.TilePrimitiveCall) -> None:
        for region in call.args:
            if isinstance(region, ir.TensorRegion):
                on_access(region.source, [part.min for part in region.region])

    tvm_ffi.structural_walk(
        func.body,
        [
            (tirx.For, on_loop),
            (s_tir.SBlock, on_block),
            (ir.TensorLoad, lambda load: on_access(load.source, list(load.indices))),
            (tirx.BufferStore, lambda store: on_access(store.buffer, list(store.indices))),
            (tirx.TilePrimitiveCall, on_primitive),
        ],
        order="pre",
    )
    if computed:
        for name in integers:
            most[name] = min([1, *computed, most.get(name, 1)])
    return Indices(most, bool(computed))


def _outermost(loads: list[ir.TensorLoad]) -> list[ir.TensorLoad]:
    """Those that aren't in an index of another of them."""
    inner = [other for load in loads for other in loads_in(list(load.indices))]
    return [load for load in loads if not any(load.same_as(other) for other in inner)]


def _largest(index: tirx.Expr, load: ir.TensorLoad, extent: int, analyzer: Analyzer) -> int:
    """The largest u so that `index` is within `extent` wherever the load is in [0, u]; 0 where that isn't known."""
    value = tirx.Var("value", str(load.ty.dtype))
    index = _tvm.structural_map(index, (ir.TensorLoad, lambda each: value if each.same_as(load) else each))
    least, largest = 0, extent - 1
    while least < largest:
        middle = (least + largest + 1) // 2
        analyzer.bind(value, ir.Range(0, middle + 1), allow_override=True)
        bounds = analyzer.const_int_bound(index)
        least, largest = (middle, largest) if bounds.max_value < extent else (least, middle - 1)
    return least


def small_integers(
    func: tirx.PrimFunc, indices: Indices, magnitude: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """For each parameter integers of at most `magnitude`, in its own type; indices are within what they index."""
    return {name: _integers(param, indices, magnitude, rng) for name, param in parameters(func).items()}


def distinct_values(
    func: tirx.PrimFunc, indices: Indices, magnitude: int, rng: np.random.Generator, positive: bool = False
) -> dict[str, np.ndarray]:
    """For each parameter of floats numbers that all differ, as far as its type has so many, in a random order.

    They are evenly spaced between -2 and 2, or 0 and 1 if they are to be `positive`, as a variance is; a single one is
    neither in the middle nor at an end. Integers are as `small_integers` has them.
    """
    drawn = {}
    for name, param in parameters(func).items():
        dtype, count = np.dtype(param.dtype), prod(param.shape)
        if is_float(dtype):
            low, high = (0.0, 1.0) if positive else (-2.0, 2.0)
            values = low + (high - low) * (rng.permutation(count) + 0.62) / count
            drawn[name] = values.reshape(param.shape).astype(dtype)
        else:
            drawn[name] = _integers(param, indices, magnitude, rng)
    return drawn


def other_data(
    func: tirx.PrimFunc, indices: Indices, magnitude: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """What is run before, so that what it leaves behind shows: NaN for floats, if no indices are computed of them."""
    drawn = small_integers(func, indices, magnitude, rng)
    if indices.computed:
        return drawn
    return {
        name: poison(array.shape, str(array.dtype)) if is_float(array.dtype) else array for name, array in drawn.items()
    }


def padding(dtype: str, indices: Indices) -> object | None:
    """What slabs begin with, before each run: NaN, or a type's extreme; None where a number may be an index."""
    if indices.computed or (indices.most and not is_float(np.dtype(dtype))):
        return None
    return poison((), dtype)[()]


def _integers(param: Param, indices: Indices, magnitude: int, rng: np.random.Generator) -> np.ndarray:
    dtype = np.dtype(param.dtype)
    if param.name in indices.most:
        return index_values(param.shape, indices.most[param.name], rng).astype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, param.shape).astype(dtype)
    return rng.integers(0 if dtype.kind == "u" else -magnitude, magnitude + 1, param.shape).astype(dtype)


def index_values(shape: tuple[int, ...], most: int, rng: np.random.Generator) -> np.ndarray:
    """Return indices from 0 to `most`: all different if there are enough, or in each row, or as often as each other."""
    count, extent = prod(shape), most + 1
    if count <= extent:
        return rng.permutation(extent)[:count].reshape(shape)
    columns = shape[-1]
    if columns <= extent:
        rows = [rng.permutation(extent)[:columns] for _ in range(count // columns)]
        return np.stack(rows).reshape(shape)
    return rng.permutation(np.arange(count) % extent).reshape(shape)
