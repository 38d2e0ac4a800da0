"""Which values of extents that aren't known a function is scheduled for: those that a user says, or the usual ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from tvm import tirx

from tvm_axe.analysis.sizes import unknown_extents
from tvm_axe.errors import InputError

__all__ = ["MADE_OF", "Values", "check_values", "names_of", "representatives"]

MADE_OF = "axe.made_of"
"""The attribute of a function that has one variable for a product of several: the names of those, by its own."""

Values = Mapping[str, Sequence[int]]
"""The representatives of a model's unknown extents, by the names of their variables."""


def representatives(func: tirx.PrimFunc, values: Values, usual: Sequence[int]) -> dict[tirx.Var, tuple[int, ...]]:
    """Return the representatives of each of a function's unknown extents, in rising order.

    One that is made of several, of which values are said, has their products.

    Parameters
    ----------
    func : PrimFunc
        The function.
    values : mapping
        What is said, by names.
    usual : sequence of int
        Those of variables of which nothing is said.
    """
    made_of = (func.attrs or {}).get(MADE_OF, {})
    found: dict[tirx.Var, tuple[int, ...]] = {}
    for var in unknown_extents(func):
        name = str(var.name)
        parts = [values[str(part)] for part in made_of.get(name, ()) if str(part) in values]
        products = map(math.prod, itertools.product(*parts)) if parts else usual
        found[var] = tuple(sorted({*values.get(name, products)}))
    return found


def check_values(values: Values, names: Collection[str]) -> None:
    """Check representatives against the variables that shapes have.

    Raises
    ------
    InputError
        If one is of a variable that no shape has, or none is given, or one isn't a whole number from 1 on.
    """
    for name, own in values.items():
        if name not in names:
            known = f"those that there are: {', '.join(sorted(names))}" if names else "all extents are known"
            raise InputError(f"values: no shape has the variable {name!r}; {known}")
        if not own or not all(isinstance(value, int) and value > 0 for value in own):
            raise InputError(
                f"values: {name} has {own!r}; some whole numbers from 1 on are needed, such as (1, 16, 128)"
            )


def names_of(functions: Iterable[object]) -> set[str]:
    """The names of the variables that functions' shapes have, and of those that they are made of."""
    found: set[str] = set()
    for func in functions:
        if isinstance(func, tirx.PrimFunc):
            found |= {str(var.name) for var in unknown_extents(func)}
            found |= {str(part) for parts in (func.attrs or {}).get(MADE_OF, {}).values() for part in parts}
    return found
