"""On a GPU: candidates by upstream's rules and by tile kernels are measured, and faults cost themselves only."""

from __future__ import annotations

import pytest
from tvm import s_tir
from tvm.script import tirx as T

from tvm_axe.machines import resolve_target
from tvm_axe.meta.measure.reference import reference_for
from tvm_axe.meta.measure.runner import Runner
from tvm_axe.nests.kernels import choose
from tvm_axe.pipeline import build
from tvm_axe.records.database import normalize
from tvm_axe.schedule.offers import offers

N = 4096


@T.prim_func(s_tir=True)
def double(A: T.Buffer((N,), "float32"), B: T.Buffer((N,), "float32")):
    for i in range(N):
        with T.sblock("B"):
            vi = T.axis.spatial(N, i)
            B[vi] = A[vi] * T.float32(2)


@T.prim_func(s_tir=True)
def half_done(A: T.Buffer((N,), "float32"), B: T.Buffer((N,), "float32")):
    for i in T.thread_binding(N // 1024, thread="blockIdx.x"):
        for j in T.thread_binding(1024, thread="threadIdx.x"):
            with T.sblock("B"):
                vi = T.axis.spatial(N, i * 1024 + j)
                T.where(j < 512)
                B[vi] = A[vi] * T.float32(2)


@T.prim_func(s_tir=True)
def beyond(A: T.Buffer((N,), "float32"), B: T.Buffer((N,), "float32")):
    for i in T.thread_binding(N // 1024, thread="blockIdx.x"):
        for j in T.thread_binding(1024, thread="threadIdx.x"):
            with T.sblock("B"):
                vi = T.axis.spatial(N, i * 1024 + j)
                B[vi + 1073741824] = A[vi]  # 4 GiB away


@T.prim_func(s_tir=True)
def hangs(A: T.Buffer((N,), "float32"), B: T.Buffer((N,), "float32")):
    for i in T.thread_binding(N // 1024, thread="blockIdx.x"):
        for j in T.thread_binding(1024, thread="threadIdx.x"):
            with T.sblock("B"):
                vi = T.axis.spatial(N, i * 1024 + j)
                while B[vi] > T.float32(-1e30):
                    B[vi] = T.max(B[vi] + A[vi], T.float32(0))


def _bound(threads: int) -> s_tir.Schedule:
    sch = s_tir.Schedule(normalize(s_tir.renew_defs(double)))  # a schedule may change what it shares a body with
    outer, inner = sch.split(sch.get_loops(sch.get_sblock("B"))[0], [None, threads])
    sch.bind(outer, "blockIdx.x")
    sch.bind(inner, "threadIdx.x")
    return sch


def _tiles(matmul, m: int, n: int, k: int, count: int) -> list[s_tir.Schedule]:
    made = []
    for offer in offers(s_tir.Schedule(normalize(matmul(m, n, k, "bfloat16"))), resolve_target("cuda"))[:count]:
        made.append(s_tir.Schedule(normalize(matmul(m, n, k, "bfloat16"))))
        choose(made[-1], offer, False)
    return made


def test_everything_compiles_without_a_gpu(matmul, tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_AXE_CACHE", str(tmp_path))
    target = resolve_target("cuda:sm_90a")
    (tiled,) = _tiles(matmul, 128, 128, 64, 1)
    for mod in (_bound(256).mod, tiled.mod):
        build(mod, target)
    reference_for(normalize(double), target, build)
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 3  # a binary each, made by nvcc


@pytest.mark.gpu
def test_faults_cost_themselves_only(cuda, tmp_path):
    target = resolve_target("cuda")
    with Runner(target, tmp_path / "worker.log", timeout=10.0) as worker:
        untuned = worker.prepare(normalize(double))
        assert (untuned.seconds, untuned.failure) == (None, None)
        assert worker.conditions["input sets"] == 8
        faults = [normalize(func) for func in (half_done, beyond, hangs)]
        mods = [mod for fault in faults for mod in (fault, _bound(256).mod)]
        found = list(worker.measure_all(mods))
    assert [measured.failure for measured in found[1::2]] == [None] * 3
    assert all(measured.seconds > 0 for measured in found[1::2])
    assert "wrong result: argument 1 is off by" in found[0].failure
    # What an access to a null address is called depends on the driver: of an address space, or illegal.
    assert any(word in found[2].failure for word in ("illegal", "cudaErrorInvalidAddressSpace"))
    assert "no result within 10" in found[4].failure


@pytest.mark.gpu
def test_tile_kernels_are_measured(cuda, matmul, tmp_path):
    made = _tiles(matmul, 512, 1024, 768, 3)
    with Runner(resolve_target("cuda"), tmp_path / "worker.log", timeout=120.0) as worker:
        assert worker.prepare(normalize(matmul(512, 1024, 768, "bfloat16"))).failure is None
        found = list(worker.measure_all([sch.mod for sch in made]))
    assert [measured.failure for measured in found] == [None] * len(made)
    assert all(measured.seconds > 0 for measured in found)


@pytest.mark.gpu
def test_candidates_are_timed_in_turns(cuda, tmp_path):
    with Runner(resolve_target("cuda"), tmp_path / "worker.log", timeout=30.0) as worker:
        assert worker.prepare(normalize(double)).failure is None
        times = worker.in_turns([_bound(256).mod, _bound(64).mod], 3)
    assert [len(turns) for turns in times] == [3, 3]
    assert all(s > 0 for turns in times for s in turns)
