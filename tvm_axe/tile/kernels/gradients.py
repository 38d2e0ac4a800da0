"""What gradients of attention should be: the tensors of a forward pass, and the gradients in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tvm_axe.tile.kernels.attention import attend, drawn_sinks, in_place, scale_of, shapes
from tvm_axe.tile.kernels.data import normal
from tvm_axe.tile.kernels.kernel import ROUNDING, Expected, Problem, rounding_slack

Seen = Callable[[int, int], np.ndarray]
"""Of a sequence and a head, which keys each query sees by lists: (queries, keys) of truth values."""


def inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    """Random inputs of a forward pass, what it makes of them, and a gradient of that."""
    batch, heads, kv_heads, dtype = (problem[name] for name in ("batch", "heads", "kv_heads", "dtype"))
    own = shapes(batch, heads, kv_heads, problem["queries"], problem["keys"], problem["dim"], "hhhh")
    arrays = {name: normal(rng, shape, dtype) for name, shape in zip("QKV", own)}
    return with_results(rng, problem, arrays | drawn_sinks(rng, problem))


def with_results(
    rng: np.random.Generator, problem: Problem, arrays: Mapping[str, np.ndarray], seen: Seen | None = None
) -> dict[str, np.ndarray]:
    """The tensors of a forward pass, what it makes of them, rounded to its types, and a gradient dO."""
    o, l = np.empty_like(arrays["Q"]), np.empty(arrays["Q"].shape[:3], "float32")
    for b, h in np.ndindex(*l.shape[:2]):
        q, k, v = (arrays[name][b, at].astype("float64") for name, at in _heads(problem, h))
        options = problem.get("causal", False), problem["dtype"], problem.get("scale"), problem.get("window")
        sink = arrays["S"][h] if "S" in arrays else None
        own = attend(q, k, v, *options, sink, None if seen is None else seen(b, h))
        o[b, h], l[b, h] = (part.value.astype(whole.dtype) for part, whole in zip(own, (o, l)))
    return {**arrays, "O": o, "L": l, "dO": normal(rng, o.shape, problem["dtype"])}


def _heads(problem: Problem, head: int) -> tuple[tuple[str, int], ...]:
    own = head // (problem["heads"] // problem["kv_heads"])
    return ("Q", head), ("K", own), ("V", own)


def expected(problem: Problem, arrays: Mapping[str, np.ndarray], seen: Seen | None = None) -> dict[str, Expected]:
    """The gradients in float64, of the O and L that are given.

    As in `attend` a score is off by `score` and a weight by `off`, relatively; what weights are multiplied by, by
    `sums`, and each product that tensor cores take is rounded to its type. A sink's weight is off by its exponent.
    """
    dtype, scale = problem["dtype"], scale_of(problem["dim"], problem.get("scale"))
    names = {"dQ": "Q", "dK": "K", "dV": "V", **({"dS": "S"} if "S" in arrays else {})}
    values = {name: np.zeros(arrays[own].shape) for name, own in names.items()}
    slacks = {name: np.zeros(arrays[own].shape) for name, own in names.items()}
    exact, rounding = ROUNDING["float32"], 2 * ROUNDING[dtype] if dtype != "float32" else 0.0
    for b, h in np.ndindex(problem["batch"], problem["heads"]):
        own = h // (problem["heads"] // problem["kv_heads"])
        q, k, v = (arrays[name][b, at].astype("float64") for name, at in _heads(problem, h))
        o, do, l = (arrays[name][b, h].astype("float64") for name in ("O", "dO", "L"))
        sees = in_place(len(q), len(k), problem.get("causal", False), problem.get("window"))
        if seen is not None:
            sees &= seen(b, h)
        s = np.where(sees, q @ k.T * scale, -np.inf)
        l = np.where(np.isneginf(l), 0.0, l)  # of a row that sees nothing
        p, delta = np.exp(s - l[:, None]), (o * do).sum(axis=1, keepdims=True)
        ds = p * (do @ v.T - delta)
        norms = {name: np.linalg.norm(array, axis=1) for name, array in zip("qkvod", (q, k, v, o, do))}
        score = exact * (len(q[0]) + 8) * (2 * scale * norms["q"] * norms["k"].max() + np.abs(l))
        off = 2 * score[:, None] + 4 * exact
        sums = 2 * exact * (len(q[0]) + 8) * norms["d"] * (norms["v"].max() + norms["o"])
        dp = p * sums[:, None] + np.abs(ds) * (off + rounding)
        longest = exact * (4 * max(s.shape) + 16)
        for name, at, value, slack, size in (
            ("dQ", h, ds @ k, dp @ np.abs(k), np.abs(ds) @ np.abs(k)),
            ("dK", own, ds.T @ q, dp.T @ np.abs(q), np.abs(ds.T) @ np.abs(q)),
            ("dV", own, p.T @ do / scale, (p * (off + rounding)).T @ np.abs(do) / scale, p.T @ np.abs(do) / scale),
        ):
            values[name][b, at] += scale * value
            slacks[name][b, at] += scale * (slack + longest * size)
        if "S" in arrays:
            sink = float(arrays["S"][h])
            weights = np.exp(sink - l)
            terms = weights * np.abs(delta[:, 0])
            values["dS"][h] -= (weights * delta[:, 0]).sum()
            slacks["dS"][h] += (weights * sums + terms * (8 * exact * (1 + abs(sink) + np.abs(l)) + longest)).sum()
    types = {name: dtype if name != "dS" else "float32" for name in names}
    rounded = {name: rounding_slack(types[name], 0.0, np.abs(value)) for name, value in values.items()}
    return {name: Expected(values[name], slacks[name] + rounded[name]) for name in names}
