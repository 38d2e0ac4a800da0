"""Upstream's importer of ``torch.export``: what it makes of products in types of 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import relax

_BIASES = {
    "addmm.default": 0, "baddbmm.default": 0, "linear.default": 2,
    "conv1d.default": 2, "conv2d.default": 2, "conv3d.default": 2, "convolution.default": 2,
    "mm.default": None, "bmm.default": None, "matmul.default": None,
}  # fmt: skip
"""The operators that the importer computes in float32 whatever they are of, and which argument is added to that."""
_HALF = ("float16", "bfloat16")


def half_converters() -> dict[str, Callable[[Any, Any], relax.Var]]:
    """What upstream's importer of ``torch.export`` is told for models of float16 or bfloat16. ::

        program = torch.export.export(model.to(torch.bfloat16), inputs)
        module = from_exported_program(program, custom_convert_map=half_converters())

    By itself it adds biases of 16 bits to products of float32, which Relax refuses, and leaves products without a bias
    in float32. With these a product is summed and its bias added in float32, and the result has the model's type, as
    PyTorch's has. What is of other types is imported as before.
    """
    return {name: partial(_in_own_type, name, bias) for name, bias in _BIASES.items()}


def _in_own_type(name: str, bias: int | None, node: Any, importer: Any) -> relax.Var:
    convert, emit = importer.create_convert_map()[name], importer.block_builder.emit
    first = node.args[1 if bias == 0 else 0]
    dtype = str(importer.env[first].ty.dtype)
    if dtype not in _HALF:
        return convert(node)
    added = node.args[bias] if bias is not None and len(node.args) > bias else None
    kept = None if added is None else importer.env[added]
    if kept is not None:
        importer.env[added] = emit(relax.op.astype(kept, "float32"))
    made = convert(node)
    if kept is not None:
        importer.env[added] = kept
    return emit(relax.op.astype(made, dtype))
