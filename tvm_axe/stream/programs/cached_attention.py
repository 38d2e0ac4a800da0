"""Attention over a cache of keys and values whose lengths differ, in regions that requests are sent to.

One token a request is decoded: its key and value go to the end of its cache, and its queries attend to all of it, a
tile of the cache at a time. Requests reach the regions in fixed blocks (coarse), in turn (interleaved), or as regions
come to the end of loading the request before (dynamic, by a feedback edge).

>>> program = attention(Heads(groups=1, queries=2, size=8), batch=6, cached=3, way="dynamic", regions=2, tile=4)
>>> [tensor.name for tensor in program.tensors.values()]
['q', 'k', 'v', 'k_cache', 'v_cache', 'out']

Scores go through exp as they are, as in the paper: no largest one is taken off.

Source: Streaming Tensor Programs (arXiv 2511.07776), figure 16 and section 5.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tvm_axe.errors import StreamError
from tvm_axe.stream import functions
from tvm_axe.stream.memory import Accelerator
from tvm_axe.stream.program import Stream, StreamProgram, Tensor
from tvm_axe.stream.programs.outcome import Outcome
from tvm_axe.stream.programs.workloads import QWEN3_30B_A3B, Heads
from tvm_axe.stream.types import Scalar, Selector, StreamType, symbol
from tvm_axe.stream.views import View

__all__ = ["WAYS", "AttentionCase", "Caches", "Requests", "attend", "attention", "attention_inputs", "cached_tiles"]

WAYS = ("coarse", "interleaved", "dynamic")
"""How requests are sent to regions."""


class Requests(NamedTuple):
    """What goes to a region, in one order: the tokens' queries, keys and values, and what is known of their caches."""

    q: Stream  # [requests] of (queries, size)
    k: Stream  # [requests] of (1, size)
    v: Stream  # [requests] of (1, size)
    row: Stream  # [requests]: the first row of its queries in q, and of its results in out
    tiles: Stream  # [requests]: of the cache, with the one that the new token goes to
    offset: Stream  # [requests]: tokens that are in the last tile before

    def partition(self, chosen: Stream) -> list[Requests]:
        """Send each request to the region chosen for it."""
        parts = zip(*(stream.partition(chosen) for stream in self))
        return [Requests(*part) for part in parts]


class Region(NamedTuple):
    """The streams that a region makes."""

    result: Stream  # [requests] of (queries, size)
    loaded: Stream  # [requests, tiles]: the keys as they are loaded, which tell how far it is


class Caches(NamedTuple):
    """The caches of all the requests, and how they are cut into tiles."""

    k: Tensor
    v: Tensor
    heads: Heads
    cached: int
    tile: int

    @classmethod
    def of(cls, p: StreamProgram, heads: Heads, requests: int, cached: int, tile: int, dtype: str) -> Caches:
        """Declare the tensors, with room for so many tiles a request."""
        k, v = (p.tensor(f"{name}_cache", requests * cached * tile, heads.size, dtype) for name in "kv")
        return cls(k, v, heads, cached, tile)


def attention(
    heads: Heads,
    batch: int,
    cached: int,
    way: str,
    regions: int = 4,
    block: int | Sequence[int] = 16,
    tile: int = 32,
    dtype: str = "float32",
) -> StreamProgram:
    """Return the program for one head of keys and values.

    Tensors: ``q`` [batch * queries, size], ``k`` and ``v`` [batch, size], ``k_cache`` and ``v_cache``
    [batch * cached * tile, size], which are also results, and the result ``out`` [batch * queries, size].

    Parameters
    ----------
    heads : Heads
        The sizes of the heads.
    batch : int
        The number of requests.
    cached : int
        Tiles that there is room for in the cache of a request.
    way : str
        One of `WAYS`.
    regions : int
        The number of regions; with coarse blocks the most, there are no more than blocks.
    block : int or sequence of int
        Requests of a block; or of each, all requests together. Where there are more blocks than regions, these get
        another one each in turn.
    tile : int
        Tokens of a tile of the cache.
    dtype : str
        The type of all the elements.

    Raises
    ------
    StreamError
        If the way is none of these, a block is empty, the blocks are not all requests, or there is nothing for some
        region.
    """
    if way not in WAYS:
        raise StreamError(f"way={way!r} must be one of {', '.join(WAYS)}")
    shares = _coarse(batch, block, regions)
    if way == "coarse":
        regions = len(shares)
    if not 1 <= regions <= batch:
        raise StreamError(f"regions={regions} must be between 1 and the number of requests, {batch}")
    p = StreamProgram(f"attention, {way}")
    tensors = {
        "q": p.tensor("q", batch * heads.queries, heads.size, dtype),
        "k": p.tensor("k", batch, heads.size, dtype),
        "v": p.tensor("v", batch, heads.size, dtype),
    }
    caches = Caches.of(p, heads, batch, cached, tile, dtype)
    out = p.tensor("out", batch * heads.queries, heads.size, dtype)
    if way == "coarse":
        for number, own in enumerate(shares):
            requests = _load(p, tensors, heads, own, f"{number}")
            attend(p, caches, requests, number).result.store_at(out, requests.row).discard()
        return p
    requests = _load(p, tensors, heads, list(range(batch)), "")
    kind = StreamType((batch,), Selector(regions))
    if way == "interleaved":
        # Known beforehand, so that no stream of requests waits for another to be sent on.
        parts = requests.partition(p.input("region", kind).buffered(batch))
    else:
        # Each region gets one request; after that, whichever has loaded its request's keys gets the next.
        free = p.feedback("free", kind, batch, [(number,) for number in range(regions)])
        parts = requests.partition(free.stream)
    found = [attend(p, caches, part, number) for number, part in enumerate(parts)]
    for part, region in zip(parts, found):
        region.result.store_at(out, part.row).discard()
    if way == "dynamic":
        signals, ready = p.eager_merge([region.loaded.accum(arrived()) for region in found], name="ready")
        signals.discard()
        free.close(ready)
    return p


def attend(p: StreamProgram, caches: Caches, requests: Requests, number: int) -> Region:
    """Add a region that computes the attention of requests one after the other, and extends their caches.

    Parameters
    ----------
    number : int
        The region's, for the names of its loads and stores: ``keys0``, ``extend_keys0`` and so on.
    """
    keys, loaded = _extend(p, caches.k, requests.k, requests, caches, f"keys{number}")
    values, _ = _extend(p, caches.v, requests.v, requests, caches, f"values{number}")
    filled = requests.tiles.zip(requests.offset).flat_map(
        lambda known: [caches.tile] * (known[0] - 1) + [known[1] + 1], StreamType((symbol("filled"),), Scalar())
    )
    weights = requests.q.expand(keys).map(functions.matmul(transposed=True), keys).map(masked_exp(), filled)
    attended = weights.accum(functions.matmul(), values)
    total = weights.accum(functions.sum_tiles()).map(functions.row_sum())
    return Region(attended.map(functions.div(), total, writes=True), loaded)


def _load(p: StreamProgram, tensors: dict[str, Tensor], heads: Heads, own: list[int], suffix: str) -> Requests:
    """Load these requests: one after the other where they lie so, else each at its address."""
    first, number = own[0], len(own)
    view = View((number,), (1,), first) if own == list(range(first, first + number)) else None
    known = [p.input(f"{name}{suffix}", StreamType((number,), Scalar())) for name in ("row", "tiles", "offset")]
    which = functions.number("request", lambda row: row // heads.queries, cycles=0)
    request = None if view is not None else known[0].map(which, name=f"request{suffix}")
    loads = []
    for name, tensor in tensors.items():
        shape, of = (heads.queries if name == "q" else 1, heads.size), f"load_{name}{suffix}"
        loads.append(p.load(tensor, shape, view, of) if request is None else request.load_at(tensor, shape, name=of))
    return Requests(*loads, *known)


def _extend(
    p: StreamProgram, cache: Tensor, new: Stream, requests: Requests, caches: Caches, name: str
) -> tuple[Stream, Stream]:
    """Load the caches of the requests and put the new rows behind them, there and here.

    Returns
    -------
    (Stream, Stream)
        The tiles with the new row in the last of each request, and as they were loaded; both [requests, tiles].
    """
    cached, tile = caches.cached, caches.tile
    queries = caches.heads.queries
    loaded = (
        requests.row.zip(requests.tiles)
        .flat_map(
            lambda known: [known[0] // queries * cached + number for number in range(known[1])],
            StreamType((symbol("tiles"),), Scalar()),
        )
        .load_at(cache, (tile, caches.heads.size), name=name)
    )
    which = requests.tiles.flat_map(
        lambda tiles: [(1,)] * (tiles - 1) + [(0,)], StreamType((symbol("which"),), Selector(2))
    )
    last, rest = loaded.partition(which)
    extended = last.map(append(), requests.offset, new)
    last_row = functions.number("last_row", lambda row, tiles: (row // queries * cached + tiles - 1) * tile)
    extended.store_at(cache, requests.row.map(last_row, requests.tiles), name=f"extend_{name}").discard()
    return p.reassemble([extended, rest], which, in_order=True).flatten(), loaded


def append() -> functions.TileFunction:
    """Put a row at an offset into a tile, and zeros behind it."""

    def call(tile: np.ndarray, offset: int, row: np.ndarray) -> np.ndarray:
        return np.concatenate([tile[:offset], row, np.zeros_like(tile[offset + 1 :])])

    return functions.TileFunction("append", call, lambda tile, offset, row: tile, lambda *_: 0, cycles=1)


def masked_exp() -> functions.TileFunction:
    """Return the function ``e ** scores`` in as many columns as are filled, 0 in the others; 4 FLOPs an element."""

    def call(scores: np.ndarray, filled: int) -> np.ndarray:
        return np.where(np.arange(scores.shape[1]) < filled, np.exp(scores), 0).astype(scores.dtype)

    return functions.TileFunction(
        "masked_exp", call, lambda scores, filled: scores, lambda scores, filled: 4 * scores.rows * scores.columns
    )


def arrived() -> functions.TileFunction:
    """Return the function that counts a request's tiles, as an accumulation, to say that all have come."""
    return functions.TileFunction(
        "arrived", lambda tile: 1, lambda tile: Scalar(), lambda *_: 0, on_numbers=True, cycles=1
    )


def cached_tiles(lengths: NDArray[np.int64], tile: int) -> NDArray[np.int64]:
    """Return how many tiles the cache of each request takes up with one more token."""
    return lengths // tile + 1


def _blocks(batch: int, block: int | Sequence[int]) -> list[range]:
    """Return the requests of each block."""
    sizes = [block] if isinstance(block, int) else [*block]
    if not sizes or any(size < 1 for size in sizes):
        raise StreamError(f"block={block} must be 1 or more requests, or several such numbers")
    if isinstance(block, int):
        return [range(first, min(first + block, batch)) for first in range(0, batch, block)]
    if sum(sizes) != batch:
        raise StreamError(f"block={block}: blocks of {sum(sizes)} requests in all, and there are {batch}")
    return [range(stop - size, stop) for size, stop in zip(sizes, accumulate(sizes))]


def _coarse(batch: int, block: int | Sequence[int], regions: int) -> list[list[int]]:
    """Return the requests of each region that gets blocks in turn."""
    blocks = _blocks(batch, block)
    count = min(regions, len(blocks))
    return [[request for own in blocks[region::count] for request in own] for region in range(count)]


def attention_inputs(
    lengths: NDArray[np.int64],
    heads: Heads,
    way: str,
    regions: int = 4,
    block: int | Sequence[int] = 16,
    tile: int = 32,
) -> dict[str, Any]:
    """Return the input streams for requests whose caches hold so many tokens; the other arguments as `attention`'s."""
    batch = len(lengths)
    known = {
        "row": np.arange(batch) * heads.queries,
        "tiles": cached_tiles(lengths, tile),
        "offset": lengths % tile,
    }
    if way == "coarse":
        return {
            f"{name}{number}": values[own]
            for name, values in known.items()
            for number, own in enumerate(_coarse(batch, block, regions))
        }
    chosen = {"region": [(number % regions,) for number in range(batch)]} if way == "interleaved" else {}
    return {**known, **chosen}


@dataclass(frozen=True, eq=False)
class AttentionCase:
    """One simulation of attention, without values.

    Attributes
    ----------
    lengths : numpy.ndarray
        [batch] of int64: the tokens in the requests' caches.
    way : str
        One of `WAYS`.
    heads : Heads
        The sizes of the heads.
    regions, tile : int
        The arguments of `attention` of these names.
    block : int or sequence of int
        Likewise.
    compute : int
        FLOPs a cycle of each unit.
    depth : int
        Tokens that each channel holds.
    """

    lengths: NDArray[np.int64]
    way: str
    heads: Heads = QWEN3_30B_A3B.heads
    regions: int = 4
    block: int | Sequence[int] = 16
    tile: int = 32
    compute: int = 2048
    depth: int = 1

    def simulate(self) -> Outcome:
        """Simulate the case."""
        sizes: Any = {"regions": self.regions, "block": self.block, "tile": self.tile}
        cached = int(cached_tiles(self.lengths, self.tile).max())
        program = attention(self.heads, len(self.lengths), cached, self.way, dtype="bfloat16", **sizes)
        report = program.run(
            attention_inputs(self.lengths, self.heads, self.way, **sizes),
            Accelerator(compute=self.compute, depth=self.depth),
            values=False,
        )
        return Outcome(report.cycles, report.traffic, None, report.flops)
