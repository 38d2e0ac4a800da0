"""Upstream's importer of ``torch.export``: what it makes of products and norms in types of 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from tvm import relax

_WIDE: dict[str, tuple[int, ...]] = {
    "addmm.default": (0,), "baddbmm.default": (0,), "linear.default": (2,),
    "conv1d.default": (2,), "conv2d.default": (2,), "conv3d.default": (2,), "convolution.default": (2,),
    "mm.default": (), "bmm.default": (), "matmul.default": (),
    "group_norm.default": (0, 2, 3), "native_group_norm.default": (0, 1, 2),
}  # fmt: skip
"""The operators that the importer computes in float32 whatever they are of, and which arguments are added to that; and
norms of groups, which Relax refuses of bfloat16, with their tensors."""
_HALF = ("float16", "bfloat16")


def half_converters() -> dict[str, Callable[[Any, Any], relax.Var]]:
    """What upstream's importer of ``torch.export`` is told for models of float16 or bfloat16. ::

        program = torch.export.export(model.to(torch.bfloat16), inputs)
        module = from_exported_program(program, custom_convert_map=half_converters())

    By itself it adds biases of 16 bits to products of float32, which Relax refuses, and leaves products without a bias
    in float32. With these a product is summed and its bias added in float32, and the result has the model's type, as
    PyTorch's has. So are norms of groups, which Relax refuses of bfloat16. What is of other types is imported as
    before.
    """
    return {name: partial(_in_own_type, name, wide) for name, wide in _WIDE.items()}


def _in_own_type(name: str, wide: tuple[int, ...], node: Any, importer: Any) -> relax.Var:
    convert, emit = importer.create_convert_map()[name], importer.block_builder.emit
    first = node.args[1 if name in ("addmm.default", "baddbmm.default") else 0]
    dtype = str(importer.env[first].ty.dtype)
    if dtype not in _HALF:
        return convert(node)
    given = [node.args[at] for at in wide if len(node.args) > at and node.args[at] is not None]
    kept = {each: importer.env[each] for each in given}
    for each, value in kept.items():
        importer.env[each] = emit(relax.op.astype(value, "float32"))
    made = convert(node)
    importer.env.update(kept)
    return emit(relax.op.astype(made, dtype))
