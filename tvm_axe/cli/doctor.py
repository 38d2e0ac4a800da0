"""`tvm-axe doctor`: what there is on this machine of what each engine needs, and what would help."""

from __future__ import annotations

import argparse
import json
import platform
from importlib import metadata
from typing import Any

from tvm_axe.cli.command import Command
from tvm_axe.collective import registry

__all__ = ["COMMAND"]

_PACKAGES = ("tvm-axe", "apache-tvm", "apache-tvm-ffi", "numpy", "xgboost-cpu", "mpi4py", "cuda-bindings", "nccl4py")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    names = registry.names()
    parser.add_argument("--engine", choices=names, help="look at one engine, and exit with 1 if it can't be launched")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _doctor(args: argparse.Namespace) -> int:
    """`tvm-axe doctor`"""
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
