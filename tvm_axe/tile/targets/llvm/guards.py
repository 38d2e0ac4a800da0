"""Bounds checks on every load and store, for tests: what a kernel touches outside of a buffer is reported, not done.

A guarded index is a call, evaluated only where the access is, so that guards change nothing about what is under an
``if``. It returns the index where that is inside and otherwise 0, after having noted the first such access; when all
blocks are done the note is read and raised as an error. The functions are written in LLVM's language, which has what
TensorIR doesn't: a compare-and-exchange, since blocks run in parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from tvm_axe import _tvm
from tvm_axe.errors import TileError

SOURCE = """
@axe_violation = internal global [2 x i64] [i64 -1, i64 0]
define linkonce_odr i64 @axe_index(i64 %i, i64 %extent, i64 %access) {
  %inside = icmp ult i64 %i, %extent
  br i1 %inside, label %good, label %bad
good:
  ret i64 %i
bad:
  %found = cmpxchg ptr @axe_violation, i64 -1, i64 %access seq_cst seq_cst
  %first = extractvalue { i64, i1 } %found, 1
  br i1 %first, label %note, label %done
note:
  store i64 %i, ptr getelementptr ([2 x i64], ptr @axe_violation, i64 0, i64 1)
  br label %done
done:
  ret i64 0
}
define linkonce_odr i64 @axe_violated(i64 %field) {
  %at = getelementptr [2 x i64], ptr @axe_violation, i64 0, i64 %field
  %value = load i64, ptr %at
  ret i64 %value
}
define linkonce_odr void @axe_forgive() {
  store i64 -1, ptr @axe_violation
  ret void
}
"""

_REPORT = "axe.tile.out_of_bounds"


def _report(accesses: str, access: int, index: int) -> None:
    raise TileError(f"out of bounds: {accesses.splitlines()[access]}, got {index}")


_tvm.register_functions({_REPORT: _report})
tvm_ffi.register_error("TileError", TileError)  # which it stays on its way through compiled code


class Guards:
    """The guarded accesses of one kernel."""

    def __init__(self) -> None:
        self._accesses: dict[str, int] = {}

    def indices(self, name: str, shape: Sequence[Any], indices: Sequence[Any]) -> list[Any]:
        """The indices of an access to the buffer called `name`, each behind its check; of vectors all lanes."""
        return [self._index(f"dimension {d} of {name}", e, i) for d, (e, i) in enumerate(zip(shape, indices))]

    def _index(self, what: str, extent: Any, index: Any) -> Any:
        if isinstance(index, tirx.Ramp):
            lanes = int(index.lanes)
            return T.Ramp(self._index(what, extent - (lanes - 1), index.base), index.stride, lanes)
        text = f"{what} takes an index from 0 to {extent} - 1"
        access = self._accesses.setdefault(text, len(self._accesses))
        return T.call_extern("int64", "axe_index", T.Cast("int64", index), T.Cast("int64", extent), T.int64(access))

    def raise_first(self) -> None:
        """Emit what raises the first violation, once all blocks are done."""
        access, index = (T.Bind(T.call_extern("int64", "axe_violated", T.int64(field))) for field in (0, 1))
        T.evaluate(T.call_extern("void", "axe_forgive"))
        with T.If(access >= T.int64(0)), T.Then():
            T.evaluate(T.call_packed(_REPORT, "\n".join(self._accesses), access, index))
