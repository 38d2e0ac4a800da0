"""Tile programs as operators of PyTorch: what they give, their gradients, under torch.compile, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import InputError, TileError
from tvm_axe.tile.kernels import KERNELS, lists_of_queries

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

_NUMBERS = itertools.count()


def fresh() -> str:
    """A name that no operator has: PyTorch keeps them as long as the process."""
    return f"axe_tests::op{next(_NUMBERS)}"


@T.prim_func
def affine(x: T.handle, s: T.float32, w: T.handle, y: T.handle):
    n = T.int32()
    X = T.match_buffer(x, (n, 48), "float32")
    W = T.match_buffer(w, (48,), "float32")
    Y = T.match_buffer(y, (n, 48), "float32")
    with tile.kernel(tile.cdiv(n, 16)) as i:
        rows = tile.fragment((16, 48), "float32")
        tile.copy(X[i * 16, 0], rows)
        with tile.parallel(16, 48) as (a, b):
            rows[a, b] = rows[a, b] * s + W[b]
        tile.copy(rows, Y[i * 16, 0])


@T.prim_func
def affine_gradient(dy: T.handle, s: T.float32, dx: T.handle):
    n = T.int32()
    dY = T.match_buffer(dy, (n, 48), "float32")
    dX = T.match_buffer(dx, (n, 48), "float32")
    with tile.kernel(tile.cdiv(n, 16)) as i:
        rows = tile.fragment((16, 48), "float32")
        tile.copy(dY[i * 16, 0], rows)
        with tile.parallel(16, 48) as (a, b):
            rows[a, b] = rows[a, b] * s
        tile.copy(rows, dX[i * 16, 0])


@T.prim_func
def halves(x: T.handle, a: T.handle, b: T.handle):
    """Two outputs, one of a size that is worked out."""
    n = T.int32()
    X = T.match_buffer(x, (n, 32), "float32")
    A = T.match_buffer(a, (n, 32), "float32")
    B = T.match_buffer(b, (n * 2, 32), "float32")
    with tile.kernel(n) as i:
        row = tile.fragment((1, 32), "float32")
        tile.copy(X[i, 0], row)
        tile.copy(row, B[2 * i, 0])
        tile.copy(row, B[2 * i + 1, 0])
        with tile.parallel(1, 32) as (u, v):
            row[u, v] = row[u, v] * T.float32(0.5)
        tile.copy(row, A[i, 0])


@T.prim_func
def halves_gradient(da: T.handle, dx: T.handle):
    n = T.int32()
    dA = T.match_buffer(da, (n, 32), "float32")
    dX = T.match_buffer(dx, (n, 32), "float32")
    with tile.kernel(n) as i:
        row = tile.fragment((1, 32), "float32")
        tile.copy(dA[i, 0], row)
        with tile.parallel(1, 32) as (u, v):
            row[u, v] = row[u, v] * T.float32(0.5)
        tile.copy(row, dX[i, 0])


@T.prim_func
def in_place(X: T.Buffer((16, 48), "float32")):
    with tile.kernel(1) as _:
        rows = tile.fragment((16, 48), "float32")
        tile.copy(X[0, 0], rows)
        tile.copy(rows, X[0, 0])


@T.prim_func
def of_no_size(x: T.handle, y: T.handle):
    m = T.int32()
    X = T.match_buffer(x, (16, 48), "float32")
    Y = T.match_buffer(y, (m, 48), "float32")
    with tile.kernel(tile.cdiv(m, 16)) as i:
        rows = tile.fragment((16, 48), "float32")
        tile.copy(X[0, 0], rows)
        tile.copy(rows, Y[i * 16, 0])


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda":
        request.getfixturevalue("cuda")
    return str(request.param)


def test_new_tensors_of_any_number_of_rows(device: str) -> None:
    op = tile.operator(fresh(), affine)
    for n in (1, 33):
        x, w = torch.randn(n, 48, device=device), torch.randn(48, device=device)
        torch.testing.assert_close(op(x, 1.5, w), x * 1.5 + w)


def test_what_lies_otherwise_is_copied(device: str) -> None:
    op = tile.operator(fresh(), affine)
    x, w = torch.randn(48, 20, device=device).T, torch.randn(49, device=device)[1:]
    torch.testing.assert_close(op(x, -2.0, w), x * -2 + w)


def test_several_outputs_and_sizes_that_are_worked_out(device: str) -> None:
    x = torch.randn(5, 32, device=device)
    a, b = tile.operator(fresh(), halves)(x)
    torch.testing.assert_close(a, x / 2)
    torch.testing.assert_close(b, x.repeat_interleave(2, dim=0))


def test_gradients_and_what_pytorch_asks_of_an_operator(device: str) -> None:
    op = tile.operator(fresh(), affine, gradient=affine_gradient)
    x, w = torch.randn(21, 48, device=device, requires_grad=True), torch.randn(48, device=device)
    op(x, 3.0, w).square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * (x.detach() * 3 + w) * 3)
    torch.library.opcheck(op, (x, 3.0, w))


def test_under_torch_compile() -> None:
    op = tile.operator(fresh(), affine, gradient=affine_gradient)
    model = torch.compile(lambda x, w: op(x, 2.0, w).sum(), backend="aot_eager", fullgraph=True, dynamic=True)
    w = torch.randn(48)
    for n in (7, 18):
        x = torch.randn(n, 48, requires_grad=True)
        found = model(x, w)
        found.backward()
        torch.testing.assert_close(found, (x * 2 + w).sum())
        torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))


def test_a_kernel_of_several_programs_with_its_gradient(device: str) -> None:
    """Attention, whose gradients are three programs, with scratch between them."""
    shape = {"batch": 1, "heads": 4, "kv_heads": 2, "queries": 40, "keys": 40, "dim": 32, "dtype": "float32"}
    target = tile.compile(affine, {"cpu": "llvm", "cuda": "cuda"}[device]).target
    forward = KERNELS["attention"].recipe(target, {**shape, "causal": True, "logsumexp": True})
    backward = KERNELS["attention_backward"].recipe(target, {**shape, "causal": True})
    attention = tile.operator(fresh(), forward.programs, outputs=forward.outputs, gradient=backward.programs)
    rng = np.random.default_rng()
    heads = (4, 2, 2)
    q, k, v = (torch.tensor(rng.standard_normal((1, h, 40, 32)), dtype=torch.float32, device=device) for h in heads)
    ours, theirs = ([t.clone().requires_grad_() for t in (q, k, v)] for _ in range(2))
    out, _ = attention(*ours)
    expected = torch.nn.functional.scaled_dot_product_attention(*theirs, is_causal=True, enable_gqa=True)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    for mine, its in zip(ours, theirs):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-3, atol=1e-3)


def test_attention_over_lists_with_its_gradient(device: str) -> None:
    """Beside PyTorch on a dense mask: heads in groups, causal, a window, a sink, and queries that see nothing."""
    shape = {"batch": 1, "heads": 4, "kv_heads": 2, "queries": 40, "keys": 44, "dim": 32, "dtype": "float32"}
    shape |= {"query_block": 16, "key_block": 16, "width": 3, "query_width": 3, "mask_heads": 2}
    shape |= {"causal": True, "window": 20, "sinks": True}
    target = tile.compile(affine, {"cpu": "llvm", "cuda": "cuda"}[device]).target
    forward = KERNELS["block_sparse_attention"].recipe(target, {**shape, "logsumexp": True})
    backward = KERNELS["block_sparse_attention_backward"].recipe(target, shape)
    attention = tile.operator(fresh(), forward.programs, outputs=forward.outputs, gradient=backward.programs)
    counts = torch.tensor([[[1, 2, 0], [2, 1, 3]]], dtype=torch.int32)
    indices = torch.tensor([[[[0, 9, 9], [1, 0, 9], [9, 9, 9]], [[2, 0, 9], [1, 9, 9], [2, 0, 1]]]], dtype=torch.int32)
    lists = [counts, indices, *map(torch.tensor, lists_of_queries(counts, indices, columns=3))]
    rows, keys = torch.arange(40)[:, None] + 4, torch.arange(44)
    sees = torch.zeros(1, 4, 40, 44, dtype=torch.bool)
    for h, i in itertools.product(range(4), range(3)):
        for j in indices[0, h // 2, i, : counts[0, h // 2, i]].tolist():
            sees[0, h, i * 16 : i * 16 + 16, j * 16 : j * 16 + 16] = True
    sees &= (keys <= rows) & (keys > rows - 20)
    drawn = [torch.randn(1, h, n, 32) for h, n in ((4, 40), (2, 44), (2, 44))] + [torch.randn(4)]
    ours, theirs = ([t.detach().clone().to(to).requires_grad_() for t in drawn] for to in (device, torch.float64))
    out, _ = attention(*ours[:3], *(each.to(device) for each in lists), ours[3])
    q, k, v = theirs[0], *(t.repeat_interleave(2, 1) for t in theirs[1:3])
    scores = (q @ k.mT / 32**0.5).masked_fill(~sees, -torch.inf)
    sink = theirs[3][None, :, None, None].expand(1, 4, 40, 1)
    expected = torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v
    weight = torch.randn(out.shape)
    (out * weight.to(device)).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(out.cpu(), expected.float(), rtol=1e-5, atol=1e-5)
    for mine, its in zip(ours, theirs):
        torch.testing.assert_close(mine.grad.cpu(), its.grad.float(), rtol=1e-4, atol=1e-5)


def test_a_gradient_that_nobody_computes_is_refused() -> None:
    op = tile.operator(fresh(), affine, gradient=affine_gradient)
    x, w = torch.randn(4, 48), torch.randn(48, requires_grad=True)
    with pytest.raises(InputError, match=r"no gradient by W, .*_gradient gives dX; detach W"):
        op(x, 3.0, w).sum().backward()
    two = tile.operator(fresh(), halves, gradient=halves_gradient)
    x = torch.randn(4, 32, requires_grad=True)
    a, b = two(x)
    with pytest.raises(InputError, match=r"B is differentiated, and .* doesn't read dB; detach B"):
        (a.sum() + b.sum()).backward()
    a, _ = two(x)
    a.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 0.5))


@pytest.mark.parametrize(
    ("programs", "options", "message"),
    [
        (in_place, {}, "in_place writes X, which it reads"),
        (of_no_size, {}, r"m of Y: float32\[m, 48\] is the size of no input"),
        (affine, {"outputs": ("Z",)}, "nothing writes Z; written are Y"),
        ([affine, affine_gradient], {"outputs": ()}, "writes nothing that it could give"),
        (affine, {"gradient": halves_gradient}, "the gradient reads dA; valid are W, X, Y, dY, s"),
        (halves, {"gradient": affine_gradient}, "the gradient reads dY, s; valid are A, B, X, dA, dB"),
    ],
)
def test_programs_that_are_refused(programs: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(TileError, match=message):
        tile.operator(fresh(), programs, **options)


def test_names_that_are_refused() -> None:
    for name in ("scale", "a::b::c", "a::1"):
        with pytest.raises(InputError, match='a name is "namespace::name"'):
            tile.operator(name, affine)
    name = fresh()
    tile.operator(name, affine)
    with pytest.raises(InputError, match=f"{name} is taken"):
        tile.operator(name, affine)


def test_arguments_that_are_refused() -> None:
    op = tile.operator(fresh(), affine)
    w = torch.randn(48)
    with pytest.raises(InputError, match="X has the shape"):
        op(torch.randn(4, 47), 1.0, w)
    with pytest.raises(InputError, match="X is X: float32"):
        op(torch.randn(48), 1.0, w)
    with pytest.raises(InputError, match="X is float32; got float64"):
        op(torch.randn(4, 48, dtype=torch.float64), 1.0, w)
