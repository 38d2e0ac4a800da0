"""A compiled Relax model, whoever runs it: its functions, and the one that is called with arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm.target import Target

from tvm_axe.errors import LowerError
from tvm_axe.executable.arguments import Input
from tvm_axe.executable.base import Executable
from tvm_axe.executable.signatures import Signature

__all__ = ["Model"]


class Model(Executable):
    """A Relax model; one of a single function is called as a function is.

    Parameters
    ----------
    functions : sequence of Signature
        Of the model as it was given.
    packed : bool
        Whether its functions take weights that another function has packed.
    module, target, tuned
        See `Executable`.
    """

    def __init__(
        self,
        functions: Sequence[Signature],
        packed: bool,
        module: tvm.IRModule,
        target: Target,
        tuned: Mapping[str, float],
    ) -> None:
        super().__init__(functions[0].name if len(functions) == 1 else "model", module, target, tuned)
        self.functions, self.packed = tuple(functions), packed

    @property
    def outputs(self) -> tuple[str, ...]:
        return self._function().outputs

    def _inputs(self) -> Sequence[Input]:
        inputs = self._function().inputs
        assert inputs is not None  # it would be refused
        return inputs

    def _function(self) -> Signature:
        """The one function that is called with arrays; an error if the model isn't called so."""
        if len(self.functions) != 1:
            names = ", ".join(each.name for each in self.functions)
            raise LowerError(
                f"the model has {len(self.functions)} functions ({names}); call them by name: "
                f'{self._loading()}, then model["{self.functions[0].name}"](...)'
            )
        (only,) = self.functions
        if self.packed:
            raise LowerError(
                f"{only.name} takes packed weights, which are packed once: {self._loading()}, then "
                f'model["{only.name}"](...)'
            )
        if only.inputs is None:
            raise LowerError(
                f"{only.name} takes what is no array of known dimensions ({', '.join(map(str, only.params))}); call it "
                f'as {self._loading()}, then model["{only.name}"](...)'
            )
        return only

    def _loading(self) -> str:
        """How a session is had."""
        return "model = exe.load(weights)"
