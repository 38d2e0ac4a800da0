"""What is decided for Hopper, and what is refused."""

import re
from types import MappingProxyType

import numpy as np
import programs_hopper as programs
import pytest
from tvm import tirx
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.layout import Layout
from tvm_axe.tile.kernels import KERNELS
from tvm_axe.tile.nodes import Gemm
from tvm_axe.tile.targets.cuda import raster
from tvm_axe.tile.targets.cuda.grid import Grid
from tvm_axe.tile.targets.cuda.instructions import mma, tma, wgmma
from tvm_axe.tile.targets.cuda.specialized.plan import SpecializedPlan
from tvm_axe.tile.walking import substitute_in

HOPPER = Target({"kind": "cuda", "arch": "sm_90a"})
AMPERE = Target({"kind": "cuda", "arch": "sm_80"})


def planned(func, target=HOPPER):
    made = tile.plan(func, target)
    assert isinstance(made, SpecializedPlan)
    return made


def only(values):
    (value,) = values
    return value


def test_a_large_product_is_persistent_with_whole_tiles_staged():
    made = planned(programs.matmul(4096, 4096, 4096))
    assert made.grid.persistent and made.grid.blocks == 132 and made.grid.swizzle == 16
    assert made.warpgroups == 2 and only(made.memory.buffers.values()) == 3
    assert only(made.memory.staging.values()).pieces == 1
    assert made.memory.bytes == 1024 + 3 * (128 + 256) * 64 * 2 + 128 * 256 * 2


def test_one_tile_a_block_has_deeper_rings():
    made = planned(programs.matmul(2048, 2048, 2048))
    assert not made.grid.persistent and only(made.memory.buffers.values()) == 4
    assert only(made.memory.staging.values()).pieces == 4


def test_annotations_override():
    made = planned(
        programs.matmul(4096, 4096, 4096, stages=2, persistent=False, swizzle=4, threads=128, block=(64, 64, 64))
    )
    assert (
        only(made.memory.buffers.values()) == 2
        and not made.grid.persistent
        and made.grid.swizzle == 4
        and made.warpgroups == 1
    )


@pytest.mark.parametrize(("rows", "warpgroups"), [(64, 1), (128, 2), (192, 3), (256, 2), (384, 3)])
def test_warpgroups_share_the_rows(rows, warpgroups):
    assert planned(programs.matmul(768, 64, 64, block=(rows, 64, 64))).warpgroups == warpgroups


def test_uneven_loops_start_with_the_longest_and_are_not_persistent():
    made = planned(programs.attention(4, 32, 4096, causal=True))
    assert not made.grid.persistent and made.grid.backwards == (False, False, True)
    assert planned(programs.attention(4, 32, 4096)).grid.persistent


def test_every_decision_is_explained():
    text = tile.explain(programs.attention(4, 32, 4096), HOPPER)
    for expected in (
        "a producer warp and 2 warpgroups that consume",
        "132 persistent blocks",
        "circular buffer of k: 2 slots of 32768 bytes",
        "0 bank conflicts down a column",
        "deferred by an iteration, warpgroups issue in turns",
        "left operand of o += p @ v, wgmma",
        "of 232448",
    ):
        assert expected in text


def test_layouts_of_operands_are_free_of_conflicts():
    text = tile.explain(programs.matmul(512, 512, 512, block=(128, 128, 32)), HOPPER)
    assert re.findall(r"(\d+) bank conflicts", text) == ["0", "0"]
    plain = tile.explain(programs.matmul(512, 512, 512, block=(128, 96, 64), transpose_b=False), HOPPER)
    assert set(re.findall(r"(\d+) bank conflicts", plain)) == {"0"}


def test_programs_that_are_not_specialized():
    assert not isinstance(tile.plan(programs.matmul(64, 64, 64, block=(32, 32, 32)), HOPPER), SpecializedPlan)
    assert not isinstance(tile.plan(programs.matmul(256, 256, 64), AMPERE), SpecializedPlan)
    assert not isinstance(
        tile.plan(programs.matmul(256, 256, 64, roles="uniform", block=(64, 64, 32)), HOPPER), SpecializedPlan
    )


@pytest.mark.parametrize(
    ("func", "target", "message"),
    [
        (programs.matmul(512, 512, 512, block=(128, 256, 512)), HOPPER, r"a, b: 393216 bytes x 1.*Take smaller tiles"),
        (programs.matmul(512, 512, 512, stages=8), HOPPER, r"a, b: 49152 bytes x 8.*fewer stages"),
        (programs.matmul(512, 512, 512, block=(128, 512, 32)), HOPPER, r"take 256 registers of each of 256 threads"),
        (
            programs.matmul(512, 512, 512, threads=384),
            HOPPER,
            r"threads=384 can't share products of 128 rows.*valid: 128, 256",
        ),
        (programs.matmul(512, 512, 512, roles="specialized"), AMPERE, r"roles='specialized', but sm_80 has no"),
        (
            programs.matmul(512, 512, 512, roles="specialized", dtype="float16", block=(32, 64, 64)),
            HOPPER,
            r"m x n x k = 32 x 64 x 64; m is a multiple of 64, n of 8, k of 16",
        ),
        (
            programs.matmul(512, 512, 500, instruction="wgmma", block=(64, 64, 20)),
            HOPPER,
            r"instruction='wgmma'.*k of 16 for bfloat16",
        ),
        (
            programs.matmul(
                512, 512, 512, dtype="float8_e4m3fn", out="float32", transpose_b=False, instruction="wgmma"
            ),
            HOPPER,
            r"operands of float8_e4m3fn lie along k: transpose_b",
        ),
        (
            programs.matmul(500, 500, 500, roles="specialized"),
            HOPPER,
            r"rows of A are 1000 bytes apart, no multiple of 16",
        ),
    ],
)
def test_what_does_not_fit_is_refused(func, target, message):
    with pytest.raises(TileError, match=message):
        tile.plan(func, target)


# ---- Layouts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "columns", "warpgroups", "across"),
    [(64, 8, 1, 1), (128, 64, 2, 1), (256, 32, 2, 1), (192, 16, 3, 1), (64, 512, 2, 2), (64, 16, 2, 2)],
)
def test_accumulators_hold_every_element_once(rows, columns, warpgroups, across):
    layout = wgmma.accumulator(rows, columns, warpgroups, across)
    places = {(place["tx"], place["m"]) for element in range(rows * columns) for place in layout.apply(element)}
    assert len(places) == rows * columns
    assert places == {(t, r) for t in range(128 * warpgroups) for r in range(rows * columns // 128 // warpgroups)}


def test_accumulators_are_as_the_manual_says():
    """PTX ISA, wgmma.mma_async .m64nNk16, figure of D's fragment: row and column of a thread's i-th register."""
    layout = wgmma.accumulator(64, 32, 1)
    for row in range(64):
        for column in range(32):
            (place,) = layout.apply(row, column, shape=(64, 32))
            thread, register = place["tx"], place["m"]
            assert row == thread // 32 * 16 + thread % 32 // 4 + 8 * (register // 2 % 2)
            assert column == register // 4 * 8 + thread % 4 * 2 + register % 2


def test_left_operands_of_eight_bits_are_as_the_manual_says():
    """PTX ISA, wgmma.mma_async .m64nNk32, figure of A's fragment: row and column of a thread's i-th element."""
    layout = wgmma.accumulator(64, 64, 1, pack=wgmma.OPERANDS["int8"].pack)
    for row in range(64):
        for column in range(64):
            (place,) = layout.apply(row, column, shape=(64, 64))
            thread, instruction, i = place["tx"], place["m"] // 16, place["m"] % 16
            assert row == thread // 32 * 16 + thread % 32 // 4 + (0 if i < 4 or 8 <= i < 12 else 8)
            assert column == instruction * 32 + thread % 4 * 4 + i % 4 + (16 if i >= 8 else 0)
    assert mma.left_operand(64, 64, mma.Warps(4, 1, 1), "int8").equivalent(layout)  # whose figure is the same


def test_warpgroups_share_columns_of_which_one_has_no_room():
    plan = tile.plan(programs.matmul(512, 1024, 512, block=(64, 512, 64)), HOPPER)
    assert isinstance(plan, SpecializedPlan) and (plan.warpgroups, plan.across, plan.down) == (2, 2, 1)
    assert not plan.schedule.takes_turns
    (sums,) = (tile for tile in plan.fragments if tile.name == "c")
    held = {(place["tx"] // 128, column // 256) for column in range(512) for place in plan.fragments[sums].layout.apply(
        5, column, shape=(64, 512))}  # fmt: skip
    assert held == {(0, 0), (1, 1)}
    assert "which share columns" in plan.explain()
    heads = {"batch": 1, "heads": 1, "kv_heads": 1, "queries": 128, "keys": 128, "dim": 256, "dtype": "bfloat16"}
    together = tile.plan(KERNELS["attention_backward"].recipe(HOPPER, heads).programs[1], HOPPER)
    assert isinstance(together, SpecializedPlan) and together.across == 2  # each product alone has room
    both = tile.plan(programs.matmul(512, 512, 512, block=(64, 128, 64), threads=256), HOPPER)
    assert isinstance(both, SpecializedPlan) and both.across == 2
    for narrow in ({"block": (64, 256, 64)}, {"block": (128, 256, 64)}, {"block": (64, 128, 64), "threads": 128}):
        assert tile.plan(programs.matmul(512, 512, 512, **narrow), HOPPER).across == 1


@pytest.mark.parametrize("rows, fits", [(192, True), (200, False)])
def test_operands_of_an_instruction_fit_an_equal_share_of_the_registers(rows, fits):
    """Of 128 an accumulator of 200 columns leaves 28, of which the assembler wants 26, and 30 with a left operand."""
    problem = {"m": rows, "n": 512, "k": 1024, "group": 128, "dtype": "bfloat16"}
    kernel = KERNELS["w4a16_matmul"]
    (program, *_) = kernel.recipe(HOPPER, problem, block_m=rows, block_n=64, blocks=2).programs
    if fits:
        tile.plan(program, HOPPER)
        return
    with pytest.raises(TileError, match=r"200 columns take more registers an instruction .* take up to 196"):
        tile.plan(program, HOPPER)


@pytest.mark.parametrize("where", programs.HELD)
def test_left_operands_in_registers_are_written_anew(where):
    """Of others ptxas before CUDA 13.3 overwrites the registers while they are needed (seen of 12.9 and 13.0)."""
    plan = tile.plan(programs.held(where), HOPPER)
    if where.startswith("another"):
        assert isinstance(plan, SpecializedPlan)
    else:
        assert not isinstance(plan, SpecializedPlan)
        assert "its left operand a is in registers, and no other in each iteration" in plan.explain()


def test_shared_layouts_are_upstreams():
    program = tile.read(programs.matmul(512, 512, 512, block=(128, 256, 64), transpose_b=False))
    for shared in (shared for shared in program.tiles if shared.scope == "shared"):
        ours, (rows, columns) = tma.axe_layout(shared), tma.matrix(shared)
        theirs = tma.shared_layout(shared, 2)
        for at in ((0, 0), (3, 9), (rows - 1, columns - 1), (rows // 2, columns // 2 + 5)):
            (place,) = ours.apply(*at, shape=(rows, columns))
            found = theirs.apply(1, *at, shape=[2, rows, columns])
            assert int(found["m"]) == place["m"] + rows * columns


@pytest.mark.parametrize(
    "dtype, block, transpose_b",
    [
        ("bfloat16", (128, 256, 64), True), ("bfloat16", (128, 192, 64), False), ("int8", (64, 96, 128), True),
        ("float16", (64, 40, 16), True), ("float16", (64, 40, 32), False),
    ],
)  # fmt: skip
def test_atoms_of_operands_lie_where_descriptors_say(dtype, block, transpose_b):
    """A descriptor is that of an operand's first element, and what lies before another atom's first row is added."""
    program = tile.read(programs.matmul(512, 480, 512, block=block, transpose_b=transpose_b, dtype=dtype))
    for shared in (shared for shared in program.tiles if shared.scope == "shared" and shared.name in "ab"):
        layout, (rows, columns) = tma.axe_layout(shared), tma.matrix(shared)
        for row in range(0, rows, 8):
            for column in range(0, columns, 16):
                (place,) = layout.apply(row, column, shape=(rows, columns))
                assert wgmma.elements_before(row, column, rows, tma.panel(shared)) == place["m"]


def test_products_say_what_they_need():
    gemm = only(
        node for node in tile.read(programs.matmul(64, 64, 64, block=(64, 64, 64))).nodes() if isinstance(node, Gemm)
    )
    assert wgmma.obstacle(gemm) is None
    assert isinstance(wgmma.accumulator(*gemm.c.tile.shape, 1), Layout)


# ---- Raster ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extents", "swizzle", "backwards"),
    [
        ((7,), 4, ()),
        ((5, 3), 2, ()),
        ((4, 6), 16, ()),
        ((3, 5, 4), 2, (False, True, False)),
        ((2, 3, 4), 1, (True, True, True)),
    ],
)
def test_every_point_is_taken_once(extents, swizzle, backwards):
    index = tirx.Var("index", "int32")
    at = raster.coordinates(index, extents, swizzle, backwards)
    total = int(np.prod(extents))
    assert raster.points(extents) == total
    func = _evaluated(index, at)
    seen = [func(i) for i in range(total)]
    assert sorted(seen) == sorted(np.ndindex(*extents))
    if len(extents) > 1 and swizzle > 1:
        height = min(swizzle, extents[-2])
        rows = [point[-2] for point in seen[:height]]
        assert len(set(rows)) == height and len({point[-1] for point in seen[:height]}) == 1


@pytest.mark.parametrize("extents", [(7,), (5, 3), (3, 5, 4)])
def test_every_point_of_unknown_extents_is_taken_once(extents):
    index, *unknown = (tirx.Var(name, "int32") for name in ("index", "a", "b", "c")[: 1 + len(extents)])
    at = raster.coordinates(index, unknown, 2)
    point = _evaluated(index, at, dict(zip(unknown, (tirx.const(extent, "int32") for extent in extents))))
    assert sorted(map(point, range(int(np.prod(extents))))) == sorted(np.ndindex(*extents))


def test_persistent_blocks_of_unknown_grids_take_every_point_once():
    """As many blocks as run at once, or as there are points."""
    tiles, block = tirx.Var("tiles", "int32"), tirx.Var("block", "int32")
    grid = Grid(((tirx.Var("i", "int32"), tiles),), 5, True, 1, (), False)
    for count in (1, 4, 5, 6, 17):
        known = {tiles: tirx.const(count, "int32")}
        (blocks,) = _evaluated(block, [grid.blocks], known)(0)
        turns = [_evaluated(block, [grid.turns(block)], known)(number)[0] for number in range(blocks)]
        assert blocks == min(5, count) and sum(turns) == count and max(turns) - min(turns) <= 1


def _evaluated(index, at, known=MappingProxyType({})):
    import tvm

    analyzer = tvm.sym.Analyzer()

    def point(value):
        given = {**known, index: tirx.const(value, "int32")}
        return tuple(int(analyzer.simplify(substitute_in(e, given))) for e in at)

    return point


def test_a_neighbour_in_the_second_dimension_waits_for_its_group():
    index = tirx.Var("index", "int32")
    point = _evaluated(index, raster.coordinates(index, (8, 8), 4))
    assert [point(i) for i in range(5)] == [(0, 0), (1, 0), (2, 0), (3, 0), (0, 1)]


def test_names_in_a_body_are_scalars_of_both_roles():
    @T.prim_func
    def func(A: T.Buffer((4, 128, 64), "float16"), order: T.Buffer((4,), "int32"), C: T.Buffer((128, 128), "float16")):
        with tile.kernel(1):
            a = tile.shared((128, 64), "float16")
            c = tile.fragment((128, 128), "float32")
            tile.fill(c, 0)
            for l in tile.pipelined(4):
                which = order[l]
                tile.copy(A[which, 0, 0], a)
                tile.gemm(a, a, c, transpose_b=True)
            tile.copy(c, C[0, 0])

    lowered = tile.lower(func, HOPPER).script()
    assert lowered.count("order[") == 2


def test_layouts_that_disagree_are_shown_with_their_origins():
    @T.prim_func
    def func(A: T.Buffer((128, 64), "float16"), C: T.Buffer((128, 128), "float16")):
        with tile.kernel(1):
            a = tile.shared((128, 64), "float16")
            c = tile.fragment((128, 128), "float32", layout=Layout.parse("S[(2, 128, 64) : (64, 1@tx, 1)]"))
            tile.copy(A[0, 0], a)
            tile.gemm(a, a, c, transpose_b=True, accumulate=False)
            tile.copy(c, C[0, 0])

    with pytest.raises(TileError, match=r"annotated with S.*accumulator of c = a @ a.T, by wgmma, it lies as S"):
        tile.plan(func, HOPPER)


def test_a_producer_follows_only_what_it_can_compute():
    @T.prim_func
    def func(A: T.Buffer((4, 128, 64), "float16"), flags: T.Buffer((4,), "int32"), C: T.Buffer((128, 128), "float16")):
        with tile.kernel(1):
            a = tile.shared((128, 64), "float16")
            c = tile.fragment((128, 128), "float32")
            with tile.parallel(4) as x:
                flags[x] = 3 - x
            tile.copy(A[flags[1], 0, 0], a)
            tile.gemm(a, a, c, transpose_b=True, accumulate=False)
            tile.copy(c, C[0, 0])

    text = tile.explain(func, HOPPER)
    assert "which only consumers know, steers loops or loads" in text
