"""Attention that importers write out, of batches and numbers of tokens that aren't known: one kernel, right at any."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from tvm import IRModule, relax, tirx
from written_attention import HEADS, Case, added, chosen, distance, kernels, number, op, scores_of, shape

import tvm_axe as axe
from tvm_axe import _tvm
from tvm_axe.analysis.annotations import KERNEL
from tvm_axe.lower.tiles import with_tile_kernels
from tvm_axe.machines import builder, resolve_target
from tvm_axe.relax.attention import attentions
from tvm_axe.relax.fuse import fuse

CPU = resolve_target("llvm")


def plain(emit: Any, q: Any, k: Any, v: Any) -> Any:
    return emit(op.matmul(emit(op.nn.softmax(scores_of(emit, q, k))), v))


def merged(emit: Any, q: Any, k: Any, v: Any) -> Any:
    """As torch.export has products of four dimensions: their batches and heads are one dimension."""

    def flat(value: Any) -> Any:
        b, heads, rows, columns = shape(value)
        return emit(op.reshape(emit(op.broadcast_to(value, shape(value))), (b * heads, rows, columns)))

    def wide(value: Any) -> Any:
        _, rows, columns = shape(value)
        return emit(op.reshape(value, (shape(q)[0], HEADS, rows, columns)))

    products = wide(emit(op.matmul(flat(q), flat(emit(op.permute_dims(k, [0, 1, 3, 2]))))))
    scaled = emit(op.multiply(products, number(float(int(shape(q)[3])) ** -0.5, products)))
    return wide(emit(op.matmul(flat(emit(op.nn.softmax(scaled))), flat(v))))


def grouped(emit: Any, q: Any, k: Any, v: Any) -> Any:
    """Each head of keys and values serves neighbouring heads of queries, as transformers has it."""
    b, heads, tokens, dim = shape(k)
    times = HEADS // int(heads)

    def repeated(value: Any) -> Any:
        spread = op.broadcast_to(emit(op.expand_dims(value, 2)), (b, heads, times, tokens, dim))
        return emit(op.reshape(emit(spread), (b, HEADS, tokens, dim)))

    return plain(emit, q, repeated(k), repeated(v))


def triangular(emit: Any, q: Any, k: Any, v: Any) -> Any:
    """A mask is added, made by tril, as ONNX has it of torch."""
    scores = scores_of(emit, q, k)
    queries, keys = shape(scores)[-2:]
    ones = emit(op.broadcast_to(relax.const(np.ones((1,), str(scores.ty.dtype))), (queries, keys)))
    hidden = emit(op.equal(emit(op.tril(ones, keys - queries)), number(0.0, scores)))
    mask = emit(op.where(hidden, number(-np.inf, scores), number(0.0, scores)))
    return emit(op.matmul(emit(op.nn.softmax(emit(op.add(scores, mask)))), v))


CASES = {
    "plain": Case(plain),
    "other keys": Case(plain, others="alone"),
    "merged": Case(merged),
    "grouped": Case(grouped, kv_heads=3),
    "chosen": Case(chosen, True),
    "added": Case(added, True),
    "triangular": Case(triangular, True),
    "chosen, behind a cache": Case(chosen, True, others="before"),
}
SIZES = ((1, 1, 70), (2, 5, 3), (3, 17, 1), (2, 64, 64), (1, 130, 200))
"""A batch, how many tokens there are, and how many others."""


def test_every_way_of_writing_is_found():
    for name, case in CASES.items():
        for batch, tokens in ((None, None), (2, None), (None, 24)):
            (match,) = attentions(case.model(batch, tokens=tokens)["main"]).values()
            assert match.mask.causal == case.causal and match.scale is None, name
            assert (match.problem["heads"], match.problem["kv_heads"]) == (HEADS, case.kv_heads)
            problem = match.problem
            assert isinstance(problem["batch"], int) == (batch is not None), name
            if tokens is None:
                assert problem["keys"].same_as(problem["queries"]) == (case.others == "none"), name


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("added", "plain")])
def test_one_kernel_is_right_at_any_length(name):
    case = CASES[name]
    exe = axe.compile(case.model(None), work_dir=None, keep=False)
    assert len(kernels(exe.module)) == 1 and "softmax" not in exe.module.script()
    for sizes in SIZES:
        given = case.arrays(*sizes)
        np.testing.assert_allclose(exe(*given), case.exact(given), rtol=2e-5, atol=2e-5)


def test_batches_are_not_known_alone():
    """Tokens are, and fewer would be computed block by block if the batch were known, too."""
    case = CASES["merged"]
    exe = axe.compile(case.model(None, tokens=24), work_dir=None, keep=False)
    assert len(kernels(exe.module)) == 1 and "softmax" not in exe.module.script()
    for batch in (1, 2, 5):
        given = case.arrays(batch, 24, 0)
        np.testing.assert_allclose(exe(*given), case.exact(given), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "batch", "devices"), [("merged", 2, 2), ("grouped", 2, 3), ("chosen", None, 2), ("triangular", 2, 2)]
)
def test_devices_of_a_mesh_have_one_kernel_each(name, batch, devices, workers):
    case = CASES[name]
    exe = axe.compile(case.model(batch), mesh={"tp": devices}, work_dir=None, keep=False)
    (func,) = kernels(exe.module)
    assert str(func.attrs[KERNEL]) == "attention"
    assert "100% of the products' operations are shared" in exe.show()
    for sizes in SIZES:
        given = case.arrays(batch or sizes[0], *sizes[1:])
        found = np.asarray(exe.run(workers(devices), *given))
        np.testing.assert_allclose(found, case.exact(given), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("target", ["cuda:sm_90a", "cuda:sm_80"])
@pytest.mark.parametrize("name", ["merged", "grouped", "added", "chosen, behind a cache"])
def test_one_kernel_for_a_gpu(name, target):
    """Compiled for it; here it is right on a CPU."""
    case, gpu = CASES[name], resolve_target(target)
    mod = fuse(case.model(2, "float16", dim=64), gpu)
    (func,) = kernels(mod)
    assert str(func.attrs[KERNEL]) == "attention" and "softmax" not in mod.script()
    lowered = with_tile_kernels(mod, gpu)
    (kernel,) = kernels(lowered)
    named = kernel.with_attr("global_symbol", "attention")
    builder.build_kernels(IRModule({"attention": named}), gpu)  # a cubin
    rest = tvm.transform.Sequential(_tvm.relax_lowering(CPU, "cpu"))
    machine = relax.VirtualMachine(builder.build_program(with_tile_kernels(mod, CPU), CPU, rest), tvm.cpu())
    for sizes in SIZES:
        given = case.arrays(2, *sizes[1:], "float16", 64)
        want = case.exact(given)
        error = np.linalg.norm(machine["main"](*map(tvm.runtime.tensor, given)).numpy() - want) / np.linalg.norm(want)
        assert error < 2e-3


def not_quite(emit: Any, q: Any, k: Any, v: Any) -> Any:
    """A query doesn't see its own key, or rather all that is before the key before it."""
    scores = scores_of(emit, q, k)
    seen = emit(op.less_equal(distance(emit, scores), relax.const(-1, "int64")))
    mask = emit(op.where(seen, number(0.0, scores), number(-3e38, scores)))
    return emit(op.matmul(emit(op.nn.softmax(emit(op.add(scores, mask)))), v))


def softly(emit: Any, q: Any, k: Any, v: Any) -> Any:
    """What is added to later keys isn't enough to hide them."""
    scores = scores_of(emit, q, k)
    seen = emit(op.less_equal(distance(emit, scores), relax.const(0, "int64")))
    mask = emit(op.where(seen, number(0.0, scores), number(-2.0, scores)))
    return emit(op.matmul(emit(op.nn.softmax(emit(op.add(scores, mask)))), v))


def upside_down(emit: Any, q: Any, k: Any, v: Any) -> Any:
    """A query sees later keys alone, and its own."""
    scores = scores_of(emit, q, k)
    seen = emit(op.greater_equal(distance(emit, scores), relax.const(0, "int64")))
    masked = emit(op.where(seen, scores, number(-np.inf, scores)))
    return emit(op.matmul(emit(op.nn.softmax(masked)), v))


def by_keys(emit: Any, q: Any, k: Any, v: Any) -> Any:
    """Of all queries alike, as padding is."""
    scores = scores_of(emit, q, k)
    place = emit(op.expand_dims(emit(op.arange(0, shape(scores)[-1], 1, "int64")), 0))
    mask = emit(op.where(emit(op.less(place, relax.const(5, "int64"))), number(0.0, scores), number(-3e38, scores)))
    return emit(op.matmul(emit(op.nn.softmax(emit(op.add(scores, mask)))), v))


@pytest.mark.parametrize("build", [not_quite, softly, upside_down, by_keys])
def test_any_other_mask_is_none(build):
    assert not attentions(Case(build).model(None)["main"])


def test_a_causal_mask_of_keys_that_may_be_fewer_is_none():
    assert not attentions(Case(chosen, True, others="alone").model(None)["main"])


def test_what_a_product_of_scores_needs_otherwise_is_not_computed_twice():
    """The queries of attention are a product, which the model returns, too."""
    n = tirx.Var("n", "int64")
    x, w = (relax.Var(name, relax.TensorType(of, "float32")) for name, of in (("x", (1, n, 32)), ("w", (32, 32))))
    made = relax.BlockBuilder()
    with made.function("main", [x, w]):
        with made.dataflow():
            q = made.emit(op.reshape(made.emit(op.matmul(x, w)), (1, 1, n, 32)))
            scores = made.emit(op.matmul(q, made.emit(op.permute_dims(q, [0, 1, 3, 2]))))
            out = made.emit(op.matmul(made.emit(op.nn.softmax(scores)), q))
            out = made.emit_output(relax.Tuple([out, q]))
        made.emit_func_output(out)
    module = axe.compile(made.get(), work_dir=None, keep=False).module
    assert len(kernels(module)) == 1
    calls = [str(binding.value) for block in module["main"].body.blocks for binding in block.bindings]
    assert sum("matmul" in call for call in calls) == 1
