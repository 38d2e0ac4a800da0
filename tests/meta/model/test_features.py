"""What the cost model is told of a candidate: read off schedules, beside counting every iteration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tvm import s_tir
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe.analysis.annotations import TILE
from tvm_axe.layout import Mesh
from tvm_axe.lower import lower
from tvm_axe.lower.cost import features_of_program
from tvm_axe.meta.mesh.seeds import sharings
from tvm_axe.meta.model.features import PER_STORE, AxeFeatures, context_for, own_names
from tvm_axe.meta.model.features.extractor import columns_of
from tvm_axe.meta.model.features.gpu import bank_conflict, transactions
from tvm_axe.meta.model.features.locality import CAPACITIES, hot_nest
from tvm_axe.meta.model.features.nest import nests, shared_loops
from tvm_axe.programs import PROGRAMS
from tvm_axe.records.database import normalize
from tvm_axe.records.folders import MESH
from tvm_axe.schedule import tile_kernel

CPU = Target({"kind": "llvm", "mcpu": "x86-64-v4", "num-cores": 3})
GPU = Target({"kind": "cuda", "arch": "sm_90a"})


def blocked(func, rows=8, vectors=2, panel=True):
    """A matmul in register tiles of rows x vectors x 16, in parallel over blocks of rows, with B's panel copied."""
    sch = s_tir.Schedule(normalize(func))
    block = sch.get_sblock("mm_rf")
    copy = sch.cache_read(block, 1, "global") if panel else None
    i, j, k = sch.get_loops(block)
    io, ii = sch.split(i, [None, rows])
    jo, ji, jv = sch.split(j, [None, vectors, 16])
    sch.reorder(jo, io, k, ii, ji, jv)
    sch.parallel(jo)
    if copy is not None:
        sch.compute_at(copy, jo)
    sch.unroll(ii)
    sch.unroll(ji)
    sch.vectorize(jv)
    sch.decompose_reduction(block, k)
    return sch


def columns(sch, target=CPU, needed=None):
    found = hot_nest(nests(sch.mod)).iterations if needed is None else needed
    return columns_of(sch.mod, found, target)


def power(value):
    """What a column that holds log2(1 + x) says x is."""
    return 2**value - 1


def test_loops_and_accesses_are_read_off_the_schedule(matmul):
    found = nests(blocked(matmul(32, 64, 24)).mod)
    assert [nest.name for nest in found] == ["W_global", "mm_rf_init", "mm_rf_update"]
    copy, _, hot = found
    assert hot is hot_nest(found)
    assert [loop.kind for loop in hot.loops] == ["parallel", "serial", "serial", "unrolled", "unrolled", "vectorized"]
    assert (hot.iterations, hot.reduces, copy.reduces) == (32 * 64 * 24, True, False)
    assert shared_loops(copy, hot) == 1
    by_name = {(a.buffer, a.written): a for a in hot.accesses}
    assert [by_name["A", False].stride(n) for n in range(6)] == [0, 8 * 24, 1, 24, 0, 0]
    assert [by_name["W_global", False].stride(n) for n in range(6)] == [32, 0, 64, 0, 16, 1]
    assert [by_name["C", True].stride(n) for n in range(6)] == [32, 8 * 64, 0, 64, 16, 1]


@pytest.mark.parametrize("seed", range(6))
def test_what_loops_touch_is_what_running_them_touches(matmul, seed):
    """Tiles of random sizes, which divide or are masked: the sizes agree with the set of all elements."""
    random = np.random.default_rng(seed)
    shape = [int(n) for n in random.integers(2, 9, 3)]
    sch = s_tir.Schedule(normalize(matmul(*shape)))
    loops = sch.get_loops(sch.get_sblock("mm_rf"))
    factors = [int(random.choice([f for f in range(1, n + 1) if n % f == 0])) for n in shape]
    halves = [sch.split(loop, [None, factor]) for loop, factor in zip(loops, factors)]
    order = [half for pair in halves for half in pair]
    random.shuffle(order)
    sch.reorder(*order)
    (nest,) = nests(sch.mod)
    for access, level in itertools.product(nest.accesses, range(len(nest.loops) + 1)):
        inside = nest.inside(level)
        points = [dict(zip(inside, at)) for at in itertools.product(*map(range, inside.values()))]
        touched = {
            tuple(sum(steps.get(n, 0) * at for n, at in point.items()) for steps in access.steps) for point in points
        }
        assert access.touched(inside) == len(touched)


def test_the_inner_tile_the_panel_and_the_balance(matmul):
    found = columns(blocked(matmul(32, 128, 24)))
    assert found["accumulators"] == 8 * 2
    assert found["loads_each"] == pytest.approx((8 / 16 + 2) / 16)  # A's elements count as parts of vectors
    assert power(found["pieces"]) == pytest.approx(4)
    assert found["balance"] == pytest.approx(4 / 6)  # 4 pieces on 3 cores take two rounds of 3
    assert power(found["panels"]) == pytest.approx(24 * 32 * 4)
    assert found["refills"] == 1
    assert columns(blocked(matmul(32, 128, 24), panel=False))["panels"] == 0
    assert columns(blocked(matmul(32, 128, 24), rows=4))["accumulators"] == 8


def test_rows_that_share_the_sets_of_a_cache(matmul):
    assert columns(blocked(matmul(32, 1024, 24)))["aliasing"] == 1
    assert columns(blocked(matmul(32, 1056, 24)))["aliasing"] == 0


def test_padding_is_waste(matmul):
    before = hot_nest(nests(normalize(matmul(30, 60, 24)))).iterations
    sch = s_tir.Schedule(normalize(matmul(30, 60, 24)))
    sch.pad_einsum(sch.get_sblock("mm_rf"), [8, 16, 1])
    assert columns(sch, needed=before)["waste"] == pytest.approx(32 * 64 / (30 * 60))


def test_a_larger_memory_fetches_less_and_blocks_save_traffic(matmul):
    size = 256
    naive = columns(s_tir.Schedule(normalize(matmul(size, size, size))))
    tiled = columns(blocked(matmul(size, size, size)))
    for found in (naive, tiled):
        traffic = [found[f"traffic_{capacity}"] for capacity in CAPACITIES]
        assert traffic == sorted(traffic, reverse=True)
    assert tiled["traffic_2048"] < naive["traffic_2048"]
    # All three matrices fit into the largest: each is fetched once.
    assert power(naive[f"traffic_{1 << 24}"]) == pytest.approx(64 * 3 * 4 * size**2 / size**3)


def test_what_only_a_kernels_annotations_say(matmul, target):
    """Two choices of a tile kernel look the same to upstream's features, and not to ours."""
    mod, candidates = normalize(matmul(100, 96, 64)), []
    for block_m in (32, 64):
        sch = s_tir.Schedule(mod)
        tile_kernel(sch, sch.get_sblock("mm_rf"), "matmul", block_m=block_m, block_n=32, block_k=64)
        candidates.append(ms.MeasureCandidate(sch, ms.arg_info.ArgInfo.from_entry_func(mod)))
    small, large = [rows.numpy() for rows in AxeFeatures().extract_from(context_for(mod, target), candidates)]
    np.testing.assert_array_equal(small[:-1], large[:-1])
    first, second = (dict(zip(own_names(), rows[-1, PER_STORE:])) for rows in (small, large))
    assert (first["tile_matmul"], first["tile_split_k_matmul"]) == (1, 0)
    assert [power(found["tile_block_m"]) for found in (first, second)] == pytest.approx([32, 64])
    assert [power(found["tile_blocks"]) for found in (first, second)] == pytest.approx([4 * 3, 2 * 3])
    assert [found["tile_waste"] for found in (first, second)] == pytest.approx([128 / 100, 128 / 100])
    assert power(first["tile_operands"]) == pytest.approx((32 + 32) * 64 * 4)


def test_a_product_of_a_tensor_with_itself():
    """A sum of squares, whose block reads one tensor."""

    @T.prim_func(s_tir=True)
    def squares(A: T.Buffer((8, 64), "float32"), C: T.Buffer((8,), "float32")):
        for i, k in T.grid(8, 64):
            with T.sblock("sum"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    C[vi] = T.float32(0)
                C[vi] = C[vi] + A[vi, vk] * A[vi, vk]

    sch = s_tir.Schedule(normalize(squares))
    for name, value in {TILE: "matmul", f"{TILE}.block_m": 8, f"{TILE}.block_n": 8, f"{TILE}.block_k": 64}.items():
        sch.annotate(sch.get_sblock("sum"), name, value)
    found = columns(sch)
    assert (power(found["tile_blocks"]), power(found["tile_steps"])) == pytest.approx((8, 1))  # i is a batch


@pytest.mark.parametrize("words", range(65))
def test_bank_conflicts_as_counted_bank_by_bank(words):
    banks = [set() for _ in range(32)]
    for lane in range(32):
        banks[lane * words % 32].add(lane * words)
    assert bank_conflict(4 * words, 4) == max(map(len, banks))


@pytest.mark.parametrize("size", [2, 4, 16])
@pytest.mark.parametrize("stride", [0, 2, 4, 8, 16, 32, 64, 4096])
def test_transactions_as_counted_segment_by_segment(stride, size):
    segments = {byte // 32 for lane in range(32) for byte in range(lane * stride, lane * stride + size)}
    assert transactions(stride, size) == len(segments)


def test_what_a_gpus_blocks_hold(matmul):
    """A block of 64 x 64 results, 16 x 16 threads with 4 x 4 each, and A's 64 x 16 tile in shared memory."""
    sch = s_tir.Schedule(normalize(matmul(512, 512, 256)))
    block = sch.get_sblock("mm_rf")
    tile, result = sch.cache_read(block, 0, "shared"), sch.cache_write(block, 0, "local")
    i, j, k = sch.get_loops(block)
    by, ty, ii = sch.split(i, [None, 16, 4])
    bx, tx, ji = sch.split(j, [None, 16, 4])
    ko, ki = sch.split(k, [None, 16])
    sch.reorder(by, bx, ty, tx, ko, ki, ii, ji)
    for loop, thread in ((by, "blockIdx.y"), (bx, "blockIdx.x"), (ty, "threadIdx.y"), (tx, "threadIdx.x")):
        sch.bind(loop, thread)
    sch.reverse_compute_at(result, tx)
    sch.compute_at(tile, ko)
    fused = sch.fuse(*sch.get_loops(tile)[-2:])
    _, y, x = sch.split(fused, [None, 16, 16])
    sch.bind(y, "threadIdx.y")
    sch.bind(x, "threadIdx.x")
    found = columns(sch, GPU)
    assert power(found["gpu_threads"]) == pytest.approx(256)
    assert power(found["gpu_blocks"]) == pytest.approx(64)
    assert power(found["gpu_shared_bytes"]) == pytest.approx(64 * 16 * 4)
    assert power(found["gpu_local_bytes"]) == pytest.approx(16 * 4)
    assert found["gpu_resident"] == 5  # 64 Ki registers for 256 threads of 32 + 16
    assert found["gpu_last_wave"] == pytest.approx(64 / (132 * 5))
    assert all(value == 0 for name, value in columns(sch, CPU).items() if name.startswith("gpu_"))


def test_what_a_program_sends():
    mesh = Mesh({"tp": 2})
    program = next(sharings(PROGRAMS["mlp"](mesh).func, mesh)).mod["main"]
    alone = columns_of(IRModule({"main": program}), 1.0, CPU)
    found = columns_of(IRModule({"main": program.with_attr(MESH, "tp=2")}), 1.0, CPU)
    want = features_of_program(lower(program, mesh))
    assert want["bytes"] > 0
    for name, value in want.items():
        if name != "link_seconds":
            assert power(found[f"mesh_{name}"]) == pytest.approx(value)
            assert alone[f"mesh_{name}"] == 0
    assert power(found["mesh_link_us"]) == pytest.approx(1e6 * want["link_seconds"])


def test_a_candidate_that_upstream_cannot_lower_costs_its_own_rows_only(matmul, target):
    mod = normalize(matmul(16, 32, 8))
    candidates = [
        ms.MeasureCandidate(blocked(matmul(16, 32, 8), rows), ms.arg_info.ArgInfo.from_entry_func(mod))
        for rows in (1, 2, 4, 8, 16)
    ]
    bad = candidates[3]
    extractor = AxeFeatures._cls()
    good = extractor.per_store

    class Picky:
        def extract_from(self, context, asked):
            if any(candidate.same_as(bad) for candidate in asked):
                raise RuntimeError("C_local has duplicate definitions")
            return good.extract_from(context, asked)

    context = context_for(mod, target)
    whole = [rows.numpy() for rows in extractor.extract_from(context, candidates)]
    extractor.per_store = Picky()
    found = [rows.numpy() for rows in extractor.extract_from(context, candidates)]
    for n, (got, want) in enumerate(zip(found, whole)):
        if n == 3:
            assert got.shape == (2, want.shape[1])
            assert np.isnan(got[:-1]).all()
            np.testing.assert_array_equal(got[-1], want[-1])
        else:
            np.testing.assert_array_equal(got, want)


def test_rows_are_upstreams_and_one_of_ours(matmul, target):
    mod = normalize(matmul(16, 32, 8))
    candidate = ms.MeasureCandidate(blocked(matmul(16, 32, 8)), ms.arg_info.ArgInfo.from_entry_func(mod))
    context = context_for(mod, target)
    (upstream,) = ms.feature_extractor.PerStoreFeature().extract_from(context, [candidate])
    (without,) = AxeFeatures(own=False).extract_from(context, [candidate])
    (rows,) = AxeFeatures().extract_from(context, [candidate])
    np.testing.assert_array_equal(without.numpy(), upstream.numpy())
    np.testing.assert_array_equal(rows.numpy()[:-1, :PER_STORE], upstream.numpy())
    assert np.isnan(rows.numpy()[:-1, PER_STORE:]).all()
    assert np.isnan(rows.numpy()[-1, :PER_STORE]).all()
    own = rows.numpy()[-1, PER_STORE:]
    assert np.isfinite(own).all()
    assert list(own) == list(columns_of(candidate.sch.mod, 16 * 32 * 8, target).values())
    assert tuple(columns_of(candidate.sch.mod, 1.0, GPU)) == own_names()
