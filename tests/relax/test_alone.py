"""A Relax model on one device: tuned, compiled with what tuning found, and right."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax, s_tir
from tvm.relax.frontend import nn
from tvm.s_tir import meta_schedule as ms

import tvm_axe as axe
from tvm_axe.machines import resolve_target
from tvm_axe.meta.search.workloads import workloads_of
from tvm_axe.nests.contraction import find_contractions
from tvm_axe.nests.registers import register_tile
from tvm_axe.nests.tiles import tiles
from tvm_axe.records import apply_best
from tvm_axe.records.database import Database
from tvm_axe.relax.fuse import fuse
from tvm_axe.relax.packing import packed_weights


class _Model(nn.Module):
    def __init__(self):
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.down(nn.op.relu(self.up(x))) + x


@pytest.fixture(scope="module")
def model():
    mod, _ = _Model().export_tvm({"forward": {"x": nn.spec.Tensor([12, 24], "float32")}})
    return mod


def _arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.standard_normal(s, "float32") for s in ((12, 24), (40, 24), 40, (24, 40), 24)]


def _error(got: np.ndarray) -> float:
    x, w1, b1, w2, b2 = _arrays()
    wide = x.astype("float64")
    want = np.maximum(wide @ w1.T + b1, 0) @ w2.T + b2 + wide
    return np.abs(got - want).max() / np.abs(want).max()


def _check(executable) -> None:
    machine = relax.VirtualMachine(executable.vm, tvm.cpu())
    assert _error(machine["forward"](*map(tvm.runtime.tensor, _arrays())).numpy()) < 1e-5


def test_an_untuned_model_runs(model, tmp_path):
    _check(axe.compile(model, work_dir=None))
    _check(axe.compile(model, work_dir=tmp_path / "none"))


def test_a_tuned_model_runs_with_its_records(model, tmp_path):
    target = resolve_target("llvm", threads=1)
    result = axe.tune(model, target=target, trials=3, work_dir=tmp_path, seed=1, progress=False)
    assert len(result.tasks) == 2
    assert sum(task.trials for task in result.tasks) == 6
    tuned, seconds = apply_best(fuse(model, target), target, tmp_path)
    assert len(seconds) == 2
    # A tile kernel is an annotation, any other schedule has vectors.
    assert any(word in tuned.script() for word in ("vectorized", "axe.tile"))
    _check(axe.compile(model, target=target, work_dir=tmp_path))


# ---- Weights that are packed once ------------------------------------------------------------------------------------


def _packing_record(mod: tvm.IRModule, target: tvm.target.Target, folder: Path, pack: bool | None = None) -> int:
    """Give every kernel with weights a record that packs them, faster than any other; how many have such."""
    found = 0
    for work in workloads_of(mod, target, pack_weights=not _bound(mod) if pack is None else pack)[0]:
        database = Database(folder / work.name)
        workload = database.commit_workload(work.mod)
        sch = s_tir.Schedule(workload.mod)
        (match,) = find_contractions(sch)
        assert match.free
        register_tile(sch, match, target, tiles(match, target)[0])
        infos = ms.arg_info.ArgInfo.from_entry_func(workload.mod)
        database.commit_tuning_record(ms.database.TuningRecord(sch.trace, workload, [1e-9], target, infos))
        found += 1
    return found


def _bound(mod: tvm.IRModule) -> bool:
    return len(mod["forward"].params) == 1


def _bind(model: tvm.IRModule) -> tvm.IRModule:
    names = [str(param.name) for param in model["forward"].params[1:]]
    return relax.transform.BindParams("forward", dict(zip(names, _arrays()[1:])))(model)


@pytest.fixture
def target():
    return resolve_target("llvm", threads=1)


def test_constants_are_packed_while_compiling(model, target, tmp_path):
    bound = _bind(model)
    assert _packing_record(bound, target, tmp_path) == 2
    executable = axe.compile(bound, target=target, work_dir=tmp_path)
    text = executable.vm.as_text()
    assert text.count("_prepacked in:") == 2
    assert "_weight_prepack" not in text
    machine = relax.VirtualMachine(executable.vm, tvm.cpu())
    assert _error(machine["forward"](tvm.runtime.tensor(_arrays()[0])).numpy()) < 1e-5


def test_parameters_are_packed_by_a_function_beside_the_models(model, target, tmp_path):
    assert _packing_record(model, target, tmp_path) == 2
    executable = axe.compile(model, target=target, work_dir=tmp_path, pack_weights=True)
    machine = relax.VirtualMachine(executable.vm, tvm.cpu())
    x, *weights = map(tvm.runtime.tensor, _arrays())
    packed = machine["forward_transform_params"](weights)
    assert sorted(len(tensor.shape) for tensor in packed) == [1, 1, 3, 3]
    assert _error(machine["forward"](x, *packed).numpy()) < 1e-5
    parts = (part.partition(":") for part in re.split(r"^@", executable.vm.as_text(), flags=re.MULTILINE))
    functions = {name: code for name, _, code in parts}
    forward, transform = functions["forward"], functions["forward_transform_params"]
    assert forward.count("_prepacked in:") == transform.count("_weight_prepack in:") == 2
    assert "_weight_prepack in:" not in forward


class _TwoSizes(_Model):
    def many(self, x: nn.Tensor) -> nn.Tensor:
        return self.forward(x)

    def few(self, x: nn.Tensor) -> nn.Tensor:
        return self.forward(x)


def test_a_session_packs_once_what_functions_pack_alike(target, tmp_path):
    sizes = {"many": 12, "few": 6}
    specs = {name: {"x": nn.spec.Tensor([rows, 24], "float32")} for name, rows in sizes.items()}
    model, _ = _TwoSizes().export_tvm(specs)
    assert _packing_record(model, target, tmp_path, pack=True) == 4
    exe = axe.compile(model, target=target, work_dir=tmp_path, pack_weights=True)
    taken = packed_weights(exe.runnable)
    packers = [{packer: names for packer, names in taken[name] if packer} for name in sizes]
    assert packers[0] == packers[1] and sorted(packers[0].values()) == [("down.weight",), ("up.weight",)]
    x, *weights = _arrays()
    exe.save(tmp_path / "exe")
    for each in (exe, axe.Executable.load(tmp_path / "exe")):
        with each.load(weights) as session:
            assert session.copied == sum(array.nbytes for array in weights)
            assert _error(session.many(x).numpy()) < 1e-5
            np.testing.assert_allclose(session.few(x[:6]), session.many(x).numpy()[:6], rtol=1e-4, atol=1e-4)


def test_what_would_be_packed_in_every_call_is_not(model, target, tmp_path):
    """Weights that are parameters, and stay so: records that pack are for others."""
    assert _packing_record(model, target, tmp_path) == 2
    executable = axe.compile(model, target=target, work_dir=tmp_path)
    assert "prepack" not in executable.vm.as_text()
    _check(executable)
    marked = relax.transform.AttachAttrLayoutFreeBuffers()(fuse(model, target))
    _, seconds = apply_best(fuse(marked, target), target, tmp_path)
    assert seconds == {}


def test_a_model_is_tuned_as_it_will_be_packed(model, target, tmp_path):
    result = axe.tune(model, target=target, trials=2, work_dir=tmp_path, seed=1, progress=False, pack_weights=True)
    assert [task.trials for task in result.tasks] == [2, 2]
    _, seconds = apply_best(fuse(model, target, pack_weights=True), target, tmp_path)
    assert len(seconds) == 2
    assert len(apply_best(fuse(_bind(model), target), target, tmp_path)[1]) == 2
    assert apply_best(fuse(model, target), target, tmp_path)[1] == {}


def test_packing_is_refused_where_there_is_nothing_to_pack(model, target, tmp_path):
    func = next(func for func in fuse(model, target).functions.values() if isinstance(func, tvm.tirx.PrimFunc))
    for use, message in (
        (lambda: axe.tune(func, target=target, work_dir=tmp_path, pack_weights=True), "it is for Relax models"),
        (lambda: fuse(_without_inputs(model), target, pack_weights=True), "has the attribute num_input"),
        (lambda: axe.compile(_without_inputs(model), {"tp": 2}, pack_weights=True), "has the attribute num_input"),
    ):
        with pytest.raises(axe.errors.AxeError, match=message):
            use()


def _without_inputs(model: tvm.IRModule) -> tvm.IRModule:
    return tvm.IRModule({"forward": model["forward"].without_attr("num_input")})


def test_layers_that_are_alike_are_compiled_once(target, tmp_path):
    """What a model takes to compile grows with its kinds of layers: each is scheduled once, however many there are."""

    class Stack(nn.Module):
        def __init__(self, layers):
            self.layers = nn.ModuleList([_Model() for _ in range(layers)])

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    def kernels(layers):
        mod, _ = Stack(layers).export_tvm({"forward": {"x": nn.spec.Tensor([12, 24], "float32")}})
        module = axe.compile(mod, target=target, work_dir=tmp_path).runnable
        return sum(isinstance(func, tvm.tirx.PrimFunc) for _, func in module.functions_items())

    assert kernels(1) == kernels(5) == 2
