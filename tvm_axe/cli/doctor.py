"""`tvm-axe doctor`: what there is on this machine of what each engine needs, and what would help.

With ``--measure`` it measures which algorithms an engine's collectives are to be done by (`tvm_axe.collective.choice`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from tvm_axe.cli.command import Command
from tvm_axe.collective import choice, registry
from tvm_axe.defaults import WORK_DIR

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
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _doctor(args: argparse.Namespace) -> int:
    """`tvm-axe doctor`"""
    if args.measure:
        return _measure(args)
    names = registry.names() if args.engine is None else (args.engine,)
    engines = {name: [finding._asdict() for finding in registry.find(name).findings()] for name in names}
    versions = {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}
    if args.json:
        print(json.dumps({"versions": versions, "engines": engines}))
    else:
        print(", ".join(f"{name} {version}" for name, version in versions.items() if version is not None))
        for name, findings in engines.items():
            print("\n".join(_lines(name, findings)))
    return int(args.engine is not None and any(finding["remedy"] for finding in engines[args.engine]))


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


def _lines(engine: str, findings: list[dict[str, Any]]) -> list[str]:
    ready = not any(finding["remedy"] for finding in findings)
    lines = ["", f"{engine}: {'ready' if ready else 'something is missing'}"]
    width = max(len(finding["what"]) for finding in findings)
    for finding in findings:
        lines.append(f"  {finding['what']:<{width}}  {finding['state']}")
        if finding["remedy"]:
            lines.append(f"  {'':<{width}}  -> {finding['remedy']}")
    return lines


COMMAND = Command("doctor", "what each engine finds on this machine, and what is missing", _add_arguments, _doctor)
