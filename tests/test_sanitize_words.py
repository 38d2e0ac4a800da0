"""The programs of words that scripts/sanitize.py runs on a GPU: they are right on a CPU, and what is wrong is said."""

import numpy as np
import pytest
import sanitize_words
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.machines.target import resolve_target
from tvm_axe.programs import PROGRAMS
from tvm_axe.tile.kernels import KERNELS


@pytest.mark.parametrize("name", sanitize_words.WORDS)
def test_right_on_a_cpu(name):
    assert sanitize_words.fault(name, resolve_target("llvm"), np.random.default_rng(0)) == ""


def test_names_are_nobody_elses():
    assert not sanitize_words.WORDS.keys() & {*PROGRAMS, *KERNELS}


def test_what_is_wrong_is_said(monkeypatch):
    @T.prim_func
    def ending(X: T.Buffer((70, 100), "float32"), steps: T.Buffer((70,), "int32"), Y: T.Buffer((70, 100), "float32")):
        with tile.kernel(70) as i:
            x = tile.fragment((100,), "float32")
            tile.copy(X[i, 0], x)
            with tile.parallel(100) as j:
                x[j] = x[j] + T.cast(steps[i], "float32")
            tile.copy(x, Y[i, 0])

    compiled = tile.compile(ending)
    monkeypatch.setattr(tile, "compile", lambda func, target: compiled)
    assert sanitize_words.fault("ending", resolve_target("llvm"), np.random.default_rng(0)).startswith("Y differs in ")
