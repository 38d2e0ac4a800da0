"""Functions of unknown extents compute the same for every value, whichever variant that is for."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, s_tir, tirx
from tvm.sym import Analyzer

from tvm_axe import _tvm
from tvm_axe.analysis.expressions import substitute, variables_of
from tvm_axe.analysis.sizes import unknown_extents
from tvm_axe.machines import resolve_target
from tvm_axe.machines.vector_math import PIPELINE
from tvm_axe.nests import ranges_of, with_default_schedules, with_ranges
from tvm_axe.nests.default import RANGES
from tvm_axe.nests.forms import forms_of
from tvm_axe.nests.ranges import specialized, values_of
from tvm_axe.nests.recorded import as_recorded, tiles_of
from tvm_axe.records.packing import split_packing
from tvm_axe.records.record import Record

op = relax.op
VALUES = (1, 6, 20)
N, B = tirx.Var("n", "int64"), tirx.Var("b", "int64")


def kernels(build, *shapes, dtype="float32") -> tvm.IRModule:
    """The functions of a model, each operator with the pointwise ones behind it."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{n}", relax.TensorType(shape, dtype)) for n, shape in enumerate(shapes)]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(build(builder.emit, *params))
        builder.emit_func_output(out)
    passes = [relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern()]
    passes += [relax.transform.FuseOps(), relax.transform.FuseTIR()]
    fused = tvm.transform.Sequential(passes)(builder.get())
    return tvm.IRModule({v: func for v, func in fused.functions_items() if isinstance(func, tirx.PrimFunc)})


def unknown(name: str) -> tirx.PrimFunc:
    """The first function of a case that isn't known in extent."""
    build_model, *shapes = CASES[name]
    return next(func for func in kernels(build_model, *shapes).functions.values() if unknown_extents(func))


def scheduled(func: tirx.PrimFunc, threads: int) -> tirx.PrimFunc:
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    target = resolve_target("llvm", threads=threads)
    return with_default_schedules(
        with_ranges(mod, target, {str(var.name): VALUES for var in unknown_extents(func)})[0], target
    )["main"]


def build(func: tirx.PrimFunc):
    mod = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    return tvm.compile(mod, target=resolve_target("llvm", threads=2), tir_pipeline=PIPELINE)


def left_by(built, func: tirx.PrimFunc, sizes: dict[str, int]) -> np.ndarray:
    """What a function leaves in its last parameter, which was poisoned."""
    rng, arrays = np.random.default_rng(0), []
    for param in func.params:
        if not tirx.is_buffer_var(param):
            arrays.append(sizes[param.name])
            continue
        shape = [extent_for(extent, sizes) for extent in param.shape]
        arrays.append(rng.standard_normal(shape).astype(str(param.dtype)))
    arrays[-1][...] = np.nan
    arguments = [tvm.runtime.tensor(array) if isinstance(array, np.ndarray) else array for array in arrays]
    built["main"](*arguments)
    return arguments[-1].numpy().astype("float64")


def extent_for(extent, sizes: dict[str, int]) -> int:
    known = {var: tirx.const(sizes[var.name], str(var.ty)) for var in variables_of(extent)}
    return int(Analyzer().simplify(substitute(extent, known)))


def gelu(emit, x, w, b):
    return op.nn.gelu(emit(op.add(emit(op.matmul(x, emit(op.permute_dims(w)))), b)))


CASES = {
    "product": (lambda emit, x, w: op.matmul(x, w), (N, 50), (50, 33)),
    "wide product": (lambda emit, x, w: op.nn.silu(emit(op.matmul(x, w))), (N, 96), (96, 200)),
    "transposed product, bias, gelu": (gelu, (N, 130), (96, 130), (96,)),
    "computed operand": (lambda emit, x, w: op.matmul(emit(op.exp(x)), w), (N, 40), (40, 64)),
    "in a batch": (gelu, (2, N, 40), (64, 40), (64,)),
    "in an unknown batch": (gelu, (B, N, 40), (64, 40), (64,)),
    "scores": (lambda emit, q, k: op.matmul(q, emit(op.permute_dims(k, [0, 2, 1]))), (3, N, 40), (3, N, 40)),
    "weighed": (lambda emit, p, v: op.matmul(p, v), (3, N, N), (3, N, 40)),
    "two unknown": (lambda emit, q, k: op.matmul(q, emit(op.permute_dims(k))), (N, 40), (B, 40)),
    "unknown terms": (lambda emit, x, w: op.matmul(x, w), (8, N), (N, 64)),
    "convolution": (lambda emit, x, w: op.nn.relu(emit(op.nn.conv2d(x, w, padding=1))), (N, 16, 9, 9), (32, 16, 3, 3)),
    "depthwise": (lambda emit, x, w: op.nn.conv2d(x, w, padding=1, groups=8), (N, 8, 12, 12), (8, 1, 3, 3)),
    "unknown image": (lambda emit, x, w: op.nn.conv2d(x, w, padding=1), (1, 16, N, 9), (32, 16, 3, 3)),
    "unknown patches": (lambda emit, x, w: op.nn.conv2d(x, w, strides=8), (1, 3, N, N), (32, 3, 8, 8)),
    "attention": (lambda emit, q, k, v: op.nn.attention(q, k, v, causal_mask="BottomRight"), *[(1, N, 4, 24)] * 3),
    "softmax": (lambda emit, x: op.nn.softmax(x), (4, N, N)),
    "norm": (lambda emit, x, g, b: op.nn.layer_norm(x, g, b, axes=[-1]), (2, N, 200), (200,), (200,)),
    "root mean square": (lambda emit, x, g: op.nn.rms_norm(x, g, axes=[-1]), (N, 512), (512,)),
    "over another axis": (lambda emit, x: op.nn.softmax(x, axis=1), (N, 30, 80)),
    "heads": (lambda emit, x: op.permute_dims(emit(op.reshape(x, (1, N, 4, 8))), [0, 2, 1, 3]), (N, 32)),
    "joined": (lambda emit, x, y: op.concat([x, y], 0), (N, 24), (B, 24)),
    "sum of all": (lambda emit, x: op.sum(x), (N, 24)),
}  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_the_function_without_a_schedule(name, threads):
    build_model, *shapes = CASES[name]
    for func in kernels(build_model, *shapes).functions.values():
        plain, fast = build(func), build(scheduled(func, threads))
        for n in (0, 1, 2, 6, 7, 13, 20, 21, 64):  # on and around the ends of the ranges, and primes
            sizes = {"n": n, "b": {0: 3, 1: 1}.get(n, n // 2)}
            want, got = left_by(plain, func, sizes), left_by(fast, func, sizes)
            # Upstream leaves a sum of no terms as it was.
            want = np.nan_to_num(want) if n == 0 else want
            assert got.shape == want.shape and not np.isnan(got).any(), n
            assert np.abs(got - want).max(initial=0) <= 2e-5 * max(1, np.abs(want).max(initial=0)), n


def test_one_row_and_many_have_schedules_of_their_own():
    func = unknown("transposed product, bias, gelu")
    first, second, last = ranges_of(scheduled(func, 1))
    assert first.startswith("n <= 1: tiles of 1 row") and second.startswith("n <= 6: tiles of 6 rows")
    assert last.startswith("n > 6: ")


def test_variants_that_are_the_same_are_one():
    func = unknown("root mean square")
    assert ranges_of(scheduled(func, 1)) == ["any n: by rows"]


def test_weights_are_packed_once_for_all_variants():
    func = unknown("transposed product, bias, gelu")
    done = scheduled(func.with_attr("layout_free_buffers", [1]), 1)
    assert len(ranges_of(done)) > 1
    packing = split_packing(done)
    assert packing.pack is not None and packing.places == (1,)
    x, w, b = (np.random.default_rng(0).standard_normal(shape, dtype="float32") for shape in ((21, 130), (130, 96), 96))
    packed = tvm.runtime.tensor(np.zeros([int(n) for n in packing.main.params[1].shape], "float32"))
    build(packing.pack)["main"](tvm.runtime.tensor(w), packed)
    for n in (1, 5, 21):
        out = tvm.runtime.tensor(np.full((n, 96), np.nan, "float32"))
        build(packing.main)["main"](tvm.runtime.tensor(x[:n]), packed, tvm.runtime.tensor(b), out)
        plain = tvm.runtime.tensor(np.full((n, 96), np.nan, "float32"))
        build(func)["main"](*map(tvm.runtime.tensor, (x[:n], w, b)), plain)
        np.testing.assert_allclose(out.numpy(), plain.numpy(), rtol=1e-5, atol=1e-5)


def test_the_variable_of_the_rows_is_dispatched_on():
    func = unknown("in an unknown batch")
    driving, values, others = values_of(func, {"n": (4, 2), "b": (3, 8, 5)})
    assert driving.name == "n" and values == (2, 4)
    assert {var.name: value for var, value in others.items()} == {"b": 5}


def test_the_function_of_a_value():
    func = unknown("heads")
    (var,) = unknown_extents(func)
    known = specialized(func, {var: 6})
    assert not unknown_extents(known) and "n" not in {each.name for each in known.params}
    assert [int(extent) for extent in known.params[0].shape] == [6, 32]


def test_what_somebody_scheduled_or_a_record_has_stays():
    func = unknown("transposed product, bias, gelu")
    mod, target = tvm.IRModule({"f": func}), resolve_target("llvm", threads=1)
    assert with_ranges(mod, target, None, ["f"])[0] is mod
    sch = s_tir.Schedule(tvm.IRModule({"main": func}))
    sch.split(sch.get_loops(sch.get_child_blocks(sch.get_sblock("root"))[0])[0], [None, 4])
    own = sch.mod
    assert with_ranges(own, target)[0] is own
    assert with_ranges(mod, resolve_target("cuda:sm_90a"), None, ["f"])[0] is mod
    assert with_ranges(own, resolve_target("cuda:sm_90a"))[0] is own
    done, _ = with_ranges(mod, target)
    assert with_default_schedules(done, target) is done and RANGES in done["f"].attrs


def test_a_record_of_a_value_gives_its_form_and_its_decisions():
    func, target = unknown("transposed product, bias, gelu"), resolve_target("llvm", threads=2)
    base = s_tir.Schedule(tvm.IRModule({"main": s_tir.renew_defs(func)}))
    (var,) = unknown_extents(base.mod["main"])
    workload = tvm.IRModule({"main": specialized(base.mod["main"], {var: 12})})
    measured = s_tir.Schedule(workload)
    open_loops = {"matmul": frozenset({0})}
    forms = forms_of(measured, target, open_loops)
    change = next(each for each in forms_of(measured, target).registers() if tiles_of(each)[0].vectors == 2)
    change(measured)
    terms = [each for each in measured.trace.insts if each.kind.name == "SamplePerfectTile"][-1]
    trace = measured.trace.with_decision(terms, [130, 1], remove_postproc=True).simplified(remove_postproc=True)
    record = Record(0, 1e-3, [_tvm.plain(trace.as_json()), [1e-3], {}, []], "here")
    found = as_recorded(base, forms, record, workload, target, None)
    assert found is not None
    sch, same = found
    assert [(tile.rows, tile.vectors) for tile in tiles_of(same)] == [(t.rows, t.vectors) for t in tiles_of(change)]
    drawn = [sch.trace.get_decision(each) for each in sch.trace.insts if each.kind.name == "SamplePerfectTile"]
    assert [int(n) for n in drawn[-1]] == [130, 1] and len(drawn) == 2  # that of rows isn't drawn
    assert as_recorded(base, forms, record, workload, target, [3]) is None  # weights are packed for other tiles
    other = Record(0, 1e-3, [[[], []], [1e-3], {}, []], "here")
    assert as_recorded(base, forms, other, workload, target, None) is None
