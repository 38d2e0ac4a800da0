"""Attention of unknown batches and numbers of tokens: one kernel, right at any, on a CPU, meshes and a GPU."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import IRModule, relax, tirx

import tvm_axe as axe
from tvm_axe import _tvm
from tvm_axe.analysis.annotations import KERNEL
from tvm_axe.lower.tiles import with_tile_kernels
from tvm_axe.machines import builder, resolve_target
from tvm_axe.relax.attended import with_attention
from tvm_axe.relax.fuse import fuse
from tvm_axe.tile import lowering
from tvm_axe.tile.kernels import KERNELS

HEADS, DIM = 6, 16
GPU, CPU = resolve_target("cuda:sm_90a"), resolve_target("llvm")
SIZES = ((1, 1, 70), (2, 5, 3), (1, 16, 129), (3, 17, 1), (2, 64, 64), (1, 130, 200))
"""A batch, how many tokens there are, and how many others, such as those of a cache."""


class Case:
    """A model of one attention, and what it is called with.

    `keys` are "alike", as many as queries; "others"; or "behind", others and then those of the queries.
    """

    def __init__(
        self, batch: bool, keys: str, mask: str | None, kv_heads: int, scale: float | None = None, queries: int = 0
    ) -> None:
        self.keys, self.mask, self.kv_heads, self.scale, self.queries = keys, mask, kv_heads, scale, queries
        self.batch = tirx.Var("b", "int64") if batch else 2

    def model(self, dtype: str = "float32", dim: int = DIM) -> IRModule:
        n, p = self.queries or tirx.Var("n", "int64"), tirx.Var("p", "int64")
        of = {"alike": [n], "others": [p], "behind": [p, n]}[self.keys]
        shapes = [(n, HEADS), *((tokens, self.kv_heads) for tokens in of for _ in "kv")]
        given = [
            relax.Var(f"x{at}", relax.TensorType((self.batch, *shape, dim), dtype)) for at, shape in enumerate(shapes)
        ]
        builder = relax.BlockBuilder()
        with builder.function("main", given):
            q, *parts = given
            k, v = parts[:2]
            if len(of) > 1:
                k, v = (builder.emit(relax.op.concat([parts[at], parts[at + 2]], 1)) for at in (0, 1))
            attended = relax.op.nn.attention(q, k, v, scale=self.scale, causal_mask=self.mask)
            builder.emit_func_output(builder.emit(attended))
        return builder.get()

    def arrays(self, batch: int, n: int, p: int, dtype: str = "float32", dim: int = DIM) -> list[np.ndarray]:
        rng, n = np.random.default_rng(n), self.queries or n
        of = {"alike": [n], "others": [p], "behind": [p, n]}[self.keys]
        batch = batch if isinstance(self.batch, tirx.Var) else 2
        shapes = [(n, HEADS), *((tokens, self.kv_heads) for tokens in of for _ in "kv")]
        return [rng.standard_normal((batch, *shape, dim)).astype(dtype) for shape in shapes]

    def exact(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        q, *parts = (each.astype("float64").swapaxes(1, 2) for each in arrays)
        k, v = (np.concatenate(parts[at::2], 2) for at in (0, 1))
        k, v = (np.repeat(each, q.shape[1] // each.shape[1], 1) for each in (k, v))
        scores = q @ k.swapaxes(2, 3) * (self.scale or q.shape[3] ** -0.5)
        if self.mask:
            rows, columns = np.indices(scores.shape[2:])
            scores = np.where(columns <= rows + scores.shape[3] - scores.shape[2], scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(1, 2)


CASES = {
    "as many keys": Case(False, "alike", "TopLeft", 6),
    "heads of groups": Case(False, "alike", None, 3, 0.5),
    "other keys": Case(False, "others", None, 6),
    "any batch": Case(True, "alike", "TopLeft", 3),
    "any batch, behind a cache": Case(True, "behind", "BottomRight", 3),
    "one query": Case(True, "others", None, 3, queries=1),
}


def attentions(mod: IRModule) -> list[tirx.PrimFunc]:
    """The functions that a kernel computes, or that are its code."""
    functions = ((str(v.name_hint), f) for v, f in mod.functions_items() if isinstance(f, tirx.PrimFunc))
    return [func for name, func in functions if name.startswith("attention")]


@pytest.mark.parametrize("name", CASES)
def test_one_kernel_is_right_at_any_length(name):
    case = CASES[name]
    exe = axe.compile(case.model(), work_dir=None, keep=False)
    assert len(attentions(exe.module)) == 1 and "softmax" not in exe.module.script()
    for sizes in SIZES:
        given = case.arrays(*sizes)
        np.testing.assert_allclose(exe(*given), case.exact(given), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_devices_of_a_mesh_have_one_kernel_each(name, devices, workers):
    """Of their heads, or of their part of the batch, if it divides; two devices compute the second of three."""
    case = CASES[name]
    exe = axe.compile(case.model(), mesh={"tp": devices}, work_dir=None, keep=False)
    (func,) = attentions(exe.module)
    assert str(func.attrs[KERNEL]) == "attention"
    for sizes in SIZES:
        given = case.arrays(*sizes)
        found = np.asarray(exe.run(workers(devices), *given))
        np.testing.assert_allclose(found, case.exact(given), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["other keys", "one query"])
def test_devices_along_two_axes_have_one_kernel_each(name):
    """One axis shares the batch, and the other heads; or both share a batch that isn't known."""
    case, mesh = CASES[name], axe.Mesh({"dp": 2, "tp": 2})
    exe = axe.compile(case.model(), mesh=mesh, work_dir=None, keep=False)
    (func,) = attentions(exe.module)
    assert str(func.attrs[KERNEL]) == "attention"
    with axe.launch(mesh, engine="threads") as four:
        for sizes in SIZES:
            given = case.arrays(*sizes)
            np.testing.assert_allclose(np.asarray(exe.run(four, *given)), case.exact(given), rtol=2e-5, atol=2e-5)


DIVIDED = {
    **{name: CASES[name] for name in ("as many keys", "other keys")},
    "any batch, behind a cache": Case(True, "behind", "BottomRight", 2),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_gpus_of_a_mesh_have_one_kernel_each(name):
    """Where they divide the heads of keys."""
    exe = axe.compile(DIVIDED[name].model("float16", 64), mesh={"tp": 2}, target=GPU, work_dir=None, keep=False)
    (func,) = attentions(exe.module)
    assert dict(func.attrs.items()).get(KERNEL) == "attention"
    (lowered,) = attentions(exe.runnable)
    builder.build_kernels(IRModule({"attention": lowered}), GPU)  # a cubin


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_one_kernel_for_a_gpu(name, dtype):
    """Which Hopper computes by wgmma of what TMA loads, if its rows are of 16 bits; here it is right on a CPU."""
    case = CASES[name]
    mod = fuse(case.model(dtype, 64), GPU)
    (func,) = attentions(mod)
    assert str(func.attrs[KERNEL]) == "attention"
    assert len(attentions(axe.compile(case.model(dtype, 64), target=GPU, work_dir=None, keep=False).module)) == 1
    rest = tvm.transform.Sequential(_tvm.relax_lowering(CPU, "cpu"))
    machine = relax.VirtualMachine(builder.build_program(with_tile_kernels(mod, CPU), CPU, rest), tvm.cpu())
    for sizes in SIZES[:4]:
        given = case.arrays(*sizes, dtype, 64)
        want = case.exact(given)
        error = np.linalg.norm(machine["main"](*map(tvm.runtime.tensor, given)).numpy() - want) / np.linalg.norm(want)
        assert error < (1e-5 if dtype == "float32" else 2e-3)


def test_hopper_loads_unknown_numbers_of_tokens_by_tma():
    tokens, batch = tirx.Var("queries", "int64"), tirx.Var("batch", "int64")
    problem: dict[str, Any] = {"batch": batch, "heads": 4, "kv_heads": 2, "queries": tokens, "keys": tokens, "dim": 64}
    (program,) = KERNELS["attention"].recipe(GPU, {**problem, "dtype": "bfloat16", "causal": True}).programs
    told = lowering.explain(program, GPU)
    assert "a producer warp and 2 warpgroups that consume" in told


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name, dtype, cuda):
    case = CASES[name]
    exe = axe.compile(case.model(dtype, 64), target="cuda", work_dir=None, keep=False)
    for sizes in (*SIZES, (3, 300, 1000)):
        given = case.arrays(*sizes, dtype, 64)
        want = case.exact(given)
        error = np.linalg.norm(np.asarray(exe(*given)).astype("float64") - want) / np.linalg.norm(want)
        assert error < {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]


def with_bias() -> IRModule:
    n = tirx.Var("n", "int64")
    shapes = ((1, n, HEADS, DIM), (1, n, 3, DIM), (1, n, 3, DIM), (1, HEADS, n, n))
    given = [relax.Var(f"x{at}", relax.TensorType(shape, "float32")) for at, shape in enumerate(shapes)]
    builder = relax.BlockBuilder()
    with builder.function("main", given):
        builder.emit_func_output(builder.emit(relax.op.nn.attention(*given)))
    return builder.get()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Case(False, "others", "BottomRight", 6).model(), "causal attention of n queries and p keys isn't one kernel"),
        (with_bias(), "attention with a bias isn't one kernel"),
    ],
    ids=["causal", "bias"],
)
def test_what_no_kernel_computes_is_said(model, why):
    assert with_attention(model, CPU) is model
    for mesh in ({}, {"mesh": {"tp": 2}}):
        assert why in axe.compile(model, work_dir=None, keep=False, **mesh).show()


@pytest.mark.parametrize("queries", [2, 20])
def test_fewer_heads_of_keys_are_not_read_beyond(queries, workers):
    """Upstream's own blocks would read beyond the heads of keys that there are."""
    tensors = ((2, queries, HEADS, DIM), (2, 40, 3, DIM), (2, 40, 3, DIM))
    given = [relax.Var(f"x{at}", relax.TensorType(shape, "float32")) for at, shape in enumerate(tensors)]
    block = relax.BlockBuilder()
    with block.function("main", given):
        block.emit_func_output(block.emit(relax.op.nn.attention(*given)))
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape).astype("float32") for shape in tensors]
    want = Case(False, "others", None, 3).exact(arrays)
    compiled = functools.partial(axe.compile, block.get(), work_dir=None, keep=False)
    np.testing.assert_allclose(compiled()(*arrays), want, rtol=2e-5, atol=2e-5)
    found = compiled(mesh={"tp": 2}).run(workers(2), *arrays)
    np.testing.assert_allclose(np.asarray(found), want, rtol=2e-5, atol=2e-5)
