"""Calls in place on a mesh: caches that a function writes to where they lie, shared as is cheapest."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.errors import LowerError

BATCH, HEADS, PLACES, DIM = 2, 4, 8, 4
CACHE = (BATCH, HEADS, PLACES, DIM)


@I.ir_module(s_tir=True)
class Model:
    """Two functions of a cache: one puts a token's values into it, one adds to all of it."""

    @T.prim_func(private=True, s_tir=True)
    def append(
        own: T.Buffer((2, 4, 4), "float32"), at: T.Buffer((1,), "int64"), cache: T.Buffer((2, 4, 8, 4), "float32")
    ):
        T.func_attr({"tirx.noalias": True})
        for b, h, d in T.grid(2, 4, 4):
            with T.sblock("append"):
                vb, vh, vd = T.axis.remap("SSS", [b, h, d])
                cache[vb, vh, at[0], vd] = own[vb, vh, vd]

    @T.prim_func(private=True, s_tir=True)
    def more(cache: T.Buffer((2, 4, 8, 4), "float32"), one: T.Buffer((1,), "float32")):
        T.func_attr({"tirx.noalias": True})
        for b, h, t, d in T.grid(2, 4, 8, 4):
            with T.sblock("more"):
                vb, vh, vt, vd = T.axis.remap("SSSS", [b, h, t, d])
                cache[vb, vh, vt, vd] = cache[vb, vh, vt, vd] + one[0]

    @R.function
    def put(
        own: R.Tensor((2, 4, 4), "float32"), at: R.Tensor((1,), "int64"), cache: R.Tensor((2, 4, 8, 4), "float32")
    ) -> R.Tuple(R.Tensor((2, 4, 4), "float32"), R.Tensor((2, 4, 8, 4), "float32")):
        cls = Model
        with R.dataflow():
            kept = R.call_tir_inplace(
                cls.append, (own, at, cache), inplace_indices=[2], out_ty=R.Tensor((2, 4, 8, 4), "float32")
            )
            total = R.sum(kept, axis=[2])
            R.output(kept, total)
        return (total, kept)

    @R.function
    def add(held: R.Tensor((2, 4, 8, 4), "float32"), one: R.Tensor((1,), "float32")) -> R.Tensor((2, 4), "float32"):
        cls = Model
        with R.dataflow():
            kept = R.call_tir_inplace(
                cls.more, (held, one), inplace_indices=[0], out_ty=R.Tensor((2, 4, 8, 4), "float32")
            )
            total = R.sum(kept, axis=[2, 3])
            R.output(total)
        return total


def expected(cache: np.ndarray, own: np.ndarray, at: int) -> np.ndarray:
    """A cache with a token's values at a place."""
    kept = cache.copy()
    kept[:, :, at] = own
    return kept


@pytest.mark.parametrize("pins", [{}, {"cache": 1}, {"cache": 1, "held": 3}, {"cache": None, "held": None}])
@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 3}, {"dp": 2, "tp": 2}])
def test_a_cache_is_written_where_it_lies(axes: Mapping[str, int], pins: Mapping[str, int | None]) -> None:
    mesh, rng = axe.Mesh(axes), np.random.default_rng(0)
    exe = axe.compile(Model, mesh=mesh, pins=pins, work_dir=None)
    for name, dim in pins.items():
        (tensor,) = (each for each in exe.shared.tensors.values() if each.name.endswith(f".{name}"))
        assert any(form.dim is not None for _, form in tensor.forms) == (dim is not None)
    cache = rng.standard_normal(CACHE).astype("float32")
    with axe.launch(mesh, engine="threads") as workers, exe.load(workers, {}) as model:
        kept = cache
        for at in (3, 0, 7):
            own = rng.standard_normal((BATCH, HEADS, DIM)).astype("float32")
            cache = expected(cache, own, at)
            before = model.copied
            total, kept = model.put(own, np.array([at]), kept)
            np.testing.assert_allclose(np.asarray(total), cache.sum(2), rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(np.asarray(kept), cache)
            assert at == 3 or model.copied - before < mesh.size * (own.nbytes + 9)  # the cache isn't among it
        # Nobody returns what is written to here: the handle has it, in whatever form the function took it.
        found = model.add(kept, np.array([0.5], "float32"))
        np.testing.assert_allclose(np.asarray(found), (cache + 0.5).sum((2, 3)), rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(kept), cache + np.float32(0.5))


@I.ir_module(s_tir=True)
class Both:
    """A call that writes to what it takes, and leaves something new, too."""

    @T.prim_func(private=True, s_tir=True)
    def both(x: T.Buffer((8,), "float32"), y: T.Buffer((8,), "float32")):
        T.func_attr({"tirx.noalias": True})
        for i in T.grid(8):
            with T.sblock("new"):
                vi = T.axis.spatial(8, i)
                y[vi] = x[vi]
        for i in T.grid(8):
            with T.sblock("old"):
                vi = T.axis.spatial(8, i)
                x[vi] = T.float32(0)

    @R.function
    def main(x: R.Tensor((8,), "float32")) -> R.Tensor((8,), "float32"):
        cls = Both
        with R.dataflow():
            pair = R.call_tir_inplace(
                cls.both, (x,), [0, -1], out_ty=[R.Tensor((8,), "float32"), R.Tensor((8,), "float32")]
            )
            y = pair[1]
            R.output(y)
        return y


def test_results_that_are_new_beside_others_are_refused() -> None:
    with pytest.raises(LowerError, match=r"main: pair is made by both, some of whose results are new"):
        axe.compile(Both, mesh=axe.Mesh({"tp": 2}), work_dir=None)


@I.ir_module(s_tir=True)
class Returned:
    """What a call stores to is returned, too, and computed in the function."""

    @T.prim_func(private=True, s_tir=True)
    def more(held: T.Buffer((8, 16), "float32"), one: T.Buffer((1,), "float32")):
        T.func_attr({"tirx.noalias": True})
        for i, j in T.grid(8, 16):
            with T.sblock("more"):
                vi, vj = T.axis.remap("SS", [i, j])
                held[vi, vj] = held[vi, vj] + one[0]

    @R.function
    def main(
        x: R.Tensor((8, 16), "float32"), one: R.Tensor((1,), "float32"), w: R.Tensor((16, 8), "float32")
    ) -> R.Tuple(R.Tensor((8, 16), "float32"), R.Tensor((8, 8), "float32")):
        cls = Returned
        with R.dataflow():
            held = R.exp(x)
            kept = R.call_tir_inplace(cls.more, (held, one), inplace_indices=[0], out_ty=R.Tensor((8, 16), "float32"))
            out = R.matmul(R.nn.softmax(kept, axis=0), w)
            R.output(held, out)
        return (held, out)


@pytest.mark.parametrize("pins", [{"held": 0}, {"kept": 0}, {"held": 1}])
def test_what_is_returned_is_kept_when_its_successor_was_used_last(pins: Mapping[str, int], workers) -> None:
    """Its memory is nobody else's, though what was left in its place last has been read by all devices."""
    rng = np.random.default_rng(0)
    x, one, w = (rng.standard_normal(shape, "float32") for shape in ((8, 16), (1,), (16, 8)))
    exe = axe.compile(Returned, mesh={"tp": 2}, pins=pins, work_dir=None)
    held, out = map(np.asarray, exe.run(workers(2), x, one, w))
    want = np.exp(x) + one
    weights = np.exp(want - want.max(0))
    np.testing.assert_allclose(held, want, rtol=1e-5)
    np.testing.assert_allclose(out, weights / weights.sum(0) @ w, rtol=1e-5, atol=1e-5)
