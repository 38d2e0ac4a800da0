"""Models of a symbolic batch and a symbolic number of tokens on a mesh: one module for all, kernels put together."""

import numpy as np
import pytest
import shared_models as models
from tvm import tirx
from tvm.relax.frontend import nn

import tvm_axe as axe
from tvm_axe.collective.engine import HOST
from tvm_axe.layout import Mesh
from tvm_axe.layout.shares import Share
from tvm_axe.machines import resolve_target
from tvm_axe.machines.builder import build_program
from tvm_axe.relax import share_model
from tvm_axe.relax.conversion import conversion
from tvm_axe.relax.forms import WHOLE, Form
from tvm_axe.relax.operators import Operators
from tvm_axe.relax.reading import graph_of, legalized

SIZES = {"b": (4,), "n": (64,)}


def model(name, batch):
    """Two layers, of a batch that is a number or not, and any number of tokens."""
    if name == "encoder":
        net, given = models.Encoder(2, 64, 4, 128), {"x": [batch, "n", 64], "mask": [batch, 1, 1, "n"]}
    else:
        net, table = models.Decoder(2, 64, 8, 4, 96, False, 24), [1, "n", 1, 4]
        given = {"ids": [batch, "n"], "cos": table, "sin": table, "mask": [batch, 1, "n", "n"]}
    kinds = {name: "int32" if name == "ids" else "float32" for name in given}
    spec = {"forward": {name: nn.spec.Tensor(shape, kinds[name]) for name, shape in given.items()}}
    return net.export_tvm(spec)[0]


def drawn(module, sizes, seed):
    rng, found = np.random.default_rng(seed), []
    for param in module["forward"].params:
        shape = [sizes.get(str(extent)) or int(extent) for extent in param.ty.shape]
        values = rng.integers(0, 24, shape) if param.name == "ids" else rng.standard_normal(shape) / shape[-1] ** 0.5
        found.append(values.astype(str(param.ty.dtype)))
    return found


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_any_batch_and_any_number_of_tokens(name, devices, workers):
    module = model(name, "b")
    exe = axe.compile(module, mesh=axe.Mesh({"tp": devices}), values=SIZES, work_dir=None)
    for seed, (b, n) in enumerate(((2, 5), (1, 1), (3, 7), (4, 33), (1, 17))):
        arrays = drawn(module, {"b": b, "n": n}, seed)
        (want,) = models.alone(module, arrays)
        found = np.asarray(exe.run(workers(devices), *arrays))
        assert found.shape == want.shape
        assert np.abs(found - want).max() < 1e-5 * max(1.0, np.abs(want).max())


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_a_symbolic_batch_costs_no_kernel(name):
    """No more kernels, collectives and bytes than with a batch of a known size."""
    counts = []
    for batch, values in (("b", SIZES), (4, {"n": (64,)})):
        function = share_model(model(name, batch), axe.Mesh({"tp": 2}), values=values).functions["forward"]
        kernels, collectives = (sum(bool(getattr(step, of)) for step in function.steps) for of in ("func", "kind"))
        counts.append((kernels, collectives, function.chosen.bytes))
    (kernels, collectives, size), (most, others, least) = counts
    assert kernels <= most + others and collectives <= others and size <= least


def test_values_that_another_axis_cuts_are_converted():
    """No parameter says what the whole extent is of which another axis has a share."""
    rows, columns = Form(0, Share.of_any(8, 2)), Form(1, Share.of_any(8, 2))
    source, target = (("dp", rows), ("tp", columns)), (("dp", rows), ("tp", WHOLE))
    made = conversion((None, None), "float32", source, target, Mesh({"dp": 2, "tp": 2}), 4096)
    assert made is not None and made.axis == "tp"
    build_program(made.module, resolve_target("llvm"))


def number(extent):
    """An extent that is a number as one."""
    return int(extent) if isinstance(extent, tirx.IntImm) else extent


class Turned(nn.Module):
    """Tokens in front of the batch, and back."""

    def __init__(self):
        self.inner = nn.Linear(32, 32, bias=False)

    def forward(self, x: nn.Tensor):
        return nn.op.permute_dims(self.inner(nn.op.permute_dims(x, (1, 0, 2))), (1, 0, 2))


def test_what_is_equal_but_for_its_sizes_is_two():
    """Of [b, n] and of [n, b]: each is the other one with its variables renamed."""
    module = Turned().export_tvm({"forward": {"x": nn.spec.Tensor(["b", "n", 32], "float32")}})[0]
    graph, operators = graph_of(legalized(module), "forward"), Operators(2, HOST)
    called = [node for node in graph.nodes if node.func is not None]
    assert len(called) == 3
    for node in called:
        shapes = [[str(number(extent)) for extent in param.shape] for param in operators.of(node).func.params]
        assert shapes == [[str(each) for each in graph.values[at].shape] for at in (*node.ins, *node.outs)]
