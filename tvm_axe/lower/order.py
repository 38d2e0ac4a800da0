"""In what order the steps of a device run: where barriers stand, and how the chunks of overlapping stages interleave.

A barrier is an arrival and a wait for everybody's arrival. Overlapping stages take the two apart: a device announces a
chunk that others will want, goes on with other chunks, and waits only before it wants theirs, for arrivals that lie
some chunks back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tvm import tirx

from tvm_axe.errors import LowerError
from tvm_axe.layout.collectives import Collective
from tvm_axe.lower.derive import EXCHANGE, Step
from tvm_axe.lower.infer import Sharding
from tvm_axe.lower.reaching import push_axis, remote_axis


@dataclass(frozen=True)
class Work:
    """One chunk of one stage: `step` around the ring, `chunk` of the slice.

    Before it, the device waits until everybody has arrived as often as itself less `behind` times (None: no wait);
    after it, it arrives itself if `arrives`.
    """

    stage: int
    step: int
    chunk: int
    behind: int | None
    arrives: bool


def pipeline(steps: Sequence[Step], shardings: Mapping[tirx.Buffer, Sharding]) -> list[Work]:
    """The chunks of overlapping stages in the order in which each device works on them.

    A stage that wants what peers have made in an earlier one lags a chunk behind it, so that there is other work to do
    until then. Stages over all the slices go around the ring, from the device's own slice if they read the others', so
    that no two devices read the same one; from the next device's if others read theirs, so that each finds its own done
    first. What a device alone uses goes around with what it uses.

    Raises
    ------
    LowerError
        If a stage overwrites what an earlier one exchanges.
    """
    touched = [touched_by(step, shardings) for step in steps]
    overlaps = [step.stage.overlap for step in steps]
    wants = [_wanted(touched, index, steps) for index in range(len(steps))]
    announced = {earlier for wanted in wants for earlier in wanted}
    lags, starts, sizes, chunks = [0] * len(steps), [0] * len(steps), [1] * len(steps), 1
    for index, overlap in enumerate(overlaps):
        assert overlap is not None
        chunks = overlap.chunks
        lags[index] = max([lags[index - 1] if index else 0, *(lags[earlier] + 1 for earlier in wants[index])])
        if overlap.ring is not None:
            sizes[index] = int(overlap.ring.extent)
            leaders = [j for j in range(index) if sizes[j] > 1 and touched[j]["write"] & touched[index]["read"]]
            starts[index] = 0 if touched[index]["pull"] else starts[leaders[0]] if leaders else 1
    order: list[Work] = []
    arrivals = 0
    done: dict[tuple[int, int], int] = {}
    for time in range(chunks + max(lags)):
        index = 0
        while index < len(steps):
            together = [index]
            while together[-1] + 1 < len(steps) and _go_together(together[-1] + 1, index, sizes, lags, wants):
                together.append(together[-1] + 1)
            index = together[-1] + 1
            chunk = time - lags[together[0]]
            if not 0 <= chunk < chunks:
                continue
            for turn in range(sizes[together[0]]):
                for stage in together:
                    behind = None
                    if turn == 0 and wants[stage]:
                        behind = arrivals - max(done[earlier, chunk] for earlier in wants[stage])
                    arrives = stage in announced and turn == _last_turn(stage, steps, touched, wants, starts[stage])
                    arrivals += arrives
                    done |= {(stage, chunk): arrivals} if arrives else {}
                    order.append(Work(stage, (starts[stage] + turn) % sizes[stage], chunk, behind, arrives))
    return order


def _last_turn(
    stage: int,
    steps: Sequence[Step],
    touched: Sequence[Mapping[str, set[tirx.Buffer]]],
    wants: Sequence[Sequence[int]],
    start: int,
) -> int:
    """After which of its turns around the ring a stage has made all that others want of a chunk.

    Where each device pulls its own slice from those along the ring, nobody else wants the slice that a device makes for
    itself, the last of its turns. Devices along another axis want all slices.
    """
    overlap = steps[stage].stage.overlap
    if overlap is None or overlap.ring is None:
        return 0
    own_slices = all(
        steps[later].axis == overlap.axis
        and (other := steps[later].stage.overlap) is not None
        and other.ring is None
        and not (touched[later]["push"] & touched[stage]["write"] or touched[later]["pull"] & touched[stage]["push"])
        and not touched[later]["read"] & touched[stage]["push"]
        for later, wanted in enumerate(wants)
        if stage in wanted
    )
    return int(overlap.ring.extent) - 1 - (start if own_slices else 0)


def _go_together(
    later: int, first: int, sizes: Sequence[int], lags: Sequence[int], wants: Sequence[Sequence[int]]
) -> bool:
    """Whether stage `later` takes each turn of the ring right behind stage `first`."""
    return sizes[later] > 1 and sizes[later] == sizes[first] and lags[later] == lags[first] and not wants[later]


def _wanted(touched: Sequence[Mapping[str, set[tirx.Buffer]]], index: int, steps: Sequence[Step]) -> list[int]:
    """The earlier stages whose chunks on the peers stage `index` needs."""
    now, wanted = touched[index], []
    for earlier, then in enumerate(touched[:index]):
        if (now["write"] | now["push"]) & (then["pull"] | then["push"]):
            raise LowerError(
                f"stages {steps[earlier].name!r} and {steps[index].name!r} overlap, and the second overwrites what the "
                "first exchanges with other devices; leave one of them out of overlap"
            )
        if now["pull"] & (then["write"] | then["push"]) or now["push"] & then["write"] or now["read"] & then["push"]:
            wanted.append(earlier)
    return wanted


def regions(steps: Sequence[Step]) -> list[list[Step]]:
    """The steps, each alone except those that overlap their neighbours."""
    groups: list[list[Step]] = []
    for step in steps:
        own, last = step.stage.overlap, groups[-1][-1].stage.overlap if groups else None
        if own is not None and last is not None and own.region == last.region:
            groups[-1].append(step)
        else:
            groups.append([step])
    return groups


def barriers_before(
    groups: Sequence[Sequence[Step]],
    shardings: Mapping[tirx.Buffer, Sharding],
    ended: Mapping[int, Sequence[int]] = MappingProxyType({}),
) -> list[bool]:
    """Whether a barrier stands before each group of `regions`: something in it conflicts with what a peer may still do.

    The run itself starts and ends with all devices waiting for the controller, so nothing before it counts. Within a
    group, `pipeline` sees to the order. Of collectives that run beside others, `ended` has those that are joined before
    a group: until then no barrier says that they are done.
    """
    beside = {group for groups_ended in ended.values() for group in groups_ended}
    since: dict[str, set[tirx.Buffer]] = {"read": set(), "write": set(), "pull": set(), "push": set()}
    found = []
    for at, group in enumerate(groups):
        for other in ended.get(at, ()):
            for step in groups[other]:
                for key, buffers in touched_by(step, shardings).items():
                    since[key] |= buffers
        touched = [touched_by(step, shardings) for step in group]
        now = {key: {buffer for other in touched for buffer in other[key]} for key in since}
        local, remote = since["read"] | since["write"], since["pull"] | since["push"]
        conflict = (
            now["pull"] & (since["write"] | since["push"])
            or now["push"] & (local | remote)
            or now["read"] & since["push"]
            or now["write"] & remote
        )
        if conflict:
            since = {key: set() for key in since}
        for key, buffers in () if at in beside else now.items():
            since[key] |= buffers
        found.append(bool(conflict))
    return found


def touched_by(step: Step, shardings: Mapping[tirx.Buffer, Sharding]) -> dict[str, set[tirx.Buffer]]:
    """What a step reads and writes of its own slabs, pulls from its peers' and pushes to them."""
    touched: dict[str, set[tirx.Buffer]] = {
        "read": set(),
        "write": set(),
        "pull": set(step.pulled),
        "push": set(step.pushed),
    }
    if step.kind == EXCHANGE:
        assert step.source is not None and step.target is not None
        return touched | {"read": {step.source} - step.pulled, "write": {step.target}}
    for block in step.stage.blocks:
        for access in block.accesses:
            sharding = shardings[access.buffer]
            crosses = access.buffer in step.pulled | step.pushed
            if not crosses and remote_axis(access, sharding) is None and push_axis(access, sharding) is None:
                touched["write" if access.is_write else "read"].add(access.buffer)
    if step.kind == Collective.ALL_GATHER and step.source is not None:
        touched["read"].add(step.source)
    return touched
