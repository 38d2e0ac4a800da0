"""What a device does of a function, against the whole function: every factor of operators and of made-up functions."""

import functools

import numpy as np
import pytest
import tvm
from tvm import relax, tirx
from tvm.script import tirx as T

from tvm_axe.analysis.blocks import all_blocks
from tvm_axe.analysis.expressions import loads_in
from tvm_axe.analysis.sharding_rule import sharding_rule
from tvm_axe.layout import Mesh
from tvm_axe.layout.shares import Share
from tvm_axe.lower.dealing import shares_of
from tvm_axe.lower.shares import is_sharable, shared
from tvm_axe.lower.stages import pieces
from tvm_axe.lower.taking import taking
from tvm_axe.lower.told import with_coordinates

op = relax.op
OPERATORS = {
    "matmul": (((4, 8, 16), (4, 16, 8)), op.matmul),
    "matmul, broadcast": (((8, 16), (4, 16, 8)), op.matmul),
    "softmax": (((4, 8, 16),), lambda x: op.nn.softmax(x, axis=-1)),
    "layer norm": (((4, 8, 16), (16,), (16,)), lambda x, a, b: op.nn.layer_norm(x, a, b, axes=[-1])),
    "mean": (((4, 8, 16),), lambda x: op.mean(x, axis=[1, 2])),
    "prod": (((4, 8),), lambda x: op.prod(x, axis=[1])),
    "max": (((4, 8, 16),), lambda x: op.max(x, axis=[1])),
    "reshape": (((4, 24),), lambda x: op.reshape(x, (4, 6, 4))),
    "flattened": (((4, 6, 4),), lambda x: op.reshape(x, (24, 4))),
    "transpose": (((4, 8, 6),), lambda x: op.permute_dims(x, (2, 0, 1))),
    "repeat": (((4, 6, 8),), lambda x: op.repeat(x, 2, axis=1)),
    "concatenation": (((4, 8), (4, 16)), lambda a, b: op.concat([a, b], axis=1)),
    "split": (((4, 24),), lambda x: op.split(x, [8, 16], axis=1)),
    "padding": (((6, 8),), lambda x: op.nn.pad(x, (0, 0, 2, 2))),
    "triangle": (((4, 8, 8),), lambda x: op.triu(x, 1)),
    "convolution": (((2, 6, 8, 8), (8, 6, 3, 3)), lambda x, w: op.nn.conv2d(x, w, padding=1)),
    "depthwise": (((2, 8, 8, 8), (8, 1, 3, 3)), lambda x, w: op.nn.conv2d(x, w, padding=1, groups=8)),
    "pooling": (((2, 8, 8, 8),), lambda x: op.nn.avg_pool2d(x, (2, 2), strides=(2, 2))),
    "batch norm": (((2, 8, 4, 4), *[(8,)] * 4), lambda x, *s: op.nn.batch_norm(x, *s, axis=1, training=False)),
    "attention": (((2, 8, 4, 16), (2, 8, 4, 16), (2, 8, 4, 16)), op.nn.attention),
}
COMBINE = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}


def functions(shapes, compute):
    builder = relax.BlockBuilder()
    params = [relax.Var(f"p{n}", relax.TensorType(shape, "float32")) for n, shape in enumerate(shapes)]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(builder.normalize(compute(*params)))
        builder.emit_func_output(out)
    module = relax.transform.LegalizeOps()(builder.get())
    return [func for _, func in module.functions_items() if isinstance(func, tirx.PrimFunc)]


@functools.lru_cache(maxsize=64)
def compiled(func):
    """A function, compiled once for all the devices that run it, and for all the shares that it is compared with."""
    return tvm.compile(tvm.IRModule({"main": func.with_attr("global_symbol", "main")}), target="llvm")["main"]


def run(func, inputs, outputs, rank=None):
    """The outputs of a function, of (shape, dtype) each; what it doesn't write is NaN."""
    main = compiled(func)
    made = [np.full(shape, np.nan if dtype.startswith("float") else 77, dtype) for shape, dtype in outputs]
    tensors = [tvm.runtime.tensor(array) for array in made]
    given = [tvm.runtime.tensor(np.ascontiguousarray(array)) for array in inputs]
    main(*given, *([] if rank is None else [rank]), *tensors)
    return [tensor.numpy() for tensor in tensors]


def held(array, shares, device):
    for dim, share in enumerate(shares):
        array = np.take(array, share.indices(device), axis=dim)
    return array


def says_what_it_reads(func):
    """Schedules go by what blocks say, each buffer that is loaded but a reduction's own, and by their names."""
    names = [str(block.name_hint) for block in all_blocks(func.body)]
    assert len(set(names)) == len(names)
    for block in all_blocks(func.body):
        if block.name_hint != "root":
            loaded = [
                load.source for load in loads_in([block.body]) if block.init is None or not of(block.writes, load)
            ]
            assert all(any(region.source.same_as(buffer) for region in block.reads) for buffer in loaded)


def of(regions, load):
    return any(region.source.same_as(load.source) for region in regions)


def check(func, assigned, devices):
    """Each device's part of a function is its part of what the whole function gives, or its terms are."""
    rule, rng = sharding_rule(func), np.random.default_rng(0)
    local = shared(func, rule, assigned, devices)
    assert local is not None
    says_what_it_reads(local)
    count = len(rule.inputs)
    kinds = [([int(extent) for extent in param.shape], str(param.dtype)) for param in func.params]
    inputs = [(np.abs(rng.standard_normal(shape)) + 0.1).astype(dtype) for shape, dtype in kinds[:count]]
    whole = run(func, inputs, kinds[count:])
    shares = [shares_of(operand, rule, assigned, devices) for operand in (*rule.inputs, *rule.outputs)]
    asks = len(local.params) > len(func.params)
    found = []
    for device in range(devices):
        given = [held(array, each, device) for array, each in zip(inputs, shares, strict=False)]
        left = zip(shares[count:], kinds[count:], strict=True)
        slabs = [([share.local for share in each], dtype) for each, (_, dtype) in left]
        found.append(run(local, given, slabs, device if asks else None))
    factor = rule[next(iter(assigned))[0]]
    for number, true in enumerate(whole):
        outs = [each[number] for each in found]
        if number in factor.partial:
            total = COMBINE[factor.combiner](outs, axis=0)
            np.testing.assert_allclose(total, true, rtol=1e-4, atol=1e-5)
        else:
            for device, out in enumerate(outs):
                np.testing.assert_array_equal(out, held(true, shares[count + number], device))


@pytest.mark.parametrize("name", OPERATORS)
def test_every_factor_of_operators(name):
    checked = 0
    for func in functions(*OPERATORS[name]):
        rule = sharding_rule(func)
        if not is_sharable(func):
            continue
        for factor in rule.factors:
            if factor.kind in ("spatial", "reduction") and factor.extent > 1:
                for devices in (2, 3):
                    check(func, {(factor.name,): Share.blocks(factor.extent, devices)}, devices)
                    checked += 1
    assert checked


@pytest.mark.parametrize("devices", [2, 3, 4])
@pytest.mark.parametrize("mode", ["fast", "clip", "nan"])
def test_rows_that_are_looked_up(mode, devices):
    """Each device has some rows of a table, and leaves zeros for the others; out of range is as on one device."""
    builder = relax.BlockBuilder()
    kinds = {"table": ((7, 4), "float32"), "ids": ((9,), "int64")}
    table, ids = (relax.Var(name, relax.TensorType(*kind)) for name, kind in kinds.items())
    with builder.function("main", [table, ids]):
        with builder.dataflow():
            out = builder.emit_output(op.take(table, ids, axis=0, mode=mode))
        builder.emit_func_output(out)
    module = relax.transform.LegalizeOps()(builder.get())
    (func,) = [each for _, each in module.functions_items() if isinstance(each, tirx.PrimFunc)]
    rule, share = sharding_rule(func), Share.blocks(7, devices)
    assert (rule["a"].kind, rule["a"].partial) == ("gather", (0,))
    local = shared(func, rule, {("a",): share}, devices)
    array = np.random.default_rng(0).standard_normal((7, 4), dtype="float32")
    wanted = np.array([6, 0, 3, 3, 2, 5, 1, *((4, 6) if mode == "fast" else (-2, 9))])
    (true,) = run(func, [array, wanted], [((9, 4), "float32")])
    parts = [
        run(local, [array[share.indices(device)], wanted], [((9, 4), "float32")], device)[0]
        for device in range(devices)
    ]
    np.testing.assert_array_equal(np.sum(parts, axis=0), true)
    assert devices == sum(bool(np.any(part)) for part in parts)


@pytest.mark.parametrize("name", ["softmax", "layer norm", "rms norm"])
@pytest.mark.parametrize("devices", [2, 3])
def test_pieces_with_what_is_combined_between(name, devices):
    """Where the dimension is shared that a function reduces inside, its reductions are combined before it goes on."""
    operators = OPERATORS | {"rms norm": (((4, 8, 16), (16,)), lambda x, w: op.nn.rms_norm(x, w, axes=[-1]))}
    (func,) = functions(*operators[name])
    rule, count = sharding_rule(func), len(operators[name][0])
    assigned = {("c",): Share.blocks(16, devices)}
    assert rule["c"].kind == "opaque" and rule["c"].combined
    rank = tirx.Var("rank", "int64")
    local, combined = shared(func, rule, assigned, devices, rank), dict(rule["c"].combined)
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal([int(n) for n in param.shape], dtype="float32") for param in func.params[:count]]
    (true,) = run(func, inputs, [([4, 8, 16], "float32")])
    shares = [shares_of(operand, rule, assigned, devices) for operand in (*rule.inputs, *rule.outputs)]
    buffers = [*local.params, *local.body.block.alloc_buffers]
    held_by = [dict(enumerate(held(x, of, d) for x, of in zip(inputs, shares, strict=False))) for d in range(devices)]
    parts = pieces(local, combined)
    assert len(parts) == len(combined) + 1
    for part in parts:
        bound, used = with_coordinates(part.func, len(part.ins), [rank])
        for device, own in enumerate(held_by):
            outs = [([int(n) for n in buffers[at].shape], str(buffers[at].dtype)) for at in part.outs]
            left = run(bound, [own[at] for at in part.ins], outs, device if used else None)
            own.update(zip(part.outs, left, strict=True))
        for at in set(part.outs) & set(combined):
            total = COMBINE[combined[at]]([own[at] for own in held_by], axis=0)
            for own in held_by:
                own[at] = total
    for device, own in enumerate(held_by):
        np.testing.assert_allclose(own[count], held(true, shares[count], device), rtol=1e-5, atol=1e-6)


@T.prim_func(s_tir=True)
def counted(A: T.Buffer((4, 10), "float32"), B: T.Buffer((4, 10), "float32")):
    """Values depend on the number of the iteration in the whole function."""
    for i, j in T.grid(4, 10):
        with T.sblock("B"):
            vi, vj = T.axis.remap("SS", [i, j])
            B[vi, vj] = T.if_then_else(vj < 7, A[vi, vj] * T.Cast("float32", vj), T.float32(-1))


@T.prim_func(s_tir=True)
def columns(A: T.Buffer((4, 16), "float32"), W: T.Buffer((16, 12), "float32"), B: T.Buffer((4, 12), "float32")):
    for i, j, k in T.grid(4, 12, 16):
        with T.sblock("B"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                B[vi, vj] = T.float32(0)
            B[vi, vj] = B[vi, vj] + A[vi, vk] * W[vk, vj]


PACKED = Share.joined([Share.blocks(6, 2), Share.blocks(4, 2), Share.whole(2, 2)])


def test_numbers_are_those_of_the_whole_function():
    check(counted, {("b",): Share.blocks(10, 2)}, 2)
    check(counted, {("b",): Share.blocks(10, 4)}, 4)
    check(counted, {("b",): Share.joined([Share.blocks(6, 2), Share.blocks(4, 2)])}, 2)


def test_packed_columns_are_one_nest():
    rule = sharding_rule(columns)
    names = rule.outputs[0].dims[1][0].factors
    check(columns, {names: PACKED}, 2)
    local = shared(columns, rule, {names: PACKED}, 2)
    assert len(local.params) == 3  # its values don't ask which device it is
    assert isinstance(local.body.block.body, tirx.For)


def test_terms_of_several_devices_count_once():
    rule = sharding_rule(columns)
    names = rule.inputs[0].dims[1][0].factors
    for devices in (3, 5):
        check(columns, {names: Share.blocks(16, devices)}, devices)
    check(columns, {names: Share.joined([Share.blocks(6, 2), Share.whole(4, 2), Share.blocks(6, 2)])}, 2)


# ---- Taking


SHARES = {
    "even": Share.blocks(12, 3),
    "uneven": Share.blocks(12, 5),
    "packed": Share.joined([Share.blocks(6, 3), Share.blocks(6, 3)]),
    "whole": None,
}


@pytest.mark.parametrize(
    ("source", "target", "combiner"),
    [("even", "packed", ""), ("packed", "even", ""), ("packed", "whole", ""), ("even", "whole", "")]
    + [("whole", "packed", kind) for kind in ("sum", "max", "min")]
    + [("whole", "whole", "max"), ("uneven", "whole", ""), ("whole", "uneven", "sum")],
)
@pytest.mark.parametrize("dims", [(0, 0), (1, 0)])
def test_taking(source, target, combiner, dims):
    shape = (12, 12)
    devices = 5 if "uneven" in (source, target) else 3
    mesh, rng = Mesh({"tp": devices}), np.random.default_rng(1)
    found = zip((source, target), dims, strict=True)
    cuts = [None if SHARES[name] is None else (dim, SHARES[name]) for name, dim in found]
    whole = rng.standard_normal((devices, *shape) if combiner else shape).astype("float32")

    def part(array, cut, device):
        return array if cut is None else np.take(array, cut[1].indices(device), axis=cut[0])

    # Slabs lie whole pages apart; a page of one slab's bytes makes the view dense.
    slabs = np.stack([whole[d] if combiner else part(whole, cuts[0], d) for d in range(devices)])
    func = taking(shape, "float32", *cuts, combiner, mesh, "tp", "tp", slabs[0].nbytes)
    true = COMBINE[combiner](whole, axis=0) if combiner else whole
    asks = len(func.params) == 3
    for device in range(devices):
        want = part(true, cuts[1], device)
        (found,) = run(func, [slabs], [(want.shape, "float32")], device if asks else None)
        np.testing.assert_allclose(found, want, rtol=1e-6)


def test_slices_are_taken_of_the_own_slab():
    mesh, whole = Mesh({"tp": 3}), np.arange(144, dtype="float32").reshape(12, 12)
    func = taking((12, 12), "float32", None, (1, SHARES["packed"]), "", mesh, "tp", "slab", 4096)
    for device in range(3):
        want = whole[:, SHARES["packed"].indices(device)]
        (found,) = run(func, [whole], [(want.shape, "float32")], device)
        np.testing.assert_array_equal(found, want)
