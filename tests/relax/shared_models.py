"""Models that the tests share over meshes, of `relax.frontend.nn` and a `BlockBuilder`: small, weights random."""

import functools

import numpy as np
import tvm
from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op


def exported(model, **inputs):
    """The model as importers leave it."""
    spec = {name: nn.spec.Tensor(list(shape), dtype) for name, (shape, dtype) in inputs.items()}
    return model.export_tvm(spec={"forward": spec})[0]


class DecoderLayer(nn.Module):
    """Grouped heads, a rotary embedding, RMS norms and SwiGLU; weights packed or not."""

    def __init__(self, d, heads, kv, f, packed):
        self.heads, self.kv, self.hd, self.packed = heads, kv, d // heads, packed
        self.norm1, self.norm2 = nn.RMSNorm(d, axes=[-1], bias=False), nn.RMSNorm(d, axes=[-1], bias=False)
        self.out, self.down = nn.Linear(d, d, bias=False), nn.Linear(f, d, bias=False)
        if packed:
            self.qkv = nn.Linear(d, (heads + 2 * kv) * self.hd, bias=False)
            self.gate_up = nn.Linear(d, 2 * f, bias=False)
        else:
            self.q, self.k, self.v = (nn.Linear(d, h * self.hd, bias=False) for h in (heads, kv, kv))
            self.gate, self.up = nn.Linear(d, f, bias=False), nn.Linear(d, f, bias=False)

    def rotated(self, x, cos, sin):
        a, b = op.split(x, 2, axis=-1)
        return op.concat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def attention(self, x, cos, sin, mask):
        batch, n, d = x.shape
        if self.packed:
            q, k, v = op.split(self.qkv(x), [d, d + self.kv * self.hd], axis=-1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        q = self.rotated(op.reshape(q, (batch, n, self.heads, self.hd)), cos, sin)
        k = self.rotated(op.reshape(k, (batch, n, self.kv, self.hd)), cos, sin)
        v = op.reshape(v, (batch, n, self.kv, self.hd))
        k, v = (op.repeat(t, self.heads // self.kv, axis=2) for t in (k, v))
        q, k, v = op.permute_dims(q, (0, 2, 1, 3)), op.permute_dims(k, (0, 2, 3, 1)), op.permute_dims(v, (0, 2, 1, 3))
        weights = op.softmax(op.matmul(q, k) * self.hd**-0.5 + mask, axis=-1)
        return self.out(op.reshape(op.permute_dims(op.matmul(weights, v), (0, 2, 1, 3)), (batch, n, d)))

    def forward(self, x, cos, sin, mask):
        x = x + self.attention(self.norm1(x), cos, sin, mask)
        h = self.norm2(x)
        gate, up = op.split(self.gate_up(h), 2, axis=-1) if self.packed else (self.gate(h), self.up(h))
        return x + self.down(op.silu(gate) * up)


class Decoder(nn.Module):
    def __init__(self, layers, d, heads, kv, f, packed, vocab):
        self.embed, self.head = nn.Embedding(vocab, d), nn.Linear(d, vocab, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(d, heads, kv, f, packed) for _ in range(layers)])
        self.norm = nn.RMSNorm(d, axes=[-1], bias=False)

    def forward(self, ids, cos, sin, mask):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.head(self.norm(x))


def decoder(layers=1, d=64, heads=8, kv=4, f=160, tokens=16, packed=False, vocab=48, ids="int32"):
    table = ((1, tokens, 1, d // heads // 2), "float32")
    return exported(
        Decoder(layers, d, heads, kv, f, packed, vocab), ids=((1, tokens), ids), cos=table, sin=table,
        mask=((1, 1, tokens, tokens), "float32"),
    )  # fmt: skip


class EncoderLayer(nn.Module):
    """Biases, GELU and layer norms, behind the residuals."""

    def __init__(self, d, heads, f):
        self.heads, self.hd = heads, d // heads
        self.norm1, self.norm2 = nn.LayerNorm(d, eps=1e-5), nn.LayerNorm(d, eps=1e-5)
        self.q, self.k, self.v, self.out = (nn.Linear(d, d) for _ in range(4))
        self.up, self.down = nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x, mask):
        batch, n, d = x.shape
        heads = (op.reshape(t(x), (batch, n, self.heads, self.hd)) for t in (self.q, self.k, self.v))
        q, k, v = (op.permute_dims(t, (0, 2, 1, 3)) for t in heads)
        scores = op.matmul(q, op.permute_dims(k, (0, 1, 3, 2))) / self.hd**0.5
        y = op.permute_dims(op.matmul(op.softmax(scores + mask, axis=-1), v), (0, 2, 1, 3))
        x = self.norm1(x + self.out(op.reshape(y, (batch, n, d))))
        return self.norm2(x + self.down(op.gelu(self.up(x))))


class Encoder(nn.Module):
    def __init__(self, layers, d, heads, f):
        self.layers = nn.ModuleList([EncoderLayer(d, heads, f) for _ in range(layers)])

    def forward(self, x, mask):
        for layer in self.layers:
            x = layer(x, mask)
        return x


def encoder(layers=1, d=48, heads=4, f=96, tokens=12, batch=1):
    shape = (batch, tokens, d)
    return exported(Encoder(layers, d, heads, f), x=(shape, "float32"), mask=((batch, 1, 1, tokens), "float32"))


class Vision(nn.Module):
    """Patches by a convolution, a token in front of them by a concatenation."""

    def __init__(self, d, heads, f, side, patch):
        self.count = (side // patch) ** 2
        self.patches = nn.Conv2D(3, d, patch, stride=patch)
        self.cls, self.position = nn.Parameter((1, 1, d), "float32"), nn.Parameter((1, self.count + 1, d), "float32")
        self.layer, self.head = EncoderLayer(d, heads, f), nn.Linear(d, 10)

    def forward(self, image, mask):
        x = self.patches(image)
        batch, d = x.shape[:2]
        x = op.permute_dims(op.reshape(x, (batch, d, self.count)), (0, 2, 1))
        x = op.concat([self.cls, x], dim=1) + self.position
        return self.head(self.layer(x, mask))


def vision(d=48, heads=4, f=96, side=32, patch=8):
    tokens = (side // patch) ** 2 + 1
    return exported(
        Vision(d, heads, f, side, patch), image=((1, 3, side, side), "float32"), mask=((1, 1, 1, tokens), "float32")
    )


class Experts(nn.Module):
    """All experts compute, the gates weigh."""

    def __init__(self, d, f, experts):
        self.gate = nn.Linear(d, experts, bias=False)
        self.up, self.down = nn.Parameter((experts, d, f), "float32"), nn.Parameter((experts, f, d), "float32")

    def forward(self, x):
        batch, n, d = x.shape
        gates = op.permute_dims(op.softmax(self.gate(x), axis=-1), (2, 1, 0))
        y = op.matmul(op.silu(op.matmul(x, self.up)), self.down) * gates
        return x + op.reshape(op.sum(y, axis=0), (batch, n, d))


def experts(d=32, f=64, count=8, tokens=16):
    return exported(Experts(d, f, count), x=((1, tokens, d), "float32"))


def resnet(channels=16, wide=32, side=16, batch=2):
    """Convolutions, batch norms and a residual; statistics are weights, and one of them a constant."""
    builder, params = relax.BlockBuilder(), []

    def weight(name, *shape):
        params.append(relax.Var(name, relax.TensorType(shape, "float32")))
        return params[-1]

    def conv(y, name, i, o, k, stride=1):
        y = builder.emit(relax.op.nn.conv2d(y, weight(name, o, i, k, k), strides=stride, padding=k // 2))
        stats = [weight(f"{name}_{s}", o) for s in ("gamma", "beta", "mean", "var")]
        return builder.emit(
            relax.TupleGetItem(builder.emit(relax.op.nn.batch_norm(y, *stats, axis=1, training=False)), 0)
        )

    x = relax.Var("x", relax.TensorType((batch, 3, side, side), "float32"))
    with builder.function("forward", attrs={"num_input": 1}):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.relu(conv(x, "stem", 3, channels, 7, 2)))
            y = builder.emit(relax.op.nn.max_pool2d(y, (3, 3), strides=(2, 2), padding=(1, 1)))
            z = builder.emit(relax.op.nn.relu(conv(y, "a", channels, wide, 3)))
            z, skip = conv(z, "b", wide, wide, 3), conv(y, "c", channels, wide, 1)
            y = builder.emit(relax.op.nn.relu(builder.emit(relax.op.add(z, skip))))
            y = builder.emit(relax.op.multiply(y, relax.const(np.float32(0.5))))
            y = builder.emit(relax.op.mean(y, [2, 3]))
            out = builder.emit_output(relax.op.matmul(y, relax.const(_ramp(wide, 24))))
        builder.emit_func_output(out, [x, *params])
    return builder.get()


def _ramp(*shape):
    return (np.arange(np.prod(shape), dtype="float32") % 7 - 3).reshape(shape) / 8


def drawn(model, function="forward", seed=0):
    """Random arrays for the parameters of a function, of a size that keeps results near 1."""
    rng, arrays = np.random.default_rng(seed), []
    for param in model[function].params:
        shape, dtype = [int(extent) for extent in param.ty.shape], str(param.ty.dtype)
        whole = rng.standard_normal(shape) / max(1, shape[-1] if shape else 1) ** 0.5
        if dtype.startswith("int"):
            whole = rng.integers(0, 8, shape)
        arrays.append((np.abs(whole) + 0.5 if "var" in param.name else whole).astype(dtype))
    return arrays


@functools.lru_cache(maxsize=4)
def _machine(model):
    return relax.VirtualMachine(relax.build(model, target="llvm"), tvm.cpu())


def alone(model, arrays, function="forward"):
    """What upstream's own build of a model computes on one device."""
    machine = _machine(model)
    found = machine[function](*[tvm.runtime.tensor(array) for array in arrays])
    return [found.numpy()] if isinstance(found, tvm.runtime.Tensor) else [each.numpy() for each in found]
