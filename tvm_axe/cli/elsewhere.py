"""What `tvm-axe doctor` finds on other hosts: what the one there says, and what differs between them."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from tvm_axe.cli.given import MAIN
from tvm_axe.collective import registry
from tvm_axe.collective.dealing import is_here, known_as, named
from tvm_axe.collective.engine import Finding
from tvm_axe.collective.mpi import LIBRARY
from tvm_axe.collective.reaching import Answer, ask
from tvm_axe.errors import InputError
from tvm_axe.processes import interpreter

__all__ = ["findings_on", "reach"]

_SECONDS = 5.0  # that a connection may take
_NOBODYS = 61021  # a port like those that hosts of a job connect to, at which nobody need listen
_REMEDY = "a name that is known here, and a firewall that lets hosts of a job connect to each other's ports"
_SAME = ("tvm-axe", "apache-tvm", "apache-tvm-ffi")  # of one version on all hosts of a job


def findings_on(hosts: Sequence[str], engine: str, launcher: str) -> dict[str, list[Finding]]:
    """Return what there is on each of these hosts of what an engine needs, all asked at the same time.

    Differences are from the first that has answered.

    Raises
    ------
    InputError
        If there are none, or one has no name.
    """
    names = [named(host) for host in hosts]
    if not names:
        raise InputError("--hosts: names no host; as in --hosts a,b")
    with socket.create_server(("", 0), backlog=len(names)) as listener:
        home = f"{known_as(names)}:{listener.getsockname()[1]}"
        ways = [option for way in dict.fromkeys([home, *names]) for option in ("--reach", way)]
        answers = ask(names, interpreter(MAIN, "doctor", "--json", "--engine", engine, *ways), launcher)
    reports = {name: _report(answer) for name, answer in answers.items()}
    first = next((name for name, report in reports.items() if report), None)
    found = {}
    for name, report in reports.items():
        if report is None or first is None:
            answer = answers[name]
            remedy = answer.remedy or f"pip install tvm-axe=={metadata.version('tvm-axe')} there"
            found[name] = [Finding("host", answer.fault or "tvm-axe doctor says nothing there", remedy)]
            continue
        about = [Finding(**each) for each in (*report["engines"][engine], *report["reach"])]
        versions = ", ".join(f"{package} {version}" for package, version in report["versions"].items() if version)
        found[name] = [
            Finding("host", "this machine" if is_here(name) else f"reached by {launcher}"),
            Finding("versions", versions),
            Finding("cpu", report["cpu"]),
            *about,
            *(_differences(report, reports[first] or {}, engine, first) if name != first else []),
        ]
    return found


def _report(answer: Answer) -> dict[str, Any] | None:
    """What the doctor said, behind what a shell may have said before."""
    lines = [line for line in answer.output.splitlines() if line.startswith("{")]
    try:
        report = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return report if isinstance(report, dict) and report.keys() >= {"versions", "engines", "cpu", "reach"} else None


def _differences(there: Mapping[str, Any], first: Mapping[str, Any], engine: str, name: str) -> list[Finding]:
    found = []

    def compare(what: str, one: str | None, other: str | None, remedy: str) -> None:
        if one != other:
            found.append(Finding(what, f"{one or 'missing'}, and {other or 'missing'} on {name}", remedy))

    versions = there["versions"], first["versions"]
    python, other = (".".join(each["python"].split(".")[:2]) for each in versions)
    compare("python", python, other, f"Python {other} there")
    for package in (*_SAME, *registry.find(engine).packages):
        wanted = versions[1].get(package)
        remedy = f"pip install {package}=={wanted} there" if wanted else f"pip uninstall {package} there"
        compare(package, versions[0].get(package), wanted, remedy)
    compare(LIBRARY, _library(there, engine), _library(first, engine), f"the MPI library of {name} there")
    generic = '--target \'{"kind": "llvm", "mcpu": "x86-64-v3"}\', or another that all of them are'
    compare("cpu", there["cpu"], first["cpu"], f"kernels are compiled for rank 0's: {generic}")
    return found


def _library(report: Mapping[str, Any], engine: str) -> str | None:
    return next((each["state"] for each in report["engines"][engine] if each["what"] == LIBRARY), None)


def reach(places: Sequence[str]) -> list[Finding]:
    """Return which of other hosts are reached from here.

    Parameters
    ----------
    places : sequence of str
        ``HOST:PORT`` of a port that is to take a connection, or ``HOST`` of a host that is to take or refuse one, if it
        isn't this one.
    """
    return [_reached(place) for place in places if ":" in place or not is_here(place)]


def _reached(place: str) -> Finding:
    host, has_port, port = place.rpartition(":") if ":" in place else (place, "", "")
    what, state = ("way back", f"{host} takes connections") if has_port else (f"way to {host}", "it answers")
    try:
        socket.create_connection((host, int(port) if has_port else _NOBODYS), _SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        if has_port or not isinstance(error, ConnectionRefusedError):
            return Finding(what, f"{place}: {error}", _REMEDY)
    return Finding(what, state)
