"""What pins a value is a call that leaves it as it is: in the form that is asked for, along other axes in any."""

from __future__ import annotations

from tvm_axe.relax.forms import WHOLE, Form
from tvm_axe.relax.ways import Strategy

__all__ = ["Holding"]


class Holding:
    """The ways to leave a value as it is; an operator as `tvm_axe.relax.strategies` has them.

    Parameters
    ----------
    form : Form, optional
        The one that it is to be held in; any if left out.
    """

    operations: tuple[int, ...] = (0,)

    def __init__(self, form: Form | None = None) -> None:
        self.form = form

    def strategies(self, seeds: frozenset[tuple[int, Form]]) -> list[Strategy]:
        """The ways, of forms that neighbours give or want."""
        if self.form is not None:
            return [Strategy((self.form,), (self.form,))]
        forms = dict.fromkeys([WHOLE, Form(partial="sum"), *(form for _, form in sorted(seeds, key=str))])
        return [Strategy((form,), (form,)) for form in forms]
