"""A postprocessor behind upstream's rules: free weights take the layout in which the loops read them."""

from __future__ import annotations

from tvm import s_tir
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from ..errors import TuneError
from .packing import has_packing, split_packing

__all__ = ["RewriteFreeLayouts"]


@derived_object
class RewriteFreeLayouts(ms.postproc.PyPostproc):
    """Upstream's `RewriteLayout`, where what it makes can be split off; other schedules stay as they are.

    Upstream's own gives up a schedule whose loops don't divide the weights, and doesn't see that a parameter is read
    twice or that a schedule packs already.
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
        if not ms.postproc.RewriteLayout().apply(trial):
            return False
        try:
            return split_packing(trial.mod["main"]).pack is not None
        except TuneError:
            return False
