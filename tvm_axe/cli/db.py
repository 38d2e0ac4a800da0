"""`tvm-axe db`: tuning databases."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_axe.cli.command import Command, Group, plain_warnings
from tvm_axe.defaults import WORK_DIR
from tvm_axe.errors import InputError

if TYPE_CHECKING:
    from tvm import s_tir

    from tvm_axe.records.database import Record
    from tvm_axe.records.maintenance import Tuned

__all__ = ["COMMAND"]

_SHOWN = 5  # of the fastest records


def _json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _folder_and_target(parser: argparse.ArgumentParser) -> None:
    _one_folder(parser)
    _target(parser)


def _one_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        nargs="?",
        default=WORK_DIR,
        metavar="DIR",
        help="databases are at or below it; `shipped` are those of the package (default: %(default)s)",
    )


def _target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", metavar="TARGET", help="only for this one: as `list` prints it, or llvm etc.")


def _add_list_arguments(parser: argparse.ArgumentParser) -> None:
    _json(parser)
    _folder_and_target(parser)


def _add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    _json(parser)
    parser.add_argument("workload", metavar="WORKLOAD", help="its name as `list` prints it, or a part of it")
    _folder_and_target(parser)


def _add_merge_arguments(parser: argparse.ArgumentParser) -> None:
    _json(parser)
    parser.add_argument("sources", nargs="+", metavar="SRC", help="databases are at or below it, in any layout")
    parser.add_argument("destination", metavar="DEST", help="made if needed; records lie in DEST/<target>/<workload>/")
    parser.add_argument(
        "--flat", action="store_true", help="make DEST itself one database, for upstream's MetaScheduleApplyDatabase"
    )
    _target(parser)


def _add_prune_arguments(parser: argparse.ArgumentParser) -> None:
    _json(parser)
    parser.add_argument("--keep", type=int, default=1, metavar="N", help="how many (default: %(default)s)")
    _folder_and_target(parser)


def _add_validate_arguments(parser: argparse.ArgumentParser) -> None:
    _json(parser)
    _one_folder(parser)


def _list(args: argparse.Namespace) -> None:
    """`tvm-axe db list`"""
    from tvm_axe.records.maintenance import tuned

    with plain_warnings():
        rows = [_summary(entry) for entry in tuned(_folder(args.folder), args.target)]
    if args.json:
        print(json.dumps({"rows": rows}))
        return
    titles = ["target", "workload", "trials", "failed", "before ms", "best ms", "GFLOP/s", "date"]
    table = [titles, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table)]
    for line in table:
        left, right = zip(line[:2], widths[:2]), zip(line[2:], widths[2:])
        print("  ".join([*(f"{cell:<{n}}" for cell, n in left), *(f"{cell:>{n}}" for cell, n in right)]))


def _show(args: argparse.Namespace) -> None:
    """`tvm-axe db show`"""
    from tvm_axe.records.maintenance import find

    with plain_warnings():
        entries = find(_folder(args.folder), args.workload, args.target)
        shown = [_details(entry) for entry in entries]
    if args.json:
        print(json.dumps({"rows": shown}))
    else:
        print("\n\n".join(_describe(details) for details in shown))


def _best(args: argparse.Namespace) -> None:
    """`tvm-axe db best`"""
    from tvm_axe.records.folders import target_name
    from tvm_axe.records.maintenance import find

    with plain_warnings():
        entries = find(_folder(args.folder), args.workload, args.target)
        found = [(entry, *best) for entry in entries if (best := entry.schedule()) is not None]
    targets = sorted({target_name(entry.target) for entry in entries})
    if len(targets) > 1:
        raise InputError(f"{args.workload}: was tuned for {', '.join(targets)}; --target chooses one")
    entry, record, sch = min(found, key=lambda one: one[1].seconds, default=(None, None, None))
    if entry is None or record is None or sch is None:
        raise InputError(f"{args.workload}: every candidate failed; tune it with more trials")
    if args.json:
        print(json.dumps({**_summary(entry), **_schedule(record, sch)}))
    else:
        print(f"# {entry.name} for {target_name(entry.target)}: {record.seconds * 1e3:.4g} ms ({record.place})")
        print(sch.mod.script())


def _merge(args: argparse.Namespace) -> None:
    """`tvm-axe db merge`"""
    from tvm_axe.records.maintenance import merge

    with plain_warnings():
        sources = [_folder(source) for source in args.sources]
        count = merge(sources, Path(args.destination), args.flat, args.target)
    if args.json:
        print(json.dumps(count))
        return
    print(f"{args.destination}: {count['records']} new records, {count['known']} were there")
    if count["left_out"]:
        print(f"{count['left_out']} left out: tile kernels, which only tvm_axe compiles, and what no longer applies")


def _prune(args: argparse.Namespace) -> None:
    """`tvm-axe db prune`"""
    from tvm_axe.records.maintenance import prune

    with plain_warnings():
        kept, dropped = prune(_folder(args.folder), args.keep, args.target)
    print(json.dumps({"kept": kept, "dropped": dropped}) if args.json else f"{kept} records kept, {dropped} dropped")


def _validate(args: argparse.Namespace) -> int:
    """`tvm-axe db validate`"""
    from tvm_axe.records.maintenance import validate

    with plain_warnings():
        good, problems = validate(_folder(args.folder))
    if args.json:
        print(json.dumps({"good": good, "problems": problems}))
    else:
        print("\n".join([*problems, f"{good} records in order, {len(problems)} problems"]))
    return 1 if problems else 0


def _folder(text: str) -> Path:
    from tvm_axe.records.shipped import SHIPPED

    return SHIPPED if text == "shipped" else Path(text)


def _summary(entry: Tuned) -> dict[str, Any]:
    from tvm_axe import _tvm
    from tvm_axe.records.database import FAILED_SECONDS
    from tvm_axe.records.folders import target_name

    candidates, best, untuned = entry.candidates, entry.best, entry.untuned
    operations = _tvm.flops(entry.mod)
    return {
        "target": target_name(entry.target),
        "workload": entry.name,
        "trials": len(candidates),
        "failed": sum(record.seconds >= FAILED_SECONDS for record in candidates),
        "before_ms": untuned.seconds * 1e3 if untuned else None,
        "best_ms": best.seconds * 1e3 if best else None,
        "gflops": operations / best.seconds / 1e9 if best and operations else None,
        "date": entry.date,
        "folder": str(entry.folder),
    }


def _cells(row: dict[str, Any]) -> list[str]:
    times = [f"{row[key]:.4g}" if row[key] is not None else "-" for key in ("before_ms", "best_ms", "gflops")]
    date = (row["date"] or "-")[:10]
    return [row["target"], row["workload"], str(row["trials"]), str(row["failed"]), *times, date]


def _details(entry: Tuned) -> dict[str, Any]:
    """What `show` says of an entry."""
    best = entry.schedule()
    return {
        **_summary(entry),
        "hash": entry.workload[0],
        "target_json": json.loads(str(entry.target)),
        "runs": entry.runs,
        "records": [_record(record) for record in entry.candidates],
        "best": _schedule(*best) if best is not None else None,
    }


def _record(record: Record) -> dict[str, Any]:
    from tvm_axe.records.database import FAILED_SECONDS

    return {"ms": record.seconds * 1e3 if record.seconds < FAILED_SECONDS else None, "place": record.place}


def _schedule(record: Record, sch: s_tir.Schedule) -> dict[str, Any]:
    return {**_record(record), "trace": str(sch.trace), "script": sch.mod.script()}


def _describe(details: dict[str, Any]) -> str:
    """The same for people."""
    target, workload, trials, failed, before, best, gflops, _ = _cells(details)
    lines = [
        f"{workload} for {target}",
        f"  in {details['folder']}",
        f"  {trials} trials, {failed} of them failed; {before} ms untuned, {best} ms at best ({gflops} GFLOP/s)",
    ]
    for run in details["runs"]:
        versions = ", ".join(f"{name} {version}" for name, version in run.get("versions", {}).items())
        lines.append(f"tuned {run.get('date')} on {run.get('host')} ({run.get('cpu')}), seed {run.get('seed')}")
        lines.append(f"  with {versions}")
        if "command" in run:
            lines.append(f"  by {run['command']}")
    lines.append("fastest")
    lines += [f"  {record['ms']:.4g} ms  {record['place']}" for record in details["records"][:_SHOWN] if record["ms"]]
    if details["best"] is not None:
        lines += [f"best: {details['best']['place']}", details["best"]["trace"], details["best"]["script"]]
    return "\n".join(lines)


COMMAND = Group(
    "db",
    "what tuning has recorded",
    (
        Command("list", "targets and workloads, with their trials, best times and dates", _add_list_arguments, _list),
        Command(
            "show",
            "where a workload's records come from, the fastest of them, and the best schedule",
            _add_workload_arguments,
            _show,
        ),
        Command("best", "the fastest schedule of a workload, as TVMScript", _add_workload_arguments, _best),
        Command(
            "prune",
            "keep the best schedules of each workload, and drop the other records",
            _add_prune_arguments,
            _prune,
        ),
        Command(
            "validate",
            "read every line and apply every trace; exit code 1 if one is broken",
            _add_validate_arguments,
            _validate,
        ),
        Command("merge", "copy records that are not there yet", _add_merge_arguments, _merge),
    ),
)
