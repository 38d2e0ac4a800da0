"""Convolutions of data [N, C, H, W] and weights [O, I, kh, kw], as importers bring them and Relax legalizes them."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax, s_tir, tirx
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms

from tvm_axe.machines import resolve_target
from tvm_axe.meta.spaces.space import space_for
from tvm_axe.nests.contraction import find_contractions
from tvm_axe.nests.registers import register_tile
from tvm_axe.nests.tiles import tiles

# Images, input channels, height, width, output channels, kernel, stride, padding, dilation, groups.
_DENSE = {
    "padded": (1, 5, 13, 11, 32, 3, 1, 1, 1, 1),
    "strided": (2, 3, 17, 15, 16, 3, 2, 1, 1, 1),
    "dilated": (1, 4, 13, 12, 24, 3, 1, 2, 2, 1),
    "1x1": (1, 17, 7, 7, 64, 1, 1, 0, 1, 1),
    "even kernel": (1, 3, 9, 8, 16, 2, 1, 0, 1, 1),
    "grouped": (1, 6, 9, 8, 32, 3, 1, 1, 1, 2),
}


def _replayed(func: tirx.PrimFunc, sch: s_tir.Schedule) -> None:
    """Stock makes the same of the trace, as a database stores it."""
    again = s_tir.Schedule(func)
    s_tir.schedule.Trace.apply_json_to_schedule(sch.trace.as_json(), again)
    tvm.ir.assert_structural_equal(again.mod, sch.mod)


@pytest.mark.parametrize("bias", [False, True], ids=["bare", "bias and relu"])
@pytest.mark.parametrize("case", _DENSE.values(), ids=_DENSE)
def test_channels_in_registers(error, convolution, case, bias):
    target = resolve_target({"kind": "llvm", "mcpu": "x86-64-v3"}, threads=2)
    func, arrays, want = convolution(case, bias)
    (match,) = find_contractions(s_tir.Schedule(func))
    assert match.extents[match.vector] == case[4]
    options = tiles(match, target)
    kinds = {(tile.packed, tile.apart, tile.rows[1:]): tile for tile in options}
    for n, tile in enumerate([options[0], *kinds.values()]):
        sch = s_tir.Schedule(func)
        register_tile(sch, match, target, tile)
        _replayed(func, sch)
        if n > 0:  # with other decisions too
            again = s_tir.Schedule(func, seed=n)
            s_tir.schedule.Trace(sch.trace.insts, {}).apply_to_schedule(again, remove_postproc=False)
            sch = again
        assert error(sch.mod, target, arrays, want) < 1e-5, tile


def test_sums_are_vectors_of_channels_and_no_window_is_unrolled(convolution):
    target = resolve_target({"kind": "llvm", "mcpu": "x86-64-v3"}, threads=2)
    func, _, _ = convolution((1, 8, 28, 28, 32, 3, 1, 1, 1, 1), True)
    sch = s_tir.Schedule(func)
    (match,) = find_contractions(sch)
    taken = register_tile(sch, match, target, next(t for t in tiles(match, target) if t.vectors == 1))
    assert taken == {"pad_temp", "conv2d_nchw", "T_add", "compute"}
    update = sch.get_sblock("conv2d_nchw_update")
    sums = sch.get(update).body.buffer
    assert sums.scope() == "local"
    assert [int(extent) for extent in sums.shape] == [1, 28, 28, 32]
    loops = [sch.get(loop) for loop in sch.get_loops(update)]
    assert loops[-1].kind == tirx.ForKind.VECTORIZED
    assert int(loops[-1].extent) == 8
    unrolled = {str(loop.loop_var.name).split("_")[0] for loop in loops if loop.kind == tirx.ForKind.UNROLLED}
    assert "rx" not in unrolled  # its steps read the same elements of a row
    assert "ry" in unrolled
    panel = [sch.get(loop) for loop in sch.get_loops(sch.get_sblock("x1_global"))]
    assert (panel[-1].kind, int(panel[-1].extent)) == (tirx.ForKind.VECTORIZED, 8)  # written as it lies


def test_tiles_have_as_many_rows_as_divide_an_odd_width(convolution):
    target = resolve_target({"kind": "llvm", "mcpu": "x86-64-v4"})
    func, _, _ = convolution(_DENSE["padded"], False)
    (match,) = find_contractions(s_tir.Schedule(func))
    assert {tile.rows for tile in tiles(match, target)} == {((match.rows[-1], 11),)}


def test_a_convolution_is_searched_in_ours_first(convolution):
    target = resolve_target("llvm", threads=2)
    func, _, _ = convolution(_DENSE["padded"], True)
    assert isinstance(space_for(func, target), ms.space_generator.SpaceGeneratorUnion)


def test_a_record_is_read_by_stock_from_its_file(error, convolution, tmp_path):
    target = resolve_target("llvm", threads=2)
    func, arrays, want = convolution(_DENSE["strided"], True)
    sch = s_tir.Schedule(func)
    (match,) = find_contractions(sch)
    register_tile(sch, match, target, tiles(match, target)[0])
    mod = IRModule({"main": func})
    database = ms.database.JSONDatabase(work_dir=str(tmp_path))
    workload = database.commit_workload(mod)
    infos = ms.arg_info.ArgInfo.from_prim_func(func)
    database.commit_tuning_record(ms.database.TuningRecord(sch.trace, workload, [1.0], target, infos))
    found = ms.database.JSONDatabase(work_dir=str(tmp_path)).query_schedule(mod, target, "main")
    assert found is not None
    tvm.ir.assert_structural_equal(found.mod, sch.mod)
    assert error(found.mod, target, arrays, want) < 1e-5


@pytest.mark.parametrize("groups", [1, 16], ids=["by channels", "by rows of the image"])
def test_a_batch_norm_is_in_the_nest(error, legalized, conv, designs, groups):
    """Decomposed for inference: its factors are made by blocks of their own."""

    def build(bb: relax.BlockBuilder, x: relax.Var, weights: relax.Var, *norm: relax.Var) -> relax.Expr:
        y = bb.emit(relax.op.nn.conv2d(x, weights, padding=1, groups=groups))
        mean, variance, scale, offset = (bb.emit(relax.op.expand_dims(v, [0, 2, 3])) for v in norm)
        root = bb.emit(relax.op.sqrt(bb.emit(relax.op.add(variance, relax.const(1e-5)))))
        centred = bb.emit(relax.op.divide(bb.emit(relax.op.subtract(y, mean)), root))
        return relax.op.nn.relu(bb.emit(relax.op.add(bb.emit(relax.op.multiply(centred, scale)), offset)))

    shapes = [(1, 16, 9, 16), (16, 16 // groups, 3, 3), *[(16,)] * 4]
    func = legalized(shapes, build)
    rng = np.random.default_rng(0)
    arrays = [rng.random(shape, "float32") - (n < 2) / 2 for n, shape in enumerate(shapes)]
    mean, variance, scale, offset = (array.astype("float64").reshape(1, -1, 1, 1) for array in arrays[2:])
    want = (conv(arrays[0], arrays[1], 1, 1, 1, groups) - mean) / np.sqrt(variance + 1e-5) * scale + offset
    target = resolve_target("llvm", threads=2)
    sch = designs(func, target)[0]
    _replayed(func, sch)
    assert error(sch.mod, target, arrays, np.maximum(want, 0)) < 1e-5
    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    nests = {str(sch.get(sch.get_loops(block)[0]).loop_var.name) for block in blocks}
    panels = groups == 1
    assert len(blocks) == 4 + panels  # padding, the sum from 0 and on, the last pointwise one
    assert len(nests) == 1
