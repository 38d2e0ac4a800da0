"""Tile kernels as design spaces: what is offered, that every choice computes the right thing, and how one mutates."""

import itertools
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from tvm import s_tir
from tvm.script import tirx as T

from tvm_axe._tvm import plain
from tvm_axe.lower.tiles import with_tile_kernels
from tvm_axe.machines.target import resolve_target
from tvm_axe.meta.spaces.mutator import MutateChoice
from tvm_axe.meta.spaces.space import space_for
from tvm_axe.nests.kernels import choose
from tvm_axe.schedule.offers import offers

HOPPER = resolve_target({"kind": "cuda", "arch": "sm_90a"})
M, N, K = 30, 44, 26


@T.prim_func(s_tir=True)
def block(
    A: T.Buffer((M, K), "float32"),
    W: T.Buffer((N, K), "float32"),
    bias: T.Buffer((N,), "float32"),
    out: T.Buffer((M, N), "float32"),
):
    C = T.sblock_alloc_buffer((M, N), "float32")
    for i, j, k in T.grid(M, N, K):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * W[vj, vk]
    for i, j in T.grid(M, N):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = T.max(C[vi, vj] + bias[vj], T.float32(0))


@T.prim_func(s_tir=True)
def two(
    A: T.Buffer((M, K), "float32"),
    B: T.Buffer((N, K), "float32"),
    D: T.Buffer((M, N), "float32"),
    E: T.Buffer((N, M), "float32"),
):
    """Two products, of which the second takes the first's relu, transposed and used twice."""
    C = T.sblock_alloc_buffer((M, N), "float32")
    for i, j, k in T.grid(M, N, K):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vj, vk]
    for i, j in T.grid(M, N):
        with T.sblock("D"):
            vi, vj = T.axis.remap("SS", [i, j])
            D[vi, vj] = T.max(C[vi, vj], T.float32(0))
    for i, j in T.grid(N, M):
        with T.sblock("E"):
            vi, vj = T.axis.remap("SS", [i, j])
            E[vi, vj] = C[vj, vi]


def test_what_is_offered(target):
    names = [(offer.block, offer.kernel, offer.epilogue) for offer in offers(s_tir.Schedule(block), target)]
    assert names == [("mm", "matmul", "epi")]
    names = [(offer.block, offer.kernel, offer.epilogue) for offer in offers(s_tir.Schedule(two), target)]
    assert names == [("mm", "matmul", None)]
    kernels = {offer.kernel for offer in offers(s_tir.Schedule(block), HOPPER)}
    assert {"matmul", "split_k_matmul", "skinny_matmul"} <= kernels


def run(mod, target, seed):
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(shape, dtype="float32") for shape in ((M, K), (N, K), (N,))]
    tensors = [tvm.runtime.tensor(array) for array in (*arrays, np.full((M, N), np.nan, "float32"))]
    tvm.compile(with_tile_kernels(mod, target), target=target)["main"](*tensors)
    a, w, b = (array.astype("float64") for array in arrays)
    want = np.maximum(a @ w.T + b, 0)
    return np.linalg.norm(tensors[-1].numpy() - want) / np.linalg.norm(want)


def test_every_choice_is_right(target):
    """Each candidate of each parameter, though not all of their combinations."""
    (offer,) = offers(s_tir.Schedule(block), target)
    choices = [dict(zip(offer.space, values)) for values in itertools.zip_longest(*offer.space.values())]
    for seed, values in enumerate(choices):
        space = {
            name: (values[name] if values[name] is not None else candidates[0],)
            for name, candidates in offer.space.items()
        }
        sch = s_tir.Schedule(block)
        choose(sch, replace(offer, space=space), sampled=False)
        assert run(sch.mod, target, seed) < 1e-6


@pytest.mark.parametrize("sampled", [False, True])
def test_traces_replay(target, sampled):
    (offer,) = offers(s_tir.Schedule(block), target)
    sch = s_tir.Schedule(block, seed=4)
    choose(sch, offer, sampled)
    stored = json.loads(json.dumps(plain(sch.trace.as_json())))
    replayed = s_tir.Schedule(block)
    s_tir.schedule.Trace.apply_json_to_schedule(stored, replayed)
    tvm.ir.assert_structural_equal(replayed.mod, sch.mod)
    samples = [inst for inst in sch.trace.insts if inst.kind.name == "SampleCategorical"]
    assert len(samples) == (sum(len(candidates) > 1 for candidates in offer.space.values()) if sampled else 0)
    assert run(sch.mod, target, 1) < 1e-6


def test_the_space_has_the_kernels_with_defaults_and_with_samples(target):
    spaces = space_for(block, target).generate_design_space(s_tir.Schedule(block).mod)
    kernels = [space for space in spaces if "axe.tile" in str(space.trace)]
    sampled = {any(inst.kind.name == "SampleCategorical" for inst in space.trace.insts) for space in kernels}
    assert sampled == {True, False}
    assert len(kernels) < len(spaces)  # the others are register tiles


def test_a_mutation_changes_one_choice(target):
    (offer,) = offers(s_tir.Schedule(block), target)
    sch = s_tir.Schedule(block, seed=4)
    choose(sch, offer, sampled=True)
    mutator = MutateChoice._cls()  # the Python object; the other is for C++, which calls it with a state
    mutator._initialize_with_tune_context(SimpleNamespace(rand_state=7))

    def decisions(trace):
        return [int(trace.get_decision(i)) for i in trace.insts if i.kind.name == "SampleCategorical"]

    before = decisions(sch.trace)
    seen = set()
    for _ in range(40):
        after = decisions(mutator.apply(sch.trace, 0))
        changed = [n for n, (old, new) in enumerate(zip(before, after, strict=True)) if old != new]
        assert len(changed) == 1
        seen.add((changed[0], after[changed[0]]))
    counts = [len(candidates) for candidates in offer.space.values() if len(candidates) > 1]
    assert {n for n, _ in seen} == set(range(len(counts)))
    choose(fixed := s_tir.Schedule(block), offer, sampled=False)
    assert mutator.apply(fixed.trace, 0) is None
