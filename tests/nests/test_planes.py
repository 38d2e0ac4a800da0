"""Convolutions by rows of the image: depthwise ones, and those with few output channels."""

from __future__ import annotations

import pytest
import tvm
from tvm import s_tir, te, tirx, topi
from tvm.s_tir import meta_schedule as ms
from tvm.target import Target

from tvm_axe.machines import resolve_target
from tvm_axe.nests.planes import find_plane, plane_schedules

# Images, input channels, height, width, output channels, kernel, stride, padding, dilation, groups.
_CASES = {
    "depthwise": (1, 6, 13, 12, 6, 3, 1, 1, 1, 6),
    "several images": (2, 3, 8, 20, 3, 3, 1, 1, 1, 3),
    "by 2, an even width": (1, 4, 16, 16, 4, 3, 2, 1, 1, 4),
    "by 2, an odd width": (1, 4, 13, 13, 4, 5, 2, 2, 1, 4),
    "by 3, not padded": (1, 2, 14, 32, 2, 3, 3, 0, 1, 2),
    "dilated": (1, 4, 14, 14, 4, 3, 1, 2, 2, 4),
    "17 channels": (1, 17, 13, 11, 17, 3, 1, 1, 1, 1),
    "1x1 to 3": (1, 9, 7, 24, 3, 1, 1, 0, 1, 1),
    "two columns a channel": (1, 3, 9, 16, 6, 3, 1, 1, 1, 3),
    "wide": (1, 2, 5, 90, 2, 3, 1, 1, 1, 2),
}


def _target(threads: int = 2) -> Target:
    return resolve_target({"kind": "llvm", "mcpu": "x86-64-v3"}, threads=threads)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("case", _CASES.values(), ids=_CASES)
def test_every_schedule_is_right_and_replayed(error, convolution, case, threads):
    target = _target(threads)
    func, arrays, want = convolution(case, bias=threads == 2)
    match = find_plane(s_tir.Schedule(func))
    changes = plane_schedules(match, target)
    assert changes
    for n, change in enumerate(changes):
        sch = s_tir.Schedule(func)
        change(sch)
        replayed = s_tir.Schedule(func)
        s_tir.schedule.Trace.apply_json_to_schedule(sch.trace.as_json(), replayed)
        tvm.ir.assert_structural_equal(replayed.mod, sch.mod)
        again = s_tir.Schedule(func, seed=n + 1)
        s_tir.schedule.Trace(sch.trace.insts, {}).apply_to_schedule(again, remove_postproc=False)
        assert error(again.mod, target, arrays, want) < 1e-5


def test_rows_are_vectors_and_sums_are_in_registers(convolution):
    func, _, _ = convolution(_CASES["by 2, an even width"], bias=True)
    sch = s_tir.Schedule(func)
    match = find_plane(sch)
    assert (match.stride, match.own) == (2, True)
    plane_schedules(match, _target())[0](sch)
    update = sch.get_sblock("group_conv2d_nchw_update")
    assert sch.get(update).body.buffer.scope() == "local"
    *_, row, x = (sch.get(loop) for loop in sch.get_loops(update))
    assert (row.kind, x.kind, int(x.extent)) == (tirx.ForKind.UNROLLED, tirx.ForKind.VECTORIZED, 8)
    # Every other column of the image lies together, in the piece of work that reads it.
    (data,) = (sch.get(sch.get_sblock("pad_temp")).writes[0].source,)
    assert [int(extent) for extent in data.shape] == [1, 4, 18, 2, 9]
    assert sch.get(sch.get_loops(sch.get_sblock("pad_temp"))[0]).same_as(sch.get(sch.get_loops(update)[0]))


def test_all_channels_read_one_padded_image(convolution):
    func, _, _ = convolution(_CASES["17 channels"], bias=False)
    sch = s_tir.Schedule(func)
    match = find_plane(sch)
    assert not match.own
    plane_schedules(match, _target())[0](sch)
    outermost = [sch.get(sch.get_loops(sch.get_sblock(name))[0]) for name in ("pad_temp", "conv2d_nchw_update")]
    assert not outermost[0].same_as(outermost[1])


def test_what_is_no_convolution_of_images_is_left_alone(matmul, convolution):
    x, w = te.placeholder((1, 4, 9, 9), name="x"), te.placeholder((4, 3), name="w")
    pooled = te.create_prim_func([x, topi.nn.pool2d(x, [3, 3], [1, 1], [1, 1], [0, 0, 0, 0], "max")])
    k = te.reduce_axis((0, 3), name="k")
    by_rows = te.compute((1, 4, 7, 9), lambda n, c, i, j: te.sum(x[n, c, i + k, j] * w[c, k], axis=k), name="y")
    reader = te.compute((4,), lambda c: by_rows[0, c, 0, 0], name="z")
    for func in (matmul(8, 8, 8), pooled, te.create_prim_func([x, w, reader])):
        assert find_plane(s_tir.Schedule(func)) is None
    first = topi.nn.relu(x)  # written for the caller too, so that it can't be inlined
    assert find_plane(s_tir.Schedule(te.create_prim_func([x, first, topi.nn.relu(first)]))) is None
    narrow, _, _ = convolution((1, 4, 9, 3, 4, 3, 1, 1, 1, 4), bias=False)
    assert plane_schedules(find_plane(s_tir.Schedule(narrow)), _target()) == []


@pytest.mark.parametrize("case, ours", [("depthwise", True), ("17 channels", True), ("full", False)])
def test_it_is_searched_where_register_tiles_have_no_whole_vectors(convolution, designs, case, ours):
    func, _, _ = convolution(_CASES.get(case, (1, 4, 8, 13, 16, 3, 1, 1, 1, 1)), bias=True)
    by_rows = [sch for sch in designs(func, _target()) if _vectorised(sch) == _width(func)]
    assert bool(by_rows) == ours


def _width(func: tirx.PrimFunc) -> int:
    """Columns of the image that comes out."""
    return int(ms.arg_info.ArgInfo.from_prim_func(func)[-1].shape[-1])


def _vectorised(sch: s_tir.Schedule) -> int | None:
    """Elements of the vectors that are summed; None where there are none."""
    names = [str(sch.get(block).name_hint) for block in sch.get_child_blocks(sch.get_sblock("root"))]
    updates = [name for name in names if name.endswith("_update")]
    loop = sch.get(sch.get_loops(sch.get_sblock(updates[0]))[-1]) if updates else None
    return int(loop.extent) if loop is not None and loop.kind == tirx.ForKind.VECTORIZED else None
