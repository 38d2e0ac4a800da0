"""How a random tile program is drawn, and judged beside the interpreter: by tests, and by scripts/fuzz_tiles.py."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
from generator import LARGEST, Made, Maker
from interpreter import interpret
from strided import like

from tvm_axe.tile.program import TileProgram

SIZES: dict[str, Mapping[str, Sequence[int]]] = {
    "small": {},
    "tiled": {"sizes": (64, 128), "depths": (32, 64, 100, 128), "blocks": (32, 64)},
    "wide": {"sizes": (64, 256), "depths": (64, 128), "blocks": (64,)},
}
"""What the sizes of tiles are drawn of: any, those that tensor cores' instructions are made for, and large ones."""


def drawn(seed: int, sizes: str, options: str = "", strided: bool = False) -> Made:
    """The program of a seed; if it is to be `strided`, the same one with strides of some parameters."""
    choose = random.Random(seed).choice
    return Maker(choose, name=f"func{seed}", options=options, strided=strided, **SIZES[sizes]).make()


def wanted(made: Made, program: TileProgram) -> list[np.ndarray]:
    """What each parameter holds afterwards; TooLarge if a number on the way isn't exact in its type."""
    return interpret(program, *made.arrays, largest=LARGEST)


def judge(executable, made: Made, expected: Sequence[np.ndarray]) -> None:
    """Run on the program's inputs, its outputs poisoned, and compare every element of every parameter.

    Of memory that is no element of any, nothing is written.
    """
    copies = [like(array) for array in made.arrays]
    arrays = [copy.view for copy in copies]
    executable(*arrays)
    for copy in copies:
        copy.check()
    for number, (array, want) in enumerate(zip(arrays, expected, strict=True)):
        np.testing.assert_array_equal(array.astype(want.dtype), want, err_msg=f"parameter {number} of\n{made.source}")
