"""What is done to the elements of a matrix product before they are stored, in TIR and in numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe.errors import TileError

LOG2E = math.log2(math.e)
_GELU = 2 * math.sqrt(2 / math.pi)


def _exp2(value: Any) -> Any:
    if isinstance(value, tirx.Expr):
        return T.exp2(value)
    with np.errstate(over="ignore"):  # of what is divided by
        return np.exp2(value)


def _relu(x: Any) -> Any:
    return T.max(x, T.float32(0)) if isinstance(x, tirx.Expr) else np.maximum(x, 0)


def _silu(x: Any) -> Any:
    return x / (_exp2(x * -LOG2E) + 1.0)


def _gelu(x: Any) -> Any:
    """The form with tanh (Hendrycks and Gimpel, 2016), as x * sigmoid: one exponential."""
    return x / (_exp2((x + x * x * x * 0.044715) * (-LOG2E * _GELU)) + 1.0)


ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {"none": lambda x: x, "relu": _relu, "silu": _silu, "gelu": _gelu}
"""Functions of an element, for TIR's float32 expressions and for numpy's arrays."""

STEEPEST = 1.13
"""No activation changes faster than this times its argument (gelu's slope at 1.41)."""


@dataclass(frozen=True)
class Epilogue:
    """``activation(product * a_scale * b_scale + bias) + residual``, of which each part may be left out.

    Raises
    ------
    TileError
        There is no such activation.
    """

    bias: bool = False
    activation: str = "none"
    residual: bool = False
    scaled: bool = False

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise TileError(f"activation is one of {', '.join(ACTIVATIONS)}, got {self.activation!r}")

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of what it reads beside the product."""
        scales = ("a_scale", "b_scale") if self.scaled else ()
        return (*scales, *(("bias",) if self.bias else ()), *(("residual",) if self.residual else ()))

    @property
    def empty(self) -> bool:
        """Whether it leaves the product as it is."""
        return self == Epilogue()

    def expression(
        self,
        value: tirx.Expr,
        place: tuple[Any, ...],
        scales: tuple[tirx.Buffer, tirx.Buffer] | None,
        bias: tirx.Buffer,
        residual: tirx.Buffer,
    ) -> tirx.Expr:
        """The element at `place`, its column last, of which `value` is the product; only what is used is read."""
        if self.scaled and scales is not None:
            value = value * (scales[0][0] * scales[1][0])
        if self.bias:
            value = value + T.cast(bias[place[-1]], "float32")
        value = ACTIVATIONS[self.activation](value)
        return value + T.cast(residual[place], "float32") if self.residual else value

    def reference(self, product: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """The same in float64."""
        given = {name: arrays[name].astype("float64") for name in self.tensors}
        scale = given.get("a_scale", 1.0) * given.get("b_scale", 1.0)
        return ACTIVATIONS[self.activation](product * scale + given.get("bias", 0.0)) + given.get("residual", 0.0)

    def magnitude(self, product: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """What rounding in it is relative to: the terms' absolute values, `product` of the sum's ones."""
        given = {name: np.abs(arrays[name].astype("float64")) for name in self.tensors}
        scale = given.get("a_scale", 1.0) * given.get("b_scale", 1.0)
        return STEEPEST * (product * scale + given.get("bias", 0.0)) + given.get("residual", 0.0)
