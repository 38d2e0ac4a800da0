"""Models of unknown extents on one device: tuned at representatives, right for every value."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.frontend import nn

import tvm_axe as axe
from tvm_axe.errors import InputError
from tvm_axe.machines import resolve_target

VALUES = {"n": (1, 12)}
TARGET = resolve_target("llvm", threads=1)


class _Model(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(24, 40, bias=False), nn.Linear(40, 24, bias=False)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.down(nn.op.silu(self.up(x))) + x


def _bound(tokens: str | int) -> tvm.IRModule:
    """The model, its weights constants."""
    mod, _ = _Model().export_tvm({"forward": {"x": nn.spec.Tensor([tokens, 24], "float32")}})
    up, down = _weights()
    return relax.transform.BindParams("forward", {"up.weight": up, "down.weight": down})(mod)


def _weights() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, dtype="float32") for shape in ((40, 24), (24, 40))]


def _wanted(x: np.ndarray) -> np.ndarray:
    up, down = (weight.astype("float64") for weight in _weights())
    inner = x.astype("float64") @ up.T
    return (inner / (1 + np.exp(-inner))) @ down.T + x


def _check(exe: axe.Executable) -> None:
    rng = np.random.default_rng(1)
    for n in (0, 1, 2, 11, 12, 13, 40):
        x = rng.standard_normal((n, 24), dtype="float32")
        got = exe(x)
        assert got.shape == (n, 24)
        assert np.abs(got - _wanted(x)).max(initial=0) < 1e-4


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    work_dir = tmp_path_factory.mktemp("records")
    options = {"target": TARGET, "trials": 2, "work_dir": work_dir, "seed": 1, "progress": False}
    return work_dir, axe.tune(_bound("n"), values=VALUES, **options)


def test_each_kernel_is_tuned_at_each_value(tuned):
    _, result = tuned
    assert len(result.tasks) == 4 and not result.left_out
    assert {task.name.rsplit("_", 1)[1] for task in result.tasks} == {"n1", "n12"}


def test_the_records_are_found_again(tuned):
    work_dir, result = tuned
    exe = axe.compile(_bound("n"), target=TARGET, work_dir=work_dir, values=VALUES)
    assert exe.tuned and {name.rsplit(", ", 1)[1] for name in exe.tuned} <= {"n = 1", "n = 12"}
    assert "tuned at 12: " in exe.show() and "n <= 1: " in exe.show()
    assert sorted(exe.tuned.values())[0] >= min(task.best_ms for task in result.tasks) / 1e3 - 1e-12
    _check(exe)


def test_the_values_of_another_compilation_are_others(tuned):
    work_dir, _ = tuned
    assert not axe.compile(_bound("n"), target=TARGET, work_dir=work_dir, values={"n": (5,)}).tuned


def test_the_record_of_a_value_is_that_of_the_model_of_that_shape(tuned):
    """What is tuned at n = 12 is the function of 12 rows, whoever calls it."""
    work_dir, _ = tuned
    assert len(axe.compile(_bound(12), target=TARGET, work_dir=work_dir).tuned) == 2


def test_untuned_and_through_upstream():
    exe = axe.compile(_bound("n"), target=TARGET, work_dir=None)
    _check(exe)
    assert "n <= 1: tiles of 1 row" in exe.show()
    vm = relax.VirtualMachine(tvm.compile(_bound("n"), target=TARGET, relax_pipeline="axe"), tvm.cpu())
    x = np.random.default_rng(2).standard_normal((7, 24), dtype="float32")
    assert np.abs(vm["forward"](tvm.runtime.tensor(x)).numpy() - _wanted(x)).max() < 1e-4


@pytest.mark.parametrize(
    ("values", "said"), [({"m": (1,)}, "no shape has the variable 'm'"), ({"n": (0,)}, "some whole numbers")]
)
def test_bad_values_are_refused(values, said, tmp_path):
    with pytest.raises(InputError, match=said):
        axe.compile(_bound("n"), target=TARGET, work_dir=None, values=values)
    with pytest.raises(InputError, match=said):
        axe.tune(_bound("n"), target=TARGET, trials=1, work_dir=tmp_path, values=values)


def test_sums_along_an_unknown_extent_in_a_model_with_constant_weights():
    """Upstream writes a scan with layouts of its extents; positions of a padded batch are made so."""
    builder, emit = relax.BlockBuilder(), relax.op
    batch, tokens = tvm.tirx.Var("b", "int64"), tvm.tirx.Var("t", "int64")
    mask = relax.Var("mask", relax.TensorType((batch, tokens), "int64"))
    weight = np.random.default_rng(3).standard_normal((1, 8), dtype="float32")
    with builder.function("main", [mask]):
        with builder.dataflow():
            places = builder.emit(emit.astype(builder.emit(emit.cumsum(mask, -1)), "float32"))
            out = builder.emit(emit.matmul(builder.emit(emit.expand_dims(places, -1)), relax.const(weight)))
            out = builder.emit_output(out)
        builder.emit_func_output(out)
    exe = axe.compile(builder.get(), target=TARGET, work_dir=None)
    for shape in ((3, 4), (1, 9)):
        given = np.random.default_rng(4).integers(0, 2, shape)
        np.testing.assert_allclose(exe(given), given.cumsum(-1)[..., None] * weight, rtol=1e-5)
