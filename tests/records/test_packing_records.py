"""Weights that are packed once: what is timed, records, and what stock makes of them."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, s_tir, tirx
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms

from tvm_axe.meta import tune
from tvm_axe.meta.measure.builder import build_candidate
from tvm_axe.meta.measure.runner import Runner
from tvm_axe.meta.model.features.extractor import AxeFeatures, context_for
from tvm_axe.nests.contraction import find_contractions
from tvm_axe.nests.registers import register_tile
from tvm_axe.nests.tiles import tiles
from tvm_axe.pipeline import build
from tvm_axe.records import apply_best, split_packing
from tvm_axe.records.database import Database, normalize
from tvm_axe.records.packing import PREPROC, has_packing


def _arrays(func: tirx.PrimFunc) -> list[np.ndarray]:
    rng = np.random.default_rng(6)
    return [rng.standard_normal([int(n) for n in param.ty.shape], "float32") for param in func.params]


def _error(got: np.ndarray, arrays: list[np.ndarray]) -> float:
    """How far a layer's result is off numpy's in float64, relative to the largest of that."""
    a, w, bias = (array.astype("float64") for array in arrays[:3])
    want = a @ w.T + bias
    return float(np.abs(got - want).max() / np.abs(want).max())


# ---- Measuring -------------------------------------------------------------------------------------------------------


def _scheduled(func: tirx.PrimFunc, target: tvm.target.Target) -> s_tir.Schedule:
    sch = s_tir.Schedule(normalize(func))
    (match,) = find_contractions(sch)
    register_tile(sch, match, target, tiles(match, target)[0])
    return sch


def test_what_is_timed_does_not_pack(dense, target):
    sch = _scheduled(dense(8, 40, 24), target)
    built = build_candidate(sch.mod, target, build)
    assert built.places == (1,)
    ((shape, dtype),) = built.params
    assert dtype == np.dtype("float32")
    # It takes the weights as packed, and refuses them as they are.
    arrays = _arrays(dense(8, 40, 24))
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        built.module["main"](*tensors)
    packed = tvm.runtime.tensor(np.zeros(shape, dtype))
    built.pack["main"](tensors[1], packed)
    built.module["main"](tensors[0], packed, *tensors[2:])
    assert _error(tensors[-1].numpy(), arrays) < 1e-5


def test_candidates_that_pack_are_checked_like_any_other(dense, target, tmp_path):
    func = dense(8, 40, 24)
    good = _scheduled(func, target).mod
    text = good["main"].script()
    wrong = text.replace("= W[v0, v1]", "= W[v0, v1] + T.float32(1)")
    forgets = text.replace("for ax0, ax1 in T.grid(40, 24)", "for ax0, ax1 in T.grid(39, 24)")
    assert len({text, wrong, forgets}) == 3
    with Runner(target, tmp_path / "worker.log", timeout=10.0) as worker:
        assert worker.prepare(normalize(func)).failure is None
        mods = [good, *(IRModule({"main": tvm.script.from_source(source)}) for source in (wrong, forgets)), good]
        first, added, missing, last = worker.measure_all(mods)
        assert (first.failure, last.failure) == (None, None)
        assert first.seconds > 0
        assert "wrong result: argument 3 is off by" in added.failure
        assert "wrong result: argument 3" in missing.failure
        ((one, two), (other, _)) = worker.in_turns([good, normalize(func)], 2)
        assert 0 < min(one, two) < other  # the second is the function as it stands


def test_the_cost_model_sees_what_is_timed(dense, target):
    sch = _scheduled(dense(8, 40, 24), target)
    main = s_tir.Schedule(IRModule({"main": split_packing(sch.mod["main"]).main}))
    context = context_for(normalize(dense(8, 40, 24)), target)
    infos = ms.arg_info.ArgInfo.from_entry_func(context.mod)
    whole, timed = AxeFeatures().extract_from(context, [ms.MeasureCandidate(each, infos) for each in (sch, main)])
    np.testing.assert_array_equal(whole.numpy(), timed.numpy())


# ---- Records ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuned(dense, target, tmp_path_factory):
    """A folder with records of an uneven product and of the same without the attribute, the one resumed."""
    folder = tmp_path_factory.mktemp("packing")
    results = {}
    for free in (True, False):
        for trials in (4, 8) if free else (4,):
            results[free] = tune(
                dense(30, 250, 70, free=free), target=target, trials=trials, work_dir=folder, seed=2, progress=False
            )
    return folder, results


def _force(folder, func: tirx.PrimFunc, target: tvm.target.Target, packs: bool) -> None:
    """A record of the function that is faster than all others, with a schedule that packs or without one."""
    database = Database(folder)
    workload = database.commit_workload(normalize(func))
    sch = s_tir.Schedule(workload.mod)
    if packs:
        (match,) = find_contractions(sch)
        register_tile(sch, match, target, tiles(match, target)[0])
    infos = ms.arg_info.ArgInfo.from_entry_func(workload.mod)
    database.commit_tuning_record(ms.database.TuningRecord(sch.trace, workload, [1e-9], target, infos))


def test_a_job_goes_on_and_its_best_is_right(tuned, dense, target, packed_error):
    folder, results = tuned
    (task,) = results[True].tasks
    assert (task.trials, task.failures) == (8, ())
    assert task.folder != results[False].tasks[0].folder
    func = dense(30, 250, 70)
    best, seconds = apply_best(IRModule({"main": func}), target, folder)
    assert seconds["main"] * 1e3 == min(results[free].tasks[0].best_ms for free in (True, False))
    assert dict(best["main"].attrs.items()) == {**dict(func.attrs.items()), "tirx.noalias": True}
    assert [param.ty.shape for param in best["main"].params] == [param.ty.shape for param in func.params]
    assert packed_error(best["main"], target, lambda a, w, bias: a @ w.T + bias) < 1e-5


def test_the_attribute_lets_both_kinds_of_records_serve(dense, target, tmp_path):
    """The faster one wins; without the attribute a function never packs ahead."""
    free, bound = dense(8, 40, 24), dense(8, 40, 24, free=False)
    _force(tmp_path / "free", free, target, packs=True)
    mod = IRModule({"free": free, "bound": bound})
    best, seconds = apply_best(mod, target, tmp_path)
    assert has_packing(best["free"])
    assert not has_packing(best["bound"])
    assert list(seconds) == ["free"]
    slower = Database(tmp_path / "bound")
    workload = slower.commit_workload(normalize(bound))
    infos = ms.arg_info.ArgInfo.from_entry_func(workload.mod)
    for time, packs in ((1e-8, True), (1e-10, False)):
        trace = s_tir.Schedule(workload.mod).trace
        slower.commit_tuning_record(ms.database.TuningRecord(trace, workload, [time], target, infos))
        best, seconds = apply_best(mod, target, tmp_path)
        assert has_packing(best["free"]) == packs
        assert seconds == {"free": min(time, 1e-9), "bound": time}
        # Only a schedule takes for granted that buffers don't overlap; these records are of the function as it is.
        assert ("tirx.noalias" in best["free"].attrs) == packs
        assert "tirx.noalias" not in best["bound"].attrs


def test_stock_applies_our_records_and_splits_them(dense, target, tmp_path):
    """Upstream's own passes from a model to packed weights, with our database."""
    builder = relax.BlockBuilder()
    shapes = {"x": (30, 70), "w": (250, 70), "bias": (250,)}
    x, w, bias = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items())
    callee = builder.add_func(dense(30, 250, 70, free=False).without_attr("global_symbol"), "dense")
    with builder.function("main", [x, w, bias], attrs={"num_input": 1}):
        with builder.dataflow():
            out = relax.call_tir(callee, [x, w, bias], out_ty=relax.TensorType((30, 250), "float32"))
            out = builder.emit_output(out)
        builder.emit_func_output(out)
    model = relax.transform.AttachAttrLayoutFreeBuffers()(builder.get())
    (func,) = (func for func in model.functions.values() if isinstance(func, tirx.PrimFunc))
    _force(tmp_path, func, target, packs=True)
    with target:
        applied = relax.transform.MetaScheduleApplyDatabase(str(tmp_path))(model)
        split = relax.transform.SplitLayoutRewritePreproc()(applied)
        lifted = relax.transform.LiftTransformParams()(split)
    assert {"dense1_weight_prepack", "dense1_prepacked"} <= {str(v.name_hint) for v in split.get_global_vars()}
    machine = relax.VirtualMachine(tvm.compile(lifted, target=target), tvm.cpu())
    arrays = _arrays(dense(30, 250, 70))
    packed = machine["main_transform_params"]([tvm.runtime.tensor(array) for array in arrays[1:3]])
    got = machine["main"](tvm.runtime.tensor(arrays[0]), *packed).numpy()
    assert _error(got, arrays) < 1e-5


def test_stocks_search_goes_on_from_our_records(tuned, target):
    """Upstream assembles candidates of a trace that packs as it does of its own, and its builder takes them."""
    _, results = tuned
    database = ms.database.JSONDatabase(work_dir=str(results[True].tasks[0].folder))
    packing = [
        record
        for record in database.get_all_tuning_records()
        if any(inst.kind.name == "Annotate" and PREPROC in map(str, inst.attrs) for inst in record.trace.insts)
    ]
    assert packing
    for record in packing:
        sch = s_tir.Schedule(record.workload.mod)
        record.trace.apply_to_schedule(sch, remove_postproc=False)
        infos = ms.arg_info.ArgInfo.from_entry_func(sch.mod, remove_preproc=True)
        assert len(infos) == 4
        without = s_tir.transform.RemoveWeightLayoutRewriteBlock(skip_tensor_rewrite=True)(sch.mod)
        assert int(without["main"].params[1].ty.shape[1]) == 70  # panels, of [panel, k, column]
