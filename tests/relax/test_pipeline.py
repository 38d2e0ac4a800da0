"""The pipeline by its name, `axe.compile` of a model, the example, and the package's own."""

import doctest
import runpy
from pathlib import Path

import pytest
import tvm
from tvm.relax.frontend import nn

import tvm_axe as axe
import tvm_axe.relax
from tvm_axe.relax import schedule_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "relax_mlp.py"


@pytest.fixture(scope="module")
def mod(export):
    layers = {"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)}
    return export(layers, lambda m, x: m.down(nn.op.gelu(m.up(x))) + x, x=(6, 8))


@pytest.mark.parametrize("axis", [None, "tp"])
def test_pipeline_makes_what_compile_runs(mod, axis):
    mesh = axe.Mesh({"tp": 2})
    made = tvm.relax.get_pipeline("axe", mesh=mesh, axis=axis)(mod)
    exe = axe.compile(schedule_model(mod, mesh), mesh=mesh, work_dir="no such folder")
    tvm.ir.assert_structural_equal(made, exe.module)
    assert isinstance(made["main"], tvm.relax.Function)


def test_pipeline_goes_into_a_sequence(mod):
    mesh = axe.Mesh({"tp": 2})
    step = tvm.relax.get_pipeline("axe", mesh=mesh)
    made = tvm.transform.Sequential([tvm.relax.transform.CanonicalizeBindings(), step])(mod)
    tvm.ir.assert_structural_equal(made, step(mod))


def test_unknown_axis():
    with pytest.raises(axe.LayoutError, match=r"unknown mesh axis 'pp'; mesh tp=2 has tp"):
        tvm.relax.get_pipeline("axe", mesh=axe.Mesh({"tp": 2}), axis="pp")


def test_axis_must_be_named_where_there_are_several(mod):
    mesh = axe.Mesh({"dp": 2, "tp": 2})
    with pytest.raises(axe.LayoutError, match=r"axis: mesh dp=2,tp=2 has 2 axes; name the one that shares the weights"):
        tvm.relax.get_pipeline("axe", mesh=mesh)
    with pytest.raises(axe.LayoutError, match=r'name the one that shares the weights: axis="tp"'):
        schedule_model(mod, mesh)


def test_errors_keep_their_type_through_the_pass(export):
    symbolic = export({"up": nn.Linear(8, 12)}, lambda m, x: m.up(x), x=("n", 8))
    step = tvm.relax.get_pipeline("axe", mesh=axe.Mesh({"tp": 2}))
    with pytest.raises(axe.LowerError, match=r"forward: parameter 'x' has the shape .*n, 8.*every extent"):
        step(symbolic)


def test_wrong_array_is_named_as_in_the_model(mod, draw, workers):
    exe = axe.compile(mod, mesh=axe.Mesh({"tp": 2}))
    x, weight, *rest = draw(mod)
    with pytest.raises(axe.LowerError, match=r"up.weight has the shape \(12, 8\); got an array of \(8, 12\)"):
        exe.run(workers(2), x, weight.T.copy(), *rest)


def test_example(capsys):
    assert runpy.run_path(str(EXAMPLE))["main"]() < 1e-5
    shown = capsys.readouterr().out
    assert "first.up.weight    S0[192@0 192@1]" in shown
    assert "100% of the products' operations are shared over tp" in shown


def test_documentation():
    assert doctest.testmod(tvm_axe.relax).failed == 0
