"""A model scheduled pair by pair: equal to one device and numpy, weights shared, communication of the closed form."""

import math

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm.relax.frontend import nn

import tvm_axe as axe
from tvm_axe.relax import schedule_model

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
    exe = axe.compile(schedule_model(mod, axe.Mesh({"tp": devices})), mesh=axe.Mesh({"tp": devices}))
    found = exe.run(workers(devices, engine), *arrays)
    assert found.shape == (7, 10)
    assert relative_error(found, alone(mod, arrays)) < 1e-5
    assert relative_error(found, mlp_in_numpy(arrays, activation, True, True)) < 1e-5
    # The tensors stay on the workers: nothing of one run is left in the next.
    arrays = draw(mod, seed=1)
    found = exe.run(workers(devices, engine), *arrays)
    assert relative_error(found, mlp_in_numpy(arrays, activation, True, True)) < 1e-5


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_weights_are_shared_columns_then_rows(export, devices):
    mesh = axe.Mesh({"tp": devices})
    exe = axe.compile(schedule_model(mlp(export, (7,), 10, 14), mesh), mesh=mesh)
    assert exe.inputs[:5] == ("x", "up0_weight", "up0_bias", "down0_weight", "down0_bias")
    cut = {name: exe.layouts[name].sharding(shape, mesh) for name, shape in zip(exe.inputs, SHAPES)}
    for n in (0, 1):
        assert cut[f"up{n}_weight"] == {0: "tp"}  # a row of nn.Linear's weight is an output feature
        assert cut[f"up{n}_bias"] == {0: "tp"}
        assert cut[f"down{n}_weight"] == {1: "tp"}
        assert cut[f"down{n}_bias"] == {}
    assert cut["x"] == {}


SHAPES = [(7, 10)] + [(14, 10), (14,), (10, 14), (10,)] * 2


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_each_block_ends_in_one_fused_kernel(export, devices, moved):
    mesh = axe.Mesh({"tp": devices})
    exe = axe.compile(schedule_model(mlp(export, (7,), 10, 14), mesh), mesh=mesh)
    assert [stage.kind for stage in exe.stages] == ["local", "local", "local", "mesh kernel"] * 2
    # A reduce-scatter and an all-gather of the block's result.
    block = moved(["RS+AG"], 7, 10, devices)
    assert [stage.bytes for stage in exe.stages if stage.kind == "mesh kernel"] == [block] * 2
    assert exe.bytes == 2 * block


def test_without_epilogue_the_all_reduce_stays(export, draw, workers, moved):
    mod = mlp(export, (6,), 8, 12, bias=False, residual=False)
    exe = axe.compile(schedule_model(mod, axe.Mesh({"tp": 2})), mesh=axe.Mesh({"tp": 2}))
    assert [stage.kind for stage in exe.stages] == ["local", "local", "local", "all-reduce"] * 2
    assert exe.bytes == 2 * moved(["AR"], 6, 8, 2)
    arrays = draw(mod)
    assert relative_error(exe.run(workers(2), *arrays), mlp_in_numpy(arrays, "gelu", False, False)) < 1e-5


@pytest.mark.parametrize("tokens", [(1, 6), (2, 3), (1,)])
def test_slices_are_of_a_dimension_that_has_one_for_each_device(export, draw, workers, tokens):
    mod = mlp(export, tokens, 8, 12)
    exe = axe.compile(schedule_model(mod, axe.Mesh({"tp": 2})), mesh=axe.Mesh({"tp": 2}))
    dim = next(dim for dim, extent in enumerate((*tokens, 8)) if extent >= 2)
    (name,) = [name for name in exe.layouts if name.startswith("gv_")]
    assert exe.layouts[name].sharding((*tokens, 8), exe.mesh) == {dim: "tp"}
    arrays = draw(mod)
    assert relative_error(exe.run(workers(2), *arrays), mlp_in_numpy(arrays, "gelu", True, True)) < 1e-5


def test_more_devices_than_columns_leaves_the_pair_whole(export, draw, workers):
    mod = mlp(export, (6,), 8, 3)
    exe = axe.compile(schedule_model(mod, axe.Mesh({"tp": 4})), mesh=axe.Mesh({"tp": 4}))
    assert {stage.kind for stage in exe.stages} == {"local"}
    arrays = draw(mod)
    assert relative_error(exe.run(workers(4), *arrays), mlp_in_numpy(arrays, "gelu", True, True)) < 1e-5


@settings(max_examples=10)
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
    func = schedule_model(mod, mesh)
    found = axe.compile(func, mesh=mesh).run(workers(devices), *arrays)
    assert np.abs(found - want).max() < 1e-5 * scale
    # The same program with its annotations ignored.
    ignored = tvm.runtime.tensor(np.full(want.shape, np.nan, "float32"))
    tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), target="llvm")["main"](
        *[tvm.runtime.tensor(array) for array in arrays], ignored
    )
    assert np.abs(ignored.numpy() - want).max() < 1e-5 * scale


def test_one_axis_of_several(export, draw):
    mod, mesh = mlp(export, (6,), 8, 12), axe.Mesh({"dp": 2, "tp": 2})
    exe = axe.compile(schedule_model(mod, mesh, axis="tp"), mesh=mesh)
    assert exe.layouts["up0_weight"].sharding((12, 8), mesh) == {0: "tp"}
    arrays = draw(mod)
    with axe.launch(mesh, engine="threads") as both:
        found = exe.run(both, *arrays)
    assert relative_error(found, mlp_in_numpy(arrays, "gelu", True, True)) < 1e-5


# ---- other models ------------------------------------------------------------------------------------------------


def check(mod, draw, alone, workers, kinds):
    """The model equals one device's on two, with stages of these kinds that communicate."""
    exe = axe.compile(schedule_model(mod, axe.Mesh({"tp": 2})), mesh=axe.Mesh({"tp": 2}))
    arrays = draw(mod)
    found, wanted = exe.run(workers(2), *arrays), alone(mod, arrays)
    pairs = zip(found, wanted) if isinstance(wanted, tuple) else [(found, wanted)]
    assert all(relative_error(one, other) < 1e-5 for one, other in pairs)
    assert [stage.kind for stage in exe.stages if stage.kind != "local"] == kinds
    return exe


def test_gated_layer_cuts_both_first_matmuls(export, draw, alone, workers):
    layers = {"gate": nn.Linear(8, 12), "up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}
    mod = export(layers, lambda m, x: m.down(nn.op.silu(m.gate(x)) * m.up(x)) + x, x=(6, 8))
    exe = check(mod, draw, alone, workers, ["mesh kernel"])
    for name in ("gate_weight", "up_weight"):
        assert exe.layouts[name].sharding((12, 8), exe.mesh) == {0: "tp"}


def test_third_matmul_is_whole_on_each_device(export, draw, alone, workers):
    layers = {"a": nn.Linear(8, 12), "b": nn.Linear(12, 10), "c": nn.Linear(10, 8)}
    mod = export(layers, lambda m, x: m.c(nn.op.relu(m.b(nn.op.relu(m.a(x))))), x=(6, 8))
    exe = check(mod, draw, alone, workers, ["mesh kernel"])
    assert exe.layouts["c_weight"].sharding((8, 10), exe.mesh) == {}


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.RMSNorm(8, [-1])])
def test_norm_behind_the_residual_is_no_epilogue(export, draw, alone, workers, norm):
    layers = {"up": nn.Linear(8, 12), "down": nn.Linear(12, 8), "norm": norm}
    mod = export(layers, lambda m, x: m.norm(m.down(nn.op.gelu(m.up(m.norm(x)))) + x), x=(6, 8))
    check(mod, draw, alone, workers, ["mesh kernel"])


def softmax(hidden):
    return nn.op.softmax(hidden, -1)


def reshaped(hidden):
    return nn.op.reshape(nn.op.relu(nn.op.reshape(hidden, (6, 3, 4))), (6, 12))


@pytest.mark.parametrize("between", [softmax, reshaped])
def test_what_mixes_columns_keeps_both_matmuls_whole(export, draw, alone, workers, between):
    layers = {"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}
    mod = export(layers, lambda m, x: m.down(between(m.up(x))), x=(6, 8))
    check(mod, draw, alone, workers, [])


def test_result_that_is_returned_too_is_whole(export, draw, alone, workers):
    layers = {"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}

    def forward(model, x):
        hidden = nn.op.relu(model.up(x))
        return model.down(hidden), hidden

    exe = check(export(layers, forward, x=(6, 8)), draw, alone, workers, [])
    assert len(exe.outputs) == 2


def test_two_readers_of_one_sum(export, draw, alone, workers):
    layers = {"up": nn.Linear(8, 12), "down": nn.Linear(12, 8, bias=False)}

    def forward(model, x):
        out = model.down(nn.op.relu(model.up(x)))
        return out + x, nn.op.relu(out)

    check(export(layers, forward, x=(6, 8)), draw, alone, workers, ["mesh kernel"])
