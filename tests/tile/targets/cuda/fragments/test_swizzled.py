"""Addresses in swizzled tiles as expressions of the compiler: those that the layout says, at any element and length."""

import numpy as np
import pytest
from expressions import Evaluator
from tvm import tirx

from tvm_axe.layout import ComposeLayout, Layout
from tvm_axe.tile.targets.cuda.fragments.emitter import swizzled


@pytest.mark.parametrize(
    "fine, count, atom, inner",
    [(3, 3, 3, True), (3, 3, 4, True), (4, 2, 3, True), (4, 1, 3, True), (3, 1, 3, True), (2, 3, 3, False)],
)
def test_an_address_is_the_layouts(fine, count, atom, inner):
    size = 2 ** (fine + count + atom + 1)
    layout = ComposeLayout(fine, count, atom, Layout.parse(f"S[{size} : 1]"), swizzle_inner=inner)
    var = tirx.Var("address", "int32")
    for length in (1, 2, 4, 8, 16):
        places = np.arange(0, size, length)
        found = Evaluator({var: places}, lambda *_: None)(swizzled(layout, var, length))
        assert (found == [int(layout.address(int(place))) for place in places]).all()
