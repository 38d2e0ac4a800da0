"""The specialized model's programs on a Hopper GPU, beside numpy in float64, outputs poisoned."""

import random

import ml_dtypes  # noqa: F401  (numpy's names of small floats)
import numpy as np
import programs_hopper as programs
import pytest
import tvm
from interpreter import interpret
from programs_interleaved import interleaved, nested

from tvm_axe import tile

TOLERANCE = {"bfloat16": 1e-2, "float16": 1e-2, "float32": 1e-3, "float8_e4m3fn": 5e-2, "float8_e5m2": 5e-2, "int8": 0}

MATMULS = [
    ((512, 768, 512), {}),
    ((512, 768, 512), {"transpose_b": False}),
    ((512, 768, 512), {"transpose_a": True, "transpose_b": False}),
    ((512, 768, 512), {"transpose_a": True, "dtype": "float16"}),
    ((1000, 1208, 520), {"block": (128, 128, 64)}),
    ((4000, 1032, 1000), {}),
    ((1, 40, 1024), {"block": (64, 8, 128)}),
    ((128, 192, 512), {"block": (64, 96, 128)}),
    ((768, 512, 512), {"block": (192, 128, 64)}),
    ((512, 512, 512), {"block": (256, 128, 64), "stages": 1}),
    ((512, 96, 512), {"block": (128, 48, 64)}),
    ((256, 640, 256), {"block": (64, 320, 64)}),
    ((200, 1024, 320), {"block": (64, 512, 64)}),
    ((200, 1000, 320), {"block": (64, 512, 64), "transpose_b": False}),
    ((200, 1024, 256), {"block": (64, 512, 64), "transpose_a": True, "out": "float32"}),
    ((200, 96, 256), {"block": (64, 96, 64), "threads": 256}),
    ((256, 512, 512), {"block": (64, 512, 128), "dtype": "float8_e4m3fn", "out": "bfloat16"}),
    ((512, 512, 96), {"block": (128, 128, 32), "out": "float32"}),
    ((300, 200, 64), {"block": (64, 64, 64), "persistent": True, "swizzle": 2}),
    ((512, 512, 512), {"block": (128, 128, 128), "dtype": "float8_e4m3fn", "out": "bfloat16"}),
    ((512, 512, 512), {"block": (128, 128, 128), "dtype": "float8_e5m2", "out": "float32"}),
    ((512, 512, 512), {"block": (128, 128, 128), "dtype": "int8", "out": "int32"}),
    ((512, 512, 512), {"block": (128, 128, 32), "dtype": "float32", "instruction": "wgmma"}),
]


def run(func, *inputs, shape, dtype):
    """The program's last parameter, from poison; the same bits twice."""
    compiled = tile.compile(func, "cuda")
    results = []
    for _ in range(2):
        out = np.full(shape, np.nan if np.dtype(dtype).kind not in "iu" else -1, dtype)
        compiled(*inputs, out)
        results.append(out)
    assert results[0].tobytes() == results[1].tobytes()
    return results[0].astype("float64")


def error(got, expected):
    return np.linalg.norm(got - expected) / np.linalg.norm(expected)


@pytest.fixture(autouse=True)
def hopper(request):
    if request.node.get_closest_marker("gpu") is None:
        return
    cuda = request.getfixturevalue("cuda")
    if cuda.compute_version != "9.0":
        pytest.skip(f"the GPU has compute capability {cuda.compute_version}, not 9.0")


@pytest.mark.gpu
@pytest.mark.parametrize(("extents", "options"), MATMULS)
def test_matmul(extents, options):
    m, n, k = extents
    dtype = options.get("dtype", "bfloat16")
    out = options.get("out", dtype)
    rng = np.random.default_rng(0)
    shapes = ((k, m) if options.get("transpose_a") else (m, k), (n, k) if options.get("transpose_b", True) else (k, n))
    draw = (lambda s: rng.integers(-100, 100, s)) if dtype == "int8" else rng.standard_normal
    a, b = (np.asarray(draw(shape)).astype(dtype) for shape in shapes)
    got = run(programs.matmul(m, n, k, **options), a, b, shape=(m, n), dtype=out)
    wide_a, wide_b = a.astype("float64"), b.astype("float64")
    expected = (wide_a.T if options.get("transpose_a") else wide_a) @ (
        wide_b.T if options.get("transpose_b", True) else wide_b
    )
    assert error(got, expected) <= TOLERANCE[dtype]


@pytest.mark.gpu
def test_products_in_a_row_wait_for_each_other(cuda):
    """Twice the product with a permutation that is its own inverse, again and again; bit for bit the same."""
    exe = tile.compile(programs.matmul(1024, 1024, 1024), "cuda")
    given = np.random.default_rng(0).standard_normal((1024, 1024)).astype("bfloat16")
    reverse = np.eye(1024)[::-1].astype("bfloat16")
    a, b, c = (tvm.runtime.tensor(array, cuda) for array in (given, reverse, np.full_like(given, np.nan)))
    for _ in range(50):
        exe(a, b, c)
        exe(c, b, a)
    assert a.numpy().tobytes() == given.tobytes()


ATTENTIONS = [
    {"tokens": 512},
    {"tokens": 768, "causal": True},
    {"tokens": 384, "block": (192, 64)},
    {"tokens": 256, "head": 64, "block": (64, 64)},
    {"tokens": 256, "head": 64, "block": (128, 64), "causal": True, "dtype": "float16"},
]


@pytest.mark.gpu
@pytest.mark.parametrize("options", ATTENTIONS)
def test_attention(options):
    shape = (2, 3, options["tokens"], options.get("head", 128))
    dtype = options.get("dtype", "bfloat16")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype(dtype) for _ in range(3))
    got = run(programs.attention(2, 3, **options), q, k, v, shape=shape, dtype=dtype)
    q, k, v = (x.astype("float64") for x in (q, k, v))
    scores = np.einsum("bhid,bhjd->bhij", q, k) / np.sqrt(shape[-1])
    if options.get("causal"):
        scores = np.where(np.tril(np.ones(scores.shape[-2:])) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("bhij,bhjd->bhid", weights / weights.sum(-1, keepdims=True), v)
    assert error(got, expected) <= TOLERANCE[dtype]


@pytest.mark.gpu
def test_products_through_shared_memory():
    m, n, k = 300, 200, 320
    rng = np.random.default_rng(0)
    a, b, d = (rng.standard_normal(shape).astype("bfloat16") for shape in ((m, k), (128, k), (n, 128)))
    got = run(programs.through_shared(m, n, k), a, b, d, shape=(m, n), dtype="bfloat16")
    first = (a.astype("float64") @ b.astype("float64").T).astype("bfloat16").astype("float64")
    assert error(got, first @ d.astype("float64").T) <= TOLERANCE["bfloat16"]


@pytest.mark.gpu
@pytest.mark.parametrize("where", programs.HELD)
def test_left_operands_in_registers(where):
    rng = np.random.default_rng(0)
    a, b, d = (rng.standard_normal(shape).astype("bfloat16") for shape in ((256, 64), (512, 64), (512, 64)))
    more = rng.standard_normal(512).astype("float32")
    got = run(programs.held(where), a, b, d, more, shape=(256, 64), dtype="float32")
    exact = [x.astype("float64") for x in (a, b, d)]
    expected = np.zeros((256, 64))
    for j in range(8):
        own = slice(64 * j, 64 * j + 64)
        left = np.tile(exact[1][32 * j : 32 * j + 128], (2, 1)) if where.startswith("another") else exact[0]
        weights = np.exp2(left @ exact[1][own].T / 16 - more[own]).astype("bfloat16").astype("float64")
        expected += weights @ exact[2][own] * (2 if where == "in an outer one" else 1)
    assert error(got, expected) <= TOLERANCE["bfloat16"]


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [64, 128, 1000])
def test_scores_and_values_of_shared_columns(keys):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype("bfloat16") for shape in ((100, 128), (keys, 128), (keys, 512)))
    got = run(programs.wide_values(100, keys), q, k, v, shape=(100, 512), dtype="float32")
    x, y, z = (each.astype("float64") for each in (q, k, v))
    scores = np.exp(x @ y.T / 16)
    assert error(got, scores / scores.sum(axis=1, keepdims=True) @ z) <= TOLERANCE["bfloat16"]


@pytest.mark.gpu
def test_a_batch_whose_loops_differ_and_may_not_run():
    batch, m, n, k = 5, 200, 72, 256
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype("float16") for shape in ((batch, m, k), (batch, n, k)))
    bias, lengths = rng.standard_normal(n).astype("float32"), np.array([4, 0, 1, 3, 0], "int32")
    got = run(programs.batched(batch, m, n, k), a, b, bias, lengths, shape=(batch, m, n), dtype="float16")
    for at, steps in enumerate(lengths):
        x, y = (z[at, :, : 64 * steps].astype("float64") for z in (a, b))
        assert error(got[at], np.maximum(x @ y.T + bias, 0)) <= TOLERANCE["float16"]


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [64, 128, 320])
@pytest.mark.parametrize("branch", [False, True])
def test_two_products_a_step(keys, branch):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape).astype("float16") for shape in ((200, 64), (keys, 64), (keys, 64)))
    got = run(programs.chained(200, keys, branch), q, k, v, shape=(200, 64), dtype="float16")
    scores = (q.astype("float64") @ k.astype("float64").T).astype("float16").astype("float64")
    if branch:
        scores = scores * (np.arange(keys) // 64 % 2)
    expected = scores @ v.astype("float64")
    assert np.linalg.norm(got - expected) <= TOLERANCE["float16"] * np.linalg.norm(expected)


# ---- Programs of integers, beside the interpreter, bit for bit ----------------------------------------------------

ORDERS = [("as", "si"), ("abs", "sg"), ("bta", "tgh"), ("sbt", "xhh"), ("atb", "tghi"), ("asbt", "ytgh")]
COUNTS = np.array([2, 0, 1, 3, 0, 2, 1, 4], "int32")


def judged(func, target="cuda"):
    """Run a program of `programs_interleaved` on integers, and compare what it leaves with the interpreter's."""
    rng = np.random.default_rng(0)
    a, s = (rng.integers(-2, 3, shape).astype("float16") for shape in ((128, 1024), (17, 64)))
    outputs = [np.full(shape, np.nan, "float32") for shape in ((64, 64), (64, 64), (64,))]
    expected = interpret(func, a, s, COUNTS, *outputs)
    tile.compile(func, target)(a, s, COUNTS, *outputs)
    for got, want in zip(outputs, expected[3:], strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("extent", [1, 5, "n[0]", "n[1]"])
@pytest.mark.parametrize("loop", ["range", "one stage"])
@pytest.mark.parametrize(("loads", "uses"), ORDERS)
def test_loads_in_another_order_than_reads(loads, uses, loop, extent):
    judged(interleaved(loads, uses, loop, extent))


@pytest.mark.gpu
@pytest.mark.parametrize("extent", ["n[0]", "n[1]", "n[o]"])
def test_inner_loops_that_may_not_run(extent):
    judged(interleaved("ab", "gg", "one stage", extent, outer=4))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_loops_in_loops(seed):
    judged(nested(random.Random(seed)))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (1, 32), (1, 40), (3, 24), (5, 8), (7, 56), (9, 64), (264, 64)])
@pytest.mark.parametrize("stages", [None, 1, 3])
def test_small_tiles_in_circular_buffers(rows, columns, stages):
    func = programs.scaled(rows, columns, stages=stages)
    rng = np.random.default_rng(0)
    a, s = (rng.integers(-2, 3, shape).astype("float16") for shape in ((128, 320), (5 * rows, columns)))
    outputs = [np.full(shape, np.nan, "float32") for shape in ((128, 128), (rows, columns))]
    tile.compile(func, "cuda")(a, s, *outputs)
    wide = a.astype("float64")
    np.testing.assert_array_equal(outputs[0], wide @ wide.T)
    np.testing.assert_array_equal(outputs[1], s.astype("float64").reshape(5, rows, columns).sum(0))


# ---- Scales that threads read from circular buffers --------------------------------------------------------------


def of_scaled_tiles(a, b, s, r, by):
    """What `programs.scaled_tiles` makes of its inputs, in float64."""
    total = np.zeros((len(a), len(b)))
    for step, (rows, columns) in enumerate(zip(s, r, strict=True)):
        x, y = (each[:, step * 64 : step * 64 + 64].astype("float64") for each in (a, b))
        x = x if by == "columns" else x * rows[:, None]
        total += x @ (y if by == "rows" else y * columns[:, None]).T
    return total


def scaled_tiles(tiles, rows, columns, steps, by, stages, target):
    """Integers through `programs.scaled_tiles`, exact: what came, and what should."""
    rng = np.random.default_rng()
    a, b = (rng.integers(-2, 3, (n, 64 * steps)).astype("float16") for n in (tiles * rows, columns))
    s, r = (rng.integers(1, 4, (steps, n)).astype("float32") for n in (tiles * rows, columns))
    got = np.full((tiles * rows, columns), np.nan, "float32")
    tile.compile(programs.scaled_tiles(tiles, rows, columns, steps, by, stages=stages), target)(a, b, s, r, got)
    return got, of_scaled_tiles(a, b, s, r, by)


@pytest.mark.parametrize("by", ["rows", "columns", "both"])
def test_scales_on_a_cpu(by):
    np.testing.assert_array_equal(*scaled_tiles(3, 64, 64, 5, by, None, "llvm"))


@pytest.mark.gpu
@pytest.mark.parametrize("by", ["rows", "columns", "both"])
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (128, 128), (192, 64)])
@pytest.mark.parametrize(("steps", "stages"), [(1, None), (5, 2), (16, None)])
def test_scales_of_more_tiles_than_processors(by, rows, columns, steps, stages):
    """What one warpgroup stores holds up what another one reads, from slots that are filled for the next tile."""
    np.testing.assert_array_equal(*scaled_tiles(700, rows, columns, steps, by, stages, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, step", [("float16", 64), ("float16", 128), ("bfloat16", 32), ("float32", 32)])
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (17, 1), (63, 1), (70, 2)])
def test_rows_that_no_tensor_has_are_zero(rows, blocks, dtype, step):
    """Though memory held something else before."""
    rng = np.random.default_rng(rows)
    a, b = (rng.integers(-4, 5, (count, 5 * step)).astype(dtype) for count in (rows, 40))
    dirty, few = (
        tile.compile(programs.poisoned(), "cuda"),
        tile.compile(programs.few_rows(rows, blocks, dtype, step), "cuda"),
    )
    for _ in range(3):
        dirty(np.zeros(264, "float32"))
        c, d = np.full((rows, 40), np.nan, "float32"), np.full((blocks, step), np.nan, "float32")
        few(a, b, c, d)
        wide = a.astype("float64")
        np.testing.assert_array_equal(c, wide @ b.astype("float64").T)
        blocks_of = [wide[m * 64 : m * 64 + 64].reshape(-1, 5, step).sum((0, 1)) for m in range(blocks)]
        np.testing.assert_array_equal(d, np.stack(blocks_of))
