"""Kernels of a shared model put together: as many as said, right on any devices, whenever each of them runs."""

import importlib.util
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from tvm.relax.frontend import nn

import tvm_axe as axe
from tvm_axe.collective import local, worker
from tvm_axe.relax import share_model

sys.path.append(str(Path(__file__).parents[1] / "collective"))
import apart  # noqa: E402

SCRIPTS = Path(__file__).parents[2] / "scripts"
_spec = importlib.util.spec_from_file_location("shared_models", Path(__file__).with_name("shared_models.py"))
models = importlib.util.module_from_spec(_spec)
sys.modules.setdefault("shared_models", models)
_spec.loader.exec_module(models)


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
    assert step.moves == ("reduce-scatter of lv4", "all-gather of layer_norm")
    assert list(step.views).count("tp") == 2
    params = [str(param.name) for param in step.func.params]
    assert "rank" in params and params[-1] == "target"
    names = {str(block.name_hint) for block in _blocks(step.func)}
    assert {"taken", "T_add", "T_layer_norm", "given"} <= names


def _blocks(func):
    from tvm_axe.analysis.blocks import all_blocks

    return all_blocks(func.body.block.body)


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


def test_it_is_said_which_form_runs_and_why():
    shown = axe.compile(models.encoder(1, 256, 4, 1024, 64), mesh=axe.Mesh({"tp": 2}), work_dir=None).show()
    assert "where devices meet, in 12 kernels" in shown
    assert "reduce-scatter of lv4 and all-gather of layer_norm: in the kernel lv4_taken_fused_add_add2_layer_norm" in shown
    shown = axe.compile(models.experts(64, 128, 8, 64), mesh=axe.Mesh({"tp": 2}), work_dir=None).show()
    assert "all_to_all: the engine's collective, as no kernel has a part of it" in shown


def test_where_no_peer_is_seen_collectives_move_it():
    """Devices that don't see each other's memory run the same model, what is shared evenly, of collectives."""
    model = models.encoder(1, tokens=16, heads=4)
    exe, arrays = axe.compile(model, mesh=axe.Mesh({"tp": 2}), work_dir=None), models.drawn(model)
    assert exe.shared.indexes_peers
    with apart.launched(axe.Mesh({"tp": 2}), "apart-staged-threads") as unseen:
        for _ in range(2):
            assert error(exe.run(unseen, *arrays), models.alone(model, arrays)) < 2e-5


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
