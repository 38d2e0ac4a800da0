"""Models as they are imported, from torch.export and ONNX: right on one device, beside PyTorch and ONNX Runtime."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch_modules import Called
from tvm.relax.frontend.onnx import from_onnx
from tvm.relax.frontend.torch import from_exported_program

import tvm_axe as axe
from tvm_axe.relax import torch_converters

torch = pytest.importorskip("torch", reason="models are imported from PyTorch")
nn, F = torch.nn, torch.nn.functional
WIDTH, HEADS, VOCABULARY = 32, 4, 50


def linears(**sizes: tuple[int, int]) -> Any:
    return nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()})


def attention(own: Any, x: Any, bias: Any) -> Any:
    batch, tokens, width = x.shape
    q, k, v = (own[name](x).reshape(batch, tokens, HEADS, -1).transpose(1, 2) for name in "qkv")
    weights = torch.softmax(q @ k.transpose(-1, -2) / (width // HEADS) ** 0.5 + bias, -1)
    return own["o"]((weights @ v).transpose(1, 2).reshape(batch, tokens, width))


class Encoder(nn.Module):
    """Embeddings by int64 ids, a mask, erf, norms, and a mean over the tokens that count."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        square = (WIDTH, WIDTH)
        self.own = linears(q=square, k=square, v=square, o=square, up=(WIDTH, 64), down=(64, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: Any, mask: Any) -> Any:
        x = self.norm(self.tokens(ids) + self.places(torch.arange(ids.shape[1])))
        bias = (1.0 - mask.to(x.dtype))[:, None, None, :] * -1e4
        x = self.norm(x + attention(self.own, x, bias))
        x = self.norm(x + self.own["down"](F.gelu(self.own["up"](x))))
        counted = mask.to(x.dtype)[:, :, None]
        return (x * counted).sum(1) / counted.sum(1)


class Experts(nn.Module):
    """A causal mask of infinities, an rms norm, and the two best of four experts for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        square = (WIDTH, WIDTH)
        self.own = linears(q=square, k=square, v=square, o=square, router=(WIDTH, 4), head=(WIDTH, VOCABULARY))
        self.up = nn.Parameter(torch.randn(4, WIDTH, 24) * WIDTH**-0.5)
        self.down = nn.Parameter(torch.randn(4, 24, WIDTH) * 24**-0.5)

    def forward(self, ids: Any) -> Any:
        x = self.tokens(ids)
        batch, tokens, width = x.shape
        x = x + attention(self.own, x, torch.full((tokens, tokens), float("-inf"), dtype=x.dtype).triu(1))
        y = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)
        shares, chosen = torch.topk(torch.softmax(self.own["router"](y).float(), -1), 2, -1)
        chosen = chosen.reshape(batch * tokens, 2)
        hidden = F.silu(y.reshape(batch * tokens, 1, 1, width) @ self.up[chosen])
        out = ((hidden @ self.down[chosen]).squeeze(2) * shares.to(y.dtype).reshape(-1, 2, 1)).sum(1)
        return self.own["head"](x + out.reshape(batch, tokens, width))


class Residual(nn.Module):
    """Convolutions with batch norms, a stride, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.Conv2d(8, 8, 3, 1, 1, bias=False)
        self.norm1, self.norm2, self.head = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(8, 10)
        for norm in (self.norm1, self.norm2):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)

    def forward(self, image: Any) -> Any:
        x = F.max_pool2d(F.relu(self.norm1(self.first(image))), 3, 2, 1)
        x = F.relu(self.norm2(self.second(x)) + x)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Vision(nn.Module):
    """Patches by a convolution, a token in front of them, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, WIDTH, 8, 8), nn.Linear(WIDTH, 10)
        self.first, self.places = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 17, WIDTH))
        square = (WIDTH, WIDTH)
        self.own = linears(q=square, k=square, v=square, o=square, up=(WIDTH, 64), down=(64, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, image: Any) -> Any:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], 1, WIDTH), x], 1) + self.places
        x = x + attention(self.own, self.norm(x), 0.0)
        x = x + self.own["down"](F.gelu(self.own["up"](self.norm(x))))
        return self.head(self.norm(x)[:, 0])


def drawn(kind: str, batch: int = 2, tokens: int = 12) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(batch)
    if kind in ("residual", "vision"):
        return (torch.randn(batch, 3, 32, 32, generator=generator),)
    ids = torch.randint(0, VOCABULARY, (batch, tokens), generator=generator)
    mask = (torch.arange(tokens)[None] < torch.arange(tokens, tokens - batch, -1)[:, None]).to(torch.int64)
    return (ids, mask) if kind == "encoder" else (ids,)


KINDS: dict[str, Callable[[], Any]] = {"encoder": Encoder, "experts": Experts, "residual": Residual}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    torch.manual_seed(0)
    return {name: kind().eval() for name, kind in {**KINDS, "vision": Vision}.items()}


def exported(model: Any, kind: str, arrays: tuple[Any, ...], symbolic: bool) -> Any:
    batch, tokens = torch.export.Dim("batch", min=2, max=8), torch.export.Dim("tokens", min=2, max=16)
    sizes = {0: batch, 1: tokens} if kind in ("encoder", "experts") else {0: batch}
    return torch.export.export(model, arrays, dynamic_shapes=tuple(sizes for _ in arrays) if symbolic else None)


def error(got: Any, want: Any) -> float:
    want = want.float().numpy() if isinstance(want, torch.Tensor) else want
    got = got[0] if isinstance(got, tuple) else got
    got = np.asarray(got.float() if isinstance(got, torch.Tensor) else got).astype("float32")
    return float(np.abs(got - want).max() / np.abs(want).max())


@pytest.mark.parametrize("symbolic", [False, True], ids=["constant", "symbolic"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_torch(models: dict[str, Any], kind: str, symbolic: bool) -> None:
    """Weights as constants, as PyTorch's parameters by name, and as the importer has attached them.

    The statistics of batch norms are constants of what is imported either way.
    """
    model, arrays = models[kind], drawn(kind)
    program = exported(model, kind, arrays, symbolic)
    cases = [arrays, drawn(kind, 5, 9)] if symbolic else [arrays]
    bound = axe.compile(from_exported_program(program), work_dir=None)
    kept = axe.compile(from_exported_program(program, keep_params_as_input=True), work_dir=None)
    with kept.load() as attached, kept.load(dict(model.named_parameters())) as loaded:
        for case in cases:
            want = model(*case)
            for got in (bound(*case), attached.main(*case), loaded.main(*case)):
                assert error(got, want) < 2e-6


@pytest.mark.parametrize(("devices", "symbolic"), [(3, False), (2, True)], ids=["constant", "symbolic"])
@pytest.mark.parametrize("kind", ["encoder", "vision", "residual"])
@torch.no_grad()
def test_torch_on_a_mesh(models: dict[str, Any], workers: Any, kind: str, devices: int, symbolic: bool) -> None:
    model, arrays = models[kind], drawn(kind)
    program = from_exported_program(exported(model, kind, arrays, symbolic))
    exe = axe.compile(program, mesh={"tp": devices}, work_dir=None)
    for case in [arrays, drawn(kind, 5, 9), drawn(kind, 3, 16)] if symbolic else [arrays]:
        assert error(exe.run(workers(devices), *case), model(*case)) < 2e-6
    if symbolic:
        with pytest.raises(axe.InputError, match=r"and the model says that it is 8 at most \(tir_var_upper_bound\)"):
            exe.run(workers(devices), *drawn(kind, 9))


@pytest.mark.parametrize(("dtype", "bound"), [("float16", 4e-3), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("kind", ["encoder", "vision", "residual"])
@torch.no_grad()
def test_types_of_half_the_width(models: dict[str, Any], workers: Any, kind: str, dtype: str, bound: float) -> None:
    """With biases, norms and convolutions; on one device and on a mesh."""
    half = copy.deepcopy(models[kind]).to(getattr(torch, dtype))
    arrays = tuple(x.to(getattr(torch, dtype)) if x.is_floating_point() else x for x in drawn(kind))
    model = from_exported_program(exported(half, kind, arrays, False), custom_convert_map=torch_converters())
    assert str(model["main"].ret_ty.fields[0].dtype) == dtype
    want = copy.deepcopy(half).double()(*[x.double() if x.is_floating_point() else x for x in arrays])
    alone, shared = (axe.compile(model, mesh=mesh, work_dir=None) for mesh in (None, {"tp": 2}))
    for got in (alone(*arrays), shared.run(workers(2), *arrays)):
        assert error(got, want) < bound


@torch.no_grad()
def test_norms_of_groups_of_bfloat16() -> None:
    """Which Relax refuses by itself."""
    torch.manual_seed(0)
    norm, x = nn.GroupNorm(2, 8).to(torch.bfloat16), torch.randn(2, 8, 5, 5, dtype=torch.bfloat16) + 1
    model = from_exported_program(torch.export.export(norm, (x,)), custom_convert_map=torch_converters())
    assert str(model["main"].ret_ty.fields[0].dtype) == "bfloat16"
    assert error(axe.compile(model, work_dir=None)(x), copy.deepcopy(norm).double()(x.double())) < 1e-2


def stored(x: Any, i: Any, j: Any) -> Any:
    y = x.clone()
    y[:, i, j] = x[0, 0, :3, :3].sum(0)[:, None]
    return y


def fractions(i: Any, x: Any) -> Any:
    """What PyTorch computes of integers and truth values in the type of the result."""
    mask = i > 0
    plain = (i * 0.5, i + 0.5, i / 4, 1.5 - i, i**0.5, i % 2.5, i.clamp(max=1.5), i.sin(), i.exp())
    masks = (mask * 1.5, mask + x, torch.where(mask, i, 0.5), i.masked_fill(mask, -1) * 1.0, mask.cumsum(0) * 1.0)
    return torch.stack([*plain, *masks, torch.cat([i, x[:1]])[1:]])


def clamped(i: Any, x: Any) -> Any:
    return torch.stack([i.clamp(max=J[:1]), x.clamp(min=i, max=X[0, 0, 0, :1]), i.clamp_min(2)])


def least(x: Any) -> Any:
    return torch.cat([x.amin((0, 1)), x.min(1).values[0], x.min(2, True).indices[0, :, 0] * 1.0])


def odd(x: Any, y: Any) -> Any:
    return torch.stack([torch.fmax(x, y), torch.copysign(x, y), torch.hypot(x, y), torch.exp2(y)])


X = torch.randn(4, 5, 6, 7, generator=torch.Generator().manual_seed(0))
I, J, ADDED = torch.tensor([0, -1, 2]), torch.tensor([3, 1, -2]), (torch.tensor([1, 1, -1]), torch.tensor([0, 0, 2]))
ODD = torch.tensor([0.0, -0.0, 3.0, -2.0, torch.inf, -torch.inf, torch.nan, 1e30])
SPARSE = torch.cat([ODD[:4], ODD[5:6].repeat(4)]).reshape(4, 2)
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "fractions": (fractions, (torch.arange(6), X[0, 0, 0, :6])),
    "clamped": (clamped, (torch.arange(6), X[0, 0, 0, :6])),
    "last": (lambda x: x[:, -1] * 2, (X,)),
    "pairs": (lambda x, i, j: x[:, i, j], (X, I, J)),
    "apart": (lambda x, i, j: x[:, i, :, j], (X, I, J)),
    "grid": (lambda x, i, j: x[:, i[:, None], j[None]], (X, I, J)),
    "open grid": (lambda x, i, j: x[:, i[:, None], j], (X, I, J)),
    "open grid of three": (lambda x, i, j: x[:, i[:2, None, None], j[:, None], i], (X, I, J)),
    "grid of another order": (lambda x, i, j: x[:, i, j[:, None]], (X, I, J)),
    "stored": (stored, (X, I, J)),
    "added": (lambda x, i, j: x.index_put((i, j), x[1, 1], accumulate=True), (X, *ADDED)),
    "selu": (nn.functional.selu, (X,)),
    "nearest": (lambda x: nn.functional.interpolate(x, size=(4, 10)), (X,)),
    "linear": (lambda x: nn.functional.interpolate(x[0], size=5, mode="linear"), (X,)),
    "logsumexp": (lambda x: torch.logsumexp(x, 1), (SPARSE,)),
    "least": (least, (X,)),
    "variance": (lambda x: torch.cat(torch.var_mean(x, (1, 2))), (X,)),
    "odd": (odd, (ODD, ODD.flip(0))),
    "sampled": (lambda x, y: nn.functional.grid_sample(x, y, align_corners=False), (X, X.reshape(4, 3, 35, 2))),
    "scattered": (lambda x, y: x.masked_scatter(x > 0.3, y), (X, X.flip(0))),
    "masks": (lambda x: ((x > 0) * (x < 1) + (x > 2)).float(), (X,)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@torch.no_grad()
def test_operators_that_upstream_imports_wrongly_or_not(name: str) -> None:
    function, given = FUNCTIONS[name]
    want = function(*given).numpy()
    program = torch.export.export(Called(function), given)
    model = from_exported_program(program, custom_convert_map=torch_converters())
    got = np.asarray(axe.compile(model, work_dir=None)(*given))
    assert got.shape == want.shape and got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: nn.functional.avg_pool2d(x, 2, divisor_override=3), "divisor_override=3 of avg_pool2d isn't"),
        (lambda x: nn.functional.max_pool2d(x, 2, return_indices=True)[1], "only the first is imported"),
        (
            lambda x: nn.functional.interpolate(x, size=3, mode="bilinear", antialias=True),
            "bilinear2d_aa isn't imported",
        ),
    ],
)
def test_what_upstream_would_ignore_is_refused(function: Any, message: str) -> None:
    program = torch.export.export(Called(function), (X,))
    with pytest.raises(axe.InputError, match=message):
        from_exported_program(program, custom_convert_map=torch_converters())


@pytest.mark.parametrize("kind", ["encoder", "residual"])
@torch.no_grad()
def test_onnx(models: dict[str, Any], workers: Any, kind: str) -> None:
    onnx = pytest.importorskip("onnx", reason="models are imported from ONNX")
    runtime = pytest.importorskip("onnxruntime", reason="it is the judge")
    arrays, file = drawn(kind), io.BytesIO()
    names = [f"in{n}" for n in range(len(arrays))]
    torch.onnx.export(models[kind], arrays, file, input_names=names, opset_version=17, dynamo=False)
    given = dict(zip(names, [array.numpy() for array in arrays]))
    (want,) = runtime.InferenceSession(file.getvalue()).run(None, given)
    for keep in (False, True):
        model = from_onnx(onnx.load_model_from_string(file.getvalue()), keep_params_in_input=keep)
        with axe.compile(model, work_dir=None).load() as session:
            assert error(session[session.functions[0]](**given), want) < 2e-6
    on_mesh = axe.compile(from_onnx(onnx.load_model_from_string(file.getvalue())), mesh={"tp": 2}, work_dir=None)
    assert error(on_mesh.run(workers(2), *given.values()), want) < 2e-6


class Layer(nn.Module):
    """PyTorch's own attention, causal, whose batch and tokens aren't known: importers write it out."""

    def __init__(self) -> None:
        super().__init__()
        self.own = linears(qkv=(WIDTH, 3 * WIDTH), o=(WIDTH, WIDTH))

    def forward(self, x: Any) -> Any:
        batch, tokens, width = x.shape
        q, k, v = (
            each.reshape(batch, tokens, HEADS, -1).transpose(1, 2) for each in self.own["qkv"](x).split(width, -1)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.own["o"](out.transpose(1, 2).reshape(batch, tokens, width))


def imported(model: Any, importer: str, known: tuple[int, int] | None = None) -> Any:
    """With a batch and a number of tokens that aren't known, unless they are given."""
    example = (torch.randn(*(known or (3, 7)), WIDTH),)
    if importer == "torch":
        sizes = {0: torch.export.Dim("batch", min=1, max=8), 1: torch.export.Dim("tokens", min=2, max=512)}
        return from_exported_program(torch.export.export(model, example, dynamic_shapes=(sizes,)))
    onnx, file = pytest.importorskip("onnx", reason="models are imported from ONNX"), io.BytesIO()
    options: Any = {"input_names": ["x"], "opset_version": 17, "dynamo": False}
    if known is None:
        options["dynamic_axes"] = {"x": {0: "b", 1: "n"}}
    torch.onnx.export(model, example, file, **options)
    return from_onnx(onnx.load_model_from_string(file.getvalue()))


@pytest.mark.parametrize("importer", ["torch", "onnx"])
@torch.no_grad()
def test_attention_of_any_length_is_one_kernel(workers: Any, importer: str) -> None:
    torch.manual_seed(0)
    model = Layer().eval()
    alone, shared = (axe.compile(imported(model, importer), mesh=mesh, work_dir=None) for mesh in (None, {"tp": 2}))
    for exe in (alone, shared):
        names = [str(variable.name_hint) for variable in exe.module.get_global_vars()]
        assert sum(name.startswith("attention") for name in names) == 1
        assert not any("softmax" in name for name in names)
    for sizes in ((3, 7), (1, 2), (2, 130), (5, 64)):
        x = torch.randn(*sizes, WIDTH)
        want = copy.deepcopy(model).double()(x.double())
        for got in (alone(x.numpy()), shared.run(workers(2), x.numpy())):
            assert error(got, want) < 2e-6


class Windowed(nn.Module):
    """Two heads for each of keys, a sliding window and, written out, sinks as gpt-oss has them."""

    def __init__(self, sinks: bool) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.own = linears(q=(WIDTH, WIDTH), k=(WIDTH, 2 * size), v=(WIDTH, 2 * size), o=(WIDTH, WIDTH))
        self.sinks = nn.Parameter(torch.randn(HEADS)) if sinks else None

    def forward(self, x: Any) -> Any:
        batch, tokens, width = x.shape
        q = self.own["q"](x).reshape(batch, tokens, HEADS, -1).transpose(1, 2)
        k, v = (self.own[name](x).reshape(batch, tokens, 2, -1).transpose(1, 2) for name in "kv")
        shape = (batch, 2, HEADS // 2, tokens, width // HEADS)
        k, v = (each[:, :, None].expand(shape).reshape(batch, HEADS, tokens, -1) for each in (k, v))
        query, key = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
        seen = (key <= query) & (key > query - 20)
        if self.sinks is None:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[None, None])
        else:
            scores = q @ k.transpose(2, 3) * (WIDTH // HEADS) ** -0.5 + torch.where(seen, 0.0, -3e38)
            sinks = self.sinks.reshape(1, -1, 1, 1).expand(batch, -1, tokens, -1)
            scores = torch.cat([scores, sinks], -1)
            scores = scores - scores.max(dim=-1, keepdim=True).values
            out = torch.softmax(scores, -1, dtype=scores.dtype)[..., :-1] @ v
        return self.own["o"](out.transpose(1, 2).reshape(batch, tokens, width))


@pytest.mark.parametrize(("importer", "sinks"), [("torch", False), ("torch", True), ("onnx", False), ("onnx", True)])
@torch.no_grad()
def test_windows_and_sinks_are_one_kernel(importer: str, sinks: bool) -> None:
    torch.manual_seed(0)
    model = Windowed(sinks).eval()
    known = (2, 130) if importer == "onnx" else None  # upstream's importer expands to known shapes alone
    exe = axe.compile(imported(model, importer, known), work_dir=None)
    names = [str(variable.name_hint) for variable in exe.module.get_global_vars()]
    assert sum(name.startswith("attention") for name in names) == 1
    assert not any("softmax" in name for name in names)
    for sizes in ((3, 7), (2, 130)) if known is None else (known,):
        x = torch.randn(*sizes, WIDTH)
        assert error(exe(x.numpy()), copy.deepcopy(model).double()(x.double())) < 2e-6
