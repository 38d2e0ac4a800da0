"""The pipeline by its name, `axe.compile` of a model, the example, and the package's own."""

import runpy
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm.relax.frontend import nn
from tvm.s_tir.dlight import ApplyDefaultSchedule
from tvm.s_tir.dlight.cpu import GEMV
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_axe as axe
from tvm_axe.relax.workspace import with_workspaces

EXAMPLE = Path(__file__).parents[2] / "examples" / "relax_mlp.py"


@pytest.fixture(scope="module")
def mod(export):
    layers = {"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}
    return export(layers, lambda m, x: m.down(nn.op.gelu(m.up(x))) + x, x=(6, 8))


@pytest.mark.parametrize("axis", [None, "tp"])
def test_pipeline_makes_what_compile_runs(mod, axis):
    mesh = axe.Mesh({"tp": 2})
    made = tvm.relax.get_pipeline("axe", mesh=mesh, axis=axis)(mod)
    exe = axe.compile(mod, mesh=mesh, axis=axis, work_dir="no such folder")
    tvm.ir.assert_structural_equal(made, exe.shared.module)
    assert isinstance(made["forward"], tvm.relax.Function)
    scheduled = tvm.relax.get_pipeline("axe", mesh=mesh, axis=axis, work_dir="no such folder")(mod)
    tvm.ir.assert_structural_equal(with_workspaces(scheduled)[0], exe.runnable)


def test_pipeline_goes_into_a_sequence(mod):
    mesh = axe.Mesh({"tp": 2})
    step = tvm.relax.get_pipeline("axe", mesh=mesh)
    made = tvm.transform.Sequential([tvm.relax.transform.CanonicalizeBindings(), step])(mod)
    tvm.ir.assert_structural_equal(made, step(mod))


def test_unknown_axis():
    with pytest.raises(axe.LayoutError, match=r"unknown mesh axis 'pp'; mesh tp=2 has tp"):
        tvm.relax.get_pipeline("axe", mesh=axe.Mesh({"tp": 2}), axis="pp")


def test_errors_keep_their_type_through_the_pass():
    builder, x = tvm.relax.BlockBuilder(), tvm.relax.Var("x", tvm.relax.TensorType([6], "int64"))
    with builder.function("forward", [x]):
        with builder.dataflow():
            found = builder.emit_output(tvm.relax.op.nonzero(x))
        builder.emit_func_output(found)
    step = tvm.relax.get_pipeline("axe", mesh=axe.Mesh({"tp": 2}))
    with pytest.raises(axe.LowerError, match=r"forward: the result of relax.run.nonzero, .* without a shape"):
        step(builder.get())


def test_wrong_array_is_named_as_in_the_model(mod, draw, workers):
    exe = axe.compile(mod, mesh=axe.Mesh({"tp": 2}))
    x, weight, *rest = draw(mod)
    with pytest.raises(axe.InputError, match=r"up.weight has the shape \(12, 8\); got an array of \(8, 12\)"):
        exe.run(workers(2), x, weight.T.copy(), *rest)


# ---- One device ------------------------------------------------------------------------------------------------------


T = tvm.relax.transform
FUSED = [T.LegalizeOps(), T.AnnotateTIROpPattern(), T.FoldConstant(), T.FuseOps(), T.FuseTIR()]


@pytest.fixture(scope="module")
def normalized(export):
    """A model of any number of rows, what it is given, and what it makes of that as `axe.compile` has it."""
    layers = {"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}
    mod = export(layers, lambda m, x: nn.op.softmax(m.down(nn.op.gelu(m.up(x))) + x), x=("n", 8))
    arrays = [np.random.default_rng(2).standard_normal((5, 8), dtype="float32"), *draw_weights(mod)]
    (want,) = axe.compile(mod, work_dir=None)._run(None, tuple(arrays))
    return mod, arrays, want


@pytest.mark.parametrize(
    "before",
    [[], [T.LegalizeOps()], FUSED, [tvm.relax.get_pipeline("zero")], [*FUSED, ApplyDefaultSchedule(GEMV())]],
    ids=["nothing", "legalized", "fused", "zero", "dlight"],
)
def test_one_device_is_compiled_by_upstreams_compile(normalized, before):
    mod, arrays, want = normalized
    target = tvm.target.Target("llvm")
    with target:
        given = tvm.transform.Sequential(before)(mod)
    built = tvm.compile(given, target, relax_pipeline="axe")
    machine = tvm.relax.VirtualMachine(built, tvm.cpu())
    got = machine["forward"](*map(tvm.runtime.tensor, arrays)).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    if not before:
        np.testing.assert_array_equal(got, want)


def draw_weights(mod):
    rng = np.random.default_rng(3)
    shapes = [[int(extent) for extent in param.ty.shape] for param in mod["forward"].params[1:]]
    return [rng.standard_normal(shape, dtype="float32") for shape in shapes]


def test_what_upstream_has_compiled_is_exported(mod, draw, tmp_path):
    pipeline = tvm.relax.get_pipeline("axe", target={"kind": "llvm", "num-cores": 1}, pack_weights=True)
    tvm.compile(mod, "llvm", relax_pipeline=pipeline).export_library(tmp_path / "model.so")
    machine = tvm.relax.VirtualMachine(tvm.runtime.load_module(tmp_path / "model.so"), tvm.cpu())
    x, *weights = map(tvm.runtime.tensor, draw(mod))
    got = machine["forward"](x, *machine["forward_transform_params"](weights)).numpy()
    want = axe.compile(mod, work_dir=None)(*draw(mod))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_model_without_kernels():
    @I.ir_module
    class Same:
        @R.function
        def main(x: R.Tensor((3,), "float32")) -> R.Tensor((3,), "float32"):
            return x

    machine = tvm.relax.VirtualMachine(tvm.compile(Same, "llvm", relax_pipeline="axe"), tvm.cpu())
    assert machine["main"](tvm.runtime.tensor(np.ones(3, "float32"))).numpy().sum() == 3


def test_what_a_device_of_a_mesh_runs_is_refused_by_upstreams_compile(mod):
    pipeline = tvm.relax.get_pipeline("axe", mesh=axe.Mesh({"tp": 2}))
    with pytest.raises(axe.LowerError, match=r"run by workers, .*use exe = axe\.compile\(model, mesh=mesh\)"):
        tvm.compile(mod, "llvm", relax_pipeline=pipeline)
    with pytest.raises(axe.LowerError, match="pack_weights is for one device; leave it out, or the mesh"):
        tvm.relax.get_pipeline("axe", mesh=axe.Mesh({"tp": 2}), pack_weights=True)


def test_example(capsys):
    assert runpy.run_path(str(EXAMPLE))["main"]() < 1e-5
    shown = capsys.readouterr().out
    assert "first.up.weight    S0[192@0 192@1]" in shown
    assert "100% of the products' operations are shared over tp" in shown
