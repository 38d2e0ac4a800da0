"""How long a distributed program is expected to take, and how sure that is: the link model, corrected by measurements.

A program has tens of schedules and each costs a compilation on every device, so there are never enough measurements to
learn a model from scratch. What is known beforehand is the link model. What it doesn't know are a few additive errors,
which schedules have in common: how long each local kernel takes, what fusing or overlapping in one way gains, what a
chunk more costs. So seconds are taken for Gaussian, with the link model as their mean and as covariance what two
schedules share of these. Conditioned on the measurements (Rasmussen and Williams, Gaussian Processes for Machine
Learning, 2006, eq. 2.23 and 2.24) that predicts the others, and says how far off it may be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from tvm_axe import _tvm
from tvm_axe.analysis.patterns import is_product
from tvm_axe.collective.engine import Rates
from tvm_axe.lower import Lowered
from tvm_axe.lower.cost import features_of_program
from tvm_axe.meta.mesh.candidates import Candidates
from tvm_axe.meta.mesh.kernels import local_kernels
from tvm_axe.meta.mesh.moves import structure
from tvm_axe.records.database import normalize

__all__ = ["ProgramModel"]

# Standard deviations of what the link model doesn't know, in shares of what a schedule takes.
_COMMON, _ARITHMETIC = 1.4, 1.4
_KERNEL, _SHAPE, _CHUNKS, _ALONE, _NOISE = 0.1, 0.05, 0.03, 0.02, 0.05
_UNTUNED = 0.02  # of the operations a second, at best, in a matmul whose kernel can't be tuned
_HOPE = 1.5  # standard deviations that a schedule may beat its expectation by


@derived_object
class ProgramModel(ms.cost_model.PyCostModel):
    """Upstream's cost model interface to the Gaussian process of the module's header.

    Parameters
    ----------
    candidates
        What is known of the program's schedules.
    rates
        How fast the devices are; as their engine says if None.
    """

    def __init__(self, candidates: Candidates | None = None, rates: Rates | None = None) -> None:
        super().__init__()
        self.candidates = Candidates() if candidates is None else candidates
        self.rates = self.candidates.devices.rates if rates is None else rates
        self._terms: dict[int, tuple[float, dict[str, float]]] = {}
        self._seconds: dict[int, float] = {}

    def update(
        self, context: ms.TuneContext, candidates: list[ms.MeasureCandidate], results: list[ms.runner.RunnerResult]
    ) -> None:
        """Learn measurements; one of the same schedule replaces an earlier, and a failed one is not learnt from."""
        for candidate, result in zip(candidates, results):
            if result.run_secs:
                self._seconds[self._known(candidate)] = float(np.median([float(s) for s in result.run_secs]))

    def predict(self, context: ms.TuneContext, candidates: list[ms.MeasureCandidate]) -> np.ndarray:
        """Scores for upstream's search: the best measured time over the time that one may hope for, the larger the
        better; above 1, a candidate may be the new best."""
        return self.hopes(candidates)

    def hopes(self, candidates: Sequence[ms.MeasureCandidate]) -> np.ndarray:
        """See `predict`; as long as nothing was measured, they rank by what is expected, and the first has a 2."""
        seconds, deviation = self.expect(candidates)
        if not self.trained:
            return 2 * seconds.min() / seconds
        return min(self._seconds.values()) / np.maximum(seconds - _HOPE * deviation, 1e-3 * seconds.min())

    @property
    def trained(self) -> bool:
        """Whether it has learnt any measurement."""
        return bool(self._seconds)

    def has(self, candidate: ms.MeasureCandidate) -> bool:
        """Whether it has learnt what became of this schedule."""
        return self._known(candidate) in self._seconds

    def expect(self, candidates: Sequence[ms.MeasureCandidate]) -> tuple[np.ndarray, np.ndarray]:
        """Expected seconds of each candidate, and their standard deviations."""
        asked = [self._known(candidate) for candidate in candidates]
        known = list(self._seconds)
        means = np.array([self._terms[key][0] for key in known + asked])
        # Arithmetic isn't in the link model, so how long a schedule takes at all is known once one was measured.
        scale = float(np.median(list(self._seconds.values()) or means))
        covariance = np.array([[self._shared(a, b) for b in asked + known] for a in asked + known]) * scale**2
        n = len(asked)
        prior, own = means[len(known) :], covariance[:n, :n].diagonal()
        if not known:
            return prior, np.sqrt(own)
        measured = np.array([self._seconds[key] for key in known])
        noise = np.diag((_NOISE * measured) ** 2)
        gain = np.linalg.solve(covariance[n:, n:] + noise, covariance[n:, :n]).T
        posterior = own - np.einsum("ij,ij->i", gain, covariance[:n, n:])
        return prior + gain @ (measured - means[: len(known)]), np.sqrt(np.maximum(posterior, 0.0))

    def _known(self, candidate: ms.MeasureCandidate) -> int:
        """The candidate's key, with its terms worked out."""
        key = structure(candidate.sch)
        if key not in self._terms:
            mod = candidate.sch.mod
            self._terms[key] = _terms(self.candidates.lowered(mod), self.candidates.operations(mod), self.rates)
        return key

    def _shared(self, a: int, b: int) -> float:
        """The covariance of two schedules' seconds, in squared shares of the estimate."""
        ours, theirs = self._terms[a][1], self._terms[b][1]
        # In the order of the one, as that of a set of names would be another in every process.
        shared = sum(size * theirs[name] for name, size in ours.items() if name in theirs)
        return shared + (_ALONE**2 if a == b else 0.0)


def _terms(lowered: Lowered, operations: tuple[float, float], rates: Rates) -> tuple[float, dict[str, float]]:
    """What is expected before anything was measured, and the size of each error that it may have, by a name for it."""
    features = features_of_program(lowered, rates)
    kernels = list(local_kernels(lowered).functions.values())
    own, whole = operations
    rate = rates.operations * (_UNTUNED if any(_is_untuned_product(func) for func in kernels) else 1)
    expected = features["link_seconds"] + own / rate
    # Devices of an axis that shares nothing do the same, each as much as all of them otherwise did together.
    share = own * lowered.mesh.size / whole if whole else 1.0
    terms = {"program": _COMMON, "arithmetic": _ARITHMETIC * share, f"schedule {lowered.notation}": _SHAPE}
    terms["chunks"] = _CHUNKS * math.log2(features["chunks"])
    terms |= {f"kernel {_tvm.workload_hash(normalize(func))}": _KERNEL for func in kernels}
    return expected, terms


def _is_untuned_product(func: tirx.PrimFunc) -> bool:
    """Whether it has a matmul and takes the device's coordinate or a chunk's number, as no function that is tuned."""
    found: list[bool] = []
    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, lambda block: found.append(is_product(block))))
    return any(found) and not all(tirx.is_buffer_var(param) for param in func.params)
