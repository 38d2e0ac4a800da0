"""Redistribution: the cheapest way from one layout on a mesh to another, as a plan of collectives and local slices.

`tvm_axe.redistribute` carries a plan out.

>>> from tvm_axe.layout import Layout, Mesh
>>> mesh = Mesh({"dp": 2, "tp": 4})
>>> rows, columns = (Layout.sharded((512, 768), mesh, {dim: "tp"}) for dim in (0, 1))
>>> plan = plan_redistribution(rows, columns, mesh, "float32", (512, 768))
>>> [(step.kind, step.axes, step.gathered, step.cut) for step in plan.steps]
[('all_to_all', ('tp',), 0, 1)]
>>> plan.bytes == 3 * (128 * 192 * 4)
True

The steps are those below; n is the size of the axis. The bytes b of a step are what the busiest device receives,
padding left out (`tvm_axe.layout.traffic`).

============== ========================================================= ====================
kind           what it does                                              seconds
============== ========================================================= ====================
all_gather     joins the blocks of a dimension                           (n-1) a + b / w
reduce_scatter sums the terms, and leaves each device its block          (n-1) a + b / w
all_reduce     sums the terms                                            2 (n-1) a + b / w
all_to_all     joins the blocks of a dimension, and cuts another         (n-1) a + b / w
permute        every device sends its block to another                   sum a + b / min w
exchange       every device takes what it needs from whoever holds it    sum a + b / min w
slice          keeps a block of what the device holds                    0
mask           keeps the device's own share of the values, zeros         0
               elsewhere: the terms of a sum
============== ========================================================= ====================

An exchange is planned where one of the layouts isn't in blocks that nest (`Placement.of`): cyclic, with an offset, in
another order of devices or of memory. It is then the only step.

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
from tvm_axe.layout.collectives import Collective
from tvm_axe.layout.dtypes import dtype_bytes
from tvm_axe.layout.holding import Holding, received
from tvm_axe.layout.layout import Layout
from tvm_axe.layout.mesh import Mesh
from tvm_axe.layout.moves import Move, moves, permutation, permutes
from tvm_axe.layout.placement import Placement
from tvm_axe.layout.shapes import check_shape
from tvm_axe.layout.traffic import received_of_all_reduce
from tvm_axe.notebook import preformatted


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
        "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute", "exchange", "slice" or "mask".
    axes : tuple[str, ...]
        The mesh axis whose devices take part; a permute or an exchange may need several.
    gathered, cut : int or None
        The dimension whose blocks are joined, and the dimension that is cut into blocks. A mask that gathers puts the
        device's block in its place among zeros; one that doesn't keeps what the first device of the axis holds.
    bytes : int
        What the busiest device receives.
    seconds : float
        What it costs under the link model.
    before, after : Placement or None
        The placement of the data before and after the step; None for an exchange, whose layouts may have none.
    layout : Layout
        How the data lies afterwards.
    """

    kind: str
    axes: tuple[str, ...]
    gathered: int | None
    cut: int | None
    bytes: int
    seconds: float
    before: Placement | None
    after: Placement | None
    layout: Layout

    def sources(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the device from which each device receives its block, in the order of the devices, for a permute.

        Law: a permutation of the devices; the source's block before the step is the device's block after it.

        Raises
        ------
        LayoutError
            If the step is not a permute.
        """
        if self.kind != "permute" or self.before is None or self.after is None:
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
    """What takes data from one layout to another: `plan_redistribution` makes it.

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
        """What the busiest device of each step receives, in all."""
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

    def _repr_html_(self) -> str:
        return preformatted(self.explain())


def plan_redistribution(
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
        The layout that the data has and the one that it is wanted in, any that a mesh can hold (`Holding.of`). Leading
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
        If a layout names an axis that the mesh lacks, can't be held by it or doesn't fit the shape; if the dtype is no
        numeric type; or if `link` is neither a Link nor a mapping that has one for each axis.
    """
    shape = check_shape(shape)
    source, target = Holding.of(src, shape, mesh), Holding.of(dst, shape, mesh)
    try:
        start, goal = Placement.of(src, shape, mesh), Placement.of(dst, shape, mesh)
    except LayoutError:
        return Plan(src, dst, shape, dtype, mesh, _exchange(source, target, dtype, _links(link, mesh)))
    costs = _Costs(shape, mesh, dtype, _links(link, mesh), goal)
    steps = []
    before = start
    for move in _search(start, goal, costs):
        size, seconds = costs(before, move)
        layout = move.after.layout(shape, mesh)
        steps.append(Step(move.kind, move.axes, move.gathered, move.cut, size, seconds, before, move.after, layout))
        before = move.after
    return Plan(src, dst, shape, dtype, mesh, tuple(steps))


def _exchange(source: Holding, target: Holding, dtype: str, links: Mapping[str, Link]) -> tuple[Step, ...]:
    """Return the exchange that brings `source` to `target`, unless they are the same."""
    if source.layout.equivalent(target.layout):
        return ()
    mesh = source.mesh
    size = dtype_bytes(dtype, max(received(source, target, device) for device in range(mesh.size)))
    axes = tuple(axis for axis in mesh.names if axis in source.axes or axis in target.axes) if size else ()
    seconds = sum(links[axis].latency for axis in axes)
    seconds += size / min(links[axis].bandwidth for axis in axes) if axes else 0.0
    return (Step("exchange", axes, None, None, size, seconds, None, None, target.layout),)


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
        """Return the bytes that the busiest device receives, and the seconds."""
        if move.kind in ("slice", "mask"):
            return 0, 0.0
        used, devices = [self.links[axis] for axis in move.axes], self.mesh[move.axes[0]]
        if move.kind == Collective.ALL_REDUCE.operation:
            most = math.prod(before.local_shape(self.shape, self.mesh))  # the first device's, which no padding cuts
            size, hops = dtype_bytes(self.dtype, received_of_all_reduce(most, devices)), 2 * (devices - 1)
        else:
            terms = devices if move.kind == Collective.REDUCE_SCATTER.operation else 1
            sources = permutation(before, move.after, self.mesh) if move.kind == "permute" else range(self.mesh.size)
            needed = max(
                self._received(before, move.after, terms, device, sources[device]) for device in range(self.mesh.size)
            )
            size, hops = dtype_bytes(self.dtype, needed), devices - 1
        if move.kind == "permute":
            return size, sum(link.latency for link in used) + size / min(link.bandwidth for link in used)
        return size, hops * used[0].latency + size / used[0].bandwidth

    def _received(self, before: Placement, after: Placement, terms: int, device: int, source: int) -> int:
        """Return the elements of others that `device` takes; of a permute all are `source`'s, maybe its own."""
        wanted = after.region(self.shape, self.mesh, device)
        held = before.region(self.shape, self.mesh, device)
        whole, kept = 1, 1
        for (start, stop), (first, last) in zip(wanted, held):
            whole, kept = whole * (stop - start), kept * max(0, min(stop, last) - max(start, first))
        return terms * whole - kept if source == device else whole

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
