"""Convolutions: what is refused, which loads run ahead, and the code for GPUs on the host."""

import functools

import numpy as np
import pytest
from on_host import run
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines.cache import Cache
from tvm_axe.machines.target import resolve_target
from tvm_axe.tile.kernels import KERNELS
from tvm_axe.tile.kernels.check import TOLERANCE, executed, judged, poison

CONV2D = KERNELS["conv2d"]
CPU = Target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2})
HOPPER, AMPERE = (Target({"kind": "cuda", "arch": arch}) for arch in ("sm_90a", "sm_80"))


def problem(size, channels, out_channels, kernel, dtype="bfloat16", **options):
    batch, pixels = size
    extents = {"batch": batch, "height": pixels, "width": pixels, "channels": channels, "out_channels": out_channels}
    return {**extents, "kernel_height": kernel, "kernel_width": kernel, "dtype": dtype, **options}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"groups": 3}, "conv2d: groups divides channels and out_channels, got 3 of 64 and 72"),
        ({"groups": 16}, "got 16 of 64 and 72"),
        ({"groups": 0}, "got 0 of 64 and 72"),
        ({"height": 2, "kernel_height": 5}, r"images of 2 x 7 pixels with padding=\(1, 1\) for windows of 5 x 3"),
        ({"dilation": (1, 5)}, "windows of 3 x 11; valid are images as large as a window with their padding"),
        ({"dtype": "tf32"}, "dtype is one of float16, bfloat16, float32, got 'tf32'"),
        ({"strides": (0, 1)}, r"strides=\(0, 1\); valid is a pair of numbers from 1 on"),
        ({"padding": (1, -1)}, r"padding=\(1, -1\); valid is a pair of numbers from 0 on"),
        ({"dilation": (1,)}, r"dilation=\(1,\); valid is a pair"),
        ({"strides": 2}, "strides=2; valid is a pair"),
        ({"channels": 0}, "channels=0; valid is a number from 1 on"),
        ({"kernel_width": 2.5}, "kernel_width=2.5; valid is a number from 1 on"),
        ({"activation": "swish"}, "activation is one of none, relu, silu, gelu, got 'swish'"),
    ],
)
def test_convolutions_that_are_none(changes, message):
    with pytest.raises(TileError, match=message):
        CONV2D.recipe(CPU, {**CONV2D.cases[0], **changes})


def test_boxes_of_parts_of_groups_are_refused():
    with pytest.raises(TileError, match="block_n=6; valid are multiples of a group's 4 channels"):
        CONV2D.recipe(AMPERE, problem((2, 9), 16, 16, 3, groups=4, strides=(2, 2)), block_n=6)


@pytest.mark.parametrize(
    "given, instruction",
    [
        (problem((32, 56), 64, 64, 3, padding=(1, 1), strides=(2, 2)), "wgmma"),
        (problem((32, 14), 512, 512, 3, padding=(1, 1), groups=32), "mma"),
        (problem((2, 28), 36, 64, 3, dtype="float32"), None),
    ],
)
def test_warpgroups_multiply_where_a_group_has_columns(given, instruction):
    (program,) = CONV2D.recipe(HOPPER, given).programs
    text = tile.explain(program, HOPPER)
    assert "uniform: every warp loads" in text
    assert {"wgmma": "as wgmma takes it", "mma": "warps  (nearly square)", None: "multiply-adds"}[instruction] in text


@pytest.mark.parametrize("target", [HOPPER, AMPERE], ids=["sm_90a", "sm_80"])
@pytest.mark.parametrize(
    "given, size",
    [
        (problem((32, 56), 64, 64, 3, padding=(1, 1), strides=(2, 2)), 16),
        (problem((32, 14), 512, 512, 3, padding=(1, 1), groups=32), 16),
        (problem((32, 28), 256, 256, 3, padding=(1, 1), groups=32), 16),
        (problem((8, 28), 24, 64, 3, padding=(4, 4), dilation=(4, 4)), 16),
        (problem((32, 56), 256, 64, 1, strides=(2, 2)), 16),
        (problem((2, 28), 36, 64, 3, dtype="float32"), 16),
        (problem((32, 56), 128, 256, 3, padding=(1, 1), groups=32), 16),
        (problem((32, 56), 128, 256, 3, padding=(1, 1), groups=32, strides=(2, 2)), 8),
        (problem((32, 224), 4, 64, 7, strides=(2, 2), padding=(3, 3)), 8),
        (problem((2, 28), 6, 64, 3), 4),
        (problem((2, 28), 3, 64, 3, dtype="float32"), 4),
    ],
)
def test_windows_are_loaded_ahead(given, size, target):
    (program,) = CONV2D.recipe(target, given).programs
    (pipeline,) = tile.plan(program, target).memory.pipelines.values()
    keeps = CONV2D.parameters(target, given).get("keepers", (0,))[0] > 0  # weights, which are loaded before the loop
    assert list(pipeline.copies.values()) == ([size] if keeps else [size, size])
    assert "stages of cp.async" in tile.explain(program, target)


def test_odd_channels_of_16_bits_are_loaded_where_they_are_used():
    (program,) = CONV2D.recipe(AMPERE, problem((32, 224), 3, 64, 7, strides=(2, 2), padding=(3, 3))).programs
    assert "loads don't run ahead  (none can)" in tile.explain(program, AMPERE)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(
    "given, knobs",
    [
        (problem((2, 9), 16, 24, 3, padding=(1, 1)), {"block_m": 64, "block_n": 16, "stages": 3}),
        (problem((1, 11), 12, 20, 3, padding=(2, 1), strides=(2, 1), dilation=(1, 2), bias=True), {"block_n": 16}),
        (problem((1, 8), 24, 12, 3, padding=(1, 1), groups=3, residual=True), {"stages": 2}),
        (problem((1, 10), 3, 16, 5, strides=(2, 2), padding=(2, 2), bias=True), {}),
        (problem((1, 5), 4, 8, 2, groups=4), {}),
        (problem((2, 9), 16, 16, 3, padding=(1, 1), groups=4, bias=True), {"block_n": 8}),
        (problem((1, 12), 12, 24, 3, padding=(2, 1), strides=(1, 2), groups=6), {}),
        (problem((2, 9), 12, 12, 3, padding=(1, 1), groups=12, strides=(2, 1)), {}),
        (problem((1, 13), 5, 5, 5, padding=(4, 4), groups=5, dilation=(2, 2), bias=True), {}),
    ],
)
def test_code_for_gpus_on_the_host(given, knobs, early, tmp_path):
    """Of exact products, whose loads run ahead as those for tensor cores do."""
    given = {**given, "dtype": "float32"}
    assert not fault_on_the_host(given, CONV2D.recipe(AMPERE, given, **knobs), early, tmp_path)


def fault_on_the_host(given, recipe, early, folder):
    """What is wrong with what the code for GPUs computes on the host, or nothing."""
    (program,), arrays = recipe.programs, CONV2D.inputs(np.random.default_rng(5), given)
    outputs = {name: poison(*recipe.tensors[name]) for name in recipe.outputs}
    source = tile.compile(program, AMPERE, Cache(folder / "kept")).source
    run(source, tile.plan(program, AMPERE).grid.blocks, {**arrays, **outputs}, folder, early)
    return judged(outputs, CONV2D.reference(given, arrays), 1e-5)[1]


# ---- Strips of pixels ------------------------------------------------------------------------------------------------

STRIPS = [
    (problem((1, 15), 32, 32, 7, padding=(3, 3), groups=32), (8, 14, 32, 7)),
    (problem((2, 9), 40, 40, 3, padding=(1, 1), groups=40, bias=True), (8, 8, 32, 4)),
    (problem((2, 17), 36, 36, 3, padding=(1, 1), groups=36, strides=(2, 2), residual=True), (8, 4, 32, 4)),
    (problem((1, 12), 66, 66, 5, groups=66, dilation=(2, 1), dtype="float16"), (2, 16, 64, 8)),
    (problem((1, 10), 5, 5, 3, padding=(2, 0), groups=5, strides=(1, 2)), (4, 7, 32, 7)),
]
"""Depthwise convolutions, and the rows, columns and channels of blocks and the pixels of strips."""


def strips(given, sizes):
    return CONV2D.make(**given, **dict(zip(("block_h", "block_w", "block_n", "strip"), sizes)))


@pytest.mark.parametrize("given, sizes", STRIPS)
def test_strips_of_pixels(given, sizes, tmp_path):
    assert not fault_of(given, strips(given, sizes), CPU)
    given = {**given, "dtype": "float32"}
    assert not fault_on_the_host(given, strips(given, sizes), False, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("given, sizes", STRIPS)
def test_strips_on_a_gpu(cuda, given, sizes):
    assert not fault_of(given, strips(given, sizes), resolve_target("cuda"))


@pytest.mark.parametrize(
    "size, channels, kernel, stride, chosen",
    [
        ((32, 56), 96, 7, 1, (8, 14, 32, 7)),
        ((32, 14), 384, 7, 1, (14, 14, 32, 7)),
        ((32, 7), 768, 7, 1, (8, 7, 32, 7)),
        ((8, 64), 96, 5, 1, (8, 16, 32, 8)),
        ((32, 14), 576, 3, 1, (7, 14, 64, 7)),
        ((32, 112), 96, 3, 2, (14, 8, 32, 4)),
        ((1, 56), 96, 7, 1, (14, 8, 32, 4)),  # few blocks
        ((8, 32), 256, 5, 2, (8, 8, 32, 4)),  # higher ones have no room
        ((32, 28), 24, 3, 1, None),  # few channels
        ((8, 64), 64, 31, 1, None),
    ],
)
def test_strips_are_the_default_of_depthwise_convolutions(size, channels, kernel, stride, chosen):
    half = kernel // 2
    given = problem(size, channels, channels, kernel, padding=(half, half), strides=(stride, stride), groups=channels)
    for target in (HOPPER, AMPERE):
        knobs = {name: values[0] for name, values in CONV2D.parameters(target, given).items()}
        assert chosen == (tuple(knobs.values()) if "strip" in knobs else None)
    for other, changes in ((CPU, {}), (HOPPER, {"dtype": "float32"})):
        assert "strip" not in CONV2D.parameters(other, {**given, **changes})


@pytest.mark.parametrize(
    "changes, sizes",
    [({}, (8, 8, 32, 7)), ({}, (8, 8, 34, 4)), ({"groups": 16}, (8, 8, 32, 4)), ({"out_channels": 64}, (8, 8, 32, 4))],
)
def test_strips_that_are_none(changes, sizes):
    with pytest.raises(TileError, match=r"conv2d: strip=.; valid are parts of block_w=8 with a multiple of 4 channels"):
        strips({**problem((2, 9), 32, 32, 3, groups=32), **changes}, sizes)


def test_a_thread_loads_a_strip_once():
    """Of 7 pixels, 49 products a row of the kernel for each channel, of which 13 pixels are loaded."""
    given = STRIPS[0][0]
    text = tile.explain(strips(given, (8, 14, 32, 7)).programs[0], HOPPER)
    assert "fragment c: float32[112, 32]: S[(8, 2, 7, 8, 4) : (16@tx, 8@tx, 4, 1@tx, 1)]" in text
    assert "kernel: 128 threads" in text


# ---- Boxes of pixels -------------------------------------------------------------------------------------------------

boxed = functools.partial(dict, block_h=8, block_w=8, images=1, block_n=64, stages=3)
surrounded = functools.partial(dict, block_h=8, block_w=14, images=1, block_n=16, stages=2, keepers=3)
"""Parameters of boxes that are loaded under each place of the kernel, and of those that are loaded with their halo."""

BOXES = [
    (problem((3, 14), 64, 64, 3, padding=(1, 1), groups=4), surrounded(keepers=5)),
    (problem((3, 15), 32, 32, 3, padding=(1, 1), groups=8, bias=True), surrounded(merged=4)),
    (problem((2, 7), 48, 96, 3, groups=6, dtype="float16"), surrounded(block_h=7, block_w=7, merged=2, block_n=24)),
    (problem((5, 17), 64, 96, 3, dilation=(2, 3), groups=4, residual=True), surrounded(images=2, block_w=5, block_n=8)),
    (problem((2, 12), 64, 64, 2, padding=(1, 0)), surrounded(block_w=6, block_n=64, stages=3)),
    (problem((3, 11), 64, 64, 3, padding=(1, 1)), boxed()),
    (problem((3, 13), 128, 72, 3, padding=(1, 1), bias=True, activation="relu"), boxed(block_n=128, block_h=16)),
    (problem((5, 9), 128, 200, 3, padding=(2, 0), groups=2), boxed(block_w=2, images=4)),
    (problem((5, 10), 64, 136, 3, padding=(1, 2), dilation=(2, 3), residual=True), boxed(block_w=4, images=4)),
    (problem((9, 7), 192, 128, 2, dtype="float16", padding=(0, 1)), boxed(block_h=1, block_w=8, images=16)),
    (problem((3, 14), 256, 64, 1, bias=True), boxed(block_h=2, block_w=32)),
    (problem((40, 4), 64, 192, 3, padding=(1, 1)), boxed(block_h=2, block_w=2, images=32, block_n=192)),
    (problem((2, 9), 64, 64, 3, padding=(1, 1)), boxed(block_h=2, block_w=24, images=2, block_n=32)),
]
"""Of images that no number of boxes has, of which some are of more images than there are."""


@pytest.mark.parametrize("given, knobs", BOXES)
def test_boxes_of_pixels(given, knobs):
    assert not fault_of(given, CONV2D.make(**given, **knobs), CPU)


def fault_of(given, recipe, target):
    """What is wrong with what a target computes, or nothing."""
    arrays = CONV2D.inputs(np.random.default_rng(7), given)
    outputs = executed(recipe, target, arrays)
    return judged(outputs, CONV2D.reference(given, arrays), TOLERANCE[given["dtype"]])[1]


@pytest.mark.gpu
@pytest.mark.parametrize("given, knobs", BOXES)
def test_boxes_on_a_gpu(cuda, given, knobs):
    assert not fault_of(given, CONV2D.make(**given, **knobs), resolve_target("cuda"))


@pytest.mark.parametrize("given, knobs", BOXES[:3] + BOXES[5:6] + BOXES[7:9])
def test_code_of_boxes_for_gpus_on_the_host(given, knobs, tmp_path):
    given = {**given, "dtype": "float32"}
    recipe = CONV2D.make(**given, **{**knobs, "block_n": 16, "stages": 2})  # of 32 bits weights have no more room
    assert not fault_on_the_host(given, recipe, True, tmp_path)


@pytest.mark.parametrize(
    "given, chosen",
    [
        (problem((32, 56), 64, 64, 3, padding=(1, 1)), (8, 2, 8, 64)),
        (problem((32, 28), 128, 128, 3, padding=(1, 1)), (4, 2, 8, 128)),
        (problem((32, 7), 512, 512, 3, padding=(1, 1)), (8, 1, 8, 128)),
        (problem((2, 32), 640, 640, 3, padding=(1, 1)), (32, 2, 1, 160)),  # columns that divide 640
        (problem((1, 14), 256, 256, 3, padding=(1, 1)), (16, 4, 1, 64)),
        (problem((32, 56), 256, 64, 1), (8, 2, 8, 64)),
        (problem((32, 28), 256, 256, 3, padding=(1, 1), groups=4), (4, 2, 16, 64)),
        (problem((32, 56), 64, 64, 3, strides=(2, 2)), None),
        (problem((32, 56), 96, 64, 3), None),
        (problem((32, 56), 64, 32, 3), None),
        (problem((32, 56), 64, 64, 3, dtype="float32"), None),
    ],
)
def test_boxes_that_tma_loads_are_the_default(given, chosen):
    knobs = {name: values[0] for name, values in CONV2D.parameters(HOPPER, given).items()}
    sizes = tuple(knobs.get(name) for name in ("block_h", "block_w", "images", "block_n"))
    assert sizes == chosen if chosen else "images" not in knobs
    assert "images" not in CONV2D.parameters(AMPERE, given)
    if chosen:
        (program,) = CONV2D.recipe(HOPPER, given).programs
        assert "a producer warp and" in tile.explain(program, HOPPER)


@pytest.mark.parametrize(
    "given, chosen",
    [
        (problem((32, 56), 128, 128, 3, padding=(1, 1), groups=32), {"block_h": 8, "block_w": 14, "merged": 4}),
        (problem((32, 28), 256, 256, 3, padding=(1, 1), groups=32), {"block_h": 16, "block_w": 14, "merged": 2}),
        (problem((32, 14), 512, 512, 3, padding=(1, 1), groups=32), {"block_h": 16, "block_w": 14, "merged": 1}),
        (problem((1, 14), 512, 512, 3, padding=(1, 1), groups=32), {"block_h": 4, "block_w": 14, "images": 1}),
        (problem((32, 7), 1024, 1024, 3, padding=(1, 1), groups=32), {"block_h": 7, "block_w": 7, "images": 4}),
        (problem((2, 9), 64, 64, 3, groups=32), None),  # of 2 channels
        (problem((2, 9), 24, 24, 3, groups=6), None),  # that 4 don't divide
        (problem((2, 9), 64, 64, 3, strides=(1, 2), groups=4), None),
        (problem((2, 9), 64, 512, 3, groups=4), None),  # of many columns
        (problem((2, 9), 64, 64, 3, groups=4, dilation=(1, 4)), None),  # one column, with eight beside it
    ],
)
def test_boxes_with_their_halo_are_the_default_of_few_channels(given, chosen):
    knobs = {name: values[0] for name, values in CONV2D.parameters(HOPPER, given).items()}
    assert {name: knobs[name] for name in chosen or ()} == (chosen or {})
    for target in (HOPPER, AMPERE):
        assert ("merged" in CONV2D.parameters(target, given)) == (chosen is not None)


@pytest.mark.parametrize(
    "size, channels, rows", [((32, 56), 128, 64), ((32, 28), 512, 64), ((32, 112), 128, 128), ((2, 128), 320, 64)]
)
def test_blocks_of_windows_are_as_many_as_run_at_once(size, channels, rows):
    knobs = CONV2D.parameters(HOPPER, problem(size, channels, channels, 3, padding=(1, 1), strides=(2, 2)))
    assert (knobs["block_m"][0], knobs["block_n"][0], knobs["stages"][0]) == (rows, 128, 3)


@pytest.mark.parametrize(
    "changes, knobs, message",
    [
        ({"strides": (2, 1)}, boxed(), r"boxes have windows one pixel apart, not \(2, 1\)"),
        ({"channels": 96}, boxed(), "boxes have multiples of 64 channels a group, not 96"),
        ({"channels": 128}, surrounded(), "boxes with a halo have at most 64 channels a product, not 128"),
        ({"groups": 2}, surrounded(merged=4), "merged=4; valid divides the 2 groups"),
        ({"strides": (1, 2)}, surrounded(), r"boxes with a halo have windows one pixel apart, not \(1, 2\)"),
    ],
)
def test_boxes_that_are_none(changes, knobs, message):
    with pytest.raises(TileError, match=message):
        CONV2D.make(**{**problem((2, 9), 64, 64, 3), **changes}, **knobs)
