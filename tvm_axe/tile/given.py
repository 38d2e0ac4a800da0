"""The strides of tensors that a program is called with, beside those of its parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tvm_axe.errors import InputError
from tvm_axe.tile.assuming import Assumption
from tvm_axe.tile.points import evaluate
from tvm_axe.tile.strides import overlap, reach
from tvm_axe.tile.walking import variables_in

if TYPE_CHECKING:
    from tvm_axe.tile.arguments import Parameter

_MOST = int(np.iinfo(np.int32).max)


@dataclass(frozen=True)
class Given:
    """A tensor for a parameter with strides; of the parameter's rank.

    Attributes
    ----------
    param : Parameter
        The parameter.
    shape, strides : tuple of int
        The tensor's, strides in elements.
    """

    param: Parameter
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def matters(self, dimension: int) -> bool:
        """Whether any two elements are as far apart as the stride along a dimension says."""
        return self.shape[dimension] > 1 and 0 not in self.shape


def settle(
    name: str, tensors: Sequence[Given], sizes: Mapping[str, int | float], assumptions: Sequence[Assumption]
) -> tuple[list[tuple[int, ...]], dict[str, tuple[int, str]]]:
    """Check tensors' strides; return those to call the program `name` with, and what its variables are, and in which.

    Strides along dimensions of one element are those that the program wants, and of what no other dimension says, as it
    assumes. `sizes` are its open extents and its scalars, by name.

    Raises
    ------
    InputError
        A stride is negative, or isn't the parameter's; a tensor that is written has elements that overlap; one reaches
        further than the parameter's integers count.
    """
    variables: dict[str, tuple[int, str]] = {}
    for sure in (True, False):
        for given in tensors:
            for dimension, (own, stride) in enumerate(zip(given.param.steps, given.strides)):
                if isinstance(own, str) and own not in sizes and given.matters(dimension) is sure:
                    value = stride if sure else _assumed(own, stride, assumptions)
                    variables.setdefault(own, (value, given.param.name))
    known = {**sizes, **{each: value for each, (value, _) in variables.items()}}
    return [_settled(name, given, known, variables) for given in tensors], variables


def _assumed(own: str, stride: int, assumptions: Sequence[Assumption]) -> int:
    """A stride that may be any, as a program assumes: the given one, or the next one that is positive."""
    about = [each for each in assumptions if each.name == own]
    divisor = math.lcm(*(each.divisor for each in about))
    least = max(1, stride, *(each.least for each in about if each.least is not None))
    return -(-least // divisor) * divisor


def _settled(
    name: str, given: Given, known: Mapping[str, int | float], variables: Mapping[str, tuple[int, str]]
) -> tuple[int, ...]:
    """A tensor's strides as the program wants them, which they are where it matters."""
    param, wanted = given.param, tuple(number_of(own, known) for own in given.param.steps)
    for dimension, (own, stride, want) in enumerate(zip(param.steps, given.strides, wanted)):
        if not given.matters(dimension):
            continue
        if stride < 0:
            raise InputError(
                f"{name}: {param.name} has stride {stride} along dimension {dimension}; valid are strides of 0 and "
                "more: copy it"
            )
        if stride != want:
            source = variables.get(str(own), (0, ""))[1]
            said = "" if isinstance(own, int) else f", which is {own}" + (f" in {source}" if source else "")
            raise InputError(
                f"{name}: {param.name} has stride {stride} along dimension {dimension}, wanted is {want}{said}; got "
                f"the strides {given.strides} for {param}"
            )
    if 0 in given.shape:
        return wanted
    if param.is_output:
        found = overlap(given.shape, wanted)
        if found is not None:
            raise InputError(f"{name} writes {param.name}, and {found}; got the strides {given.strides}")
    last = reach(given.shape, wanted)
    if last > _MOST and not param.is_wide:
        raise InputError(
            f"{name}: {param.name} reaches over {last + 1} elements, more than int32 counts; valid are extents and "
            "strides of int64 for such a tensor"
        )
    return wanted


def number_of(size: Any, known: Mapping[str, Any]) -> int:
    """An extent or a stride as a number: one, a variable's name, or an expression, of what variables are by name."""
    if isinstance(size, int):
        return size
    if isinstance(size, str):
        return int(known[size])
    return int(evaluate(size, {var: int(known[str(var.name)]) for var in variables_in(size)}))
