"""Models shared over a mesh: equal to one device, products divided, bytes of Megatron's closed form, weights cut."""

import importlib.util
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from tvm import relax
from tvm.relax.frontend import nn

import tvm_axe as axe
from tvm_axe.collective.engine import HOST, Rates
from tvm_axe.layout import Link
from tvm_axe.relax import share_model
from tvm_axe.relax.choosing import Operators, choose
from tvm_axe.relax.forms import WHOLE
from tvm_axe.relax.graph import graph_of, legalized

_spec = importlib.util.spec_from_file_location("shared_models", Path(__file__).with_name("shared_models.py"))
models = importlib.util.module_from_spec(_spec)
sys.modules["shared_models"] = models
_spec.loader.exec_module(models)

MODELS = {
    "decoder": models.decoder,
    "packed": lambda: models.decoder(packed=True, ids="int64"),
    "few kv heads": lambda: models.decoder(kv=2),
    "encoder": models.encoder,
    "vision": models.vision,
    "experts": models.experts,
    "resnet": models.resnet,
}
SLOW = Rates(Link(latency=0.0, bandwidth=1e10), memory=1e12, operations=2e10)
"""Devices on which models of a few numbers are worth sharing."""


def error(found, wanted):
    found = [found] if isinstance(found, np.ndarray) else found
    assert len(found) == len(wanted)
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize(
    ("name", "devices"), [("experts", 1), *((name, devices) for name in MODELS for devices in (2, 3, 4))]
)
def test_equals_one_device(name, devices, workers):
    model = MODELS[name]()
    arrays = models.drawn(model)
    exe = axe.compile(model, mesh=axe.Mesh({"tp": devices}), work_dir=None)
    assert error(exe.run(workers(devices), *arrays), models.alone(model, arrays)) < 2e-5
    # The tensors stay on the workers: nothing of one run is left in the next.
    arrays = models.drawn(model, seed=1)
    assert error(exe.run(workers(devices), *arrays), models.alone(model, arrays)) < 2e-5


def test_on_processes(workers):
    model = models.decoder(packed=True)
    arrays = models.drawn(model)
    exe = axe.compile(model, mesh=axe.Mesh({"tp": 2}), work_dir=None)
    for _ in range(3):
        assert error(exe.run(workers(2, "processes"), *arrays), models.alone(model, arrays)) < 2e-5


@pytest.mark.parametrize("axis", [None, "tp"])
@pytest.mark.parametrize("name", ["decoder", "vision"])
def test_several_axes(name, axis):
    model, mesh = MODELS[name](), axe.Mesh({"dp": 2, "tp": 2})
    arrays = models.drawn(model)
    exe = axe.compile(model, mesh=mesh, work_dir=None, axis=axis)
    with axe.launch(mesh, engine="threads") as both:
        for _ in range(2):
            assert error(exe.run(both, *arrays), models.alone(model, arrays)) < 2e-5


def test_random_models():
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "fuzz_models.py"))
    with script["launched"]() as workers:
        for seed in range(1000, 1006):
            assert script["check"](seed, workers)[0] == ""


def chosen(model, devices, rates=HOST, memory=None):
    return share_model(model, axe.Mesh({"tp": devices}), memory=memory, rates=rates).functions["forward"].chosen


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("name", ["decoder", "packed", "encoder", "vision", "experts"])
def test_products_are_divided(name, devices):
    found = chosen(MODELS[name](), devices, SLOW)
    assert found.divided >= 0.99
    here, there = found.weights
    assert here <= there * (1 / devices + 0.05) + 1


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_bytes_are_megatrons(devices, packed):
    """Two all-reduces a layer, or as many bytes: Llama-3-8B's width, 2,048 tokens."""
    model = models.decoder(2, 4096, 32, 8, 14336, 2048, packed, vocab=128)
    found = chosen(model, devices)
    closed = 2 * 2 * 2 * (devices - 1) // devices * 2048 * 4096 * 4
    embedding = 2048 * 4096 * 4 * (devices - 1) // devices  # rows of words that devices share, and the last norm's
    assert found.divided == 1.0
    assert found.bytes <= 1.03 * closed + 2 * embedding


def test_equal_layers_are_the_same_operators():
    """Equal functions are one operator, however many layers have them."""
    calls = []
    for layers in (4, 16):
        module = legalized(models.encoder(layers))
        graph, operators = graph_of(module, "forward"), Operators(2, HOST)
        choose(graph, operators, 0)
        calls.append(sum(map(len, operators._known.values())))
    assert calls[0] == calls[1]


def test_weights_are_columns_then_rows():
    class Block(nn.Module):
        def __init__(self):
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

        def forward(self, x):
            return self.down(nn.op.gelu(self.up(x))) + x

    model = models.exported(Block(), x=((6, 16), "float32"))
    exe = axe.compile(model, mesh=axe.Mesh({"tp": 2}), work_dir=None)
    assert str(exe.layouts["up.weight"]) == "S[(2, 32, 16) : (1@tp, 16, 1)]"
    assert str(exe.layouts["down.weight"]) == "S[(16, 2, 32) : (32, 1@tp, 1)]"
    assert "100% of the products' operations are shared over tp" in exe.show()


def test_several_functions_share_weights(workers):
    class Model(nn.Module):
        def __init__(self):
            self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

        def prefill(self, x):
            return self.down(nn.op.gelu(self.up(x)))

        def decode(self, x):
            return self.down(nn.op.gelu(self.up(x))) + x

    spec = {name: {"x": nn.spec.Tensor([n, 16], "float32")} for name, n in (("prefill", 12), ("decode", 1))}
    model, _ = Model().export_tvm(spec)
    exe = axe.compile(model, mesh=axe.Mesh({"tp": 2}), work_dir=None)
    assert {each.name for each in exe.functions} == {"prefill", "decode"}
    of = exe.shared.functions
    assert [e.tensors for e in of["prefill"].inputs[1:]] == [e.tensors for e in of["decode"].inputs[1:]]
    arrays = models.drawn(model, "prefill")
    names = [str(param.name) for param in model["prefill"].params]
    with exe.load(workers(2), dict(zip(names[1:], arrays[1:], strict=True))) as loaded:
        for name, x in (("prefill", arrays[0]), ("decode", arrays[0][:1])):
            assert error([loaded[name](x).numpy()], models.alone(model, [x, *arrays[1:]], name)) < 1e-5


def test_tuples_parameters_and_a_result_twice(workers):
    builder = relax.BlockBuilder()
    x, w = (relax.Var(name, relax.TensorType((8, 8), "float32")) for name in "xw")
    with builder.function("forward", [x, w]):
        with builder.dataflow():
            both = builder.emit(relax.Tuple([x, builder.emit(relax.op.matmul(x, w))]))
            y = builder.emit(relax.TupleGetItem(both, 1))
            z = builder.emit(relax.op.nn.relu(y))
            out = builder.emit_output(relax.Tuple([z, x, z]))
        builder.emit_func_output(out)
    model = builder.get()
    arrays = models.drawn(model)
    exe = axe.compile(model, mesh=axe.Mesh({"tp": 2}), work_dir=None)
    assert error(exe.run(workers(2), *arrays), models.alone(model, arrays)) < 1e-6


# ---- Pins


def test_pins():
    model, mesh = models.encoder(), axe.Mesh({"tp": 2})

    def forms(**options):
        shared = share_model(model, mesh, **options)
        return {each.name: each.tensors[0].form for each in shared.functions["forward"].inputs}

    pinned = forms(pins={"layers.*.up.weight": 1, "layers.*.q.weight": None})
    assert str(pinned["layers.0.up.weight"]) == "S1[24@0 24@1]"
    assert pinned["layers.0.q.weight"] == WHOLE
    assert forms(pins={"layers.0.up.weight": "S[(96, 2, 24) : (24, 1@tp, 1)]"})["layers.0.up.weight"].dim == 1
    with pytest.raises(axe.InputError, match=r"pins 'layers.\*.up.weight' and '\*.up.weight' differ about layers.0.up"):
        forms(pins={"layers.*.up.weight": 1, "*.up.weight": 0})
    with pytest.raises(axe.InputError, match=r"pin 'nothing' is of no parameter; there are x, mask, layers.0"):
        forms(pins={"nothing": 0})
    with pytest.raises(axe.InputError, match=r"has 2 dimensions, there is no dimension 2"):
        forms(pins={"layers.0.up.weight": 2})


def test_pinned_models_equal_one_device(workers):
    model = models.encoder()
    arrays = models.drawn(model)
    pins = {"layers.*.up.weight": 1, "layers.*.q.weight": None, "x": 1}
    exe = axe.compile(model, mesh=axe.Mesh({"tp": 3}), work_dir=None, pins=pins)
    assert error(exe.run(workers(3), *arrays), models.alone(model, arrays)) < 1e-5


# ---- Refused


def test_symbolic_shapes_are_refused_by_name():
    class Linear(nn.Module):
        def __init__(self):
            self.up = nn.Linear(8, 12)

        def forward(self, x):
            return self.up(x)

    model = models.exported(Linear(), x=(("n", 8), "float32"))
    with pytest.raises(axe.LowerError, match=r"forward: parameter 'x' has the symbolic shape .*BindSymbolicVars"):
        axe.compile(model, mesh=axe.Mesh({"tp": 2}))


def test_options_are_of_models_on_a_mesh():
    with pytest.raises(axe.LowerError, match="axis, memory and pins are for a Relax model on a mesh"):
        axe.compile(models.experts(), memory=0.5)
