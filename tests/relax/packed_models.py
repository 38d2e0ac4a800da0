"""A gated layer that tests share over meshes, its weights quantized and packed as importers bring them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import tvm
from tvm import relax

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
ROWS, WIDTH, GROUP = 6, 128, 32

Arrays = dict[str, np.ndarray]
Emit = Callable[[relax.Expr], relax.Var]
op = relax.op


class Packing(NamedTuple):
    """How a weight (n, k) is packed.

    Attributes
    ----------
    tensors : Callable
        Of n, k and the model's type, the shape and type of each tensor that it is packed into, by name.
    decoded : Callable
        What makes the matrix as (k, n) of these in a model.
    drawn : Callable
        Random tensors, and the matrix (n, k) that they are, in float64.
    """

    tensors: Callable[[int, int, str], dict[str, tuple[tuple[int, ...], str]]]
    decoded: Callable[[Emit, list[relax.Var], int, int, str], relax.Expr]
    drawn: Callable[[np.random.Generator, int, int, str], tuple[Arrays, np.ndarray]]


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def _words(codes: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    parts = [np.take(codes, range(n, codes.shape[axis], 8), axis).astype("uint32") for n in range(8)]
    return np.asarray(sum(part << np.uint32(4 * own) for part, own in zip(parts, order)), "uint32")


def _scales(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return rng.uniform(0.02, 0.1, shape).astype(_dtype(dtype))


# ---- Bytes: two codes along k, zeros of groups, an unsigned byte each --------------------------------------------


def _bytes_tensors(n: int, k: int, dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
    groups = n, k // GROUP
    return {"packed": ((n, k // 2), "uint8"), "scale": (groups, dtype), "zero": (groups, "uint8")}


def _bytes_decoded(emit: Emit, given: list[relax.Var], n: int, k: int, dtype: str) -> relax.Expr:
    packed, scale, zero = given
    low = emit(op.bitwise_and(packed, relax.const(15, "uint8")))
    high = emit(op.right_shift(packed, relax.const(4, "uint8")))
    codes = emit(op.reshape(emit(op.stack([low, high], -1)), (n, k // GROUP, GROUP)))
    wide = emit(op.subtract(emit(op.astype(codes, "int32")), emit(op.expand_dims(emit(op.astype(zero, "int32")), 2))))
    weight = emit(op.multiply(emit(op.astype(wide, dtype)), emit(op.expand_dims(scale, 2))))
    return op.permute_dims(emit(op.reshape(weight, (n, k))))


def _bytes_drawn(rng: np.random.Generator, n: int, k: int, dtype: str) -> tuple[Arrays, np.ndarray]:
    codes, zero = rng.integers(0, 16, (n, k)), rng.integers(0, 16, (n, k // GROUP))
    scale = _scales(rng, (n, k // GROUP), dtype)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).astype("uint8")
    matrix = (codes - zero.repeat(GROUP, 1)) * scale.astype("float64").repeat(GROUP, 1)
    return {"packed": packed, "scale": scale, "zero": zero.astype("uint8")}, matrix


# ---- Words: eight codes along k, 8 stands for zero --------------------------------------------------------------


def _words_tensors(n: int, k: int, dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
    return {"packed": ((k // 8, n), "uint32"), "scale": ((k // GROUP, n), dtype)}


def _words_decoded(emit: Emit, given: list[relax.Var], n: int, k: int, dtype: str) -> relax.Expr:
    packed, scale = given
    shifts = relax.const(np.arange(0, 32, 4, dtype="uint32").reshape(1, 8, 1))
    shifted = emit(op.right_shift(emit(op.expand_dims(packed, 1)), shifts))
    codes = emit(op.reshape(emit(op.bitwise_and(shifted, relax.const(15, "uint32"))), (k, n)))
    less = emit(op.subtract(emit(op.astype(codes, dtype)), relax.const(8, dtype)))
    return op.multiply(less, emit(op.repeat(scale, GROUP, 0)))


def _words_drawn(rng: np.random.Generator, n: int, k: int, dtype: str) -> tuple[Arrays, np.ndarray]:
    codes, scale = rng.integers(0, 16, (k, n)), _scales(rng, (k // GROUP, n), dtype)
    matrix = (codes - 8) * scale.astype("float64").repeat(GROUP, 0)
    return {"packed": _words(codes, 0), "scale": scale}, matrix.T


# ---- AWQ: eight codes along n in an order of their own, zeros packed alike ---------------------------------------


def _awq_tensors(n: int, k: int, dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
    groups = k // GROUP
    return {"packed": ((k, n // 8), "int32"), "scale": ((groups, n), dtype), "zero": ((groups, n // 8), "int32")}


def _awq_decoded(emit: Emit, given: list[relax.Var], n: int, k: int, dtype: str) -> relax.Expr:
    packed, scale, zero = given
    shifts = relax.const(np.array(ORDER, "int32").reshape(1, 1, 8) * 4)

    def codes(words: relax.Var, rows: int) -> relax.Var:
        shifted = emit(op.right_shift(emit(op.expand_dims(words, 2)), shifts))
        return emit(op.reshape(emit(op.bitwise_and(shifted, relax.const(15, "int32"))), (rows, n)))

    less = emit(op.subtract(codes(packed, k), emit(op.repeat(codes(zero, k // GROUP), GROUP, 0))))
    return op.multiply(emit(op.astype(less, dtype)), emit(op.repeat(scale, GROUP, 0)))


def _awq_drawn(rng: np.random.Generator, n: int, k: int, dtype: str) -> tuple[Arrays, np.ndarray]:
    codes, zero = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (k // GROUP, n))
    scale = _scales(rng, (k // GROUP, n), dtype)
    packed, zeros = (_words(each, 1, ORDER).view("int32") for each in (codes, zero))
    matrix = (codes - zero.repeat(GROUP, 0)) * scale.astype("float64").repeat(GROUP, 0)
    return {"packed": packed, "scale": scale, "zero": zeros}, matrix.T


# ---- 8-bit floats: a scale of all, of each row, or of each block -------------------------------------------------


def _floats(rows: int, columns: int) -> Packing:
    """Of blocks of so many rows and columns; 0 is all of them."""

    def counts(n: int, k: int) -> tuple[int, int]:
        return -(-n // rows) if rows else 1, -(-k // columns) if columns else 1

    def tensors(n: int, k: int, dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
        return {"packed": ((n, k), "float8_e4m3fn"), "scale": (counts(n, k), "float32")}

    def decoded(emit: Emit, given: list[relax.Var], n: int, k: int, dtype: str) -> relax.Expr:
        packed, scale = given
        if rows > 1:
            scale = emit(op.repeat(scale, rows, 0))
        if columns > 1:
            scale = emit(op.repeat(scale, columns, 1))
        weight = emit(op.multiply(emit(op.astype(packed, "float32")), scale))
        return op.permute_dims(emit(op.astype(weight, dtype)))

    def drawn(rng: np.random.Generator, n: int, k: int, dtype: str) -> tuple[Arrays, np.ndarray]:
        packed = rng.standard_normal((n, k)).astype(ml_dtypes.float8_e4m3fn)
        scale = rng.uniform(0.1, 0.5, counts(n, k)).astype("float32")
        wide = scale.astype("float64").repeat(rows or n, 0).repeat(columns or k, 1)
        return {"packed": packed, "scale": scale}, packed.astype("float64") * wide

    return Packing(tensors, decoded, drawn)


PACKINGS: dict[str, Packing] = {
    "bytes": Packing(_bytes_tensors, _bytes_decoded, _bytes_drawn),
    "words": Packing(_words_tensors, _words_decoded, _words_drawn),
    "awq": Packing(_awq_tensors, _awq_decoded, _awq_drawn),
    "fp8 of all": _floats(0, 0),
    "fp8 of rows": _floats(1, 0),
    "fp8 of blocks": _floats(32, 32),
}
OF_CODES = ("bytes", "words", "awq")


def sides(inner: int) -> dict[str, tuple[int, int]]:
    """The layer's weights, as (n, k)."""
    return {"gate": (inner, WIDTH), "up": (inner, WIDTH), "down": (WIDTH, inner)}


def layer(form: str, inner: int, dtype: str, rows: Any = ROWS) -> tvm.IRModule:
    """``x + down(silu(gate(x)) * up(x))`` of so many inner columns."""
    packing, builder = PACKINGS[form], relax.BlockBuilder()
    rows = rows if isinstance(rows, int) else tvm.tirx.Var(rows, "int64")
    x = relax.Var("x", relax.TensorType((rows, WIDTH), dtype))
    given = {
        name: [
            relax.Var(f"{name}.{part}", relax.TensorType(*each)) for part, each in packing.tensors(n, k, dtype).items()
        ]
        for name, (n, k) in sides(inner).items()
    }
    params = [x, *(each for own in given.values() for each in own)]
    with builder.function("main", params, attrs={"num_input": 1}):
        with builder.dataflow():

            def linear(data: relax.Expr, name: str) -> relax.Var:
                weight = packing.decoded(builder.emit, given[name], *sides(inner)[name], dtype)
                return builder.emit(op.matmul(data, builder.emit(weight)))

            gated = builder.emit(op.multiply(builder.emit(op.nn.silu(linear(x, "gate"))), linear(x, "up")))
            out = builder.emit_output(op.add(x, linear(gated, "down")))
        builder.emit_func_output(out)
    return builder.get()


def drawn(form: str, inner: int, dtype: str, rows: int = ROWS) -> tuple[np.ndarray, Arrays, np.ndarray]:
    """Random inputs and weights, and what the layer makes of them in float64."""
    rng = np.random.default_rng(7)
    x, weights, matrices = rng.standard_normal((rows, WIDTH)).astype(_dtype(dtype)), Arrays(), Arrays()
    for name, (n, k) in sides(inner).items():
        arrays, matrices[name] = PACKINGS[form].drawn(rng, n, k, dtype)
        weights |= {f"{name}.{part}": each for part, each in arrays.items()}
    wide = x.astype("float64")
    gate, up = wide @ matrices["gate"].T, wide @ matrices["up"].T
    return x, weights, wide + (gate / (1 + np.exp(-gate)) * up) @ matrices["down"].T
