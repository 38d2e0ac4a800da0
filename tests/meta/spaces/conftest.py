"""Convolutions, and how a schedule is run on them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tvm
from tvm.target import Target


def _error(mod: tvm.IRModule, target: Target, arrays: list[np.ndarray], want: np.ndarray) -> float:
    """Largest difference from float64, relative to the largest value; the output starts as NaN."""
    out = np.full(want.shape, np.nan, arrays[0].dtype)
    tensors = [tvm.runtime.tensor(a) for a in (*arrays, out)]
    tvm.compile(mod, target=target)["main"](*tensors)
    return float(np.abs(tensors[-1].numpy() - want).max() / np.abs(want).max())


@pytest.fixture(scope="session")
def error() -> Callable[..., float]:
    """Run a module whose last argument is its output: ``error(mod, target, arrays, want)``."""
    return _error
