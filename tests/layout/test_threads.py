"""Warps and lanes are threads: the law over random layouts, and layouts that name them differently."""

import random

import pytest

from tvm_axe.layout import Layout
from tvm_axe.layout.axes import Coordinate

AXES = {"tx": 1, "laneid": 1, "warpid": 32, "tid_in_wg": 1, "wid_in_wg": 32, "wgid": 128}


def merged(point):
    """A point with what stands on the axes of threads on one."""
    found = {axis: position for axis, position in point.items() if axis not in AXES}
    return Coordinate(found | {"tx": sum(point[axis] * threads for axis, threads in AXES.items())})


def drawn(draw):
    names = [*AXES, "m", "bx", "tp"]

    def iters(least, most):
        return [
            (draw.randint(1, 4), draw.choice([-3, 1, 2, 8]), draw.choice(names))
            for _ in range(draw.randint(least, most))
        ]

    def text(parts):
        return f"[({', '.join(str(e) for e, _, _ in parts)},) : ({', '.join(f'{s}@{a}' for _, s, a in parts)},)]"

    replicas = iters(0, 2)
    written = f"S{text(iters(1, 4))}" + (f" + R{text(replicas)}" if replicas else "")
    for axis in draw.sample(names, 2):
        written += f" + {draw.randint(1, 9)}@{axis}"
    return Layout.parse(written)


@pytest.mark.parametrize("seed", range(60))
def test_points_are_those_of_the_threads(seed):
    layout = drawn(random.Random(seed))
    threads = layout.on_threads()
    assert threads.size() == layout.size()
    for x in range(layout.size()):
        assert threads.apply(x) == {merged(point) for point in layout.apply(x)}
    assert threads.on_threads() == threads


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("S[(4, 32, 2) : (1@warpid, 1@laneid, 1)]", "S[(128, 2) : (1@tx, 1)]", True),
        ("S[(2, 4, 32) : (1@wgid, 1@wid_in_wg, 1@laneid)]", "S[(2, 128) : (1@wgid, 1@tid_in_wg)]", True),
        ("S[(8, 4) : (4@laneid, 1@laneid)] + 2@warpid", "S[32 : 1@tx] + 64@tx", True),
        ("S[32 : 1@laneid] + R[4 : 1@warpid]", "S[32 : 1@tx] + R[4 : 32@tx]", True),
        ("S[(4, 32) : (1@warpid, 1@laneid)]", "S[(32, 4) : (1@tx, 32@tx)]", False),
    ],
)
def test_layouts_that_name_threads_differently(one, other, same):
    one, other = Layout.parse(one), Layout.parse(other)
    assert not one.equivalent(other)
    assert one.on_threads().equivalent(other.on_threads()) is same


def test_what_names_no_threads_stays():
    layout = Layout.parse("S[(2, 8) : (1@tp, 1)] + R[2 : 1@dp] + 3")
    assert layout.on_threads() == layout
