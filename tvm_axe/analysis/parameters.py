"""The parameters of a function as whole tensors."""

from __future__ import annotations

from typing import NamedTuple

from tvm import tirx

from tvm_axe.errors import InputError

__all__ = ["Param", "parameters"]


class Param(NamedTuple):
    """A parameter of a function: a whole tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{list(self.shape)}"


def parameters(func: tirx.PrimFunc) -> dict[str, Param]:
    """Return the parameters of a function, by name, in order.

    Raises
    ------
    InputError
        If a parameter isn't a buffer or has a symbolic extent.
    """
    params = {}
    for var in func.params:
        if not tirx.is_buffer_var(var):
            raise InputError(f"parameter {var.name!r}: only buffers can be given as arrays, this is a scalar")
        if not all(isinstance(extent, tirx.IntImm) for extent in var.shape):
            raise InputError(f"parameter {var.name!r}: its shape {list(var.shape)} must be constant")
        params[var.name] = Param(var.name, tuple(int(extent) for extent in var.shape), str(var.dtype))
    return params
