"""Design spaces of GPUs: which kernels they have and in what order, what is refused before it is compiled, replay."""

import itertools
import json
import logging
import random

import pytest
import tvm
from tvm import s_tir
from tvm.s_tir import meta_schedule as ms
from tvm.script import tirx as T

from tvm_axe import _tvm
from tvm_axe.errors import LowerError, TileError
from tvm_axe.lower.tiles import overlaps, with_tile_kernels
from tvm_axe.machines.target import resolve_target
from tvm_axe.meta.spaces.cuda import Fits, fits
from tvm_axe.meta.spaces.space import space_for
from tvm_axe.records.database import normalize
from tvm_axe.schedule.offers import offers
from tvm_axe.schedule.tiles import choices_in
from tvm_axe.tile import lowering
from tvm_axe.tile.kernels import KERNELS, matmul_for

HOPPER = resolve_target({"kind": "cuda", "arch": "sm_90a"})


def product(m, n, k, dtype="bfloat16"):
    """C = A B^T, summed in float32 and rounded once."""

    @T.prim_func(s_tir=True)
    def main(A: T.Buffer((m, k), dtype), B: T.Buffer((n, k), dtype), C: T.Buffer((m, n), dtype)):
        D = T.sblock_alloc_buffer((m, n), "float32")
        for i, j, l in T.grid(m, n, k):
            with T.sblock("product"):
                vi, vj, vl = T.axis.remap("SSR", [i, j, l])
                with T.init():
                    D[vi, vj] = T.float32(0)
                D[vi, vj] = D[vi, vj] + T.cast(A[vi, vl], "float32") * T.cast(B[vj, vl], "float32")
        for i, j in T.grid(m, n):
            with T.sblock("round"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = T.cast(D[vi, vj], dtype)

    return main


@T.prim_func(s_tir=True)
def with_sums(A: T.Buffer((64, 32), "float32"), B: T.Buffer((64, 32), "float32"), sums: T.Buffer((64,), "float32")):
    """A product and a sum of its rows, which no tile kernel computes."""
    C = T.sblock_alloc_buffer((64, 64), "float32")
    for i, j, k in T.grid(64, 64, 32):
        with T.sblock("product"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vj, vk]
    for i, j in T.grid(64, 64):
        with T.sblock("sum"):
            vi, vj = T.axis.remap("SR", [i, j])
            with T.init():
                sums[vi] = T.float32(0)
            sums[vi] = sums[vi] + C[vi, vj]


@T.prim_func(s_tir=True)
def rows(A: T.Buffer((64, 4096), "float32"), sums: T.Buffer((64,), "float32")):
    for i, j in T.grid(64, 4096):
        with T.sblock("sum"):
            vi, vj = T.axis.remap("SR", [i, j])
            with T.init():
                sums[vi] = T.float32(0)
            sums[vi] = sums[vi] + A[vi, vj]


def search(func, count):
    """The schedules that a search measures first."""
    mod = normalize(func)
    strategy = ms.search_strategy.EvolutionarySearch(population_size=16, init_min_unmeasured=8, genetic_num_iters=1)
    space = space_for(mod["main"], HOPPER)
    context = _tvm.tune_context(mod, HOPPER, space, strategy, "main", 1, 1, logging.getLogger("test"))
    spaces, database = context.generate_design_space(), ms.database.MemoryDatabase()
    database.commit_workload(mod)
    context.pre_tuning(count, count, spaces, database, ms.cost_model.RandomModel())
    return [candidate.sch for candidate in context.generate_measure_candidates()]


def kernels_of(schedules):
    return [choice.kernel for sch in schedules for choice in choices_in(sch.mod["main"])]


@pytest.mark.parametrize("m", [16, 128, 1000])
def test_every_kernel_of_a_product_is_offered_the_default_one_first(m):
    func = product(m, 4096, 14336)
    first = matmul_for(HOPPER, {"m": m, "n": 4096, "k": 14336, "dtype": "bfloat16"})
    spaces = space_for(func, HOPPER).generate_design_space(normalize(func))
    kernels = kernels_of(spaces)
    assert kernels[0] == first.name
    assert kernels[: len(kernels) // 2] == kernels[len(kernels) // 2 :]  # with defaults, then with samples
    skinny = {"skinny_matmul"} if m < 256 else set()  # it takes a row of A a column
    assert {*kernels} == {"matmul", "split_k_matmul", "stream_k_matmul"} | skinny
    sampled = [any(inst.kind.name == "SampleCategorical" for inst in space.trace.insts) for space in spaces]
    assert sampled == sorted(sampled)
    (chosen,) = choices_in(spaces[0].mod["main"])
    (offer,) = [offer for offer in offers(s_tir.Schedule(func), HOPPER) if offer.kernel == first.name]
    assert chosen.parameters == {name: values[0] for name, values in offer.space.items()}


@pytest.mark.parametrize("func", [rows, with_sums])
def test_upstreams_rules_for_what_no_kernel_computes(func):
    found = search(func, 4)
    assert found
    for sch in found:
        assert "threadIdx.x" in sch.mod.script() and not choices_in(sch.mod["main"])


def test_what_is_refused_cannot_be_compiled():
    draws, refused, passed = random.Random(0), 0, []
    for name, m in itertools.product(("matmul", "split_k_matmul", "skinny_matmul"), (48, 512)):
        problem = {"m": m, "n": 1024, "k": 4096, "dtype": "bfloat16"}
        if name == "skinny_matmul" and m == 512:
            continue
        space = KERNELS[name].parameters(HOPPER, problem)
        for _ in range(12):
            values = {key: draws.choice(candidates) for key, candidates in space.items()}
            try:
                for program in KERNELS[name].recipe(HOPPER, problem, **values).programs:
                    lowering.plan(program, HOPPER)
                compiles = True
            except TileError:
                compiles = False
            if fits(values, problem, HOPPER):
                passed.append(compiles)
            else:
                refused += 1
                assert not compiles, values
    assert refused > 5
    assert sum(passed) >= 0.9 * len(passed)


@pytest.mark.parametrize(
    ("rows", "columns", "fit"), [(192, 192, True), (192, 208, False), (256, 192, True), (256, 224, False)]
)
def test_accumulators_fit_the_registers(rows, columns, fit):
    """Of three warpgroups one instruction's, as ptxas insists, and of two what setmaxnreg leaves."""
    tiles = {"block_m": rows, "block_n": columns, "block_k": 64, "stages": 2}
    assert fits(tiles, {"m": 4096, "n": 4096, "k": 4096, "dtype": "bfloat16"}, HOPPER) == fit


def test_schedules_of_a_search_fit_lower_and_replay():
    found, lowers = search(product(128, 512, 1024), 6), 0
    assert len(found) >= 4
    postproc = Fits._cls(offers(s_tir.Schedule(product(128, 512, 1024)), HOPPER), HOPPER)
    for sch in found:
        assert postproc.apply(sch)
        stored = json.loads(json.dumps(_tvm.plain(sch.trace.as_json())))
        again = s_tir.Schedule(normalize(product(128, 512, 1024)))
        s_tir.schedule.Trace.apply_json_to_schedule(stored, again)
        tvm.ir.assert_structural_equal(again.mod, sch.mod)
        try:
            lowered = with_tile_kernels(sch.mod, HOPPER)
        except LowerError as error:
            assert "shared memory" in str(error)  # with what is on its way out, which `fits` doesn't count
            continue
        lowers += 1
        assert overlaps(lowered) and not choices_in(lowered["main"])
    assert lowers >= len(found) - 2


@pytest.mark.parametrize(
    "m, n, rows, waves, columns",
    [(64, 6144, 64, 1, 48), (128, 5120, 64, 1, 80), (512, 10240, 128, 2, 160), (8, 28672, 64, 2, 112)],
)
def test_widths_that_fill_whole_waves_are_candidates(m, n, rows, waves, columns):
    """Of tiles of so many rows the narrowest that need no more waves of blocks over an H200's 132 multiprocessors."""
    problem = {"m": m, "n": n, "k": 4096, "dtype": "bfloat16"}
    assert columns in KERNELS["matmul"].parameters(HOPPER, problem)["block_n"]
    blocks, narrower = (-(-m // rows) * -(-n // width) for width in (columns, columns - 8))
    assert blocks <= waves * 132 < narrower
    ampere = resolve_target({"kind": "cuda", "arch": "sm_80"})
    assert columns % 32 == 0 or columns not in KERNELS["matmul"].parameters(ampere, problem)["block_n"]
