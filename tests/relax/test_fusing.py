"""Kernels of a shared model put together: as many as said, right on any devices, whenever each of them runs."""

import dataclasses
import runpy
from pathlib import Path

import apart
import barriers
import numpy as np
import pytest
import shared_models as models
import tvm
from tvm import relax
from tvm.relax.frontend import nn
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.analysis import patterns
from tvm_axe.analysis.blocks import all_blocks
from tvm_axe.analysis.expressions import loads_in, substitute, variables_of
from tvm_axe.collective import local, worker
from tvm_axe.lower.told import with_coordinates
from tvm_axe.machines.target import resolve_target
from tvm_axe.meta import tune
from tvm_axe.nests.forms import forms_of
from tvm_axe.records import apply_best
from tvm_axe.records.devices import on_first_device
from tvm_axe.relax import fusing, share_model, tradeoffs

SCRIPTS = Path(__file__).parents[2] / "scripts"


def error(found, wanted):
    found = [found] if isinstance(found, np.ndarray) else found
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(found, wanted, strict=True))


def counts(model, devices, meets=True):
    """Kernels, collectives and barriers of a device's function."""
    shared = share_model(model, axe.Mesh({"tp": devices}), meets=meets)
    steps, text = shared.functions["forward"].steps, shared.module["forward"].script()
    return sum(s.func is not None for s in steps), [s.kind for s in steps if s.kind], text.count("axe.barrier")


@pytest.mark.parametrize(("name", "kernels", "barriers"), [("encoder", 12, 4), ("decoder", 16, 4)])
def test_a_layer_has_so_many_kernels(name, kernels, barriers):
    """Of a layer: products with their epilogues, what a softmax needs, and one kernel where two collectives were."""
    make = {"encoder": models.encoder, "decoder": models.decoder}[name]
    sizes = {"encoder": (256, 4, 1024, 64), "decoder": (256, 8, 4, 768, 64)}[name]
    one, two = (counts(make(layers, *sizes), 2) for layers in (1, 2))
    assert (two[0] - one[0], two[2] - one[2]) == (kernels, barriers)
    assert two[1] == []
    apart = [counts(make(layers, *sizes), 2, meets=False) for layers in (1, 2)]
    assert sorted(apart[1][1]) == sorted(apart[0][1] + ["all_gather"] * 2 + ["reduce_scatter"] * 2)


def test_what_follows_a_row_parallel_product_is_one_kernel():
    """The terms' sum, bias, residual and norm, and the store to all, between two barriers."""
    shared = share_model(models.encoder(1, 256, 4, 1024, 64), axe.Mesh({"tp": 2}))
    steps = shared.functions["forward"].steps
    (step,) = [s for s in steps if len(s.moves) == 2]
    assert step.moves == ("reduce-scatter of lv3", "all-gather of layer_norm")
    assert list(step.views).count("tp") == 2
    params = [str(param.name) for param in closed(step).params]
    assert "tp" in params and params[-1] == "target"
    names = {str(block.name_hint) for block in all_blocks(step.func.body.block.body)}
    assert {"taken", "T_add", "T_layer_norm", "given"} <= names


def closed(step):
    """The function of a step with the device's coordinate, which is free in it, as a parameter."""
    free = [var for var in variables_of(step.func.body) if str(var.name) == "tp"]
    return with_coordinates(step.func, len(step.ins), free[:1])[0]


class Residual(nn.Module):
    """A bias behind a row-parallel product, which counts once, and a residual that is needed later on, too."""

    def __init__(self, d, f, norm):
        self.up, self.down, self.out = nn.Linear(d, f), nn.Linear(f, d), nn.Linear(d, d)
        if norm:
            self.norm = nn.LayerNorm(d, eps=1e-5)

    def forward(self, x):
        y = self.down(nn.op.gelu(self.up(x))) + x
        z = self.norm(y) if hasattr(self, "norm") else nn.op.silu(y)
        return self.out(z) + y, y


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_biases_count_once_and_what_is_read_later_is_there(devices, norm, workers):
    model = models.exported(Residual(16, 32, norm), x=((1, 12, 16), "float32"))
    exe = axe.compile(model, mesh=axe.Mesh({"tp": devices}), work_dir=None)
    for seed in range(2):
        arrays = [array + 1 for array in models.drawn(model, seed=seed)]  # biases far from zero
        assert error(exe.run(workers(devices), *arrays), models.alone(model, arrays)) < 2e-5


def test_a_reader_before_the_norm_keeps_what_it_reads(workers):
    """What is made as late as its first reader is there for all of them."""

    class Twice(nn.Module):
        def __init__(self):
            self.a, self.b = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

        def forward(self, x):
            h = self.b(nn.op.relu(self.a(x)))
            y = h + x
            s = nn.op.softmax(y, -1)
            return nn.op.softmax(s + y, -1), nn.op.relu(y) * s

    model = models.exported(Twice(), x=((8, 16), "float32"))
    exe = axe.compile(model, mesh=axe.Mesh({"tp": 2}), work_dir=None)
    arrays = models.drawn(model)
    assert error(exe.run(workers(2), *arrays), models.alone(model, arrays)) < 2e-5


@pytest.mark.parametrize("dtype", ["float16"])
def test_terms_of_half_precision_are_added_in_single(dtype, workers):
    class Mlp(nn.Module):
        def __init__(self):
            self.up, self.down = nn.Linear(16, 64, dtype=dtype), nn.Linear(64, 16, dtype=dtype)

        def forward(self, x):
            return self.down(nn.op.relu(self.up(x))) + x

    model = models.exported(Mlp(), x=((1, 8, 16), dtype))
    exe = axe.compile(model, mesh=axe.Mesh({"tp": 4}), work_dir=None)
    arrays = models.drawn(model)
    assert error(exe.run(workers(4), *arrays), [models.alone(model, arrays)[0].astype("float32")]) < 4e-3


def test_bytes_are_those_of_the_collectives():
    model = models.encoder(2, 256, 4, 1024, 64)
    fused, plain = (share_model(model, axe.Mesh({"tp": 4}), meets=meets) for meets in (True, False))
    assert fused.functions["forward"].chosen.bytes == plain.functions["forward"].chosen.bytes


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("name", ["encoder", "decoder", "experts"])
def test_between_barriers_nobody_touches_what_another_writes(name, devices):
    make = {"encoder": models.encoder, "decoder": models.decoder, "experts": models.experts}[name]
    for meets in (True, False):
        shared = share_model(make(), axe.Mesh({"tp": devices}), memory=0.0, meets=meets)
        assert barriers.conflicts(shared, "forward") == []
    text = shared.module["forward"].script()
    assert "axe.barrier" not in text or _without_barriers_it_conflicts(shared)


def _without_barriers_it_conflicts(shared):
    """Whether the judge sees that all barriers have gone."""
    func, gone = shared.module["forward"], []
    for block in func.body.blocks:
        kept = [b for b in block.bindings if str(getattr(b.value, "op", "")) != '"axe.barrier"'
                and getattr(getattr(b.value, "op", None), "global_symbol", "") != "axe.barrier"]  # fmt: skip
        gone.append(type(block)(kept))
    body = tvm.relax.SeqExpr(gone, func.body.body)
    module = shared.module.clone()
    module["forward"] = tvm.relax.Function(func.params, body, func.ret_ty, func.is_pure, func.attrs)
    return bool(barriers.conflicts(dataclasses.replace(shared, module=module), "forward"))


@pytest.mark.parametrize(("name", "kernels"), [("encoder", 11), ("decoder", 14)])
def test_kernels_of_a_device_have_the_schedules_of_products_and_rows(name, kernels):
    """As those of one device have: iterators of one value, such as a batch's, are left where they are."""
    make = {"encoder": models.encoder, "decoder": models.decoder}[name]
    target = resolve_target({"kind": "llvm", "num-cores": 1})
    shared = share_model(
        make(1, *((256, 4, 1024, 64) if name == "encoder" else (256, 8, 4, 768, 64))), axe.Mesh({"tp": 2})
    )
    found = 0
    for step in shared.functions["forward"].steps:
        forms = forms_of(tvm.s_tir.Schedule(tvm.IRModule({"main": closed(step)})), target)
        is_product = any(map(patterns.is_product, all_blocks(step.func.body.block.body)))
        is_row = any(block.init is not None for block in all_blocks(step.func.body.block.body))
        assert bool(forms.contractions) == is_product and bool(forms.rows) == (is_row and not is_product), step.name
        found += is_row
    assert found == kernels


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_blocks_of_a_device_say_all_that_they_read(norm):
    """Of two buffers of one type, such as a norm's mean and variance, too: schedules go by what blocks say."""
    layer = norm(8) if norm is nn.LayerNorm else norm(8, [-1])

    class Block(nn.Module):
        def __init__(self):
            self.up, self.down, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), layer

        def forward(self, x):
            return self.norm(self.down(nn.op.gelu(self.up(self.norm(x)))) + x)

    shared = share_model(models.exported(Block(), x=((6, 8), "float32")), axe.Mesh({"tp": 2}), memory=0.0)
    kernels = [step for step in shared.functions["forward"].steps if step.func is not None]
    assert len(kernels) >= 4
    for step in kernels:
        for block in all_blocks(step.func.body.block.body):
            told = {region.source for region in block.reads}
            assert {load.source for load in loads_in(block.body)} - {block.body.buffer} <= told, block.name_hint


def test_it_is_said_which_form_runs_and_why(monkeypatch):
    shown = axe.compile(models.encoder(1, 256, 4, 1024, 64), mesh=axe.Mesh({"tp": 2}), work_dir=None).show()
    assert "where devices meet, in 12 kernels" in shown
    assert "reduce-scatter of lv3 and all-gather of layer_norm: in the kernel lv3_taken_fused_add_add2_lay" in shown
    monkeypatch.setattr(tradeoffs, "NEAR", 1.0)  # the fastest moves more
    shown = axe.compile(models.experts(64, 128, 8, 64), mesh=axe.Mesh({"tp": 4}), work_dir=None).show()
    assert "all_to_all: the engine's collective, as no kernel has a part of it" in shown


def test_where_no_peer_is_seen_collectives_move_it():
    """Devices that don't see each other's memory run the same model, what is shared evenly, of collectives."""
    model = models.encoder(1, tokens=16, heads=4)
    exe, arrays = axe.compile(model, mesh=axe.Mesh({"tp": 2}), work_dir=None), models.drawn(model)
    assert exe.shared.indexes_peers
    with apart.launched(axe.Mesh({"tp": 2}), "apart-staged-threads") as unseen:
        for _ in range(2):
            assert error(exe.run(unseen, *arrays), models.alone(model, arrays)) < 2e-5


def test_what_is_gathered_along_two_axes_is_stored_to_all_once():
    """What the devices of one axis store to each other, those of another gather: a kernel can't do both at once."""
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((6, 4), "float32"))
    with builder.function("forward", [x]):
        with builder.dataflow():
            y = builder.emit(relax.op.permute_dims(x))
            out = builder.emit_output(relax.op.cumsum(y, axis=0))
        builder.emit_func_output(out)
    mesh = axe.Mesh({"dp": 2, "tp": 2})
    pins = {"x": {"dp": 0, "tp": 1}, "lv": {"dp": 1, "tp": 0}, "gv": {"dp": None, "tp": None}}
    exe = axe.compile(builder.get(), mesh=mesh, pins=pins, work_dir=None)
    steps = exe.shared.functions["forward"].steps
    assert [(step.kind, step.moves) for step in steps] == [("", ("all-gather of lv",)), ("all_gather", ()), ("", ())]
    array = np.random.default_rng(0).standard_normal((6, 4), dtype="float32")
    with axe.launch(mesh, engine="threads") as on:
        assert np.abs(exe.run(on, array) - array.T.cumsum(0)).max() < 1e-6


def test_workers_that_stumble(monkeypatch):
    """A barrier that is missing shows when devices stop at random between any two kernels."""
    delays = runpy.run_path(str(SCRIPTS / "fuzz_delays.py"))
    monkeypatch.setitem(worker.COMMANDS, "load", delays["_stumbling_load"])
    monkeypatch.setattr(local, "_ENTRY", local._ENTRY)
    model = models.encoder(2)
    for devices in (2, 3):
        exe = axe.compile(model, mesh=axe.Mesh({"tp": devices}), work_dir=None)
        with axe.launch(axe.Mesh({"tp": devices}), engine="threads") as stumbling:
            for seed in range(3):
                arrays = models.drawn(model, seed=seed)
                assert error(exe.run(stumbling, *arrays), models.alone(model, arrays)) < 2e-5


@pytest.mark.parametrize("devices", [2, 3])
def test_kernels_that_ask_for_their_device_take_records(devices, tmp_path):
    """What is measured is the first device's; the schedule that was found is right on the others."""
    shared = share_model(models.encoder(1, 64, 4, 128, 12), axe.Mesh({"tp": devices}), memory=0.0)
    steps = [s for s in shared.functions["forward"].steps if "tp" in s.views and s.func is not None]
    step = next(s for s in steps if len(closed(s).params) > len(s.func.params))
    module = tvm.IRModule({"kernel": closed(step).with_attr("global_symbol", "kernel")})
    target = resolve_target({"kind": "llvm", "num-cores": 1})
    tune(module, target=target, trials=4, work_dir=tmp_path, seed=1, progress=False)
    applied, seconds = apply_best(module, target, tmp_path)
    assert "kernel" in seconds
    assert len(applied["kernel"].params) == len(closed(step).params)
    rng = np.random.default_rng(devices)
    given = [p for p in step.func.params if tvm.tirx.is_buffer_var(p)]
    arrays = [rng.standard_normal([int(n) for n in p.shape], dtype="float32") for p in given]
    for rank in range(devices):
        left = [_ran(mod["kernel"], step, arrays, rank) for mod in (module, applied)]
        for one, other in zip(*left, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_other_numbers_than_the_devices_stay():
    @T.prim_func(s_tir=True)
    def several(A: T.Buffer((8,), "float32"), n: T.int32, B: T.Buffer((8,), "float32")):
        for i in range(n):
            with T.sblock("B"):
                vi = T.axis.spatial(8, i)
                B[vi] = A[vi] * T.float32(2)

    assert on_first_device(several) is several


def _ran(func, step, arrays, rank):
    """What a kernel leaves on one device, its views of dense arrays where they lie so."""
    tensors = iter([tvm.runtime.tensor(array) for array in arrays])
    given = [next(tensors) if tvm.tirx.is_buffer_var(param) else rank for param in func.params]
    dense = {
        param: tvm.tirx.decl_buffer(list(param.shape), param.dtype, param.name, layout=None)
        for param in func.params
        if tvm.tirx.is_buffer_var(param)
    }
    params = [dense.get(param, param) for param in func.params]
    func = tvm.tirx.PrimFunc(params, substitute(func.body, dense), func.ret_type, func.attrs)
    tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), target="llvm")["main"](*given)
    return [each.numpy() for each in given[len(given) - len(step.outs) :]]


@T.prim_func(s_tir=True)
def read_twice(X: T.Buffer((8, 8), "int64"), Y: T.Buffer((8, 8), "int64")):
    """A mask of numbers of tokens, of which a row and a column are made."""
    numbers = T.sblock_alloc_buffer((8,), "int64")
    column = T.sblock_alloc_buffer((1, 8), "int64")
    row = T.sblock_alloc_buffer((8, 1), "int64")
    for i in range(8):
        with T.sblock("numbers"):
            v = T.axis.spatial(8, i)
            numbers[v] = v
    for i, j in T.grid(1, 8):
        with T.sblock("column"):
            v, w = T.axis.remap("SS", [i, j])
            column[v, w] = numbers[w]
    for i, j in T.grid(8, 1):
        with T.sblock("row"):
            v, w = T.axis.remap("SS", [i, j])
            row[v, w] = numbers[v]
    for i, j in T.grid(8, 8):
        with T.sblock("Y"):
            v, w = T.axis.remap("SS", [i, j])
            Y[v, w] = X[v, w] + column[0, w] - row[v, 0]


def test_what_two_readers_move_is_there_for_both():
    """Upstream turns a move around though another reads what it moves, which then nobody makes."""
    run = tvm.compile(tvm.IRModule({"main": fusing._tidied(read_twice, ()).with_attr("global_symbol", "main")}), "llvm")
    x, y = np.arange(64).reshape(8, 8), tvm.runtime.tensor(np.zeros((8, 8), "int64"))
    run["main"](tvm.runtime.tensor(x), y)
    np.testing.assert_array_equal(y.numpy(), x + np.arange(8) - np.arange(8)[:, None])
