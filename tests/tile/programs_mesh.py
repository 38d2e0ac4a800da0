"""Programs on tensors of the mesh: products and norms fused with communication, which all devices run together."""

import programs_flags
from programs_flags import BF16, BLOCK, add_row, normalize_row
from tvm.script import tirx as T

from tvm_axe import tile

SMALL = (16, 16, 8)


def product_scatter(devices, m, n, k, block=BLOCK, mistake=None, persistent=True):
    """parts[d, d] = rows of device d of the sum of A B over devices, whose partial products go straight to their owner.

    The own rows come last, and take in what arrived: products of a unit matrix and the peers' parts.
    """
    (bm, bn, bk), rows = block, m // devices
    steps, halves = k // bk, bm // bk
    more = halves * (devices - 1)
    early, wrong = mistake == "signal too early", mistake == "wrong peer"

    @T.prim_func
    def product_scatter(
        A: T.Buffer((devices, rows, k), BF16),
        B: T.Buffer((k, n), BF16),
        unit: T.Buffer((bm, bm), BF16),
        me: T.int32,
        parts: tile.mesh_tensor((devices, devices, rows, n), BF16),
        flags: tile.mesh_tensor((devices, devices, rows // bm, n // bn), "int32"),
    ):
        with tile.kernel(devices, rows // bm, n // bn, swizzle=16, persistent=persistent, order="given", device=me) as (
            s,
            i,
            j,
        ):
            a = tile.shared((bm, bk), BF16)
            b = tile.shared((bk, bn), BF16)
            c = tile.fragment((bm, bn), "float32")
            owner: T.let = (me + 1 + s) % devices
            tile.fill(c, 0)
            if early and s < devices - 1:
                tile.signal(flags[owner, me, i, j])
            for l in tile.pipelined(steps + s // (devices - 1) * more):
                if l < steps:
                    tile.copy(A[owner, i * bm, l * bk], a)
                    tile.copy(B[l * bk, j * bn], b)
                else:
                    if mistake == "wait left out":
                        if l - steps == halves * (devices - 2):
                            tile.wait(flags[me, (me + devices - 1 - (l - steps) // halves) % devices, i, j], reset=True)
                    elif (l - steps) % halves == 0:
                        tile.wait(flags[me, (me + devices - 1 - (l - steps) // halves) % devices, i, j], reset=True)
                    tile.copy(unit[0, (l - steps) % halves * bk], a)
                    tile.copy(
                        parts[
                            me,
                            (me + devices - 1 - (l - steps) // halves) % devices,
                            i * bm + (l - steps) % halves * bk,
                            j * bn,
                        ],
                        b,
                    )
                tile.gemm(a, b, c)
            tile.copy(c, parts[owner, me, i * bm, j * bn])
            if not early and s < devices - 1:
                tile.signal(
                    flags[(owner + 1) % devices if wrong else owner, me, i, j], ordered=mistake != "unordered signal"
                )

    return product_scatter


def product_send(*sizes, **options):
    """As `programs_flags` has it, on the mesh."""
    return programs_flags.product_send(*sizes, mesh=True, **options)


def gather_product(*sizes, **options):
    """As `programs_flags` has it, on the mesh."""
    return programs_flags.gather_product(*sizes, mesh=True, **options)


def reduce_norm(devices, rows, n, push=False, ordered=True, mistake=None, dtype=BF16, eps=1e-6):
    """RMSNorm(x summed over devices + residual) weight, a block a row: tell peers, wait for them, read them.

    With `push` a block stores its row to all peers, tells them, and reads what arrived in its own slab.
    """
    waits, early = mistake != "wait left out", mistake == "signal too early"

    @T.prim_func
    def reduce_norm(
        x: tile.mesh_tensor((devices, rows, n), dtype),
        inbox: tile.mesh_tensor((devices, devices, rows, n), dtype),
        residual: T.Buffer((rows, n), dtype),
        weight: T.Buffer((n,), dtype),
        me: T.int32,
        flags: tile.mesh_tensor((devices, devices, rows), "int32"),
        out: T.Buffer((rows, n), dtype),
    ):
        with tile.kernel(rows, device=me) as r:
            part = tile.fragment((1, n), dtype)
            total = tile.fragment((1, n), "float32")
            square = tile.fragment((1, n), "float32")
            mean = tile.fragment((1,), "float32")
            w = tile.fragment((1, n), dtype)
            if early:
                tile.signal(flags[0:devices, me, r])
            if push:
                tile.copy(x[me, r, 0], part)
                for d in range(devices):
                    tile.copy(part, inbox[d, me, r, 0])
            if not early:
                tile.signal(flags[0:devices, me, r], ordered=ordered or push)
            tile.copy(residual[r, 0], total)
            tile.copy(weight[0], w)
            if waits:
                tile.wait(flags[me, 0:devices, r], reset=True)
            for d in range(devices):
                tile.copy(inbox[me, d, r, 0] if push else x[d, r, 0], part)
                add_row(total, part)
            normalize_row(total, square, mean, w, eps)
            tile.copy(total, out[r, 0])

    return reduce_norm


def scatter_norm_gather(devices, rows, n, mistake=None, dtype=BF16, eps=1e-6):
    """The same in two steps: a device reads the peers' rows of its share, and writes their norm to all devices."""
    share = rows // devices
    second = 0 if mistake == "one flag for two" else 1
    ends = mistake != "end without a wait"

    @T.prim_func
    def scatter_norm_gather(
        x: tile.mesh_tensor((devices, rows, n), dtype),
        residual: T.Buffer((rows, n), dtype),
        weight: T.Buffer((n,), dtype),
        me: T.int32,
        flags: tile.mesh_tensor((devices, devices, share, 2), "int32"),
        out: tile.mesh_tensor((devices, rows, n), dtype),
    ):
        with tile.kernel(share, device=me) as r:
            part = tile.fragment((1, n), dtype)
            total = tile.fragment((1, n), "float32")
            square = tile.fragment((1, n), "float32")
            mean = tile.fragment((1,), "float32")
            w = tile.fragment((1, n), dtype)
            tile.signal(flags[0:devices, me, r, 0], ordered=False)
            tile.copy(residual[me * share + r, 0], total)
            tile.copy(weight[0], w)
            tile.wait(flags[me, 0:devices, r, 0], reset=True)
            for d in range(devices):
                tile.copy(x[d, me * share + r, 0], part)
                add_row(total, part)
            normalize_row(total, square, mean, w, eps)
            tile.copy(total, part)
            for d in range(devices):
                tile.copy(part, out[d, me * share + r, 0])
            tile.signal(flags[0:devices, me, r, second])
            if ends:
                tile.wait(flags[me, 0:devices, r, second], reset=True)

    return scatter_norm_gather
