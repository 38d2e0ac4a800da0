"""What a check found, for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tvm_axe.errors import CheckError
from tvm_axe.notebook import preformatted

__all__ = ["LOOSE", "CheckReport", "Mismatch"]

LOOSE = 0.1
"""The share of a result's norm beyond which what rounding explains leaves little to be judged by."""


@dataclass(frozen=True)
class Mismatch:
    """The first result that was wrong.

    Attributes
    ----------
    where : str
        On what it was computed, one of the report's `ran`.
    data : str
        Of what it was computed: the kind of numbers, and the seed.
    output : str
        The parameter.
    index : tuple[int, ...]
        Its first element that is wrong.
    expected, got : float or int
        What that element must be, and what it is.
    why : str
        What is wrong, in words that follow the parameter's name.
    stage : str
        The stage that computed it, as far as that can be told: the first that left something wrong.
    blame : str
        The instruction of the schedule's trace after which results are wrong, with the primitive of this package that
        it belongs to; or that there is no trace.
    """

    where: str
    data: str
    output: str
    index: tuple[int, ...]
    expected: float | int
    got: float | int
    why: str
    stage: str
    blame: str

    def __str__(self) -> str:
        place = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        return "\n".join(
            [
                f"wrong on {self.where}, of {self.data}: {self.output} {self.why}",
                f"  first wrong element: {self.output}{place} is {self.got}, and should be {self.expected}",
                f"  stage: {self.stage}",
                f"  cause: {self.blame}",
            ]
        )


@dataclass(frozen=True)
class CheckReport:
    """What `tvm_axe.check` ran, and what it found.

    Attributes
    ----------
    name : str
        The function's name.
    ran : tuple[str, ...]
        What was run and compared with the reference.
    rounds : int
        On how many sets of arrays each was run.
    exact : int or None
        Integers of this magnitude were computed without rounding and compared exactly; None if the function rounds
        even those, so that all was compared within what rounding explains.
    errors : Mapping[str, float]
        By output, the largest relative error that was seen, norm over norm.
    allowed : Mapping[str, float]
        By output, the largest one beyond its type's own that rounding was taken to explain.
    mismatch : Mismatch or None
        What was wrong; None if all was right.
    judged : Mapping[str, int]
        By output, how many of its elements were compared, where that was a sample.
    """

    name: str
    ran: tuple[str, ...]
    rounds: int
    exact: int | None
    errors: Mapping[str, float]
    allowed: Mapping[str, float]
    mismatch: Mismatch | None = None
    judged: Mapping[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether all was right."""
        return self.mismatch is None

    def __str__(self) -> str:
        if self.mismatch is not None:
            return f"{self.name}: {self.mismatch}"
        exact = "integers rounded too" if self.exact is None else f"integers up to {self.exact} exact"
        errors = ", ".join(f"{name} {error:.1e}" for name, error in self.errors.items())
        loose = [name for name, slack in self.allowed.items() if slack > LOOSE]
        if loose:
            errors += f" (hardly judged, as the function itself rounds so much: {', '.join(loose)})"
        sample = "".join(f"; {count} elements of {name} compared" for name, count in self.judged.items())
        return (
            f"{self.name}: right on {' and on '.join(self.ran)}, {self.rounds} sets of arrays each; {exact}; "
            f"relative errors: {errors}{sample}"
        )

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def raise_if_wrong(self) -> None:
        """Raise a `CheckError` with this report if something was wrong."""
        if self.mismatch is not None:
            raise CheckError(self)
