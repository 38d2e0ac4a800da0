"""Products beside copies of their rows: right on workers, whose side stream is themselves, and chosen where it pays."""

from __future__ import annotations

import functools

import barriers
import numpy as np
import pytest
import shared_models as models
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

import tvm_axe as axe
from tvm_axe.collective.engine import Rates
from tvm_axe.layout import Link
from tvm_axe.machines import resolve_target
from tvm_axe.relax import beside, emitting, sharing
from tvm_axe.relax.sharing import share_for, share_model
from tvm_axe.relax.steps import COPIES

LLVM = resolve_target("llvm")
HOPPER = resolve_target({"kind": "cuda", "arch": "sm_90a"})
QUICK = Rates(Link(latency=1e-9, bandwidth=360e9), memory=4e12, operations=7e14)
"""With which rows are shared between products, as on GPUs, at any size."""


class Layer(nn.Module):
    """What is added to x is made of a product whose terms are shared, twice, and a norm stands between."""

    def __init__(self, width, hidden, dtype="float32"):
        linear = functools.partial(nn.Linear, bias=False, dtype=dtype)
        self.norm1, self.norm2 = (nn.RMSNorm(width, axes=[-1], bias=False, dtype=dtype) for _ in range(2))
        self.q, self.out = linear(width, width), linear(width, width)
        self.gate, self.up, self.down = linear(width, hidden), linear(width, hidden), linear(hidden, width)

    def forward(self, x):
        x = x + self.out(op.tanh(self.q(self.norm1(x))))
        y = self.norm2(x)
        return x + self.down(op.silu(self.gate(y)) * self.up(y))


class Layers(nn.Module):
    def __init__(self, count, *sizes):
        self.layers = nn.ModuleList([Layer(*sizes) for _ in range(count)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def layers(count, tokens, width, hidden, dtype="float32"):
    return models.exported(Layers(count, width, hidden, dtype), x=((1, tokens, width), dtype))


def copies_of(shared):
    return [step for step in shared.functions["forward"].steps if step.kind == COPIES]


@pytest.fixture
def anywhere(monkeypatch):
    """Copies beside products on CPUs too, whatever they gain, and models shared as GPUs share them."""
    made, share = emitting.device_module, sharing.share_model

    class Cutter(beside._Cutter):
        def gains(self, *_):
            return True

    def on_cpus(chosen, operators, mesh, page, meets, gpu):
        return made(chosen, operators, mesh, page, False, LLVM)

    def quickly(model, mesh, axis, memory, pins, rates, *others):
        return share(model, mesh, axis, memory, pins, QUICK, *others)

    monkeypatch.setattr(emitting, "with_copies_beside", lambda *args: Cutter(*args).cut())
    monkeypatch.setattr(beside, "DTYPES", ("float32",))
    monkeypatch.setattr(sharing, "device_module", on_cpus)
    monkeypatch.setattr(sharing, "share_model", quickly)


MESHES = {"2": {"tp": 2}, "3": {"tp": 3}, "4": {"tp": 4}, "2 x 2": {"dp": 2, "tp": 2}}


@pytest.mark.parametrize("engine", ["threads", "processes"])
@pytest.mark.parametrize("name", MESHES)
def test_layers_are_right(name, engine, anywhere, workers):
    """Call after call: what a call reads its peers have sent in that call, and no sooner than it is read in another."""
    mesh, rng = axe.Mesh(MESHES[name]), np.random.default_rng(3)
    model = layers(2, 96, 48, 768)
    exe = axe.compile(model, mesh=mesh, target="llvm", work_dir=None)
    kinds = [step.transfer.source.partial for step in copies_of(exe.shared)]
    assert len(kinds) >= (2 if "dp" in mesh.names else 4) and {"", "sum"} >= set(kinds) >= {"sum"}, kinds
    arrays = models.drawn(model)
    session = exe.load(workers(mesh, engine), arrays[1:])
    for _ in range(4):
        x = rng.standard_normal(arrays[0].shape, "float32")
        (expected,) = models.alone(model, [x, *arrays[1:]])
        got = np.asarray(session["forward"](x))
        assert np.abs(got - expected).max() < 2e-5 * np.abs(expected).max()


def test_between_barriers_nobody_touches_what_another_copies(anywhere, monkeypatch):
    shared = sharing.share_model(layers(2, 96, 48, 768), axe.Mesh({"tp": 2}), None, None, None, QUICK)
    assert copies_of(shared) and barriers.conflicts(shared, "forward") == []
    monkeypatch.setattr(emitting._Function, "_joined", lambda self, buffers: None)
    shared = sharing.share_model(layers(2, 96, 48, 768), axe.Mesh({"tp": 2}), None, None, None, QUICK)
    assert barriers.conflicts(shared, "forward")


def test_it_is_said(anywhere):
    exe = axe.compile(layers(1, 96, 48, 768), mesh=axe.Mesh({"tp": 2}), target="llvm", work_dir=None)
    assert "_of_own: beside it rows are copied to whom they are for" in str(exe.show())
    assert "axe.copy" in str(exe.show())


@pytest.mark.parametrize(("tokens", "copies"), [(2048, {"", "sum"}), (1, set()), (2047, set())])
def test_gpus_copy_beside_products_of_many_rows(tokens, copies):
    model = layers(1, tokens, 4096, 14336, "bfloat16")
    shared = share_for(model, axe.Mesh({"tp": 2}), HOPPER)
    assert {step.transfer.source.partial for step in copies_of(shared)} == copies
    assert {"copies"} & set(shared.indexes_peers) == ({"copies"} if copies else set())
    # Where devices don't see each other's memory collectives move all.
    assert not copies_of(share_for(model, axe.Mesh({"tp": 2}), HOPPER, meets=False))


def test_cpus_and_other_gpus_do_not():
    model = layers(1, 2048, 4096, 14336, "bfloat16")
    for target in (LLVM, resolve_target({"kind": "cuda", "arch": "sm_80"})):
        assert not copies_of(share_for(model, axe.Mesh({"tp": 2}), target))
    assert not copies_of(share_model(model, axe.Mesh({"tp": 2})))


def computed(x, *weights):
    """The layers in float64, of weights in the order of `Layer`'s parameters."""

    def normed(rows, weight):
        return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + 1e-5) * weight

    x, weights = x.astype("float64"), [each.astype("float64") for each in weights]
    for at in range(0, len(weights), 7):
        norm1, norm2, q, out, gate, up, down = weights[at : at + 7]
        x = x + np.tanh(normed(x, norm1) @ q.T) @ out.T
        y = normed(x, norm2)
        gated = y @ gate.T
        x = x + (gated / (1 + np.exp(-gated)) * (y @ up.T)) @ down.T
    return x


def test_the_layers_in_float64_are_the_layers():
    model = layers(2, 24, 48, 96)
    arrays = models.drawn(model)
    assert np.abs(computed(*arrays) - models.alone(model, arrays)[0]).max() < 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("devices", [2, 3, 4])
def test_layers_on_gpus_are_right(devices, dtype, on_gpus, monkeypatch):
    """Whatever is gained; call after call, of inputs that are drawn anew."""
    monkeypatch.setattr(beside._Cutter, "gains", lambda *_: True)
    model, mesh = layers(2, 768, 512, 1536, dtype), axe.Mesh({"tp": devices})
    exe = axe.compile(model, mesh=mesh, target="cuda", work_dir=None)
    assert {step.transfer.source.partial for step in copies_of(exe.shared)} == {"", "sum"}
    arrays, rng = models.drawn(model), np.random.default_rng(devices)
    with axe.launch(mesh, engine="cuda", **on_gpus(devices)) as workers, exe.load(workers, arrays[1:]) as session:
        for _ in range(5):
            x = rng.standard_normal(arrays[0].shape).astype(dtype)
            expected, got = computed(x, *arrays[1:]), np.asarray(session["forward"](x)).astype("float64")
            assert np.linalg.norm(got - expected) < (2e-2 if dtype == "bfloat16" else 4e-3) * np.linalg.norm(expected)
