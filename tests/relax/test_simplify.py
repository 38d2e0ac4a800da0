"""Reshapes go behind pointwise operators, and what changes nothing is left out; results stay the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

import tvm_axe as axe
from tvm_axe.machines import resolve_target
from tvm_axe.relax.fuse import fuse
from tvm_axe.relax.simplify import simplified

TARGET = resolve_target("llvm", threads=1)


def layer(batch: int | tirx.Var = 2, n: int | tirx.Var = 5) -> tvm.IRModule:
    """A linear layer as torch.export brings it: flattened tokens, a bias, a residual and gelu behind."""
    builder = relax.BlockBuilder()
    x, r, w, b = (
        relax.Var(name, relax.TensorType(shape, "float32"))
        for name, shape in (("x", (batch, n, 8)), ("r", (batch, n, 12)), ("w", (12, 8)), ("b", (12,)))
    )
    emit = builder.emit
    with builder.function("main", [x, r, w, b]):
        with builder.dataflow():
            flat = emit(relax.op.reshape(x, (batch * n, 8)))
            y = emit(relax.op.matmul(flat, emit(relax.op.permute_dims(w))))
            y = emit(relax.op.reshape(emit(relax.op.reshape(y, (1, n * batch, 12))), (batch, n, 12)))
            y = emit(relax.op.add(emit(relax.op.add(y, b)), r))
            y = emit(relax.op.nn.gelu(emit(relax.op.broadcast_to(y, (batch, n, 12)))))
            y = emit(relax.op.permute_dims(emit(relax.op.permute_dims(y, [2, 0, 1])), [1, 2, 0]))
            out = builder.emit_output(y)
        builder.emit_func_output(out)
    return builder.get()


def unknown() -> tuple[tirx.Var, tirx.Var]:
    return tirx.Var("batch", "int64"), tirx.Var("n", "int64")


@pytest.mark.parametrize("extents", [(2, 5), unknown(), (2, tirx.Var("n", "int64"))])
def test_a_linear_layer_is_one_kernel(extents):
    text = simplified(layer(*extents))["main"].script()
    assert text.count("R.reshape") == 3  # of the data, the residual and the result
    assert "broadcast_to" not in text and text.count("permute_dims") == 1
    fused = fuse(layer(*extents), TARGET)
    (product,) = [v for v in fused.get_global_vars() if "matmul" in str(v.name_hint)]
    assert "add" in str(product.name_hint) and "gelu" in str(product.name_hint)
    assert len(fused[product].params) == 5  # tensors alone


@pytest.mark.parametrize("extents", [(2, 5), unknown()])
def test_it_computes_the_same(extents):
    rng = np.random.default_rng(0)
    ours = axe.compile(layer(*extents), target=TARGET, work_dir=None)
    theirs = tvm.relax.VirtualMachine(tvm.compile(layer(*extents), "llvm"), tvm.cpu())
    for batch, n in ((2, 5),) if isinstance(extents[0], int) else ((2, 5), (1, 1), (3, 40)):
        shapes = ((batch, n, 8), (batch, n, 12), (12, 8), (12,))
        given = [rng.standard_normal(shape, dtype="float32") for shape in shapes]
        want = theirs["main"](*map(tvm.runtime.tensor, given)).numpy()
        np.testing.assert_allclose(ours(*given), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("batch", [3, tirx.Var("batch", "int64")])
def test_a_matrix_repeated_for_a_batch_is_read_as_it_is(batch):
    """torch.export repeats a layer's weights for each of a batch, where the batch isn't flattened."""

    def product(rows: tuple[Any, ...]) -> tvm.IRModule:
        builder = relax.BlockBuilder()
        x, w = (relax.Var(n, relax.TensorType(s, "float32")) for n, s in (("x", rows), ("w", (8, 12))))
        with builder.function("main", [x, w]):
            with builder.dataflow():
                wide = builder.emit(relax.op.broadcast_to(w, (batch, 8, 12)))
                out = builder.emit_output(relax.op.matmul(x, wide))
            builder.emit_func_output(out)
        return builder.get()

    assert "broadcast_to" not in simplified(product((batch, 5, 8)))["main"].script()
    assert "broadcast_to" in simplified(product((1, 5, 8)))["main"].script()  # which makes the batch
    x, w = (np.random.default_rng(0).standard_normal(shape, dtype="float32") for shape in ((3, 5, 8), (8, 12)))
    got = axe.compile(product((batch, 5, 8)), target=TARGET, work_dir=None)(x, w)
    np.testing.assert_allclose(got, x @ w, rtol=1e-5, atol=1e-5)


def test_what_differs_between_rows_keeps_a_reshape_in_front():
    builder = relax.BlockBuilder()
    x, c = (relax.Var(n, relax.TensorType(s, "float32")) for n, s in (("x", (6, 4)), ("c", (2, 1, 4))))
    with builder.function("main", [x, c]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.add(builder.emit(relax.op.reshape(x, (2, 3, 4))), c))
        builder.emit_func_output(out)
    mod = builder.get()
    tvm.ir.assert_structural_equal(simplified(mod)["main"], mod["main"], map_free_vars=True)


def test_a_product_by_what_is_the_same_under_two_names():
    """Importers broadcast the operands of batched products; upstream's patterns don't see through a second name."""
    builder = relax.BlockBuilder()
    x, y = (relax.Var(name, relax.TensorType((3, 5, 8), "float32")) for name in "xy")
    emit = builder.emit
    with builder.function("main", [x, y]):
        with builder.dataflow():
            turned = emit(relax.op.permute_dims(y, [0, 2, 1]))
            same = [emit(relax.op.broadcast_to(v, s)) for v, s in ((x, (3, 5, 8)), (turned, (3, 8, 5)))]
            out = builder.emit_output(relax.op.matmul(*same))
        builder.emit_func_output(out)
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((3, 5, 8), dtype="float32") for _ in "xy")
    got = axe.compile(builder.get(), target=TARGET, work_dir=None)(a, b)
    np.testing.assert_allclose(got, a @ b.transpose(0, 2, 1), rtol=1e-5, atol=1e-5)
