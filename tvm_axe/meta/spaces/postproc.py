"""A postprocessor behind upstream's rules: free weights take the layout in which the loops read them."""

from __future__ import annotations

from tvm import s_tir
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from tvm_axe import _tvm
from tvm_axe.records.packing import has_packing, split_packing

__all__ = ["RewriteFreeLayouts"]


@derived_object
class RewriteFreeLayouts(ms.postproc.PyPostproc):
    """Upstream's `RewriteLayout`, where what it makes can be split off; other schedules stay as they are.

    Upstream's own refuses a schedule that it can't rewrite, or ends the search, and doesn't see that a schedule packs
    already.
    """

    def _initialize_with_tune_context(self, context: ms.TuneContext) -> None:
        """There is nothing to know of it."""

    def apply(self, sch: s_tir.Schedule) -> bool:
        """Rewrite the layouts in `sch` if possible; no schedule is refused."""
        if not has_packing(sch.mod["main"]) and self._possible(sch.copy()):
            ms.postproc.RewriteLayout().apply(sch)
        return True

    def clone(self) -> RewriteFreeLayouts:
        """Another one, for another thread."""
        return RewriteFreeLayouts()

    @staticmethod
    def _possible(trial: s_tir.Schedule) -> bool:
        # It refuses a schedule, or raises; and a parameter may be left that is still read.
        try:
            rewritten = ms.postproc.RewriteLayout().apply(trial)
            return rewritten and split_packing(trial.mod["main"]).pack is not None
        except _tvm.UPSTREAM_ERRORS as error:
            _tvm.raise_own_fault(error)
            return False
