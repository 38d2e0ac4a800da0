"""Products that work on while copy engines move what they made, or what they still need.

`matmul_scatter` sums a product over the devices and leaves each its rows; `gather_matmul` multiplies rows that come
from all of them. Each is one persistent kernel that takes a device's own rows last, or first, and meets copies in words
of 32 bits: it counts the tiles that a copy waits for, and waits for the flags that are set behind copies to this
device. It never waits for another kernel, which may not be running yet (`tvm_axe.lower.pairs` has the copies). With
`matmul_of_shares` the product is two kernels, one of which copies run beside (`tvm_axe.relax.beside`).

Of `devices` devices, `me` runs; rows of the whole product are theirs in equal shares.
"""

from __future__ import annotations

import math
from typing import Any

from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.tile.kernels.kernel import Recipe
from tvm_axe.tile.reading import read

FLAGS, COUNTERS = 0, 1
"""What the first dimension of the words means: flags that copies to this device set, counters of its own tiles."""


def groups_of_blocks(extent: int, block: int, most: int) -> tuple[int, int]:
    """In how many groups of blocks an extent is copied, at most `most`, and how many blocks one has; the last less.

    They are of columns of a product's tiles, or of its terms.
    """
    blocks = -(-extent // block)
    each = -(-blocks // min(most, blocks))
    return -(-blocks // each), each


def matmul_scatter(
    devices: int,
    m: int,
    n: int,
    k: int,
    dtype: str,
    out_dtype: str | None = None,
    transpose_b: bool = True,
    whole: bool = False,
    *,
    pieces: int = 1,
    groups: int,
    block_m: int,
    block_n: int,
    block_k: int,
    stages: int = 0,
    swizzle: int = 16,
) -> Recipe:
    """Own rows of the sum over devices of A B: A (m, k); B (n, k), or (k, n) without `transpose_b`.

    The rows of the device behind this one come first, then those of the next, the own ones last. A tile of another's
    rows goes to `mine`, rounded to `dtype`, and is counted by its owner and its group of columns. Of a tile of its own
    rows the sum goes on over what the peers have sent to `arrived`, in the order of the devices before this one:
    further steps multiply it by the unit matrix, so that the tensor cores add it in float32. Then comes the epilogue,
    if there is one, and the one rounding. What isn't finite spreads over a tile's rows, or its columns with
    `transpose_b`: zero times infinity is no number.

    In several `pieces`, a partial sum is sent as what `dtype` has of it, then what it has of the rest, and so on, and
    all are added: two of bfloat16 have 16 bits, about what is left of a float32 that summed many terms; three have 24.

    `out` has the own rows alone, or is the `whole` of the product, of which they are written and counted too.

    Parameters
    ----------
    dtype : str
        Of A and B, and of the partial sums: ``"float16"`` or ``"bfloat16"``.
    pieces : int
        How many numbers of `dtype` a partial sum is sent as.
    groups : int
        At most how many groups of columns are sent one after the other.

    Returns
    -------
    Recipe
        Two programs: one clears the words and writes the unit matrix, which all devices do before any goes on; one
        multiplies. The words are ``(2, devices, groups)``.

    Raises
    ------
    TileError
        There is one device, the devices don't divide the rows, or `block_k` doesn't divide the side of a tile that the
        unit matrix has.
    """
    rows = _share(devices, m)
    out = out_dtype or dtype
    side = block_n if transpose_b else block_m
    if side % block_k:
        raise TileError(
            f"matmul_scatter: block_k={block_k} doesn't divide the {side} {'columns' if transpose_b else 'rows'} of a "
            "tile, by whose unit matrix partial sums are multiplied; valid is a divisor"
        )
    steps, parts = -(-k // block_k), side // block_k
    each, last, slots = parts * pieces, devices - 1, devices if whole else 1  # steps of a peer's partial sums
    more, sums = each * last, (devices, *([pieces] if pieces > 1 else []), rows, n)
    sent, wide = groups_of_blocks(n, block_n, groups)
    b_shape, b_tile = ((n, k), (block_n, block_k)) if transpose_b else ((k, n), (block_k, block_n))
    cut, height = side // math.gcd(side, 16), math.gcd(side, 16)

    def inside(start: Any, step: Any, extent: int) -> Any:
        """Where a step's partial sums start: what would start behind the end is added to what isn't stored."""
        start = start + step % parts * block_k
        return start if extent % side == 0 else T.min(start, (extent - 1) // block_k * block_k)

    def peer(me: Any, step: Any) -> Any:
        """Whose partial sums are added in a step."""
        return (me + last - step // each) % devices

    def place(slot: Any, piece: Any, row: Any, column: Any) -> Any:
        """Where the tile at a row and a column of a piece is in the sums of a device."""
        return (slot, piece, row, column) if pieces > 1 else (slot, row, column)

    @T.prim_func
    def prepare(words: T.Buffer((2, devices, sent), "int32"), unit: T.Buffer((side, side), dtype)) -> None:
        with tile.kernel(cut) as i:
            with tile.parallel(height, side) as (x, y):
                unit[i * height + x, y] = T.cast(T.Select(i * height + x == y, T.float32(1), T.float32(0)), dtype)
            if i == 0:
                with tile.parallel(2, devices, sent) as (u, d, g):
                    words[u, d, g] = 0

    @T.prim_func
    def matmul_scatter(
        A: T.Buffer((devices, rows, k), dtype),
        B: T.Buffer(b_shape, dtype),
        me: T.int32,
        unit: T.Buffer((side, side), dtype),
        arrived: T.Buffer(sums, dtype),
        words: T.Buffer((2, devices, sent), "int32"),
        mine: T.Buffer(sums, dtype),
        out: T.Buffer((slots, rows, n), out),
    ) -> None:
        with _turns(devices, tile.cdiv(rows, block_m), tile.cdiv(n, block_n), swizzle) as (s, i, j):
            a = tile.shared((block_m, block_k), dtype)
            b = tile.shared(b_tile, dtype)
            c = tile.fragment((block_m, block_n), "float32")
            owner: T.let = (me + 1 + s) % devices
            tile.fill(c, 0)
            for l in tile.pipelined(steps + s // last * more, stages=stages or None):
                if l < steps:
                    tile.copy(A[owner, i * block_m, l * block_k], a)
                    tile.copy(B[j * block_n, l * block_k] if transpose_b else B[l * block_k, j * block_n], b)
                else:
                    if (l - steps) % each == 0:
                        tile.wait(words[FLAGS, peer(me, l - steps), j // wide], loads=True)
                    if transpose_b:
                        tile.copy(
                            arrived[
                                place(
                                    peer(me, l - steps),
                                    (l - steps) // parts % pieces,
                                    i * block_m,
                                    inside(j * block_n, l - steps, n),
                                )
                            ],
                            a,
                        )
                        tile.copy(unit[0, (l - steps) % parts * block_k], b)
                    else:
                        tile.copy(unit[0, (l - steps) % parts * block_k], a)
                        tile.copy(
                            arrived[
                                place(
                                    peer(me, l - steps),
                                    (l - steps) // parts % pieces,
                                    inside(i * block_m, l - steps, rows),
                                    j * block_n,
                                )
                            ],
                            b,
                        )
                tile.gemm(a, b, c, transpose_b=transpose_b)
            if s < last:
                tile.copy(c, mine[place(owner, 0, i * block_m, j * block_n)])
                if pieces > 1:
                    with tile.parallel(block_m, block_n) as (x, y):
                        c[x, y] = c[x, y] - T.cast(T.cast(c[x, y], dtype), "float32")
                    tile.copy(c, mine[place(owner, 1, i * block_m, j * block_n)])
                if pieces > 2:
                    with tile.parallel(block_m, block_n) as (x, y):
                        c[x, y] = c[x, y] - T.cast(T.cast(c[x, y], dtype), "float32")
                    tile.copy(c, mine[place(owner, 2, i * block_m, j * block_n)])
                tile.signal(words[COUNTERS, owner, j // wide], add=True)
            else:
                tile.copy(c, out[me % slots, i * block_m, j * block_n])
                if whole:
                    tile.signal(words[COUNTERS, owner, j // wide], add=True)

    return Recipe((read(prepare), read(matmul_scatter)), ("A", "B", "arrived"), ("out",))


def gather_matmul(
    devices: int,
    m: int,
    n: int,
    k: int,
    dtype: str,
    out_dtype: str | None = None,
    transpose_b: bool = True,
    *,
    parts: int = 1,
    block_m: int,
    block_n: int,
    block_k: int,
    stages: int = 0,
    swizzle: int = 16,
) -> Recipe:
    """C = A B, of whose rows each device has a share at first: `own` (m / devices, k); B as in `matmul_scatter`.

    The own rows come first, then those of the devices behind this one, as the flags say that they have been copied to
    `gathered`, in which the own ones need not be: at most so many `parts` of the terms, one behind the other, so that
    tiles of rows that come late multiply while they come.

    Parameters
    ----------
    dtype : str
        Of A and B: ``"float16"`` or ``"bfloat16"``.

    Returns
    -------
    Recipe
        Two programs: one clears the words, one multiplies. The words are ``(2, devices, parts)``, of which the second
        half isn't used.

    Raises
    ------
    TileError
        There is one device, or the devices don't divide the rows.
    """
    rows, out = _share(devices, m), out_dtype or dtype
    come, each = groups_of_blocks(k, block_k, parts)
    b_shape, b_tile = ((n, k), (block_n, block_k)) if transpose_b else ((k, n), (block_k, block_n))

    @T.prim_func
    def prepare(words: T.Buffer((2, devices, come), "int32")) -> None:
        with tile.kernel(1), tile.parallel(2, devices, come) as (u, d, g):
            words[u, d, g] = 0

    @T.prim_func
    def gather_matmul(
        own: T.Buffer((rows, k), dtype),
        B: T.Buffer(b_shape, dtype),
        me: T.int32,
        gathered: T.Buffer((devices, rows, k), dtype),
        words: T.Buffer((2, devices, come), "int32"),
        C: T.Buffer((devices, rows, n), out),
    ) -> None:
        with _turns(devices, tile.cdiv(rows, block_m), tile.cdiv(n, block_n), swizzle) as (s, i, j):
            a = tile.shared((block_m, block_k), dtype)
            b = tile.shared(b_tile, dtype)
            c = tile.fragment((block_m, block_n), "float32")
            owner: T.let = (me + s) % devices
            tile.fill(c, 0)
            for l in tile.pipelined(tile.cdiv(k, block_k), stages=stages or None):
                if s > 0:
                    if l % each == 0:
                        tile.wait(words[FLAGS, owner, l // each], loads=True)
                    tile.copy(gathered[owner, i * block_m, l * block_k], a)
                    tile.copy(B[j * block_n, l * block_k] if transpose_b else B[l * block_k, j * block_n], b)
                else:
                    tile.copy(own[i * block_m, l * block_k], a)
                    tile.copy(B[j * block_n, l * block_k] if transpose_b else B[l * block_k, j * block_n], b)
                tile.gemm(a, b, c, transpose_b=transpose_b)
            tile.copy(c, C[owner, i * block_m, j * block_n])

    return Recipe((read(prepare), read(gather_matmul)), ("own", "B", "gathered"), ("C",))


def matmul_of_shares(
    devices: int,
    m: int,
    n: int,
    k: int,
    dtype: str,
    transpose_b: bool = True,
    *,
    first: int,
    count: int,
    own: bool = False,
    block_m: int,
    block_n: int,
    block_k: int,
    stages: int = 0,
    swizzle: int = 16,
) -> Recipe:
    """Some rows of C = A B: those of `count` devices, of the one `first` places behind this one and of those behind it.

    Nothing is waited for, or counted: copies of these rows, or of what they are made of, run beside the product of the
    others. B is as in `matmul_scatter`; other rows of C stay as they are.

    Parameters
    ----------
    dtype : str
        Of A, B and C: ``"float16"`` or ``"bfloat16"``.
    own : bool
        Whether A has this device's rows alone, (m / devices, k); else it is (devices, m / devices, k).

    Raises
    ------
    TileError
        There is one device, or the devices don't divide the rows.
    """
    rows = _share(devices, m)
    b_shape, b_tile = ((n, k), (block_n, block_k)) if transpose_b else ((k, n), (block_k, block_n))
    a_shape = (rows, k) if own else (devices, rows, k)

    @T.prim_func
    def matmul_of_shares(
        A: T.Buffer(a_shape, dtype),
        B: T.Buffer(b_shape, dtype),
        me: T.int32,
        C: T.Buffer((devices, rows, n), dtype),
    ) -> None:
        with tile.kernel(count, tile.cdiv(rows, block_m), tile.cdiv(n, block_n), swizzle=swizzle) as (s, i, j):
            a = tile.shared((block_m, block_k), dtype)
            b = tile.shared(b_tile, dtype)
            c = tile.fragment((block_m, block_n), "float32")
            owner: T.let = (me + first + s) % devices
            tile.fill(c, 0)
            for l in tile.pipelined(tile.cdiv(k, block_k), stages=stages or None):
                tile.copy(A[i * block_m, l * block_k] if own else A[owner, i * block_m, l * block_k], a)
                tile.copy(B[j * block_n, l * block_k] if transpose_b else B[l * block_k, j * block_n], b)
                tile.gemm(a, b, c, transpose_b=transpose_b)
            tile.copy(c, C[owner, i * block_m, j * block_n])

    return Recipe((read(matmul_of_shares),), ("A", "B"), ("C",))


def _turns(devices: int, down: int, across: int, swizzle: int) -> Any:
    """The grid of a persistent kernel that takes the rows of one device after those of another, tile by tile."""
    return tile.kernel(devices, down, across, swizzle=swizzle, persistent=True, order="given", roles="specialized")


def _share(devices: int, m: int) -> int:
    """The rows of each device."""
    if devices < 2 or m % devices:
        raise TileError(f"{m} rows on {devices} devices: valid are two devices or more, and equal shares")
    return m // devices
