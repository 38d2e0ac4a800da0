"""What the command line reads: functions from Python files, arrays from npz files, and schedules' traces.

Everything that a person can get wrong here ends as an `InputError` that names the file and says what it should hold.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from tvm import s_tir
from tvm.error import DiagnosticError

from tvm_axe import _tvm
from tvm_axe.analysis.parameters import Param
from tvm_axe.errors import AxeError, InputError

__all__ = [
    "call_given",
    "load_attribute",
    "load_file",
    "match_arrays",
    "read_npz",
    "read_trace",
    "write_trace",
]


@functools.cache
def load_file(path: Path) -> ModuleType:
    """Import a Python file as a module of its own, once, with its folder on the import path as `python FILE` has it.

    The path is absolute, as Python writes it into what it compiles from the file.

    Raises
    ------
    InputError
        When there is no such file or when it cannot be imported; the message holds the file's own error.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    name = f"tvm_axe_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InputError(f"{path}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    # TVMScript and dataclasses look a module up by its name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InputError(f"{path}{_line_of(error, path)}: cannot be imported: {_one_line(error)}") from error
    return module


def load_attribute(spec: str, accepts: Callable[[Any], bool], kind: str) -> tuple[Any, ModuleType]:
    """Load what `FILE.py:NAME` names.

    Parameters
    ----------
    spec
        The file's path and, behind the last colon, a name of its module.
    accepts
        Whether an object is of the wanted kind.
    kind
        The wanted kind in words, with its article, for the messages.

    Returns
    -------
    The object and the module it is in.

    Raises
    ------
    InputError
        When the file, the name or its kind is wrong; the message lists the names that would do.
    """
    filename, colon, name = spec.rpartition(":")
    if not colon or not filename or not name:
        raise InputError(f"{spec!r}: {kind} is named as FILE.py:NAME")
    module = load_file(Path(filename).absolute())
    valid = sorted(n for n, value in vars(module).items() if not n.startswith("_") and accepts(value))
    hint = f"it has {', '.join(valid)}" if valid else "it has none"
    if not hasattr(module, name):
        raise InputError(f"{filename}: has no {name!r}; needed is {kind}: {hint}")
    value = getattr(module, name)
    if not accepts(value):
        raise InputError(f"{filename}: {name!r} is a {type(value).__name__}; needed is {kind}: {hint}")
    return value, module


def call_given(spec: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call the function that `FILE.py:NAME` names.

    Raises
    ------
    InputError
        If it raises; the message has the file's own line, and what went wrong there in a sentence. What a fault of this
        package raises is passed on.
    """
    path = Path(spec.rpartition(":")[0]).absolute()
    try:
        return function(*arguments)
    except Exception as error:
        if not isinstance(error, AxeError | DiagnosticError) and _is_raised_here(error):
            raise
        reason = str(error) if isinstance(error, AxeError) else _reason(error)
        raise InputError(f"{path.name}{_line_of(error, path)}: {reason}") from error


def _reason(error: Exception) -> str:
    """What an error says; of upstream's, which renders the whole module before, the reason."""
    reason = _tvm.schedule_error_reason(error)
    return _one_line(error) if reason == str(error) else f"{type(error).__name__}: {reason}"


def _is_raised_here(error: Exception) -> bool:
    """Whether this package's own code raised it, and not the call of what was given, which may want other arguments."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    file = __file__ if trace is None else trace.tb_frame.f_code.co_filename
    return file != __file__ and Path(file).is_relative_to(Path(__file__).parents[1])


def read_npz(path: str) -> dict[str, np.ndarray]:
    """Read all the arrays of an npz file by name.

    Raises
    ------
    InputError
        When the file is missing, damaged, not an npz file, or holds pickled objects.
    """
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise ValueError("it holds one array without a name")
        with loaded as archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except Exception as error:
        # Damaged bytes come up as almost any error out of zipfile, zlib and numpy's header parser.
        raise InputError(
            f"{path}: not a readable npz file of plain arrays ({_one_line(error)}); "
            "write it with numpy.savez(path, NAME=array, ...)"
        ) from error


def match_arrays(path: str, arrays: Mapping[str, np.ndarray], inputs: Sequence[Param]) -> list[np.ndarray]:
    """Put the arrays of a file in the order of a function's inputs.

    Raises
    ------
    InputError
        When names are missing or left over, or an array's shape or dtype is another; the message lists all of them.
    """
    names = {param.name for param in inputs}
    faults = [f"{param} is missing" for param in inputs if param.name not in arrays]
    faults += [f"{name} is not an input" for name in arrays if name not in names]
    for param in inputs:
        array = arrays.get(param.name)
        if array is not None and (array.shape != param.shape or array.dtype.name != param.dtype):
            faults.append(f"{param.name} is {array.dtype.name}{list(array.shape)}, needed is {param}")
    if faults:
        raise InputError(f"{path}: {'; '.join(faults)} (the inputs are {', '.join(map(str, inputs))})")
    return [np.ascontiguousarray(arrays[param.name]) for param in inputs]


def read_trace(path: str) -> Callable[[s_tir.Schedule], None]:
    """What applies the trace that a file holds to a schedule of the function that it was made for.

    Raises
    ------
    InputError
        When the file cannot be read or isn't JSON; when called, if the trace isn't one of this function.
    """
    try:
        trace = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise InputError(f"{path}: not a schedule's trace as JSON: {error}") from error

    def apply(sch: s_tir.Schedule) -> None:
        try:
            s_tir.schedule.Trace.apply_json_to_schedule(trace, sch)
        # Upstream raises whatever its C++ side throws.
        except Exception as error:
            raise InputError(f"{path}: the trace doesn't apply to this function: {_one_line(error)}") from error

    return apply


def write_trace(path: str, trace: s_tir.schedule.Trace) -> None:
    """Write a trace for `read_trace`.

    Raises
    ------
    InputError
        When the file cannot be written.
    """
    try:
        Path(path).write_text(json.dumps(_tvm.plain(trace.as_json())) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error


def _one_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _line_of(error: BaseException, path: Path) -> str:
    """`:LINE` where the file's own code was when the error came, as far as it is known."""
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == str(path) else None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    said = re.search(rf"^ --> {re.escape(str(path))}:(\d+):", str(error), re.MULTILINE)  # as TVMScript's parser says it
    line = line if said is None else int(said[1])
    return f":{line}" if line else ""
