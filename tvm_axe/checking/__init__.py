"""The oracle: whether a schedule computes what its function says, and where it goes wrong if it doesn't.

From below: `comparing` says what of a difference rounding explains, `inputs` draws arrays, `exactness` finds the
integers that a function computes without rounding, `reference` runs a function as it was before any primitive, for
which `products` has numpy multiply large matrices; `stages` and `tracing` find the stage and the primitive that are to
blame, and `oracle` is `tvm_axe.check`.
"""

from tvm_axe.checking.oracle import check
from tvm_axe.checking.report import CheckReport, Mismatch

__all__ = ["CheckReport", "Mismatch", "check"]
