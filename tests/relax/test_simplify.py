"""Reshapes go behind pointwise operators, and what changes nothing is left out; results stay the same."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax

import tvm_axe as axe
from tvm_axe.machines import resolve_target
from tvm_axe.relax.fuse import fuse
from tvm_axe.relax.simplify import simplified

TARGET = resolve_target("llvm", threads=1)


def layer() -> tvm.IRModule:
    """A linear layer as torch.export brings it: flattened tokens, a bias, a residual and gelu behind."""
    builder = relax.BlockBuilder()
    x, r, w, b = (
        relax.Var(name, relax.TensorType(shape, "float32"))
        for name, shape in (("x", (2, 5, 8)), ("r", (2, 5, 12)), ("w", (12, 8)), ("b", (12,)))
    )
    emit = builder.emit
    with builder.function("main", [x, r, w, b]):
        with builder.dataflow():
            flat = emit(relax.op.reshape(x, (10, 8)))
            y = emit(relax.op.matmul(flat, emit(relax.op.permute_dims(w))))
            y = emit(relax.op.reshape(emit(relax.op.reshape(y, (1, 10, 12))), (2, 5, 12)))
            y = emit(relax.op.add(emit(relax.op.add(y, b)), r))
            y = emit(relax.op.nn.gelu(emit(relax.op.broadcast_to(y, (2, 5, 12)))))
            y = emit(relax.op.permute_dims(emit(relax.op.permute_dims(y, [2, 0, 1])), [1, 2, 0]))
            out = builder.emit_output(y)
        builder.emit_func_output(out)
    return builder.get()


def test_a_linear_layer_is_one_kernel():
    text = simplified(layer())["main"].script()
    assert text.count("R.reshape") == 3  # of the data, the residual and the result
    assert "broadcast_to" not in text and text.count("permute_dims") == 1
    products = [str(v.name_hint) for v in fuse(layer(), TARGET).get_global_vars() if "matmul" in str(v.name_hint)]
    assert len(products) == 1 and "add" in products[0] and "gelu" in products[0]


def test_it_computes_the_same():
    rng = np.random.default_rng(0)
    given = [rng.standard_normal(shape, dtype="float32") for shape in ((2, 5, 8), (2, 5, 12), (12, 8), (12,))]
    plain = tvm.relax.VirtualMachine(tvm.compile(layer(), "llvm"), tvm.cpu())
    want = plain["main"](*map(tvm.runtime.tensor, given)).numpy()
    np.testing.assert_allclose(axe.compile(layer(), target=TARGET, work_dir=None)(*given), want, rtol=1e-5, atol=1e-5)


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
