"""Decoders over upstream's paged cache on meshes: a device has a cache of its heads; right against float64 numpy."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import paged_decoder as decoders
import pytest
import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache

import tvm_axe as axe
from tvm_axe.analysis.tree import has_threads
from tvm_axe.collective.calls import WORKERS
from tvm_axe.collective.repeating import repeats
from tvm_axe.executable import Session
from tvm_axe.machines import backend_of, resolve_target
from tvm_axe.relax import share_model

KV, CACHE = "vm.builtin.kv_state_", "vm.builtin.attention_kv_cache_"
ROOM = ((4,), (128,), (64,), (16,), (0,))  # sequences, tokens in all, tokens of a call, tokens of a page, no windows
SIZES = decoders.Sizes()
GPU = resolve_target("cuda:sm_90a")
WIDE = decoders.Sizes(size=64, hidden=128)
"""Heads of a size that models have: some of upstream's functions for GPUs don't compile for one group of 16 columns."""


class Played:
    """Sequences of tokens in a cache of a session, with all logits that came of them."""

    def __init__(self, session: Session) -> None:
        self.session, self.cache = session, session.create(*ROOM)
        self.tokens: dict[int, list[int]] = {}
        self.logits: dict[int, list[np.ndarray]] = {}

    def add(self, sequence: int) -> None:
        self.cache.call(f"{KV}add_sequence", sequence)
        self.tokens[sequence], self.logits[sequence] = [], []

    def fork(self, parent: int, child: int, at: int) -> None:
        self.cache.call(f"{KV}fork_sequence", parent, child, at)
        self.tokens[child], self.logits[child] = self.tokens[parent][:at], self.logits[parent][:at]

    def pop(self, sequence: int, count: int) -> None:
        self.cache.call(f"{KV}popn", sequence, count)
        del self.tokens[sequence][-count:], self.logits[sequence][-count:]

    def go_on(self, parts: Mapping[int, Sequence[int]]) -> None:
        """Put tokens behind sequences, a token of each by the function that decodes."""
        lengths = [len(part) for part in parts.values()]
        self.cache.call(f"{KV}begin_forward", list(parts), lengths)
        ids = np.concatenate([np.asarray(part, "int32") for part in parts.values()])
        if max(lengths) == 1:
            out, self.cache = self.session.decode(ids[:, None], self.cache)
        else:
            out, self.cache = self.session.prefill(ids[None], self.cache)
        self.cache.call(f"{KV}end_forward")
        rows = iter(out.numpy().reshape(len(ids), -1))
        for sequence, part in parts.items():
            self.tokens[sequence] += part
            self.logits[sequence] += [next(rows) for _ in part]

    def error(self, of: decoders.Sizes, weights: Mapping[str, np.ndarray]) -> float:
        """The largest error of any logit, as a part of the largest one."""
        found = 0.0
        for sequence, tokens in self.tokens.items():
            want, got = decoders.in_numpy(of, weights, np.array(tokens)), np.stack(self.logits[sequence])
            found = max(found, np.abs(got - want).max() / np.abs(want).max())
        return float(found)


def played(session: Session, of: decoders.Sizes, seed: int) -> Played:
    """Two prompts at once, more of one behind them, tokens of both, then another sequence alone."""
    rng = np.random.default_rng(seed)

    def drawn(count: int) -> list[int]:
        return rng.integers(0, of.words, count).tolist()

    found = Played(session)
    found.add(0)
    found.add(7)
    found.go_on({0: drawn(5), 7: drawn(18)})
    found.go_on({7: drawn(6)})
    for _ in range(3):
        found.go_on({7: drawn(1), 0: drawn(1)})
    found.add(3)
    found.go_on({3: drawn(2), 0: drawn(1)})
    return found


def exported(*names: str, of: decoders.Sizes = SIZES, target: tvm.target.Target = decoders.CPU) -> tvm.IRModule:
    """The model with these functions alone."""
    model = decoders.Decoder(of, target).exported()
    for name in {"prefill", "decode", "create"} - {*names}:
        del model[name]
    return model


@pytest.fixture(scope="module")
def of_mesh(workers) -> Iterator[Session]:
    model = decoders.Decoder(SIZES).exported()
    weights = decoders.weights_of(model, 11)
    with axe.compile(model, mesh={"tp": 2}, work_dir=None).load(workers(2), weights) as session:
        session.of = weights
        yield session


def test_one_device_is_right_too() -> None:
    model = decoders.Decoder(SIZES).exported()
    weights = decoders.weights_of(model, 2)
    with axe.compile(model, work_dir=None).load(weights) as session:
        assert played(session, SIZES, 5).error(SIZES, weights) < 1e-5


@pytest.mark.parametrize(
    ("heads", "groups", "mesh", "engine"),
    [
        (8, 4, {"tp": 2}, "processes"),
        (8, 2, {"tp": 4}, "threads"),  # two devices have the same heads of keys
        (4, 1, {"tp": 2}, "threads"),
        (6, 3, {"tp": 3}, "threads"),
        (8, 4, {"dp": 2, "tp": 2}, "threads"),
    ],
)
def test_sequences_are_right(heads: int, groups: int, mesh: dict[str, int], engine: str, workers) -> None:
    of = decoders.Sizes(heads=heads, groups=groups)
    model = decoders.Decoder(of).exported()
    weights = decoders.weights_of(model, heads + groups)
    exe = axe.compile(model, mesh=mesh, work_dir=None)
    with exe.load(workers(axe.Mesh(mesh), engine), weights) as session:
        assert played(session, of, 1).error(of, weights) < 1e-5
        assert played(session, of, 2).error(of, weights) < 1e-5  # in another cache
    for name in ("prefill", "decode"):
        assert exe.shared.functions[name].chosen.divided >= 0.99


def test_scaled_angles_are_right(workers) -> None:
    """Llama 3.1's, of which the cache's constructor says nothing; two of its numbers are alike."""
    scaling = {"rope_type": "llama3", "factor": 3.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
        "original_max_position_embeddings": 64
    }
    of = decoders.Sizes(scaling=tuple(scaling.items()), layers=1)
    assert np.abs(decoders.frequencies(of) - decoders.frequencies(SIZES)).max() > 1e-3
    model = decoders.Decoder(of).exported()
    weights = decoders.weights_of(model, 9)
    with axe.compile(model, mesh={"tp": 2}, work_dir=None).load(workers(2), weights) as session:
        assert played(session, of, 1).error(of, weights) < 1e-5


def test_an_axis_alone_shares_heads(workers) -> None:
    mesh = axe.Mesh({"dp": 2, "tp": 2})
    model = decoders.Decoder(SIZES).exported()
    weights = decoders.weights_of(model, 4)
    exe = axe.compile(model, mesh=mesh, axis="tp", work_dir=None)
    assert "4, 2, 16, 16," in exe.module["create"].script()
    with exe.load(workers(mesh), weights) as session:
        assert played(session, SIZES, 3).error(SIZES, weights) < 1e-5


def test_sequences_fork_and_lose_tokens(of_mesh: Session) -> None:
    found = played(of_mesh, SIZES, 8)
    found.fork(7, 9, 24)  # in the middle of a page, which is copied
    found.go_on({9: [3], 7: [4]})
    found.pop(7, 5)
    found.go_on({7: [5, 6, 7], 9: [8]})
    assert found.error(SIZES, of_mesh.of) < 1e-5
    tokens = found.cache.call(f"{CACHE}get_total_sequence_length")
    found.cache.call(f"{KV}remove_sequence", 0)
    assert found.cache.call(f"{CACHE}get_total_sequence_length") == tokens - len(found.tokens.pop(0))
    found.go_on({7: [9], 3: [2]})
    assert found.error(SIZES, of_mesh.of) < 1e-5
    found.cache.call(f"{KV}clear")
    assert found.cache.call(f"{CACHE}empty") == 1


def test_positions_are_every_devices(workers) -> None:
    class Positions(decoders.Decoder):
        def prefill(self, ids: nn.Tensor, cache: PagedKVCache) -> tuple[nn.Tensor, nn.Tensor]:
            return self._logits(ids, cache), cache.get_query_positions(ids.shape[1])

    model = Positions(SIZES).exported()
    del model["decode"]
    with axe.compile(model, mesh={"tp": 2}, work_dir=None).load(workers(2), decoders.weights_of(model, 0)) as session:
        cache = session.create(*ROOM)
        for sequence in (0, 1):
            cache.call(f"{KV}add_sequence", sequence)
        cache.call(f"{KV}begin_forward", [0, 1], [3, 2])
        assert session.prefill(np.zeros((1, 5), "int32"), cache)[1].numpy().tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(("groups", "devices"), [(8, 2), (2, 4), (1, 2)])
def test_bytes_are_megatrons(groups: int, devices: int) -> None:
    """Two all-reduces a layer, or as many bytes; a device has its part of the projections, keys' that it needs."""
    of = decoders.Sizes(groups=groups, hidden=128, inner=512, words=8)
    shared = share_model(decoders.Decoder(of).exported(), axe.Mesh({"tp": devices}), memory=0.6)
    found = shared.functions["prefill"].chosen
    tokens = found.graph.typical["tokens"]
    assert found.bytes <= of.layers * 2 * 2 * (devices - 1) * tokens * of.hidden * 4 // devices
    assert found.divided >= 0.99


# ---- On GPUs ---------------------------------------------------------------------------------------------------------


def test_a_gpu_has_functions_of_its_own_heads() -> None:
    """Those that upstream makes for that many, and that target; the others get threads, and compile to a cubin."""
    exe = axe.compile(exported("create", of=WIDE, target=GPU), mesh={"tp": 4}, target=GPU, work_dir=None)
    assert "2, 1, 64, 64," in exe.module["create"].script()
    assert not repeats(exe.runnable)  # a graph would hold a page table
    kernels = {str(var.name_hint): func for var, func in exe.runnable.functions_items() if type(func) is tirx.PrimFunc}
    assert len(kernels) == 14 and all(map(has_threads, kernels.values()))
    small = exported("create", of=dataclasses.replace(WIDE, heads=2, groups=1), target=GPU)
    others = {name: func for name, func in kernels.items() if not has_threads(small[name])}
    assert len(others) == 4
    for name in kernels.keys() - others.keys():
        plain = [tirx.PrimFunc(each.params, each.body, each.ret_type) for each in (kernels[name], small[name])]
        assert tvm_ffi.structural_equal(*plain, map_free_vars=True), name
    backend_of(GPU).build(tvm.IRModule(others), GPU)


def test_caches_of_another_target_are_refused() -> None:
    said = r"functions \(.*batch_decode_paged_kv_cpu.*\) aren't .* for a GPU of 8 heads.*target that the model"
    with pytest.raises(axe.LowerError, match=said):
        axe.compile(exported("create"), mesh={"tp": 2}, target=GPU, work_dir=None)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-4), ("float16", 1e-2)])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_sequences_on_gpus_are_right(devices: int, dtype: str, bound: float, on_gpus) -> None:
    of, target = dataclasses.replace(WIDE, dtype=dtype), resolve_target("cuda")
    model = decoders.Decoder(of, target).exported()
    weights = decoders.weights_of(model, devices)
    with contextlib.ExitStack() as stack:
        if devices == 1:
            session = stack.enter_context(axe.compile(model, target=target, work_dir=None).load(weights))
        else:
            exe = axe.compile(model, mesh={"tp": devices}, target=target, work_dir=None)
            both = stack.enter_context(axe.launch(exe.mesh, engine="cuda", **on_gpus(devices)))
            session = stack.enter_context(exe.load(both, weights))
        found = played(session, of, 1)
        assert found.error(of, weights) < bound
        found.fork(7, 9, 24)  # in the middle of a page, which is copied
        found.go_on({9: [3], 7: [4]})
        found.pop(7, 5)
        found.go_on({7: [5, 6, 7], 9: [8]})
        assert found.error(of, weights) < bound
        assert played(session, of, 2).error(of, weights) < bound  # in another cache, while the first is there


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "dtype", "bound"), [(16, "float32", 1e-4), (32, "float16", 1e-2)])
def test_one_group_of_few_columns_is_right_on_a_gpu(size: int, dtype: str, bound: float, cuda: None) -> None:
    """Whose functions upstream's elimination of common subexpressions refused."""
    of, target = decoders.Sizes(heads=4, groups=1, size=size, dtype=dtype), resolve_target("cuda")
    model = decoders.Decoder(of, target).exported()
    weights = decoders.weights_of(model, 3)
    with axe.compile(model, target=target, work_dir=None).load(weights) as session:
        assert played(session, of, 1).error(of, weights) < bound


# ---- What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "groups", "devices"), [(8, 4, 3), (4, 3, 4), (6, 4, 4)])
def test_heads_that_devices_cant_share_are_named(heads: int, groups: int, devices: int) -> None:
    model = decoders.Decoder(decoders.Sizes(heads=heads, groups=groups)).exported()
    said = f"{heads} heads of queries and {groups} of keys and values can't be shared by {devices} devices"
    with pytest.raises(axe.LowerError, match=said):
        axe.compile(model, mesh={"tp": devices}, work_dir=None)


def test_a_cache_alone_of_such_heads_is_refused() -> None:
    model = exported("create")
    with pytest.raises(axe.LowerError, match=r"create: variable '.*': a paged cache of 8 heads"):
        axe.compile(model, mesh={"tp": 3}, work_dir=None)


def test_other_functions_of_a_cache_are_refused() -> None:
    class Apart(decoders.Decoder):
        def prefill(self, ids: nn.Tensor, cache: PagedKVCache) -> tuple[nn.Tensor, PagedKVCache]:
            of = self.of
            x = nn.op.reshape(self.embed(ids), (1, ids.shape[1], 4, of.size))
            return cache.self_attention(0, x, x, x, 1.0)[0], cache

    with pytest.raises(axe.LowerError, match=r"prefill: .*_self_attention, which takes 'cache'.*attention_with_fused"):
        axe.compile(Apart(SIZES).exported(), mesh={"tp": 2}, work_dir=None)


def test_caches_of_other_functions_are_refused() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32} | {
        "beta_fast": 32,
        "beta_slow": 1,
    }
    model = decoders.Decoder(decoders.Sizes(scaling=tuple(scaling.items()))).exported()
    with pytest.raises(axe.LowerError, match=r"create: variable .*functions \(fused_rope\w*\).*rope_scaling.*llama3"):
        axe.compile(model, mesh={"tp": 2}, work_dir=None)
    model = decoders.Decoder(SIZES).exported()
    other = next(var for var in model.functions if str(var.name_hint) == "copy_single_page_cpu")
    model[other] = model["compact_kv_copy_cpu"].with_attr("global_symbol", "copy_single_page_cpu")
    with pytest.raises(axe.LowerError, match=r"functions \(copy_single_page_cpu\)"):
        axe.compile(model, mesh={"tp": 2}, work_dir=None)


def test_objects_that_nobody_knows_are_refused() -> None:
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType([4], "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            made = builder.emit(relax.call_pure_packed("vm.builtin.something", x, ty_args=relax.AnyType()))
            output = builder.emit_output(made)
        builder.emit_func_output(output)
    with pytest.raises(axe.LowerError, match=r"made by vm.builtin.something, an object of the runtime"):
        axe.compile(builder.finalize(), mesh={"tp": 2}, work_dir=None)


# ---- Handles ---------------------------------------------------------------------------------------------------------


def test_handles_of_objects(of_mesh: Session) -> None:
    cache = of_mesh.create(*ROOM)
    assert cache.shape is None
    with pytest.raises(axe.LowerError, match=r"handle\.call"):
        cache.object  # noqa: B018
    ids = np.zeros((1, 3), "int32")
    with pytest.raises(axe.InputError, match="cache is an object, one on each device; got int"):
        of_mesh.prefill(ids, 3)
    cache.call(f"{KV}add_sequence", 0)
    cache.call(f"{KV}begin_forward", [0], [3])
    logits, same = of_mesh.prefill(ids, cache)
    with pytest.raises(axe.InputError, match="cache is an object, one on each device; got an array"):
        of_mesh.prefill(ids, logits)
    with pytest.raises(axe.LowerError, match="is no object of this session"):
        logits.call(f"{KV}clear")
    with pytest.raises(axe.LowerError, match="a number, text, None, integers or a handle"):
        cache.call(f"{KV}add_sequence", ids)
    with pytest.raises(axe.WorkerError, match=r"the runtime has no function 'vm\.builtin\.kv_state_nothing'"):
        cache.call(f"{KV}nothing")
    with pytest.raises(axe.WorkerError, match="only numbers come back"):
        same.call(f"{CACHE}get_query_positions")
    with pytest.raises(axe.WorkerError, match="sequence"):
        cache.call(f"{KV}add_sequence", 0)  # it is there
    same.call(f"{KV}end_forward")
    assert cache.call(f"{CACHE}get_total_sequence_length") == 3  # it is the same, and nothing is lost


def test_functions_of_objects_are_timed_and_traced(of_mesh: Session) -> None:
    cache = of_mesh.create(*ROOM)
    cache.call(f"{KV}add_sequence", 0)
    cache.call(f"{KV}begin_forward", [0], [1])
    one = np.zeros((1, 1), "int32")
    assert all(seconds > 0 for seconds in of_mesh.decode.time(one, cache, repeat=2, warmup=1))
    seen = [event.name for event in of_mesh.decode.trace(one, cache, warmup=0).events]
    assert sum("attention_with_fused_qkv" in name for name in seen) == 2 * SIZES.layers, seen
    assert all(seconds > 0 for seconds in of_mesh.create.time(*ROOM, repeat=2, warmup=0))


def test_devices_let_go_of_caches() -> None:
    model = exported("create")
    exe = axe.compile(model, mesh={"tp": 2}, work_dir=None)
    with axe.launch(exe.mesh, engine="threads") as both:
        here = [worker for (launch, _), worker in WORKERS.items() if worker.coords.keys() == {"tp"}][-2:]
        with exe.load(both, decoders.weights_of(decoders.Decoder(SIZES).exported(), 0)) as session:
            for _ in range(4):
                cache = session.create(*ROOM)
                gc.collect()
            # The last one, and one that is let go of when place for another is asked for.
            assert [len(worker.objects) for worker in here] == [2, 2]
        assert [len(worker.objects) for worker in here] == [0, 0]
        with pytest.raises(axe.LowerError, match="closed"):
            cache.call(f"{KV}add_sequence", 0)


def test_a_saved_model_has_its_caches(tmp_path: Path, workers) -> None:
    model = decoders.Decoder(SIZES).exported()
    weights = decoders.weights_of(model, 6)
    axe.compile(model, mesh={"tp": 2}, work_dir=None).save(tmp_path / "decoder.axe")
    with axe.Executable.load(tmp_path / "decoder.axe").load(workers(2), weights) as session:
        assert played(session, SIZES, 6).error(SIZES, weights) < 1e-5


def test_whole_arrays_are_no_caches(workers) -> None:
    exe = axe.compile(exported("prefill"), mesh={"tp": 2}, work_dir=None)
    with pytest.raises(axe.LowerError, match="load"):
        exe.run(workers(2), np.zeros((1, 3), "int32"))
