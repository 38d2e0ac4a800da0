"""The graphs that a person writes for what the kernels compute: what translated ones are as fast as."""

import numpy as np

from tvm_axe.stream import Scalar, StreamProgram, StreamType, Tile, Tuple, View, functions, symbol
from tvm_axe.stream.functions import TileFunction


def product(m, n, k, block, bias=False):
    """C = relu(A B^T + bias), or A B^T, in square blocks."""
    p = StreamProgram("product")
    down, across, terms = m // block, n // block, k // block
    a = p.load(p.tensor("A", m, k), (block, block), View((down, across, terms), (terms, 0, 1)))
    b = p.load(p.tensor("B", n, k), (block, block), View((down, across, terms), (0, terms, 1)))
    c = a.accum(functions.matmul(transposed=True), b)
    if bias:
        row = p.load(p.tensor("bias", 1, n), (1, block), View((down, across), (0, 1)))
        relu = functions.elementwise("bias_relu", lambda c, row: np.maximum(c + row, 0), each=2)
        c = c.map(relu, row)
    c.store(p.tensor("C", m, n))
    return p


def softmax(rows, columns, block):
    """Y = softmax(X), so many rows at once."""
    p = StreamProgram("softmax")
    x = p.load(p.tensor("X", rows, columns), (block, columns)).flatten()
    weights = x.map(functions.elementwise("exponential", lambda x, top: np.exp(x - top), 6), x.map(functions.row_max()))
    weights.map(functions.div(), weights.map(functions.row_sum())).store(p.tensor("Y", rows, columns))
    return p


def rms_norm(rows, columns, block):
    """Y = X / sqrt(mean of the row's squares) * weight, so many rows at once."""
    p = StreamProgram("rms_norm")
    x = p.load(p.tensor("X", rows, columns), (block, columns)).flatten()
    weight = p.load(p.tensor("weight", 1, columns), (1, columns), View((rows // block,), (0,)))
    sums = x.map(functions.elementwise("square", np.square)).map(functions.row_sum())
    factor = sums.map(functions.scale(1 / columns)).map(functions.rsqrt())
    x.map(functions.elementwise("scale", lambda x, factor, weight: x * factor * weight, 2), factor, weight).store(
        p.tensor("Y", rows, columns)
    )
    return p


def attention(heads, queries, keys, dim, rows, columns):
    """O = softmax(Q K^T) V with an online softmax, head by head."""
    p = StreamProgram("attention")
    down, across = queries // rows, keys // columns
    view = View((heads, down, across), (across, 0, 1))
    k, v = (p.load(p.tensor(name, heads * keys, dim), (columns, dim), view) for name in "KV")
    q = p.load(p.tensor("Q", heads * queries, dim), (rows, dim), View((heads, down), (down, 1)))
    scores = q.expand(k).map(functions.matmul(transposed=True), k)
    tops = scores.scan(tops_of(rows))  # [heads, down, across] of two columns: the largest before, and after
    weights = scores.map(exponential(1), tops)
    scale = tops.map(fading())
    total = scale.accum(fading_sum(), weights.map(functions.row_sum()))
    summed = scale.accum(fading_product(), weights, v)
    summed.map(functions.div(), total).store(p.tensor("O", heads * queries, dim))
    return p


def grouped(rows, n, k, groups, block):
    """Y = X W[group]^T of rows that are sorted by group, in square blocks; tiles are given by group, row and height."""
    p = StreamProgram("grouped")
    across, terms, tiles = n // block, k // block, symbol("tiles")
    group, row, height = (p.input(name, StreamType((tiles,), Scalar())) for name in ("group", "row", "height"))
    inner = StreamType((across, terms), Scalar())
    x = row.flat_map(lambda r: [[r * k + block * t for t in range(terms)]] * across, inner)
    w = group.flat_map(lambda g: [[(g * across + j) * terms + t for t in range(terms)] for j in range(across)], inner)
    x = x.load_at(p.tensor("X", rows + block, k), (block, block), elements=True)
    w = w.load_at(p.tensor("W", groups * n, k), (block, block))
    places = row.zip(height).flat_map(
        lambda at: [(at[0] * n + j * block, at[1]) for j in range(across)],
        StreamType((across,), Tuple((Scalar(), Scalar()))),
    )
    y = x.accum(functions.matmul(transposed=True), w)
    y.store_at(p.tensor("Y", rows, n), places, elements=True).discard()
    return p


def group_tiles(program, starts, block):
    """The group and the first row of each tile of a program, as its tensors have them; group -1 behind the last."""
    tiles = next(int(param.shape[0]) for param in program.params if param.name == "tile_group")
    found = [(g, r) for g in range(len(starts) - 1) for r in range(starts[g], starts[g + 1], block)]
    groups, rows = (np.full(tiles, fill, "int32") for fill in (-1, 0))
    groups[: len(found)], rows[: len(found)] = zip(*found)
    return {"tile_group": groups, "tile_row": rows}


def tops_of(rows):
    """Each row's largest element before and after a tile of scores."""

    def call(scores):
        return np.concatenate([np.full((rows, 1), -1e30, "float32"), scores.max(axis=1, keepdims=True)], axis=1)

    def combine(state, part):
        return np.concatenate([state[:, 1:], np.maximum(state[:, 1:], part[:, 1:])], axis=1)

    return TileFunction("tops", call, lambda s: Tile(s.rows, 2), lambda s: s.rows * s.columns, combine)


def exponential(column):
    """e ** (scores - top), with so many columns of tops before the one that counts."""
    return TileFunction(
        "exponential",
        lambda s, tops: np.exp(s - tops[:, column : column + 1]),
        lambda s, tops: s,
        lambda s, tops: 6 * s.rows * s.columns,
    )


def fading():
    """What is left of a sum when the largest element changes."""
    return TileFunction(
        "fading", lambda tops: np.exp(tops[:, :1] - tops[:, 1:]), lambda t: Tile(t.rows, 1), lambda t: 6 * t.rows
    )


class _Fading(TileFunction):
    """A sum that fades before what comes is added."""

    def accumulate(self, state, scale, *values):
        part = self.call(scale, *values)
        return part if state is None else state * scale + part


def fading_sum():
    """The sum of rows' sums."""
    return _Fading("fading_sum", lambda scale, sums: sums, lambda scale, sums: sums, lambda scale, sums: 2 * sums.rows)


def fading_product():
    """The sum of products of weights and values."""
    return _Fading(
        "fading_product",
        lambda scale, weights, v: weights @ v,
        lambda scale, weights, v: Tile(weights.rows, v.columns),
        lambda scale, weights, v: weights.rows * v.columns * (2 * weights.columns + 1),
    )
