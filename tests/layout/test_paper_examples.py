"""The definitions and worked examples of the paper (Axe, arXiv:2601.19092): sections 2 and 3, appendices F.4, G and H.

Each test is named after what it is in the paper. Those called `departure` show by an example where the text can't be
meant as it stands, or where the package differs on purpose; docs/decisions/0021-the-paper.md has the list.
"""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import tirx

from tvm_axe.layout import Coordinate, Iter, Layout, LayoutError, Mesh, named, plan_redistribution
from tvm_axe.layout.convert import to_triton

strides = st.integers(-5, 7).filter(bool)
iters = st.builds(Iter, st.integers(1, 4), strides, st.sampled_from(["m", "lane", "gpuid"]))
offsets = st.dictionaries(st.sampled_from(["m", "warp"]), st.integers(-5, 5), max_size=2)
layouts = st.builds(Layout, st.lists(iters, max_size=3), st.lists(iters, max_size=2), offsets)
quick = settings(derandomize=True, max_examples=100, deadline=None)


def one(layout, *index, shape):
    (point,) = layout.apply(*index, shape=shape)
    return point


def addresses(layout, shape):
    """The address of each element of a layout in linear memory."""
    return np.array([one(layout, *map(int, index), shape=shape)["m"] for index in np.ndindex(*shape)]).reshape(shape)


# ---- 2.3: the formal definitions ---------------------------------------------------------------------------------


@quick
@given(st.integers(1, 9), strides)
def test_definition_2_1_iter(extent, stride):
    layout = Layout([Iter(extent, stride, "lane")])
    assert [layout.apply(x) for x in range(extent)] == [{Coordinate({"lane": x * stride})} for x in range(extent)]


@pytest.mark.parametrize(("extent", "stride"), [(0, 1), (-2, 1), (4, 0)])
def test_definition_2_1_needs_a_positive_extent_and_a_stride_that_is_not_zero(extent, stride):
    with pytest.raises(LayoutError, match=r"an iter's (extent|stride) must"):
        Iter(extent, stride, "lane")


def test_definition_2_2_layout():
    """D is ordered, R is a multiset, O has one integer an axis."""
    a, b = Iter(2, 1, "lane"), Iter(3, 1, "m")
    assert Layout([a, b]) != Layout([b, a]) and Layout([a], [a, b, b]) == Layout([a], [b, a, b]) != Layout([a], [a, b])
    assert Layout([a], [], {"m": 2, "lane": 0}) == Layout([a], [], {"m": 2})


def test_departure_2_2_d_may_be_empty():
    """Rule D0 deletes the last iter of extent 1 too, and leaves no D of at least one iter, as 2.2 has it."""
    assert Layout([Iter(1, 5, "m")], [], {"m": 3}).canonicalize() == Layout([], [], {"m": 3})
    assert Layout([], [], {"m": 3}).apply(0) == {Coordinate({"m": 3})}


@quick
@given(layouts)
def test_definition_2_3_induced_map(whole_map, layout):
    assert tuple({frozenset(p.items()) for p in layout.apply(x)} for x in range(layout.size())) == whole_map(layout)


def test_departure_2_3_copies_may_meet():
    """|f_L(x)| is the product of R's extents only where the copies' sums differ, as they do under the gap condition."""
    assert len(Layout.parse("S[1 : 1] + R[(2, 2) : (1, 1)]").apply(0)) == 3
    parts = [Iter(e, s, "m") for e in (2, 3) for s in (-3, 1, 2, 4, 5, 7)]
    for replica in itertools.chain.from_iterable(itertools.combinations(parts, n) for n in range(4)):
        layout = Layout([], replica).canonicalize()
        reach = 0
        for it in layout.R:
            if it.stride <= reach:
                break
            reach += it.stride * (it.extent - 1)
        else:
            assert len(layout.apply(0)) == math.prod(it.extent for it in layout.R)


@quick
@given(layouts, st.data())
def test_shape_admission(layout, data):
    """Iff the extents multiply to D's, and then the row-major position is the index: the last dimension is fastest."""
    shape, left = [], layout.size()
    while left > 1 and len(shape) < 3:
        shape.append(data.draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0])))
        left //= shape[-1]
    assert not layout.admits([*shape, left, 2]) and layout.admits([*shape, left])
    shape = [*shape, left]
    for x, index in enumerate(itertools.product(*map(range, shape))):
        assert layout.apply(*index, shape=shape) == layout.apply(x)


@quick
@given(layouts)
def test_axis_wise_span(whole_map, layout):
    """An axis that a layout doesn't name has position 0 at every point, and with it the span 1 that is agreed on."""
    reached = [dict(p) for points in whole_map(layout) for p in points]
    for axis in ("m", "lane", "gpuid", "unnamed"):
        values = [p.get(axis, 0) for p in reached]
        assert layout.span(axis) == max(values) - min(values) + 1


# ---- 2.2: figure 2 -----------------------------------------------------------------------------------------------

TENSOR_CORE = "S[(8, 2, 4, 2) : (4@lane, 1@warp, 1@lane, 1@reg)] + R[2 : 4@warp] + 5@warp"


def test_figure_2_tensor_core_tile():
    """Two warps hold an 8 by 16 tile, two others a copy of it: without R 0 and 1, with it 4 and 5 too, all 5 up."""
    layout = Layout.parse(TENSOR_CORE)
    for row, column in np.ndindex(8, 16):
        places = layout.apply(row, column, shape=(8, 16))
        assert {p["warp"] for p in places} == {5 + column // 8, 9 + column // 8}
        assert {(p["lane"], p["reg"]) for p in places} == {(4 * row + column % 8 // 2, column % 2)}
    warps = {p["warp"] for x in range(128) for p in layout.apply(x)}
    assert warps == {5, 6, 9, 10} and layout.bounds("warp") == (5, 10) and layout.span("warp") == 6
    assert layout.is_injective() and not layout.covers({"warp": 11})
    assert {p["warp"] for x in range(128) for p in Layout(layout.D, layout.R).apply(x)} == {0, 1, 4, 5}


def gpu_mesh():
    """GPU 0 to 3 in columns of two: number gpuid is gpuid_x + 2 * gpuid_y, with x counting the rows."""
    return Mesh({"gpuid_x": 2, "gpuid_y": 2})


def test_figure_2_fully_sharded():
    """Rows over the rows of the mesh, columns over its columns: S0S1. Each GPU keeps the rows' pitch of 128."""
    layout = Layout.parse("S[(2, 32, 2, 64) : (1@gpuid, 128, 2@gpuid, 1)]")
    packed = Layout.sharded((64, 128), gpu_mesh(), {0: "gpuid_x", 1: "gpuid_y"})
    assert named.mesh_sharding("S0S1", (64, 128), gpu_mesh()) == packed
    assert str(packed) == "S[(2, 32, 2, 64) : (1@gpuid_x, 64, 1@gpuid_y, 1)]"
    for i, j in itertools.product(range(0, 64, 3), range(0, 128, 5)):
        place, dense = one(layout, i, j, shape=(64, 128)), one(packed, i, j, shape=(64, 128))
        assert (place["gpuid"], place["m"]) == (i // 32 + 2 * (j // 64), 128 * (i % 32) + j % 64)
        assert place["gpuid"] == dense["gpuid_x"] + 2 * dense["gpuid_y"] and dense["m"] == 64 * (i % 32) + j % 64
    assert layout.is_injective() and packed.covers({**gpu_mesh().axes, "m": 32 * 64})


def test_departure_figure_2_the_factors_on_memory_are_32_and_64():
    """The text has 128 for the second: it can't be an extent, and is the pitch of the rows."""
    assert not Layout.parse("S[(2, 32, 2, 128) : (1@gpuid, 128, 2@gpuid, 1)]").admits((64, 128))
    assert Layout.parse("S[(2, 32, 2, 64) : (1@gpuid, 128, 2@gpuid, 1)]").admits((64, 128))


def test_figure_2_shard_with_replication():
    """Rows over the rows of the mesh, each on both GPUs of its row: S0R."""
    layout = Layout.parse("S[(2, 32, 128) : (1@gpuid, 128, 1)] + R[2 : 2@gpuid]")
    mesh = gpu_mesh()
    packed = named.mesh_sharding("S0R", (64, 128), mesh)
    assert packed == Layout.sharded((64, 128), mesh, {0: "gpuid_x"})
    for i, j in itertools.product(range(0, 64, 3), range(0, 128, 5)):
        places = layout.apply(i, j, shape=(64, 128))
        assert {p["gpuid"] for p in places} == {i // 32, i // 32 + 2} and {p["m"] for p in places} == {
            128 * (i % 32) + j
        }
        copies = packed.apply(i, j, shape=(64, 128))
        assert {(p["gpuid_x"] + 2 * p["gpuid_y"], p["m"]) for p in copies} == {(p["gpuid"], p["m"]) for p in places}
    assert packed.covers({**mesh.axes, "m": 32 * 128}) and layout.covers({"gpuid": 4, "m": 32 * 128})
    assert packed.owner(40, 0, shape=(64, 128), mesh=mesh) == (2, 3)
    assert packed.slice((64, 128), [(32, 64), (0, 128)]).owner(0, mesh=mesh) == (2, 3)


def test_figure_2_a_fully_sharded_matrix_is_a_tile_of_its_blocks():
    mesh = Mesh({"x": 2, "y": 4})
    block, devices = Layout.parse("S[(4, 2) : (2, 1)]"), Layout.parse("S[(2, 4) : (1@x, 1@y)]")
    layout = block.tile(devices, (2, 4), (4, 2))
    assert layout.equivalent(Layout.sharded((8, 8), mesh, {0: "x", 1: "y"}))
    assert block.is_tile_inner(layout, (8, 8), (4, 2)) == devices
    assert devices.is_tile_outer(layout, (8, 8), (2, 4)).equivalent(block)
    assert layout.project(["x", "y"]).equivalent(devices) and layout.project(["m"]).equivalent(block)


def test_figure_2_accelerator_scratchpad():
    """256 by 512 over 128 partitions: two rows a partition, one after the other along the free dimension."""
    layout = Layout.parse("S[(2, 128, 512) : (512@F, 1@P, 1@F)]")
    for row, column in itertools.product(range(256), range(0, 512, 37)):
        place = one(layout, row, column, shape=(256, 512))
        assert (place["P"], place["F"]) == (row % 128, row // 128 * 512 + column)
    assert layout == named.trainium("PF", (256, 512))
    assert layout.is_injective() and layout.covers({"P": 128, "F": 1024})


def test_figure_2_tensor_memory():
    """256 by 256 over 128 lanes: 256 columns for the upper half, 256 for the lower."""
    layout = Layout.parse("S[(2, 128, 256) : (256@TCol, 1@TLane, 1@TCol)]")
    for row, column in itertools.product(range(0, 256, 5), range(0, 256, 7)):
        place = one(layout, row, column, shape=(256, 256))
        assert (place["TLane"], place["TCol"]) == (row % 128, row // 128 * 256 + column)
    assert layout.is_injective() and layout.covers({"TLane": 128, "TCol": 512})
    half = named.tmem("D", 256)
    assert half.tile(Layout.parse("S[2 : 1@TCol]"), (2, 1), (128, 256)).equivalent(layout)


# ---- 3.1 and 3.2: the programs -----------------------------------------------------------------------------------


def test_figure_4_the_thread_s_part_of_a_copy():
    """C[16:32, 64:128] over 128 threads, two vectors of four each: (2, 4) : (4, 1) + (tx//8)*128 + (tx%8)*8 + 2112."""
    whole = Layout.parse("S[(32, 128) : (128, 1)]")
    region = whole.slice((32, 128), [(16, 32), (64, 128)])
    grouped, seps = region.group((16, 8, 2, 4))
    assert str(grouped) == "S[(16, 8, 2, 4) : (128, 8, 4, 1)] + 2112" and seps == [0, 1, 2, 3, 4]
    for tx in range(128):
        part = grouped.slice((16, 8, 2, 4), [(tx // 8, tx // 8 + 1), (tx % 8, tx % 8 + 1), (0, 2), (0, 4)])
        expected = Layout([Iter(2, 4, "m"), Iter(4, 1, "m")], [], {"m": tx // 8 * 128 + tx % 8 * 8 + 2112})
        assert part.group((2, 4))[0] == expected
        assert [addresses(part, (8,))[k] for k in range(8)] == [
            128 * (16 + tx // 8) + 64 + tx % 8 * 8 + k for k in range(8)
        ]


def test_figure_4_with_the_thread_a_variable():
    """The same slice where the thread isn't known: its offset is an expression of row tx // 8 and column tx % 8."""
    row, column = tirx.Var("row", "int32"), tirx.Var("column", "int32")
    part = Layout.parse("S[(16, 8, 2, 4) : (128, 8, 4, 1)] + 2112")
    offset = one(part, row, column, 0, 0, shape=(16, 8, 2, 4))["m"]
    for tx in range(128):
        assert eval(str(offset), {"row": tx // 8, "column": tx % 8}) == tx // 8 * 128 + tx % 8 * 8 + 2112


def test_figure_5_the_registers_of_a_block_as_one_tensor():
    """The same copy as one tensor: thread i has row i // 8 and the eight columns from i % 8 * 8 on in its registers."""
    registers = Layout.parse("S[(16, 8, 8) : (8@tx, 1@tx, 1)]")
    memory = Layout.parse("S[(32, 128) : (128, 1)]").slice((32, 128), [(16, 32), (64, 128)])
    for row, column in np.ndindex(16, 64):
        place = one(registers, row, column, shape=(16, 64))
        assert (place["tx"], place["m"]) == (row * 8 + column // 8, column % 8)
        thread = place["tx"] // 8 * 128 + place["tx"] % 8 * 8 + 2112  # figure 4's offset of this thread
        assert one(memory, row, column, shape=(16, 64))["m"] == thread + place["m"]
    assert registers.is_injective() and registers.covers({"tx": 128, "m": 8})


def test_figure_7_a_stride_without_an_axis_is_on_m():
    D = [Iter(8, 4, "lane_id"), Iter(2, 1, "warp_id"), Iter(4, 1, "lane_id"), Iter(2, 1, "m")]
    layout = Layout(D, R=[Iter(2, 4, "warp_id")], O={"warp_id": 5})
    text = "S[(8, 2, 4, 2) : (4@lane_id, 1@warp_id, 1@lane_id, 1)] + R[2 : 4@warp_id] + 5@warp_id"
    assert Layout.parse(text) == layout and str(layout) == text
    for x in range(128):
        figure_2 = {(p["lane"], p["warp"], p["reg"]) for p in Layout.parse(TENSOR_CORE).apply(x)}
        assert {(p["lane_id"], p["warp_id"], p["m"]) for p in layout.apply(x)} == figure_2


def test_figure_8_reduce_scatter_signature():
    """Four addends of 64 by 64, one a GPU, and their sum with 16 rows a GPU: what goes between is a reduce-scatter."""
    addends, total = (
        Layout.parse("S[(4, 64, 64) : (1@gpuid, 64, 1)]"),
        Layout.parse("S[(4, 16, 64) : (1@gpuid, 64, 1)]"),
    )
    mesh = Mesh({"gpuid": 4})
    assert addends.equivalent(Layout.partial((64, 64), mesh, "gpuid"))
    assert total == Layout.sharded((64, 64), mesh, {0: "gpuid"})
    assert total.local_shape((64, 64), mesh) == (16, 64)
    plan = plan_redistribution(addends, total, mesh, "float32", (64, 64))
    assert [(step.kind, step.axes, step.cut) for step in plan.steps] == [("reduce_scatter", ("gpuid",), 0)]
    assert plan.bytes == 3 * 16 * 64 * 4


# ---- 3.3 and 3.4: the operations ---------------------------------------------------------------------------------


def test_section_3_3_block_layout():
    """(2, 3) : (3, 1) by (8, 8) : (8, 1) is a matrix of 16 by 24 in 2 by 3 tiles of 8 by 8 elements."""
    a, b = Layout.parse("S[(2, 3) : (3, 1)]"), Layout.parse("S[(8, 8) : (8, 1)]")
    blocks = b.tile(a, (2, 3), (8, 8))
    assert str(blocks) == "S[(2, 8, 3, 8) : (192, 8, 64, 1)]"
    grid = np.arange(16 * 24).reshape(2, 3, 8, 8)  # tiles one after the other, row-major in themselves
    assert (addresses(blocks, (16, 24)) == grid.transpose(0, 2, 1, 3).reshape(16, 24)).all()


def test_departure_3_3_the_first_factor_is_the_grid():
    """The text has the first factor for the tile, and 8 by 8 tiles of 2 by 3: that is the product the other way round.

    By the definition of the product B, the second, places what is inside of a tile.
    """
    a, b = Layout.parse("S[(2, 3) : (3, 1)]"), Layout.parse("S[(8, 8) : (8, 1)]")
    other = a.tile(b, (8, 8), (2, 3))
    assert str(other) == "S[(8, 2, 8, 3) : (48, 3, 6, 1)]"
    grid = np.arange(16 * 24).reshape(8, 8, 2, 3)
    assert (addresses(other, (16, 24)) == grid.transpose(0, 2, 1, 3).reshape(16, 24)).all()
    assert not other.equivalent(b.tile(a, (2, 3), (8, 8)))


def test_section_3_3_slice():
    layout = Layout.parse("S[(2, 8, 3, 8) : (192, 8, 64, 1)]")
    part = layout.slice((16, 24), [(0, 8), (8, 24)])
    assert str(part) == "S[(8, 2, 8) : (8, 64, 1)] + 64"
    assert (addresses(part, (8, 16)) == addresses(layout, (16, 24))[:8, 8:]).all()


def test_section_3_4_shared_memory_is_a_tile_of_copy_atoms():
    """A shared tile of 64 by 128 halves in boxes of 8 rows of 128 bytes: the tiler places box after box."""
    box, tiler = Layout.parse("S[(8, 64) : (64, 1)]"), Layout.parse("S[(8, 2) : (1, 8)]")
    shared = Layout.parse("S[(64, 2, 64) : (64, 4096, 1)]")
    assert box.is_tile_inner(shared, (64, 128), (8, 64)) == tiler
    assert box.is_tile_inner(Layout.parse("S[(64, 128) : (128, 1)]"), (64, 128), (8, 64)) is None
    # In global memory the rows of a box are apart, which is a direct sum with what box it is.
    rows = Layout.parse("S[(8, 64) : (128, 1)]")
    found = rows.is_direct_sum_right(Layout.parse("S[(64, 128) : (128, 1)]"), (8, 8, 2, 64), (8, 64))
    assert found == Layout.parse("S[(8, 2) : (1024, 64)]")


# ---- F.4, G and H ------------------------------------------------------------------------------------------------

QUADRANTS, SQUARE = Layout.parse("S[(2, 2) : (8, 2)]"), Layout.parse("S[(2, 2) : (4, 1)]")


def test_appendix_f_4_a_direct_sum_is_contiguous():
    assert sorted(addresses(SQUARE, (2, 2)).flat) == [0, 1, 4, 5]
    assert sorted(addresses(QUADRANTS, (2, 2)).flat) == [0, 2, 8, 10]
    total = SQUARE.direct_sum(QUADRANTS, (2, 2), (2, 2))
    assert total == Layout.parse("S[16 : 1]")
    assert (addresses(total, (4, 4)) == np.arange(16).reshape(4, 4)).all()
    assert SQUARE.is_direct_sum_right(total, (2, 2, 2, 2), (2, 2)).equivalent(QUADRANTS)
    assert QUADRANTS.is_direct_sum_left(total, (2, 2, 2, 2), (2, 2)).equivalent(SQUARE)


def test_departure_f_4_no_digits_are_exchanged():
    """Interleaved by F.2, rank by rank, strides are 8, 4, 2, 1 as they are; 8, 2, 4, 1 would be another map."""
    other = Layout.parse("S[(2, 2, 2, 2) : (8, 2, 4, 1)]")
    assert not SQUARE.direct_sum(QUADRANTS, (2, 2), (2, 2)).equivalent(other)


def test_appendix_f_4_no_tile_of_the_square_is_contiguous():
    """Scaled by the span 6, C leaves of every point what SQUARE has modulo 6, and that is never 2 or 3."""
    contiguous = Layout.parse("S[16 : 1]")
    assert SQUARE.span("m") == 6
    assert {int(v) % 6 for v in addresses(SQUARE, (2, 2)).flat} == {0, 1, 4, 5}
    assert {v % 6 for v in range(16)} >= {2, 3}
    assert SQUARE.is_tile_inner(contiguous, (4, 4), (2, 2)) is None
    for p, q, start in itertools.product(range(-16, 17), range(-16, 17), range(-2, 3)):
        if p and q:
            tiled = SQUARE.tile(Layout([Iter(2, p, "m"), Iter(2, q, "m")], O={"m": start}), (2, 2), (2, 2))
            assert not tiled.equivalent(contiguous)


def test_appendix_f_4_a_compact_square_is_matched_by_a_tile():
    compact = Layout.parse("S[(2, 2) : (2, 1)]")
    tiles = Layout.parse("S[(2, 2, 2, 2) : (8, 2, 4, 1)]")
    assert compact.is_tile_inner(tiles, (4, 4), (2, 2)).equivalent(Layout.parse("S[(2, 2) : (2, 1)]"))


def test_appendix_g_a_layout_that_is_not_bit_linear():
    """24 by 24, column-major: a function linear over bits would have f(1 ^ 2) = f(1) ^ f(2)."""
    layout = Layout.parse("S[(24, 24) : (1, 24)]")
    f = [one(layout, x, shape=(576,))["m"] for x in range(4)]
    assert f == [0, 24, 48, 72] and f[1] ^ f[2] == 40 != f[1 ^ 2]
    with pytest.raises(LayoutError, match=r"a linear layout has powers of two as extents and strides, .* has 24 : 1"):
        to_triton(layout, (24, 24))


@pytest.mark.parametrize(("m", "n", "k"), [(128, 512, 128), (64, 512, 128), (128, 256, 32)])
def test_appendix_h_tiles_of_the_tensor_engine(m, n, k):
    """C[M, N] = A[K, M]^T B[K, N]: the contraction of A and B on the partitions, so is M of C; the rest along F."""
    a, b, c = named.trainium("PF", (k, m)), named.trainium("PF", (k, n)), named.trainium("PF", (m, n))
    for layout, (across, along) in ((a, (k, m)), (b, (k, n)), (c, (m, n))):
        assert layout.project(["P"]).equivalent(Layout([Iter(across, 1, "P")]))
        assert layout.project(["F"]).equivalent(Layout([Iter(along, 1, "F")]))
        assert one(layout, across - 1, along - 1, shape=(across, along)) == Coordinate(
            {"P": across - 1, "F": along - 1}
        )
        assert layout.span("P") <= 128 and layout.span("F") <= 512


def test_departure_h_the_limit_of_512_is_that_of_n():
    """ "128x128x512 (MxNxK)" would put K = 512 on 128 partitions; the free dimension N is what has 512."""
    k = named.trainium("PF", (512, 64))
    assert k.span("P") == 128 and k.project(["P"]).size() < 512 and k.span("F") == 4 * 64
    with pytest.raises(LayoutError, match="the dimensions marked P have 512 elements"):
        named.trainium("PP", (512, 1))
