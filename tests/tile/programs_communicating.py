"""Programs that communicate, as authors of kernels write them first: each with its arguments and what it gives.

A maker takes the number of devices and a generator of random numbers; it returns the function, for each tensor what its
slabs hold (`OUT` for poison, `ZEROS` for flags and counters), and for each result what it is to hold, in float64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from tvm.script import tirx as T

from tvm_axe import tile

OUT, ZEROS = "out", "zeros"
Made = tuple[Any, dict[str, Any], dict[str, np.ndarray]]


def ring_all_reduce(devices: int, rng: np.random.Generator, rows: int = 2, n: int = 19) -> Made:
    """In place: chunks go around and grow, then their owners store them to all; the own slab is loaded first."""

    @T.prim_func
    def ring_all_reduce(
        x: tile.mesh_tensor((devices, devices, rows, n), "float32"),
        me: T.int32,
        turn: T.int32,
        inbox: tile.mesh_tensor((devices, devices, rows, n), "float32"),
        grown: tile.mesh_tensor((devices, devices, rows), "int32"),
        whole: tile.mesh_tensor((devices, devices, rows), "int32"),
    ):
        with tile.kernel(rows, device=me) as r:
            a = tile.fragment((n,), "float32")
            b = tile.fragment((n,), "float32")
            right: T.let = (me + 1) % devices
            for s in range(devices):
                chunk = (me + devices - s) % devices
                tile.copy(x[me, chunk, r, 0], a)
                if s > 0:
                    tile.wait(grown[me, chunk, r], turn)
                    tile.copy(inbox[me, chunk, r, 0], b)
                    with tile.parallel(n) as j:
                        a[j] += b[j]
                if s < devices - 1:
                    tile.copy(a, inbox[right, chunk, r, 0])
                    tile.signal(grown[right, chunk, r], turn)
            for d in range(devices):
                tile.copy(a, x[d, right, r, 0])
            tile.signal(whole[0:devices, right, r], turn)
            tile.wait(whole[me, 0:devices, r], turn)

    x = rng.standard_normal((devices, devices, rows, n))
    want = np.broadcast_to(x.sum(axis=0), x.shape)
    return ring_all_reduce, {"x": x, "inbox": OUT, "grown": ZEROS, "whole": ZEROS}, {"x": want}


def gather_in_place(devices: int, rng: np.random.Generator, rows: int = 2, n: int = 37) -> Made:
    """The own rows are there from the start, in the tensor that peers store theirs to at once."""

    @T.prim_func
    def gather_in_place(
        out: tile.mesh_tensor((devices, devices, rows, n), "bfloat16"),
        me: T.int32,
        ready: tile.mesh_tensor((devices, devices, rows), "int32"),
    ):
        with tile.kernel(rows, device=me) as r:
            row = tile.fragment((1, n), "bfloat16")
            right = (me + 1) % devices
            tile.copy(out[me, me, r, 0], row)
            tile.copy(row, out[right, me, r, 0])
            tile.signal(ready[right, me, r])
            for s in range(1, devices):
                source = (me + devices - s) % devices
                tile.wait(ready[me, source, r], reset=True)
                if s < devices - 1:
                    tile.copy(out[me, source, r, 0], row)
                    tile.copy(row, out[right, source, r, 0])
                    tile.signal(ready[right, source, r])

    x = rng.integers(-9, 9, (devices, rows, n)).astype("float64")
    out = np.full((devices, devices, rows, n), np.nan)
    out[range(devices), range(devices)] = x
    return gather_in_place, {"out": out, "ready": ZEROS}, {"out": np.broadcast_to(x, out.shape)}


def product_summed_by_owners(devices: int, rng: np.random.Generator, m: int = 32, n: int = 32, k: int = 48) -> Made:
    """Partial products are added atomically to their owner's, who ends them once all have, and clears the sums."""
    bm, bn, bk = 16, 16, 16

    @T.prim_func
    def product_summed_by_owners(
        A: T.Buffer((m, k), "float16"),
        B: T.Buffer((k, n), "float16"),
        me: T.int32,
        held: tile.mesh_tensor((devices, m, n), "float32"),
        added: tile.mesh_tensor((devices, m // bm, n // bn), "int32"),
        C: T.Buffer((m, n), "float16"),
    ):
        with tile.kernel(m // bm, n // bn, device=me) as (i, j):
            a = tile.shared((bm, bk), "float16")
            b = tile.shared((bk, bn), "float16")
            c = tile.fragment((bm, bn), "float32")
            owner = (i * 2 + j) % devices
            tile.fill(c, 0)
            for s in tile.pipelined(k // bk):
                tile.copy(A[i * bm, s * bk], a)
                tile.copy(B[s * bk, j * bn], b)
                tile.gemm(a, b, c)
            tile.atomic_add(c, held[owner, i * bm : i * bm + bm, j * bn : j * bn + bn])
            tile.signal(added[owner, i, j], add=True)
            if owner == me:
                tile.wait(added[me, i, j], devices, reset=True)
                tile.copy(held[me, i * bm, j * bn], c)
                with tile.parallel(bm, bn) as (x, y):
                    c[x, y] = T.max(c[x, y], 0.0)
                tile.copy(c, C[i * bm, j * bn])
                tile.fill(held[me, i * bm : i * bm + bm, j * bn : j * bn + bn], 0)

    a, b = rng.integers(-3, 4, (devices, m, k)), rng.integers(-3, 4, (devices, k, n))
    ended, want = np.maximum(np.einsum("dmk,dkn->mn", a, b), 0), np.zeros((devices, m, n))
    for i, j in np.ndindex(m // bm, n // bn):
        part = np.s_[i * bm : i * bm + bm, j * bn : j * bn + bn]
        want[(i * 2 + j) % devices][part] = ended[part]
    given = {"A": a, "B": b, "held": ZEROS, "added": ZEROS, "C": np.zeros_like(want)}
    return product_summed_by_owners, given, {"C": want, "held": np.zeros_like(want)}


def slots_claimed(devices: int, rng: np.random.Generator, tokens: int = 3, n: int = 6) -> Made:
    """Tokens claim a slot of their expert's device by compare-and-swap; it adds up the rows of claimed slots."""
    slots = devices * tokens

    @T.prim_func
    def slots_claimed(
        x: T.Buffer((tokens, n), "int32"),
        expert: T.Buffer((tokens,), "int32"),
        me: T.int32,
        claimed: tile.mesh_tensor((devices, slots), "int32"),
        rows: tile.mesh_tensor((devices, slots, n), "int32"),
        sent: tile.mesh_tensor((devices, devices), "int32"),
        total: T.Buffer((n,), "int32"),
    ):
        with tile.kernel(1, device=me):
            got = tile.shared((tokens,), "int32")
            row = tile.fragment((n,), "int32")
            sums = tile.fragment((n,), "int32")
            with tile.parallel(tokens) as t:
                slot = T.int32(-1)
                for k in range(slots):
                    if slot < 0:
                        found = tile.atomic_cas(0, 1, claimed[expert[t], k])
                        if found == 0:
                            slot = k
                got[t] = slot
            for t in range(tokens):
                tile.copy(x[t, 0], row)
                tile.copy(row, rows[expert[t], got[t], 0])
            tile.signal(sent[0:devices, me])
            tile.wait(sent[me, 0:devices], reset=True)
            tile.fill(sums, 0)
            for k in range(slots):
                if claimed[me, k] > 0:
                    tile.copy(rows[me, k, 0], row)
                    with tile.parallel(n) as i:
                        sums[i] += row[i]
            tile.fill(claimed[me, 0:slots], 0)
            tile.copy(sums, total[0])

    x, expert = rng.integers(-9, 9, (devices, tokens, n)), rng.integers(0, devices, (devices, tokens))
    want = np.stack([x[expert == device].sum(axis=0) for device in range(devices)])
    given = {"x": x, "expert": expert, "claimed": ZEROS, "rows": OUT, "sent": ZEROS, "total": OUT}
    return slots_claimed, given, {"total": want, "claimed": np.zeros((devices, slots))}


def until_all_are_close(devices: int, rng: np.random.Generator, n: int = 12) -> Made:
    """x / 2 + c until nowhere on any device it changes by much: a loop that ends by what peers say."""

    @T.prim_func
    def until_all_are_close(
        c: T.Buffer((n,), "float32"),
        me: T.int32,
        change: tile.mesh_tensor((devices, 2, devices), "float32"),
        told: tile.mesh_tensor((devices, 2, devices), "int32"),
        y: T.Buffer((n,), "float32"),
        steps: T.Buffer((1,), "int32"),
    ):
        with tile.kernel(1, device=me):
            x = tile.fragment((n,), "float32")
            e = tile.fragment((n,), "float32")
            most = tile.fragment((1,), "float32")
            worst = tile.local((1,), "float32")
            step = tile.local((1,), "int32")
            tile.fill(x, 0)
            worst[0] = 1e30
            step[0] = 0
            while worst[0] > T.float32(0.3):
                with tile.parallel(n) as i:
                    e[i] = T.abs(c[i] - x[i] * 0.5)
                    x[i] = x[i] * 0.5 + c[i]
                tile.max(e, most)
                half = step[0] % 2
                for d in range(devices):
                    change[d, half, me] = most[0]
                    tile.signal(told[d, half, me], step[0] // 2 + 1)
                tile.wait(told[me, half, 0:devices], step[0] // 2 + 1)
                worst[0] = 0.0
                for d in range(devices):
                    worst[0] = T.max(worst[0], change[me, half, d])
                step[0] = step[0] + 1
            tile.copy(x, y[0])
            steps[0] = step[0]

    c = rng.standard_normal((devices, n))
    x, count, worst = np.zeros((devices, n)), 0, 1e30
    while worst > 0.3:
        x, count, worst = x / 2 + c, count + 1, np.abs(c - x / 2).max()
    given = {"c": c, "change": OUT, "told": np.zeros((devices, 2, devices)), "y": OUT, "steps": OUT}
    return until_all_are_close, given, {"y": x, "steps": np.full((devices, 1), count)}


def pairs_sorted(devices: int, rng: np.random.Generator, n: int = 13) -> Made:
    """Odd-even transposition: neighbours exchange sorted runs, merge them, and keep the lower or the upper half."""

    @T.prim_func
    def pairs_sorted(
        x: T.Buffer((n,), "float32"),
        me: T.int32,
        inbox: tile.mesh_tensor((devices, devices, n), "float32"),
        came: tile.mesh_tensor((devices, devices), "int32"),
        y: T.Buffer((n,), "float32"),
    ):
        with tile.kernel(1, device=me):
            run = tile.fragment((n,), "float32")
            both = tile.fragment((2 * n,), "float32")
            merged = tile.shared((2 * n,), "float32")
            tile.copy(x[0], run)
            for t in range(devices):
                peer: T.let = T.if_then_else(me % 2 == t % 2, me + 1, me - 1)
                if peer >= 0 and peer < devices:
                    tile.copy(run, inbox[peer, t, 0])
                    tile.signal(came[peer, t])
                    tile.wait(came[me, t], reset=True)
                    tile.copy(run, both[0:n])
                    tile.copy(inbox[me, t, 0:n], both[n : 2 * n])
                    tile.sort(both, merged)
                    if me < peer:
                        tile.copy(merged[0:n], run)
                    else:
                        tile.copy(merged[n : 2 * n], run)
            tile.copy(run, y[0])

    x = np.sort(rng.standard_normal((devices, n)).astype("float32"))
    want = np.sort(x.ravel()).reshape(devices, n)
    return pairs_sorted, {"x": x, "inbox": OUT, "came": ZEROS, "y": OUT}, {"y": want}


PROGRAMS = (
    ring_all_reduce,
    gather_in_place,
    product_summed_by_owners,
    slots_claimed,
    until_all_are_close,
    pairs_sorted,
)
