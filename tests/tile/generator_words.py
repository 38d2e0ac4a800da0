"""Words of random programs that are of few bits, of pages, and of random numbers: `generator`'s operations on them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from generator import Maker

ATOMIC = ("float32", "int32", "float16", "bfloat16")
"""The types of a program's tiles whose elements may be joined atomically."""


def combinations(dtype: str) -> list[str]:
    """Functions to reduce by, with their identities, that are exact on whole numbers in every order."""
    found = ["lambda a, b: T.max(T.abs(a), T.abs(b)), identity=0"]
    if "float" in dtype:
        return [
            *found,
            "lambda a, b: a + b + 1, identity=-1",
            "lambda a, b: T.if_then_else(a < b, a, b), identity=1e30",
            "T.max, identity=-1e30",
        ]
    least = np.iinfo(dtype).min
    return [
        *found,
        "lambda a, b: a ^ b, identity=0",
        "T.bitwise_or, identity=0",
        "lambda x, y: x & y, identity=-1",
        f"lambda a, b: T.if_then_else(a > b, a, b), identity={least}",
    ]


def random(maker: Maker) -> None:
    """Random numbers of an element's place, from a seed that is data or none, as words or as parts of one."""
    dst, dtype = maker.target("mn", True)
    seed = maker.choose(["7", "-1", f"{maker.counts}[m]", "T.int64(81985529216486895)", f"{maker.counts}[i]"])
    counter = maker.choose([f"(m * {maker.m} + i) * {maker.columns} + j", "i - j", f"T.cast(j, 'int64') << {40}"])
    word = f'T.floormod(tile.random({seed}, {counter}, dtype="uint32"), T.uint32(61))'
    part = f"tile.random({seed}, {counter}) * T.float32(61)"
    draw = maker.choose([word, f'T.cast({part}, "int32")'])
    maker.line(f"with tile.parallel({maker.m}, {maker.n}) as (i, j):")
    maker.line(f'    {dst}[i, j] = T.cast({draw}, "{dtype}") - T.cast(20, "{dtype}")')


def _decoded(byte: str, column: str, bits: int, dtype: str) -> str:
    """A field of a byte, the first the lowest, as a number of both signs."""
    each = 8 // bits
    field = f'T.bitwise_and(T.shift_right(T.cast({byte}, "int32"), {column} % {each} * {bits}), {2**bits - 1})'
    return f'T.cast({field} - {2 ** (bits - 1)}, "{dtype}")'


def _bytes(maker: Maker, rows: int, columns: int, bits: int) -> str:
    return maker.parameter("Q", maker.rng.integers(0, 256, (rows, columns * bits // 8)).astype("uint8"))


def _sums(maker: Maker, operand: str, first: Sequence[int] = (0,)) -> tuple[str, str]:
    """A tile of sums of products of a type, which begin with one of `first`, and their type."""
    total = "int32" if operand == "int8" else "float32"
    c = maker.alloc("c", "mn", total, "fragment")
    maker.tiles[c] = ("mn", total)
    maker.line(f"tile.fill({c}, {first[0] if len(first) == 1 else maker.choose(first)})")
    return c, total


def packed(maker: Maker) -> None:
    """Numbers of 1, 2 or 4 bits, several a byte, from a tile or from where they lie."""
    bits = maker.choose([1, 2, 4])
    held = -(-maker.n * bits // 8)
    source = maker.parameter("Q", maker.rng.integers(0, 256, (maker.grid[0] * maker.m, held)).astype("uint8"))
    dst, dtype = maker.target("mn", True)
    byte = f"{source}[m * {maker.m} + i, j // {8 // bits}]"
    if maker.choose([False, True, True]):
        part = maker.alloc("b", f"({maker.m}, {held})", "uint8", "shared")
        maker.line(f"tile.copy({source}[m * {maker.m}, 0], {part})")
        byte = f"{part}[i, j // {8 // bits}]"
    maker.line(f"with tile.parallel({maker.m}, {maker.n}) as (i, j):")
    maker.line(f"    {dst}[i, j] = {_decoded(byte, 'j', bits, dtype)}")


def packed_gemm(maker: Maker) -> None:
    """A product whose left operand is decoded from bytes that are loaded ahead, with a scale a row or none."""
    operand, bits = maker.choose(["float16", "bfloat16", "float32", "int8"]), maker.choose([2, 4, 4])
    block = maker.choose([b for b in maker.blocks if b * bits % 8 == 0] or [8])
    steps = maker.choose([1, 2, 3])
    m, n, rows = maker.m, maker.n, maker.grid[0] * maker.m
    source = _bytes(maker, rows, steps * block, bits)
    right = maker.input("B", (steps * block, maker.columns), operand)
    scales = maker.input("S", (rows,), operand, 1, 3) if maker.choose([False, True]) else ""
    q = maker.alloc("b", f"({m}, {block * bits // 8})", "uint8", "shared")
    b = maker.alloc("b", f"({block}, {n})", operand, "shared")
    a = maker.alloc("a", f"({m}, {block})", operand, maker.choose(["fragment", "fragment", "shared"]))
    c, _ = _sums(maker, operand, [0, 1])
    stages = maker.choose([None, *range(1, min(steps, 3) + 1)])
    maker.line(f"for k in tile.pipelined({steps}, stages={stages}):")
    maker.line(f"    tile.copy({source}[m * {m}, k * {block * bits // 8}], {q})")
    maker.line(f"    tile.copy({right}[k * {block}, n * {n}], {b})")
    maker.line(f"    with tile.parallel({m}, {block}) as (i, j):")
    value = _decoded(f"{q}[i, j // {8 // bits}]", "j", bits, operand)
    maker.line(f"        {a}[i, j] = {value}{f' * {scales}[m * {m} + i]' if scales else ''}")
    maker.line(f"    tile.gemm({a}, {b}, {c})")


def paged_gemm(maker: Maker) -> None:
    """A product whose right operand is several pages a step, each where a table says."""
    operand = maker.choose(["float16", "bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2"])
    pages, rows = maker.choose([1, 2, 4]), maker.choose([1, 4, 16])
    block, steps, held = pages * rows, maker.choose([1, 2, 3]), maker.choose([2, 5])
    m, n, transposed = maker.m, maker.n, maker.choose([False, True])
    table = maker.input("T", (steps, pages), "int32", 0, held)
    left = maker.input("A", (maker.rows, steps * block), operand)
    cache = maker.input("B", (held, rows, maker.columns), operand)
    a = maker.alloc("a", f"({m}, {block})", operand, "shared")
    b = maker.alloc("b", f"({block}, {n})", operand, "shared")
    c, _ = _sums(maker, operand)
    stages = maker.choose([None, *range(1, min(steps, 3) + 1)])
    maker.line(f"for k in tile.pipelined({steps}, stages={stages}):")
    if maker.choose([False, True]):
        maker.line(f"    first{c} = {table}[k, 0]")
        places = [f"first{c}", *(f"{table}[k, {page}]" for page in range(1, pages))]
    else:
        places = [f"{table}[k, {page}]" for page in range(pages)]
    for page, at in enumerate(places):
        part = f"{b}[{page * rows}:{page * rows + rows}, 0:{n}]"
        maker.line(f"    tile.copy({cache}[{at}, 0:{rows}, n * {n}:n * {n} + {n}], {part})")
    maker.line(f"    tile.copy({left}[m * {m}, k * {block}], {a})")
    if not transposed:
        maker.line(f"    tile.gemm({a}, {b}, {c})")
        return
    turned = maker.alloc("b", f"({n}, {block})", operand, "shared")
    maker.line(f"    with tile.parallel({n}, {block}) as (i, j):")
    maker.line(f"        {turned}[i, j] = {b}[j, i]")
    maker.line(f"    tile.gemm({a}, {turned}, {c}, transpose_b=True)")


def gemm_of_parts(maker: Maker) -> None:
    """A product of parts of shared tiles, which begin in the midst of what instructions take at once, or not."""
    operand = maker.choose(["float16", "bfloat16", "float32", "int8", "float8_e4m3fn"])
    block, m, n = maker.choose(maker.blocks), maker.m, maker.n
    above, before, left = (maker.choose([0, 1, 4, 8, 16, 64]) for _ in range(3))
    ta, tb = maker.choose([False, True]), maker.choose([False, True])

    def part(name: str, rows: tuple[int, int], columns: tuple[int, int], turned: bool) -> str:
        """A tile with so many rows and columns in front of the product's; the expression of its part."""
        spans = (columns, rows) if turned else (rows, columns)
        shape = tuple(first + size for first, size in spans)
        source = maker.input(name, shape, operand)
        held = maker.alloc(name.lower(), str(shape), operand, "shared")
        maker.line(f"tile.copy({source}, {held})")
        return f"{held}[" + ", ".join(f"{first}:{first + size}" for first, size in spans) + "]"

    a, b = part("A", (above, m), (left, block), ta), part("B", (left, block), (before, n), tb)
    c, _ = _sums(maker, operand)
    maker.line(f"tile.gemm({a}, {b}, {c}, transpose_a={ta}, transpose_b={tb})")


def boxed_gemm(maker: Maker) -> None:
    """A product of a tensor's box, which is gathered element by element, from in front of the tensor on or not.

    Conditions say what is in the tensor, or almost that. The sums are stored element by element as a box, too, or not.
    """
    operand = maker.choose(["float16", "bfloat16", "float16", "bfloat16", "float32", "int8"])
    block, steps, m, n = maker.choose(maker.blocks), maker.choose([1, 2, 3]), maker.m, maker.n
    images = maker.choose([size for size in (1, 2, 3, 8) if m % size == 0])
    rows = maker.choose([size for size in (1, 3, 4, 8) if m // images % size == 0])
    columns = m // images // rows
    shape = (
        images * maker.choose([1, 2]) + maker.choose([0, 1]),
        max(1, rows + maker.choose([-1, 0, 2])),
        max(1, columns + maker.choose([-1, 0, 3])),
        maker.choose([1, steps]) * block + maker.choose([0, 0, 0, 1, 8]),
    )
    source = maker.input("X", shape, operand)
    starts = [
        f"m * {images}",
        maker.choose(["k - 1", "0 - k", "1", "m - n"]),
        maker.choose(["0 - 1", "k", "1 - m", "2"]),
        maker.choose([f"k * {block}", "0"]),
    ]
    index = [f"{start} + {point}" for start, point in zip(starts, "pqrv")]
    bounds = [each for at, size in zip(index, shape) for each in (f"{at} >= 0", f"{at} < {size}")]
    off = maker.choose([None, None, None, None, 3, 5])  # a bound that is none of the tensor's
    if off is not None:
        bounds[off] = bounds[off].replace(f"< {shape[off // 2]}", f"< {shape[off // 2] - 1}")
    if maker.choose([False, False, True]):
        bounds.append(maker.choose(["p < 9", "v + r >= 0", "q != 1", "m < 2"]))
    right = maker.input("B", (steps * block, maker.columns), operand)
    a = maker.alloc("a", f"({m}, {block})", operand, "shared")
    b = maker.alloc("b", f"({block}, {n})", operand, "shared")
    c, total = _sums(maker, operand)
    maker.line(f"for k in tile.pipelined({steps}, stages={maker.choose([None, *range(1, min(steps, 3) + 1)])}):")
    maker.line(f"    with tile.parallel({images}, {rows}, {columns}, {block}) as (p, q, r, v):")
    at = f"(p * {rows} + q) * {columns} + r"
    value = f'T.if_then_else({" and ".join(bounds)}, {source}[{", ".join(index)}], T.cast(0, "{operand}"))'
    maker.line(f"        {a}[{at}, v] = {value}")
    maker.line(f"    tile.copy({right}[k * {block}, n * {n}], {b})")
    maker.line(f"    tile.gemm({a}, {b}, {c})")
    if not maker.choose([False, True]):
        return
    out = maker.choose(["float16", "bfloat16", total])
    whole = (maker.grid[0] * images - maker.choose([0, 1]), rows + maker.choose([-1, 0, 1]), columns, maker.columns)
    whole = (max(1, whole[0]), max(1, whole[1]), *whole[2:])
    stored = maker.parameter("Z", np.full(whole, np.nan if "float" in out else -77).astype(out))
    maker.line(f"with tile.parallel({images}, {rows}, {columns}, {n}) as (p, q, r, v):")
    places = [f"m * {images} + p", "q", "r", f"n * {n} + v"]
    inside = " and ".join(f"{place} < {size}" for place, size in zip(places, whole))
    maker.line(f"    if {inside}:")
    maker.line(f'        {stored}[{", ".join(places)}] = T.cast({c}[{at}, v], "{out}")')


def counted(maker: Maker) -> None:
    """How many elements of the tile are at least a number that data say, by all blocks, and the largest place."""
    src = maker.choose(maker.written("mn"))
    dtype = maker.tiles[src][1]
    total = maker.parameter("H", np.zeros((maker.m,), "int32"))
    held = maker.alloc("h", "mn", dtype, "shared")
    maker.line(f"tile.copy({src}, {held})")
    maker.line(f"with tile.parallel({maker.m}, {maker.n}) as (i, j):")
    maker.line(f'    if T.cast({held}[i, j], "float32") >= T.cast({maker.counts}[i], "float32"):')
    kind, value = maker.choose([("add", "1"), ("max", "m * 3 + j"), ("min", "0 - i - j")])
    maker.line(f"        tile.atomic_{kind}({value}, {total}[i])")


WORDS = (random, packed, packed_gemm, paged_gemm, gemm_of_parts, boxed_gemm, counted)
"""What a program draws one of, as one of its operations."""
