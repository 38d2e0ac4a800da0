"""Random tile programs, as the text of their source, with integers for data.

Every program can be run: tiles are written before they are read, a `parallel` doesn't race, indices stay inside. Sizes,
tails, types, scopes and the order of operations are drawn; so is whether a loop is pipelined, and what is conditional;
what is around operations, knobs and open sizes are `generator_control`'s, few bits, pages and random numbers
`generator_words`', strides `generator_strides`'.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import ml_dtypes  # noqa: F401  (gives numpy the names of the small float types)
import numpy as np
import tvm
from formulas import Formulas
from generator_control import add_knob, add_options, enter, open_sizes
from generator_strides import spread
from generator_words import ATOMIC, WORDS, combinations
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.reducers import combined_type

LARGEST = {"float32": 2.0**22, "float16": 512.0, "bfloat16": 128.0, "int32": 2.0**30, "int8": 127.0}
"""Integers up to here, and their sums and products on the way, are exact in each type."""

LARGEST_TILE = 16384
"""Elements of a tile, of which a block's registers hold a few."""

Draw = Callable[[Sequence], object]


@dataclass
class Made:
    """A program's source, its knobs, and what it is called with: the outputs are NaN, or -77."""

    source: str
    arrays: list[np.ndarray]
    knobs: dict[str, int] = field(default_factory=dict)

    @property
    def func(self) -> tirx.PrimFunc:
        return tvm.script.from_source(self.source, extra_vars={"tile": tile, "T": T})

    @property
    def program(self) -> TileProgram:
        """It as read, with its knobs."""
        return tile.read(self.func, self.knobs)


@dataclass
class Maker:
    """Draws a program; `choose(options)` draws one of several.

    Its tiles' extents are of `sizes`; products sum over as many elements as one of `depths` says, `blocks` at a time.
    If it is `strided`, parameters have strides at times, and so have their arrays.
    """

    choose: Draw
    name: str = "func"
    sizes: Sequence[int] = (1, 3, 8, 16, 17, 32)
    depths: Sequence[int] = (1, 7, 16, 33)
    blocks: Sequence[int] = (1, 4, 16)
    options: str = ""
    strided: bool = False
    params: list[str] = field(default_factory=list)
    arrays: list[np.ndarray] = field(default_factory=list)
    knobs: dict[str, int] = field(default_factory=dict)
    head: list[str] = field(default_factory=list)
    allocs: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    tiles: dict[str, tuple[str, str]] = field(default_factory=dict)
    indent: int = 2

    def make(self) -> Made:
        """Draw the sizes, some operations, and a copy of every tile to an output of its own."""
        self.seed = self.choose(range(1000))
        self.rng = np.random.default_rng(self.seed)
        self.m = self.choose(self.sizes)
        self.n = self.choose([size for size in self.sizes if self.m * size <= LARGEST_TILE] or self.sizes)
        # The extent of columns of rows may be a knob, of which it is the only value.
        self.height = add_knob(self, [self.m]) if self.choose([False, False, False, True]) else self.m
        self.grid = [self.choose([1, 2, 3]) for _ in range(2)]
        self.rows, self.columns = (
            (g - 1) * t + self.choose(sorted({1, (t + 1) // 2, t})) for g, t in zip(self.grid, (self.m, self.n))
        )
        self.counts = self.input("I", (max(self.grid[0], self.m),), "int32", 0, min(self.rows, self.columns))
        self.source = self.input("X", (self.rows, self.columns), self.type())
        open_sizes(self)
        add_options(self)
        self.load()
        for _ in range(self.choose(range(2, 7))):
            self.operation()
        for name, (shape, dtype) in list(self.tiles.items()):
            if not name.startswith(("a", "b")):
                self.store(name, shape, dtype)
        if self.strided:
            spread(self)
        body = [
            *self.head,
            f"    with tile.kernel({self.grid[0]}, {self.grid[1]}{self.options}) as (m, n):",
            *self.allocs,
            *self.lines,
        ]
        params = ",\n".join(f"    {param}" for param in self.params)
        return Made("\n".join(["@T.prim_func", f"def {self.name}(\n{params},\n):", *body, ""]), self.arrays, self.knobs)

    # ---- Parts ---------------------------------------------------------------------------------------------------

    def type(self) -> str:
        return self.choose(["float32", "float32", "float16", "bfloat16", "int32", "int8"])

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    def parameter(self, name: str, array: np.ndarray) -> str:
        name = f"{name}{len(self.params)}"
        self.params.append(f'{name}: T.Buffer({array.shape}, "{array.dtype.name}")')
        self.arrays.append(array)
        return name

    def input(self, name: str, shape: tuple[int, ...], dtype: str, low: int = -3, high: int = 4) -> str:
        return self.parameter(name, self.rng.integers(low, high, shape).astype(dtype))

    def alloc(self, kind: str, shape: str, dtype: str, scope: str | None = None) -> str:
        """A new tile of shape ``"mn"``, ``"m"`` or ``"n"``, or of extents."""
        extents = {"mn": f"({self.m}, {self.n})", "m": f"({self.height},)", "n": f"({self.n},)"}.get(shape, shape)
        scope = scope or self.choose(["shared", "fragment"])
        name = f"{kind}{len(self.allocs)}"
        self.allocs.append(f'        {name} = tile.{scope}({extents}, "{dtype}")')
        return name

    def written(self, shape: str) -> list[str]:
        return [name for name, (of, _) in self.tiles.items() if of == shape]

    def place(self, shape: str) -> str:
        return {"mn": f"m * {self.m}, n * {self.n}", "m": f"m * {self.m}", "n": f"n * {self.n}"}[shape]

    # ---- Operations: each reads tiles that are written, and writes one of them or a new one ----------------------

    def operation(self) -> None:
        """Draw one; under a loop or a condition it writes a tile that was written before."""
        kinds = [self.elementwise, self.elementwise, self.reduce, self.convert, self.ordered, self.scan]
        if not self.choose(range(3)):
            kinds = [self.load, self.gemm, self.gather, self.count, self.formula, self.permute, self.histogram]
            kinds += [functools.partial(word, self) for word in WORDS]
            self.choose(kinds)()
            return
        depth = enter(self)
        self.choose(kinds)(new=not depth and self.choose([True, False]))
        self.indent -= depth

    def target(self, shape: str, new: bool) -> tuple[str, str]:
        """A tile to write, and its type."""
        known = self.written(shape)
        if not new and known:
            name = self.choose(known)
            return name, self.tiles[name][1]
        if not new:
            name, dtype = self.target(shape, True)
            self.allocs.append(f"        tile.fill({name}, 1)")
            return name, dtype
        dtype = self.type()
        name = self.alloc("t", shape, dtype)
        self.tiles[name] = (shape, dtype)
        return name, dtype

    def load(self) -> None:
        name, _ = self.target("mn", True)
        self.line(f"tile.copy({self.source}[{self.place('mn')}], {name})")

    def store(self, name: str, shape: str, dtype: str) -> None:
        out = dtype if self.choose([True, False]) else self.type()
        extents = {"mn": (self.rows, self.columns), "m": (self.rows,), "n": (self.columns,)}[shape]
        atomic = out in ATOMIC and shape == "mn" and self.choose([None, None, "add", "max", "min"])
        # Of blocks that hold the same rows or columns one stores.
        guard = {"m": "if n == 0:", "n": "if m == 0:", "mn": ""}[shape]
        if guard:
            self.line(guard)
            self.indent += 1
        array = np.full(extents, np.nan if "float" in out else -77).astype(out)
        array = np.ones_like(array) if atomic else array
        parameter = self.parameter("Y", array)
        self.line(f"tile.copy({name}, {parameter}[{self.place(shape)}]{f', atomic={atomic!r}' if atomic else ''})")
        self.indent -= bool(guard)

    def convert(self, new: bool) -> None:
        shape = self.choose([s for s in ("mn", "m", "n") if self.written(s)])
        src = self.choose(self.written(shape))
        dst, _ = self.target(shape, new)
        self.line(f"tile.copy({src}, {dst})" if src != dst else f"tile.fill({dst}, -2)")

    def reduce(self, new: bool) -> None:
        src, axis = self.choose(self.written("mn")), self.choose([0, 1])
        dst, _ = self.target("n" if axis == 0 else "m", new)
        kind = self.choose(["sum", "max", "min", "reduce"])
        function, fits = "", True
        if kind == "reduce":
            own, to = self.tiles[src][1], self.tiles[dst][1]
            dtype = combined_type(own, to)
            function, fits = f"{self.choose(combinations(dtype))}, ", dtype == combined_type(to, to)
        accumulate = not new and self.choose([True, False]) and fits
        self.line(f"tile.{kind}({src}, {dst}, {function}axis={axis}, accumulate={accumulate})")

    def ordered(self, new: bool) -> None:
        """The first of each line, of all rows, or rows in order: values, places or both, each then an output."""
        src = self.choose(self.written("mn"))
        dtype, word = self.tiles[src][1], self.choose(["argmax", "argmin", "top_k", "top_k", "sort"])
        axis, count = self.choose([0, 1]), self.choose([k for k in (1, 2, 5, 9, 20) if k <= self.n])
        shape = ("n", "m")[axis] if word.startswith("arg") else "mn"
        wide = f"({self.m}, {count})" if word == "top_k" else shape
        which = self.choose([("values",), ("indices",), ("values", "indices")])
        which = ("indices", *which) if word.startswith("arg") and "indices" not in which else which
        names = {}
        for result, kind in (("values", dtype), ("indices", "int32")):
            if result in which:
                names[result] = self.alloc("a" if word == "top_k" else "o", wide, kind)
                self.allocs.append(f"        tile.fill({names[result]}, 3)")
        given = ", ".join(f"{result}={name}" for result, name in names.items())
        options = {
            "sort": f", descending={self.choose([False, True])}",
            "top_k": f", largest={self.choose([False, True])}",
        }
        self.line(f"tile.{word}({src}, {given}{options.get(word, f', axis={axis}')})")
        for result, name in names.items():
            kind = dtype if result == "values" else "int32"
            if word != "top_k":
                self.tiles[name] = (shape, kind)
                continue
            array = np.full((self.grid[0] * self.grid[1] * self.m, count), np.nan if "float" in kind else -77)
            out = self.parameter("K", array.astype(kind))
            self.line(f"tile.copy({name}, {out}[(m * {self.grid[1]} + n) * {self.m}, 0])")

    def scan(self, new: bool) -> None:
        src, kinds = self.choose(self.written("mn")), [False, True]
        kind = "float" if "float" in self.tiles[src][1] else "int"
        fitting = [name for name in self.written("mn") if kind in self.tiles[name][1] and name != src]
        if new or not fitting:
            dtype = "int32" if kind == "int" else self.choose(["float32", "float32", "float16"])
            dst = self.alloc("t", "mn", dtype)
            self.allocs.append(f"        tile.fill({dst}, 1)")
            self.tiles[dst] = ("mn", dtype)
        else:
            dst = self.choose(fitting)
        reverse, exclusive = self.choose(kinds), self.choose(kinds)
        self.line(f"tile.cumsum({src}, {dst}, {self.choose([0, 1])}, reverse={reverse}, exclusive={exclusive})")

    def elementwise(self, new: bool) -> None:
        dst, dtype = self.target("mn", new)
        known = [name for name in self.tiles if (name != dst or not new) and not name.startswith(("a", "b"))]
        terms = [self.element(self.choose(known), dtype) for _ in range(2)]
        operator = self.choose(["+", "-", "T.max", "T.min", "*"])
        value = (
            f"{operator}({terms[0]}, {terms[1]})" if operator.startswith("T") else f"{terms[0]} {operator} {terms[1]}"
        )
        if self.choose([False, True]):
            value = f"T.if_then_else({self.choose(['i > j', 'i + j < 5', 'j % 2 == 0'])}, {value}, {terms[0]})"
        self.line(f"with tile.parallel({self.m}, {self.n}) as (i, j):")
        self.indent += 1
        if self.choose([False, True]):
            self.line(f"value = {value}")
            value = "value"
        guarded = not new and self.choose([False, True])
        if guarded:
            self.line(f"if m * {self.m} + i < {self.rows} and j != 1:")
        self.lines.append("    " * (self.indent + guarded) + f"{dst}[i, j] = {value}")
        self.indent -= 1

    def element(self, name: str, dtype: str) -> str:
        shape, own = self.tiles[name]
        load = f"{name}[{', '.join({'m': 'i', 'n': 'j'}[d] for d in shape)}]"
        return load if own == dtype else f'T.cast({load}, "{dtype}")'

    def gather(self) -> None:
        """Rows of the source at places that a tensor holds, where there are such rows."""
        dst, dtype = self.target("mn", True)
        load = f"{self.source}[{self.counts}[i], j]"
        own = self.params[1].split('"')[1]
        load = load if own == dtype else f'T.cast({load}, "{dtype}")'
        self.line(f"with tile.parallel({self.m}, {self.n}) as (i, j):")
        self.line(f'    {dst}[i, j] = T.if_then_else(j < {self.columns}, {load}, T.cast(7, "{dtype}"))')

    def formula(self) -> None:
        """Shifts, bits, quotients and truth values of the coordinates and of data."""
        dst, dtype = self.target("mn", True)
        terms = (("i", self.m), ("j", self.n), ("m", 3), ("n", 3), (f"{self.counts}[i]", max(self.rows, self.columns)))
        text, _ = Formulas(self.choose, terms).integer(self.choose([1, 2, 3]))
        self.line(f"with tile.parallel({self.m}, {self.n}) as (i, j):")
        self.line(f'    {dst}[i, j] = T.cast(T.floormod({text}, 61) - 20, "{dtype}")')

    def permute(self) -> None:
        """Rows stored where a tensor says, all in places of their own."""
        src = self.choose(self.written("mn"))
        dtype = self.tiles[src][1]
        order = self.parameter("P", self.rng.permutation(self.m).astype("int32"))
        moved = self.alloc("p", "mn", dtype, "shared")
        self.line(f"with tile.parallel({self.m}, {self.n}, distinct=True) as (i, j):")
        self.line(f"    {moved}[{order}[i], j] = {src}[i, j]")
        self.tiles[moved] = ("mn", dtype)

    def histogram(self) -> None:
        """Rows joined where a tensor says, several with one: atomically, by all blocks."""
        src = self.choose(self.written("mn"))
        dtype = self.choose([name for name in ("float32", "int32", self.tiles[src][1]) if name in ATOMIC])
        bins = self.choose([1, 2, 5])
        where = self.input("B", (self.m,), "int32", 0, bins)
        held = self.alloc("h", "mn", dtype, "shared")
        total = self.parameter("H", np.ones((bins, self.n)).astype(dtype))
        kind = self.choose(["add", "max", "min"])
        self.line(f"tile.copy({src}, {held})")
        if self.choose([False, True]):
            self.line(f"for row in range({self.m}):")
            self.line(f'    tile.copy({held}[row, 0:{self.n}], {total}[{where}[row], 0], atomic="{kind}")')
            return
        self.line(f"with tile.parallel({self.m}, {self.n}) as (i, j):")
        # Upstream's parser compares some types with numbers of theirs only.
        guard = self.choose(["", f'if {held}[i, j] > T.cast(0, "{dtype}"):', "if i + j < 5:"])
        self.line(f"    {guard}") if guard else None
        value = self.choose([f"{held}[i, j]", "2", f'T.cast(i - j, "{dtype}")'])
        self.line(f"    {'    ' * bool(guard)}tile.atomic_{kind}({value}, {total}[{where}[i], j])")

    def count(self) -> None:
        """A scalar that a loop of dynamic extent adds to, and a tile filled with it."""
        name = f"s{len(self.allocs)}"
        dst, dtype = self.target(self.choose(["mn", "m", "n"]), True)
        self.allocs.append(f'        {name} = tile.local((1,), "int32")')
        self.line(f"{name}[0] = 0")
        self.line(f"for c{name} in range({self.counts}[m]):")
        self.line(f"    {name}[0] = {name}[0] + {self.choose(['2', 'n', 'c' + name])}")
        self.line(f'    tile.fill({dst}, T.cast({name}[0], "{dtype}"))')
        self.lines.insert(-3, "    " * self.indent + f"tile.fill({dst}, 5)")

    def gemm(self) -> None:
        """A product over a loop, pipelined or not, of operands that are loaded in it."""
        operand = self.choose(["float32", "float16", "bfloat16", "int8", "float8_e4m3fn"])
        depth, block = self.choose(self.depths), self.choose(self.blocks)
        steps = tile.cdiv(depth, block)
        ta, tb = self.choose([False, True]), self.choose([False, True])
        a_shape, a_tile = (self.rows, depth), (self.m, block)
        b_shape, b_tile = (depth, self.columns), (block, self.n)
        # Of each step the operands are where the step, a table, or a name of what it says has them.
        place = self.choose(["k", "k", "k", "table", "page"])
        table = self.input("T", (steps,), "int32", 0, steps) if place != "k" else ""
        at = {"k": "k", "table": f"{table}[k]", "page": f"page{len(self.allocs)}"}[place]
        a_at, b_at = f"m * {self.m}, {at} * {block}", f"{at} * {block}, n * {self.n}"
        if ta:
            a_shape, a_tile, a_at = a_shape[::-1], a_tile[::-1], f"{at} * {block}, m * {self.m}"
        if tb:
            b_shape, b_tile, b_at = b_shape[::-1], b_tile[::-1], f"n * {self.n}, {at} * {block}"
        left, right = self.input("A", a_shape, operand), self.input("B", b_shape, operand)
        a, b = (self.alloc(name, str(of), operand, "shared") for name, of in (("a", a_tile), ("b", b_tile)))
        through = not ta and self.choose([False, False, True])
        held = self.alloc("a", str(a_tile), operand, "fragment") if through else a
        dtype = "int32" if operand == "int8" else "float32"
        c = self.alloc("c", "mn", dtype, "fragment")
        self.tiles[c] = ("mn", dtype)
        self.line(f"tile.fill({c}, {self.choose([0, 2])})")
        stages = self.choose([None, *range(1, min(steps, 3) + 1)])
        loop = self.choose([f"tile.pipelined({steps}, stages={stages})", f"range({steps})"])
        products = [(b, c)]
        if self.choose([False, False, True]):  # another accumulator, of another right operand
            other = self.input("B", b_shape, operand)
            products.append((self.alloc("b", str(b_tile), operand, "shared"), self.alloc("c", "mn", dtype, "fragment")))
            self.tiles[products[1][1]] = ("mn", dtype)
            self.line(f"tile.fill({products[1][1]}, 1)")
        small = self.small(steps) if self.choose([False, False, True]) else None
        self.line(f"for k in {loop}:")
        self.indent += 1
        if place == "page":
            self.line(f"{at} = {table}[k]")
        self.line(f"tile.copy({left}[{a_at}], {a})")
        early = self.choose([False, True])
        if small is not None and early:
            self.line(small[0])
        self.line(f"tile.copy({right}[{b_at}], {b})")
        if through:
            self.line(f"tile.copy({a}, {held})")
        self.line(f"tile.gemm({held}, {b}, {c}, transpose_a={ta}, transpose_b={tb})")
        for more, total in products[1:]:
            self.line(f"tile.copy({other}[{b_at}], {more})")
            self.line(f"tile.gemm({held}, {more}, {total}, transpose_a={ta}, transpose_b={tb})")
        if small is not None:
            for text in (*small[early:3],):
                self.line(text)
        self.indent -= 1
        if small is not None:
            self.line(small[3])
            self.line(small[4])

    def small(self, steps: int) -> tuple[str, str, str, str, str]:
        """A tile of few bytes, rarely a multiple of 128, that a product's loop loads too, and what sums it up."""
        rows, columns = self.choose([1, 3, 5]), self.choose([4, 8, 20, 36])
        dtype = self.choose(["float32", "float16", "bfloat16", "int8"])
        total = "int32" if dtype == "int8" else "float32"
        parts = self.input("E", (steps * rows, columns), dtype)
        part, whole = (
            self.alloc(name, f"({rows}, {columns})", of, scope)
            for name, of, scope in (("b", dtype, "shared"), ("a", total, "fragment"))
        )
        self.line(f"tile.fill({whole}, 0)")
        out = self.parameter("Y", np.full((rows, columns), np.nan if "float" in total else -77).astype(total))
        return (
            f"tile.copy({parts}[k * {rows}, 0], {part})",
            f"with tile.parallel({rows}, {columns}) as (x, y):",
            f'    {whole}[x, y] = {whole}[x, y] + T.cast({part}[x, y], "{total}")',
            "if m + n == 0:",
            f"    tile.copy({whole}, {out}[0, 0])",
        )
