"""The hash of everything that is lowered: what a change of the code is to leave as it is, or is to name.

    python scripts/record_lowering.py before.json --keep before      # on the one commit
    python scripts/record_lowering.py after.json --keep after        # on the other
    python scripts/record_lowering.py --compare before.json after.json
    diff -r before after

Of the distributed programs and the tests' small ones under their schedules: the scheduled function with its trace, the
module that each device runs, with tile kernels, and what `show` says. Of tile kernels and programs: the plan, and the
code for two levels of CPUs and two GPUs, as a function and as CUDA source. Of design spaces and of the search over
schedules: traces, and modules of some candidates. Of Relax models: the fused module, and what a mesh and a virtual
machine run. Of streaming programs: what is computed of them, and what a simulated run counts. Nothing is run on a
device, no time is measured, and no GPU or nvcc is needed.

The texts say nothing of the machine, the folder or the process. Where a rule refuses a case, its message is hashed,
with "refused:" before the hash. Some minutes on two cores; ``--only`` takes a regular expression that is searched in
the names of cases. The package's modules are named in `lowering_names`, for commits between which they move.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

SEEN_CORES = 4
_FIRST = ("search/", "spaces/")  # the longest jobs


def jobs() -> Mapping[str, object]:
    """All jobs by name; needs `fix_cores` first."""
    import lowering_cases
    import lowering_schedules
    import lowering_spaces

    groups = (*lowering_cases.GROUPS, *lowering_schedules.GROUPS, *lowering_spaces.GROUPS)
    found = [pair for group in groups for pair in group()]
    assert len(found) == len(dict(found)), "two cases have one name"
    return dict(found)


def fix_cores() -> None:
    """Have every machine say that it has four cores: a kernel is compiled for a device's share of them."""
    os.sched_getaffinity = lambda _: {*range(SEEN_CORES)}  # type: ignore[assignment]


_JOBS: dict[str, object] = {}


def texts_of(name: str) -> dict[str, str]:
    """The texts of a job, by their whole names."""
    if not _JOBS:
        _JOBS.update(jobs())
    from lowering_cases import made

    return {f"{name}/{part}".rstrip("/"): text for part, text in made(_JOBS[name]).items()}


def digest(text: str) -> str:
    """The hash of a text, with what marks a refusal in front."""
    from lowering_cases import REFUSED

    found = hashlib.sha256(text.encode()).hexdigest()
    return f"{REFUSED}{found}" if text.startswith(REFUSED) else found


def record(out: Path, only: str, keep: Path | None, processes: int) -> int:
    """Write the hashes, and the texts where `keep` says; returns how many there are."""
    names = [name for name in jobs() if re.search(only, name)]
    names.sort(key=lambda name: not name.startswith(_FIRST))
    hashes: dict[str, str] = {}
    # A new process, and not a fork: the compiler has threads.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, fix_cores) as pool:
        running = {pool.submit(texts_of, name): name for name in names}
        for done, future in enumerate(as_completed(running), 1):
            try:
                texts = future.result()
            except Exception as error:
                pool.shutdown(cancel_futures=True)
                raise RuntimeError(f"{running[future]} failed") from error
            for name, text in texts.items():
                hashes[name] = digest(text)
                if keep is not None:
                    path = keep / f"{name}.txt"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text, encoding="utf-8")
            if done % 100 == 0:
                print(f"{done} of {len(names)} cases", file=sys.stderr, flush=True)
    out.write_text(json.dumps(hashes, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    return len(hashes)


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """A line for each name that isn't the same in both."""
    lines = []
    for name in sorted({*before, *after}):
        if name not in after:
            lines.append(f"vanished  {name}")
        elif name not in before:
            lines.append(f"appeared  {name}")
        elif before[name] != after[name]:
            lines.append(f"differs   {name}")
    return lines


def main() -> int:
    """Record or compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="where the hashes are written, as JSON")
    parser.add_argument("--only", default="", help="record the cases in whose names this regular expression is found")
    parser.add_argument("--keep", type=Path, help="a folder for the texts, a file each")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if (options.out is None) == (options.compare is None):
        parser.error("name a file to write, or --compare two")
    if options.compare is not None:
        before, after = (json.loads(path.read_text(encoding="utf-8")) for path in options.compare)
        lines = differences(before, after)
        print("\n".join([*lines, f"{len(lines)} differences; {len(before)} texts before, {len(after)} after"]))
        return 1 if lines else 0
    fix_cores()
    start = time.monotonic()
    count = record(options.out, options.only, options.keep, options.processes)
    print(f"{count} texts in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
