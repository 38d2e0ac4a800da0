"""`tvm-axe stream reproduce`: every published result beside what is simulated here, and the headline ratios.

No constant is fitted to cycles: bandwidths, latency, FLOPs of the functions and units' compute come from the published
configuration, and the graphs are those of the paper's figures. What the configuration leaves open and the cycles settle
is said in docs/decisions/0017-published-cycles.md, with what it was settled on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from tvm_axe.stream.programs.cached_attention import AttentionCase
from tvm_axe.stream.programs.moe import MoECase
from tvm_axe.stream.programs.outcome import Outcome
from tvm_axe.stream.programs.workloads import MIXTRAL_8X7B, QWEN3_30B_A3B, Model
from tvm_axe.stream.published import DATA, STATIC_COMPUTE, Point, attention_case, moe_case, read_points

__all__ = ["Ratio", "ReproducedPoint", "Reproduction", "pareto_improvement", "reproduce"]

WINDOW = "0996_4007_4070"
"""The requests of the paper's figure of coarse against dynamic parallelization; at batch 16 the first 16 of them."""
STATIC_TILES = (8, 16, 32, 64)
"""The static tiles of the paper's Pareto fronts at batch 64."""


@dataclass(frozen=True)
class ReproducedPoint:
    """A published result beside the one simulated here.

    Attributes
    ----------
    point : Point
        The published result.
    outcome : Outcome
        The result simulated here.
    seconds : float
        The seconds that simulating took.
    """

    point: Point
    outcome: Outcome
    seconds: float

    @property
    def error(self) -> float:
        """The difference from the published cycles, as a part of these."""
        return self.outcome.cycles / self.point.cycles - 1

    def as_dict(self) -> dict[str, Any]:
        """Return what the JSON says of it."""
        found = {
            "set": self.point.set,
            "point": self.point.name,
            "cycles": self.outcome.cycles,
            "published": self.point.cycles,
            "error": self.error,
            "wall_s": self.seconds,
        }
        for name in ("off_chip", "on_chip"):
            published = getattr(self.point, name)
            if published is not None:
                found[name], found[f"published_{name}"] = getattr(self.outcome, name), published
        return found


Found: TypeAlias = "dict[tuple[str, str], ReproducedPoint]"
"""The rows by set and point."""


@dataclass(frozen=True)
class Ratio:
    """A headline ratio of the paper, from the cycles simulated here and from the published ones.

    Attributes
    ----------
    name, meaning : str
        The ratio's name, and what is divided by what.
    ours : float
        The ratio of the cycles simulated here.
    published : float or None
        The ratio of the published cycles, where these are all there.
    paper : float or None
        The ratio that the paper states.
    """

    name: str
    meaning: str
    ours: float
    published: float | None = None
    paper: float | None = None


@dataclass(frozen=True)
class Reproduction:
    """All the published results and ratios, reproduced.

    Attributes
    ----------
    rows : list[ReproducedPoint]
        One row a published result.
    ratios : list[Ratio]
        The ratios whose inputs are there.
    seconds : float
        The seconds that all of it took.
    """

    rows: list[ReproducedPoint]
    ratios: list[Ratio]
    seconds: float

    def json(self) -> str:
        """Return ``{"rows": [...], "ratios": {...}, "wall_s": ...}``."""
        ratios = {
            ratio.name: {key: value for key, value in vars(ratio).items() if key != "name" and value is not None}
            for ratio in self.ratios
        }
        return json.dumps({"rows": [row.as_dict() for row in self.rows], "ratios": ratios, "wall_s": self.seconds})

    def text(self) -> str:
        """Return tables: each result, the errors set by set, the ratios."""
        lines = []
        for name, rows in self.sets.items():
            worst = max(abs(row.error) for row in rows)
            mean = sum(abs(row.error) for row in rows) / len(rows)
            lines.append(f"{name}: mean error {mean:.2%}, largest {worst:.2%}")
            lines.append(f"  {'':26}{'cycles':>12}{'published':>12}{'error':>9}{'seconds':>9}  bytes off-chip, on-chip")
            for row in rows:
                lines.append(
                    f"  {row.point.name:26}{row.outcome.cycles:12,}{row.point.cycles:12,}{row.error:+9.2%}"
                    f"{row.seconds:9.2f}  {_bytes(row, 'off_chip')}, {_bytes(row, 'on_chip')}"
                )
        lines.append(f"{'ratio':66}{'ours':>8}{'from published':>16}{'paper':>8}")
        for ratio in self.ratios:
            others = (f"{value:.3f}" if value is not None else "-" for value in (ratio.published, ratio.paper))
            lines.append("{:66}{:8.3f}{:>16}{:>8}".format(ratio.name, ratio.ours, *others))
        lines.append(f"{len(self.rows)} published results in {self.seconds:.1f} s")
        return "\n".join(lines)

    @cached_property
    def sets(self) -> dict[str, list[ReproducedPoint]]:
        """The rows by the file that they come from."""
        found: dict[str, list[ReproducedPoint]] = {}
        for row in self.rows:
            found.setdefault(row.point.set, []).append(row)
        return found


def reproduce(folder: Path = DATA) -> Reproduction:
    """Simulate every published result under a folder.

    Parameters
    ----------
    folder : Path
        The folder of the published inputs and results, laid out as `tvm_axe.stream.published` says; by default the
        one that comes with the package.

    Raises
    ------
    InputError
        If there is none, or a file is missing or malformed.
    """
    start = time.perf_counter()
    rows = []
    for point in read_points(folder):
        began = time.perf_counter()
        outcome = point.case.simulate()
        rows.append(ReproducedPoint(point, outcome, time.perf_counter() - began))
    found = {(row.point.set, row.point.name): row for row in rows}
    ratios = [
        *_multiplexing(found, "static32", 2.64),
        *_multiplexing(found, "dynamic", 2.51),
        *_parallelization(folder, found),
        *_pareto(folder, found, MIXTRAL_8X7B, 1.33),
        *_pareto(folder, found, QWEN3_30B_A3B, 2.11),
    ]
    return Reproduction(rows, ratios, time.perf_counter() - start)


def pareto_improvement(point: tuple[float, float], front: Sequence[tuple[float, float]]) -> float:
    """Return the Pareto improvement distance of a (cycles, bytes) point over others.

    The least, over the others, of the larger of the two factors by which the point is better (paper, section 5.2).

    >>> pareto_improvement((100, 10), [(150, 10), (101, 20)])
    1.5
    """
    return min(max(cycles / point[0], size / point[1]) for cycles, size in front)


def _bytes(row: ReproducedPoint, name: str) -> str:
    published, ours = getattr(row.point, name), getattr(row.outcome, name)
    if published is None:
        return "-"
    return f"{ours:,}" + (" (as published)" if ours == published else f" ({ours / published - 1:+.3%})")


def _multiplexing(found: Found, tiles: str, paper: float) -> list[Ratio]:
    """Utilization with 32 regions over that with one an expert; and cycles, given the same compute in all."""
    file = f"time_multiplexing_qwen_{tiles}"
    one, shared = found.get((file, "regions=128")), found.get((file, "regions=32"))
    if one is None or shared is None:
        return []
    cases = _moe(one), _moe(shared)
    saved = cases[0].allocated_compute / cases[1].allocated_compute
    equal = replace(cases[0], compute=round(cases[0].compute / saved))
    name = f"time-multiplexing, {tiles} tiles"
    return [
        Ratio(
            f"{name}: utilization",
            "utilization of compute with 32 regions for 128 experts over that with 128",
            saved * one.outcome.cycles / shared.outcome.cycles,
            saved * one.point.cycles / shared.point.cycles,
            paper,
        ),
        Ratio(
            f"{name}: equal compute",
            "cycles of 128 regions that have as much compute in all as the 32, over the cycles of these",
            equal.simulate().cycles / shared.outcome.cycles,
        ),
    ]


def _parallelization(folder: Path, found: Found) -> list[Ratio]:
    """Cycles of coarse over those of dynamic parallelization."""
    ratios = []
    if (folder / f"kv_traces/b64/conv_stdev{WINDOW}.npy").exists():
        whole = attention_case(folder, 64, WINDOW, "coarse")
        first = replace(whole, lengths=whole.lengths[:16])
        coarse, blocks, dynamic = (
            case.simulate().cycles for case in (first, replace(first, block=4), replace(first, way="dynamic"))
        )
        ratios += [
            Ratio(
                "dynamic over coarse, batch 16",
                f"cycles for the first 16 requests of {WINDOW}; coarse gives all of them to one region",
                coarse / dynamic,
                paper=2.72,
            ),
            Ratio(
                "dynamic over coarse, batch 16: equal compute",
                "the same with 4 requests for each of the 4 regions that dynamic has",
                blocks / dynamic,
            ),
        ]
    for batch in (16, 64):
        file = f"dynamic_parallelization_b{batch}"
        pairs = [
            (row, found[file, name.replace("coarse", "dynamic")])
            for (set, name), row in found.items()
            if set == file and name.endswith("coarse")
        ]
        if pairs:
            ratios.append(
                Ratio(
                    f"dynamic over coarse, batch {batch}: {len(pairs)} windows",
                    "geometric mean of the cycles' ratios; at batch 16 coarse has one region, else both have 4",
                    _mean([coarse.outcome.cycles / dynamic.outcome.cycles for coarse, dynamic in pairs]),
                    _mean([coarse.point.cycles / dynamic.point.cycles for coarse, dynamic in pairs]),
                )
            )
        if pairs and batch == 16:
            spread = [replace(_attention(coarse), block=4).simulate().cycles for coarse, _ in pairs]
            ratios.append(
                Ratio(
                    f"dynamic over coarse, batch 16: {len(pairs)} windows, equal compute",
                    "the same with 4 requests for each of the 4 regions that dynamic has",
                    _mean([cycles / dynamic.outcome.cycles for cycles, (_, dynamic) in zip(spread, pairs)]),
                )
            )
    pair = [found.get(("dynamic_parallelization_b64", f"{WINDOW} {way}")) for way in ("coarse", "dynamic")]
    if pair[0] is not None and pair[1] is not None:
        ratios.append(
            Ratio(
                "dynamic over coarse, batch 64",
                f"cycles for the requests of {WINDOW}; both have 4 regions",
                pair[0].outcome.cycles / pair[1].outcome.cycles,
                pair[0].point.cycles / pair[1].point.cycles,
                1.43,
            )
        )
    return ratios


def _moe(row: ReproducedPoint) -> MoECase:
    assert isinstance(row.point.case, MoECase)
    return row.point.case


def _attention(row: ReproducedPoint) -> AttentionCase:
    assert isinstance(row.point.case, AttentionCase)
    return row.point.case


def _mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _pareto(folder: Path, found: Found, model: Model, paper: float) -> list[Ratio]:
    """Pareto improvement of dynamic tiles over static ones: published, and at equal compute and equal accounting."""
    file = f"dynamic_tiling_{model.name}_b64"
    dynamic = found.get((file, "tile=dynamic"))
    known = {tile: found[file, f"tile={tile}"].point.cycles for tile in STATIC_TILES if (file, f"tile={tile}") in found}
    if dynamic is None or not known:
        return []
    case = _moe(dynamic)
    fair = replace(case, compute=STATIC_COMPUTE).simulate().cycles
    static = {tile: moe_case(folder, model, 64, tile) for tile in STATIC_TILES}
    cycles = {
        tile: row.outcome.cycles if (row := found.get((file, f"tile={tile}"))) else each.simulate().cycles
        for tile, each in static.items()
    }

    def improvement(own: float, others: dict[int, int], dynamic_idle: bool, static_idle: bool) -> float:
        point = (own, case.on_chip(idle_experts=dynamic_idle))
        return pareto_improvement(
            point, [(others[tile], static[tile].on_chip(idle_experts=static_idle)) for tile in others]
        )

    name = f"Pareto improvement of dynamic tiles, {model.name}"
    return [
        Ratio(
            name,
            "over static tiles of 8 to 64 rows; as in the paper's figure, experts without tokens take up memory with "
            "static tiles and none with dynamic ones, and dynamic tiles have more compute",
            improvement(dynamic.outcome.cycles, cycles, False, True),
            paper=paper,
        ),
        Ratio(
            f"{name}: published tiles",
            f"the same over tiles of {' and '.join(map(str, known))} rows only, whose cycles are published",
            improvement(dynamic.outcome.cycles, {tile: cycles[tile] for tile in known}, False, True),
            improvement(dynamic.point.cycles, known, False, True),
        ),
        Ratio(
            f"{name}: equal",
            "tiles of 8 to 64 rows with equal compute; experts without tokens take up no memory in either",
            improvement(fair, cycles, False, False),
        ),
        Ratio(
            f"{name}: equal, all experts",
            "the same where experts without tokens take up memory in both",
            improvement(fair, cycles, True, True),
        ),
    ]
