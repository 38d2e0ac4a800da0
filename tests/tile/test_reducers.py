"""Reductions by functions of one's own, beside numpy in float64 and the interpreter, in every type and place."""

import itertools
import shutil

import ml_dtypes  # noqa: F401  (gives numpy the names of the small float types)
import numpy as np
import pytest
import tvm
import tvm_ffi
from on_cpu import agree, close, normal, poison, run
from tvm import tirx
from tvm.error import DiagnosticError
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines.cache import Cache
from tvm_axe.tile import nodes

TARGETS = ("cuda:sm_80", "cuda:sm_90a")
PLACES = ("fragment", "shared")


def log_add_exp(a, b):
    most = T.max(a, b)
    return most + T.log(T.exp(a - most) + T.exp(b - most))


def magnitude(a, b):
    return T.max(T.abs(a), T.abs(b))


FLOATS = {
    "product": (lambda a, b: a * b, 1, lambda x, axis: np.prod(x, axis=axis)),
    "log-add-exp": (log_add_exp, -1e30, lambda x, axis: np.logaddexp.reduce(x, axis=axis)),
    "magnitude": (magnitude, 0, lambda x, axis: np.abs(x).max(axis=axis)),
    "norm": (lambda a, b: T.sqrt(a * a + b * b), 0, lambda x, axis: np.sqrt((x * x).sum(axis=axis))),
    "choice": (lambda a, b: T.if_then_else(a < b, a, b), float("inf"), lambda x, axis: x.min(axis=axis)),
    "no vectors": (lambda a, b: T.if_then_else(T.isnan(a), b, T.max(a, b)), -1e30, lambda x, axis: x.max(axis=axis)),
}
INTEGERS = {
    "product": (lambda a, b: a * b, 1, np.multiply),
    "xor": (lambda a, b: a ^ b, 0, np.bitwise_xor),
    "or": (T.bitwise_or, 0, np.bitwise_or),
    "min": (lambda a, b: T.if_then_else(a < b, a, b), 127, np.minimum),
}


def reduction(dtype, out, shape, axis, combine, identity, accumulate=False, place="fragment", to="fragment", **options):
    """Y = the reduction of X, and of 2 if it accumulates."""
    (kept,) = (extent for number, extent in enumerate(shape) if number != axis)
    x_at, y_at = {"fragment": tile.fragment, "shared": tile.shared}[place], getattr(tile, to)

    @T.prim_func
    def func(X: T.Buffer(shape, dtype), Y: T.Buffer((kept,), out)):
        with tile.kernel(1, **options):
            x = x_at(shape, dtype)
            y = y_at((kept,), out)
            tile.copy(X[0, 0], x)
            tile.fill(y, 2)
            tile.reduce(x, y, combine, axis, identity=identity, accumulate=accumulate)
            tile.copy(y, Y[0])

    return func


def drawn(dtype, shape, seed=0):
    """Numbers whose products stay in the type."""
    rng = np.random.default_rng([seed, *shape])
    return rng.uniform(0.9, 1.1, shape).astype(dtype) if "float" in dtype else normal(rng, shape, dtype)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", FLOATS)
def test_floats(name, axis):
    combine, identity, expected = FLOATS[name]
    for shape, place in itertools.product(((5, 70), (3, 7)), PLACES):
        x = normal(np.random.default_rng([axis, *shape]), shape)
        func = reduction("float32", "float32", shape, axis, combine, identity, place=place)
        y = poison(shape[1 - axis : 2 - axis])
        agree(func, x, y)
        close(run(func, x, y)[1], expected(x.astype("float64"), axis))


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("out", ["float64", "float32", "bfloat16"])
def test_types_of_floats(dtype, out):
    """Those of 16 and 8 bits are combined in float32, and rounded once."""
    for axis, accumulate in itertools.product((0, 1), (False, True)):
        if accumulate and (dtype, out) == ("float8_e4m3fn", "float64"):
            continue
        x = drawn(dtype, (6, 70))
        func = reduction(dtype, out, x.shape, axis, lambda a, b: a * b, 1, accumulate)
        y = poison((x.shape[1 - axis],), out)
        agree(func, x, y, bounds=(False,))
        close(run(func, x, y)[1], np.prod(x.astype("float64"), axis=axis) * (2 if accumulate else 1))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64"])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_to_the_bit(name, dtype):
    combine, identity, function = INTEGERS[name]
    for axis, accumulate, to in ((0, True, "fragment"), (1, False, "shared"), (1, True, "fragment")):
        rng = np.random.default_rng([axis, len(dtype)])
        high = 2 if name == "product" else 100
        x = rng.integers(0 if dtype.startswith("u") else -high, high + 1, (4, 37)).astype(dtype)
        x = np.where(rng.random(x.shape) < 0.9, 1, x).astype(dtype) if name == "product" else x
        func = reduction(dtype, dtype, x.shape, axis, combine, identity, accumulate, to=to)
        y = poison((x.shape[1 - axis],), dtype)
        wanted = function.reduce(x, axis=axis, dtype=dtype)
        found = run(func, x, y)[1]
        np.testing.assert_array_equal(found, function(wanted, np.array(2, dtype)) if accumulate else wanted)
        if name != "product":  # which wraps where it isn't small
            agree(func, x, y, bounds=(True,))


def test_what_is_converted_is_the_result():
    x = np.full((4, 40), 0.625, "float32")
    func = reduction("float32", "int8", x.shape, 1, lambda a, b: a + b, 0)
    np.testing.assert_array_equal(run(func, x, poison((4,), "int8"))[1], np.full(4, 25))


def test_parts_of_tiles_in_a_loop():
    @T.prim_func
    def parts(X: T.Buffer((8, 64), "int32"), Y: T.Buffer((8,), "int32")):
        with tile.kernel(2) as i:
            x = tile.shared((4, 64), "int32")
            y = tile.fragment((4,), "int32")
            tile.copy(X[i * 4, 0], x)
            tile.fill(y, 0)
            for k in range(2):
                tile.reduce(x[0:4, k * 32 : k * 32 + 20], y, lambda a, b: a ^ b, identity=0, accumulate=True)
            tile.copy(y, Y[i * 4])

    x = np.random.default_rng(3).integers(-(2**31), 2**31, (8, 64)).astype("int32")
    wanted = np.bitwise_xor.reduce(np.concatenate([x[:, :20], x[:, 32:52]], axis=1), axis=1)
    np.testing.assert_array_equal(run(parts, x, poison((8,), "int32"))[1], wanted)


# ---- The function as data --------------------------------------------------------------------------------------------


def of(func):
    (node,) = (node for node in tile.read(func).nodes() if isinstance(node, nodes.Reduce))
    return node


def test_it_prints_and_is_saved():
    func = reduction("float32", "float32", (4, 8), 1, log_add_exp, -1e30)
    assert "T.tile.sum(y[0:4], x[0:4, 0:8], [1], False, reducer=T.comm_reducer(lambda a, b: " in func.script()
    for same in (
        tvm.script.from_source(func.script(), extra_vars={"tile": tile, "T": T}),
        tvm.ir.load_json(tvm.ir.save_json(func)),
    ):
        assert same.script() == func.script()
        assert tvm_ffi.structural_equal(of(same).reducer, of(func).reducer)
        assert tvm_ffi.structural_hash(of(same).reducer) == tvm_ffi.structural_hash(of(func).reducer)
    node = of(reduction("int32", "int32", (4, 8), 0, lambda a, b: a ^ b, 0, True))
    assert str(node) == "y accumulates a ^ b of x along 0" and node.kind == "reduce"


def test_other_functions_and_identities_are_other_programs():
    functions = [(lambda a, b: a * b, 1), (lambda a, b: a * b, 0), (T.max, 0), (T.max, -1)]
    made = [reduction("int32", "int32", (4, 8), 1, *each) for each in functions]
    assert len({tvm_ffi.structural_hash(func) for func in made}) == len({func.script() for func in made}) == 4
    again = reduction("int32", "int32", (4, 8), 1, lambda a, b: a * b, 1)
    assert tvm_ffi.structural_equal(of(again).reducer, of(made[0]).reducer)


def test_sums_maxima_and_minima_are_of_the_same_place():
    a, b = tirx.Var("a", "float32"), tirx.Var("b", "float32")
    made = ((tile.sum, "a + b", 0), (tile.max, "T.max(a, b)", -np.inf), (tile.min, "T.min(a, b)", np.inf))
    for word, said, identity in made:
        node = of(reduced_by(word))
        assert node.reducer is None and str(node.combined(a, b)) == said
        assert node.identity("float32").value == identity


def reduced_by(word):
    @T.prim_func
    def func(X: T.Buffer((4, 8), "float32")):
        with tile.kernel(1):
            x = tile.fragment((4, 8), "float32")
            y = tile.fragment((4,), "float32")
            tile.copy(X, x)
            word(x, y)

    return func


def test_knobs_stay():
    @T.prim_func
    def func(X: T.Buffer((64, 8), "int32"), Y: T.Buffer((64,), "int32")):
        rows = tile.knob("rows", (4, 8))
        with tile.kernel(64 // rows) as i:
            x = tile.fragment((rows, 8), "int32")
            y = tile.fragment((rows,), "int32")
            tile.copy(X[i * rows, 0], x)
            tile.reduce(x, y, T.bitwise_or, identity=0)
            tile.copy(y, Y[i * rows])

    x, y = normal(np.random.default_rng(2), (64, 8), "int32"), poison((64,), "int32")
    for rows in (4, 8):
        tile.compile(func, "llvm", knobs={"rows": rows})(x, y)
        np.testing.assert_array_equal(y, np.bitwise_or.reduce(x, axis=1))


# ---- GPUs ------------------------------------------------------------------------------------------------------------


@T.prim_func
def scores(X: T.Buffer((256, 128), "bfloat16"), W: T.Buffer((64, 128), "bfloat16"), Y: T.Buffer((256,), "float32")):
    """The log of the sum of a product's exponentials, where the product is."""
    with tile.kernel(2) as m:
        x = tile.shared((128, 64), "bfloat16")
        w = tile.shared((64, 64), "bfloat16")
        c = tile.fragment((128, 64), "float32")
        y = tile.fragment((128,), "float32")
        tile.fill(c, 0)
        for k in tile.pipelined(2):
            tile.copy(X[m * 128, k * 64], x)
            tile.copy(W[0, k * 64], w)
            tile.gemm(x, w, c, transpose_b=True)
        tile.reduce(c, y, log_add_exp, identity=-1e30)
        tile.copy(y, Y[m * 128])


def on_gpus():
    """Programs whose rows are of a thread, of a warp's lanes and of several warps, and columns."""
    made = []
    for number, (dtype, shape, axis, threads) in enumerate(
        (
            ("float32", (4, 1024), 1, 1024),
            ("float32", (64, 32), 0, 128),
            ("bfloat16", (128, 8), 1, 128),
            ("float16", (3, 50), 1, 32),
            ("float64", (2, 256), 1, 256),
        )
    ):
        for accumulate in (False, True):
            out = "float64" if dtype == "float64" else "float32"
            func = reduction(dtype, out, shape, axis, lambda a, b: a * b, 1, accumulate, threads=threads)
            made.append(func.with_attr("global_symbol", f"product_{number}_{accumulate}"))
    for number, (dtype, combine) in enumerate((
        ("int8", magnitude), ("uint8", T.bitwise_or), ("int16", magnitude), ("int32", lambda a, b: a ^ b),
        ("int64", lambda a, b: a ^ b), ("uint32", T.bitwise_or),
    )):  # fmt: skip
        func = reduction(dtype, dtype, (3, 300), 1, combine, 0, True, place=PLACES[number % 2], to=PLACES[number // 3])
        made.append(func.with_attr("global_symbol", f"bits_{dtype}"))
    made.append(reduction("float32", "float32", (8, 512), 1, log_add_exp, -1e30, threads=256))
    return made


@pytest.mark.parametrize("target", TARGETS)
def test_on_cuda_all_of_them_compile(tmp_path, target):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on PATH")
    programs = [scores, *on_gpus()]
    assert len(tile.compile_all(programs, target, Cache(tmp_path))) == len(programs)
    assert "producer warp" in tile.explain(scores, "cuda:sm_90a")


def test_values_are_named_before_they_are_combined():
    """Of many warps' parts, two and two, each is computed once, or there would be thousands."""
    func = reduction("float32", "float32", (33, 96), 1, log_add_exp, -1e30, threads=96)
    source = tile.lower(func, "cuda:sm_90a").script()
    assert source.count("T.log") < 40


def test_on_amd():
    compiled = tile.compile(reduction("float32", "float32", (8, 512), 1, log_add_exp, -1e30), "rocm:gfx942")
    assert "ds_bpermute_b32" in compiled.source


@pytest.mark.gpu
def test_on_a_gpu(cuda, tmp_path):
    for func in on_gpus():
        shape, dtype = tuple(map(int, func.params[0].shape)), str(func.params[0].dtype)
        x, y = drawn(dtype, shape, 5), poison(tuple(map(int, func.params[1].shape)), str(func.params[1].dtype))
        found = poison(y.shape, y.dtype)
        tile.compile(func, "cuda", Cache(tmp_path))(x, found)
        close(found, run(func, x, y)[1].astype("float64" if "float" in dtype else dtype))
    rng = np.random.default_rng(6)
    x, w = (rng.standard_normal(shape).astype("bfloat16") for shape in ((256, 128), (64, 128)))
    found = poison((256,))
    tile.compile(scores, "cuda", Cache(tmp_path))(x, w, found)
    close(found, np.logaddexp.reduce(x.astype("float64") @ w.astype("float64").T, axis=1))


# ---- What is refused -------------------------------------------------------------------------------------------------

OTHER = tirx.Var("n", "int32")
REFUSED = {
    "three": (lambda a, b, c: a * b * c, 1, "int32", r"combine isn't a function of two scalars of int32 \(.*'c'"),
    "no function": (3, 1, "int32", "combine is 3; valid is a function of two scalars"),
    "python's max": (max, 0, "int32", "valid is .* T.if_then_else, T.And and T.max in the place of"),
    "two results": (lambda a, b: (a, b), 1, "int32", r"gives \(a, b\), a tuple; valid"),
    "a number": (lambda a, b: 7, 1, "int32", "gives 7, a int; valid"),
    "one of both": (lambda a, b: a, 1, "int32", "gives `a`, without the second of its scalars"),
    "other variables": (
        lambda a, b: a * b * OTHER,
        1,
        "int32",
        "reads n, which is another variable; valid are its two",
    ),
    "another type": (lambda a, b: a < b, 1, "int32", "the result, `a < b`, of bool; valid is int32, to which T.cast"),
    "floats": (lambda a, b: a * b * 2.0, 1, "int32", "of float32; valid is int32"),
    "an effect": (lambda a, b: T.call_extern("int32", "f", a, b), 1, "int32", "more than a value; valid is arithmetic"),
    "random": (
        lambda a, b: a * b + tile.random(1, 2),
        1,
        "float32",
        "more than a value; valid is arithmetic, as T.exp",
    ),
    "float identity": (lambda a, b: a * b, 1.0, "int32", "identity is 1.0, a float; valid is a number of int32"),
    "truth": (lambda a, b: a * b, True, "int32", "identity is True, a bool; valid is a number of int32"),
    "text": (lambda a, b: a * b, "1", "float32", "identity is '1', a str; valid is a number of float32"),
    "too large": (lambda a, b: a * b, 300, "int8", "identity is 300; valid is a number of int8, -128 to 127"),
    "too large a float": (lambda a, b: a * b, 1e300, "float32", r"identity is 1e\+300; valid is a number of float32"),
    "typed": (lambda a, b: a * b, tirx.const(1, "int8"), "int32", r"`T.int8\(1\)` of int8; valid is a number of int32"),
    "no identity": (lambda a, b: a + b, 1, "int32", "gives 2 for 1 twice, which is no identity; valid is the number"),
    "nan": (log_add_exp, float("-inf"), "float32", "NaN of -inf twice.*valid is a finite one"),
    "truth values": (lambda a, b: a & b, 1, "bool", "truth values of a tile; valid are numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    combine, identity, dtype, message = REFUSED[name]
    x, y = tirx.decl_buffer((4, 8), dtype, "x"), tirx.decl_buffer((4,), dtype, "y")
    with pytest.raises(TileError, match=message):
        tile.reduce(x, y, combine, identity=identity)


@pytest.mark.parametrize(
    "condition",
    [
        lambda a, b: T.max(a, b) == T.float32(-np.inf),
        lambda a, b: T.And(a == T.float32(-np.inf), b == T.float32(-np.inf)),
        lambda a, b: T.isinf(T.max(a, b)),
    ],
)
def test_a_choice_keeps_an_infinite_identity(condition):
    func = reduction(
        "float32", "float32", (4, 70), 1,
        lambda a, b: T.if_then_else(condition(a, b), T.max(a, b), log_add_exp(a, b)), -np.inf,
    )  # fmt: skip
    x = normal(np.random.default_rng(1), (4, 70))
    x[1], x[2, 5:] = -np.inf, -np.inf
    close(run(func, x, poison((4,)))[1], np.logaddexp.reduce(x.astype("float64"), axis=1))


def test_refused_within_a_program():
    with pytest.raises(DiagnosticError, match="combine reads x; valid are its two scalars and constants"):

        @T.prim_func
        def reads():
            with tile.kernel(1):
                x = tile.shared((4, 8), "float32")
                y = tile.fragment((4,), "float32")
                tile.fill(x, 0)
                tile.reduce(x, y, lambda a, b: a * b * x[0, 0], identity=1)

    with pytest.raises(DiagnosticError, match="src is a TensorLoad; valid is a tile or a slice of one"):

        @T.prim_func
        def element():
            with tile.kernel(1):
                x = tile.shared((4, 8), "float32")
                y = tile.fragment((4,), "float32")
                tile.reduce(x[0, 0], y, lambda a, b: a * b, identity=1)

    with pytest.raises(DiagnosticError, match="accumulates in int8 what is combined in float32; valid is a dst of"):
        reduction("float32", "int8", (4, 8), 1, lambda a, b: a * b, 1, True)


@pytest.mark.parametrize(
    "function, message",
    [
        ("T.comm_reducer(lambda a, b: a * b, [T.float32(1)])", "is of int32, and the first, `a`, of float32"),
        ("T.comm_reducer(lambda a, b, c, d: (a * c, b * d), [1, 1])", "valid is a function of two scalars"),
        ('"product"', "reducer is `product`; valid is a function of two scalars"),
    ],
)
def test_refused_of_text(function, message):
    text = reduction("int32", "int32", (4, 8), 1, lambda a, b: a * b, 1).script()
    changed = text.replace("T.comm_reducer(lambda a, b: a * b, [1])", function)
    assert changed != text
    with pytest.raises(TileError, match=message):
        tile.read(tvm.script.from_source(changed, extra_vars={"tile": tile, "T": T}))
