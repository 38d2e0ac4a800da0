"""What threads do of several neighbouring elements, run on a CPU, and what CUDA source is made of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi
from threaded import GPU, bound, computed, launches, loops_of, one_by_one, source
from tvm import ir, te, tirx
from tvm.script import tirx as T
from tvm.sym import Analyzer

import tvm_axe as axe
from tvm_axe import _tvm
from tvm_axe.analysis.expressions import substitute
from tvm_axe.layout import Mesh
from tvm_axe.machines import backend_of, lanes
from tvm_axe.machines.threads import with_threads
from tvm_axe.programs.moe_ragged import Extents, moe_ragged

VECTORIZED = tirx.ForKind.VECTORIZED


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads have several elements however few there are."""
    monkeypatch.setattr(lanes, "_ENOUGH", 1)


def widths(func: tirx.PrimFunc) -> list[int]:
    """How many elements the copies of a bound function move at once."""
    return sorted(int(loop.extent) for loop in loops_of(func.body, VECTORIZED))


def check_aligned(func: tirx.PrimFunc, rng: np.random.Generator) -> None:
    """Check for some threads, and whatever a table says, that vectors begin at multiples of their length."""
    outer: list[tirx.For] = []
    tvm_ffi.structural_walk(func.body, (tirx.For, lambda loop: outer.append(loop)))
    analyzer = Analyzer()

    def on_load(load: ir.TensorLoad) -> tirx.Expr:
        return tirx.const(int(rng.integers(0, 5)), str(load.source.dtype))

    for loop in outer:
        if loop.kind != VECTORIZED:
            continue
        value = loop.body.value
        assert isinstance(value, ir.TensorLoad)  # a copy and nothing else
        for buffer, indices in ((loop.body.buffer, loop.body.indices), (value.source, value.indices)):
            for _ in range(4):
                numbers: dict[tirx.Var, tirx.Expr] = {
                    each.loop_var: tirx.const(int(rng.integers(0, int(each.extent))), str(each.loop_var.ty))
                    for each in outer
                    if not each.same_as(loop)
                }
                numbers[loop.loop_var] = tirx.const(0, str(loop.loop_var.ty))
                at = 0
                strides = [int(step) for step in buffer.strides] or [
                    math.prod(int(extent) for extent in buffer.shape[dim + 1 :]) for dim in range(len(buffer.shape))
                ]
                for index, stride in zip(indices, strides):
                    plain = _tvm.structural_map(substitute(index, numbers), (ir.TensorLoad, on_load))
                    at += int(analyzer.simplify(plain)) * stride
                assert at % int(loop.extent) == 0, loop


# Not floats of 8 bits: on a CPU upstream takes those that are inside of a function for something else.
TYPES = ("int8", "uint8", "float16", "bfloat16", "int32", "float32", "float64", "bool", "int64")
ROWS = (1, 3, 16)
COLUMNS = (1, 7, 10, 12, 24, 48, 64)


@dataclass
class Case:
    """A function, its arrays with the result poisoned, and the result in float64."""

    func: tirx.PrimFunc
    arrays: list[np.ndarray]
    expected: np.ndarray


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Numbers that all types have, and of which no sum here is rounded."""
    low = 0 if dtype in ("uint8", "bool") else -2
    return rng.integers(low, 2 if dtype == "bool" else 3, shape).astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))


def made(rng: np.random.Generator) -> Case:
    """A function of a random sum of operands, of which some are looked up, shifted, turned or under a condition."""
    i, j, k = (int(rng.choice(sizes)) for sizes in (ROWS, COLUMNS, (1, 2, 5)))
    reduced = bool(rng.integers(0, 2))
    result = str(rng.choice(["int32", "float32", "bfloat16", "float16", "float64", "int8"]))
    inputs: list[te.Tensor] = []
    arrays: list[np.ndarray] = []
    index = str(rng.choice(["int32", "int64"]))

    def take(shape: tuple[int, ...], dtype: str | None = None, below: int | None = None) -> tuple:
        kind = dtype or str(rng.choice(TYPES))
        array = numbers(rng, shape, kind) if below is None else rng.integers(-2, below + 2, shape).astype(kind)
        inputs.append(te.placeholder([tirx.IntImm(index, extent) for extent in shape], kind, name=f"t{len(inputs)}"))
        arrays.append(array)
        return inputs[-1], array.astype("float64") if below is None else array

    def clipped(value: tirx.Expr, extent: int) -> tirx.Expr:
        return tirx.max(tirx.min(value, tirx.const(extent - 1, str(value.ty))), tirx.const(0, str(value.ty)))

    zero = tirx.const(0, result)
    terms: list[tuple[Callable, Callable]] = []
    for kind in rng.choice(10, int(rng.integers(1, 4))):
        if kind == 0:  # an element
            a, x = take((k, i, j))
            terms.append((lambda r, c, n, a=a: a(n, r, c), lambda r, c, n, x=x: x[n, r, c]))
        elif kind == 1:  # of a row of its own
            a, x = take((j,))
            terms.append((lambda r, c, n, a=a: a(c), lambda r, c, n, x=x: x[c]))
        elif kind == 2:  # one for all lanes
            a, x = take((k, i))
            terms.append((lambda r, c, n, a=a: a(n, r), lambda r, c, n, x=x: x[n, r]))
        elif kind == 3:  # turned
            a, x = take((j, i))
            terms.append((lambda r, c, n, a=a: a(c, r), lambda r, c, n, x=x: x[c, r]))
        elif kind == 4:  # shifted, by what may be a multiple and may not
            by = int(rng.choice([1, 2, 4, 8, 16]))
            a, x = take((i, j + by))
            terms.append((lambda r, c, n, a=a, by=by: a(r, c + by), lambda r, c, n, x=x, by=by: x[r, c + by]))
        elif kind == 5:  # a row that is looked up, if there is one
            at, t = take((i,), "int32", i)
            a, x = take((i, j))
            terms.append(
                (
                    lambda r, c, n, a=a, at=at: tirx.if_then_else(
                        tirx.And(at(r) >= 0, at(r) < i), a(at(r), c).astype(result), zero
                    ),
                    lambda r, c, n, x=x, t=t: x[t[r], c] if 0 <= t[r] < i else 0,
                )
            )
        elif kind == 6:  # elements that are looked up
            at, t = take((j,), "int32", j)
            a, x = take((i, j))
            terms.append(
                (
                    lambda r, c, n, a=a, at=at: a(r, clipped(at(c), j)),
                    lambda r, c, n, x=x, t=t: x[r, min(max(t[c], 0), j - 1)],
                )
            )
        elif kind == 7:  # under a condition that is not the same for all lanes
            half = j // 2
            a, x = take((i, j - half))
            terms.append(
                (
                    lambda r, c, n, a=a, half=half: tirx.if_then_else(c >= half, a(r, c - half).astype(result), zero),
                    lambda r, c, n, x=x, half=half: x[r, c - half] if c >= half else 0,
                )
            )
        elif kind == 8:  # part of a longer row
            a, x = take((i, 3 * j))
            terms.append((lambda r, c, n, a=a: a(r, c + j), lambda r, c, n, x=x: x[r, c + j]))
        else:  # every other one
            a, x = take((i, 2 * j))
            terms.append((lambda r, c, n, a=a: a(r, c * 2), lambda r, c, n, x=x: x[r, c * 2]))

    def value(r: tirx.Expr, c: tirx.Expr, n: tirx.Expr) -> tirx.Expr:
        return sum((term(r, c, n).astype(result) for term, _ in terms[1:]), terms[0][0](r, c, n).astype(result))

    over = te.reduce_axis((tirx.IntImm(index, 0), tirx.IntImm(index, k)), "n")
    shape = [tirx.IntImm(index, i), tirx.IntImm(index, j)]
    combined = te.max if rng.integers(0, 2) else te.sum
    compute = (
        (lambda r, c: combined(value(r, c, over), axis=over))
        if reduced
        else (lambda r, c: value(r, c, tirx.IntImm(index, 0)))
    )
    output = te.compute(shape, compute, name="out")
    func = te.create_prim_func([*inputs, output], index_dtype_override="int64" if index == "int64" else None)
    expected = np.zeros((i, j))
    for r, c in np.ndindex(i, j):
        sums = [sum(term(r, c, n) for _, term in terms) for n in range(k)]
        expected[r, c] = (max(sums) if combined is te.max else sum(sums)) if reduced else sums[0]
    poisoned = np.full((i, j), 77, np.dtype(getattr(ml_dtypes, result, result)))
    return Case(func, [*arrays, poisoned], expected)


@pytest.mark.parametrize("_turn", range(12))
def test_random_functions(few: None, _turn: int) -> None:
    rng = np.random.default_rng()
    for _ in range(6):
        case = made(rng)
        func = bound(case.func)
        check_aligned(func, rng)
        found = computed(func, case.arrays)
        np.testing.assert_array_equal(found[-1].astype("float64"), case.expected, err_msg=case.func.script())
        for before, after in zip(case.arrays[:-1], found[:-1]):
            np.testing.assert_array_equal(before, after)


def relu(shape: tuple[int, ...], dtype: str, result: str | None = None) -> tirx.PrimFunc:
    a = te.placeholder(shape, dtype, name="A")
    kind = result or dtype
    return te.create_prim_func(
        [a, te.compute(shape, lambda *at: tirx.max(a[at], tirx.const(0, dtype)).astype(kind), name="B")]
    )


@pytest.mark.parametrize(
    ("dtype", "result", "columns", "expected"),
    [
        ("bfloat16", "bfloat16", 64, [8, 8]),
        ("bfloat16", "float32", 64, [4, 4, 8]),
        ("float32", "bfloat16", 64, [4, 4, 8]),
        ("float32", "float32", 64, [4, 4]),
        ("float64", "float64", 64, [2, 2]),
        ("int8", "int8", 64, [16, 16]),
        ("int8", "float64", 64, [2, 2, 4]),
        ("float8_e4m3fn", "float8_e4m3fn", 24, [8, 8]),
        ("bfloat16", "bfloat16", 12, [4, 4]),
        ("bfloat16", "bfloat16", 10, [2, 2]),
        ("bfloat16", "bfloat16", 7, []),
        ("float32", "bool", 64, []),
    ],
)
def test_how_many_elements_a_thread_has(few: None, dtype: str, result: str, columns: int, expected: list[int]) -> None:
    assert widths(bound(relu((32, columns), dtype, result))) == expected


@pytest.mark.parametrize(("shift", "expected"), [(16, [8, 8, 8]), (4, [4, 4, 4]), (6, [2, 2, 2]), (1, [8, 8])])
def test_as_many_as_make_all_operands_vectors(few: None, shift: int, expected: list[int]) -> None:
    """Of what is no vector at any width, elements are loaded one by one."""
    a, b = te.placeholder((6, 96), "bfloat16", name="A"), te.placeholder((64,), "bfloat16", name="B")
    added = te.compute((6, 64), lambda i, j: a(i, j + shift) + b(j), name="C")
    assert widths(bound(te.create_prim_func([a, b, added]))) == expected


def test_a_gpu_must_be_filled() -> None:
    assert launches(bound(relu((4096, 128), "bfloat16"))) == [(256, 256)]  # 8 a thread
    assert launches(bound(relu((4096, 64), "bfloat16"))) == [(256, 256)]  # 4
    assert launches(bound(relu((1024, 32), "bfloat16"))) == [(128, 256)]  # 1


def test_a_dimension_of_one_may_stand_behind(few: None) -> None:
    assert widths(bound(relu((4, 64, 1), "bfloat16"))) == [8, 8]


@pytest.mark.parametrize("index", ["int32", "int64"])
def test_a_relu_loads_and_stores_16_bytes(index: str) -> None:
    number = getattr(T, index)

    @T.prim_func(s_tir=True)
    def func(
        A: T.Buffer((number(32768), number(768)), "bfloat16"), B: T.Buffer((number(32768), number(768)), "bfloat16")
    ):
        for i, j in T.grid(number(32768), number(768)):
            with T.sblock("relu"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = T.max(A[vi, vj], T.bfloat16(0))

    code = source(func)
    assert code.count("= *(uint4*)(A_ptr") == 1 and code.count("*(uint4*)(B_ptr") == 1
    assert "A_ptr[" not in code and "B_ptr[" not in code


def column(tensor: te.Tensor, over: tirx.IterVar) -> Callable[[tirx.Var], tirx.Expr]:
    return lambda j: te.sum(tensor[over, j], axis=over)


@pytest.mark.parametrize(
    ("dtype", "result"),
    [("float8_e4m3fn", "float16"), ("float16", "float8_e5m2"), ("int8", "float32"), ("float64", "float32")],
)
def test_vectors_of_all_types_compile(dtype: str, result: str) -> None:
    a = te.placeholder((4096, 2048), dtype, name="A")
    two = tirx.const(2, "float32")
    code = source(
        te.create_prim_func(
            [a, te.compute(a.shape, lambda *at: (a[at].astype("float32") * two).astype(result), name="B")]
        )
    )
    assert "A_ptr[" not in code and "B_ptr[" not in code


def test_sums_are_in_registers() -> None:
    """Whether or not what is stored is of vectors; one store behind the loop."""
    for columns in (30000, 30001):
        tensor = te.placeholder((5, columns), "float32", name="A")
        over = te.reduce_axis((0, 5), "n")
        total = te.compute((columns,), column(tensor, over), name="total")
        code = source(te.create_prim_func([tensor, total]))
        assert code.count("total_ptr[") == 1 and "total_own_ptr[0] = (total_own_ptr[0] +" in code
        assert code.index("for (") < code.index("total_ptr[")


def test_what_is_added_to_in_place_is_left() -> None:
    """Without a start it goes on from what is there; what it reads of others' it may have to read from memory."""

    @T.prim_func(s_tir=True)
    def onwards(A: T.Buffer((4, 64), "float32"), C: T.Buffer((64,), "float32")):
        for j, k in T.grid(64, 4):
            with T.sblock("sum"):
                vj, vk = T.axis.remap("SR", [j, k])
                C[vj] = C[vj] + A[vk, vj]

    @T.prim_func(s_tir=True)
    def others(A: T.Buffer((4, 64), "float32"), C: T.Buffer((65,), "float32")):
        for j, k in T.grid(64, 4):
            with T.sblock("sum"):
                vj, vk = T.axis.remap("SR", [j, k])
                with T.init():
                    C[vj] = T.float32(0)
                C[vj] = C[vj] + A[vk, vj] * C[64]

    rng = np.random.default_rng()
    a, c = rng.integers(-4, 4, (4, 64)).astype("float32"), np.full(65, 3, "float32")
    np.testing.assert_array_equal(computed(bound(onwards), [a, c[:64]])[-1], 3 + a.sum(0))
    np.testing.assert_array_equal(computed(bound(others), [a, c])[-1], [*(3 * a.sum(0)), 3])
    assert all("local" not in bound(func).script() for func in (onwards, others))


def test_an_update_in_place_is_of_its_own_elements(few: None) -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((32,), "float32"), C: T.Buffer((6, 32), "float32")):
        for i, j in T.grid(6, 32):
            with T.sblock("add"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = C[vi, vj] * A[vj]

    rng = np.random.default_rng()
    a, c = rng.standard_normal(32).astype("float32"), rng.standard_normal((6, 32)).astype("float32")
    assert widths(bound(func)) == [4, 4, 4]
    np.testing.assert_array_equal(computed(bound(func), [a, c])[-1], a * c)


@pytest.mark.parametrize("strides", [(40, 1), (42, 1), (64, 2)])
def test_rows_may_lie_apart(few: None, strides: tuple[int, int]) -> None:
    """By a multiple of a vector's elements; of others it is as many as that is a multiple of, or none."""
    a = _tvm.strided_buffer((6, 32), "float32", "A", strides)

    @T.prim_func(s_tir=True)
    def dense(A: T.Buffer((6, 32), "float32"), B: T.Buffer((6, 32), "float32")):
        for i, j in T.grid(6, 32):
            with T.sblock("copy"):
                vi, vj = T.axis.remap("SS", [i, j])
                B[vi, vj] = A[vi, vj] + T.float32(1)

    func = tirx.PrimFunc([a, dense.params[1]], substitute(dense.body, {dense.params[0]: a})).with_attrs(
        dict(dense.attrs.items())
    )
    assert widths(bound(func)) == {(40, 1): [4, 4], (42, 1): [2, 2], (64, 2): []}[strides]


def test_a_load_is_copied_under_its_condition(few: None) -> None:
    """One that is the same for all lanes; what may not be loaded isn't, as no such row exists."""

    @T.prim_func(s_tir=True)
    def func(
        X: T.Buffer((4, 32), "float16"),
        row: T.Buffer((6,), "int32"),
        scale: T.Buffer((6,), "float16"),
        Y: T.Buffer((6, 32), "float32"),
    ):
        for i, j in T.grid(6, 32):
            with T.sblock("take"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = T.Cast(
                    "float32",
                    T.if_then_else(row[vi] >= 0 and row[vi] < 4, X[row[vi], vj] * scale[vi], T.float16(1)),
                )

    assert widths(bound(func)) == [4, 4, 8]
    rng = np.random.default_rng()
    x, scale = rng.standard_normal((4, 32)).astype("float16"), rng.standard_normal(6).astype("float16")
    row = np.array([3, -1, 1 << 28, 0, -(1 << 28), 2], "int32")
    expected = np.ones((6, 32), "float32")
    for i in (0, 3, 5):
        expected[i] = x[row[i]] * scale[i]
    found = computed(bound(func), [x, row, scale, np.full((6, 32), np.nan, "float32")])[-1]
    np.testing.assert_array_equal(found, expected)
    code = source(func)
    assert code.index("if (") < code.index("*(uint4*)(X_ptr")


@pytest.mark.parametrize(("half", "expected"), [(32, [8, 8, 8, 8]), (36, [4, 4, 4, 4]), (33, [])])
def test_where_one_half_ends_at_a_vector_lanes_have_one_condition(few: None, half: int, expected: list[int]) -> None:
    """As of what is put together of two, or turned by angles."""
    a = te.placeholder((6, 2 * half), "bfloat16", name="A")
    b = te.placeholder((2 * half,), "bfloat16", name="B")

    def turned(i: tirx.Var, j: tirx.Var) -> tirx.Expr:
        zero = tirx.const(0, "bfloat16")
        return b(j) * tirx.if_then_else(j >= half, a(i, j - half), zero - a(i, j + half))

    func = te.create_prim_func([a, b, te.compute((6, 2 * half), turned, name="C")])
    assert widths(bound(func)) == expected
    rng = np.random.default_rng()
    x, scale = (rng.integers(-3, 3, shape).astype(ml_dtypes.bfloat16) for shape in ((6, 2 * half), (2 * half,)))
    check_aligned(bound(func), rng)
    found = computed(bound(func), [x, scale, np.full_like(x, np.nan)])[-1]
    np.testing.assert_array_equal(found, scale * np.concatenate([-x[:, half:], x[:, :half]], axis=1))


@pytest.mark.parametrize(
    ("condition", "copied"),
    [
        (lambda j: j < 32, True),
        (lambda j: j >= 32, True),
        (lambda j: j <= 31, True),
        (lambda j: tirx.Not(tirx.And(j > 7, tirx.GT(tirx.const(56, "int32"), j))), True),
        (lambda j: tirx.EQ(j // 8, 3), True),
        (lambda j: j < 31, False),
        (lambda j: j <= 32, False),
        (lambda j: j > 32, False),
        (lambda j: tirx.Or(j < 8, j > 60), False),
        (lambda j: tirx.EQ(j % 2, 1), False),
    ],
)
def test_a_condition_of_the_lane_leaves_the_load_as_it_is(
    few: None, condition: Callable[[tirx.Var], tirx.Expr], copied: bool
) -> None:
    a, b = te.placeholder((6, 64), "float16", name="A"), te.placeholder((64,), "float16", name="B")
    zero = tirx.const(0, "float16")
    chosen = te.compute((6, 64), lambda i, j: b(j) + tirx.if_then_else(condition(j), a(i, j), zero), name="C")
    func = te.create_prim_func([a, b, chosen])
    assert widths(bound(func)) == [8] * (2 + copied)
    rng = np.random.default_rng()
    x, y = rng.integers(-3, 3, (6, 64)).astype("float16"), rng.integers(-3, 3, 64).astype("float16")
    holds = np.array([bool(Analyzer().simplify(condition(tirx.const(j, "int32")))) for j in range(64)])
    found = computed(bound(func), [x, y, np.full_like(x, np.nan)])[-1]
    np.testing.assert_array_equal(found, y + np.where(holds, x, 0))


def test_a_mask_of_the_lanes_leaves_threads_one_element(few: None) -> None:
    @T.prim_func(s_tir=True)
    def func(A: T.Buffer((32,), "float32"), C: T.Buffer((32,), "float32")):
        for j in T.serial(32):
            with T.sblock("copy"):
                vj = T.axis.spatial(32, j)
                T.where(j < 30)
                C[vj] = A[vj]

    assert widths(bound(func)) == []
    a, c = np.random.default_rng().standard_normal(32).astype("float32"), np.zeros(32, "float32")
    np.testing.assert_array_equal(computed(bound(func), [a, c])[-1], [*a[:30], 0, 0])


def test_a_tensor_that_is_not_aligned_is_refused() -> None:
    """When the function is called, on the host, before a kernel is launched: here are neither a GPU nor its memory."""
    func = relu((4096, 1024), "float16").with_attr("global_symbol", "main")
    built = backend_of(GPU).build(tvm.IRModule({"main": func}), GPU).module
    room = np.zeros(4096 * 1024 * 2 + 64, "uint8")
    begin = room.ctypes.data + -room.ctypes.data % 64

    def tensor(offset: int) -> tvm_ffi.Tensor:
        kind = np.dtype("float16")
        return _tvm.device_tensor(begin + offset, (4096, 1024), (2048, 2), kind, tvm.device("cuda", 0))

    with pytest.raises(ValueError, match=r"Misaligned A [\s\S]* an address that is a multiple of 16 bytes; copy it"):
        built["main"](tensor(2), tensor(0))
    with pytest.raises(ValueError, match="Misaligned B"):
        built["main"](tensor(0), tensor(8))


def test_a_gather_from_peers_is_a_copy_of_rows() -> None:
    """Of the program of ragged experts: 16 bytes at once, and no loop over devices."""
    program = moe_ragged(Mesh({"ep": 4}), Extents(512, 512, 512, 2, 2), "bfloat16")
    exe = axe.compile(program.schedule("A2A-MM-A2A"), target=GPU, work_dir=None)
    functions = {str(var.name_hint): func for var, func in exe.runnable.functions_items()}
    dispatch, combine = source(functions["dispatch"]), source(functions["combine"])
    assert "for (" not in dispatch and dispatch.count("*(uint4*)(D_ptr") == 1
    assert "X_ep_ptr[" not in dispatch and dispatch.count("= *(uint4*)(X_ep_ptr") == 1
    assert combine.count("for (") == 1 and "k < 2" in combine  # of a token's choices, and not of devices
    assert "O_ep_ptr[" not in combine and "Y_ptr[" not in combine and combine.count("*(float4*)(Y_ptr") >= 1


@pytest.mark.parametrize("schedule", ["AG-MM-AG", "A2A-MM-A2A", "A2A-fuse(MM-C)-MM-A2A"])
def test_ragged_experts_in_bfloat16(few: None, launched, schedule: str) -> None:
    mesh = Mesh({"ep": 2})
    program = moe_ragged(mesh, Extents(12, 32, 24, 3, 2), "bfloat16")
    exe = axe.compile(program.schedule(schedule), work_dir=None)
    threaded = with_threads(exe.runnable)
    found = {str(var.name_hint): func for var, func in threaded.functions_items() if isinstance(func, tirx.PrimFunc)}
    assert widths(found["dispatch"]) == [8, 8] and max(widths(found["combine"])) == 8
    exe.runnable = one_by_one(threaded)
    arrays = program.inputs(np.random.default_rng())
    exe.fill(launched(mesh), lambda buffer: np.nan if "float" in buffer.dtype else None)
    outputs = exe.run(launched(mesh), *arrays)
    assert program.error((outputs,), program.reference(*arrays)) <= program.tolerance
