"""Records changed at random, loaded and replayed: ``python tests/records/mutations.py SEED COUNT [PROCESSES]``.

Each case is a database of good lines, one of which is changed: a byte, a number, a text, a key or an item. Batches run
in child processes, as a loaded line could end the process; a signal is counted, and its case is named so that
``python tests/records/mutations.py SEED:CASE 1`` shows it again. Printed is how many changed lines were skipped with a
reason, how many were accepted and replayed (or refused by the schedule in good order), how many ended the process, and
how many good lines were lost. The exit code is 1 if one of the last two is not 0.
"""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
BATCH = 250


def sources(fresh: Path) -> list[tuple[list[str], list[str]]]:
    """Databases to change, as the lines of their two files: those that ship, and new ones of scheduled programs."""
    import written
    from tvm.s_tir import meta_schedule as ms

    from tvm_axe.machines import resolve_target
    from tvm_axe.records.database import RECORDS, WORKLOADS, Database, find_databases, normalize
    from tvm_axe.records.shipped import SHIPPED

    target = resolve_target("llvm", threads=1)
    for name, mod in written.programs():
        if "," in name:
            continue
        database = Database(fresh / name)
        workload = database.commit_workload(normalize(mod["main"]))
        for seed in range(4):
            trace = written.drawn(workload.mod, seed).trace
            infos = ms.arg_info.ArgInfo.from_entry_func(workload.mod)
            database.commit_tuning_record(ms.database.TuningRecord(trace, workload, [0.5 + seed], target, infos))
    folders = [*find_databases(fresh), *find_databases(SHIPPED)]
    return [tuple((folder / name).read_text().splitlines() for name in (WORKLOADS, RECORDS)) for folder in folders]


def mutate(choose: random.Random, workloads: list[str], records: list[str]) -> tuple[str, int, str]:
    """Which file's which line becomes what."""
    if choose.random() < 0.5:
        at = choose.randrange(len(workloads))
        digest, encoded = json.loads(workloads[at])
        kind = choose.random()
        if kind < 0.1:
            return "workload", at, _byte(choose, workloads[at])
        text = base64.b64decode(encoded)[8:].decode()
        text = _byte(choose, text) if kind < 0.4 else json.dumps(_structured(choose, json.loads(text)))
        raw = text.encode()
        whole = base64.b64encode(len(raw).to_bytes(8, "little") + raw).decode()
        return "workload", at, json.dumps([digest, whole])
    at = choose.randrange(len(records))
    if choose.random() < 0.4:
        return "record", at, _byte(choose, records[at])
    return "record", at, json.dumps(_structured(choose, json.loads(records[at])))


def _byte(choose: random.Random, text: str) -> str:
    at = choose.randrange(len(text))
    return (
        text[:at] + choose.choice([chr(choose.randrange(32, 127)), chr(choose.randrange(48, 58)), ""]) + text[at + 1 :]
    )


def _structured(choose: random.Random, value: Any) -> Any:
    """The same with one change somewhere: a number, a text, a key, an item."""
    places: list[tuple[Any, Any]] = []

    def walk(part: Any) -> None:
        for key, item in part.items() if isinstance(part, dict) else enumerate(part):
            places.append((part, key))
            if isinstance(item, (dict, list)):
                walk(item)

    walk(value)
    part, key = choose.choice(places)
    other, another = choose.choice(places)
    match choose.randrange(5):
        case 0:  # another of the same sort, such as the number of another node
            same = [o[k] for o, k in places if type(o[k]) is type(part[key])]
            part[key] = json.loads(json.dumps(choose.choice(same)))
        case 1:  # unless one is in the other
            if isinstance(part[key], (dict, list)) or isinstance(other[another], (dict, list)):
                part[key] = json.loads(json.dumps(other[another]))
                return value
            part[key], other[another] = other[another], part[key]
        case 2:
            del part[key]
        case 3:
            part[key] = choose.choice([0, -1, 1, 2, 7, 2**31, 2**62, 10**30, 0.5, True, None, "", "float32", [], {}])
        case _:
            if isinstance(part, list):
                part.insert(key, part[key])
            elif isinstance(part[key], str):
                part[key] = part[key][::-1]
            else:
                part[f"{key}x"] = part.pop(key)
    return value


def run(seed: int, cases: list[int], databases: list[tuple[list[str], list[str]]], found: Path) -> None:
    """Load and replay cases in this process; a line of the file says what became of each."""
    with tempfile.TemporaryDirectory() as scratch, found.open("a") as out:
        for case in cases:
            print(case, "begun", file=out, flush=True)
            folder = Path(scratch) / f"case{case}"
            outcome = _case(random.Random(f"{seed} {case}"), databases, folder)
            print(case, *outcome, file=out, flush=True)


def _case(choose: random.Random, databases: list[tuple[list[str], list[str]]], folder: Path) -> tuple[str, str]:
    from tvm_axe.errors import TuneError
    from tvm_axe.records.database import RECORDS, WORKLOADS
    from tvm_axe.records.maintenance import tuned

    workloads, records = map(list, choose.choice(databases))
    # A good workload beside, whose records must stay whatever is changed.
    more = choose.choice(databases)
    others = [json.dumps([len(workloads), json.loads(line)[1]]) for line in more[1]]
    file, at, line = mutate(choose, workloads, records)
    wrong = {("workload", n) for n in [at]} if file == "workload" else set()
    (workloads if file == "workload" else records)[at] = line
    folder.mkdir()
    (folder / WORKLOADS).write_text("".join(f"{text}\n" for text in [*workloads, more[0][0]]))
    (folder / RECORDS).write_text("".join(f"{text}\n" for text in [*records, *others]))
    good = {len(records) + n for n in range(1, len(others) + 1)}
    if not wrong:
        good |= {n for n in range(1, len(records) + 1) if n != at + 1}
    changed = set(range(1, len(records) + 1)) if wrong else {at + 1}
    seen: dict[int, str] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for entry in tuned(folder):
            entry.schedule()
            for record in entry.records:
                number = int(record.place.rpartition(":")[2])
                try:
                    record.schedule(entry.mod).mod.script()
                    seen[number] = "replayed"
                except TuneError as error:
                    seen[number] = f"refused {error}"
    said = [str(warning.message) for warning in caught]
    lost = [n for n in good if seen.get(n) != "replayed"]
    if lost:
        return "lost", f"{file} {at}: {lost} {said}"
    unnamed = [n for n in changed if n not in seen and not any(f"{RECORDS}:{n}:" in text for text in said)]
    if unnamed:
        return "unnamed", f"{file} {at}: {unnamed} {said}"
    if changed & seen.keys():
        return ("replayed" if any(seen.get(n) == "replayed" for n in changed) else "refused"), file
    return "skipped", next((text.rpartition(" (")[2][:120] for text in said if "skipped" in text), "")


def batch(seed: int, cases: list[int], databases: Path) -> list[tuple[int, str, str]]:
    """What became of cases, in child processes: after one that ends its process, another goes on."""
    outcomes: list[tuple[int, str, str]] = []
    left = list(cases)
    while left:
        with tempfile.NamedTemporaryFile("r") as found:
            argv = [sys.executable, __file__, "--run", str(seed), found.name, str(databases), *map(str, left)]
            code = subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
            lines = [line.split(" ", 2) for line in found.read().splitlines()]
        ended = {int(case): (what, rest[0] if rest else "") for case, what, *rest in lines if what != "begun"}
        outcomes += [(case, *what) for case, what in ended.items()]
        begun = [int(case) for case, *_ in lines]
        if code.returncode != 0:
            if not begun or begun[-1] in ended:
                raise RuntimeError(f"a batch failed outside of its cases: {code.stderr[-2000:]}")
            how = "crashed" if code.returncode < 0 else "raised"
            outcomes.append((begun[-1], how, f"{code.returncode} {code.stderr[-600:]}"))
        left = [case for case in left if case not in {done for done, *_ in outcomes}]
    return outcomes


def mutations(seed: int, cases: range, processes: int = 1) -> Counter[str]:
    """How often each thing became of a case; what should not have is printed."""
    batches = [list(cases[n : n + BATCH]) for n in range(0, len(cases), BATCH)]
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(processes) as pool:
        path = Path(scratch) / "databases.json"
        path.write_text(json.dumps(sources(Path(scratch) / "fresh")))
        for outcomes in pool.map(lambda part: batch(seed, part, path), batches):
            for case, what, why in outcomes:
                counts[what] += 1
                if what in ("crashed", "raised", "lost", "unnamed"):
                    print(f"{seed}:{case}: {what}: {why}", flush=True)
    return counts


def main(argv: list[str]) -> int:
    if argv[:1] == ["--run"]:
        run(int(argv[1]), [int(case) for case in argv[4:]], json.loads(Path(argv[3]).read_text()), Path(argv[2]))
        return 0
    seed, _, first = argv[0].partition(":")
    start = int(first or 0)
    counts = mutations(int(seed), range(start, start + int(argv[1])), int(argv[2]) if len(argv) > 2 else 1)
    print(
        f"{counts['skipped']} skipped with a reason, {counts['replayed']} accepted and replayed, {counts['refused']} "
        f"refused by the schedule, {counts['crashed']} crashed, {counts['raised']} raised, {counts['lost']} lost good "
        f"lines, {counts['unnamed']} were skipped without a word"
    )
    return 1 if any(counts[what] for what in ("crashed", "raised", "lost", "unnamed")) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
