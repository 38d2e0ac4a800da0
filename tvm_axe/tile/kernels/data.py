"""Random data for kernels, and shapes of ragged things."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def normal(rng: np.random.Generator, shape: Sequence[int], dtype: str, scale: float = 1.0) -> np.ndarray:
    """Normally distributed numbers of the standard deviation `scale`, rounded to `dtype`."""
    # TVM's import registers the 16-bit and 8-bit types with numpy by name.
    return (rng.standard_normal(tuple(shape), dtype="float32") * np.float32(scale)).astype(np.dtype(dtype))


def offsets(rng: np.random.Generator, total: int, parts: int) -> np.ndarray:
    """Where each of `parts` ragged parts of `total` rows starts, and where the last ends: int32 of (parts + 1,).

    Parts may be empty; where there are three or more, one is.
    """
    cuts = np.sort(rng.integers(0, total + 1, parts - 1))
    if parts >= 3:
        cuts[1] = cuts[0]
    return np.concatenate([[0], np.sort(cuts), [total]]).astype("int32")
