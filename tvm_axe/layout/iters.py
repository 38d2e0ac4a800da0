"""Iters, the parts that layouts are made of, and how runs of them simplify.

Source: Axe (arXiv:2601.19092), Definition 2.1 and the rules of appendix A.1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from tvm_axe.errors import LayoutError
from tvm_axe.layout.axes import LINEAR_MEMORY, check_axis, check_number
from tvm_axe.layout.symbolic import Number


@dataclass(frozen=True, slots=True)
class Iter:
    """`extent` steps of `stride` along `axis`: i maps to i * stride @ axis for 0 <= i < extent.

    Either may be an integer expression of the compiler; see the module `symbolic`.

    Raises
    ------
    LayoutError
        If the extent is less than 1, the stride is 0, either is not an int of 64 bits, or the axis not an identifier.
    """

    extent: Number
    stride: Number
    axis: str

    def __post_init__(self) -> None:
        _set_extent(self, check_number("an iter's extent", self.extent, least=1))
        check_axis("an iter's axis", self.axis)
        _set_stride(self, check_number("an iter's stride", self.stride))
        if self.stride == 0:
            raise LayoutError(f"an iter's stride must not be 0, in {self}; to say that data is replicated, use R")

    def __str__(self) -> str:
        return f"{self.extent} : {on_axis(self.stride, self.axis)}"


# Writing the slots themselves is what a frozen class leaves open, and makes an iter in a tenth of the time.
_set_extent = vars(Iter)["extent"].__set__
_set_stride = vars(Iter)["stride"].__set__
_set_axis = vars(Iter)["axis"].__set__


def make_iter(extent: Number, stride: Number, axis: str) -> Iter:
    """Return an Iter of parts that are known to be valid, because they come from valid ones, without checking them."""
    it = object.__new__(Iter)
    _set_extent(it, extent)
    _set_stride(it, stride)
    _set_axis(it, axis)
    return it


def on_axis(amount: Number, axis: str) -> str:
    """Return the text of `amount` steps along `axis`, in which the default axis is left out."""
    if axis == LINEAR_MEMORY:
        return f"{amount}"
    return f"{amount}@{axis}" if isinstance(amount, int) else f"({amount})@{axis}"


def merge_shard(shard: tuple[Iter, ...]) -> tuple[Iter, ...]:
    """Return the shortest D with the map of `shard`: no unit iter, no neighbours that are one run.

    An outer iter whose stride is its inner neighbour's stride times extent, on the same axis, continues it. (Rules D0
    and D1.)
    """
    merged: list[Iter] = []
    for it in shard:
        extent, stride, axis = it.extent, it.stride, it.axis
        if extent == 1:
            continue
        if merged and merged[-1].axis == axis and merged[-1].stride == stride * extent:
            merged[-1] = make_iter(merged[-1].extent * extent, stride, axis)
        else:
            merged.append(it)
    return shard if len(merged) == len(shard) else tuple(merged)


def merge_replica(replica: Iterable[Iter]) -> tuple[tuple[Iter, ...], dict[str, int]]:
    """Return the replicas and the offset that together reach the same points as `replica`.

    Unit iters are dropped. A negative stride -t over e steps starts (e - 1) * t lower and goes up by t. A run of
    stride t and extent e that meets one of stride q * t with q <= e fills it without a hole: the two are one run.
    Symbolic iters are left as they are. (Rules C0, C1 and C2.)
    """
    offset: dict[str, int] = defaultdict(int)
    runs: dict[str, list[tuple[int, int]]] = defaultdict(list)
    symbolic: list[Iter] = []
    for it in replica:
        if it.extent == 1:
            continue
        if isinstance(it.extent, int) and isinstance(it.stride, int):
            offset[it.axis] += min(it.stride, 0) * (it.extent - 1)
            runs[it.axis].append((abs(it.stride), it.extent))
        else:
            symbolic.append(it)
    merged = [make_iter(e, s, a) for a in sorted(runs) for s, e in absorb(runs[a])]
    return sort_replica([*merged, *symbolic]), dict(offset)


def sort_replica(replica: Iterable[Iter]) -> tuple[Iter, ...]:
    """Return R, a multiset, in its order: by axis, stride and extent; what is symbolic comes last, by its text."""
    return tuple(sorted(replica, key=_replica_key))


def _replica_key(it: Iter) -> tuple[str, int, int, str]:
    if isinstance(it.extent, int) and isinstance(it.stride, int):
        return (it.axis, it.stride, it.extent, "")
    return (it.axis, 2**63, 0, str(it))


def absorb(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
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
