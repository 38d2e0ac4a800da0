"""MLPs of any size on meshes: equal to one device and numpy, weights shared, communication of the closed form."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm.relax.frontend import nn

import tvm_axe as axe
from tvm_axe.collective.engine import Rates
from tvm_axe.layout import Link
from tvm_axe.relax import share_model

erf = np.vectorize(math.erf)
ACTIVATIONS = {
    "gelu": (nn.op.gelu, lambda x: x * 0.5 * (1 + erf(x / 2**0.5))),
    "relu": (nn.op.relu, lambda x: np.maximum(x, 0)),
    "silu": (nn.op.silu, lambda x: x / (1 + np.exp(-x))),
}


def mlp(export, tokens, width, hidden, activation="gelu", bias=True, residual=True):
    """Two blocks of matmul, activation, matmul; tokens is the shape of the input but for its last dimension."""
    act = ACTIVATIONS[activation][0]
    layers = {}
    for n in (0, 1):
        layers[f"up{n}"] = nn.Linear(width, hidden, bias=bias)
        layers[f"down{n}"] = nn.Linear(hidden, width, bias=bias)

    def forward(model, x):
        for n in (0, 1):
            out = getattr(model, f"down{n}")(act(getattr(model, f"up{n}")(x)))
            x = out + x if residual else out
        return x

    return export(layers, forward, x=(*tokens, width))


def mlp_in_numpy(arrays, activation, bias, residual):
    act = ACTIVATIONS[activation][1]
    x, *weights = [array.astype("float64") for array in arrays]
    step = 2 if bias else 1
    for _ in range(2):
        up, down, weights = weights[:step], weights[step : 2 * step], weights[2 * step :]
        hidden = act(x @ up[0].T + (up[1] if bias else 0))
        out = hidden @ down[0].T + (down[1] if bias else 0)
        x = out + x if residual else out
    return x


def relative_error(found, wanted):
    return np.abs(found - wanted).max() / np.abs(wanted).max()


@pytest.mark.parametrize(
    ("devices", "engine", "activation"),
    [(1, "threads", "gelu"), (2, "threads", "relu"), (3, "threads", "gelu"), (4, "threads", "silu")]
    + [(2, "processes", activation) for activation in ACTIVATIONS],
)
def test_equals_one_device_and_numpy(export, draw, alone, workers, devices, engine, activation):
    mod = mlp(export, (7,), 10, 14, activation)
    arrays = draw(mod)
    exe = axe.compile(mod, mesh=axe.Mesh({"tp": devices}), work_dir=None, memory=0.0)
    found = exe.run(workers(devices, engine), *arrays)
    assert found.shape == (7, 10)
    assert relative_error(found, alone(mod, arrays)) < 1e-5
    assert relative_error(found, mlp_in_numpy(arrays, activation, True, True)) < 1e-5
    # The tensors stay on the workers: nothing of one run is left in the next.
    arrays = draw(mod, seed=1)
    found = exe.run(workers(devices, engine), *arrays)
    assert relative_error(found, mlp_in_numpy(arrays, activation, True, True)) < 1e-5


SLOW = Rates(Link(latency=0.0, bandwidth=1e10), memory=1e12, operations=2e10)
"""Devices on which models of a few numbers are worth sharing."""


def steps_of(mod, devices):
    return share_model(mod, axe.Mesh({"tp": devices}), memory=0.0, rates=SLOW).functions["forward"]


@pytest.mark.parametrize("devices", [2, 4])
def test_each_block_ends_in_one_fused_kernel(export, devices, moved):
    """A reduce-scatter, the epilogue and an all-gather of the block's result; that of the last one stays shared."""
    of = steps_of(mlp(export, (8,), 64, 256), devices)
    rows = [step for step in of.steps if step.moves]
    assert [step.moves for step in rows] == [("reduce-scatter of lv1", "all-gather of lv1"), ("reduce-scatter of lv3",)]
    assert len(of.steps) == 6 and all(step.func is not None for step in of.steps)
    assert of.chosen.bytes == moved(["RS+AG"], 8, 64, devices) * 3 // 2


def test_without_epilogue_the_collectives_stay(export):
    of = steps_of(mlp(export, (8,), 64, 256, bias=False, residual=False), 2)
    assert [step.kind for step in of.steps if step.kind] == ["all_reduce", "all_gather"]


@pytest.mark.parametrize("tokens", [(1, 6), (2, 3), (1,)])
def test_tokens_in_one_dimension_or_two(export, draw, workers, tokens):
    mod = mlp(export, tokens, 8, 12)
    exe = axe.compile(mod, mesh=axe.Mesh({"tp": 2}), work_dir=None, memory=0.0)
    arrays = draw(mod)
    assert relative_error(exe.run(workers(2), *arrays), mlp_in_numpy(arrays, "gelu", True, True)) < 1e-5


@settings(max_examples=6)
@given(
    tokens=st.integers(1, 9),
    width=st.integers(1, 9),
    hidden=st.integers(1, 13),
    devices=st.integers(1, 4),
    activation=st.sampled_from(list(ACTIVATIONS)),
    bias=st.booleans(),
    residual=st.booleans(),
)
def test_any_mlp(export, draw, workers, tokens, width, hidden, devices, activation, bias, residual):
    mod = mlp(export, (tokens,), width, hidden, activation, bias, residual)
    mesh, arrays = axe.Mesh({"tp": devices}), draw(mod)
    want = mlp_in_numpy(arrays, activation, bias, residual)
    scale = max(np.abs(want).max(), 1)
    found = axe.compile(mod, mesh=mesh, work_dir=None, memory=0.0).run(workers(devices), *arrays)
    assert np.abs(found - want).max() < 1e-5 * scale


def test_one_axis_of_several(export, draw):
    mod, mesh = mlp(export, (6,), 8, 12), axe.Mesh({"dp": 2, "tp": 2})
    exe = axe.compile(mod, mesh=mesh, axis="tp", work_dir=None, memory=0.0)
    arrays = draw(mod)
    with axe.launch(mesh, engine="threads") as both:
        found = exe.run(both, *arrays)
    assert relative_error(found, mlp_in_numpy(arrays, "gelu", True, True)) < 1e-5


# ---- other models ------------------------------------------------------------------------------------------------


def check(mod, draw, alone, workers, devices=2):
    """The model equals one device's, its weights cut as far as they can be."""
    exe = axe.compile(mod, mesh=axe.Mesh({"tp": devices}), work_dir=None, memory=0.0)
    arrays = draw(mod)
    found, wanted = exe.run(workers(devices), *arrays), alone(mod, arrays)
    pairs = zip(found, wanted) if isinstance(wanted, tuple) else [(found, wanted)]
    assert all(relative_error(one, other) < 1e-5 for one, other in pairs)


def test_gated_layer(export, draw, alone, workers):
    layers = {"gate": nn.Linear(8, 12), "up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}
    check(export(layers, lambda m, x: m.down(nn.op.silu(m.gate(x)) * m.up(x)) + x, x=(6, 8)), draw, alone, workers)


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.RMSNorm(8, [-1])])
def test_norm_behind_the_residual(export, draw, alone, workers, norm):
    layers = {"up": nn.Linear(8, 12), "down": nn.Linear(12, 8), "norm": norm}
    mod = export(layers, lambda m, x: m.norm(m.down(nn.op.gelu(m.up(m.norm(x)))) + x), x=(6, 8))
    check(mod, draw, alone, workers)


def softmax(hidden):
    return nn.op.softmax(hidden, -1)


def reshaped(hidden):
    return nn.op.reshape(nn.op.relu(nn.op.reshape(hidden, (6, 3, 4))), (6, 12))


@pytest.mark.parametrize("between", [softmax, reshaped])
def test_what_mixes_columns(export, draw, alone, workers, between):
    layers = {"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}
    check(export(layers, lambda m, x: m.down(between(m.up(x))), x=(6, 8)), draw, alone, workers)


def test_two_readers_of_one_sum_and_a_result_on_the_way(export, draw, alone, workers):
    layers = {"up": nn.Linear(8, 12), "down": nn.Linear(12, 8, bias=False)}

    def forward(model, x):
        hidden = nn.op.relu(model.up(x))
        out = model.down(hidden)
        return out + x, nn.op.relu(out), hidden

    check(export(layers, forward, x=(6, 8)), draw, alone, workers)
