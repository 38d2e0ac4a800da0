"""Time the layout algebra beside the compiler's own, on the same layouts, in one run.

    python scripts/bench_layout.py [--json]

Each row is one operation on layouts with 2 to 12 iters that don't merge: the median over the repeats of the time of one
call, in milliseconds, for ours, pure Python, and for the compiler's, C++ behind its Python API. Every call works on
a layout of its own, so that nothing that a layout keeps from an earlier call is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from tvm.tirx.layout import Iter as PeerIter
from tvm.tirx.layout import TileLayout

from tvm_axe.layout import Iter, Layout

COUNTS = (2, 4, 8, 12)
REPEATS = 41
LAYOUTS = 40


def iters(count: int) -> list[tuple[int, int, str]]:
    """Return (extent, stride, axis) of a layout whose neighbours can't be merged: digits of two, in reversed order."""
    return [(2, 2**k, "m") for k in range(count)]


def ours(count: int) -> Layout:
    return Layout([Iter(*it) for it in iters(count)])


def peers(count: int) -> TileLayout:
    return TileLayout.from_iters([PeerIter(*it) for it in iters(count)])


def operations(count: int) -> dict[str, Callable[[Any, Any], Any]]:
    """Return the operations on a layout and one of two iters, which both kinds of layouts spell alike."""
    shape = [2 ** (count // 2), 2 ** (count - count // 2)]
    region = [(0, shape[0] // 2), (0, shape[1])]
    return {
        "apply": lambda layout, _: layout.apply(1),
        "apply with a shape": lambda layout, _: layout.apply(1, 1, shape=shape),
        "canonicalize": lambda layout, _: layout.canonicalize(),
        "group": lambda layout, _: layout.group(shape),
        "tile": lambda layout, outer: layout.tile(outer, [2, 2], shape),
        "slice": lambda layout, _: layout.slice(shape, region),
    }


def once(operation: Callable[[Any, Any], Any], layouts: list[tuple[Any, Any]]) -> float:
    """Return the time of one call in milliseconds, over a call on each of the layouts."""
    start = time.perf_counter()
    for layout, outer in layouts:
        operation(layout, outer)
    return (time.perf_counter() - start) / len(layouts) * 1e3


def measure() -> list[dict[str, Any]]:
    rows = []
    for count in COUNTS:
        for name, operation in operations(count).items():
            times: dict[Any, list[float]] = {ours: [], peers: []}
            for _ in range(REPEATS):
                for make, measured in times.items():
                    layouts = [(make(count), make(2)) for _ in range(LAYOUTS)]
                    gc.collect()
                    measured.append(once(operation, layouts))
            mine, theirs = statistics.median(times[ours]), statistics.median(times[peers])
            rows.append(
                {
                    "name": f"{name}, {count} iters",
                    "ours_ms": mine,
                    "peer": "tvm.tirx.layout.TileLayout",
                    "peer_ms": theirs,
                    "ratio": theirs / mine,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the layout algebra beside the compiler's own.")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    args = parser.parse_args()
    rows = measure()
    if args.json:
        print(json.dumps({"rows": rows}))
        return
    print(f"{'operation':30}{'ours, us':>10}{'peer, us':>10}{'ratio':>8}")
    for row in rows:
        print(f"{row['name']:30}{row['ours_ms'] * 1e3:10.2f}{row['peer_ms'] * 1e3:10.2f}{row['ratio']:8.2f}")


if __name__ == "__main__":
    main()
