"""Which array is which weight: parameters of a model's functions, and what a session is given for them, by name.

Models are imported with other names than their checkpoints have: ``layers.0.up.weight`` may be the parameter
``layers_0_up_weight``, or ``p_layers_0_up_weight`` of what PyTorch exported. So a name is looked for as it is, and then
without regard to such differences.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tvm_axe.errors import InputError
from tvm_axe.executable.arguments import array_of
from tvm_axe.executable.safetensors import read_safetensors
from tvm_axe.executable.signatures import ARRAY, TUPLE, Param, Signature

__all__ = ["Weight", "matched_weights", "weight_params"]

Weight = np.ndarray | tuple[np.ndarray, ...]
"""The array of a parameter, or those of one that is a tuple."""

_PREFIXES = ("p_", "b_", "c_")  # what torch.export puts before parameters, buffers and constants


def weight_params(functions: Sequence[Signature], given: Sequence[str] = ()) -> dict[str, Param]:
    """The parameters of a model's functions that are weights, by name, each once.

    Parameters
    ----------
    functions : sequence of Signature
        The model's.
    given : sequence of str
        What weights are given for: that is what weights of a function are that doesn't say how many of its parameters
        are inputs.

    Raises
    ------
    InputError
        If functions have different weights of one name.
    """
    found: dict[str, Param] = {}
    homes: dict[str, str] = {}
    own = _Names(given)
    for function in functions:
        count = function.num_input
        for n, param in enumerate(function.params):
            if n < count if count is not None else not own.of(param.name):
                continue
            if found.setdefault(param.name, param) != param:
                raise InputError(
                    f"load: {homes[param.name]} takes the weight {found[param.name]}, and {function.name} takes "
                    f"{param}; functions share what has one name, so name one of them otherwise"
                )
            homes.setdefault(param.name, function.name)
    return found


def matched_weights(functions: Sequence[Signature], params: Any) -> dict[str, Weight]:
    """The array of each weight, by the name of the parameter; nothing of it is copied if it is in the host's memory.

    Parameters
    ----------
    functions : sequence of Signature
        The model's.
    params : mapping, sequence, path or None
        Arrays by name, of numpy or of what speaks DLPack; arrays in the order of the parameters; or a path, or several,
        of what `read_safetensors` reads.

    Raises
    ------
    InputError
        If weights are missing, or are given that no function takes, or have another shape or type: all of them are
        listed.
    """
    if isinstance(params, str | Path) or (
        isinstance(params, list | tuple) and params and all(isinstance(each, str | Path) for each in params)
    ):
        params = read_safetensors(params)
    if params is not None and not isinstance(params, Mapping | Sequence):
        raise InputError(
            f"load: params is {type(params).__name__}; valid are arrays by name, arrays in the order of the "
            "parameters, and the path of a safetensors file"
        )
    if isinstance(params, Sequence):
        return _matched(weight_params(functions), dict(enumerate(params)), by_name=False)
    given = {} if params is None else {str(name): value for name, value in params.items()}
    return _matched(weight_params(functions, list(given)), given, by_name=True)


def _matched(wanted: Mapping[str, Param], given: Mapping[Any, Any], by_name: bool) -> dict[str, Weight]:
    names = _Names(given) if by_name else None
    found: dict[str, Weight] = {}
    problems: list[str] = []
    used: set[Any] = set()
    for n, param in enumerate(wanted.values()):
        keys = names.of(param.name) if names is not None else [n] if n in given else []
        used.update(keys)
        if len(keys) > 1:
            problems.append(f"{param.name} could be any of {', '.join(map(repr, keys))}")
        elif not keys:
            problems.append(f"{param} is missing")
        else:
            value, why = _array(param, given[keys[0]])
            if value is None:
                problems.append(f"{param.name} {why}")
            else:
                found[param.name] = value
    problems += [
        f"{key!r} is given, and no function takes such a weight: leave it out" for key in given if key not in used
    ]
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise InputError(
            f"load: {len(wanted)} weight{'s' * (len(wanted) != 1)} are taken and {len(given)} given, and that is wrong "
            f"of them:\n{lines}"
        )
    return found


def _array(param: Param, value: Any) -> tuple[Weight | None, str]:
    """The array, or arrays, that a value is; None and what is wrong."""
    if param.kind == TUPLE:
        if not isinstance(value, Sequence) or len(value) != len(param.fields):
            size = f"{len(value)} values" if isinstance(value, Sequence) else type(value).__name__
            return None, f"is {len(param.fields)} arrays in a sequence; got {size}"
        arrays = [_array(field, each) for field, each in zip(param.fields, value)]
        wrong = [f"has at {field.name} what {why}" for field, (_, why) in zip(param.fields, arrays) if why]
        if wrong:
            return None, "; it ".join(wrong)
        return tuple(array for array, _ in arrays if isinstance(array, np.ndarray)), ""
    if param.kind != ARRAY:
        return None, f"is {param.kind}, which no session takes as a weight; make it an input"
    # A parameter of PyTorch is taken without what its gradient needs.
    value = value.detach() if getattr(value, "requires_grad", False) else value
    array, _, why = array_of(param, value)
    return array, why


class _Names:
    """What is given, looked up by the name of a parameter."""

    def __init__(self, given: Mapping[Any, Any] | Sequence[str]) -> None:
        self._exact = set(given)
        self._plain: dict[str, list[str]] = {}
        for name in given:
            self._plain.setdefault(_plain(name), []).append(name)

    def of(self, name: str) -> list[str]:
        """Those that may be meant; one if all is well."""
        if name in self._exact:
            return [name]
        plain = _plain(name)
        stems = [plain, *(plain.removeprefix(prefix) for prefix in _PREFIXES if plain.startswith(prefix))]
        return next((self._plain[stem] for stem in stems if stem in self._plain), [])


def _plain(name: str) -> str:
    return re.sub(r"\W", "_", name).lower()
