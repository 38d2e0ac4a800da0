"""Scratch for calls of a function on a GPU: global memory that no two calls use at once.

Calls may run on several streams at once, and host threads may launch kernels on one stream in turns. PyTorch's tensors
bring its allocator, which gives memory back in the order of the stream: each call has scratch of its own, also where it
is captured in a graph. For TVM's tensors a thread keeps scratch for each stream, whose calls run one after the other.
For any others it is allocated and freed, which waits until the device is done.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from tvm_axe.tile.points import evaluate
from tvm_axe.tile.program import TileSequence
from tvm_axe.tile.walking import variables_in

__all__ = ["Scratch"]

STREAMS = 8
"""For how many streams a thread keeps scratch; that of another one takes the place of the oldest."""


class Scratch:
    """Allocates the scratch of a function, whose shapes the arguments of a call decide.

    Parameters
    ----------
    program : TileSequence
        The function; its first tensor says which device, and whose allocator.
    device : str
        The runtime's name of such devices.
    """

    def __init__(self, program: TileSequence, device: str) -> None:
        self._device = device
        self._tensors = [(tile.shape, tile.dtype) for tile in program.scratch]
        params = list(program.func.params)
        self._first = next(number for number, param in enumerate(params) if tirx.is_buffer_var(param))
        self._places = _places(program, params)
        self._own = threading.local()
        self._shapes = functools.lru_cache(256)(self._shaped)

    def new(self, values: Sequence[Any]) -> list[Any]:
        """A tensor for each scratch, for a call with these arguments, which fit the parameters."""
        first = values[self._first]
        sizes = (values[at] if dim is None else values[at].shape[dim] for at, dim in self._places.values())
        shapes = self._shapes(tuple(map(int, sizes)))
        if hasattr(first, "new_empty"):  # a tensor of PyTorch's
            types = self._torch_types
            if None not in types:
                return [first.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, types)]
        _, index = first.__dlpack_device__()
        device = tvm.runtime.device(self._device, index)
        if not isinstance(first, tvm_ffi.Tensor):  # whose stream isn't known here
            return self._allocated(shapes, device)
        kept: dict[tuple[int, int], tuple[list[tuple[int, ...]], list[Any]]] = self._own.__dict__.setdefault("kept", {})
        place = (index, tvm_ffi.get_raw_stream(device))
        if place not in kept or kept[place][0] != shapes:
            kept.pop(place, None)
            while len(kept) >= STREAMS:
                del kept[next(iter(kept))]
            kept[place] = shapes, self._allocated(shapes, device)
        return kept[place][1]

    def _allocated(self, shapes: Sequence[tuple[int, ...]], device: tvm.runtime.Device) -> list[Any]:
        return [tvm.runtime.empty(shape, dtype, device) for shape, (_, dtype) in zip(shapes, self._tensors)]

    @functools.cached_property
    def _torch_types(self) -> list[Any]:
        """PyTorch's types of the tensors; None of one that it has none for."""
        import torch

        return [getattr(torch, dtype, None) for _, dtype in self._tensors]

    def _shaped(self, sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The shape of each scratch where the parameters' variables have these values."""
        known = dict(zip(self._places, sizes, strict=True))
        return [
            tuple(extent if isinstance(extent, int) else int(evaluate(extent, known)) for extent in shape)
            for shape, _ in self._tensors
        ]


def _places(program: TileSequence, params: Sequence[tirx.Var]) -> dict[tirx.Var, tuple[int, int | None]]:
    """Where the variables of scratch's shapes get a value: which argument, and its dimension; None of a scalar."""
    asked = variables_in(*(extent for tile in program.scratch for extent in tile.shape))
    found: dict[tirx.Var, tuple[int, int | None]] = {}
    for number, param in enumerate(params):
        if not tirx.is_buffer_var(param):
            found[param] = number, None
            continue
        for dimension, extent in enumerate(param.shape):
            if isinstance(extent, tirx.Var):
                found.setdefault(extent, (number, dimension))
    return {var: place for var, place in found.items() if var in asked}
