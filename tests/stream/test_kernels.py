"""Tile functions that are TensorIR, against numpy, with one compilation for any number of rows."""

import numpy as np
import pytest
import tvm

from tvm_axe.stream import Selector, StreamError, StreamProgram, StreamType, Tile, functions, kernels, symbol
from tvm_axe.stream.machine import machine

R = symbol("R")


@pytest.fixture
def compiled(monkeypatch):
    """The functions that were compiled, but for the simulator's own, which a run compiles if nothing has before."""
    machine()
    found, compile = [], tvm.compile

    def counting(mod, **options):
        found.append(mod)
        return compile(mod, **options)

    monkeypatch.setattr(tvm, "compile", counting)
    return found


def normal(*shape):
    return np.random.default_rng(shape).standard_normal(shape).astype("float32")


def test_a_dynamic_tile_never_recompiles(compiled):
    f = kernels.tensor_ir(kernels.matmul)
    assert not compiled
    for rows in (1, 7, 32, 3):
        a, b = normal(rows, 20), normal(20, 12)
        np.testing.assert_allclose(f(a, b), a.astype("float64") @ b.astype("float64"), rtol=1e-4, atol=1e-5)
    assert len(compiled) == 1


def test_kernels_in_a_program_of_dynamic_tiles(compiled):
    p = StreamProgram("experts")
    x, w = p.tensor("x", 9, 16), p.tensor("w", 32, 8)
    parts = p.load(x, (1, 16)).flatten().partition(p.input("routing", StreamType((9,), Selector(2))))
    act, product = kernels.tensor_ir(kernels.silu), kernels.tensor_ir(kernels.matmul)
    for number, part in enumerate(parts):
        rows = part.promote().accum(functions.retile().starting(np.empty((0, 16), "float32")))
        weight = (
            p.load(w, (16, 8))
            .flatten()
            .reshape(1)
            .partition(p.input(f"which{number}", StreamType((2,), Selector(2))), rank=1)
        )
        weight[1].discard()
        rows.map(product, weight[0].flatten()).map(act).output(f"y{number}")
    xs, ws = normal(9, 16), normal(32, 8)
    routing = [0, 1, 1, 0, 1, 1, 1, 0, 1]
    outputs = p.run({"x": xs, "w": ws, "routing": routing, "which0": [0, 1], "which1": [1, 0]}).outputs
    for number in range(2):
        rows = xs[[at for at, chosen in enumerate(routing) if chosen == number]].astype("float64")
        want = rows @ ws[16 * number : 16 * number + 16]
        (found,) = outputs[f"y{number}"]
        np.testing.assert_allclose(found, want / (1 + np.exp(-want)), rtol=1e-4, atol=1e-5)
    assert len(compiled) == 2


def test_flops_and_types_come_from_the_function():
    f = kernels.tensor_ir(kernels.matmul)
    assert f.flops(Tile(R, 64), Tile(64, 32)) == 2 * 64 * 32 * R
    assert f.flops(Tile(3, 4), Tile(4, 5)) == 2 * 3 * 4 * 5
    assert f.result(Tile(R, 64), Tile(64, 32)) == Tile(R, 32)
    assert kernels.tensor_ir(kernels.silu).flops(Tile(R, 8)) == (1 + 1 + 4 + 1) * 8 * R
    assert kernels.tensor_ir(kernels.silu, flops=lambda a: 8 * a.rows * a.columns).flops(Tile(2, 8)) == 128


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ((Tile(2, 4), Tile(5, 3)), r"matmul: buffer B of shape \[k, n\] gets Tile\(5, 3, float32\)"),
        ((Tile(2, 4, "float16"), Tile(4, 3)), "buffer A is of float32, and gets Tile"),
        ((Tile(2, 4),), "matmul takes 2 tiles, not 1"),
    ],
)
def test_tiles_that_do_not_fit(types, message):
    with pytest.raises(StreamError, match=message):
        kernels.tensor_ir(kernels.matmul).result(*types)
