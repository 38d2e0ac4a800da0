"""Running commands on hosts through `ssh`, or what takes its place: in the same directory, with the same paths."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO, NamedTuple

from tvm_axe.collective.dealing import is_here
from tvm_axe.errors import InputError

__all__ = ["PASSED", "PATIENCE", "Answer", "ask", "check", "command_on", "launcher_of"]

PATIENCE = 60.0  # seconds that a host may take to say what it is asked
_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")  # nobody is asked, and who doesn't answer isn't there
PASSED = ("PYTHONPATH", "CUDA_VISIBLE_DEVICES")  # variables that processes on other hosts are told
_NO_FOLDER, _NO_PROGRAM, _UNREACHED = 121, 122, 255  # exit statuses: the first two are said here, the last is ssh's


class Answer(NamedTuple):
    """What came of a command on a host.

    Attributes
    ----------
    output : str
        What it wrote to stdout.
    fault : str
        Why it wasn't run or failed; empty if it came to an end.
    remedy : str
        What would help.
    """

    output: str
    fault: str = ""
    remedy: str = ""


def launcher_of(given: str | None) -> str:
    """Return what starts commands on other hosts: what is given, else what Hydra is told by HYDRA_LAUNCHER_EXEC."""
    return given or os.environ.get("HYDRA_LAUNCHER_EXEC") or "ssh"


def command_on(host: str, program: Sequence[str], variables: Mapping[str, str], launcher: str) -> list[str]:
    """Return the command that runs a program with its arguments on another host, told some variables."""
    return _through(host, f"cd {shlex.quote(os.getcwd())} && exec {_line(program, variables)}", launcher)


def _through(host: str, line: str, launcher: str) -> list[str]:
    return [launcher, *_OPTIONS, host, line]


def _line(program: Sequence[str], variables: Mapping[str, str]) -> str:
    told = {**variables, **{name: os.environ[name] for name in PASSED if name in os.environ}}
    return shlex.join(["env", *(f"{name}={value}" for name, value in told.items()), *program])


def ask(hosts: Sequence[str], program: Sequence[str], launcher: str, seconds: float = PATIENCE) -> dict[str, Answer]:
    """Run a program on each of these hosts, all at the same time, and return what came of it.

    Parameters
    ----------
    hosts : sequence of str
        Their names; on this machine it is run without the launcher.
    program : sequence of str
        The path of the program, and its arguments.
    launcher : str
        What takes the arguments that ``ssh`` takes.
    seconds : float
        How long it may take.
    """
    different = list(dict.fromkeys(hosts))
    with ThreadPoolExecutor(max_workers=min(32, max(1, len(different)))) as pool:
        answers = pool.map(lambda host: _asked(host, program, launcher, seconds), different)
        return dict(zip(different, answers))


def _asked(host: str, program: Sequence[str], launcher: str, seconds: float) -> Answer:
    folder = os.getcwd()
    line = (
        f"cd {shlex.quote(folder)} || exit {_NO_FOLDER}; [ -x {shlex.quote(program[0])} ] || exit {_NO_PROGRAM}; "
        f"exec {_line(program, {})}"
    )
    command = ["/bin/sh", "-c", line] if is_here(host) else _through(host, line, launcher)
    with (
        tempfile.TemporaryFile("w+", errors="replace") as out,
        tempfile.TemporaryFile("w+", errors="replace") as errors,
    ):
        # Files, as a pipe would be waited for that something keeps open which the launcher has left behind.
        try:
            code = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, timeout=seconds, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return Answer("", f"no answer in {seconds:g} s", f"{launcher} {host} true must come to its end")
        except OSError as error:
            return Answer("", f"{launcher} can't be started: {error.strerror}", "--launcher names another program")
        output, (*_, last) = _text(out), ["", *_text(errors).strip().splitlines()]
    if code == _UNREACHED:
        remedy = f"{launcher} {host} must work without a question: a key that the host knows, and a host that is known"
        return Answer("", f"not reached by {launcher}: {last or 'it says nothing'}", remedy)
    if code == _NO_FOLDER:
        return Answer("", f"no folder {folder} there", "folders must have the same paths on all hosts")
    if code == _NO_PROGRAM:
        return Answer("", f"no {program[0]} there", "the package's environment must have the same path on all hosts")
    return Answer(output, (last or f"exit status {code}") if code else "")


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def check(hosts: Sequence[str], program: Sequence[str], launcher: str) -> None:
    """Refuse hosts on which a program can't be started.

    Raises
    ------
    InputError
        If one isn't reached or lacks the directory or the program; names all of them.
    """
    away = [host for host in hosts if not is_here(host)]
    answers = ask(away, [program[0], "-c", ""], launcher)
    faults = [f"{host}: {answer.fault}" for host, answer in answers.items() if answer.fault]
    if faults:
        names = ",".join(dict.fromkeys(hosts))
        raise InputError(f"--hosts: {'; '.join(faults)}; tvm-axe doctor --hosts {names} says what would help")
