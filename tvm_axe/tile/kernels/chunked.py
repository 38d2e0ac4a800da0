"""Sums over earlier tokens with a decay, chunk by chunk: Mamba-2's states, linear attention where nothing decays.

A token's output is of all before it, weighted: ``Y[m] = sum(C[m] . B[k] exp(dA[m] - dA[k]) dt[k] X[k] for k <= m)``.
`chunk_state` sums each chunk's tokens into a state, as it is at the chunk's end; `chunk_scan` adds to what the state
before a chunk gives what the tokens within it do.

Source: Dao and Gu, "Transformers are SSMs", 2024, section 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines import Gpu, machine_of
from tvm_axe.tile.kernels.attention import MASKED
from tvm_axe.tile.kernels.data import normal
from tvm_axe.tile.kernels.epilogue import LOG2E
from tvm_axe.tile.kernels.kernel import (
    ROUNDING,
    Expected,
    Kernel,
    Knobs,
    Problem,
    Recipe,
    choose,
    only_used,
    rounding_slack,
)


def chunk_state(
    batch: int,
    length: int,
    heads: int,
    groups: int,
    dim: int,
    state: int,
    chunk: int,
    dtype: str,
    decay: bool = True,
    *,
    block_n: int,
    block_k: int,
    stages: int = 0,
    blocks: int = 1,
) -> Recipe:
    """States of every chunk by itself, as they are at its end: the sum of exp(dA[last] - dA[k]) dt[k] X[k] B[k]^T.

    X is (batch, length, heads, dim), B (batch, length, groups, state), of which each group serves heads / groups
    neighbouring heads, and states (batch, chunks, heads, dim, state), all of `dtype`. dt and dA, the sum of dt A up to
    each token of its chunk, are float32 of (batch, heads, chunks, chunk). Without `decay` there are neither, and all
    weights are 1, as in linear attention.

    Raises
    ------
    TileError
        `groups` doesn't divide the heads, or `chunk` the length.
    """
    group, chunks = _shares("chunk_state", heads, groups, length, chunk)

    @T.prim_func
    def chunk_state(
        X: T.Buffer((batch, length, heads, dim), dtype),
        B: T.Buffer((batch, length, groups, state), dtype),
        dt: T.Buffer((batch, heads, chunks, chunk), "float32"),
        dA: T.Buffer((batch, heads, chunks, chunk), "float32"),
        states: T.Buffer((batch, chunks, heads, dim, state), dtype),
    ) -> None:
        with tile.kernel(
            batch * chunks, tile.cdiv(state, block_n), heads, blocks_per_sm=blocks if blocks > 1 else None
        ) as (z, j, h):
            x = tile.shared((block_k, dim), dtype)
            b = tile.shared((block_k, block_n), dtype)
            xt = tile.fragment((dim, block_k), dtype)
            s = tile.fragment((dim, block_n), "float32")
            if decay:
                step = tile.shared((block_k,), "float32")
                da = tile.shared((block_k,), "float32")
            own, c = T.meta_var(z // chunks), T.meta_var(z % chunks)
            if decay:
                last = dA[own, h, c, chunk - 1]
            tile.fill(s, 0)
            for k in tile.pipelined(tile.cdiv(chunk, block_k), stages=stages or None):
                first, n = T.meta_var(c * chunk + k * block_k), T.meta_var(j * block_n)
                if decay:
                    tile.copy(dt[own, h, c, k * block_k], step)
                    tile.copy(dA[own, h, c, k * block_k], da)
                tile.copy(X[own, first : first + block_k, h, 0:dim], x)
                tile.copy(B[own, first : first + block_k, h // group, n : n + block_n], b)
                with tile.parallel(dim, block_k) as (p, q):
                    inside = T.meta_var(True if chunk % block_k == 0 else k * block_k + q < chunk)
                    weight = T.meta_var(
                        _weight(last, da[q], step[q], inside) if decay else _within(inside, T.float32(1))
                    )
                    xt[p, q] = T.cast(T.cast(x[q, p], "float32") * weight, dtype)
                tile.gemm(xt, b, s)
            tile.copy(s, states[own, c, h, 0, j * block_n])

    given = ("X", "B", *(("dt", "dA") if decay else ()))
    return Recipe((only_used(chunk_state),), given, ("states",))


def chunk_scan(
    batch: int,
    length: int,
    heads: int,
    groups: int,
    dim: int,
    state: int,
    chunk: int,
    dtype: str,
    decay: bool = True,
    skip: bool = True,
    *,
    block_m: int,
    block_k: int,
    stages: int = 0,
    blocks: int = 1,
) -> Recipe:
    """Y[m] = exp(dA[m]) states C[m] + the sum over the chunk's k <= m of CB[m, k] exp(dA[m] - dA[k]) dt[k] X[k].

    X and Y are (batch, length, heads, dim), C (batch, length, groups, state), CB (batch, chunks, groups, chunk, chunk)
    the products of C and B within chunks, finite everywhere, and states (batch, chunks, heads, dim, state) those before
    each chunk, all of `dtype`; dt and dA are `chunk_state`'s. With `skip`, D (heads) of float32 times X is added, as a
    part of the weight that a token has for itself.

    Raises
    ------
    TileError
        `groups` doesn't divide the heads, or `chunk` the length.
    """
    group, chunks = _shares("chunk_scan", heads, groups, length, chunk)
    terms = 16 * tile.cdiv(state, 16)  # as many as tensor cores take; behind the state's own are zeros

    @T.prim_func
    def chunk_scan(
        CB: T.Buffer((batch, chunks, groups, chunk, chunk), dtype),
        X: T.Buffer((batch, length, heads, dim), dtype),
        dt: T.Buffer((batch, heads, chunks, chunk), "float32"),
        dA: T.Buffer((batch, heads, chunks, chunk), "float32"),
        C: T.Buffer((batch, length, groups, state), dtype),
        states: T.Buffer((batch, chunks, heads, dim, state), dtype),
        D: T.Buffer((heads,), "float32"),
        Y: T.Buffer((batch, length, heads, dim), dtype),
    ) -> None:
        with tile.kernel(
            batch * chunks, tile.cdiv(chunk, block_m), heads, blocks_per_sm=blocks if blocks > 1 else None
        ) as (z, i, h):
            c = tile.shared((block_m, terms), dtype)
            before = tile.shared((dim, terms), dtype)
            cb = tile.shared((block_m, block_k), dtype)
            x = tile.shared((block_k, dim), dtype)
            w = tile.fragment((block_m, block_k), dtype)
            y = tile.fragment((block_m, dim), "float32")
            if decay:
                step = tile.shared((block_k,), "float32")
                da = tile.shared((block_k,), "float32")
                own_da = tile.fragment((block_m,), "float32")
            b, n, g = T.meta_var(z // chunks), T.meta_var(z % chunks), T.meta_var(h // group)
            row = T.meta_var(n * chunk + i * block_m)
            tile.copy(C[b, row : row + block_m, g, 0:terms], c)
            tile.copy(states[b, n, h, 0, 0], before)
            tile.gemm(c, before, y, transpose_b=True, accumulate=False)
            if skip:
                skipped = D[h]
            if decay:
                tile.copy(dA[b, h, n, i * block_m], own_da)
                with tile.parallel(block_m, dim) as (p, q):
                    y[p, q] = y[p, q] * T.exp2(own_da[p] * T.float32(LOG2E))
            stop = T.meta_var(T.min((i + 1) * block_m, chunk))
            for k in tile.pipelined(tile.cdiv(stop, block_k), stages=stages or None):
                first = T.meta_var(n * chunk + k * block_k)
                tile.copy(CB[b, n, g, i * block_m, k * block_k], cb)
                if decay:
                    tile.copy(dt[b, h, n, k * block_k], step)
                    tile.copy(dA[b, h, n, k * block_k], da)
                tile.copy(X[b, first : first + block_k, h, 0:dim], x)
                with tile.parallel(block_m, block_k) as (p, q):
                    seen = T.meta_var(k * block_k + q <= i * block_m + p)
                    weight = T.meta_var(
                        _weight(own_da[p], da[q], step[q], seen) if decay else _within(seen, T.float32(1))
                    )
                    whole = T.meta_var(T.cast(cb[p, q], "float32") * weight)
                    own = T.meta_var(k * block_k + q == i * block_m + p)
                    w[p, q] = T.cast(whole + _within(own, skipped) if skip else whole, dtype)
                tile.gemm(w, x, y)
            if chunk % block_m == 0:
                tile.copy(y, Y[b, row : row + block_m, h, 0:dim])
            else:
                with tile.parallel(block_m, dim) as (p, q):
                    if i * block_m + p < chunk:
                        Y[b, row + p, h, q] = T.cast(y[p, q], dtype)

    given = ("CB", "X", *(("dt", "dA") if decay else ()), "C", "states", *(("D",) if skip else ()))
    return Recipe((only_used(chunk_scan),), given, ("Y",))


def _weight(until: Any, since: Any, step: Any, counts: Any) -> Any:
    """What is left of a token's step, of the sums of dt A until a time and up to the token; 0 unless it counts.

    What doesn't is left out of the exponent, which takes no branch around an exponential.
    """
    exponent = (until - since) * T.float32(LOG2E)
    return T.exp2(exponent if counts is True else T.if_then_else(counts, exponent, T.float32(MASKED))) * step


def _within(counts: Any, value: Any) -> Any:
    """The value of what counts, else 0."""
    return value if counts is True else T.if_then_else(counts, value, T.float32(0))


def _shares(name: str, heads: int, groups: int, length: int, chunk: int) -> tuple[int, int]:
    """How many neighbouring heads a group serves, and how many chunks there are.

    Raises
    ------
    TileError
        `groups` doesn't divide the heads, or `chunk` the length.
    """
    if groups < 1 or heads % groups:
        raise TileError(f"{name}: groups divides heads, got {groups} of {heads}")
    if chunk < 1 or length % chunk:
        raise TileError(f"{name}: chunk divides length, got {chunk} of {length}; valid is a length padded with dt = 0")
    return heads // groups, length // chunk


def _state_knobs(target: Target, problem: Problem) -> Knobs:
    """Two blocks a multiprocessor where two slots of tiles, and the states on their way out, leave room for them."""
    machine = machine_of(target)
    if not isinstance(machine, Gpu):
        return {"block_n": choose(128, 64), "block_k": choose(64, 128)}
    if problem["dtype"] == "float32":
        return {"block_n": choose(64, 32), "block_k": choose(32, 16)}
    dim = problem["dim"]
    columns = min(128 if dim <= 64 else 64, problem["state"])
    return {
        "block_n": choose(columns, 64, 128),
        "block_k": choose(64, 32, 128),
        "stages": choose(0, 2, 3, 4),
        "blocks": choose(_together(machine, 2, 2 * dim * columns + 4 * 64 * (dim + columns) + 2048), 1, 2, 3, 4),
    }


def _scan_knobs(target: Target, problem: Problem) -> Knobs:
    """Several blocks a multiprocessor, since each waits for its states before it begins with its tokens."""
    machine = machine_of(target)
    if not isinstance(machine, Gpu):
        return {"block_m": choose(64, 128), "block_k": choose(64, 128)}
    if problem["dtype"] == "float32":
        return {"block_m": choose(32, 64), "block_k": choose(32, 16)}
    state, dim = problem["state"], problem["dim"]
    bytes_ = 2 * (64 + dim) * state + 2 * 64 * dim + 4 * 64 * (64 + dim) + 2048
    return {
        "block_m": choose(64, 128),
        "block_k": choose(64, 32, 128),
        "stages": choose(0, 2, 3, 4),
        "blocks": choose(_together(machine, 3, bytes_), 1, 2, 3),
    }


def _together(machine: Gpu, most: int, bytes_: int) -> int:
    """How many blocks of so many bytes of shared memory a multiprocessor runs at once, up to `most`."""
    return max(1, min(most, machine.shared_bytes // bytes_))


# ---- Data and reference ------------------------------------------------------------------------------------------


def _drawn(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    """What both read: steps of up to 0.1, and heads that forget at different rates."""
    batch, length, heads, chunk, dtype = (problem[name] for name in ("batch", "length", "heads", "chunk", "dtype"))
    dt = rng.uniform(0.001, 0.1, (batch, heads, length // chunk, chunk)).astype("float32")
    rate = -rng.uniform(0.1, 8, (heads, 1, 1))
    by_group = (batch, length, problem["groups"], problem["state"])
    return {
        "X": normal(rng, (batch, length, heads, problem["dim"]), dtype),
        "B": normal(rng, by_group, dtype),
        "C": normal(rng, by_group, dtype),
        "dt": dt,
        "dA": np.cumsum(dt * rate, axis=-1).astype("float32"),
    }


def _state_inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    drawn = _drawn(rng, problem)
    return {name: drawn[name] for name in ("X", "B", *(("dt", "dA") if problem.get("decay", True) else ()))}


def _scan_inputs(rng: np.random.Generator, problem: Problem) -> dict[str, np.ndarray]:
    drawn, dtype = _drawn(rng, problem), np.dtype(problem["dtype"])
    b, c = (_chunked(drawn[name], problem) for name in ("B", "C"))
    drawn["CB"] = np.einsum("zcmgs,zckgs->zcgmk", c, b).astype("float32").astype(dtype)
    shape = (problem["batch"], b.shape[1], problem["heads"], problem["dim"], problem["state"])
    drawn["states"] = normal(rng, shape, problem["dtype"])
    drawn["D"] = rng.uniform(-1, 1, (problem["heads"],)).astype("float32")
    optional = {"dt": problem.get("decay", True), "dA": problem.get("decay", True), "D": problem.get("skip", True)}
    return {name: drawn[name] for name in ("CB", "X", "dt", "dA", "C", "states", "D") if optional.get(name, True)}


def _chunked(array: np.ndarray, problem: Problem) -> np.ndarray:
    """(batch, length, ...) as (batch, chunks, chunk, ...) in float64."""
    return array.astype("float64").reshape(len(array), -1, problem["chunk"], *array.shape[2:])


def _by_head(array: np.ndarray, problem: Problem, axis: int) -> np.ndarray:
    return array.repeat(problem["heads"] // problem["groups"], axis=axis)


def _decays(problem: Problem, arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """dt and dA in float64; of what doesn't decay, ones and zeros."""
    if problem.get("decay", True):
        return arrays["dt"].astype("float64"), arrays["dA"].astype("float64")
    shape = (problem["batch"], problem["heads"], problem["length"] // problem["chunk"], problem["chunk"])
    return np.ones(shape), np.zeros(shape)


def _off(problem: Problem, da: np.ndarray) -> float:
    """How far a weighted operand of a product is off, relatively: by the exponent, and by rounding to its type."""
    rounding = 2 * ROUNDING[problem["dtype"]] if problem["dtype"] != "float32" else 0.0
    return rounding + ROUNDING["float32"] * (
        16 + 8 * float(np.abs(da).max()) + 2 * (problem["chunk"] + problem["state"])
    )


def _state_reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    x, b = _chunked(arrays["X"], problem), _by_head(_chunked(arrays["B"], problem), problem, 3)
    dt, da = _decays(problem, arrays)
    weights = np.exp(da[..., -1:] - da) * dt
    value, size = (
        np.einsum("zckhp,zhck,zckhs->zchps", *each, optimize=True)
        for each in ((x, weights, b), (np.abs(x), weights, np.abs(b)))
    )
    return {"states": Expected(value, rounding_slack(problem["dtype"], _off(problem, da), size))}


def _scan_reference(problem: Problem, arrays: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    x, c = _chunked(arrays["X"], problem), _by_head(_chunked(arrays["C"], problem), problem, 3)
    cb, states = _by_head(arrays["CB"].astype("float64"), problem, 2), arrays["states"].astype("float64")
    dt, da = _decays(problem, arrays)
    with np.errstate(over="ignore"):
        weights = np.tril(np.exp(da[..., :, None] - da[..., None, :])) * dt[..., None, :]
    skipped = arrays["D"].astype("float64")[:, None] if problem.get("skip", True) else np.zeros(1)

    def computed(cb: Any, x: Any, c: Any, states: Any, skipped: Any) -> Any:
        within = np.einsum("zchmk,zhcmk,zckhp->zcmhp", cb, weights, x, optimize=True)
        before = np.einsum("zhcm,zcmhs,zchps->zcmhp", np.exp(da), c, states, optimize=True)
        return (within + before + x * skipped).reshape(arrays["X"].shape)

    operands = (cb, x, c, states, skipped)
    size = computed(*(np.abs(each) for each in operands))
    return {"Y": Expected(computed(*operands), rounding_slack(problem["dtype"], _off(problem, da), size))}


_CASES: tuple[Problem, ...] = (
    {"batch": 1, "length": 128, "heads": 2, "groups": 1, "dim": 32, "state": 32, "chunk": 64, "dtype": "float32"},
    {"batch": 2, "length": 512, "heads": 4, "groups": 1, "dim": 64, "state": 128, "chunk": 256, "dtype": "float16"},
    {"batch": 1, "length": 384, "heads": 2, "groups": 2, "dim": 64, "state": 64, "chunk": 128, "dtype": "bfloat16",
     "decay": False},
    {"batch": 1, "length": 240, "heads": 2, "groups": 1, "dim": 64, "state": 72, "chunk": 80, "dtype": "bfloat16"},
)  # fmt: skip

CHUNK_STATE = Kernel(
    name="chunk_state",
    summary="the state at the end of each chunk of tokens, of Mamba-2 or linear attention",
    make=chunk_state,
    parameters=_state_knobs,
    inputs=_state_inputs,
    reference=_state_reference,
    cases=_CASES,
)

CHUNK_SCAN = Kernel(
    name="chunk_scan",
    summary="each token's sum over those before it, of the state before its chunk and of the chunk's own",
    make=chunk_scan,
    parameters=_scan_knobs,
    inputs=_scan_inputs,
    reference=_scan_reference,
    cases=(*_CASES[:2], {**_CASES[2], "skip": False}, _CASES[3]),
)
