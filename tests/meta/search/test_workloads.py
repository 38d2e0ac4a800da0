"""What there is to tune in a program."""

from __future__ import annotations

import tvm
from tvm.ir import IRModule
from tvm.relax.frontend import nn
from tvm.s_tir import meta_schedule as ms

from tvm_axe import _tvm
from tvm_axe.layout import Mesh
from tvm_axe.meta.search.workloads import workloads_of
from tvm_axe.relax import share_model
from tvm_axe.relax.fuse import fuse, is_model


class _Model(nn.Module):
    """Two layers of the same shape, and a third."""

    def __init__(self):
        self.layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 16)])

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        for layer in self.layers[:-1]:
            x = nn.op.relu(layer(x))
        return self.layers[-1](x)


def _model() -> IRModule:
    model, _ = _Model().export_tvm({"forward": {"x": nn.spec.Tensor([8, 32], "float32")}})
    return model


def test_a_models_kernels_read_weights_as_they_lie_and_count_their_calls(target):
    model = _model()
    assert is_model(model)
    found, left_out = workloads_of(model, target)
    assert left_out == {}
    assert sorted(work.weight for work in found) == [1, 2]
    (twice,) = (work for work in found if work.weight == 2)
    infos = ms.arg_info.ArgInfo.from_entry_func(twice.mod)
    # x, the weight as [out, in], bias, output: matmul, bias and relu in one kernel, and no transpose on its own.
    assert [tuple(map(int, info.shape)) for info in infos] == [(8, 32), (32, 32), (32,), (8, 32)]
    text = twice.mod.script()
    assert "T.max" in text
    assert "[v_i1, v_k]" in text


def test_fusing_twice_gives_the_same_kernels(target):
    once = fuse(_model(), target)
    again, _ = workloads_of(fuse(once, target), target)
    hashes = [{_tvm.workload_hash(work.mod) for work in found} for found in (workloads_of(once, target)[0], again)]
    assert hashes[0] == hashes[1]
    assert len(hashes[0]) == 2


def test_equal_functions_are_one_workload(matmul, target):
    mod = IRModule({"a": matmul(8, 8, 8), "b": matmul(8, 8, 4), "c": matmul(8, 8, 8)})
    assert not is_model(mod)
    found, left_out = workloads_of(mod, target)
    assert {(work.name, work.weight) for work in found} == {("a", 2), ("b", 1)}
    assert left_out == {}


def test_a_lowered_program_is_no_model(target):
    """Its Relax function only starts kernels, which are tuned as they are."""
    lowered = share_model(_model(), Mesh({"tp": 2})).module
    assert not is_model(lowered)
    found, left_out = workloads_of(lowered, target)
    assert "forward" in left_out
    assert {work.name for work in found} <= {str(variable.name_hint) for variable in lowered.get_global_vars()}
    assert found


def test_upstreams_pass_finds_the_kernels_by_the_same_hash(target, tmp_path):
    """`MetaScheduleApplyDatabase` looks functions up as they stand in the fused model."""
    fused = fuse(_model(), target)
    database = ms.database.MemoryDatabase()
    found, _ = workloads_of(fused, target)
    for work in found:
        sch = tvm.s_tir.Schedule(work.mod)
        block = next(b for b in sch.get_child_blocks(sch.get_sblock("root")))
        sch.annotate(block, "marked", 1)
        workload = database.commit_workload(work.mod)
        infos = ms.arg_info.ArgInfo.from_entry_func(work.mod)
        database.commit_tuning_record(ms.database.TuningRecord(sch.trace, workload, [1e-3], target, infos))
    with target, database:
        applied = tvm.relax.transform.MetaScheduleApplyDatabase()(fused)
    kernels = [func for _, func in applied.functions_items() if isinstance(func, tvm.tirx.PrimFunc)]
    assert kernels
    assert all("marked" in func.script() for func in kernels)
