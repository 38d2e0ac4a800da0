"""Iters, the parts that layouts are made of, and how runs of them simplify."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import LINEAR_MEMORY, check_axis, check_int


@dataclass(frozen=True)
class Iter:
    """`extent` steps of `stride` along `axis`: i maps to i * stride @ axis for 0 <= i < extent.

    Raises
    ------
    LayoutError
        If the extent is less than 1, the stride is 0, either is not an int of 64 bits, or the axis not an identifier.
    """

    extent: int
    stride: int
    axis: str

    def __post_init__(self) -> None:
        check_int("an iter's extent", self.extent, least=1)
        check_axis("an iter's axis", self.axis)
        if check_int("an iter's stride", self.stride) == 0:
            raise LayoutError(f"an iter's stride must not be 0, in {self}; to say that data is replicated, use R")

    def __str__(self) -> str:
        return f"{self.extent} : {on_axis(self.stride, self.axis)}"


def on_axis(amount: int, axis: str) -> str:
    """Return the text of `amount` steps along `axis`, in which the default axis is left out."""
    return f"{amount}" if axis == LINEAR_MEMORY else f"{amount}@{axis}"


def merge_shard(shard: Iterable[Iter]) -> tuple[Iter, ...]:
    """Return the shortest D with the map of `shard`: no unit iter, no neighbours that are one run.

    An outer iter whose stride is its inner neighbour's stride times extent, on the same axis, continues it.
    """
    merged: list[Iter] = []
    for it in shard:
        if it.extent == 1:
            continue
        outer = merged[-1] if merged else None
        if outer is not None and outer.axis == it.axis and outer.stride == it.stride * it.extent:
            merged[-1] = Iter(outer.extent * it.extent, it.stride, it.axis)
        else:
            merged.append(it)
    return tuple(merged)


def merge_replica(replica: Iterable[Iter]) -> tuple[tuple[Iter, ...], dict[str, int]]:
    """Return the replicas and the offset that together reach the same points as `replica`.

    Unit iters are dropped. A negative stride -t over e steps starts (e - 1) * t lower and goes up by t. A run of
    stride t and extent e that meets one of stride q * t with q <= e fills it without a hole: the two are one run.
    """
    offset: dict[str, int] = defaultdict(int)
    runs: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for it in replica:
        if it.extent > 1:
            offset[it.axis] += min(it.stride, 0) * (it.extent - 1)
            runs[it.axis].append((abs(it.stride), it.extent))
    return tuple(Iter(e, s, a) for a in sorted(runs) for s, e in _absorb(runs[a])), dict(offset)


def _absorb(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join (stride, extent) runs of positive strides on one axis until none fills another; sorted by stride."""
    runs = sorted(runs)
    while True:
        for fine, coarse in combinations(runs, 2):
            times, rest = divmod(coarse[0], fine[0])
            if rest == 0 and times <= fine[1]:
                runs.remove(fine)
                runs.remove(coarse)
                runs = sorted([*runs, (fine[0], fine[1] + times * (coarse[1] - 1))])
                break
        else:
            return runs
