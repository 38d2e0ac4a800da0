"""Translated programs take the cycles, within 10%, and the bytes of graphs that are written by hand for the same."""

import by_hand
import numpy as np
import pytest

from tvm_axe.stream import Accelerator, OffChip, from_tile
from tvm_axe.tile.kernels.attention import ATTENTION
from tvm_axe.tile.kernels.gemm import MATMUL
from tvm_axe.tile.kernels.grouped import GROUPED_MATMUL
from tvm_axe.tile.kernels.rows import RMS_NORM, SOFTMAX

# Bound by memory and by compute, with channels of one token and of more.
ACCELERATORS = [
    Accelerator(),
    Accelerator(compute=64),
    Accelerator(compute=16384, depth=1),
    Accelerator(compute=256, depth=4, off_chip=OffChip(channels=4)),
]


def heads(batch, of, queries, keys, dim):
    return {"batch": batch, "heads": of, "kv_heads": of, "queries": queries, "keys": keys, "dim": dim}


PROGRAMS = {
    "product": (
        MATMUL.make(128, 96, 160, "float32", block_m=32, block_n=32, block_k=32),
        lambda: by_hand.product(128, 96, 160, 32),
    ),
    "bias_relu": (
        MATMUL.make(128, 96, 160, "float32", bias=True, activation="relu", block_m=32, block_n=32, block_k=32),
        lambda: by_hand.product(128, 96, 160, 32, bias=True),
    ),
    "softmax": (SOFTMAX.make(64, 512, "float32", block_rows=4), lambda: by_hand.softmax(64, 512, 4)),
    "rms_norm": (RMS_NORM.make(64, 512, "float32", block_rows=4), lambda: by_hand.rms_norm(64, 512, 4)),
    "attention": (
        ATTENTION.make(**heads(1, 3, 64, 256, 64), dtype="float32", scale=1.0, block_m=32, block_n=64),
        lambda: by_hand.attention(3, 64, 256, 64, 32, 64),
    ),
}


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=lambda a: f"{a.compute}-{a.depth}")
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_fast_as_by_hand(name, accelerator):
    recipe, graph = PROGRAMS[name]
    translated = from_tile(recipe.programs[0], accelerator).run(values=False)
    written = graph().run(accelerator=accelerator, values=False)
    assert translated.traffic == written.traffic
    assert 0.9 < translated.cycles / written.cycles < 1.1, (translated.cycles, written.cycles)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_written_by_hand_is_the_same_program(name):
    recipe, graph = PROGRAMS[name]
    rng = np.random.default_rng(0)
    translated = from_tile(recipe.programs[0], Accelerator())
    arrays = {
        tile.name: rng.standard_normal(tile.shape).astype("float32")
        for tile in recipe.programs[0].params
        if tile.name in recipe.inputs
    }
    found = translated.run(arrays).tensors
    program = graph()
    shaped = {n: a.reshape(program.tensors[n].rows, program.tensors[n].columns) for n, a in arrays.items()}
    for tensor, expected in program.run(shaped).tensors.items():
        np.testing.assert_allclose(found[tensor].reshape(expected.shape), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("accelerator", ACCELERATORS, ids=lambda a: f"{a.compute}-{a.depth}")
def test_grouped_products_with_routing(accelerator):
    """Groups of any number of rows, one of none, whose last tiles are stored in part."""
    starts, block = np.array([0, 37, 37, 90, 128], "int32"), 16
    sizes = {"block_m": block, "block_n": block, "block_k": block}
    program = GROUPED_MATMUL.make(128, 48, 64, 4, "float32", **sizes).programs[1]
    tiles = by_hand.group_tiles(program, starts, block)
    translated = from_tile(program, accelerator, {**tiles, "starts": starts}).run(values=False)
    there = tiles["tile_group"] >= 0
    group, row = tiles["tile_group"][there], tiles["tile_row"][there]
    given = {"group": group, "row": row, "height": np.minimum(block, starts[group + 1] - row)}
    graph = by_hand.grouped(128, 48, 64, 4, block)
    written = graph.run(given, accelerator, values=False)
    assert translated.traffic == written.traffic
    assert 0.9 < translated.cycles / written.cycles < 1.1, (translated.cycles, written.cycles)
    x, w = (np.random.default_rng(0).standard_normal(shape).astype("float32") for shape in [(144, 64), (192, 64)])
    found = graph.run({**given, "X": x, "W": w}).tensors["Y"]
    for g in range(4):
        rows = slice(starts[g], starts[g + 1])
        np.testing.assert_allclose(found[rows], x[rows] @ w[48 * g : 48 * g + 48].T, rtol=1e-4, atol=1e-4)
