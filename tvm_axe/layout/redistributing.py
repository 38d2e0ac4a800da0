"""Redistribution: the cheapest way from one layout on a mesh to another, as a plan of collectives and local slices.

>>> from tvm_axe.layout import Layout, Mesh
>>> mesh = Mesh({"dp": 2, "tp": 4})
>>> rows, columns = (Layout.sharded((512, 768), mesh, {dim: "tp"}) for dim in (0, 1))
>>> plan = redistribute(rows, columns, mesh, "float32", (512, 768))
>>> [(step.kind, step.axes, step.gathered, step.cut) for step in plan.steps]
[('all_to_all', ('tp',), 0, 1)]
>>> plan.bytes == 3 * (128 * 192 * 4)
True

The steps are those below; n is the size of the axis, b the bytes of what a device holds before the step (all_gather,
all_reduce, permute), after it (reduce_scatter), or of the part of it that one peer takes (all_to_all). Bytes are what a
device sends, blocks padded.

============== ========================================================= ==================== ============
kind           what it does                                              seconds              bytes
============== ========================================================= ==================== ============
all_gather     joins the blocks of a dimension                           (n-1) (a + b / w)    (n-1) b
reduce_scatter sums the terms, and leaves each device its block          (n-1) (a + b / w)    (n-1) b
all_reduce     sums the terms                                            2 (n-1) (a + b/n/w)  2 (n-1) b / n
all_to_all     joins the blocks of a dimension, and cuts another         (n-1) (a + b / w)    (n-1) b
permute        every device sends its block to another                   sum a + b / min w    b
slice          keeps a block of what the device holds                    0                    0
mask           keeps the device's own share of the values, zeros         0                    0
               elsewhere: the terms of a sum
============== ========================================================= ==================== ============

The link model is alpha-beta with a latency a in seconds and a bandwidth w in bytes/s for each mesh axis, and ring
algorithms. Source: R. Thakur, R. Rabenseifner, W. Gropp, Optimization of collective communication operations in MPICH
(2005), section 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, count

from tvm_axe.errors import LayoutError
from tvm_axe.layout.dtypes import dtype_bytes
from tvm_axe.layout.layout import Layout
from tvm_axe.layout.mesh import Mesh
from tvm_axe.layout.moves import Move, moves, permutation, permutes
from tvm_axe.layout.placement import Placement
from tvm_axe.layout.shapes import check_shape


@dataclass(frozen=True)
class Link:
    """How fast the devices along one mesh axis talk to each other.

    The defaults are no more than a place to start; measure your own. They solve the ring's cost for two measured NCCL
    all-reduces among 4 H200 GPUs, 64 MB in 0.346 ms and 256 MB in 1.215 ms: 1.5 * 192 MB more took 0.869 ms more.

    Parameters
    ----------
    latency : float
        Seconds that a message takes before its first byte arrives.
    bandwidth : float
        Bytes/s that a device sends, while it receives as many.

    Raises
    ------
    LayoutError
        If the latency is negative, the bandwidth not positive, or either not finite.
    """

    latency: float = 9.4e-6
    bandwidth: float = 331e9

    def __post_init__(self) -> None:
        for name, value, least in (("latency", self.latency, "at least 0"), ("bandwidth", self.bandwidth, "above 0")):
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and name == "bandwidth"):
                raise LayoutError(f"a link's {name} must be a finite number {least}, not {value!r}")


@dataclass(frozen=True)
class Step:
    """One step of a plan; the module lists the kinds.

    Attributes
    ----------
    kind : str
        "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute", "slice" or "mask".
    axes : tuple[str, ...]
        The mesh axis whose devices take part; a permute may need several.
    gathered, cut : int or None
        The dimension whose blocks are joined, and the dimension that is cut into blocks. A mask that gathers puts the
        device's block in its place among zeros; one that doesn't keeps what the first device of the axis holds.
    bytes : int
        What a device sends.
    seconds : float
        What it costs under the link model.
    before, after : Placement
        The placement of the data before and after the step.
    layout : Layout
        The placement afterwards, as a layout.
    """

    kind: str
    axes: tuple[str, ...]
    gathered: int | None
    cut: int | None
    bytes: int
    seconds: float
    before: Placement
    after: Placement
    layout: Layout

    def sources(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the device from which each device receives its block, in the order of the devices, for a permute.

        Law: a permutation of the devices; the source's block before the step is the device's block after it.

        Raises
        ------
        LayoutError
            If the step is not a permute.
        """
        if self.kind != "permute":
            raise LayoutError(f"only a permute has one source for each device, not {self.kind}")
        return permutation(self.before, self.after, mesh)

    def __str__(self) -> str:
        what = [f"{self.kind} over {', '.join(self.axes)}"]
        if self.gathered is not None:
            what.append(f"joins dimension {self.gathered}")
        if self.cut is not None:
            what.append(f"cuts dimension {self.cut}")
        cost = f"{self.bytes:,} bytes, {_microseconds(self.seconds)}" if self.bytes else "local"
        return f"{'; '.join(what)}: {cost}"


@dataclass(frozen=True)
class Plan:
    """What takes data from one layout to another: `redistribute` makes it.

    Attributes
    ----------
    src, dst : Layout
        The layouts before and after.
    shape : tuple[int, ...]
        The tensor's shape.
    dtype : str
        The type of its elements.
    mesh : Mesh
        The devices.
    steps : tuple[Step, ...]
        The steps in order; none if the data is there already.
    """

    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    dtype: str
    mesh: Mesh
    steps: tuple[Step, ...]

    @property
    def bytes(self) -> int:
        """What a device sends, in all."""
        return sum(step.bytes for step in self.steps)

    @property
    def seconds(self) -> float:
        """What the steps cost, one after another, under the link model."""
        return sum(step.seconds for step in self.steps)

    def explain(self) -> str:
        """Return the plan in lines: each step with its bytes, its cost, and the layout it leads to."""
        shape = "x".join(map(str, self.shape)) or "a scalar"
        lines = [f"{self.dtype} {shape} on {self.mesh}", f"   {self.src}"]
        for number, step in enumerate(self.steps, 1):
            lines += [f"{number}. {step}", f"   {step.layout}"]
        lines.append(f"total: {self.bytes:,} bytes a device, {_microseconds(self.seconds)}")
        return "\n".join(lines)


def redistribute(
    src: Layout,
    dst: Layout,
    mesh: Mesh,
    dtype: str,
    shape: Sequence[int],
    link: Link | Mapping[str, Link] | None = None,
) -> Plan:
    """Return the cheapest plan that takes a tensor from one layout to another.

    Law: executing the steps leaves every device with what `dst` says; no other sequence of the module's steps takes
    fewer seconds under the link model. Among equally fast ones, fewer bytes, then fewer steps, are preferred.

    Parameters
    ----------
    src, dst : Layout
        The layout that the data has and the one that it is wanted in: blocks on the mesh, see `Placement.of`. Leading
        iters on mesh axes beyond the shape are terms that are still to be summed.
    mesh : Mesh
        The devices.
    dtype : str
        The type of the elements, such as "float32".
    shape : Sequence[int]
        The tensor's shape in elements, without padding and without terms of sums.
    link : Link or Mapping[str, Link], optional
        How fast the mesh is: one for all axes, or one for each axis of more than one device. Left out, `Link()`.

    Raises
    ------
    LayoutError
        If a layout is not in blocks, names an axis that the mesh lacks or doesn't fit the shape; if the dtype is no
        numeric type; or if `link` is neither a Link nor a mapping that has one for each axis.
    """
    shape = check_shape(shape)
    start, goal = Placement.of(src, shape, mesh), Placement.of(dst, shape, mesh)
    costs = _Costs(shape, mesh, dtype, _links(link, mesh), goal)
    steps = []
    before = start
    for move in _search(start, goal, costs):
        size, seconds = costs(before, move)
        layout = move.after.layout(shape, mesh)
        steps.append(Step(move.kind, move.axes, move.gathered, move.cut, size, seconds, before, move.after, layout))
        before = move.after
    return Plan(src, dst, shape, dtype, mesh, tuple(steps))


def _links(link: Link | Mapping[str, Link] | None, mesh: Mesh) -> dict[str, Link]:
    """Return the link of each axis of more than one device."""
    needed = [axis for axis, size in mesh.axes.items() if size > 1]
    if link is None or isinstance(link, Link):
        return dict.fromkeys(needed, link or Link())
    if not isinstance(link, Mapping) or not all(isinstance(value, Link) for value in link.values()):
        raise LayoutError(f"link must be a Link, or a mapping from mesh axis to Link, not {link!r}")
    for axis in link:
        mesh.axis_size(axis)
    missing = [axis for axis in needed if axis not in link]
    if missing:
        raise LayoutError(
            f"link has nothing for mesh axis {missing[0]!r}; mesh {mesh} needs one for {', '.join(needed)}"
        )
    return {axis: link[axis] for axis in needed}


class _Costs:
    """What moves cost, and a lower bound on what is left to pay on the way to the goal."""

    def __init__(
        self, shape: tuple[int, ...], mesh: Mesh, dtype: str, links: Mapping[str, Link], goal: Placement
    ) -> None:
        self.shape, self.mesh, self.dtype, self.links, self.goal = shape, mesh, dtype, links, goal
        self.fastest = max((link.bandwidth for link in links.values()), default=1.0)
        self.shortest = min((link.latency for link in links.values()), default=0.0)
        dtype_bytes(dtype, 1)  # refuses what is no type, even if nothing moves
        self.wanted, self.spread = self._values(goal), self._spread(goal)

    def __call__(self, before: Placement, move: Move) -> tuple[int, float]:
        """Return the bytes that a device sends, and the seconds."""
        if move.kind in ("slice", "mask"):
            return 0, 0.0
        local, result = before.local_shape(self.shape, self.mesh), move.after.local_shape(self.shape, self.mesh)
        if move.kind == "permute":
            size = dtype_bytes(self.dtype, math.prod(local))
            used = [self.links[axis] for axis in move.axes]
            return size, sum(link.latency for link in used) + size / min(link.bandwidth for link in used)
        devices, link = self.mesh[move.axes[0]], self.links[move.axes[0]]
        if move.kind == "all_reduce":
            elements, hops = -(-math.prod(local) // devices), 2 * (devices - 1)
        else:
            # A peer gets what is cut before and after alike: the whole block if only one of the two is.
            elements, hops = math.prod(map(min, local, result)), devices - 1
        size = hops * dtype_bytes(self.dtype, elements)
        return size, hops * link.latency + size / link.bandwidth

    def bound(self, at: Placement) -> float:
        """Seconds that any way from `at` to the goal takes at least.

        Bytes: a device has to receive the values that it holds at the end and doesn't hold now, of a sum over n devices
        one value in n; no move brings in more values than it is charged for. Latency: only gathers and all-reduces
        make an axis of n devices hold replicas, and take n - 1 hops, at least log2(n); and where local moves don't
        lead to the goal, some move takes a hop. None of these falls by more than a move costs, so the search visits
        a placement first by its cheapest way.
        """
        values = max(0.0, self.wanted - self._values(at)) / self.fastest
        hops = max(math.log2(self._spread(at) / self.spread), float(not self._local(at)))
        return values + max(0.0, hops) * self.shortest

    def _spread(self, placement: Placement) -> int:
        """Return the devices that hold different data."""
        return math.prod(self.mesh[axis] for axis in placement.axes)

    def _local(self, at: Placement) -> bool:
        """Return whether slices and masks alone may lead from `at` to the goal."""
        for cut, wanted in zip(at.cuts, self.goal.cuts):
            masked = len(cut)
            while masked and cut[masked - 1] in self.goal.partial:
                masked -= 1
            if cut[:masked] != wanted[:masked]:
                return False
        return at.partial <= self.goal.partial

    def _values(self, placement: Placement) -> float:
        """Bytes of finished values that a device holds, a term of a sum over n devices counting as one part in n."""
        size = dtype_bytes(self.dtype, math.prod(placement.local_shape(self.shape, self.mesh)))
        return size / math.prod(self.mesh[axis] for axis in placement.partial)


def _search(start: Placement, goal: Placement, costs: _Costs) -> list[Move]:
    """Return the cheapest moves from `start` to `goal`: A* over placements."""
    order = count()  # so that the heap never has to compare placements
    came: dict[Placement, tuple[Placement, Move]] = {}
    best = {start: (0.0, 0, 0)}
    done = set()
    heap = [(costs.bound(start), (0.0, 0, 0), next(order), start)]
    while heap:
        _, spent, _, at = heappop(heap)
        if at == goal:
            break
        if at in done:
            continue
        done.add(at)
        following = moves(at, costs.shape, costs.mesh, goal.partial)
        if at not in came or came[at][1].kind != "permute":  # two permutes in a row are one, and no cheaper
            following = chain(following, permutes(at, costs.shape, costs.mesh))
        for move in following:
            size, seconds = costs(at, move)
            total = (spent[0] + seconds, spent[1] + size, spent[2] + 1)
            if move.after not in best or total < best[move.after]:
                best[move.after], came[move.after] = total, (at, move)
                heappush(heap, (total[0] + costs.bound(move.after), total, next(order), move.after))
    found: list[Move] = []
    while at != start:
        at, move = came[at]
        found.insert(0, move)
    return found


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} us"
