"""Models shared over a mesh: equal to one device, products divided, bytes of Megatron's closed form, weights cut."""

import re

import fuzz_models
import numpy as np
import pytest
import shared_models as models
from tvm import relax
from tvm.relax.frontend import nn
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.collective.engine import HOST, Rates
from tvm_axe.layout import Link
from tvm_axe.relax import share_model
from tvm_axe.relax.choosing import choose
from tvm_axe.relax.forms import WHOLE
from tvm_axe.relax.graph import Node
from tvm_axe.relax.operators import Operators
from tvm_axe.relax.reading import graph_of, legalized
from tvm_axe.relax.sharing import described

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


@pytest.fixture(scope="module")
def square():
    with axe.launch(axe.Mesh({"dp": 2, "tp": 2}), engine="threads") as both:
        yield both


@pytest.mark.parametrize(("name", "axis"), [*((name, None) for name in MODELS), ("decoder", "tp")])
def test_several_axes(name, axis, square):
    model = MODELS[name]()
    arrays = models.drawn(model)
    exe = axe.compile(model, mesh=square.mesh, work_dir=None, axis=axis)
    over = {name for each in exe.shared.tensors.values() for name, form in each.forms if form != WHOLE}
    assert over == {"dp", "tp"} if axis is None else over <= {"tp"}
    for _ in range(2):
        assert error(exe.run(square, *arrays), models.alone(model, arrays)) < 2e-5


def test_rows_on_one_axis_and_heads_on_the_other(square):
    """Where a device may hold half of the weights, one axis deals out requests and the other weights."""
    model = models.encoder(batch=4)
    shared = share_model(model, square.mesh, memory=0.55, rates=SLOW)
    forms = {each.name: each.tensors[0].shown for each in shared.functions["forward"].inputs}
    assert forms["x"] == "dp:S0[2@0 2@1]"
    assert (forms["layers.0.q.weight"], forms["layers.0.down.weight"]) == ("tp:S0[24@0 24@1]", "tp:S1[48@0 48@1]")
    found = shared.functions["forward"].chosen
    assert found.weights[0] <= 0.55 * found.weights[1]
    # Two sums over tp, each of a half of the rows: as reduce-scatter and all-gather, the last left scattered.
    assert set(found.collectives) == {"reduce_scatter", "all_gather"}
    assert found.bytes == 3 * 4 * 12 * 48 * 4 // 4


def test_random_models():
    """Of the last but one a device has half of what repeats an element, which was written to every other place.

    The last one repeats rows of n + 4 elements, of which a pass of upstream's makes an error.
    """
    with fuzz_models.launched() as workers:
        for seed, symbolic in (*((seed, 0.3) for seed in range(1000, 1006)), (990196, 0.9), (181429, 0.3)):
            assert fuzz_models.check(seed, workers, symbolic)[0] == ""


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


# ---- What is said


def test_which_axis_shares_what_is_said(square):
    shared = share_model(models.encoder(batch=4), square.mesh, memory=0.55, rates=SLOW)
    assert described(shared) == (
        "forward: 100% of the products' operations are shared over dp (100% of them, 0% of the weights) and "
        "tp (100% of them, 98% of the weights)"
    )


def test_why_products_are_whole_is_said():
    lines = described(share_model(models.resnet(), axe.Mesh({"tp": 3}), memory=0.55)).splitlines()
    assert lines[0] == "forward: 80% of the products' operations are shared over tp"
    assert re.fullmatch(
        r"  not lv\d*, \d+% of them: whole it takes [\d.]+ us, and shared [\d.]+ us and moves", lines[1]
    )

    @T.prim_func(s_tir=True)
    def twice(A: T.Buffer((4, 4), layout=None), B: T.Buffer((4, 4), layout=None)):
        for i, j, k in T.grid(4, 4, 4):
            with T.sblock("B"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    B[vi, vj] = T.float32(0)
                B[vi, vj] = B[vi, vj] + A[vi, vk] * A[vk, vj]

    why = Operators(2, HOST).of(Node("twice", (0,), (1,), twice, None)).whole_because()
    assert why == "no dimension of it can be shared by 2 devices: [a, a] -> [a, a]; a: opaque"


# ---- Refused


def test_options_are_of_models_on_a_mesh():
    with pytest.raises(axe.LowerError, match="axis, memory and pins are for a Relax model on a mesh"):
        axe.compile(models.experts(), memory=0.5)
