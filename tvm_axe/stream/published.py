"""The published simulations: their inputs and results, read from a folder, and the same simulated here.

The folder holds `moe_routing/{model}_b{batch}.npz`, `kv_traces/b{batch}/conv_stdev{std}_{first}_{last}.npy` and
`published/*.csv`. That of the artifact of Streaming Tensor Programs (arXiv 2511.07776) comes with the package: `DATA`,
whose README says where each file is from.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tvm_axe.errors import InputError
from tvm_axe.stream.programs.cached_attention import AttentionCase
from tvm_axe.stream.programs.moe import MoECase
from tvm_axe.stream.programs.workloads import MIXTRAL_8X7B, QWEN3_30B_A3B, Model

__all__ = ["DATA", "Point", "attention_case", "moe_case", "read_points"]

DATA = Path(__file__).with_name("data") / "step"
"""The folder of the inputs and results that were published with the paper."""

MODELS = {model.name: model for model in (MIXTRAL_8X7B, QWEN3_30B_A3B)}
STATIC_COMPUTE, DYNAMIC_COMPUTE = 4096, 6400
"""FLOPs a cycle of a unit in the published tiling results, for static and for dynamic tiles."""
TILING_COLUMNS, MULTIPLEXING_COLUMNS = 64, 48
"""Columns of the hidden dim that a tile of weights has, in the tiling and in the time-multiplexing results."""
WAYS = {"coarse": "static_coarse_cycles", "interleaved": "static_interleave_cycles", "dynamic": "dynamic_cycles"}


@dataclass(frozen=True)
class Point:
    """A published result and how it is simulated here.

    Attributes
    ----------
    set, name : str
        The file's name, and which of its results it is.
    case : MoECase or AttentionCase
        The case that is simulated.
    cycles : int
        Cycles, as published.
    off_chip, on_chip : int or None
        Bytes moved off-chip and needed on-chip, as published, where they are.
    """

    set: str
    name: str
    case: MoECase | AttentionCase
    cycles: int
    off_chip: int | None = None
    on_chip: int | None = None


def read_points(folder: Path = DATA) -> list[Point]:
    """Return every published result under a folder, by default those of the paper.

    Raises
    ------
    InputError
        If there is none, a file cannot be read, or the input of a result is missing.
    """
    files = sorted((folder / "published").glob("*.csv"))
    points = [point for file in files for point in _read_file(folder, file)]
    if not points:
        raise InputError(f"{folder}: no published results: published/*.csv are expected there")
    return points


def moe_case(folder: Path, model: Model, batch: int, tile: int | None) -> MoECase:
    """Return a case of the tiling results: a static tile of so many rows, or None for dynamic ones."""
    compute = DYNAMIC_COMPUTE if tile is None else STATIC_COMPUTE
    return MoECase(_routing(folder, model.name, batch), model.moe, tile, TILING_COLUMNS, compute=compute)


def attention_case(folder: Path, batch: int, window: str, way: str) -> AttentionCase:
    """Return a case of the attention results: the window's name ends in its standard deviation and indices."""
    return AttentionCase(_load(folder / f"kv_traces/b{batch}/conv_stdev{window}.npy"), way)


def _read_file(folder: Path, file: Path) -> Iterator[Point]:
    readers: dict[str, Callable[..., Iterator[Point]]] = {
        r"dynamic_tiling_(?P<model>[a-z]+)_b(?P<batch>\d+)": _tiling,
        r"time_multiplexing_(?P<model>[a-z]+)_(?P<tiles>dynamic|static\d+)": _multiplexing,
        r"dynamic_parallelization_b(?P<batch>\d+)": _parallelization,
    }
    for pattern, reader in readers.items():
        match = re.fullmatch(pattern, file.stem)
        if match is not None:
            found = match.groupdict()
            if found.get("model", "qwen") not in MODELS:
                raise InputError(f"{file}: the models are {', '.join(MODELS)}, not {found['model']}")
            with open(file, encoding="utf-8", newline="") as lines:
                try:
                    for row in csv.DictReader(lines):
                        yield from reader(folder, file.stem, row, **found)
                except (KeyError, TypeError, ValueError) as error:
                    raise InputError(f"{file}: a row is not as expected: {error!r}") from error
            return
    raise InputError(f"{file}: of no known kind: dynamic_tiling, time_multiplexing or dynamic_parallelization")


def _tiling(folder: Path, name: str, row: dict[str, str], model: str, batch: str) -> Iterator[Point]:
    rows = int(row["tile_N"])
    case = moe_case(folder, MODELS[model], int(batch), None if rows == 1 else rows)
    yield _moe_point(name, "tile=dynamic" if rows == 1 else f"tile={rows}", case, row)


def _multiplexing(folder: Path, name: str, row: dict[str, str], model: str, tiles: str) -> Iterator[Point]:
    tile = None if tiles == "dynamic" else int(tiles.removeprefix("static"))
    routing = _routing(folder, model, int(row["batch"]))
    regions = int(row["n_par_region"])
    case = MoECase(routing, MODELS[model].moe, tile, MULTIPLEXING_COLUMNS, regions, int(row["unit_flops"]))
    yield _moe_point(name, f"regions={regions}", case, row)


def _moe_point(set: str, name: str, case: MoECase, row: dict[str, str]) -> Point:
    # Where the artifact didn't compute the bytes it left zeros.
    off_chip, on_chip = int(row["off_chip_traffic_bytes"]) or None, int(row["on_chip_requirement_bytes"]) or None
    return Point(set, name, case, int(row["cycles"]), off_chip, on_chip)


def _parallelization(folder: Path, name: str, row: dict[str, str], batch: str) -> Iterator[Point]:
    window = f"{int(row['stdev']):04d}_{int(row['start_idx']):04d}_{int(row['end_idx']):04d}"
    for way, column in WAYS.items():
        case = attention_case(folder, int(batch), window, way)
        yield Point(name, f"{window} {way}", case, int(row[column]))


def _routing(folder: Path, model: str, batch: int) -> NDArray[np.int64]:
    return _load(folder / f"moe_routing/{model}_b{batch}.npz")


def _load(file: Path) -> NDArray[np.int64]:
    try:
        found = np.load(file)
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read: {error}") from error
    array: NDArray[np.int64] = found["data"] if file.suffix == ".npz" else found
    return array
