"""Fragments: which thread holds which element, what follows for others, and what is refused."""

import math

import numpy as np
import programs_uniform as programs
import pytest
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.layout import Access, ComposeLayout, Layout, bank_conflicts
from tvm_axe.tile.targets.cuda import swizzles
from tvm_axe.tile.targets.cuda.fragments.emitter import Memory
from tvm_axe.tile.targets.cuda.fragments.infer import coalesced, infer
from tvm_axe.tile.targets.cuda.fragments.layout import FragmentLayout, evaluate, everywhere, fit, linear, projected
from tvm_axe.tile.targets.cuda.fragments.walk import FragmentWalk, StridedWalk, covers, find_registers
from tvm_axe.tile.targets.cuda.instructions import fma, mma
from tvm_axe.tile.targets.cuda.uniform.plan import decide

HOPPER = Target({"kind": "cuda", "arch": "sm_90a"})


def places(layout, shape, threads):
    """By the layout's own `apply`: (thread, register) -> position."""
    found = {}
    for position in range(int(np.prod(shape))):
        for point in layout.apply(position):
            found[point["tx"], point["m"]] = position
    return found


FRAGMENTS = [
    (*coalesced((16, 64), 8, 128), 128),
    (*coalesced((3, 40), 8, 64), 64),
    (*coalesced((5,), 4, 32), 32),
    (mma.accumulator(64, 48, mma.Warps(2, 2, 1)), (64, 48), 128),
    (mma.left_operand(32, 64, mma.Warps(2, 2, 1), "float16"), (32, 64), 128),
    (mma.left_operand(32, 64, mma.Warps(2, 2, 1), "int8"), (32, 64), 128),
    (fma.accumulator(48, 64, 16, 128), (48, 64), 128),
    (everywhere(6, 64), (2, 3), 64),
]


@pytest.mark.parametrize("layout, shape, threads", FRAGMENTS)
def test_a_holding_is_its_layout(layout, shape, threads):
    held = FragmentLayout(layout, shape, threads)
    expected = places(layout, shape, threads)
    assert {(t, r): held.table[t, r] for t in range(threads) for r in range(held.registers)} == expected


@pytest.mark.parametrize("layout, shape, threads", FRAGMENTS)
def test_walks_meet_what_threads_hold(layout, shape, threads):
    held = FragmentLayout(layout, shape, threads)
    walk = FragmentWalk(held, (0,) * len(shape), shape)
    assert walk.inside.all()
    base, steps = find_registers(walk, held, walk.points)
    registers = base + np.indices([d.extent for d in walk.digits]).reshape(
        len(walk.digits), held.registers
    ).T @ np.array(steps, dtype=int)
    assert np.array_equal(held.table[:, registers], linear(walk.points, shape))
    assert covers(walk, held, walk.points)


@pytest.mark.parametrize("extents, threads, vector", [((7, 24), 32, 8), ((3, 5), 32, 1), ((4, 64), 128, 2)])
def test_a_strided_walk_meets_every_point_once(extents, threads, vector):
    walk = StridedWalk(extents, threads, vector)
    met = linear(walk.points, extents)[walk.inside]
    assert sorted(met) == list(range(0, int(np.prod(extents)), vector))


@pytest.mark.parametrize("layout, shape, threads", [case for case in FRAGMENTS if len(case[1]) == 2])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_projection_is_held_wherever_it_is_needed(layout, shape, threads, axis):
    kept = FragmentLayout(projected(layout, shape, [axis]), (shape[axis],), threads)
    walk = FragmentWalk(FragmentLayout(layout, shape, threads), (0, 0), shape)
    assert find_registers(walk, kept, [walk.points[axis]]) is not None
    assert covers(walk, kept, [walk.points[axis]])


def test_what_another_thread_holds_is_not_found():
    rows, columns = (FragmentLayout(*coalesced(shape, 4, 32), 32) for shape in ((8, 16), (8, 16)))
    walk = FragmentWalk(rows, (0, 0), (8, 16))
    assert find_registers(walk, columns, [walk.points[0], 15 - walk.points[1]]) is None
    with pytest.raises(TileError, match="indexed from 1 to 8; valid is 0 to 7"):
        find_registers(walk, columns, [walk.points[0] + 1, walk.points[1]])


@pytest.mark.parametrize("text, why", [
    ("S[(4, 8) : (1@tx, 1)]", "leaves 224 of the 256 registers"),
    ("S[(32, 1) : (1@laneid, 1)]", "over the axes tx and m"),
    ("S[32 : 1@tx] + 1@tx", "without offset"),
    ("S[(4, 8) : (9@tx, 1@tx)]", "empty|reaches"),
    ("S[16 : 1@tx]", "doesn't place"),
])  # fmt: skip
def test_malformed_fragments_are_refused(text, why):
    with pytest.raises(TileError, match=why):
        FragmentLayout(Layout.parse(text), (4, 8), 32)


def test_fits_are_exact_or_none():
    box = np.indices((2, 3, 4)).reshape(3, -1)
    assert fit(7 + np.array([5, 0, 2]) @ box, (2, 3, 4)) == (7, [5, 0, 2])
    assert fit(box[0] * box[1], (2, 3, 4)) is None
    partly = np.where(box[2] < 2, 3 * box[2] + box[0], -1)
    assert fit(partly, (2, 3, 4)) == (0, [1, 0, 3])


def test_index_expressions_are_evaluated_at_all_points():
    x, y = T.int32(), T.int32()
    values = {x: np.arange(6), y: np.arange(6) % 2}
    assert evaluate((x * 3 + y) // 2 % 5 - 1, values).tolist() == [(3 * i + i % 2) // 2 % 5 - 1 for i in range(6)]
    assert evaluate(x + T.int32(), values) is None


@pytest.mark.parametrize("layout", [
    ComposeLayout(3, 3, 3, Layout.parse("S[(16, 64) : (64, 1)]")), Layout.parse("S[(16, 8, 8) : (8, 128, 1)]"),
    Layout.parse("S[(16, 64) : (72, 1)]"),
])  # fmt: skip
def test_addresses_are_the_layouts(layout):
    memory = Memory(None, layout, 4096)
    from tvm.sym import Analyzer

    for row, column in [(0, 0), (5, 17), (15, 63)]:
        (point,) = layout.apply(row, column, shape=(16, 64))
        index = [T.IntImm("int32", row), T.IntImm("int32", column)]
        (address,) = memory.address(index, (16, 64))
        assert Analyzer().can_prove_equal(address, point["m"] + 4096)


@pytest.mark.parametrize("shape, dtype", [((64, 32), "float16"), ((32, 128), "float16"), ((64, 48), "bfloat16"),
                                          ((128, 32), "float32"), ((16, 256), "int8")])  # fmt: skip
def test_operands_in_shared_memory_have_no_bank_conflicts(shape, dtype):
    piece = {"float16": 8, "bfloat16": 8, "float32": 4, "int8": 16}[dtype]
    accesses = [Access(dtype, "row", piece), Access(dtype, "column", piece)]
    layout, _ = swizzles.choose(shape, dtype, accesses)
    assert [bank_conflicts(layout, shape, access).ways for access in accesses] == [1, 1]


def test_layouts_follow_from_products_and_reductions():
    plan = decide(tile.read(programs.attention(128, 64)), HOPPER, "test")
    held = {tile.name: found for tile, found in plan.fragments.items()}
    assert held["p"].layout == held["s"].layout
    assert str(held["top"].layout) == "S[(4, 2, 8) : (32@tx, 1, 4@tx)] + R[4 : 1@tx]"
    assert held["total"].layout == held["part"].layout == held["before"].layout == held["top"].layout
    assert "max of s" in held["top"].origin and "mma" in held["s"].origin


@pytest.mark.parametrize("shape", [(777,), (1, 1000), (4, 777), (7, 33), (3, 5, 9), (2, 24), (40, 6)])
@pytest.mark.parametrize("threads", [64, 96, 128])
def test_extents_that_few_threads_divide_are_padded(shape, threads):
    layout, padded = coalesced(shape, 8, threads)
    held = FragmentLayout(layout, padded, threads)
    assert all(extent <= to for extent, to in zip(shape, padded, strict=True))
    assert held.registers < max(8, 4 * math.prod(shape) / threads)
    walk = FragmentWalk(held, (0,) * len(shape), shape)
    met = np.ravel_multi_index([axis[walk.inside] for axis in walk.points], shape)
    assert set(met) == set(range(math.prod(shape)))


def test_what_nothing_fixes_is_coalesced():
    read = tile.read(programs.transposed(128, 128, "bfloat16"))
    ((_, found),) = infer(read, {}, 256).items()
    assert (found.layout, found.shape) == coalesced((64, 64), 8, 256)
    assert "8 neighbours a thread" in found.origin


def read_at_once():
    @T.prim_func
    def func(X: T.Buffer((32,), "float32"), Y: T.Buffer((32,), "float32")):
        with tile.kernel(1):
            x = tile.fragment((32,), "float32")
            count = tile.local((1,), "float32")
            tile.copy(X, x)
            count[0] = x[3]
            with tile.parallel(32) as i:
                x[i] = count[0]
            tile.copy(x, Y)

    return func


def test_a_scalar_of_a_fragment_is_refused():
    with pytest.raises(TileError, match="a scalar is read from fragment x"):
        tile.lower(read_at_once(), HOPPER)
