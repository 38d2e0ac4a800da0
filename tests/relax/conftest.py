"""Models, their inputs, and workers that the tests of a session share."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.frontend import nn

import tvm_axe as axe
from tvm_axe.relax import choosing


@pytest.fixture
def solved_calls(monkeypatch):
    """How many calls each segment has that is solved while layouts are chosen; equal ones are solved once."""
    counted = []
    segment = choosing._Search._segment

    def count(self, *args):
        counted.append(len(args[0]))
        return segment(self, *args)

    monkeypatch.setattr(choosing._Search, "_segment", count)
    return counted


@pytest.fixture(scope="session")
def export():
    """A model out of a function of (module, tensors): `layers` become its attributes, `shapes` its inputs."""

    def build(layers, forward, dtype="float32", **shapes):
        class Model(nn.Module):
            def __init__(self):
                for name, layer in layers.items():
                    setattr(self, name, layer)

        # The exporter reads the names of the inputs off the signature.
        arguments = ", ".join(shapes)
        scope = {"body": forward}
        exec(f"def forward(self, {arguments}): return body(self, {arguments})", scope)
        Model.forward = scope["forward"]
        specs = {name: nn.spec.Tensor(list(shape), dtype) for name, shape in shapes.items()}
        return Model().export_tvm({"forward": specs})[0]

    return build


@pytest.fixture(scope="session")
def draw():
    """Random arrays for the parameters of a model, of a size that keeps results near 1."""

    def arrays(mod, seed=0):
        rng = np.random.default_rng(seed)
        (model,) = [func for _, func in mod.functions_items() if isinstance(func, relax.Function)]
        shapes = [[int(extent) for extent in param.ty.shape] for param in model.params]
        return [rng.standard_normal(shape, dtype="float32") / np.float32(shape[-1] ** 0.5) for shape in shapes]

    return arrays


@pytest.fixture(scope="session")
def alone():
    """What upstream's own build of a model computes on one device."""

    def run(mod, arrays):
        machine = relax.VirtualMachine(relax.build(mod, target="llvm"), tvm.cpu())
        (name,) = [var.name_hint for var, func in mod.functions_items() if isinstance(func, relax.Function)]
        found = machine[name](*[tvm.runtime.tensor(array) for array in arrays])
        return found.numpy() if isinstance(found, tvm.runtime.Tensor) else tuple(one.numpy() for one in found)

    return run


@pytest.fixture(scope="session")
def workers():
    """Workers by (mesh or number of devices, engine), each launched once."""
    launched = {}

    def get(devices, engine="threads"):
        key = devices, engine
        if key not in launched:
            mesh = axe.Mesh({"tp": devices}) if isinstance(devices, int) else devices
            launched[key] = axe.launch(mesh, engine=engine)
            launched[key].__enter__()
        return launched[key]

    yield get
    for each in launched.values():
        each.__exit__(None, None, None)
