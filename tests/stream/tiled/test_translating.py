"""Translated programs compute what tile programs do."""

import by_hand
import numpy as np
import pytest
from interpreter import TooLarge, interpret
from judging import drawn, wanted
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.stream import Accelerator, StreamError, from_tile
from tvm_axe.tile.kernels.attention import ATTENTION
from tvm_axe.tile.kernels.gemm import BATCHED_MATMUL, FP8_MATMUL, MATMUL
from tvm_axe.tile.kernels.grouped import GROUPED_MATMUL
from tvm_axe.tile.kernels.registry import KERNELS
from tvm_axe.tile.kernels.rows import LAYER_NORM, RMS_NORM, SOFTMAX
from tvm_axe.tile.kernels.transpose import TRANSPOSE

SQUARES, CUBES = {"block_m": 32, "block_n": 32}, {"block_m": 32, "block_n": 32, "block_k": 32}
BLOCKED = [
    *((kernel, CUBES) for kernel in (MATMUL, BATCHED_MATMUL, FP8_MATMUL)),
    *((kernel, {"block_rows": 4}) for kernel in (RMS_NORM, LAYER_NORM, SOFTMAX)),
    *((kernel, SQUARES) for kernel in (ATTENTION, TRANSPOSE)),
]
CASES = [(kernel, blocks, case) for kernel, blocks in BLOCKED for case in kernel.cases]


@pytest.mark.parametrize(("kernel", "blocks", "case"), CASES, ids=lambda each: getattr(each, "name", ""))
def test_kernels_equal_their_references(kernel, blocks, case):
    """Of every size and type that kernels are checked on, uneven ones too, within the slack of each."""
    recipe = kernel.make(**case, **blocks)
    arrays = kernel.inputs(np.random.default_rng(1), case)
    # A fragment begins with a sink's score, which is no tile of a stream.
    streams = from_tile(recipe.programs[0], Accelerator(), {name: arrays[name] for name in arrays if name == "S"})
    report = streams.run({name: arrays[name] for name in streams.loaded})
    for name, expected in kernel.reference(case, arrays).items():
        off = np.abs(report.tensors[name].astype("float64") - expected.value)
        assert (off <= expected.slack).all(), name
    without = streams.run(values=False)
    assert (without.cycles, without.traffic, without.flops) == (report.cycles, report.traffic, report.flops)


def check(func, *arrays, given=None, atol=1e-4):
    """Compare a program's streams with the interpreter of tile programs; return the streams."""
    program = tile.read(func)
    streams = from_tile(program, Accelerator(), given)
    names = [param.name for param in program.params]
    report = streams.run({name: array for name, array in zip(names, arrays) if name in streams.loaded})
    numbers = [(given or {})[str(var.name)] for var in program.scalars]
    expected = dict(zip(names, interpret(program, *arrays, *numbers)))
    assert report.tensors
    for name, found in report.tensors.items():
        np.testing.assert_allclose(found.astype("float64"), expected[name], rtol=1e-4, atol=atol)
    assert streams.run(values=False).cycles == report.cycles > 0
    return streams


def floats(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype("float32")


def kinds(streams):
    return [node.kind for node in streams.streams.nodes]


def test_loops_that_hand_on_through_each_other():
    @T.prim_func
    def sums(X: T.Buffer((8, 6, 16), "float32"), Y: T.Buffer((8, 16), "float32")):
        with tile.kernel(4) as i:
            x = tile.fragment((2, 16), "float32")
            y = tile.fragment((2, 16), "float32")
            tile.fill(y, 1)
            for a in range(2):
                for b in range(3):
                    tile.copy(X[i * 2 : i * 2 + 2, a * 3 + b, 0:16], x)
                    with tile.parallel(2, 16) as (r, c):
                        y[r, c] = y[r, c] + x[r, c]
            tile.copy(y, Y[i * 2, 0])

    streams = check(sums, floats(8, 6, 16), floats(8, 16))
    assert kinds(streams) == ["LinearOffChipLoad", "Accum", "LinearOffChipStore"]


def test_a_loop_begins_with_what_the_one_around_it_has_loaded():
    @T.prim_func
    def resumed(X: T.Buffer((6, 16), "float32"), Z: T.Buffer((3, 16), "float32"), Y: T.Buffer((1, 16), "float32")):
        with tile.kernel(1) as i:
            x = tile.fragment((1, 16), "float32")
            t = tile.fragment((1, 16), "float32")
            y = tile.fragment((1, 16), "float32")
            tile.fill(t, 1)
            tile.fill(y, 0)
            for a in range(3):
                for b in range(2):
                    tile.copy(X[a * 2 + b, 0], x)
                    with tile.parallel(1, 16) as (r, c):
                        t[r, c] = t[r, c] + x[r, c]
                with tile.parallel(1, 16) as (r, c):
                    y[r, c] = y[r, c] * T.float32(2) + t[r, c]
                tile.copy(Z[a, 0], t)
            tile.copy(y, Y[i, 0])

    streams = check(resumed, floats(6, 16), floats(3, 16, seed=1), floats(1, 16))
    assert streams.run(values=False).read == (6 + 3) * 16 * 4


def test_sums_of_two_lengths_in_one_step():
    """One goes on through both loops, the other begins anew in each: no stream has two lengths."""

    @T.prim_func
    def both(X: T.Buffer((6, 16), "float32"), Y: T.Buffer((1, 16), "float32")):
        with tile.kernel(1) as i:
            x = tile.fragment((1, 16), "float32")
            y = tile.fragment((1, 16), "float32")
            z = tile.fragment((1, 16), "float32")
            tile.fill(y, 0)
            for a in range(3):
                tile.fill(z, 1)
                for b in range(2):
                    tile.copy(X[a * 2 + b, 0], x)
                    with tile.parallel(1, 16) as (r, c):
                        z[r, c] = z[r, c] + x[r, c] * y[r, c]
                    with tile.parallel(1, 16) as (r, c):
                        y[r, c] = y[r, c] + z[r, c]
            tile.copy(y, Y[i, 0])

    with pytest.raises(StreamError, match="y is handed on by this loop and by the one around it"):
        from_tile(both, Accelerator())


def test_a_square_tile_is_stored_transposed():
    @T.prim_func
    def turned(X: T.Buffer((32, 32), "float32"), Y: T.Buffer((32, 32), "float32")):
        with tile.kernel(2, 2) as (i, j):
            x = tile.fragment((16, 16), "float32")
            tile.copy(X[i * 16, j * 16], x)
            with tile.parallel(16, 16) as (r, c):
                Y[i * 16 + r, j * 16 + c] = x[c, r]

    check(turned, floats(32, 32), floats(32, 32))


def test_what_an_iteration_begins_with_is_taken_elsewhere():
    @T.prim_func
    def changes(X: T.Buffer((4, 3, 16), "float32"), Y: T.Buffer((4, 16), "float32"), Z: T.Buffer((4, 16), "float32")):
        with tile.kernel(4) as i:
            x = tile.fragment((1, 16), "float32")
            top = tile.fragment((1, 16), "float32")
            before = tile.fragment((1, 16), "float32")
            y = tile.fragment((1, 16), "float32")
            tile.fill(top, 0)
            tile.fill(y, 0)
            for a in range(3):
                tile.copy(X[i, a, 0], x)
                tile.copy(top, before)
                with tile.parallel(1, 16) as (r, c):
                    top[r, c] = T.max(top[r, c], x[r, c])
                with tile.parallel(1, 16) as (r, c):
                    y[r, c] = y[r, c] * T.float32(0.5) + (top[r, c] - before[r, c]) * T.Cast("float32", a + i)
            tile.copy(y, Y[i, 0])
            tile.copy(top, Z[i, 0])

    streams = check(changes, floats(4, 3, 16), floats(4, 16), floats(4, 16))
    assert {"Scan", "Input"} <= set(kinds(streams))


def test_begins_with_what_is_loaded():
    @T.prim_func
    def added(
        A: T.Buffer((32, 48), "float32"),
        B: T.Buffer((48, 32), "float32"),
        C: T.Buffer((32, 32), "float32"),
        D: T.Buffer((32, 32), "float32"),
    ):
        with tile.kernel(2, 2) as (i, j):
            a = tile.shared((16, 16), "float32")
            b = tile.shared((16, 16), "float32")
            c = tile.fragment((16, 16), "float32")
            tile.copy(C[i * 16, j * 16], c)
            for k in tile.pipelined(3):
                tile.copy(A[i * 16, k * 16], a)
                tile.copy(B[k * 16, j * 16], b)
                tile.gemm(a, b, c)
            tile.copy(c, D[i * 16, j * 16])

    check(added, floats(32, 48), floats(48, 32, seed=1), floats(32, 32, seed=2), floats(32, 32))


def test_parts_of_tiles_and_the_last_iteration():
    @T.prim_func
    def pieces(X: T.Buffer((6, 32), "float32"), Y: T.Buffer((2, 32), "float32")):
        with tile.kernel(2) as i:
            x = tile.fragment((1, 32), "float32")
            both = tile.fragment((2, 32), "float32")
            y = tile.fragment((1, 32), "float32")
            tile.fill(both, 0)
            for a in range(3):
                tile.copy(X[i * 3 + a, 0], x)
                if a > 0:
                    tile.copy(x, both[a - 1 : a, 0:32])
                with tile.parallel(1, 32) as (r, c):
                    y[r, c] = x[r, 31 - c] * T.float32(2)
            with tile.parallel(1, 32) as (r, c):
                y[r, c] = y[r, c] + both[0, c] - both[1, c] * T.float32(3)
            tile.copy(y, Y[i, 0])

    check(pieces, floats(6, 32), floats(2, 32))


def test_two_loops_and_branches_that_are_settled():
    @T.prim_func
    def centred(X: T.Buffer((4, 64), "float32"), Y: T.Buffer((4, 64), "float32")):
        with tile.kernel(2) as i:
            x = tile.fragment((2, 16), "float32")
            part = tile.fragment((2,), "float32")
            total = tile.fragment((2,), "float32")
            tile.fill(total, 0)
            for k in range(4):
                tile.copy(X[i * 2, k * 16], x)
                tile.sum(x, part)
                if k < 4:
                    with tile.parallel(2) as r:
                        total[r] = total[r] + part[r]
            for k in range(4):
                tile.copy(X[i * 2, k * 16], x)
                with tile.parallel(2, 16) as (r, c):
                    x[r, c] = x[r, c] - total[r] * T.float32(1 / 64)
                tile.copy(x, Y[i * 2, k * 16])

    streams = check(centred, floats(4, 64), floats(4, 64))
    assert "Input" not in kinds(streams)


def test_numbers_of_the_caller():
    @T.prim_func
    def scaled(x: T.handle, y: T.handle, scale: T.float32, first: T.int32):
        n = T.int32()
        X = T.match_buffer(x, (n, 32), "float32")
        Y = T.match_buffer(y, (32, 32), "float32")
        with tile.kernel(4) as i:
            t = tile.fragment((8, 32), "float32")
            tile.copy(X[(first + i) * 8, 0], t)
            with tile.parallel(8, 32) as (r, c):
                t[r, c] = t[r, c] * scale
            tile.copy(t, Y[i * 8, 0])

    given = {"scale": 2.5, "first": 2, "n": 50}
    program = tile.read(scaled)
    x = floats(50, 32)
    report = from_tile(program, Accelerator(), given).run({"X": x})
    expected = np.zeros((32, 32))
    expected[:] = np.pad(x, ((0, 6), (0, 0)))[16:48] * 2.5
    np.testing.assert_allclose(report.tensors["Y"], expected, rtol=1e-6)
    with pytest.raises(StreamError, match=r"'scaled': scale isn't known, .* pass given=\{'scale': a number\}"):
        from_tile(program, Accelerator())
    with pytest.raises(StreamError, match="'scaled' has no scalar or variable 'm'"):
        from_tile(program, Accelerator(), {**given, "m": 1})


def test_boxes_that_start_anywhere():
    @T.prim_func
    def slides(X: T.Buffer((9, 70), "float32"), Y: T.Buffer((8, 72), "float32")):
        with tile.kernel(4) as i:
            y = tile.fragment((2, 64), "float32")
            tile.copy(X[i * 2 + 1, 5], y)
            tile.copy(y, Y[i * 2, 3])

    streams = check_given(slides, floats(9, 70), floats(8, 72))
    assert {"RandomOffChipLoad", "RandomOffChipStore"} <= set(kinds(streams))


def check_given(func, *arrays, given=None):
    """Compare as `check`, where what is stored is a part of what is there."""
    program = tile.read(func)
    streams = from_tile(program, Accelerator(), given)
    named = {param.name: array for param, array in zip(program.params, arrays)}
    report = streams.run({name: named[name] for name in streams.matrices})
    expected = dict(zip(named, interpret(program, *arrays)))
    for name, found in report.tensors.items():
        np.testing.assert_allclose(found, expected[name], rtol=1e-4, atol=1e-4)
    return streams


def test_routing_and_sides():
    """Which tiles come is data that is given; stores of whole tiles and of first rows take turns."""

    @T.prim_func
    def routed(X: T.Buffer((40, 32), "float32"), starts: T.Buffer((4,), "int32"), Y: T.Buffer((40, 32), "float32")):
        with tile.kernel(3, 4) as (g, i):
            x = tile.fragment((8, 16), "float32")
            y = tile.fragment((8, 16), "float32")
            first = starts[g] + i * 8
            stop = starts[g + 1]
            if first < stop:
                for j in range(2):
                    tile.copy(X[first, j * 16], x)
                    with tile.parallel(8, 16) as (r, c):
                        y[r, c] = x[r, c] * T.Cast("float32", g + 1)
                    if first + 8 <= stop:
                        tile.copy(y, Y[first, j * 16])
                    else:
                        with tile.parallel(8, 16) as (r, c):
                            if first + r < stop:
                                Y[first + r, j * 16 + c] = y[r, c]

    starts = np.array([3, 14, 14, 38], "int32")
    streams = check_given(routed, floats(40, 32), starts, floats(40, 32, seed=1), given={"starts": starts})
    assert "Partition" in kinds(streams)
    with pytest.raises(StreamError, match=r"tensor 'starts' is of shape \(4,\), and gets an array of \(3,\)"):
        from_tile(routed, Accelerator(), {"starts": starts[:3]})


def test_order_and_sums_along_rows():
    @T.prim_func
    def ranks(X: T.Buffer((8, 16), "float32"), Y: T.Buffer((8, 16), "float32"), Z: T.Buffer((8, 4), "int32")):
        with tile.kernel(2) as i:
            x = tile.fragment((4, 16), "float32")
            y = tile.fragment((4, 16), "float32")
            best = tile.fragment((4, 4), "float32")
            at = tile.fragment((4, 4), "int32")
            tile.copy(X[i * 4, 0], x)
            tile.cumsum(x, y, axis=1, reverse=True)
            tile.top_k(y, best, at)
            tile.copy(y, Y[i * 4, 0])
            tile.copy(at, Z[i * 4, 0])

    check(ranks, floats(8, 16), floats(8, 16), np.zeros((8, 4), "int32"))


def test_reductions_by_functions():
    @T.prim_func
    def folded(X: T.Buffer((8, 16), "float32"), Y: T.Buffer((8,), "float32"), Z: T.Buffer((8,), "int32")):
        with tile.kernel(2) as i:
            x = tile.fragment((4, 16), "float32")
            y = tile.fragment((4,), "float32")
            k = tile.fragment((4, 16), "int32")
            z = tile.fragment((4,), "int32")
            tile.copy(X[i * 4, 0], x)
            tile.fill(y, 2)
            tile.reduce(x, y, lambda a, b: T.max(T.abs(a), T.abs(b)), identity=0, accumulate=True)
            tile.copy(x, k)
            tile.reduce(k, z, lambda a, b: a ^ b, identity=0)
            tile.copy(y, Y[i * 4])
            tile.copy(z, Z[i * 4])

    check(folded, 9 * floats(8, 16), floats(8), np.zeros(8, "int32"))


def test_a_function_that_streams_have_nothing_for():
    @T.prim_func
    def folded(X: T.Buffer((8, 16), "float32"), Y: T.Buffer((8,), "float32")):
        with tile.kernel(1):
            x = tile.fragment((8, 16), "float32")
            y = tile.fragment((8,), "float32")
            tile.copy(X[0, 0], x)
            tile.reduce(x, y, lambda a, b: T.asinh(T.sinh(a) + T.sinh(b)), identity=0)
            tile.copy(y, Y[0])

    with pytest.raises(StreamError, match=r"the call T\.a?sinh.* isn't computed in streams; compute it before"):
        from_tile(folded, Accelerator())


SERIES = [(KERNELS[name], case) for name in ("split_k_matmul", "skinny_matmul", "einsum", "packed_attention",
                                              "decode_attention") for case in KERNELS[name].cases[:3]]  # fmt: skip


@pytest.mark.parametrize(("kernel", "case"), SERIES, ids=lambda each: getattr(each, "name", ""))
def test_kernels_of_several_programs_and_of_data(kernel, case):
    """One program's results are the next one's tensors; integers say which tiles come."""
    numbers = {name: sizes[0] for name, sizes in kernel.parameters(Target("llvm"), case).items()}
    recipe = kernel.make(**case, **{name: min(32, n) if name.startswith("block") else n for name, n in numbers.items()})
    arrays = dict(kernel.inputs(np.random.default_rng(1), case))
    held = {name: np.asarray(array) for name, array in arrays.items()}
    for program in recipe.programs:
        integers = {p.name for p in program.params if p.name in held and held[p.name].dtype.kind in "iu"}
        known = {*integers, *(str(var.name) for var in program.scalars)}
        streams = from_tile(program, Accelerator(), {name: held[name] for name in known})
        held |= streams.run({name: held[name] for name in streams.loaded}).tensors
    for name, expected in kernel.reference(case, arrays).items():
        assert (np.abs(held[name].astype("float64") - expected.value) <= expected.slack).all(), name


@pytest.mark.parametrize("turned", [0, 1])
@pytest.mark.parametrize("case", GROUPED_MATMUL.cases, ids=lambda case: f"{case['rows']}x{case['groups']}")
def test_grouped_products(case, turned):
    arrays = GROUPED_MATMUL.inputs(np.random.default_rng(1), case)
    blocks = {"block_m": 16, "block_n": 32, "block_k": 32}
    program = GROUPED_MATMUL.make(**case, **blocks, turned=turned).programs[1]
    starts = arrays["starts"]
    streams = from_tile(program, Accelerator(), {**by_hand.group_tiles(program, starts, 16), "starts": starts})
    report = streams.run({name: arrays[name] for name in streams.loaded})
    expected = GROUPED_MATMUL.reference(case, arrays)["Y"]
    found = report.tensors["Y"][starts[0] : starts[-1]].astype("float64")
    assert (np.abs(found - expected.value) <= expected.slack).all()
    assert streams.run(values=False).cycles == report.cycles


def test_random_programs():
    """Of programs that are drawn, those that are translated give all bits of the interpreter's results."""
    translated = 0
    for seed in range(400):
        if translated == 6:
            break
        made = drawn(seed, "small")
        try:
            program = tile.read(made.func)
            expected = wanted(made, made.func)
        except TooLarge:
            continue
        arrays = {param.name: array for param, array in zip(program.params, made.arrays)}
        stored = {each for node in program.nodes() for each in node.writes}
        given = {p.name: arrays[p.name] for p in program.params if p.dtype == "int32" and p not in stored}
        for param in program.params:
            given |= {str(e): n for e, n in zip(param.shape, arrays[param.name].shape) if not isinstance(e, int)}
        try:
            streams = from_tile(program, Accelerator(), given)
        except StreamError:
            continue
        translated += 1
        found = streams.run({name: arrays[name] for name in streams.matrices}).tensors
        for param, want in zip(program.params, expected):
            if param.name in found:
                np.testing.assert_array_equal(found[param.name].astype(want.dtype), want, err_msg=made.source)
    assert translated == 6


def test_what_only_part_of_is_stored_is_filled_by_what_is_given():
    @T.prim_func
    def constant(Y: T.Buffer((8, 32), "float32")):
        with tile.kernel(2) as i:
            y = tile.fragment((4, 16), "float32")
            tile.fill(y, 3)
            tile.copy(y, Y[i * 4, 16])

    streams = from_tile(constant, Accelerator())
    with pytest.raises(StreamError, match="the tiles fill 4 rows of tensor 'Y'"):
        streams.run()
    given = floats(8, 32)
    found = streams.run({"Y": given}).tensors["Y"]
    assert (found[:, 16:] == 3).all() and (found[:, :16] == given[:, :16]).all()
