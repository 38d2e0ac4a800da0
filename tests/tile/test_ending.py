"""`while`, `break` and `continue`: what they become, on a CPU beside Python, and planned for GPUs."""

import random
import re

import numpy as np
import pytest
from interpreter import interpret
from tvm.script import from_source
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines import nvcc
from tvm_axe.tile.nodes import Loop


@T.prim_func
def halved(A: T.Buffer((64, 32), "float32"), N: T.Buffer((64,), "int32"), B: T.Buffer((64, 32), "float32")):
    with tile.kernel(64) as i:
        a = tile.fragment((32,), "float32")
        tile.copy(A[i, 0], a)
        n = N[i]
        while n > 1:
            n = n // 2
            with tile.parallel(32) as j:
                a[j] = a[j] + 1.0
            if n == 7:
                break
        tile.copy(a, B[i, 0])


def halvings(n):
    steps = 0
    while n > 1:
        n, steps = n // 2, steps + 1
        if n == 7:
            break
    return steps


@T.prim_func
def searched(keys: T.Buffer((64,), "int32"), table: T.Buffer((100,), "int32"), where: T.Buffer((64, 4), "int32")):
    """The first place of a key, what stood in front of it, and where two loops stopped."""
    with tile.kernel(64) as i:
        place = -1
        total = 0
        rounds = 0
        odd = 0
        for k in range(100):
            if table[k] == keys[i]:
                place = k
                break
            total = total + table[k]
        for a in range(5):
            for b in range(5):
                if a * b == 6:
                    break
                if b % 2 == 0:
                    continue
                odd = odd + 1
            rounds = rounds + 1
            if odd > keys[i]:  # noqa: SIM102 (two conditions, so that what is behind them is behind both)
                if odd % 2 == 0:
                    break
            rounds = rounds + 10
        with tile.parallel(1) as x:
            where[i + x, 0] = place
            where[i + x, 1] = total
            where[i + x, 2] = rounds
            where[i + x, 3] = odd


def search(key, table):
    place, total, rounds, odd = -1, 0, 0, 0
    for k, value in enumerate(table):
        if value == key:
            place = k
            break
        total += value
    for a in range(5):
        for b in range(5):
            if a * b == 6:
                break
            if b % 2 == 0:
                continue
            odd += 1
        rounds += 1
        if odd > key and odd % 2 == 0:
            break
        rounds += 10
    return place, total, rounds, odd


@T.prim_func
def settled(A: T.Buffer((8, 64), "float32"), B: T.Buffer((8, 64), "float32"), C: T.Buffer((8,), "int32")):
    """Halves a row until its largest is at most 1: a number of all threads decides."""
    with tile.kernel(8) as i:
        a = tile.fragment((64,), "float32")
        top = tile.fragment((1,), "float32")
        row = tile.shared((64,), "float32")
        largest = tile.shared((1,), "float32")
        steps = 0
        tile.copy(A[i, 0], a)
        while True:
            tile.copy(a, row)
            tile.max(a, top, 0)
            tile.copy(top, largest)
            if largest[0] <= 1.0:
                break
            with tile.parallel(64) as x:
                a[x] = row[x] * 0.5
            steps = steps + 1
        tile.copy(a, B[i, 0])
        with tile.parallel(1) as x:
            C[i + x] = steps


@T.prim_func
def multiplied(A: T.Buffer((64, 256), "float16"), B: T.Buffer((256, 64), "float16"), L: T.Buffer((1,), "int32"),
               C: T.Buffer((64, 64), "float32")):  # fmt: skip
    """A product over as much of k as a number says, or all of it."""
    with tile.kernel(1):
        a = tile.shared((64, 64), "float16")
        b = tile.shared((64, 64), "float16")
        c = tile.fragment((64, 64), "float32")
        tile.fill(c, 0)
        for k in tile.pipelined(4):
            if k * 64 >= L[0]:
                break
            tile.copy(A[0, k * 64], a)
            tile.copy(B[k * 64, 0], b)
            tile.gemm(a, b, c)
        tile.copy(c, C)


def given(program):
    """Integers for each parameter of a program, and what it should leave of the outputs."""
    rng = np.random.default_rng(0)
    if program is halved:
        a, n = rng.integers(-9, 9, (64, 32)).astype("float32"), rng.integers(0, 2000, 64).astype("int32")
        n[:3] = 15, 0, 1
        return (a, n, np.full_like(a, np.nan)), {2: a + np.array([halvings(int(x)) for x in n])[:, None]}
    if program is searched:
        keys, table = rng.integers(0, 40, 64).astype("int32"), rng.integers(0, 40, 100).astype("int32")
        want = np.array([search(int(key), [int(x) for x in table]) for key in keys])
        return (keys, table, np.full((64, 4), -9, "int32")), {2: want}
    if program is settled:
        a = rng.integers(1, 4000, (8, 64)).astype("float32")
        a[0] = 1
        steps = [0 if row.max() <= 1 else int(np.ceil(np.log2(row.max()))) for row in a]
        outputs = np.full_like(a, np.nan), np.full(8, -9, "int32")
        return (a, *outputs), {1: a / 2.0 ** np.array(steps)[:, None], 2: np.array(steps)}
    a, b = rng.integers(-3, 4, (64, 256)).astype("float16"), rng.integers(-3, 4, (256, 64)).astype("float16")
    product = a[:, :128].astype("float64") @ b[:128].astype("float64")
    return (a, b, np.array([128], "int32"), np.full((64, 64), np.nan, "float32")), {3: product}


PROGRAMS = pytest.mark.parametrize(
    "program", [halved, searched, settled, multiplied], ids=lambda p: str(p.attrs["global_symbol"])
)


@PROGRAMS
def test_in_the_interpreter_and_on_a_cpu(program):
    arguments, want = given(program)
    found = interpret(program, *arguments)
    tile.compile(program, "llvm")(*arguments)
    for number, expected in want.items():
        np.testing.assert_array_equal(found[number], expected)
        np.testing.assert_array_equal(arguments[number], expected)


@PROGRAMS
@pytest.mark.parametrize("target", ["cuda:sm_90a", "cuda:sm_80"])
def test_planned_and_built_for_gpus(program, target):
    assert "uniform" in tile.explain(program, target) or target == "cuda:sm_80"
    tile.lower(program, target)
    try:
        nvcc.find_compiler()
    except TileError as error:
        pytest.skip(f"no compiler for CUDA here: {error}")
    source = tile.compile(program, target).source
    loops = [node for node in tile.read(program).nodes() if isinstance(node, Loop) and node.until is not None]
    assert loops and len(re.findall(r"\bbreak;", source)) >= len(loops)


def test_what_it_becomes():
    lines = str(tile.read(searched)).split("\n")
    assert lines[lines.index("    k_ended[0] = 0") + 1 : -1] == [
        "    for k in range(100) until k_ended != 0:",
        "        if table[k] == keys[i]:",
        "            place[0] = k",
        "            k_ended[0] = 1",
        "        else:",
        "            total[0] = total + table[k]",
        "    a_ended[0] = 0",
        "    for a in range(5) until a_ended != 0:",
        "        b_ended[0] = 0",
        "        for b in range(5) until b_ended != 0:",
        "            if a * b == 6:",
        "                b_ended[0] = 1",
        "            else:",
        "                if not b % 2 == 0:",
        "                    odd[0] = odd + 1",
        "        rounds[0] = rounds + 1",
        "        if odd > keys[i]:",
        "            if odd % 2 == 0:",
        "                a_ended[0] = 1",
        "        if a_ended == 0:",
        "            rounds[0] = rounds + 10",
    ]


def test_why_a_product_is_not_specialized():
    why = tile.explain(multiplied, "cuda:sm_90a")
    assert "may end early (while, break), and the producer's loads run ahead of it" in why
    assert "loop k: loads don't run ahead  (it may end early)" in why

    @T.prim_func
    def told(A: T.Buffer((64, 64), "float16"), C: T.Buffer((64, 64), "float32")):
        with tile.kernel(1, roles="specialized"):
            a = tile.shared((64, 64), "float16")
            c = tile.fragment((64, 64), "float32")
            tile.fill(c, 0)
            for k in range(4):
                if k == 2:
                    break
                tile.copy(A[0, 0], a)
                tile.gemm(a, a, c)
            tile.copy(c, C)

    with pytest.raises(TileError, match=r"roles='specialized', but `for k in range\(4\) until .* may end early"):
        tile.plan(told, "cuda:sm_90a")


def refused(case):
    @T.prim_func
    def func(A: T.Buffer((8,), "int32")):
        with tile.kernel(1):
            a = tile.fragment((8,), "int32")
            n = 0
            tile.fill(a, 0)
            if case == "outside":
                T.evaluate(T.break_loop())
            if case == "continue outside":
                T.evaluate(T.continue_loop())
            if case == "parallel":
                for _ in range(2):
                    with tile.parallel(8) as x:
                        if x > 2:
                            break
                        a[x] = 1
            if case == "endless":
                while True:
                    n = n + 1
            if case == "skips":
                for k in range(4):
                    if k < 2:
                        if n == 1:
                            continue
                        n = n + 1
                    n = n + 2
            if case == "fragment":
                while a[0] < 3:
                    n = n + 1
            tile.copy(a, A[0])

    return func


@pytest.mark.parametrize(
    "case, message",
    [
        ("outside", "break outside of a loop; valid is one in a `for` or a `while` of the kernel"),
        ("continue outside", "continue outside of a loop"),
        ("parallel", "parallel: break in its body, whose points run in no order; valid is an `if`"),
        ("endless", "while True: nothing ends it; valid is a `break` in it, or a condition"),
        ("skips", "continue in `if k < 2`, with more behind it on one of the ways through it; valid is"),
        ("fragment", "a scalar is read from fragment a.*, whose elements are spread over threads"),
    ],
)
def test_refused(case, message):
    with pytest.raises(TileError, match=message):
        tile.read(refused(case))


class Drawn:
    """Statements of Python drawn at random, which end, as both Python and a tile program run them."""

    def __init__(self, seed):
        self.rng, self.loops = random.Random(seed), 0

    def block(self, indent, depth, in_loop):
        lines = []
        for _ in range(self.rng.randint(1, 3)):
            lines += self.statement(indent, depth, in_loop)
        return lines

    def statement(self, indent, depth, in_loop):
        rng, pad = self.rng, "    " * indent
        kind = rng.choice(("add", "if", "for", "while") if depth else ("add", "add", "if"))
        if kind == "if":
            name, jump = rng.choice("xyz"), rng.choice(("break", "break", "continue", "")) if in_loop else ""
            lines = [f"{pad}if {name} % {rng.randint(2, 4)} == 1:", *self.block(indent + 1, max(depth - 1, 0), in_loop)]
            lines += [f"{pad}    {jump}"] if jump else []
            if rng.random() < 0.3:
                lines += [f"{pad}else:", *self.block(indent + 1, 0, in_loop)]
            return lines
        if kind == "for":
            self.loops += 1
            lines = [f"{pad}for k{self.loops} in range({rng.randint(1, 5)}):"]
            lines += [f"{pad}    {rng.choice('xyz')} = {rng.choice('xyz')} + k{self.loops}"]
            return [*lines, *self.block(indent + 1, depth - 1, True)]
        if kind == "while":
            name = rng.choice("xyz")
            lines = [f"{pad}while {name} < {rng.randint(5, 40)}:", f"{pad}    {name} = {name} + {rng.randint(1, 3)}"]
            return [*lines, *self.block(indent + 1, depth - 1, True)]
        name = rng.choice("xyz")
        return [f"{pad}{name} = {name} + {rng.randint(1, 5)}"]


def outcome(lines, first):
    """What Python makes of the numbers, or None where that takes many steps."""
    scope = {"x": first, "y": 0, "z": 1}
    counted = "\n".join(
        f"{line}\n{' ' * (len(line) - len(line.lstrip()) + 4)}tick()" if line.strip().startswith("while") else line
        for line in lines
    )
    budget = [60]

    def tick():
        budget[0] -= 1
        if budget[0] < 0:
            raise TimeoutError

    try:
        exec(counted, {"tick": tick}, scope)
    except TimeoutError:
        return None
    return [scope["x"], scope["y"], scope["z"]]


def drawn(seed):
    """A program of random statements, and what it leaves for each of four numbers; None of one that is refused."""
    lines = Drawn(seed).block(0, 3, False)
    want = [outcome(lines, first) for first in range(4)]
    if None in want:
        return None
    text = "\n".join(f"        {line}" for line in lines)
    source = f"""
@T.prim_func
def func{seed}(A: T.Buffer((4, 3), "int32")):
    with tile.kernel(4) as i:
        x = i + 0
        y = 0
        z = 1
{text}
        with tile.parallel(1) as p:
            A[i + p, 0] = x
            A[i + p, 1] = y
            A[i + p, 2] = z
"""
    func = from_source(source, {"T": T, "tile": tile})
    try:
        return tile.read(func), np.array(want), source
    except TileError as error:
        assert "continue in `if" in str(error), source
        return None


def test_random_control_flow_is_pythons():
    judged = 0
    for seed in range(60):
        found = drawn(seed)
        if found is None:
            continue
        judged += 1
        program, want, source = found
        array = np.full((4, 3), -1, "int32")
        np.testing.assert_array_equal(interpret(program, array)[0], want, err_msg=source)
        if judged % 2 == 0:
            tile.compile(program, "llvm")(array)
            np.testing.assert_array_equal(array, want, err_msg=source)
    assert judged > 30
