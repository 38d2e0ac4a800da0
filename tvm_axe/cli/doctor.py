"""`tvm-axe doctor`: what there is on this machine of what each engine needs, and what would help.

With ``--hosts`` it says so of other hosts (`tvm_axe.cli.elsewhere`). With ``--measure`` it measures which algorithms an
engine's collectives are to be done by (`tvm_axe.collective.choice`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_axe.cli.command import Command
from tvm_axe.cli.given import add_hosts_argument
from tvm_axe.collective import choice, registry
from tvm_axe.defaults import WORK_DIR
from tvm_axe.errors import InputError

if TYPE_CHECKING:
    from tvm_axe.collective.engine import Finding

__all__ = ["COMMAND"]

_MEASURED = "cuda"
_PACKAGES = ("tvm-axe", "apache-tvm", "apache-tvm-ffi", "numpy", "xgboost-cpu", "mpi4py", "cuda-bindings", "nccl4py")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    names = registry.names()
    parser.add_argument("--engine", choices=names, help="look at one engine, and exit with 1 if it can't be launched")
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure which algorithm is fastest for each collective and size of the engine, once for this machine",
    )
    add_hosts_argument(
        parser, "look at these hosts, for --engine mpi if none is named; exit with 1 if one lacks something"
    )
    parser.add_argument(
        "--reach",
        action="append",
        default=[],
        metavar="HOST[:PORT]",
        help="whether a port of a host takes connections from here, or a host answers at all; may be given again",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _doctor(args: argparse.Namespace) -> int:
    """`tvm-axe doctor`"""
    from tvm_axe.cli.elsewhere import reach
    from tvm_axe.machines.target import host_cpu

    if args.hosts is None and args.launcher is not None:
        raise InputError("--launcher is what reaches --hosts, and there are none")
    if args.measure and args.hosts is not None:
        raise InputError("--measure measures this machine; run it on each of --hosts")
    if args.measure:
        return _measure(args)
    if args.hosts is not None:
        return _on_hosts(args)
    names = registry.names() if args.engine is None else (args.engine,)
    engines = {name: registry.find(name).findings() for name in names}
    versions = {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}
    cpu = f"{platform.machine()} {host_cpu()}"
    reached = reach(args.reach)
    if args.json:
        told: dict[str, Any] = {"versions": versions, "cpu": cpu, "engines": _encoded(engines)}
        print(json.dumps({**told, "reach": [finding._asdict() for finding in reached]} if args.reach else told))
    else:
        print(
            ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None), cpu, sep=", "
        )
        for name, findings in engines.items():
            print("\n".join(_lines(name, findings)))
        if reached:
            print("\n".join(_lines(", ".join(args.reach), reached)))
    return int(_lacking([*(engines[args.engine] if args.engine is not None else ()), *reached]))


def _on_hosts(args: argparse.Namespace) -> int:
    from tvm_axe.cli.elsewhere import findings_on
    from tvm_axe.collective.reaching import launcher_of

    found = findings_on(args.hosts, args.engine or "mpi", launcher_of(args.launcher))
    if args.json:
        print(json.dumps({"hosts": _encoded(found)}))
    else:
        print("\n".join(line for name, findings in found.items() for line in _lines(name, findings)).lstrip())
    return int(any(map(_lacking, found.values())))


def _measure(args: argparse.Namespace) -> int:
    """Measure and keep; without an engine, those of the one that has a choice."""
    from tvm_axe.records.files import locked, replace_file
    from tvm_axe.records.provenance import origin

    found = registry.find(args.engine or _MEASURED).measure(lambda line: print(line, file=sys.stderr, flush=True))
    folder = Path(WORK_DIR) / choice.FOLDER
    kept = []
    for machine, table, times in found:
        rows = [time._asdict() for time in times]
        told = {**table.encode(), "machine": dataclasses.asdict(machine), "origin": origin(), "times": rows}
        with locked(folder):
            replace_file(folder / machine.file, json.dumps(told, indent=1) + "\n")
        kept.append({"file": str(folder / machine.file), **told})
        if not args.json:
            print(f"{machine}: {folder / machine.file}")
            print("\n".join(f"  {line}" for line in str(table).split("\n")))
    if args.json:
        print(json.dumps({"collectives": kept}))
    return 0


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _encoded(found: Mapping[str, Sequence[Finding]]) -> dict[str, list[dict[str, Any]]]:
    return {name: [finding._asdict() for finding in findings] for name, findings in found.items()}


def _lacking(findings: Sequence[Finding]) -> bool:
    return any(finding.remedy for finding in findings)


def _lines(of: str, findings: Sequence[Finding]) -> list[str]:
    lines = ["", f"{of}: {'something is missing' if _lacking(findings) else 'ready'}"]
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        lines.append(f"  {finding.what:<{width}}  {finding.state}")
        if finding.remedy:
            lines.append(f"  {'':<{width}}  -> {finding.remedy}")
    return lines


COMMAND = Command("doctor", "what each engine finds on this machine, and what is missing", _add_arguments, _doctor)
