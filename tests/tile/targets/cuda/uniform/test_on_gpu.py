"""The uniform model's programs on a GPU, beside what they mean (`interpreter`), outputs poisoned."""

import ml_dtypes  # noqa: F401  (numpy's names of small floats)
import numpy as np
import programs_uniform as programs
import pytest
import tvm
from interpreter import interpret
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.machines.target import resolve_target
from tvm_axe.tile.targets.cuda.uniform.emit import lower
from tvm_axe.tile.targets.cuda.uniform.plan import decide

TOLERANCE = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-2, "int32": 0, "tf32": 1e-3}


def drawn(func, rng, given=()):
    """Random inputs, and outputs, which are not `given` and among the last parameters, as they are to be poisoned."""
    arrays = []
    for param in func.params:
        shape, dtype = [int(extent) for extent in param.shape], str(param.dtype)
        if param.name in dict(given):
            arrays.append(np.asarray(dict(given)[param.name], dtype))
        elif dtype.startswith(("int", "uint")):
            arrays.append(rng.integers(-8 if dtype[0] == "i" else 0, 8, shape).astype(dtype))
        else:
            arrays.append(rng.standard_normal(shape).astype(dtype))
    return arrays


def poisoned(array):
    return np.full_like(array, np.nan if array.dtype.kind not in "iu" else np.iinfo(array.dtype).min)


def compiled_for_ampere(func):
    """Decided for sm_80, and compiled for the GPU at hand."""
    decided = decide(tile.read(func), Target({"kind": "cuda", "arch": "sm_80"}), "test")
    mod = tvm.IRModule({"main": lower(decided).with_attr("global_symbol", "main")})
    run = tvm.compile(mod, resolve_target("cuda"), tir_pipeline="tirx")

    def call(*arrays):
        tensors = [tvm.runtime.empty(array.shape, array.dtype.name, tvm.cuda()) for array in arrays]
        for tensor, array in zip(tensors, arrays):
            tensor.copyfrom(array)
        run(*tensors)
        for tensor, array in zip(tensors, arrays):
            array[...] = tensor.numpy()

    return call


def check(func, outputs, tolerance, given=(), keep=False, seed=0, ampere=False):
    rng = np.random.default_rng(seed)
    arrays = drawn(func, rng, given)
    names = [param.name for param in func.params]
    for at, name in enumerate(names):
        if name in outputs:
            arrays[at] = np.zeros_like(arrays[at]) if keep else poisoned(arrays[at])
    expected = interpret(func, *arrays)
    (compiled_for_ampere(func) if ampere else tile.compile(func, "cuda"))(*arrays)
    for at, name in enumerate(names):
        if name in outputs:
            got, want = arrays[at].astype("float64"), np.asarray(expected[at], "float64")
            assert np.array_equal(np.isnan(got), np.isnan(want)), name
            size = np.abs(np.nan_to_num(want)).max()
            assert np.nanmax(np.abs(got - want)) <= tolerance * size, name


MATMULS = [
    ((128, 192, 96), {}),
    ((128, 128, 128), {"dtype": "bfloat16", "out": "bfloat16", "transpose_b": True, "stages": 4}),
    ((64, 64, 64), {"transpose_a": True}),
    ((64, 128, 64), {"transpose_a": True, "transpose_b": True, "stages": 1}),
    ((100, 70, 72), {"dtype": "bfloat16"}),
    ((99, 77, 61), {"stages": 2}),
    ((256, 256, 64), {"block": (128, 128, 32), "transpose_b": True, "stages": 2}),
    ((64, 24, 64), {"block": (32, 24, 32)}),
    ((64, 128, 64), {"block": (16, 64, 32), "threads": 256}),
    ((300, 200, 64), {"persistent": True, "swizzle": 2}),
    ((96, 64, 64), {"dtype": "float32"}),
    ((33, 47, 50), {"dtype": "float32", "transpose_a": True, "transpose_b": True, "stages": 2}),
    ((64, 64, 64), {"dtype": "float32", "transpose_b": True, "instruction": "mma"}),
    ((64, 64, 64), {"dtype": "float64", "out": "float64", "total": "float64"}),
    ((64, 64, 128), {"dtype": "int8", "out": "int32", "total": "int32", "transpose_b": True}),
    ((64, 64, 64), {"dtype": "float16", "instruction": "fma", "block": (64, 64, 16)}),
]


@pytest.mark.gpu
@pytest.mark.parametrize("shape, options", MATMULS)
def test_products(cuda, shape, options):
    kind = "tf32" if options.get("instruction") == "mma" else options.get("out", "float32")
    check(programs.matmul(*shape, **options), ("C",), TOLERANCE[kind])


@pytest.mark.gpu
def test_left_operands_in_registers(cuda):
    check(programs.attention(256, 64), ("O",), TOLERANCE["float16"])
    check(programs.attention(128, 128, dtype="bfloat16"), ("O",), TOLERANCE["bfloat16"])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["sum", "max", "min"])
@pytest.mark.parametrize("count, columns, block, dtype", [
    (5, 8192, 1, "float32"), (37, 256, 4, "float32"), (64, 96, 16, "bfloat16"), (9, 3072, 2, "float16"),
    (64, 8, 64, "float32"), (16, 64, 8, "int32"),
])  # fmt: skip
def test_rows(cuda, count, columns, block, dtype, kind):
    check(programs.rows(count, columns, block, dtype, kind), ("Y", "R"), max(TOLERANCE[dtype], 0))


OTHERS = {
    "columns": (programs.columns(128, 256), ("Y", "Z"), 0),
    "columns of few": (programs.columns(64, 24), ("Y", "Z"), 0),
    "transposed": (programs.transposed(192, 128, "bfloat16"), ("Y",), 0),
    "transposed, ragged": (programs.transposed(100, 70, "float32"), ("Y",), 0),
    "transposed bytes": (programs.transposed(128, 64, "int8"), ("Y",), 0),
    "chain": (programs.chain(120, 64), ("Y", "Z"), TOLERANCE["bfloat16"]),
    "chain of odd rows": (programs.chain(51, 50), ("Y", "Z"), TOLERANCE["bfloat16"]),
    "unlike": (programs.unlike(64, 64), ("C",), TOLERANCE["float32"]),
    "fused": (programs.fused(64, 256), ("Y", "Z"), TOLERANCE["bfloat16"]),
    "fused, of odd rows": (programs.fused(64, 37), ("Y", "Z"), TOLERANCE["bfloat16"]),
    "reduced memory": (programs.reduced_memory(32, 64), ("Y", "Z"), TOLERANCE["float32"]),
    "reduced memory, odd": (programs.reduced_memory(10, 37), ("Y", "Z"), TOLERANCE["float32"]),
    "reused": (programs.reused(512), ("Y",), TOLERANCE["float32"]),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", OTHERS)
def test_what_moves_between_threads(cuda, name):
    check(*OTHERS[name])


@pytest.mark.gpu
def test_what_the_data_decides(cuda):
    check(programs.segments(5, 200), ("Y",), TOLERANCE["float32"], {"start": [0, 3, 3, 20, 21, 64]}.items())
    rng = np.random.default_rng(1)
    given = {"where": rng.integers(-2, 16, 16), "to": rng.permutation(16)}
    check(programs.gathered(16, 40), ("Y",), 1e-3, given.items())


@pytest.mark.gpu
@pytest.mark.parametrize("func, output", [
    (programs.matmul(256, 192, 256, (128, 64, 32), transpose_b=True), "C"), (programs.attention(128, 64), "O"),
    (programs.transposed(100, 70, "float32"), "Y"),
])  # fmt: skip
def test_what_is_decided_for_ampere(cuda, func, output):
    check(func, (output,), TOLERANCE["float16"], ampere=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_products_of_8_bit_floats(cuda, dtype):
    for size in ((256, 192, 256), (99, 77, 64)):
        check(programs.matmul(*size, (64, 64, 64), dtype=dtype, transpose_b=True), ("C",), 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("source, target, tolerance", [
    ("float32", "float8_e4m3fn", 0.07), ("bfloat16", "float8_e5m2", 0.13), ("float8_e4m3fn", "float32", 0),
    ("float64", "float32", 1e-7), ("float16", "bfloat16", 1e-2), ("int8", "float16", 0), ("int32", "int8", 0),
    ("int64", "float64", 0), ("uint8", "int32", 0),
])  # fmt: skip
def test_conversions(cuda, source, target, tolerance):
    check(programs.converted(source, target), ("Y", "Z"), tolerance)
    check(programs.converted(source, target, 37), ("Y", "Z"), tolerance)


@pytest.mark.gpu
def test_atomic_additions(cuda):
    check(programs.split(64, 64, 512, 4), ("C",), TOLERANCE["float32"], keep=True)
