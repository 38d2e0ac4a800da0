"""A decoder layer as one streaming program: norm, heads, attention over the caches, projection, norm, experts.

All the requests of a batch decode one token. Heads of keys and values are taken one after the other, so that attention
sees batch x groups requests, in turn on its regions. The residual stream stays on the chip from one end to the other.

>>> from tvm_axe.stream.programs.workloads import MoE
>>> small = Model("small", MoE(4, 2, 16, 8), Heads(groups=2, queries=2, size=4))
>>> program = decoder_layer(small, batch=3, cached=2, tile=None, columns=4, regions=2, cache_tile=4)
>>> [tensor.name for tensor in program.tensors.values()][:9]
['x', 'norm_1', 'norm_2', 'w_q', 'w_k', 'w_v', 'w_o', 'k_cache', 'v_cache']

Which experts a token goes to is an input, as in the published simulations; positions are not encoded.

Source: Streaming Tensor Programs (arXiv 2511.07776), section 5.5.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvm_axe.stream import functions
from tvm_axe.stream.program import Stream, StreamProgram
from tvm_axe.stream.programs.cached_attention import Caches, Requests, attend, attention_inputs
from tvm_axe.stream.programs.moe import cut_rows, mix, moe_inputs
from tvm_axe.stream.programs.workloads import Heads, Model
from tvm_axe.stream.types import Scalar, Selector, StreamType, Tile

__all__ = ["decoder_inputs", "decoder_layer"]


def decoder_layer(
    model: Model,
    batch: int,
    cached: int,
    tile: int | None,
    columns: int,
    regions: int = 4,
    cache_tile: int = 32,
    expert_regions: int | None = None,
    dtype: str = "float32",
) -> StreamProgram:
    """Return the program of a layer.

    Tensors: ``x`` [batch, width], ``norm_1`` and ``norm_2`` [1, width], ``w_q`` [groups * width, queries * size],
    ``w_k`` and ``w_v`` [groups * width, size], ``w_o`` [groups * queries * size, width]; ``k_cache`` and ``v_cache``,
    which are also results, as in `attention` with the requests of the first group before those of the second;
    ``scale``, ``w_gate``, ``w_up`` and ``w_down`` as in `moe_layer`; the result is ``y`` [batch, width]. Inputs: see
    `decoder_inputs`.

    Parameters
    ----------
    model : Model
        The sizes of the model.
    batch : int
        The number of requests.
    cached : int
        Tiles that there is room for in the cache of a request.
    tile, columns, expert_regions : int or None
        The arguments `tile`, `columns` and `regions` of `moe_layer`.
    regions, cache_tile : int
        The arguments `regions` and `tile` of `attention`.
    dtype : str
        The type of all the elements.

    Raises
    ------
    StreamError
        If the sizes don't fit; see `moe_layer`.
    """
    moe, heads = model.moe, model.heads
    p = StreamProgram("decoder")
    x = p.load(p.tensor("x", batch, moe.width, dtype), (batch, moe.width)).flatten()
    gains = [p.load(p.tensor(f"norm_{n}", 1, moe.width, dtype), (1, moe.width)).flatten() for n in (1, 2)]

    normed = _norm(x, gains[0])
    q, k, v = (_heads(p, normed, heads, name, batch, moe.width, dtype) for name in "qkv")
    w_o = p.tensor("w_o", heads.groups * heads.queries * heads.size, moe.width, dtype)
    requests = batch * heads.groups
    caches = Caches.of(p, heads, requests, cached, cache_tile, dtype)
    # Kept until a request comes back from its region.
    chosen = p.input("region", StreamType((requests,), Selector(regions))).buffered(requests)
    known = [p.input(name, StreamType((requests,), Scalar())) for name in ("row", "tiles", "offset")]
    parts = Requests(q, k, v, *known).partition(chosen)
    results = [attend(p, caches, part, number).result for number, part in enumerate(parts)]
    attended = p.reassemble(results, chosen, in_order=True, name="attended").flatten()

    # [groups, batch] of (1, queries * size), a tile of all the requests for each group, and the sum over the groups.
    rows = attended.map(_reshaped(1, heads.queries * heads.size)).reshape(batch).accum(functions.retile())
    weights = p.load(w_o, (heads.queries * heads.size, moe.width)).flatten()
    residual = x.map(functions.add(), rows.accum(functions.matmul(), weights))

    tokens = _rows(_norm(residual, gains[1]), batch)
    mixed = mix(p, tokens.flatten(), moe, batch, tile, columns, expert_regions, dtype)
    y = p.tensor("y", batch, moe.width, dtype)
    residual.map(functions.add(), mixed.accum(functions.retile()), writes=True).store(y)
    return p


def decoder_inputs(
    lengths: NDArray[np.int64], routing: NDArray[np.int64], heads: Heads, regions: int = 4, cache_tile: int = 32
) -> dict[str, Any]:
    """Return the input streams for requests with caches of so many tokens, whose new tokens go to these experts."""
    every = np.tile(lengths, heads.groups)
    return {**attention_inputs(every, heads, "interleaved", regions, tile=cache_tile), **moe_inputs(routing)}


def _norm(x: Stream, gain: Stream) -> Stream:
    """Divide each row by its root mean square, and weigh its columns."""
    mean = functions.scale(1 / int(x.tile.columns))
    return x.map(
        functions.mul(), x.map(functions.mul(), x).map(functions.row_sum()).map(mean).map(functions.rsqrt())
    ).map(functions.mul(), gain)


def _heads(p: StreamProgram, x: Stream, heads: Heads, name: str, batch: int, width: int, dtype: str) -> Stream:
    """Project to the queries, keys or values of all the groups: [groups * batch] of (heads, size)."""
    count = heads.queries if name == "q" else 1
    columns = count * heads.size
    weights = p.load(p.tensor(f"w_{name}", heads.groups * width, columns, dtype), (width, columns)).flatten()
    every = x.flat_map(lambda tile: [tile] * heads.groups, lambda data: StreamType((heads.groups,), data)).flatten()
    return _rows(every.map(functions.matmul(), weights), batch).flatten().map(_reshaped(count, heads.size))


def _rows(x: Stream, rows: int) -> Stream:
    """Cut tiles into their rows."""
    data = x.tile
    return x.flat_map(lambda tile: cut_rows(tile, rows), StreamType((rows,), Tile(1, data.columns, data.dtype)))


def _reshaped(rows: int, columns: int) -> functions.TileFunction:
    """Return the same elements in another shape; it takes no time."""

    def result(tile: Tile) -> Tile:
        return Tile(rows, columns, tile.dtype)

    return functions.TileFunction("reshaped", lambda tile: tile.reshape(rows, columns), result, lambda _: 0, cycles=0)
