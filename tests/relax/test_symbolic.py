"""Models of symbolic shapes on a mesh: one module for all lengths, whatever their order, equal to one device."""

import functools
import operator

import barriers
import numpy as np
import pytest
import shared_models as models
import tvm
from tvm import relax, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

import tvm_axe as axe
from tvm_axe.collective.engine import Rates
from tvm_axe.layout import Link
from tvm_axe.relax import share_model

HEADS, KV, WIDTH, VOCABULARY = 4, 2, 32, 24
SIZE = WIDTH // HEADS
SLOW = Rates(Link(latency=0.0, bandwidth=1e10), memory=1e12, operations=2e10)


class Layer(models.DecoderLayer):
    """A layer of the decoder that the other tests share, over the keys and values of earlier tokens."""

    def attend(self, x, cos, sin, mask, keys, values):
        batch, n, d = x.shape
        q, k, v = op.split(self.qkv(x), [d, d + self.kv * self.hd], axis=-1)
        q = self.rotated(op.reshape(q, (batch, n, self.heads, self.hd)), cos, sin)
        k = self.rotated(op.reshape(k, (batch, n, self.kv, self.hd)), cos, sin)
        k = op.concat([keys, k], dim=1)
        v = op.concat([values, op.reshape(v, (batch, n, self.kv, self.hd))], dim=1)
        a, b = (op.repeat(t, self.heads // self.kv, axis=2) for t in (k, v))
        q, a, b = (op.permute_dims(t, axes) for t, axes in ((q, (0, 2, 1, 3)), (a, (0, 2, 3, 1)), (b, (0, 2, 1, 3))))
        weights = op.softmax(op.matmul(q, a) * self.hd**-0.5 + mask, axis=-1)
        y = op.reshape(op.permute_dims(op.matmul(weights, b), (0, 2, 1, 3)), (batch, n, d))
        return self.out(y), k, v

    def forward(self, x, cos, sin, mask, keys, values):
        y, k, v = self.attend(self.norm1(x), cos, sin, mask, keys, values)
        x = x + y
        gate, up = op.split(self.gate_up(self.norm2(x)), 2, axis=-1)
        return x + self.down(op.silu(gate) * up), k, v


class Decoder(nn.Module):
    """Prefill of any number of tokens, and a token more behind any number of earlier ones."""

    def __init__(self):
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.layer = Layer(WIDTH, HEADS, KV, 72, True)
        self.norm = nn.RMSNorm(WIDTH, axes=[-1], bias=False)

    def prefill(self, ids, cos, sin, mask, keys, values):
        x, k, v = self.layer(self.embed(ids), cos, sin, mask, keys, values)
        return self.head(self.norm(x)), k, v

    def decode(self, ids, cos, sin, mask, keys, values):
        x, k, v = self.layer(self.embed(ids), cos, sin, mask, keys, values)
        return self.head(self.norm(x)), k, v


def spec(n):
    """The inputs of `n` tokens behind ``m`` others."""
    table = nn.spec.Tensor([1, n, 1, SIZE // 2], "float32")
    cache = nn.spec.Tensor(["b", "m", KV, SIZE], "float32")
    return {
        "ids": nn.spec.Tensor(["b", n], "int32"), "cos": table, "sin": table,
        "mask": nn.spec.Tensor(["b", 1, n, 1], "float32"), "keys": cache, "values": cache,
    }  # fmt: skip


@pytest.fixture(scope="module")
def decoder():
    return Decoder().export_tvm({"prefill": spec("n"), "decode": spec(1)})[0]


@pytest.fixture(scope="module")
def weights(decoder):
    rng = np.random.default_rng(0)
    shapes = [[int(n) for n in param.ty.shape] for param in decoder["prefill"].params[6:]]
    return [(rng.standard_normal(shape) / shape[-1] ** 0.5).astype("float32") for shape in shapes]


@pytest.fixture(scope="module")
def placed(decoder, weights, workers):
    """A session of the decoder on so many devices of an engine; it is compiled once."""
    compiled = functools.cache(lambda devices: axe.compile(decoder, mesh=axe.Mesh({"tp": devices}), work_dir=None))
    names = [str(param.name) for param in decoder["prefill"].params[6:]]

    @functools.cache
    def get(devices, engine="threads"):
        return compiled(devices).load(workers(devices, engine), dict(zip(names, weights, strict=True)))

    return get


def inputs(b, n, m, seed):
    rng = np.random.default_rng(seed)

    def drawn(*shape):
        return rng.standard_normal(shape).astype("float32")

    ids = rng.integers(0, VOCABULARY, (b, n)).astype("int32")
    return [
        ids, drawn(1, n, 1, SIZE // 2), drawn(1, n, 1, SIZE // 2), drawn(b, 1, n, 1), drawn(b, m, KV, SIZE),
        drawn(b, m, KV, SIZE),
    ]  # fmt: skip


def poison(model):
    """Have every tensor that waits to be used again hold NaN, all of its memory."""
    for kind, free in model._memory._pool._free.items():
        for tensor in free if kind.dtype == "float32" and not kind.is_fixed else ():
            tensor.resize(kind.shape)
            for device in range(model._memory._program.shared.mesh.size):
                tensor.slab(device)[...] = np.nan


def called(model, function, arrays):
    return [np.asarray(handle) for handle in model[function](*arrays)]


def error(found, wanted):
    assert [array.shape for array in found] == [array.shape for array in wanted]
    return max(float(np.abs(a - b).max()) / max(1.0, float(np.abs(b).max())) for a, b in zip(found, wanted))


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_any_order_of_lengths(decoder, placed, weights, devices):
    """Calls of two functions at random sizes, which shrink and grow, an empty cache too, on what is poisoned before."""
    model = placed(devices)
    rng = np.random.default_rng(devices)
    for call in range(10):
        b, n, m = (int(rng.integers(*ends)) for ends in ((1, 4), (1, 12), (0, 20)))
        function, n = ("prefill", n) if rng.integers(2) else ("decode", 1)
        arrays = inputs(b, n, m, call)
        found = called(model, function, arrays)
        assert error(found, models.alone(decoder, [*arrays, *weights], function)) < 1e-5
        poison(model)


def test_on_processes(decoder, placed, weights):
    model = placed(2, "processes")
    for call, (n, m) in enumerate(((9, 3), (1, 12), (2, 0), (11, 30), (1, 41))):
        arrays = inputs(1, n, m, call)
        function = "decode" if n == 1 else "prefill"
        found = called(model, function, arrays)
        assert error(found, models.alone(decoder, [*arrays, *weights], function)) < 1e-5


def test_memory_is_used_again(placed):
    """What is long enough stays where it is, and what has grown has room to grow more."""
    model = placed(2)

    def made(m):
        called(model, "decode", inputs(1, 1, m, 0))
        return len(model._memory._pool._all)

    made(1000)
    made(2000)
    first = made(3)
    assert made(900) == made(1900) == made(3) == first


def test_costs_are_of_typical_sizes(decoder):
    """Of many tokens activations are dear and of few it is weights; the sizes are named."""
    mesh = axe.Mesh({"tp": 2})
    exe = axe.compile(decoder, mesh=mesh, work_dir=None, values={"n": (16, 1024)})
    assert "prefill: 100% of the products' operations are shared over tp (chosen at b = 128, n = 1024, m = 128)" in (
        exe.show()
    )
    bytes_at = [share_model(decoder, mesh, values={"n": (n,)}).functions["prefill"].chosen.bytes for n in (64, 256)]
    assert bytes_at[0] < bytes_at[1]
    with pytest.raises(axe.InputError, match=r"no shape has the variable 'rows'; those that there are"):
        axe.compile(decoder, mesh=mesh, values={"rows": (4,)})
    with pytest.raises(axe.InputError, match=r"values: n has \(0,\); some whole numbers from 1 on"):
        axe.compile(decoder, mesh=mesh, values={"n": (0,)})


def test_shapes_that_do_not_fit_are_listed(placed):
    model = placed(2)
    arrays = inputs(2, 3, 5, 0)
    arrays[3], arrays[5] = arrays[3][:, :, :-1], arrays[5][:1]
    message = r"(?s)mask's dimension 2, n, is 2, and ids's dimension 1 is 3.*values's dimension 0, b, is 1, and ids's"
    with pytest.raises(axe.InputError, match=message):
        model.prefill(*arrays)


def test_extents_that_are_computed(workers):
    """A parameter and results that are as long as two others together, or twice as long."""
    n, m = (tvm.tirx.Var(name, "int64") for name in "nm")
    builder = relax.BlockBuilder()
    x, y, bias, w = (
        relax.Var(name, relax.TensorType(shape, "float32"))
        for name, shape in (("x", [n, 8]), ("y", [m, 8]), ("bias", [n + m, 8]), ("w", [8, 16]))
    )
    with builder.function("forward", [x, y, bias, w], attrs={"num_input": 3}):
        with builder.dataflow():
            both = builder.emit(relax.op.add(builder.emit(relax.op.concat([x, y], axis=0)), bias))
            wide = builder.emit(relax.op.reshape(builder.emit(relax.op.matmul(both, w)), [(n + m) * 2, 8]))
            out = builder.emit_output(relax.Tuple([wide, both]))
        builder.emit_func_output(out)
    model = builder.get()
    exe = axe.compile(model, mesh=axe.Mesh({"tp": 2}), work_dir=None)
    rng = np.random.default_rng(0)
    for a, b in ((3, 4), (5, 1), (1, 1)):
        arrays = [rng.standard_normal(shape).astype("float32") for shape in ((a, 8), (b, 8), (a + b, 8), (8, 16))]
        assert error(exe.run(workers(2), *arrays), models.alone(model, arrays)) < 1e-5
    arrays[2] = np.zeros((4, 8), "float32")
    with pytest.raises(axe.InputError, match=r"bias has 4 in dimension 0, which is n \+ m = 2 \(.*m is 1 as in y, .*"):
        exe.run(workers(2), *arrays)


def test_shapes_as_values(workers):
    """Shapes of tensors, tensors of shapes, shapes of these, casts, and parameters that are a shape and a number."""
    n, m, q, r = (tvm.tirx.Var(name, "int64") for name in "nmqr")
    x, w = relax.Var("x", relax.TensorType([n, 8], "float32")), relax.Var("w", relax.TensorType([8, 6], "float32"))
    shape, count = relax.Var("shape", relax.ShapeType([m])), relax.Var("count", tvm.ir.PrimType("int64"))
    builder, ops = relax.BlockBuilder(), relax.op
    with builder.function("forward", [x, shape, count, w], attrs={"num_input": 3}):
        with builder.dataflow():
            numbers = builder.emit(ops.shape_to_tensor(builder.emit(ops.shape_of(x))))
            again = builder.match_cast(
                builder.emit(ops.tensor_to_shape(numbers)), relax.ShapeType([q, tvm.tirx.IntImm("int64", 8)])
            )
            y = builder.match_cast(builder.emit(ops.reshape(x, again)), relax.TensorType([r, 8], "float32"))
            y = builder.emit(ops.reshape(builder.emit(ops.matmul(y, w)), relax.ShapeExpr([r * 6])))
            y = builder.emit(ops.broadcast_to(y, relax.ShapeExpr([m, r * 6])))
            ones = builder.emit(ops.full(relax.ShapeExpr([count, r * 6]), relax.const(1.0, "float32")))
            out = builder.emit_output(builder.emit(ops.concat([y, ones], axis=0)))
        builder.emit_func_output(out)
    exe = axe.compile(builder.get(), mesh=axe.Mesh({"tp": 2}), work_dir=None)
    rng = np.random.default_rng(0)
    b = rng.standard_normal((8, 6)).astype("float32")
    model = exe.load(workers(2), {"w": b})
    for rows, copies, more in ((3, 4, 2), (1, 1, 1), (5, 2, 7)):
        a = rng.standard_normal((rows, 8)).astype("float32")
        wanted = np.concatenate([np.tile((a @ b).ravel(), (copies, 1)), np.ones((more, rows * 6), "float32")])
        assert error([np.asarray(model.forward(a, (copies,), more))], [wanted]) < 1e-5
    with pytest.raises(axe.InputError, match=r"shape is a tuple of integers; got int"):
        model.forward(a, copies, more)


def test_sizes_that_are_computed_as_tensors(workers):
    """The places of tokens, as ONNX's Range of a length comes, the length being a tensor; and what is added of them."""
    n, places = (tvm.tirx.Var(name, "int64") for name in ("n", "places"))
    x, table = (relax.Var(name, relax.TensorType(s, "float32")) for name, s in (("x", [2, n, 8]), ("table", [16, 8])))
    builder, ops = relax.BlockBuilder(), relax.op

    def const(value):
        return relax.const(value, "int64")

    with builder.function("forward", [x, table], attrs={"num_input": 2}):
        with builder.dataflow():
            sizes = builder.emit(ops.shape_to_tensor(builder.emit(ops.shape_of(x))))
            length = builder.emit(ops.reshape(builder.emit(ops.take(sizes, const([1]), axis=0)), relax.ShapeExpr([])))
            steps = builder.emit(ops.floor_divide(builder.emit(ops.subtract(const(0), length)), const(1)))
            count = builder.emit(ops.maximum(builder.emit(ops.negative(steps)), const(0)))
            tensor = builder.match_cast(ops.reshape(count, [1]), relax.TensorType([1], "int64"))
            builder.match_cast(builder.emit(ops.tensor_to_shape(tensor)), relax.ShapeType([places]))
            rows = builder.emit(ops.take(table, builder.emit(ops.arange(0, places, 1, "int64")), axis=0))
            out = builder.emit_output(ops.add(x, rows))
        builder.emit_func_output(out)
    alone, shared = (axe.compile(builder.get(), mesh=mesh, work_dir=None) for mesh in (None, axe.Mesh({"tp": 2})))
    rng = np.random.default_rng(0)
    b = rng.standard_normal((16, 8)).astype("float32")
    for tokens in (5, 1, 16):
        a = rng.standard_normal((2, tokens, 8)).astype("float32")
        for got in (alone(a, b), shared.run(workers(2), a, b)):
            assert error([np.asarray(got)], [a + b[:tokens]]) < 1e-6


def test_a_cast_that_does_not_follow_is_checked(workers):
    n, m = (tvm.tirx.Var(name, "int64") for name in "nm")
    builder = relax.BlockBuilder()
    x, y = (relax.Var(name, relax.TensorType([size, 8], "float32")) for name, size in (("x", n), ("y", m)))
    with builder.function("forward", [x, y]):
        with builder.dataflow():
            same = builder.match_cast(x, relax.TensorType([m, 8], "float32"))
            out = builder.emit_output(builder.emit(relax.op.add(same, y)))
        builder.emit_func_output(out)
    exe = axe.compile(builder.get(), mesh=axe.Mesh({"tp": 2}), work_dir=None)
    a, b = (np.full((3, 8), value, "float32") for value in (1, 2))
    np.testing.assert_array_equal(exe.run(workers(2), a, b), a + b)
    with pytest.raises(axe.InputError, match=r"has the shape \(3, 8\), and the model says that it is \(2, 8\)"):
        exe.run(workers(2), a, b[:2])


def test_what_only_the_model_knows_is_refused_by_name():
    n, k = (tvm.tirx.Var(name, "int64") for name in "nk")
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType([n], "int64"))
    with builder.function("forward", [x]):
        with builder.dataflow():
            found = builder.emit(relax.op.nonzero(x))
            known = builder.match_cast(found, relax.TensorType([1, k], "int64"))
            out = builder.emit_output(builder.emit(relax.op.add(known, known)))
        builder.emit_func_output(out)
    with pytest.raises(
        axe.LowerError,
        match=r"forward: the result of relax.run.nonzero, 'lv' is a TensorType without a shape; .*one device",
    ):
        axe.compile(builder.get(), mesh=axe.Mesh({"tp": 2}))


def test_upper_bounds(workers):
    """Memory is taken once where the model bounds its sizes, and more than the bound is refused."""
    n = tvm.tirx.Var("n", "int64")
    builder = relax.BlockBuilder()
    x, w = relax.Var("x", relax.TensorType([n, 8], "float32")), relax.Var("w", relax.TensorType([8, 12], "float32"))
    with builder.function("forward", [x, w], attrs={"tir_var_upper_bound": {"n": 32}, "num_input": 1}):
        with builder.dataflow():
            out = builder.emit_output(relax.op.nn.relu(builder.emit(relax.op.matmul(x, w))))
        builder.emit_func_output(out)
    model = builder.get()
    shared = share_model(model, axe.Mesh({"tp": 2}), rates=SLOW)
    assert shared.functions["forward"].chosen.graph.typical == {"n": 32}
    exe = axe.compile(model, mesh=axe.Mesh({"tp": 2}), work_dir=None)
    weight, made = np.ones((8, 12), "float32"), []
    for rows in (1, 32, 7):
        given = np.random.default_rng(rows).standard_normal((rows, 8)).astype("float32")
        found = exe.run(workers(2), given, weight)
        assert error([found], [np.maximum(given @ weight, 0)]) < 1e-5
        made.append(len(exe._memories[workers(2)]._pool._all))
    assert made[0] == made[1] == made[2]
    with pytest.raises(axe.InputError, match=r"n is 33, and the model says that it is 32 at most"):
        exe.run(workers(2), np.ones((33, 8), "float32"), weight)


def test_pins_of_symbolic_dimensions(decoder, weights, workers):
    """A batch over one axis and tokens over the other, at any size: fewer than there are devices, and none."""
    mesh = axe.Mesh({"dp": 2, "tp": 2})
    pins = {"ids": {"dp": 0}, "keys": {"dp": 0, "tp": 1}, "values": {"dp": 0, "tp": 2}}
    exe = axe.compile(decoder, mesh=mesh, pins=pins, work_dir=None)
    forms = {each.name: each.tensors[0].shown for each in exe.shared.functions["prefill"].inputs}
    assert forms["ids"].startswith("dp:S0[1/2@0 1/2@1]") and forms["keys"] == "dp:S0[1/2@0 1/2@1] tp:S1[1/2@0 1/2@1]"
    names = [str(param.name) for param in decoder["prefill"].params[6:]]
    model = exe.load(workers(mesh), dict(zip(names, weights, strict=True)))
    for call, (b, n, m) in enumerate(((4, 6, 5), (1, 1, 0), (3, 7, 1), (2, 2, 9), (5, 1, 3))):
        arrays = inputs(b, n, m, call)
        found = called(model, "prefill", arrays)
        assert error(found, models.alone(decoder, [*arrays, *weights], "prefill")) < 1e-5
        poison(model)


def told(shared):
    """Kernels, collectives and barriers of a device's function, and the bytes that it receives."""
    function, text = shared.functions["forward"], shared.module["forward"].script()
    kernels, collectives = ([bool(getattr(step, of)) for step in function.steps] for of in ("func", "kind"))
    return sum(kernels), sum(collectives), text.count("axe.barrier"), function.chosen.bytes


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_steps_are_those_of_constant_shapes(name, devices):
    """As many kernels, collectives, barriers and bytes: norms on shares of the tokens, what meets in one kernel."""
    mesh, tokens = axe.Mesh({"tp": devices}), 64
    if name == "encoder":
        constant = models.encoder(2, 256, 4, 1024, tokens)
        net, given = models.Encoder(2, 256, 4, 1024), {"x": [1, "n", 256], "mask": [1, 1, 1, "n"]}
    else:
        constant = models.decoder(2, 256, 8, 4, 768, tokens)
        net, table = models.Decoder(2, 256, 8, 4, 768, False, 48), [1, "n", 1, 16]
        given = {"ids": [1, "n"], "cos": table, "sin": table, "mask": [1, 1, "n", "n"]}
    kinds = {name: "int32" if name == "ids" else "float32" for name in given}
    spec = {"forward": {name: nn.spec.Tensor(shape, kinds[name]) for name, shape in given.items()}}
    shared = share_model(net.export_tvm(spec)[0], mesh, values={"n": (tokens,)})
    assert told(shared) == told(share_model(constant, mesh))
    met = [step.moves for step in shared.functions["forward"].steps if len(step.moves) == 2]
    assert len(met) >= 3 and all(a.startswith("reduce-scatter of") and b.startswith("all-gather of") for a, b in met)
    assert barriers.conflicts(shared, "forward") == []


def head(rows):
    """Logits over a wide vocabulary, and their softmax."""
    builder = relax.BlockBuilder()
    x, w = (relax.Var(n, relax.TensorType(s, "float32")) for n, s in (("x", [rows, 64]), ("w", [64, 4096])))
    with builder.function("forward", [x, w], attrs={"num_input": 1}):
        with builder.dataflow():
            out = builder.emit_output(relax.op.nn.softmax(builder.emit(relax.op.matmul(x, w)), -1))
        builder.emit_func_output(out)
    return builder.get()


def test_sums_inside_of_a_softmax_are_combined_where_that_is_cheaper(workers):
    """Unpinned, of constant rows and of symbolic ones: two numbers a row move instead of its logits."""
    mesh, n = axe.Mesh({"tp": 2}), tvm.tirx.Var("n", "int64")
    shares = {rows: share_model(head(rows), mesh).functions["forward"].chosen for rows in (2, 64)}
    assert shares[64].bytes == 2 * 64 * 4 and shares[2].bytes > 2 * 2 * 4
    model = head(n)
    exe = axe.compile(model, mesh=mesh, work_dir=None, values={"n": (64,)})
    assert exe.bytes == 2 * 64 * 4
    rng = np.random.default_rng(0)
    for rows in (5, 64, 1):
        arrays = [rng.standard_normal(shape).astype("float32") for shape in ((rows, 64), (64, 4096))]
        assert error([exe.run(workers(2), *arrays)], models.alone(model, arrays)) < 1e-5


@pytest.mark.parametrize("devices", [2, 3])
def test_no_tokens_and_fewer_than_devices(devices, workers):
    """Blocks of ceil(n / devices) overlap where they don't divide, and are empty where there is nothing."""
    n = tvm.tirx.Var("n", "int64")
    builder = relax.BlockBuilder()
    shapes = (("x", [n, 16]), ("up", [16, 32]), ("down", [32, 16]), ("gain", [16]))
    x, up, down, gain = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes)
    ops = relax.op
    with builder.function("forward", [x, up, down, gain], attrs={"num_input": 1}):
        with builder.dataflow():
            y = builder.emit(ops.nn.relu(builder.emit(ops.matmul(x, up))))
            y = builder.emit(ops.add(builder.emit(ops.matmul(y, down)), x))
            norm = builder.emit(ops.nn.rms_norm(y, gain, axes=[-1]))
            out = builder.emit_output(relax.Tuple([norm, y]))
        builder.emit_func_output(out)
    model = builder.get()
    exe = axe.compile(model, mesh=axe.Mesh({"tp": devices}), pins={"x": 0}, work_dir=None)
    rng = np.random.default_rng(devices)
    for rows in (7, 0, 1, 2, 64, 3):
        arrays = [rng.standard_normal(shape).astype("float32") for shape in ((rows, 16), (16, 32), (32, 16), (16,))]
        y = np.maximum(arrays[0] @ arrays[1], 0) @ arrays[2] + arrays[0]
        norm = y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-5) * arrays[3]
        found = exe.run(workers(devices), *arrays)
        assert [each.shape for each in found] == [(rows, 16)] * 2
        assert not rows or error(list(found), [norm, y]) < 1e-5


def test_sizes_have_one_order_in_all_processes():
    """Those of one extent by their names: they are parameters of what is compiled, and kept on disk."""
    names = [f"n{at}" for at in (3, 1, 4, 0, 5, 2)]
    sizes = [tirx.Var(name, "int64") for name in names]
    total = functools.reduce(operator.add, sizes)
    shapes = [(total, 8), *((size, 8) for size in sizes)]
    params = [relax.Var(f"x{at}", relax.TensorType(shape, "float32")) for at, shape in enumerate(shapes)]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        joined = builder.emit(relax.op.concat(params[1:], 0))
        builder.emit_func_output(builder.emit(relax.op.add(params[0], joined)))
    shared = share_model(builder.get(), axe.Mesh({"tp": 2}))
    assert shared.functions["main"].sizes == tuple(sorted(names))
