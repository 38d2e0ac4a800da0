"""Named layouts against the formulas of the PTX ISA, written here as it writes them, over every lane and register."""

import numpy as np
import pytest

from tvm_axe.layout import LayoutError, Mesh, named


def placed(layout, shape):
    """Where each element is: the one point of its index."""
    found = {}
    for index in np.ndindex(*shape):
        (point,) = layout.apply(*map(int, index), shape=shape)
        found[tuple(map(int, index))] = point
    return found


def check_fragment(layout, shape, threads, registers, element, axis="laneid"):
    """Each thread's register i holds the element that the formula says, and there are no other places."""
    places = placed(layout, shape)
    assert threads * registers == np.prod(shape) == len(places)
    for thread in range(threads):
        for i in range(registers):
            point = places[element(thread, i)]
            assert dict(point) == {a: v for a, v in ((axis, thread), ("m", i)) if v}


def test_mma_m16n8k16_f16():
    def a(laneid, i):
        group_id, thread_id_in_group = laneid >> 2, laneid % 4
        row = group_id if 0 <= i < 2 or 4 <= i < 6 else group_id + 8
        col = thread_id_in_group * 2 + (i & 0x1) + (0 if i < 4 else 8)
        return row, col

    def b(laneid, i):
        group_id, thread_id_in_group = laneid >> 2, laneid % 4
        row = thread_id_in_group * 2 + (i & 0x1) + (0 if i < 2 else 8)
        return row, group_id

    check_fragment(named.mma_a("float16", 16), (16, 16), 32, 8, a)
    check_fragment(named.mma_a("bfloat16", 16), (16, 16), 32, 8, a)
    check_fragment(named.mma_b("float16", 16), (16, 8), 32, 4, b)


def accumulator(laneid, i):
    group_id, thread_id_in_group = laneid >> 2, laneid % 4
    return (group_id if i < 2 else group_id + 8), thread_id_in_group * 2 + (i & 0x1)


def test_mma_accumulator():
    check_fragment(named.mma_c(), (16, 8), 32, 4, accumulator)


def test_mma_m16n8k8_f16():
    def a(laneid, i):
        group_id, thread_id_in_group = laneid >> 2, laneid % 4
        return (group_id if i in (0, 1) else group_id + 8), thread_id_in_group * 2 + (i & 0x1)

    check_fragment(named.mma_a("float16", 8), (16, 8), 32, 4, a)
    check_fragment(named.mma_b("float16", 8), (8, 8), 32, 2, lambda lane, i: (lane % 4 * 2 + i, lane >> 2))


def test_mma_m16n8k8_tf32():
    def a(laneid, i):
        group_id, thread_id_in_group = laneid >> 2, laneid % 4
        row = group_id if i in (0, 2) else group_id + 8
        col = thread_id_in_group if i in (0, 1) else thread_id_in_group + 4
        return row, col

    check_fragment(named.mma_a("float32", 8), (16, 8), 32, 4, a)
    check_fragment(named.mma_b("float32", 8), (8, 8), 32, 2, lambda lane, i: (lane % 4 + 4 * i, lane >> 2))


def test_mma_m16n8k32_s8_and_m16n8k64_s4():
    def a8(laneid, i):
        group_id, thread_id_in_group = laneid >> 2, laneid % 4
        row = group_id if 0 <= i < 4 or 8 <= i < 12 else group_id + 8
        return row, thread_id_in_group * 4 + (i & 0x3) + (0 if i < 8 else 16)

    def a4(laneid, i):
        group_id, thread_id_in_group = laneid >> 2, laneid % 4
        row = group_id if 0 <= i < 8 or 16 <= i < 24 else group_id + 8
        return row, thread_id_in_group * 8 + (i & 0x7) + (0 if i < 16 else 32)

    def b4(laneid, i):
        return laneid % 4 * 8 + (i & 0x7) + (0 if i < 8 else 32), laneid >> 2

    check_fragment(named.mma_a("int8", 32), (16, 32), 32, 16, a8)
    check_fragment(named.mma_a("int4", 64), (16, 64), 32, 32, a4)
    check_fragment(named.mma_b("int4", 64), (64, 8), 32, 16, b4)


@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize("trans", [False, True])
def test_ldmatrix(num, trans):
    # Thread 4 * r + c has elements 2 * c and 2 * c + 1 of row r of each matrix, matrix j in register j.
    def element(laneid, i):
        matrix, half = divmod(i, 2)
        row, column = laneid // 4, laneid % 4 * 2 + half
        return (matrix, column, row) if trans else (matrix, row, column)

    check_fragment(named.ldmatrix(num, trans), (num, 8, 8), 32, 2 * num, element)


def test_four_matrices_are_the_multiplicand_a():
    # What ldmatrix.x4 is for: the quarters of A, down the columns first, are the registers of the fragment.
    loaded, a = placed(named.ldmatrix(4), (4, 8, 8)), placed(named.mma_a("float16", 16), (16, 16))
    for (j, row, column), point in loaded.items():
        assert a[row + 8 * (j % 2), column + 8 * (j // 2)] == point


@pytest.mark.parametrize("n", [8, 64, 256])
def test_wgmma_accumulator(n):
    def d(tid, i):
        warp, lane = divmod(tid, 32)
        row = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
        return row, 8 * (i // 4) + 2 * (lane % 4) + i % 2

    check_fragment(named.wgmma_c(n), (64, n), 128, n // 2, d, "tid_in_wg")


@pytest.mark.parametrize(("dtype", "packed"), [("float16", 2), ("float8_e4m3fn", 4), ("float32", 1)])
def test_wgmma_a_in_registers(dtype, packed):
    def a(tid, i):
        warp, lane = divmod(tid, 32)
        register, part = divmod(i, packed)
        row = 16 * warp + lane // 4 + 8 * (register % 2)
        return row, lane % 4 * packed + part + 4 * packed * (register // 2)

    check_fragment(named.wgmma_a(dtype), (64, 8 * packed), 128, 4 * packed, a, "tid_in_wg")


@pytest.mark.parametrize("swizzle", [128, 64, 32])
@pytest.mark.parametrize(("dtype", "size"), [("float16", 2), ("float32", 4), ("int8", 1)])
def test_wgmma_shared_memory(swizzle, dtype, size):
    # A panel of `swizzle` bytes a row; address bits 4 to 6 of it (5 or 4, for 64 or 32) XOR bits 7 to 9 (8 or 7).
    width = swizzle // size
    shape = (16, 2 * width)
    layout = named.wgmma_shared(shape, dtype, swizzle)
    flipped = {128: 0x70, 64: 0x30, 32: 0x10}[swizzle]
    seen = set()
    for (row, column), point in placed(layout, shape).items():
        panel, within = divmod(column, width)
        address = panel * shape[0] * swizzle + row * swizzle + within * size
        assert point["m"] * size == address ^ (address >> 3 & flipped)
        seen.add(point["m"])
    assert seen == set(range(16 * 2 * width))


@pytest.mark.parametrize("swizzle", [128, 64, 32])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_wgmma_shared_memory_is_the_compilers(swizzle, dtype):
    from tvm.backend.cuda.tile_primitive.tma_utils import mma_shared_layout

    from tvm_axe.layout.convert import from_tile_layout

    shape = (64, 128)
    theirs = from_tile_layout(mma_shared_layout(dtype, {128: 3, 64: 2, 32: 1}[swizzle], shape))
    assert named.wgmma_shared(shape, dtype, swizzle).equivalent(theirs)


def tmem_lane_and_column(datapath, row, column, columns):
    if datapath in "AD":
        return row, column
    if datapath in "CF":
        return row // 16 * 32 + row % 16, column
    parts, lanes = (4, 32) if datapath == "G" else (2, 64)
    return row + lanes * (column // (columns // parts)), column % (columns // parts)


@pytest.mark.parametrize(("datapath", "rows"), [*zip("ABCDEFG", (128, 64, 64, 128, 64, 64, 32))])
def test_tensor_memory(datapath, rows):
    from tvm.tirx.layout import tmem_datapath_layout

    from tvm_axe.layout.convert import from_tile_layout

    layout = named.tmem(datapath, 16)
    for (row, column), point in placed(layout, (rows, 16)).items():
        assert (point["TLane"], point["TCol"]) == tmem_lane_and_column(datapath, row, column, 16)
    assert layout.equivalent(from_tile_layout(tmem_datapath_layout(datapath, rows, 16)))


@pytest.mark.parametrize(
    ("dims", "shape"),
    [("PF", (128, 64)), ("FP", (4, 128)), ("PFF", (32, 3, 5)), ("FPPF", (2, 4, 8, 6)), ("PF", (384, 4))],
)
def test_trainium(dims, shape):
    from tvm.tirx.layout import TileLayout

    from tvm_axe.layout.convert import from_tile_layout

    layout = named.trainium(dims, shape)
    for index, point in placed(layout, shape).items():
        partition = free = 0
        for position, extent, mark in zip(index, shape, dims):
            if mark == "P":
                partition = partition * extent + position
            else:
                free = free * extent + position
        width = np.prod([extent for extent, mark in zip(shape, dims) if mark == "F"])
        assert point["P"] == partition % 128 and point["F"] == free + partition // 128 * width
    assert layout.equivalent(from_tile_layout(TileLayout.trainium(dims, shape)))


MESH = Mesh({"y": 2, "x": 3})


@pytest.mark.parametrize(
    ("spec", "held"),
    [
        ("S0S1", lambda y, x: (range(6 * y, 6 * y + 6), range(2 * x, 2 * x + 2))),
        ("S1S0", lambda y, x: (range(4 * x, 4 * x + 4), range(3 * y, 3 * y + 3))),
        ("S0R", lambda y, x: (range(6 * y, 6 * y + 6), range(6))),
        ("RS1", lambda y, x: (range(12), range(2 * x, 2 * x + 2))),
        ("S01R", lambda y, x: (range(2 * (3 * y + x), 2 * (3 * y + x) + 2), range(6))),
        ("S10R", lambda y, x: (range(2 * (2 * x + y), 2 * (2 * x + y) + 2), range(6))),
        ("RR", lambda y, x: (range(12), range(6))),
    ],
)
def test_a_matrix_on_a_mesh_of_two_axes(spec, held):
    layout = named.mesh_sharding(spec, (12, 6), MESH)
    for index in np.ndindex(12, 6):
        points = layout.apply(*map(int, index), shape=(12, 6))
        devices = {(point["y"], point["x"]): point["m"] for point in points}
        assert len(points) == len(devices)
        for y, x in np.ndindex(2, 3):
            rows, columns = held(y, x)
            inside = index[0] in rows and index[1] in columns
            assert ((y, x) in devices) == inside
            if inside:
                assert devices[y, x] == rows.index(index[0]) * len(columns) + columns.index(index[1])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: named.mma_a("float16", 32), "k must be 8 or 16 in mma.m16n8 of float16, not 32"),
        (lambda: named.mma_b("float64", 4), "dtype must have 4, 8, 16 or 32 bits to be a multiplicand"),
        (lambda: named.ldmatrix(3), "num must be 1, 2 or 4 matrices, not 3"),
        (lambda: named.wgmma_a("int4"), "dtype must have 8, 16 or 32 bits to be a multiplicand of wgmma"),
        (lambda: named.wgmma_c(12), "n must be a multiple of 8 from 8 to 256 in wgmma.m64n, not 12"),
        (lambda: named.wgmma_c(264), "not 264"),
        (lambda: named.wgmma_shared((8, 64), "float16", 16), "swizzle must be 128, 64 or 32 bytes, not 16"),
        (lambda: named.wgmma_shared((8, 32), "float16"), r"multiples of \(8, 64\) for a swizzle of 128 bytes"),
        (lambda: named.wgmma_shared((8, 64), "float16x3"), "dtype must have a power of two of bits"),
        (lambda: named.tmem("H", 8), "datapath must be one of A, B, C, D, E, F, G, not 'H'"),
        (lambda: named.tmem("G", 6), "columns must be a multiple of 4 in data path G, not 6"),
        (lambda: named.trainium("PQ", (2, 2)), r'dims must have a "P" or an "F" for each dimension of \(2, 2\)'),
        (lambda: named.trainium("PF", (130, 2)), "the dimensions marked P have 130 elements"),
        (lambda: named.trainium("PP", (16, 16)), "the dimensions marked P have 256 elements"),
        (lambda: named.mesh_sharding("S0X", (2, 2), MESH), 'spec must be terms "R" or "S" with digits'),
        (lambda: named.mesh_sharding("S2R", (2, 2), MESH), "names mesh axis 2, and mesh y=2,x=3 has 2 axes"),
        (lambda: named.mesh_sharding("S0S0", (2, 2), MESH), "mesh axis 'y' can cut one dimension"),
        (lambda: named.mesh_sharding("S0", (2, 2), MESH), "has 2 dimensions, and the placement cuts 1"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(LayoutError, match=message):
        call()
