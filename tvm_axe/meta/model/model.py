"""The cost model: upstream's XGBoost regression on pack-sums, on upstream's features and ours, kept with the databases.

A candidate's score is the best time of its workload over its own time: 1 for the best, 0 for one that failed. It is
learnt as the sum of what regression trees say of each row of the candidate's features. As upstream's model does it
(``meta_schedule.cost_model.XGBModel``, after Zheng et al., "Ansor", OSDI 2020), but

- every candidate counts the same. Upstream weights a candidate with its score, so that a slow one is hardly learnt
  from, and one that failed not at all;
- what other workloads taught is there before the first measurement, from a file beside the target's databases, and the
  trees are grown anew after each round; upstream's wait until a fifth is new, which for a new workload is never;
- features that cannot be extracted cost a candidate its features, not the job its life;
- what is said before anything is learnt is drawn from the seed, not from numpy's global state.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.errors import TuneError
from tvm_axe.meta.model.features import PER_STORE, AxeFeatures, own_names
from tvm_axe.records.database import FAILED_SECONDS
from tvm_axe.records.files import locked

if TYPE_CHECKING:
    import xgboost as xgb

__all__ = ["MODEL", "CostModel", "PackSum", "Samples"]

MODEL = "model.npz"
"""The model's file, in a target's folder of databases."""

_FORMAT = 1
_TREES, _KNOWN = 100, 4096  # trees; candidates that are learnt from and kept, of the workloads updated last
_PARAMETERS = {"max_depth": 6, "eta": 0.1, "gamma": 1e-3, "min_child_weight": 0, "tree_method": "hist", "base_score": 0}


@dataclass
class Samples:
    """What is known of one workload's candidates: the features of each, and its seconds, infinite if it failed."""

    rows: list[np.ndarray] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    seen: set[bytes] = field(default_factory=set)

    def add(self, rows: np.ndarray, seconds: float) -> None:
        """Take a candidate in, unless one of these features and seconds is there."""
        key = hashlib.sha256(rows.tobytes() + np.float64(seconds).tobytes()).digest()
        if key not in self.seen:
            self.seen.add(key)
            self.rows.append(rows)
            self.seconds.append(seconds)

    def scores(self) -> np.ndarray:
        """The best time over each candidate's; all 0 where every one failed."""
        seconds = np.array(self.seconds)
        best = seconds.min(initial=np.inf)
        return best / seconds if np.isfinite(best) else np.zeros(len(seconds))


class PackSum:
    """Trees whose sum over a candidate's rows is its score.

    Parameters
    ----------
    seed
        Of XGBoost's random numbers.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.trees: xgb.Booster | None = None

    def fit(self, rows: Sequence[np.ndarray], scores: np.ndarray) -> None:
        """Grow the trees anew, by least squares: one candidate, one square."""
        import xgboost as xgb  # takes a second, which workers and compilations don't have to spend

        table, owners = _packed(rows)
        wanted = np.asarray(scores)[owners]

        def gradient(predicted: np.ndarray, _data: xgb.DMatrix) -> tuple[np.ndarray, np.ndarray]:
            sums = np.bincount(owners, weights=predicted)[owners]
            return sums - wanted, np.ones_like(wanted)

        parameters = {**_PARAMETERS, "seed": self.seed, "nthread": 1}
        self.trees = xgb.train(parameters, xgb.DMatrix(table, wanted), num_boost_round=_TREES, obj=gradient)

    def predict(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """The score of each candidate."""
        import xgboost as xgb

        if self.trees is None:
            raise ValueError("predict: nothing was fitted; call fit first")
        table, owners = _packed(rows)
        return np.bincount(owners, weights=self.trees.predict(xgb.DMatrix(table)), minlength=len(rows))


def _packed(rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """All rows, and whose each is."""
    return np.concatenate(rows), np.repeat(np.arange(len(rows)), [len(r) for r in rows])


@derived_object
class CostModel(ms.cost_model.PyCostModel):
    """Scores schedules of any workload of one target.

    Parameters
    ----------
    target
        A resolved target.
    seed
        Of the trees, and of the scores that are given while there are none.
    own
        Whether to learn from our features; without them it is the model that they are compared with.

    Examples
    --------
    Used by a search as any cost model of MetaSchedule; around it::

        model = CostModel(target, seed)
        model.restore(folder / MODEL)
        ...
        model.store(folder / MODEL)
    """

    def __init__(self, target: Target, seed: int = 0, own: bool = True) -> None:
        super().__init__()
        self.target = target
        self.extractor = AxeFeatures(own)
        self.columns = PER_STORE + (len(own_names()) if own else 0)
        self.model = PackSum(seed)
        self.random = np.random.default_rng(seed)
        self.samples: dict[str, Samples] = {}  # by the workload's hash; the last one was updated last

    @property
    def trained(self) -> bool:
        """Whether there is anything that it has learnt from."""
        return self.model.trees is not None

    def update(
        self,
        context: ms.TuneContext,
        candidates: Sequence[ms.MeasureCandidate],
        results: Sequence[ms.runner.RunnerResult],
    ) -> None:
        """Learn what candidates of the context's workload came to; what is known already is passed over."""
        if not candidates:
            return
        digest = _tvm.workload_hash(context.mod)
        samples = self.samples.pop(digest, Samples())
        self.samples[digest] = samples
        before = len(samples.rows)
        for rows, result in zip(self._features(context, candidates), results):
            samples.add(rows, _seconds(result))
        if len(samples.rows) > before or not self.trained:
            self._fit()

    def predict(self, context: ms.TuneContext, candidates: Sequence[ms.MeasureCandidate]) -> np.ndarray:
        """The expected scores, in float64; drawn at random as long as nothing was learnt."""
        if not self.trained:
            return self.random.uniform(size=len(candidates))
        return self.model.predict(self._features(context, candidates)).astype("float64")

    # Not `save` and `load`, which upstream's base class passes through C++, where an error loses its type.
    def store(self, path: Path) -> None:
        """Write what was learnt to a file, together with what others have written there since it was read.

        Raises
        ------
        TuneError
            If the file cannot be written.
        """
        with locked(path.parent):
            self._merge(_read(path, self._about()))
            draft = path.with_name(f"{path.name}.new")
            try:
                with open(draft, "wb") as file:
                    np.savez_compressed(file, allow_pickle=False, **_arrays(self._latest(), self._about()))
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(draft, path)
            except OSError as error:
                draft.unlink(missing_ok=True)
                raise TuneError(f"{path}: the cost model cannot be written: {error.strerror}") from error

    def restore(self, path: Path) -> None:
        """Learn what a file of `store` knows; a file that is broken, or for another target or other features, is named
        in a warning and left alone, and one that doesn't exist teaches nothing."""
        self._merge(_read(path, self._about()))
        self._fit()

    def _features(self, context: ms.TuneContext, candidates: Sequence[ms.MeasureCandidate]) -> list[np.ndarray]:
        found = self.extractor.extract_from(context, list(candidates))
        empty = np.full((1, self.columns), np.nan, "float32")  # of a candidate that stores nothing
        return [rows.numpy().astype("float32") if rows.shape[0] else empty for rows in found]

    def _fit(self) -> None:
        """Grow the trees from all that counts."""
        latest = [samples for samples in self._latest().values() if samples.rows]
        if latest:
            rows = [row for samples in latest for row in samples.rows]
            self.model.fit(rows, np.concatenate([samples.scores() for samples in latest]))

    def _latest(self) -> dict[str, Samples]:
        """The workload that was updated last, and those before it that there is room for; the oldest first."""
        kept: dict[str, Samples] = {}
        count = 0
        for digest, samples in reversed(self.samples.items()):
            count += len(samples.rows)
            if kept and count > _KNOWN:
                break
            kept[digest] = samples
        return dict(reversed(kept.items()))

    def _merge(self, others: Mapping[str, Samples]) -> None:
        """Take in what a file knows, as older than what is known here."""
        own, self.samples = self.samples, dict(others)
        for digest, samples in own.items():
            known = self.samples.pop(digest, Samples())
            for rows, seconds in zip(samples.rows, samples.seconds):
                known.add(rows, seconds)
            self.samples[digest] = known

    def _about(self) -> dict[str, object]:
        """What a file must say of itself to be read."""
        return {
            "format": _FORMAT,
            "target": json.loads(str(self.target)),
            "columns": [PER_STORE, *own_names()] if self.extractor.own else [PER_STORE],
            "apache-tvm": metadata.version("apache-tvm"),
        }


def _seconds(result: ms.runner.RunnerResult) -> float:
    """The median of a result's times."""
    seconds = float(np.median([float(s) for s in result.run_secs])) if result.run_secs else np.inf
    return seconds if seconds < FAILED_SECONDS else np.inf


def _arrays(samples: Mapping[str, Samples], about: Mapping[str, object]) -> dict[str, np.ndarray]:
    """The contents of a file: arrays alone, so that reading one runs nothing."""
    every = list(samples.values())
    rows = [r for one in every for r in one.rows]
    return {
        "about": np.array(json.dumps({**about, "workloads": list(samples)})),
        "rows": np.concatenate(rows) if rows else np.zeros((0, 0), "float32"),
        "rows_each": np.array([len(r) for r in rows], "int64"),
        "seconds": np.array([s for one in every for s in one.seconds], "float64"),
        "candidates_each": np.array([len(one.rows) for one in every], "int64"),
    }


def _read(path: Path, about: Mapping[str, object]) -> dict[str, Samples]:
    """What a file knows; nothing if it doesn't exist or, with a warning that says why, is of no use."""
    if not path.exists():
        return {}
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        found = json.loads(str(arrays["about"]))
        for name, value in about.items():
            if found[name] != value:
                shown = "" if name == "columns" else f" {found[name]}, not {value}"
                warnings.warn(f"{path}: a cost model of other {name}{shown}; it is not used", stacklevel=3)
                return {}
        rows = np.split(arrays["rows"], np.cumsum(arrays["rows_each"])[:-1])
        ends = np.cumsum(arrays["candidates_each"])
        if len(rows) != len(arrays["seconds"]) or len(rows) != ends[-1] or len(ends) != len(found["workloads"]):
            raise ValueError("its parts don't fit each other")
    except (OSError, ValueError, KeyError, IndexError, TypeError, EOFError, zipfile.BadZipFile) as error:
        warnings.warn(f"{path}: not a cost model that can be read ({error}); it is not used", stacklevel=3)
        return {}
    samples: dict[str, Samples] = {}
    for digest, end, count in zip(found["workloads"], ends, arrays["candidates_each"]):
        samples[digest] = Samples()
        for n in range(end - count, end):
            samples[digest].add(rows[n], float(arrays["seconds"][n]))
    return samples
