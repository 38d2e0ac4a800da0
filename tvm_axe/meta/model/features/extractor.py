"""The features that the cost model learns from: upstream's rows, one for each store, and a row of ours behind them.

Upstream's 164 columns describe each store of the lowered program. Ours describe the candidate as a whole:

- `tvm_axe.meta.model.features.locality`: how the work is cut and balanced, the inner tile, strides, panels, traffic;
- `tvm_axe.meta.model.features.tiles`: tile kernels, of whose parameters a lowered program shows nothing;
- `tvm_axe.meta.model.features.knobs`: tile programs of others, whose knobs are tuned;
- `tvm_axe.meta.model.features.gpu`: occupancy, waves, memory transactions, bank conflicts;
- `tvm_axe.meta.model.features.communication`: of a distributed program, what it moves between devices.

The model's score of a candidate is the sum of what it says of each row, so a row of its own, rather than the same
columns in every row, keeps a candidate with many stores from counting its own more often. What a row hasn't is NaN.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence

import numpy as np
import tvm
from tvm import s_tir, tirx
from tvm.ir import IRModule
from tvm.ir.utils import derived_object
from tvm.runtime import Tensor
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.errors import TuneError
from tvm_axe.meta.model.features.communication import communication_columns
from tvm_axe.meta.model.features.gpu import gpu_columns
from tvm_axe.meta.model.features.knobs import knob_columns
from tvm_axe.meta.model.features.locality import hot_nest, locality
from tvm_axe.meta.model.features.nest import Nest, nests
from tvm_axe.meta.model.features.tiles import tile_columns
from tvm_axe.records.packing import has_packing, split_packing

__all__ = ["PER_STORE", "AxeFeatures", "columns_of", "context_for", "own_names"]

PER_STORE = 164
"""How many columns upstream's rows have, with its default options."""

_NO_NEST = Nest("main", (), (), False, {})


def columns_of(mod: IRModule, needed: float, target: Target) -> dict[str, float]:
    """Our columns for one candidate, by name: the same names in the same order whatever it is.

    Parameters
    ----------
    mod
        The scheduled module, with a function ``main``.
    needed
        Iterations of the hot nest of the workload before it was scheduled.
    target
        A resolved target.
    """
    found = nests(mod) or [_NO_NEST]
    return {
        **locality(found, needed, target),
        **tile_columns(found, target),
        **knob_columns(mod["main"]),
        **gpu_columns(found, target),
        **communication_columns(mod["main"]),
    }


def context_for(mod: IRModule, target: Target) -> ms.TuneContext:
    """A context to extract features in, on all cores, in which nothing can be searched."""
    nothing = ms.space_generator.ScheduleFn(lambda _: None, sch_rules=[], postprocs=[], mutator_probs={})
    strategy = ms.search_strategy.ReplayTrace()
    threads = len(os.sched_getaffinity(0))
    return _tvm.tune_context(mod, target, nothing, strategy, "features", 1, threads, logging.getLogger(__name__))


@functools.cache
def own_names() -> tuple[str, ...]:
    """The names of our columns, in their order."""
    nothing = IRModule({"main": tirx.PrimFunc([], tirx.Evaluate(0))})
    return tuple(columns_of(nothing, 1.0, Target({"kind": "llvm"})))


@derived_object
class AxeFeatures(ms.feature_extractor.PyFeatureExtractor):
    """Upstream's per-store features and ours, as a MetaSchedule feature extractor.

    A candidate has a row for each of its stores, then one of ours. Where upstream cannot lower a candidate, which is
    mostly one that won't compile either, there is one row of NaN in place of its stores'.

    Parameters
    ----------
    own
        Whether to add our row; without it the features are upstream's alone.
    """

    def __init__(self, own: bool = True) -> None:
        super().__init__()
        self.own = own
        self.per_store = ms.feature_extractor.PerStoreFeature()

    def extract_from(self, context: ms.TuneContext, candidates: Sequence[ms.MeasureCandidate]) -> list[Tensor]:
        """An array of (rows, columns) for each candidate, in float64.

        Parameters
        ----------
        context
            Says what the workload and the target are.
        candidates
            Schedules of the workload.
        """
        candidates = [_timed(candidate) for candidate in candidates]
        # A search that is to repeat has one thread; what is extracted doesn't depend on how many there are.
        upstream = self._upstream(context_for(context.mod, context.target), candidates)
        if not self.own:
            return [tvm.runtime.tensor(rows) for rows in upstream]
        needed = hot_nest(nests(context.mod) or [_NO_NEST]).iterations
        found = []
        for candidate, rows in zip(candidates, upstream):
            columns = columns_of(candidate.sch.mod, needed, context.target)
            table = np.full((len(rows) + 1, PER_STORE + len(columns)), np.nan)
            table[:-1, :PER_STORE] = rows
            table[-1, PER_STORE:] = list(columns.values())
            found.append(tvm.runtime.tensor(table))
        return found

    def _upstream(self, context: ms.TuneContext, candidates: Sequence[ms.MeasureCandidate]) -> list[np.ndarray]:
        """Upstream's rows; it extracts on all cores, but one candidate that it cannot lower spoils all of them."""
        try:
            return [rows.numpy() for rows in self.per_store.extract_from(context, list(candidates))]
        except _tvm.UPSTREAM_ERRORS as error:
            _tvm.raise_own_fault(error)  # else, what it says of the candidate is not of use
            if len(candidates) == 1:
                return [np.full((1, PER_STORE), np.nan)]
            half = len(candidates) // 2
            return [*self._upstream(context, candidates[:half]), *self._upstream(context, candidates[half:])]


def _timed(candidate: ms.MeasureCandidate) -> ms.MeasureCandidate:
    """A candidate without what packs its weights, which isn't timed."""
    func = candidate.sch.mod["main"]
    if not has_packing(func):
        return candidate
    try:
        main = split_packing(func).main
    except TuneError:  # which it will fail for when it is built
        return candidate
    return ms.MeasureCandidate(s_tir.Schedule(IRModule({"main": main})), candidate.args_info)
