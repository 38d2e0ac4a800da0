"""Programs for Hopper whose consumers write tiles of shared memory that TMA takes to global memory, as text."""

import random

import tvm
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import tile

ROWS, STEPS = 128, 5
"""Rows of each tile that is sent, and the most steps of a loop."""


def sent(draw: random.Random) -> tirx.PrimFunc:
    """A program of loops that compute tiles and send them, in order or adding, some of them twice or in an arm.

    Its parameters are A (256, 320) and B (64, 320) of float16, r (320,) of float32, small integers, which threads read
    beside products if at all, n (4,) of int32, and an output O1, O2, .. for each tile,
    of float32 or float16: (256, 64 or 32) for those that add up, else (1280, 64 or 32), a tile for each step. A and B
    are to be -1, 0 or 1, so that all sums are exact.
    """
    made = _Sent(draw)
    return made.func()


class _Sent:
    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.tiles = [
            (draw.choice(["float32", "float16"]), draw.choice([64, 32]), draw.random() < 0.6)
            for _ in range(draw.randint(1, 2))
        ]
        # Sums that are added as they are go through a tile of the kernel's own.
        self.direct = [adds and columns == 64 and draw.random() < 0.4 for _, columns, adds in self.tiles]
        self.beside = draw.random() < 0.6

    def func(self) -> tirx.PrimFunc:
        draw, parameters, tiles = self.draw, [], []
        for number, (dtype, columns, adds) in enumerate(self.tiles, 1):
            rows = 2 * ROWS * (1 if adds else STEPS)
            parameters.append(f"O{number}: T.Buffer(({rows}, {columns}), '{dtype}')")
            if not self.direct[number - 1]:
                tiles.append(f"o{number} = tile.shared(({ROWS}, {columns}), '{dtype}')")
        extent = draw.choice(["1", "3", str(STEPS), "n[0]", "n[1]"])
        loop = draw.choice(["range({})", "tile.pipelined({})", "tile.pipelined({}, stages=1)"]).format(extent)
        body = [f"for l in {loop}:", *(f"    {line}" for line in self.body())]
        if all(adds for *_, adds in self.tiles) and draw.random() < 0.4:
            body = [f"for o in range({draw.choice(['2', 'n[2]'])}):", *(f"    {line}" for line in body)]
        source = [
            "@T.prim_func",
            "def func(A: T.Buffer((256, 320), 'float16'), B: T.Buffer((64, 320), 'float16'),",
            "         r: T.Buffer((320,), 'float32'),",
            f"         n: T.Buffer((4,), 'int32'), {', '.join(parameters)}):",
            "    with tile.kernel(2) as b:",
            f"        a = tile.shared(({ROWS}, 64), 'float16')",
            "        w = tile.shared((64, 64), 'float16')",
            f"        held = tile.shared(({ROWS}, 64), 'float16')",
            *(f"        {line}" for line in tiles),
            *["        small = tile.shared((64,), 'float32')"] * self.beside,
            f"        c = tile.fragment(({ROWS}, 64), 'float32')",
            f"        e = tile.fragment(({ROWS}, 64), 'float32')",
            "        tile.fill(e, 0)",
            *(f"        {line}" for line in body),
        ]
        return tvm.script.from_source("\n".join(source), extra_vars={"tile": tile, "T": T})

    def body(self) -> list[str]:
        """A product, and of each tile writes and sends behind it, between what threads or products do besides."""
        draw = self.draw
        lines = [
            f"tile.copy(A[b * {ROWS}, l * 64], a)",
            "tile.copy(B[0, l * 64], w)",
            "tile.gemm(a, w, c, transpose_b=True, accumulate=False)",
        ]
        if self.beside:
            lines.insert(draw.randint(0, 2), "tile.copy(r[l * 64], small)")
            lines += [f"with tile.parallel({ROWS}, 64) as (x, y):", "    c[x, y] = c[x, y] + small[y]"]
        parts = [self.part(number) for number in range(1, len(self.tiles) + 1)]
        others = [["tile.copy(c, held)", "tile.gemm(held, w, e)"], ["tile.gemm(a, w, e, transpose_b=True)"]]
        order = [number for number, part in enumerate(parts) for _ in part]
        draw.shuffle(order)
        taken = [iter(part) for part in parts]
        items = [next(taken[number]) for number in order]
        for other in others:
            if draw.random() < 0.5:
                items.insert(draw.randint(0, len(items)), other)
        return lines + [line for item in items for line in item]

    def part(self, number: int) -> list[list[str]]:
        """What writes a tile and what sends it, once or, where it adds, twice; perhaps in an arm."""
        draw, (dtype, columns, adds) = self.draw, self.tiles[number - 1]
        at = f"b * {ROWS}" if adds else f"(b * {STEPS} + l) * {ROWS}"
        if self.direct[number - 1]:
            return [[f"tile.atomic_add(c, O{number}[{at}, 0])"]] * draw.randint(1, 2)
        send = [f"tile.copy(o{number}, O{number}[{at}, 0]{', atomic=' + repr('add') if adds else ''})"]
        whole = columns == 64 and draw.random() < 0.5
        found = []
        for time in range(draw.randint(1, 2) if adds else 1):
            value = f"c[x, y] * {time + 1} + y % 4" if not whole else ""
            cast = f"T.cast({value}, '{dtype}')" if dtype != "float32" else f"T.cast({value}, 'float32')"
            write = (
                [f"tile.copy(c, o{number})"]
                if whole
                else [f"with tile.parallel({ROWS}, {columns}) as (x, y): ", f"    o{number}[x, y] = {cast}"]
            )
            found += [write, send]
        if adds and draw.random() < 0.3:
            lines = [line for item in found for line in item]
            return [["if l != 1:", *(f"    {line}" for line in lines)]]
        return found


PLACES = {
    "a tile of its own each time": "(b * 5 + l) * 128",
    "the same": "b * 640",
    "every other": "(b * 5 + l // 2) * 128",
    "half of the last one": "(b * 10 + l) * 64",
    "as data say": "(b * 5 + n[3 - l]) * 128",
}
"""Where a loop's iteration stores, in a tensor of 1280 rows."""


def overwriting(draw: random.Random) -> tirx.PrimFunc:
    """A program that stores tiles of sums to places of a tensor O (1280, 128) of float16, some of them again.

    Some write a tile of shared memory in front of the loop, and read it behind.

    A, B and n are as `sent` takes them, n with numbers below 5.
    """
    stores = []
    for _ in range(draw.randint(1, 2)):
        rows = next(iter(PLACES.values())) if draw.random() < 0.5 else draw.choice(list(PLACES.values()))
        column = draw.choice([0, 0, 64, 32])
        stored = draw.choice([f"tile.copy(c, O[{rows}, {column}])", f"tile.copy(e, O[{rows}, {column}])"])
        if draw.random() < 0.3:
            stored = f"with tile.parallel(128, 64) as (x, y): O[{rows} + x, {column} + y] = T.cast(c[x, y], 'float16')"
        if draw.random() < 0.3:
            stored = f"tile.fill(O[{rows} : {rows} + 128, {column} : {column} + 64], {draw.randint(1, 9)})"
        stores.append(stored)
    products = [
        "tile.gemm(a, w, c, transpose_b=True, accumulate=False)",
        "tile.gemm(a, w, e, transpose_b=True)",
    ]
    items = [products[0], *draw.sample([*stores, products[1]], len(stores) + 1)]
    lines = []
    for item in items:
        head, colon, rest = item.partition("(x, y): ")
        made = [f"{head}{colon.strip()}", f"    {rest}"] if colon else [item]
        if item in stores and draw.random() < 0.25:
            made = [f"if {draw.choice(['l != 1', 'n[0] > 2'])}:", *(f"    {line}" for line in made)]
        lines += made
    before, behind = [], []
    if draw.random() < 0.4:
        each = "with tile.parallel(128, 64) as (x, y):"
        before = ["h = tile.shared((128, 64), 'float16')", each, "    h[x, y] = T.cast(x % 4 + y % 8, 'float16')"]
        behind = [each, "    e[x, y] = e[x, y] + T.cast(h[127 - x, y], 'float32')"]
        behind.append("tile.copy(e, O[b * 640 + 512, 64])")
    source = [
        "@T.prim_func",
        "def func(A: T.Buffer((256, 320), 'float16'), B: T.Buffer((64, 320), 'float16'),",
        "         n: T.Buffer((4,), 'int32'), O: T.Buffer((1280, 128), 'float16')):",
        "    with tile.kernel(2) as b:",
        "        a = tile.shared((128, 64), 'float16')",
        "        w = tile.shared((64, 64), 'float16')",
        "        c = tile.fragment((128, 64), 'float32')",
        "        e = tile.fragment((128, 64), 'float32')",
        "        tile.fill(e, 0)",
        *(f"        {line}" for line in before),
        f"        for l in {draw.choice(['range(4)', 'tile.pipelined(4)', 'range(n[1])', 'range(n[0])'])}:",
        "            tile.copy(A[b * 128, l * 64], a)",
        "            tile.copy(B[0, l * 64], w)",
        *(f"            {line}" for line in lines),
        *(f"        {line}" for line in behind),
    ]
    return tvm.script.from_source("\n".join(source), extra_vars={"tile": tile, "T": T})
