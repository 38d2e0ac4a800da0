"""What nobody scheduled has a schedule, and computes the same."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.analysis.expressions import loads_in
from tvm_axe.analysis.tree import has_threads
from tvm_axe.lower.defaults import with_kernels
from tvm_axe.lower.tiles import with_tile_kernels
from tvm_axe.machines import resolve_target
from tvm_axe.machines.inlining import inlined
from tvm_axe.machines.vector_math import PIPELINE
from tvm_axe.nests import with_default_schedules

TARGET = resolve_target("llvm", threads=2)
HOPPER = resolve_target("cuda:sm_90a")
op = relax.op


def kernels(build, *inputs, dtype="float32") -> tvm.IRModule:
    """The functions of a model, each operator with the pointwise ones behind it."""
    builder = relax.BlockBuilder()
    kinds = [given if isinstance(given, tuple) else tuple(given) for given in inputs]
    params = [
        relax.Var(f"x{n}", relax.TensorType(shape, "int32" if isinstance(given, list) else dtype))
        for n, (given, shape) in enumerate(zip(inputs, kinds))
    ]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(build(builder.emit, *params))
        builder.emit_func_output(out)
    passes = [relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern()]
    passes += [relax.transform.FuseOps(), relax.transform.FuseTIR()]
    fused = tvm.transform.Sequential(passes)(builder.get())
    return tvm.IRModule({v: func for v, func in fused.functions_items() if isinstance(func, tirx.PrimFunc)})


def results(func: tirx.PrimFunc, scheduled: bool, sizes: dict[str, int]) -> np.ndarray:
    """What a function leaves in its last parameter, which was poisoned."""
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    if scheduled:
        mod = with_tile_kernels(with_default_schedules(mod, TARGET), TARGET)
    rng = np.random.default_rng(0)
    arrays = []
    for param in func.params:
        shape = [sizes[n.name] if isinstance(n, tirx.Var) else int(n) for n in param.ty.shape]
        dtype = str(param.ty.dtype)
        values = rng.standard_normal(shape) if "float" in dtype else rng.integers(0, 3, shape)
        arrays.append(values.astype(dtype))
    arrays[-1][...] = np.nan if "float" in str(arrays[-1].dtype) else 77
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    tvm.compile(mod, target=TARGET, tir_pipeline=PIPELINE)["main"](*tensors)
    return tensors[-1].numpy().astype("float64")


N = tirx.Var("n", "int64")
CASES = {
    "product": (lambda emit, a, b: op.matmul(a, b), (70, 50), (50, 33)),
    "transposed product, bias, gelu": (
        lambda emit, a, w, b: op.nn.gelu(emit(op.add(emit(op.matmul(a, emit(op.permute_dims(w)))), b))),
        (65, 130), (96, 130), (96,),
    ),
    "product, columns of zeros behind": (
        lambda emit, a, b: op.nn.pad(emit(op.matmul(a, b)), [0, 3, 0, 16]), (17, 32), (32, 48),
    ),
    "one row": (lambda emit, a, b: op.matmul(a, b), (1, 300), (300, 500)),
    "batched product": (lambda emit, a, b: op.matmul(a, b), (6, 40, 24), (6, 24, 41)),
    "convolution": (
        lambda emit, x, w, b: op.nn.relu(emit(op.add(emit(op.nn.conv2d(x, w, padding=1)), b))),
        (1, 16, 14, 14), (32, 16, 3, 3), (1, 32, 1, 1),
    ),
    "convolution by 2": (lambda emit, x, w: op.nn.conv2d(x, w, strides=2, padding=3), (1, 3, 40, 40), (16, 3, 7, 7)),
    "depthwise": (lambda emit, x, w: op.nn.conv2d(x, w, padding=1, groups=8), (1, 8, 30, 30), (8, 1, 3, 3)),
    "convolution in time": (lambda emit, x, w: op.nn.conv1d(x, w, padding=1), (1, 20, 100), (24, 20, 3)),
    "softmax": (lambda emit, x: op.nn.softmax(x), (64, 128)),
    "softmax of odd rows": (lambda emit, x: op.nn.softmax(x), (3, 50, 197)),
    "softmax over another axis": (lambda emit, x: op.nn.softmax(x, axis=1), (4, 60, 80)),
    "layer_norm": (lambda emit, x, g, b: op.nn.layer_norm(x, g, b, axes=[-1]), (90, 384), (384,), (384,)),
    "rms_norm": (lambda emit, x, g: op.nn.rms_norm(x, g, axes=[-1]), (64, 512), (512,)),
    "max_pool": (lambda emit, x: op.nn.max_pool2d(x, (3, 3), strides=(2, 2), padding=(1, 1)), (1, 8, 60, 60)),
    "mean of odd rows": (lambda emit, x: op.mean(x, axis=-1), (700, 333)),
    "mean over the first axis": (lambda emit, x: op.mean(x, axis=0), (333, 700)),
    "sum of all": (lambda emit, x: op.sum(x), (300, 700)),
    "sum of a few": (lambda emit, x: op.sum(x), (4,)),
    "softmax of one row": (lambda emit, x: op.nn.softmax(x), (4096,)),
    "transpose": (lambda emit, x: op.permute_dims(x, [0, 2, 1]), (3, 301, 200)),
    "heads": (lambda emit, x: op.permute_dims(emit(op.reshape(x, (1, 128, 12, 32))), [0, 2, 1, 3]), (128, 384)),
    "embedding": (lambda emit, w, ids: op.take(w, ids, axis=0), (50, 400), [600]),
    "concatenation": (lambda emit, a, b: op.concat([a, b], axis=-1), (600, 130), (600, 70)),
    "rotation": (
        lambda emit, x, c: op.add(
            emit(op.multiply(x, c)),
            emit(op.concat([emit(op.strided_slice(x, [1], [32], [64])), emit(op.strided_slice(x, [1], [0], [32]))], 1)),
        ),
        (2000, 64), (2000, 64),
    ),
    "where": (lambda emit, a, b: op.where(emit(op.less(a, b)), a, emit(op.tanh(b))), (300, 501), (300, 501)),
    "pad": (lambda emit, x: op.nn.pad(x, [0, 0, 3, 5]), (300, 501)),
    "cumsum": (lambda emit, x: op.cumsum(x, axis=1), (30, 50)),
    "argmax": (lambda emit, x: op.argmax(x, axis=-1), (300, 501)),
    "symbolic rows": (lambda emit, x, w: op.nn.silu(emit(op.matmul(x, w))), (N, 96), (96, 200)),
    "symbolic softmax": (lambda emit, x: op.nn.softmax(x), (4, N, N)),
    "symbolic norm": (lambda emit, x, g, b: op.nn.layer_norm(x, g, b, axes=[-1]), (2, N, 200), (200,), (200,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_function_without_a_schedule(name):
    build, *inputs = CASES[name]
    for func in kernels(build, *inputs).functions.values():
        want, got = results(func, False, {"n": 37}), results(func, True, {"n": 37})
        assert np.abs(got - want).max() <= 2e-5 * max(1, np.abs(want).max())


STEPS = 24
ENDS = {
    "nothing behind": (op.abs, np.abs),
    "a sum of rows": (lambda y: op.sum(y, -1), lambda y: y.sum(-1)),
    "a sum of columns": (lambda y: op.sum(y, 0), lambda y: y.sum(0)),
    "a product": (lambda y: op.matmul(y, op.permute_dims(y)), lambda y: y @ y.T),
}


def in_steps(end, emit, x):
    """What is read four times to make the next: in one expression, ``4**STEPS`` loads."""
    for _ in range(STEPS):
        cube = emit(op.multiply(emit(op.multiply(x, x)), x))
        x = emit(op.subtract(x, emit(op.multiply(cube, relax.const(2.0**-10)))))
    return ENDS[end][0](x)


@pytest.mark.parametrize("end", ENDS)
def test_steps_that_each_read_the_last_several_times(end):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((24, 40), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(in_steps(end, builder.emit, x))
        builder.emit_func_output(out)
    given = np.random.default_rng(0).standard_normal((24, 40)).astype("float32")
    want = given.astype("float64")
    for _ in range(STEPS):
        want = want - want**3 * 2.0**-10
    got = np.asarray(axe.compile(builder.get(), target=TARGET, work_dir=None)(given))
    np.testing.assert_allclose(got, ENDS[end][1](want), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("inlines", [inlined, lambda func: with_kernels(func, HOPPER) or func], ids=["alone", "joined"])
def test_steps_that_each_read_the_last_several_times_stay_apart_for_a_gpu(inlines):
    (func,) = kernels(partial(in_steps, "nothing behind"), (24, 40)).functions.values()
    assert 0 < len(loads_in(inlines(func).body)) < 100 * STEPS


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int8"])
def test_other_types(dtype):
    for func in kernels(lambda emit, a, b: op.matmul(a, b), (70, 50), (50, 33), dtype=dtype).functions.values():
        want, got = results(func, False, {}), results(func, True, {})
        assert np.abs(got - want).max() <= 2e-2 * max(1, np.abs(want).max())


@pytest.mark.parametrize(
    "name", ["transposed product, bias, gelu", "softmax of odd rows", "mean of odd rows", "embedding"]
)
def test_what_is_large_is_in_parallel_and_vectors(name):
    build, *inputs = CASES[name]
    text = with_default_schedules(kernels(build, *inputs), TARGET).script()
    assert "T.parallel" in text and "T.vectorized" in text


def test_what_is_small_is_left_to_one_core():
    text = with_default_schedules(kernels(lambda emit, x: op.nn.softmax(x), (4, 64)), TARGET).script()
    assert "T.parallel" not in text and "T.vectorized" in text


def test_what_somebody_scheduled_or_a_record_has_stays():
    mod = kernels(CASES["softmax"][0], (64, 128))
    (variable,) = mod.get_global_vars()
    sch = s_tir.Schedule(mod)
    sch.work_on(str(variable.name_hint))
    first = sch.get_child_blocks(sch.get_sblock("root"))[0]
    sch.split(sch.get_loops(first)[0], [None, 4])
    for untouched, tuned in ((sch.mod, ()), (mod, (str(variable.name_hint),))):
        assert with_default_schedules(untouched, TARGET, tuned) is untouched


@T.prim_func(s_tir=True)
def calls(x: T.Buffer((8,), "float32"), y: T.Buffer((8,), "float32")):
    with T.sblock("outer"):
        T.reads(x[0:8])
        T.writes(y[0:8])
        T.evaluate(T.call_packed("somewhere.else", x.data, y.data))


def test_calls_are_left_as_they_are():
    done = with_default_schedules(tvm.IRModule({"main": calls}), TARGET)
    tvm.ir.assert_structural_equal(done["main"], calls)


def test_symbolic_extents_on_a_gpu_have_threads():
    build, *inputs = CASES["symbolic norm"]
    done = with_default_schedules(kernels(build, *inputs), resolve_target("cuda:sm_90a"))
    assert all(map(has_threads, done.functions.values()))


@pytest.mark.parametrize("ids", ["int32", "int64"])
def test_rows_taken_by_loaded_indices_with_a_last_vector_that_is_not_whole(ids):
    """Upstream's partitioning of loops fails where an index is loaded; importers bring loops of 64 bits."""
    builder = relax.BlockBuilder()
    table = relax.Var("table", relax.TensorType((48, 22), "float32"))
    rows = relax.Var("rows", relax.TensorType((16,), ids))
    with builder.function("main", [table, rows]):
        builder.emit_func_output(builder.emit(relax.op.take(table, rows, axis=0)))
    exe = axe.compile(builder.get(), work_dir=None)
    rng = np.random.default_rng(0)
    values, at = rng.standard_normal((48, 22), dtype="float32"), rng.integers(0, 48, 16).astype(ids)
    np.testing.assert_array_equal(exe(values, at), values[at])


@T.prim_func(s_tir=True)
def placed(x: T.Buffer((3, T.int64(28)), "float32"), at: T.int64, y: T.Buffer((2, 3, 28), "float32")):
    for i, j in T.grid(T.int64(3), T.int64(28)):
        with T.sblock("y"):
            vi, vj = T.axis.remap("SS", [i, j])
            T.reads(x[vi, vj])
            T.writes(y[at, vi, vj])
            y[at, vi, vj] = x[vi, vj]


def test_rows_stored_at_a_given_index_with_a_last_vector_that_is_not_whole():
    """The same where a store's index is given, as a device's coordinate is."""
    done = with_default_schedules(tvm.IRModule({"main": placed}), TARGET)
    x, y = np.random.default_rng(0).standard_normal((3, 28), dtype="float32"), np.zeros((2, 3, 28), "float32")
    out = tvm.runtime.tensor(y)
    tvm.compile(done, target=TARGET, tir_pipeline=PIPELINE)["main"](tvm.runtime.tensor(x), 1, out)
    np.testing.assert_array_equal(out.numpy(), np.stack([y[0], x]))


@pytest.mark.parametrize("name", ["full", "pad", "relu", "where", "sum"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_constants_of_types_that_are_stored_as_integers(name, dtype):
    """Upstream leaves a vector of one constant as it is where it stores the bits of its type."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((6, 40), dtype))
    zero = relax.const(0, dtype)
    with builder.function("main", [x]):
        made = {
            "full": lambda: relax.op.add(relax.op.full((6, 40), zero, dtype), relax.op.zeros((6, 40), dtype)),
            "pad": lambda: relax.op.nn.pad(x, [1, 1, 2, 6]),
            "relu": lambda: relax.op.nn.relu(x),
            "where": lambda: relax.op.where(relax.op.less(x, zero), relax.op.zeros((6, 40), dtype), x),
            "sum": lambda: relax.op.sum(x, axis=0),
        }[name]()
        builder.emit_func_output(builder.emit(made))
    given = np.random.default_rng(0).integers(-4, 5, (6, 40)).astype("float32")
    wanted = {
        "full": np.zeros_like(given),
        "pad": np.pad(given, [(1, 1), (2, 6)]),
        "relu": np.maximum(given, 0),
        "where": np.maximum(given, 0),
        "sum": given.sum(0),
    }[name]
    got = np.asarray(axe.compile(builder.get(), work_dir=None)(given.astype(dtype)))
    np.testing.assert_array_equal(got.astype("float32"), wanted)


@T.prim_func(s_tir=True)
def _matvec(x: T.Buffer((1, 512), "float32"), w: T.Buffer((40, 512), "float32"), r: T.Buffer((1, 40), "float32"),
            y: T.Buffer((1, 40), "float32")):  # fmt: skip
    c = T.sblock_alloc_buffer((1, 40), "float32")
    for i, j, k in T.grid(1, 40, 512):
        with T.sblock("product"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                c[vi, vj] = T.float32(0)
            c[vi, vj] += x[vi, vk] * w[vj, vk]
    for i, j in T.grid(1, 40):
        with T.sblock("gate"):
            vi, vj = T.axis.remap("SS", [i, j])
            y[vi, vj] = r[vi, vj] / (T.float32(1) + T.exp(c[vi, vj]))


def test_one_row_reads_weights_as_they_lie():
    """Packing W in every call would read it once more than the product does."""
    mod = with_default_schedules(tvm.IRModule({"main": _matvec}), TARGET)
    buffers: list[tirx.Buffer] = []
    tvm_ffi.structural_walk(mod["main"].body, (s_tir.SBlock, lambda block: buffers.extend(block.alloc_buffers)))
    assert all(np.prod([int(n) for n in buffer.shape]) < 40 * 512 for buffer in buffers)
    want = results(_matvec, scheduled=False, sizes={})
    assert np.abs(results(_matvec, scheduled=True, sizes={}) - want).max() / np.abs(want).max() < 1e-5


@pytest.mark.parametrize(("width", "panels"), [(512, 32), (128, 8)])
def test_weights_are_packed_alike_for_one_row_and_for_many(width, panels):
    """So that what reads a prompt and what reads a token have them once; and no panel is mostly padding."""
    found = set()
    for rows in (1, 64):
        builder = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorType((rows, 96), "float32"))
        weights = relax.const(np.random.default_rng(0).standard_normal((96, width), "float32"))
        with builder.function("main", [x]):
            with builder.dataflow():
                out = builder.emit_output(op.matmul(x, weights))
            builder.emit_func_output(out)
        target = {"kind": "llvm", "mcpu": "x86-64-v4", "num-cores": 1}
        functions = axe.compile(builder.get(), target=target, work_dir=None).runnable.functions_items()
        (func,) = [f for v, f in functions if isinstance(f, tirx.PrimFunc) and "prepacked" in v.name_hint]
        found.add(tuple(int(n) for n in func.params[1].ty.shape))
    assert found == {(panels, 96, 16)}


@T.prim_func(s_tir=True)
def any_of_rows(x: T.Buffer((4, 4, 16), "float64"), y: T.Buffer((4,), "bool")):
    for i, j, k in T.grid(4, 4, 16):
        with T.sblock("any"):
            vi, vj, vk = T.axis.remap("SRR", [i, j, k])
            with T.init():
                y[vi] = T.bool(False)
            y[vi] = y[vi] or x[vi, vj, vk] > T.float64(0)


@T.prim_func(s_tir=True)
def any_of_planes(x: T.Buffer((4, 4, 16), "bool"), y: T.Buffer((4,), "bool")):
    for i, j, k in T.grid(4, 4, 16):
        with T.sblock("any"):
            vi, vj, vk = T.axis.remap("SRR", [i, j, k])
            with T.init():
                y[vi] = T.bool(False)
            y[vi] = y[vi] or x[vj, vi, vk]


@pytest.mark.parametrize("func", [any_of_rows, any_of_planes])
def test_truth_values_are_reduced(func: tirx.PrimFunc) -> None:
    """By elements: upstream's rfactor, which makes partial results, knows no beginning of a truth value."""
    given = np.random.default_rng(0).standard_normal((4, 4, 16)) - 2.5
    if func is any_of_planes:
        given = given > 0
    found = axe.compile(func, work_dir=None).run(given)
    axes = (1, 2) if func is any_of_rows else (0, 2)
    np.testing.assert_array_equal(found, (given > 0).any(axis=axes))


def test_blocks_that_do_not_say_what_they_touch_find_it_where_it_was() -> None:
    """As of ``te.extern``: one clears elements of what a cheap block made, as the suppression of boxes does."""

    @T.prim_func(s_tir=True)
    def suppressed(A: T.Buffer((32,), "float32"), C: T.Buffer((32,), "float32")):  # type: ignore[no-untyped-def]
        scores = T.sblock_alloc_buffer((32,))
        for i in range(32):
            with T.sblock("scores"):
                v = T.axis.spatial(32, i)
                scores[v] = A[31 - v]
        with T.sblock("clear"):
            T.reads()
            T.writes()
            for i in range(31):
                if scores[i] > T.float32(0):
                    scores[i + 1] = T.float32(-1)
        for i in range(32):
            with T.sblock("out"):
                v = T.axis.spatial(32, i)
                C[v] = scores[v] * T.float32(2)

    np.testing.assert_array_equal(results(suppressed, True, {}), results(suppressed, False, {}))
