"""Programs for Hopper whose tiles are loaded in one order and read in another, as text."""

import random

import tvm
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import tile

LOOPS = {
    "range": "range({})",
    "pipelined": "tile.pipelined({})",
    "one stage": "tile.pipelined({}, stages=1)",
    "two stages": "tile.pipelined({}, stages=2)",
}

USES = {
    "g": "tile.gemm(a, b, c, transpose_b=True)",
    "h": "tile.gemm(b, b, e, transpose_b=True)",
    "i": "tile.gemm(a, a, e, transpose_b=True)",
    "s": "with tile.parallel(64) as x: d[x] = d[x] + s[x]",
    "t": "with tile.parallel(64) as x: d[x] = d[x] + t[x]",
    "x": "with tile.parallel(64) as x: d[x] = d[x] + s[x] * t[x]",
    "y": "with tile.parallel(64) as x: d[x] = d[x] + s[x] * a[x, 3]",
    "z": "with tile.parallel(64) as x: d[x] = d[x] + s[x] * b[5, x]",
}
"""What an iteration computes, of the tiles a and b (matrices), s and t (vectors), into sums."""

LOADS = {
    "a": "tile.copy(A[0, l * 64], a)",
    "b": "tile.copy(A[64, l * 64], b)",
    "s": "tile.copy(S[l, 0], s)",
    "t": "tile.copy(S[l + 1, 0], t)",
}


def interleaved(loads: str, uses: str, loop: str = "range", extent: object = 4, outer: object = 0) -> tirx.PrimFunc:
    """A loop that has `loads` in this order, and then `uses`; with `outer`, as often around it."""
    lines = [f"for l in {LOOPS[loop].format(extent)}:"]
    for made in [LOADS[name] for name in loads] + [USES[name] for name in uses]:
        head, colon, rest = made.partition(": ")
        lines += [f"    {head}{colon.strip()}", f"        {rest}"] if colon else [f"    {made}"]
    if outer:
        lines = [f"for o in range({outer}):", *(f"    {line}" for line in lines)]
    return _made(lines, {name: name in "ab" for name in loads})


def _made(lines: list[str], tiles: dict[str, bool]) -> tirx.PrimFunc:
    """A program of some lines, and of shared tiles that are matrices (True) or vectors."""
    shapes = {True: "(64, 64)", False: "(64,)"}
    source = [
        "@T.prim_func",
        "def func(A: T.Buffer((128, 1024), 'float16'), S: T.Buffer((17, 64), 'float16'), n: T.Buffer((8,), 'int32'),",
        "         C: T.Buffer((64, 64), 'float32'), E: T.Buffer((64, 64), 'float32'), D: T.Buffer((64,), 'float32')):",
        "    with tile.kernel(1):",
        *(f"        {name} = tile.shared({shapes[matrix]}, 'float16')" for name, matrix in tiles.items()),
        "        c = tile.fragment((64, 64), 'float32')",
        "        e = tile.fragment((64, 64), 'float32')",
        "        d = tile.fragment((64,), 'float32')",
        "        tile.fill(c, 0)",
        "        tile.fill(e, 0)",
        "        tile.fill(d, 0)",
        *(f"        {line}" for line in lines),
        "        tile.copy(c, C[0, 0])",
        "        tile.copy(e, E[0, 0])",
        "        tile.copy(d, D[0])",
    ]
    return tvm.script.from_source("\n".join(source), extra_vars={"tile": tile, "T": T})


def nested(draw: random.Random) -> tirx.PrimFunc:
    """A program of loops in loops and branches, each with loads of its own that are read in any order."""
    made = _Nest(draw)
    return _made(made.body((), 2), made.tiles)


class _Nest:
    def __init__(self, draw: random.Random) -> None:
        self.draw, self.tiles, self.count = draw, {}, 0

    def name(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    def body(self, loops: tuple[str, ...], depth: int) -> list[str]:
        """Loads, uses of each of them, and perhaps a loop and a branch among these."""
        draw, at = self.draw, loops[-1] if loops else "0"
        new = [(self.name("t"), draw.random() < 0.7) for _ in range(draw.randint(1, 3))]
        self.tiles |= dict(new)
        loads = [[f"tile.copy({f'A[0, {at} * 64]' if matrix else f'S[{at}, 0]'}, {name})"] for name, matrix in new]
        matrices = [name for name, matrix in new if matrix]
        uses = [self.summed(name, matrix) for name, matrix in new if not matrix or draw.random() < 0.3]
        unread = [name for name in matrices if not any(f" {name}[" in line for use in uses for line in use)]
        for name in unread + draw.choices(matrices, k=draw.randint(0, 2)) if matrices else []:
            uses.append([f"tile.gemm({name}, {draw.choice(matrices)}, {draw.choice('ce')}, transpose_b=True)"])
        draw.shuffle(uses)
        items = loads + uses
        if depth and draw.random() < 0.7:
            items.insert(draw.randint(0, len(items)), self.loop(loops, depth))
        if depth and draw.random() < 0.4:
            items.insert(draw.randint(0, len(items)), self.branch(loops))
        return [line for item in items for line in item]

    def summed(self, name: str, matrix: bool) -> list[str]:
        return ["with tile.parallel(64) as x:", f"    d[x] = d[x] + {name}[x{', 1' * matrix}]"]

    def loop(self, loops: tuple[str, ...], depth: int) -> list[str]:
        var, known = self.name("l"), [f"n[{loops[-1]}]", f"{loops[-1]} + 1"] if loops else []
        extent = self.draw.choice(["1", "2", "3", "n[0]", "n[1]", *known])
        stages = self.draw.choice(["range({})", "tile.pipelined({})", "tile.pipelined({}, stages=1)"])
        inner = self.body((*loops, var), depth - 1)
        return [f"for {var} in {stages.format(extent)}:", *(f"    {line}" for line in inner)]

    def branch(self, loops: tuple[str, ...]) -> list[str]:
        condition = self.draw.choice(["n[2] > 0", *[f"{loop} > 0" for loop in loops[-1:]]])
        lines = [f"if {condition}:", *(f"    {line}" for line in self.body(loops, 0))]
        if self.draw.random() < 0.4:
            lines += ["else:", *(f"    {line}" for line in self.body(loops, 0))]
        return lines
