"""Calls of programs whose parameters have strides: views of tensors, what is refused, exported libraries, operators."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tvm
from programs_strides import added, columns, doubled, open_product, poisoned, random
from strided import Spread
from tvm.script import tirx as T

from tvm_axe import _tvm, tile
from tvm_axe.errors import InputError, TileError
from tvm_axe.machines.cache import Cache
from tvm_axe.tile.arguments import Binder, parameters
from tvm_axe.tile.mesh import is_mesh_tensor

_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Compiled programs don't fill the user's cache."""
    return Cache(tmp_path_factory.mktemp("cache"))


# ---- Calls -----------------------------------------------------------------------------------------------------------


REFUSED = {
    "other strides": (
        ((5, 8), (16, 1)),
        ((5, 8), (24, 1)),
        r"doubled: B has stride 24 along dimension 0, wanted is 16, which is lda in A; got the strides \(24, 1\) for "
        r"B: float32\[m, n\] with strides \(lda, 1\)",
    ),
    "another constant": (
        ((5, 8), (16, 2)),
        ((5, 8), (16, 1)),
        r"doubled: A has stride 2 along dimension 1, wanted is 1; got the strides \(16, 2\)",
    ),
    "overlaps": (
        ((5, 8), (7, 1)),
        ((5, 8), (7, 1)),
        "doubled writes B, and its elements overlap: 7 elements apart along dimension 0, where others reach 7; valid",
    ),
    "broadcast": (
        ((5, 8), (0, 1)),
        ((5, 8), (0, 1)),
        "doubled writes B, and its elements overlap: those along dimension 0 are",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("kind", ["numpy", "tvm", "torch"])
def test_calls_that_are_refused(store, case, kind):
    *sides, says = REFUSED[case]
    spreads = [Spread(np.zeros(shape, "float32"), strides) for shape, strides in sides]
    exe = tile.compile(doubled, "llvm", store)
    with pytest.raises(InputError, match=says):
        exe(*(_as(kind, each.view) for each in spreads))
    with pytest.raises(InputError, match=says):
        exe.bind(*(_as(kind, each.view) for each in spreads))


def _as(kind: str, array: np.ndarray) -> Any:
    if kind == "torch":
        return pytest.importorskip("torch", reason="PyTorch is not installed").from_numpy(array)
    return _tvm.as_tensor(array) if kind == "tvm" else array


@pytest.mark.parametrize("kind", ["numpy", "tvm", "torch"])
def test_calls_on_views(store, kind):
    exe, a = tile.compile(doubled, "llvm", store), random((5, 8))
    for bound in (False, True):
        spreads = [Spread(a, (24, 1)), Spread(poisoned((5, 8)), (24, 1))]
        given = [_as(kind, each.view) for each in spreads]
        (exe.bind(*given) if bound else lambda given=given: exe(*given))()
        for each in spreads:
            each.check()
        np.testing.assert_array_equal(spreads[1].view, a * 2)


def test_negative_strides_and_odd_bytes(store):
    exe, a = tile.compile(doubled, "llvm", store), Spread(random((5, 8)), (24, 1))
    with pytest.raises(InputError, match="doubled: A has stride -24 along dimension 0; valid are strides of 0 and"):
        exe(a.view[::-1], a.view)
    odd = np.ndarray((5, 8), "float32", np.zeros(200, "uint8"), 0, (34, 4))
    with pytest.raises(InputError, match=r"A has strides of \(34, 4\) bytes; valid are multiples of an element's 4"):
        exe(odd, a.view)


def test_arrays_that_are_copied(store):
    """An array that begins at no multiple of 64 bytes, or is read-only, is copied with its strides and back."""
    exe, a = tile.compile(doubled, "llvm", store), random((5, 25))
    out = poisoned((5, 25))
    exe(a[:, 3:11], out[:, 7:15])
    np.testing.assert_array_equal(out[:, 7:15], a[:, 3:11] * 2)
    assert np.isnan(out[:, :7]).all() and np.isnan(out[:, 15:]).all()
    frozen = a[:, :8]
    frozen.flags.writeable = False
    exe(frozen, out[:, 7:15])
    np.testing.assert_array_equal(out[:, 7:15], a[:, :8] * 2)
    with pytest.raises(InputError, match="doubled writes B; got a read-only array"):
        exe(a[:, :8], frozen)
    with pytest.raises(InputError, match="A, B would be copied for each run; bind takes"):
        exe.bind(a[:, 3:11], out[:, 7:15])


def test_arrays_that_are_copied_to_where_the_function_runs(store):
    """What is done for a GPU, with this machine's memory in the place of a GPU's."""
    exe, program, a = tile.compile(doubled, "llvm", store), tile.read(doubled), random((5, 25))
    backend = SimpleNamespace(device="cpu", alignment=64, on_host=False)
    binder, out = Binder("doubled", parameters(program), backend), poisoned((5, 25))
    bound = binder.bind((a[:, 3:11], out[:, 7:15]))
    assert bound.copied == ("A", "B") and [tuple(each.strides) for each in bound.values] == [(25, 1), (25, 1)]
    exe._function(*bound.values)
    assert np.isnan(out).all()
    for step in bound.afterwards:
        step()
    np.testing.assert_array_equal(out[:, 7:15], a[:, 3:11] * 2)
    assert np.isnan(out[:, :7]).all() and np.isnan(out[:, 15:]).all()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("shape", [(1, 8), (5, 1), (1, 1), (0, 8)])
def test_a_stride_along_one_element_is_any(store, kind, shape):
    exe, a = tile.compile(doubled, "llvm", store), random(shape)
    out = np.array(poisoned(shape))
    # Nonsense along a dimension of one element.
    steps = 32 if shape[0] > 1 else 4, 4 if shape[1] > 1 else 44
    given = [np.lib.stride_tricks.as_strided(Spread(each, (8, 1)).view, shape, steps) for each in (a, out)]
    exe(*(_as(kind, each) for each in given))
    np.testing.assert_array_equal(given[1], a * 2)


@pytest.mark.parametrize("strides", [(0, 1), (1, 1), (-2, 1), (512, 1), (516, 1)])
def test_a_stride_along_one_element_is_as_assumed(store, strides):
    a, b, c = random((1, 512), "float16"), random((512, 256), "float16"), poisoned((1, 256), "float16")
    views = [Spread(each, (264, 1)).view for each in (a, b, c)]
    views[0] = np.lib.stride_tricks.as_strided(views[0], (1, 512), (2 * strides[0], 2))
    tile.compile(open_product(8), "llvm", store)(*views)
    expected = a.astype("float64") @ b.astype("float64")
    assert np.abs(views[2] - expected).max() < 2e-3 * np.abs(expected).max()


def test_a_tensor_whose_stride_along_one_element_cannot_be_changed(store):
    exe = tile.compile(added, "llvm", store)
    views = [Spread(np.zeros((1, 64), "float32"), (64, 1)).view for _ in range(3)]
    a, c, d = (tvm.runtime.tensor(view) for view in views)
    with pytest.raises(InputError, match=r"added: D has the strides \(64, 1\), and is taken with \(0, 1\), which"):
        exe(a, _tvm.as_tensor(Spread(np.zeros((48, 64), "float32"), (1, 48)).view), c, d)


def test_what_is_assumed_of_strides(store):
    exe = tile.compile(open_product(8), "llvm", store)
    a, b, c = (Spread(np.zeros(shape, "float16"), (516, 1)).view for shape in ((16, 512), (512, 256), (16, 256)))
    with pytest.raises(InputError, match=r"product: lda is 516 in A; the program has tile\.assume\(lda % 8 == 0\)"):
        exe(a, b, c)


def test_tensors_that_reach_too_far(store):
    """More elements than int32 counts are refused, unless sizes are int64."""
    exe = tile.compile(doubled, "llvm", store)
    far = np.lib.stride_tricks.as_strided(Spread(np.zeros((2, 8), "float32"), (8, 1)).view, (3, 8), (2**32, 4))
    with pytest.raises(InputError, match="doubled: A reaches over 2147483656 elements, more than int32 counts; valid"):
        exe(far, far)

    @T.prim_func
    def wide(a: T.handle, b: T.handle):
        lda = T.int64()
        A = T.match_buffer(a, (2, 16), "int8", strides=(lda, 1))
        B = T.match_buffer(b, (2, 16), "int8", strides=(32, 1))
        with tile.kernel(2) as i:
            x = tile.fragment((1, 16), "int8")
            tile.copy(A[i, 0], x)
            tile.copy(x, B[i, 0])

    assert not is_mesh_tensor(tile.read(wide).params[0].buffer)
    room = np.zeros(2**31 + 4096 + 64, "int8")  # of which few pages are touched
    room = room[-room.ctypes.data % 64 :][: 2**31 + 4096]
    a = np.lib.stride_tricks.as_strided(room, (2, 16), (2**31 + 2048, 1))
    a[...] = np.arange(32).reshape(2, 16)
    out = Spread(np.zeros((2, 16), "int8"), (32, 1))
    tile.compile(wide, "llvm", store)(a, out.view)
    out.check()
    np.testing.assert_array_equal(out.view, a)


def test_exported_libraries_refuse_what_overlaps(store, tmp_path):
    exe = tile.compile(doubled, "llvm", store)
    exe.export(tmp_path / "doubled.so")
    run = tvm.runtime.load_module(str(tmp_path / "doubled.so"))["doubled"]
    a = random((5, 8))
    spreads = [Spread(a, (24, 1)), Spread(poisoned((5, 8)), (24, 1))]
    run(*(_tvm.as_tensor(each.view) for each in spreads))
    np.testing.assert_array_equal(spreads[1].view, a * 2)
    for strides in ((7, 1), (0, 1)):
        given = [_tvm.as_tensor(Spread(np.zeros((5, 8), "float32"), strides).view) for _ in range(2)]
        with pytest.raises(ValueError, match="B is written, and its elements overlap"):
            run(*given)
    given = [_tvm.as_tensor(Spread(np.zeros((5, 8), "float32"), strides).view) for strides in ((8, 1), (9, 1))]
    with pytest.raises(ValueError, match=r"strides\[0\]"):
        run(*given)


# ---- Operators of PyTorch --------------------------------------------------------------------------------------------


def test_operators():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    name = f"axe_tests::strided{next(_NUMBERS)}"
    op = tile.operator(name, columns)
    b = torch.randn(32, 16).T
    whole = torch.randn(40, 96)
    for x in (whole[:, 32:64], whole[:, 5:37], torch.randn(1, 32).expand(40, 32)[:0]):  # aligned, or not, or empty
        y = op(x, b)
        assert y.shape == x.shape and y.stride() == x.stride()
        torch.testing.assert_close(y, x + b.repeat(3, 1)[: len(x)])
    with pytest.raises(InputError, match="b has stride 32 along dimension 0, wanted is 1"):
        op(whole[:, :32], b.contiguous())
    torch.library.opcheck(op, (whole[:, 32:64], b), test_utils=("test_schema", "test_faketensor"))


def test_an_operator_whose_output_has_strides_that_no_input_says():
    pytest.importorskip("torch", reason="PyTorch is not installed")

    @T.prim_func
    def func(X: T.Buffer((4, 8), "float32"), Y: T.Buffer((4, 8), "float32", strides=("ldy", 1))):
        with tile.kernel(1), tile.parallel(4, 8) as (i, j):
            Y[i, j] = X[i, j]

    with pytest.raises(TileError, match=r"ldy of Y: .* is the size of no input, nor a stride"):
        tile.operator(f"axe_tests::strided{next(_NUMBERS)}", func)
