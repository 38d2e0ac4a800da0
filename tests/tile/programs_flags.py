"""Programs that wait and signal: products and norms fused with communication, as one device of a mesh runs them.

Dim 0 of a mesh tensor is the device; `me` holds the number of the device that runs. `programs_mesh` has those that all
devices run together.
"""

from tvm.script import tirx as T

from tvm_axe import tile

BF16 = "bfloat16"
BLOCK = (128, 256, 64)


@T.inline
def add_row(total, part):
    """Add a row, cast, to another."""
    with tile.parallel(*total.shape) as (z, y):
        total[z, y] = total[z, y] + T.cast(part[z, y], "float32")


@T.inline
def normalize_row(total, square, mean, weight, eps):
    """RMSNorm of a row by a weight, in its place."""
    with tile.parallel(*total.shape) as (z, y):
        square[z, y] = total[z, y] * total[z, y]
    tile.sum(square, mean)
    with tile.parallel(1) as z:
        mean[z] = T.rsqrt(mean[z] / total.shape[1] + eps)
    with tile.parallel(*total.shape) as (z, y):
        total[z, y] = total[z, y] * mean[z] * T.cast(weight[z, y], "float32")


def product_scatter(devices, m, n, k, epilogue_tile=None, persistent=True):
    """Rows of the other devices are stored to their slots of `parts`, and told; the own ones take in what arrived."""
    (bm, bn, bk), rows = BLOCK, m // devices
    steps, halves = k // bk, bm // bk
    more = halves * (devices - 1)

    @T.prim_func
    def product_scatter(
        A: T.Buffer((devices, rows, k), BF16),
        B: T.Buffer((k, n), BF16),
        unit: T.Buffer((bm, bm), BF16),
        me: T.int32,
        parts: T.Buffer((devices, devices, rows, n), BF16),
        arrived: T.Buffer((devices, rows, n), BF16),
        flags: T.Buffer((devices, devices, rows // bm, n // bn), "int32"),
    ):
        with tile.kernel(
            devices, rows // bm, n // bn, swizzle=16, persistent=persistent, order="given", epilogue_tile=epilogue_tile
        ) as (s, i, j):
            a = tile.shared((bm, bk), BF16)
            b = tile.shared((bk, bn), BF16)
            c = tile.fragment((bm, bn), "float32")
            owner: T.let = (me + 1 + s) % devices
            tile.fill(c, 0)
            for l in tile.pipelined(steps + s // (devices - 1) * more):
                if l < steps:
                    tile.copy(A[owner, i * bm, l * bk], a)
                    tile.copy(B[l * bk, j * bn], b)
                else:
                    if (l - steps) % halves == 0:
                        tile.wait(flags[me, (me + devices - 1 - (l - steps) // halves) % devices, i, j], reset=True)
                    tile.copy(unit[0, (l - steps) % halves * bk], a)
                    tile.copy(
                        arrived[
                            (me + devices - 1 - (l - steps) // halves) % devices,
                            i * bm + (l - steps) % halves * bk,
                            j * bn,
                        ],
                        b,
                    )
                tile.gemm(a, b, c)
            tile.copy(c, parts[owner, me, i * bm, j * bn])
            if s < devices - 1:
                tile.signal(flags[owner, me, i, j])

    return product_scatter


def product_send(devices, m, n, k, groups=2, block=BLOCK, ahead=4, mesh=False):
    """Tiles are counted as they are stored to mine; what sends them to `arrived` and sets `flags` is no kernel.

    On a `mesh` the kernel says which device it runs on, and `arrived` is a tensor of the mesh.
    """
    (bm, bn, bk), rows = block, m // devices
    steps, halves = k // bk, bm // bk
    more, wide = halves * (devices - 1), n // groups // bn
    inbox = tile.mesh_tensor((devices, devices, rows, n), BF16) if mesh else T.Buffer((devices, rows, n), BF16)

    @T.prim_func
    def product_send(
        A: T.Buffer((devices, rows, k), BF16),
        B: T.Buffer((k, n), BF16),
        unit: T.Buffer((bm, bm), BF16),
        me: T.int32,
        turn: T.int32,
        mine: T.Buffer((devices, rows, n), BF16),
        done: T.Buffer((devices, groups), "int32"),
        arrived: inbox,
        flags: T.Buffer((devices, groups), "int32"),
    ):
        with tile.kernel(
            devices, rows // bm, n // bn, swizzle=16, persistent=True, order="given", device=me if mesh else None
        ) as (s, i, j):
            a = tile.shared((bm, bk), BF16)
            b = tile.shared((bk, bn), BF16)
            c = tile.fragment((bm, bn), "float32")
            owner: T.let = (me + 1 + s) % devices
            tile.fill(c, 0)
            for l in tile.pipelined(steps + s // (devices - 1) * more):
                if l < steps:
                    if s == devices - 1 and (steps - l) % ahead == 0 and steps - l <= ahead * (devices - 1):
                        tile.wait(flags[(me + (steps - l) // ahead) % devices, j // wide], turn)
                    tile.copy(A[owner, i * bm, l * bk], a)
                    tile.copy(B[l * bk, j * bn], b)
                else:
                    tile.copy(unit[0, (l - steps) % halves * bk], a)
                    peer = T.meta_var((me + devices - 1 - (l - steps) // halves) % devices)
                    row = T.meta_var(i * bm + (l - steps) % halves * bk)
                    tile.copy(arrived[me, peer, row, j * bn] if mesh else arrived[peer, row, j * bn], b)
                tile.gemm(a, b, c)
            tile.copy(c, mine[owner, i * bm, j * bn])
            if s < devices - 1:
                tile.signal(done[owner, j // wide], add=True)

    return product_send


def gather_product(devices, m, n, k, roles=None, block=BLOCK, mesh=False):
    """C = A B, where the rows of A of device d are there once flags[d] is set; the own ones come first.

    On a `mesh` the kernel says which device it runs on, and A is a tensor of the mesh.
    """
    (bm, bn, bk), rows = block, m // devices
    gathered = tile.mesh_tensor((devices, devices, rows, k), BF16) if mesh else T.Buffer((devices, rows, k), BF16)

    @T.prim_func
    def gather_product(
        A: gathered,
        B: T.Buffer((k, n), BF16),
        me: T.int32,
        flags: T.Buffer((devices,), "int32"),
        C: T.Buffer((devices, rows, n), BF16),
    ):
        with tile.kernel(devices, rows // bm, n // bn, order="given", roles=roles, device=me if mesh else None) as (
            s,
            i,
            j,
        ):
            a = tile.shared((bm, bk), BF16)
            b = tile.shared((bk, bn), BF16)
            c = tile.fragment((bm, bn), "float32")
            owner: T.let = (me + s) % devices
            if s > 0:
                tile.wait(flags[owner])
            tile.fill(c, 0)
            for l in tile.pipelined(k // bk):
                tile.copy(A[me, owner, i * bm, l * bk] if mesh else A[owner, i * bm, l * bk], a)
                tile.copy(B[l * bk, j * bn], b)
                tile.gemm(a, b, c)
            tile.copy(c, C[owner, i * bm, j * bn])

    return gather_product


def reduce_norm(devices, rows, n, ordered=False, eps=1e-6):
    """RMSNorm(x summed over devices + residual) weight, a block a row: tell peers, wait for them, read them."""

    @T.prim_func
    def reduce_norm(
        x: T.Buffer((devices, rows, n), BF16),
        residual: T.Buffer((rows, n), BF16),
        weight: T.Buffer((n,), BF16),
        me: T.int32,
        flags: T.Buffer((devices, devices, rows), "int32"),
        out: T.Buffer((rows, n), BF16),
    ):
        with tile.kernel(rows) as r:
            part = tile.fragment((1, n), BF16)
            total = tile.fragment((1, n), "float32")
            square = tile.fragment((1, n), "float32")
            mean = tile.fragment((1,), "float32")
            w = tile.fragment((1, n), BF16)
            tile.signal(flags[0:devices, me, r], ordered=ordered)
            tile.copy(residual[r, 0], total)
            tile.copy(weight[0], w)
            tile.wait(flags[me, 0:devices, r], reset=True)
            for d in range(devices):
                tile.copy(x[d, r, 0], part)
                add_row(total, part)
            normalize_row(total, square, mean, w, eps)
            tile.copy(total, out[r, 0])

    return reduce_norm


def put_rows(rows, n, add=False):
    """B = 2 A, and each row is told: set to `turn`, or counted in one flag."""

    @T.prim_func
    def put_rows(
        A: T.Buffer((rows, n), "float32"),
        turn: T.int32,
        B: T.Buffer((rows, n), "float32"),
        flags: T.Buffer((rows,), "int32"),
    ):
        with tile.kernel(rows) as r:
            part = tile.fragment((1, n), "float32")
            tile.copy(A[r, 0], part)
            with tile.parallel(1, n) as (z, y):
                part[z, y] = part[z, y] * 2.0
            tile.copy(part, B[r, 0])
            if add:
                tile.signal(flags[0], turn, add=True)
            else:
                tile.signal(flags[r], turn)

    return put_rows


def take_rows(rows, n, reset=False):
    """C = B + 1 once all of a row's flag, or of all flags, is there."""

    @T.prim_func
    def take_rows(
        B: T.Buffer((rows, n), "float32"),
        turn: T.int32,
        flags: T.Buffer((rows,), "int32"),
        C: T.Buffer((rows, n), "float32"),
    ):
        with tile.kernel(rows) as r:
            part = tile.fragment((1, n), "float32")
            if reset:
                tile.wait(flags[r], turn, reset=True)
            else:
                tile.wait(flags, turn)
            tile.copy(B[r, 0], part)
            with tile.parallel(1, n) as (z, y):
                part[z, y] = part[z, y] + 1.0
            tile.copy(part, C[r, 0])

    return take_rows


def scaled_rows(rows, n):
    """Scalars of every type: B = A factor + shift on the first `count` rows, from row `first` on."""

    @T.prim_func
    def scaled_rows(
        A: T.Buffer((rows, n), "float32"),
        count: T.int32,
        factor: T.float32,
        B: T.Buffer((rows, n), "float32"),
        first: T.int64,
        shift: T.float64,
    ):
        with tile.kernel(count) as r:
            part = tile.fragment((1, n), "float32")
            tile.copy(A[r, 0], part)
            with tile.parallel(1, n) as (z, y):
                part[z, y] = part[z, y] * factor + T.cast(shift, "float32")
            if T.cast(r, "int64") >= first:
                tile.copy(part, B[r, 0])

    return scaled_rows
