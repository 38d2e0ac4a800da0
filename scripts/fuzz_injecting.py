"""Can the fuzzer fail? Makes mistakes in the package, one at a time, and looks when `fuzz_schedules` finds each.

    python scripts/fuzz_injecting.py                          # all of `fuzz_mistakes`, up to 500 programs each
    python scripts/fuzz_injecting.py "push unseen" --count 50
    python scripts/fuzz_injecting.py --json

Of each mistake it says the first seed that finds it and how: a wrong answer, a raw error, a crash or hang. The seed
itself is judged again without the mistake; one that fails then, too, is no find. The exit status is 0 if all are found.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass

from fuzz_judging import BUGS
from fuzz_mistakes import MISTAKES
from fuzz_schedules import Record, records


@dataclass(frozen=True)
class Find:
    """When a mistake was found, and how; `seed` is None where it wasn't."""

    mistake: str
    area: str
    words: str
    seed: int | None
    programs: int
    kind: str = ""
    seen: str = ""


def _judged(mistake: str | None, seed: int, count: int, delays: bool) -> Iterator[Record]:
    options = argparse.Namespace(
        seed=seed, count=count, engine="threads", delays=delays, processes=1, minimize=0, mistake=mistake
    )
    return records(options)


def find(name: str, seed: int, count: int) -> Find:
    """The first seed, of `count` from `seed` on, that finds a mistake."""
    mistake = MISTAKES[name]
    found = _judged(name, seed, count, mistake.delays)
    for programs, record in enumerate(found, 1):
        if record.kind not in BUGS:
            continue
        if any(without.kind in BUGS for without in _judged(None, record.seed, 1, mistake.delays)):
            continue
        found.close()
        seen = (record.reason or record.detail).strip().splitlines()
        return Find(
            name, mistake.area, mistake.words, record.seed, programs, record.kind, seen[0][:120] if seen else ""
        )
    return Find(name, mistake.area, mistake.words, None, count)


def main() -> int:
    """Make the mistakes; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="mistake", help="names of fuzz_mistakes.MISTAKES; all if left out")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=500, help="how many programs each may take")
    parser.add_argument("--processes", type=int, default=2, help="mistakes that are looked for at once")
    parser.add_argument("--json", action="store_true", help="print a line of JSON a mistake, as it is found")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in MISTAKES]
    if unknown:
        parser.error(f"{', '.join(unknown)}: not among {', '.join(MISTAKES)}")
    with ThreadPoolExecutor(options.processes) as pool:
        asked = [pool.submit(find, name, options.seed, options.count) for name in options.names or MISTAKES]
        finds = []
        for done in as_completed(asked):
            finds.append(done.result())
            if options.json:
                print(json.dumps(asdict(finds[-1])), flush=True)
            else:
                each = finds[-1]
                print(f"{each.mistake}: {each.seed} {each.kind} {each.seen}", file=sys.stderr, flush=True)
    if not options.json:
        order = list(MISTAKES)
        print("| area | mistake | programs | seed | how |\n|---|---|---|---|---|")
        for each in sorted(finds, key=lambda each: order.index(each.mistake)):
            seed = "none" if each.seed is None else each.seed
            print(f"| {each.area} | {each.words} | {each.programs} | {seed} | {each.kind or 'not found'} |")
    return int(any(each.seed is None for each in finds))


if __name__ == "__main__":
    sys.exit(main())
