"""Extents with fewer operations: the same numbers wherever they have one."""

from __future__ import annotations

import random

import pytest
from tvm import relax, tirx

from tvm_axe import _tvm
from tvm_axe.relax.extents import with_reduced_extents

H, W = (tirx.Var(name, "int64") for name in "hw")
PADDED, WIDE = (size + tirx.floormod(size * -1, 4) for size in (H, W))
HIGH, BROAD = (tirx.floordiv(size, 4) for size in (PADDED, WIDE))


@pytest.mark.parametrize(
    ("extent", "expected"),
    [
        (PADDED, "(h + 3) // 4 * 4"),
        (H + tirx.floormod(4 - tirx.floormod(H, 4), 4), "(h + 3) // 4 * 4"),
        (tirx.floordiv(PADDED, HIGH), "4"),
        (tirx.floordiv(2 * HIGH * 4 * BROAD * 4, 2 * HIGH * BROAD), "16"),
        (tirx.floordiv(HIGH * 16 * 32, 512), "(h + 3) // 4"),
        (tirx.floordiv(H * W + W * 2, W), "h + 2"),
        (tirx.floordiv((H + 1) * W, H + 1), "w"),
        (tirx.floordiv(tirx.floordiv(H, 2), 2), "h // 4"),
        (tirx.floordiv(H - 1, 2) + 1, "(h + 1) // 2"),
        (tirx.floordiv(H * W * 6, W * 4), "h * 3 // 2"),
        (tirx.floormod(H, 4), "h % 4"),
        (tirx.floordiv(H, tirx.floordiv(H, 5) + 1), "h // (h // 5 + 1)"),
        (tirx.floordiv(H + tirx.Cast("int64", tirx.Cast("float64", H)), 2), None),
    ],
)
def test_reduced(extent: tirx.Expr, expected: str | None) -> None:
    found = _tvm.reduced(extent)
    if expected is None:
        assert found.same_as(extent)
    else:
        assert str(found).replace("T.int64(", "").replace(")", "") == expected.replace(")", "")


def value(expr: tirx.Expr, at: dict[tirx.Var, int]) -> int:
    """What an extent is, in Python's integers."""
    if isinstance(expr, tirx.IntImm):
        return int(expr)
    if isinstance(expr, tirx.Var):
        return at[expr]
    a, b = value(expr.a, at), value(expr.b, at)
    made = {
        tirx.Add: lambda: a + b, tirx.Sub: lambda: a - b, tirx.Mul: lambda: a * b, tirx.FloorDiv: lambda: a // b,
        tirx.FloorMod: lambda: a % b, tirx.Min: lambda: min(a, b), tirx.Max: lambda: max(a, b),
    }  # fmt: skip
    return made[type(expr)]()


def drawn(rng: random.Random, depth: int) -> tirx.Expr:
    if depth == 0 or rng.random() < 0.15:
        return rng.choice([H, W, tirx.const(rng.randint(-5, 8), "int64")])
    kind = rng.choice([tirx.Add, tirx.Sub, tirx.Mul, tirx.FloorDiv, tirx.FloorDiv, tirx.FloorMod, tirx.Min, tirx.Max])
    a, b = drawn(rng, depth - 1), drawn(rng, depth - 1)
    by_number = kind in (tirx.FloorDiv, tirx.FloorMod) and rng.random() < 0.6
    return kind(a, tirx.const(rng.choice([-4, -3, -2, 1, 2, 3, 4, 6, 8]), "int64") if by_number else b)


@pytest.mark.parametrize("seed", range(4))
def test_the_same_number_wherever_there_is_one(seed: int) -> None:
    rng = random.Random(seed)
    changed = 0
    for _ in range(1000):
        extent = drawn(rng, rng.choice([2, 3, 4, 5]))
        found = _tvm.reduced(extent)
        changed += not found.same_as(extent)
        for _ in range(12):
            at = {size: rng.randint(-3, 20) for size in (H, W)}
            try:
                wanted = value(extent, at)
            except ZeroDivisionError:
                continue
            assert value(found, at) == wanted, (extent, found, at)
    assert changed > 100


def test_products_that_are_many_stay() -> None:
    """A power of a sum isn't multiplied out."""
    sizes = [tirx.Var(f"n{at}", "int64") for at in range(12)]
    power = tirx.floordiv(sum(sizes[1:], start=sizes[0]), 2)
    for _ in range(6):
        power = power * sum(sizes[1:], start=sizes[0])
    assert _tvm.reduced(power).same_as(power)


def test_types_of_a_model_follow() -> None:
    """What is computed of what was reduced has its extents, and so has the result."""
    n = tirx.Var("n", "int64")
    x, y = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in (("x", [n, 4]), ("y", [4, 1])))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y]):
        with builder.dataflow():
            turned = builder.emit(relax.op.reshape(x, [tirx.FloorDiv(n * 4, n), n - tirx.floormod(n, 1)]))
            out = builder.emit_output(relax.op.add(builder.emit(relax.op.exp(turned)), y))
        builder.emit_func_output(out)
    made = with_reduced_extents(builder.get())["main"]
    types = [binding.var.ty for block in made.body.blocks for binding in block.bindings]
    for kind in (*types, made.ret_ty):
        assert [str(extent) for extent in kind.shape] == ["T.int64(4)", "n"]
