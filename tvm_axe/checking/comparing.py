"""Whether results are right: random contents to compute them of, and what of a difference rounding explains.

Two schedules of one function add the same terms in another order, so their results differ by rounding. An array of
floats is right if, both in float64 and relative to what is wanted,

- the norm of what it is off by is at most `TOLERANCE` of the type, plus the slack of the function's sums, and
- no element is off by more than the root of the type's spacing at 1, of the largest element, plus 8 times the slack.

The first sees a term that is missing everywhere, the second a tile that is wrong somewhere. A sum of n random terms
in a type of unit roundoff u is off by about u * sqrt(n / 2) of itself, in whatever order; the slack is 2 u sqrt(n).
"""

from __future__ import annotations

import ctypes
from math import prod, sqrt

import ml_dtypes
import numpy as np
import tvm_ffi
from tvm import s_tir, tirx

from tvm_axe.tile.kernels.kernel import ROUNDING, TOLERANCE
from tvm_axe.tile.nodes import Gemm, Loop, Node, Reduce, Scan
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.sequences import read_function
from tvm_axe.tile.tunable import program_of

__all__ = ["difference", "first_wrong", "is_float", "random_array", "relative_error", "same_bytes", "summing_slack"]

_memcmp = ctypes.CDLL(None).memcmp  # several times as fast as numpy, which makes an array of the answers
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_PIECE = 1 << 16  # elements that are compared at a time, so that their float64 stays in a core's cache


def is_float(dtype: np.dtype) -> bool:
    """Whether it is a type of floating point, the small ones included, which numpy itself has no kind for."""
    return dtype.kind == "f" or str(dtype).startswith(("bfloat", "float"))


def random_array(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype, positive: bool = False
) -> np.ndarray:
    """Random contents: standard normal, or from (0, 1] where they are to be `positive` (a variance, say).

    Integers are 0 or 1, which are also valid as indices into anything.
    """
    if not is_float(dtype):
        return rng.integers(0, 2, shape, dtype="int8").astype(dtype)
    wide = np.dtype("float64") if dtype.itemsize > 4 else np.dtype("float32")
    drawn = 1 - rng.random(shape, wide) if positive else rng.standard_normal(shape, wide)
    return np.asarray(drawn).astype(dtype, copy=False)


def summing_slack(func: tirx.PrimFunc) -> float:
    """How far another order of summing may take a function's results, relative to their norm."""
    program = program_of(func)
    if program is not None:
        return sum(map(_slack_of_tiles, read_function(program).kernels))
    found = [0.0]

    def visit(block: s_tir.SBlock) -> None:
        if block.init is not None:
            sums = [it.dom.extent for it in block.iter_vars if it.iter_type == tirx.IterVar.CommReduce]
            terms = prod(int(extent) for extent in sums if isinstance(extent, tirx.IntImm))
            unit = max((ROUNDING.get(str(write.source.dtype), 0.0) for write in block.writes), default=0.0)
            found.append(2 * unit * sqrt(terms))

    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, visit))
    return max(found)


def _slack_of_tiles(program: TileProgram) -> float:
    """The same of a kernel: each of its sums has the terms of a tile, as often as the loops around it run."""
    analyzer, found = program.analyzer(), [0.0]

    def visit(body: tuple[Node, ...], times: int) -> None:
        for node in body:
            inner = times
            if isinstance(node, Loop):
                most = analyzer.const_int_bound(tirx.const(0, "int32") + node.extent).max_value
                inner = times * int(most) if 0 < int(most) < 1 << 31 else times
            elif isinstance(node, Gemm | Reduce | Scan):
                terms = node.shape[2] if isinstance(node, Gemm) else node.src.extents[node.axis]
                unit = ROUNDING.get(node.writes[0].dtype, 0.0)
                found.append(2 * unit * sqrt(times * terms))
            for other in node.bodies:
                visit(other, inner)

    visit(program.body, 1)
    return max(found)


def same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of one shape and type have the same contents, NaNs and the sign of zeros included."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return _memcmp(a.ctypes.data, b.ctypes.data, a.nbytes) == 0


def difference(got: np.ndarray, want: np.ndarray, slack: float = 0.0) -> str:
    """What is wrong with an array, in words that follow its name; empty if it is right by the module's rule.

    Parameters
    ----------
    got, want
        Of one shape and type; or `want` is float64, and the type of `got` says what rounding explains. Where `want` is
        no finite number, `got` must be the same.
    slack
        What `summing_slack` says of the function.
    """
    if got.dtype == want.dtype and same_bytes(got, want):
        return ""
    if not is_float(got.dtype):
        wrong = int((got != want).sum())
        return f"differs in {wrong} of {want.size} elements" if wrong else ""
    square_off = square = worst = largest = 0.0
    flat_got, flat_want = got.reshape(-1), want.reshape(-1)
    for start in range(0, want.size, _PIECE):
        a, b = (flat[start : start + _PIECE].astype("float64") for flat in (flat_got, flat_want))
        finite = np.isfinite(b)
        if not finite.all():
            if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
                return "is another number where inf or NaN is wanted"
            a, b = a[finite], b[finite]
        off = a - b
        square_off, square = square_off + float(off @ off), square + float(b @ b)
        # Python's max drops a NaN that comes second.
        worst = float(np.maximum(worst, np.abs(off).max(initial=0.0)))
        largest = max(largest, float(np.abs(b).max(initial=0.0)))
    if not np.isfinite(square_off):
        return "is inf or NaN where a finite number is wanted"
    epsilon = float(ml_dtypes.finfo(got.dtype).eps)
    tolerance = TOLERANCE.get(str(got.dtype), 8 * epsilon) + slack
    norm = sqrt(square_off / square) if square else sqrt(square_off)
    if norm > tolerance:
        return f"is off by {norm:.2g} of its norm, where rounding explains {tolerance:.2g}"
    bound = sqrt(epsilon) + 8 * slack
    share = worst / largest if largest else worst
    return f"is off by {share:.2g} of its largest value, where rounding explains {bound:.2g}" if share > bound else ""


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """The norm of what an array is off by over the norm of what is wanted, where both are finite; 0 of none at all."""
    a, b = got.astype("float64"), want.astype("float64")
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    off, size = float(np.linalg.norm(a - b)), float(np.linalg.norm(b))
    return off / size if size else off


def first_wrong(got: np.ndarray, want: np.ndarray, slack: float = 0.0, exactly: bool = False) -> tuple[int, ...]:
    """The place of the first element that is wrong in arrays that differ: off by more than `difference` lets one be.

    Where none is, but all together are, it is the place of the largest difference. Compared `exactly`, any that differs
    is wrong.
    """
    a, b = got.astype("float64"), want.astype("float64")
    with np.errstate(invalid="ignore"):
        off = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    off[np.isnan(off)] = np.inf
    bound = 0.0
    if is_float(got.dtype) and not exactly:
        largest = float(np.abs(b[np.isfinite(b)]).max(initial=0.0))
        bound = (sqrt(float(ml_dtypes.finfo(got.dtype).eps)) + 8 * slack) * (largest or 1.0)
    beyond = np.flatnonzero(off > bound)
    first = int(beyond[0]) if beyond.size else int(off.argmax())
    return tuple(int(place) for place in np.unravel_index(first, off.shape))
