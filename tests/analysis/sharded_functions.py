"""Functions whose sharding rules are tried: operators as Relax legalizes them, the package's programs, and others."""

from __future__ import annotations

from collections.abc import Callable

from tvm import relax, tirx
from tvm.script import tirx as T

from tvm_axe.layout import Mesh
from tvm_axe.programs import PROGRAMS, DistributedProgram

op = relax.op
OPERATORS: dict[str, tuple[tuple, Callable]] = {  # the shapes of the inputs, what to compute
    "matmul, batched": (((4, 6, 8), (4, 8, 5)), op.matmul),
    "matmul, broadcast": (((6, 8), (4, 8, 5)), op.matmul),
    "einsum": (((4, 6, 8), (4, 5, 8)), lambda a, b: op.einsum([a, b], "bij,bkj->bik")),
    "softmax": (((4, 5, 8),), lambda x: op.nn.softmax(x, axis=-1)),
    "log_softmax": (((4, 5, 8),), lambda x: op.nn.log_softmax(x, axis=-1)),
    "layer_norm": (((4, 5, 8), (8,), (8,)), lambda x, a, b: op.nn.layer_norm(x, a, b, axes=[-1])),
    "group_norm": (
        ((2, 8, 3, 4), (8,), (8,)),
        lambda x, a, b: op.nn.group_norm(x, a, b, num_groups=4, channel_axis=1, axes=[2, 3]),
    ),
    "instance_norm": (
        ((2, 8, 3, 4), (8,), (8,)),
        lambda x, a, b: op.nn.instance_norm(x, a, b, channel_axis=1, axes=[2, 3]),
    ),
    "rms_norm": (((4, 5, 8), (8,)), lambda x, a: op.nn.rms_norm(x, a, axes=[-1])),
    "sum": (((4, 8, 5),), lambda x: op.sum(x, axis=[1])),
    "mean": (((4, 8, 6),), lambda x: op.mean(x, axis=[1, 2])),
    "max": (((4, 8, 5),), lambda x: op.max(x, axis=[1])),
    "min": (((4, 8, 5),), lambda x: op.min(x, axis=[1])),
    "prod": (((4, 8, 5),), lambda x: op.prod(x, axis=[1])),
    "variance": (((4, 8, 5),), lambda x: op.variance(x, axis=[1])),
    "argmax": (((4, 8, 5),), lambda x: op.argmax(x, axis=1)),
    "reshape 2x24 to 6x8": (((2, 24),), lambda x: op.reshape(x, (6, 8))),
    "reshape 6x4 to 4x6": (((6, 4),), lambda x: op.reshape(x, (4, 6))),
    "reshape 4x8x6 to 32x6": (((4, 8, 6),), lambda x: op.reshape(x, (32, 6))),
    "permute_dims": (((4, 8, 5),), lambda x: op.permute_dims(x, (2, 0, 1))),
    "expand and broadcast": (((4, 6),), lambda x: op.broadcast_to(op.expand_dims(x, 1), (4, 8, 6))),
    "repeat": (((4, 8, 5),), lambda x: op.repeat(x, 2, axis=1)),
    "tile": (((4, 8),), lambda x: op.tile(x, (1, 2))),
    "flip": (((4, 8),), lambda x: op.flip(x, axis=1)),
    "concat": (((4, 8), (4, 6)), lambda a, b: op.concat([a, b], axis=1)),
    "stack": (((4, 8), (4, 8)), lambda a, b: op.stack([a, b], axis=1)),
    "split, unequal": (((4, 16),), lambda x: op.split(x, [4, 9], axis=1)),
    "strided_slice, first": (((4, 8, 5),), lambda x: op.strided_slice(x, [1], [0], [1])),
    "strided_slice, step 2": (((4, 16),), lambda x: op.strided_slice(x, [1], [0], [16], [2])),
    "pad": (((4, 8),), lambda x: op.nn.pad(x, (0, 0, 2, 2))),
    "where": (((4, 8), (4, 8)), lambda a, b: op.where(op.greater(a, b), a, b)),
    "triu": (((4, 8, 8),), lambda x: op.triu(x, 1)),
    "take, rows": (((9, 8), ((4, 6), "int32")), lambda t, i: op.take(t, i, axis=0)),
    "gather_elements": (((4, 8), ((4, 8), "int64")), lambda t, i: op.gather_elements(t, i, axis=1)),
    "scatter_elements": (
        ((4, 8), ((4, 8), "int64"), (4, 8)),
        lambda t, i, u: op.scatter_elements(t, i, u, axis=0),
    ),
    "one_hot": (
        (((4, 6), "int32"),),
        lambda i: op.one_hot(
            i, relax.prim_value(tirx.const(1.0, "float32")), relax.prim_value(tirx.const(0.0, "float32")), depth=8
        ),
    ),
    "conv2d": (((2, 4, 7, 8), (6, 4, 3, 3)), lambda x, w: op.nn.conv2d(x, w, padding=1)),
    "conv2d, valid": (((2, 3, 7, 8), (4, 3, 3, 2)), op.nn.conv2d),
    "conv2d, dilated": (((2, 3, 9, 8), (4, 3, 3, 3)), lambda x, w: op.nn.conv2d(x, w, padding=2, dilation=2)),
    "conv2d, strided": (((2, 3, 9, 8), (4, 3, 3, 3)), lambda x, w: op.nn.conv2d(x, w, padding=1, strides=2)),
    "conv2d, patches": (((2, 4, 8, 8), (6, 4, 4, 4)), lambda x, w: op.nn.conv2d(x, w, strides=4)),
    "conv2d, groups": (((2, 8, 7, 8), (8, 2, 3, 3)), lambda x, w: op.nn.conv2d(x, w, padding=1, groups=4)),
    "conv2d, depthwise": (((2, 8, 7, 8), (8, 1, 3, 3)), lambda x, w: op.nn.conv2d(x, w, padding=1, groups=8)),
    "conv2d_transpose": (((2, 4, 6, 8), (4, 6, 2, 2)), lambda x, w: op.nn.conv2d_transpose(x, w, strides=2)),
    "batch_norm": (((2, 8, 3, 4), *[(8,)] * 4), lambda x, *s: op.nn.batch_norm(x, *s, axis=1, training=False)),
    "max_pool2d": (((2, 6, 8, 8),), lambda x: op.nn.max_pool2d(x, (2, 2), strides=(2, 2))),
    "max_pool2d, overlapping": (((2, 6, 7, 8),), lambda x: op.nn.max_pool2d(x, (3, 3), padding=(1, 1))),
    "avg_pool2d": (((2, 6, 8, 8),), lambda x: op.nn.avg_pool2d(x, (2, 2), strides=(2, 2))),
    "adaptive_avg_pool2d": (((2, 6, 8, 8),), lambda x: op.nn.adaptive_avg_pool2d(x, (1, 1))),
    "resize2d": (((2, 8, 4, 4),), lambda x: op.image.resize2d(x, (8, 8), layout="NCHW", method="nearest_neighbor")),
    "attention": (((2, 6, 4, 8), (2, 5, 4, 8), (2, 5, 4, 8)), op.nn.attention),
    "gelu": (((4, 8),), op.nn.gelu),
}


def legalized(name: str) -> list[tirx.PrimFunc]:
    """The functions that Relax makes of an operator."""
    shapes, compute = OPERATORS[name]
    builder = relax.BlockBuilder()
    typed = [shape if isinstance(shape[-1], str) else (shape, "float32") for shape in shapes]
    params = [relax.Var(f"p{i}", relax.TensorType(shape, dtype)) for i, (shape, dtype) in enumerate(typed)]
    with builder.function("main", params):
        with builder.dataflow():
            out = builder.emit_output(builder.normalize(compute(*params)))
        builder.emit_func_output(out)
    functions = relax.transform.LegalizeOps()(builder.get()).functions.values()
    return [func for func in functions if isinstance(func, tirx.PrimFunc)]


def program(name: str) -> DistributedProgram:
    """One of the package's programs, for two devices on each of its axes."""
    return PROGRAMS[name](Mesh(dict.fromkeys(PROGRAMS[name].axes, 2)), "uneven")


def rotary(heads: int = 2, tokens: int = 5, width: int = 8) -> tirx.PrimFunc:
    """The halves of each head are turned into each other, by angles that the heads share."""
    half = width // 2

    @T.prim_func(s_tir=True)
    def func(
        X: T.Buffer((tokens, heads * width), "float32"),
        cos: T.Buffer((tokens, width), "float32"),
        sin: T.Buffer((tokens, width), "float32"),
        Y: T.Buffer((tokens, heads, width), "float32"),
    ):
        S = T.sblock_alloc_buffer((tokens, heads, width))
        for t, h, d in T.grid(tokens, heads, width):
            with T.sblock("split"):
                vt, vh, vd = T.axis.remap("SSS", [t, h, d])
                S[vt, vh, vd] = X[vt, vh * width + vd]
        for t, h, d in T.grid(tokens, heads, width):
            with T.sblock("turn"):
                vt, vh, vd = T.axis.remap("SSS", [t, h, d])
                Y[vt, vh, vd] = S[vt, vh, vd] * cos[vt, vd] + sin[vt, vd] * T.if_then_else(
                    vd < half, S[vt, vh, vd + half] * T.float32(-1), S[vt, vh, vd - half]
                )

    return func


@T.prim_func(s_tir=True)
def in_place(W: T.Buffer((6, 8), "float32"), g: T.Buffer((6, 8), "float32"), row: T.Buffer((8,), "float32")):
    """W is given and left."""
    for i, j in T.grid(6, 8):
        with T.sblock("step"):
            vi, vj = T.axis.remap("SS", [i, j])
            W[vi, vj] = W[vi, vj] - g[vi, vj] * row[vj]


@T.prim_func(s_tir=True)
def append(cache: T.Buffer((12, 4), "float32"), new: T.Buffer((5, 4), "float32"), total: T.Buffer((4,), "float32")):
    """Rows are put into a cache that is given, and then all of it is summed."""
    for i, j in T.grid(5, 4):
        with T.sblock("put"):
            vi, vj = T.axis.remap("SS", [i, j])
            cache[vi + 3, vj] = new[vi, vj]
    for j, k in T.grid(4, 12):
        with T.sblock("total"):
            vj, vk = T.axis.remap("SR", [j, k])
            with T.init():
                total[vj] = T.float32(0)
            total[vj] = total[vj] + cache[vk, vj]


@T.prim_func(s_tir=True)
def stencil(X: T.Buffer((12, 5), "float32"), Y: T.Buffer((12, 5), "float32")):
    """Two passes over the neighbours, so that a share needs two rows before it and one behind."""
    S = T.sblock_alloc_buffer((12, 5))
    for i, j in T.grid(12, 5):
        with T.sblock("first"):
            vi, vj = T.axis.remap("SS", [i, j])
            S[vi, vj] = X[vi, vj] + T.if_then_else(vi > 0, X[vi - 1, vj], T.float32(0))
    for i, j in T.grid(12, 5):
        with T.sblock("second"):
            vi, vj = T.axis.remap("SS", [i, j])
            Y[vi, vj] = T.if_then_else(vi > 0, S[vi - 1, vj], T.float32(1)) * T.if_then_else(
                vi < 11, S[vi + 1, vj], T.float32(2)
            )


@T.prim_func(s_tir=True)
def scan(X: T.Buffer((12, 5), "float32"), Y: T.Buffer((12, 5), "float32")):
    """Each row goes on with the one before it, so that rows can't be shared."""
    for i, j in T.grid(12, 5):
        with T.sblock("scan"):
            vi, vj = T.axis.remap("SS", [i, j])
            Y[vi, vj] = X[vi, vj] + T.if_then_else(vi > 0, Y[vi - 1, vj], T.float32(0))


@T.prim_func(s_tir=True)
def outer_sum(x: T.Buffer((8,), "float32"), Y: T.Buffer((8, 8), "float32"), total: T.Buffer((1,), "float32")):
    """Both dimensions of Y are x's, so that a share of x is one of pairs; and the sum over all pairs."""
    for i, j in T.grid(8, 8):
        with T.sblock("outer"):
            vi, vj = T.axis.remap("SS", [i, j])
            Y[vi, vj] = x[vi] * x[vj]
    for i, j in T.grid(8, 8):
        with T.sblock("total"):
            vi, vj = T.axis.remap("RR", [i, j])
            with T.init():
                total[0] = T.float32(0)
            total[0] = total[0] + x[vi] * x[vj]


@T.prim_func(s_tir=True)
def overwritten(X: T.Buffer((12,), "float32"), Y: T.Buffer((12,), "float32")):
    """The last of four iterations stays in S, so that all of Y comes from the last third of X."""
    S = T.sblock_alloc_buffer((4,))
    for i in range(12):
        with T.sblock("put"):
            vi = T.axis.spatial(12, i)
            S[vi % 4] = X[vi]
    for i in range(12):
        with T.sblock("get"):
            vi = T.axis.spatial(12, i)
            Y[vi] = S[vi % 4]


@T.prim_func(s_tir=True)
def scaled_sums(
    A: T.Buffer((6, 8), "float32"),
    scale: T.Buffer((6,), "float32"),
    bias: T.Buffer((6,), "float32"),
    linear: T.Buffer((6,), "float32"),
    shifted: T.Buffer((6,), "float32"),
    doubled: T.Buffer((6, 8), "float32"),
):
    """Of a shared sum `linear` is partial; `shifted` isn't, as every device would add the bias."""
    S = T.sblock_alloc_buffer((6,))
    U = T.sblock_alloc_buffer((6,))
    for i, k in T.grid(6, 8):
        with T.sblock("sum"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                S[vi] = T.float32(0)
            S[vi] = S[vi] + T.exp(A[vi, vk])
    for i in range(6):
        with T.sblock("linear"):
            vi = T.axis.spatial(6, i)
            linear[vi] = S[vi] * scale[vi] - S[vi] / T.float32(3)
    for i, k in T.grid(6, 4):
        with T.sblock("other"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                U[vi] = T.float32(0)
            U[vi] = U[vi] + scale[vi] * T.Cast("float32", vk)
    for i in range(6):
        with T.sblock("shifted"):
            vi = T.axis.spatial(6, i)
            shifted[vi] = U[vi] + bias[vi]
    for i, k in T.grid(6, 8):
        with T.sblock("doubled"):
            vi, vk = T.axis.remap("SS", [i, k])
            doubled[vi, vk] = A[vi, vk] * T.float32(2)


@T.prim_func(s_tir=True)
def biased_in_place(A: T.Buffer((6, 8), "float32"), bias: T.Buffer((6,), "float32"), Y: T.Buffer((6,), "float32")):
    """A bias is added to the sum where it lies: every device would."""
    for i, k in T.grid(6, 8):
        with T.sblock("sum"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                Y[vi] = T.float32(0)
            Y[vi] = Y[vi] + A[vi, vk]
    for i in range(6):
        with T.sblock("bias"):
            vi = T.axis.spatial(6, i)
            Y[vi] = Y[vi] + bias[vi]


@T.prim_func(s_tir=True)
def accumulated(A: T.Buffer((6, 8), "float32"), Y: T.Buffer((6,), "float32")):
    """A sum that goes on with what is given: every device would count that."""
    for i, k in T.grid(6, 8):
        with T.sblock("sum"):
            vi, vk = T.axis.remap("SR", [i, k])
            Y[vi] = Y[vi] + A[vi, vk]


@T.prim_func(s_tir=True)
def joined_sum(A: T.Buffer((4, 6), "float32"), B: T.Buffer((4, 3), "float32"), total: T.Buffer((4,), "float32")):
    """The sum of a concatenation: who shares A's columns alone would count B's on every device."""
    C = T.sblock_alloc_buffer((4, 9))
    for i, j in T.grid(4, 9):
        with T.sblock("join"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = T.if_then_else(vj < 6, A[vi, vj], B[vi, vj - 6])
    for i, j in T.grid(4, 9):
        with T.sblock("total"):
            vi, vj = T.axis.remap("SR", [i, j])
            with T.init():
                total[vi] = T.float32(0)
            total[vi] = total[vi] + C[vi, vj]


@T.prim_func(s_tir=True)
def started_elsewhere(A: T.Buffer((6, 8), "float32"), bias: T.Buffer((6,), "float32"), Y: T.Buffer((6,), "float32")):
    """A sum that starts with a bias."""
    for i, k in T.grid(6, 8):
        with T.sblock("sum"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                Y[vi] = bias[vi]
            Y[vi] = Y[vi] + A[vi, vk]


@T.prim_func(s_tir=True)
def grouped_rows(X: T.Buffer((12, 5), "float32"), Y: T.Buffer((4, 5), "float32"), last: T.Buffer((1,), "float32")):
    """Rows in groups of three, of which the largest element is taken; and one element alone."""
    for i, r, j in T.grid(4, 3, 5):
        with T.sblock("most"):
            vi, vr, vj = T.axis.remap("SRS", [i, r, j])
            with T.init():
                Y[vi, vj] = T.float32(-1000)
            Y[vi, vj] = T.max(Y[vi, vj], X[vi * 3 + vr, vj])
    with T.sblock("last"):
        T.reads(X[11, 4])
        T.writes(last[0])
        last[0] = X[11, 4]


@T.prim_func(s_tir=True)
def with_predicate(A: T.Buffer((10, 6), "float32"), Y: T.Buffer((10, 6), "float32")):
    """Loops that run beyond the rows, and don't there."""
    for i0, i1, j in T.grid(3, 4, 6):
        with T.sblock("y"):
            T.where(i0 * 4 + i1 < 10)
            vi = T.axis.spatial(10, i0 * 4 + i1)
            vj = T.axis.spatial(6, j)
            Y[vi, vj] = A[vi, vj] * T.float32(3)


@T.prim_func(s_tir=True)
def transposed_scatter(idx: T.Buffer((6,), "int32"), X: T.Buffer((6, 5), "float32"), Y: T.Buffer((5, 6), "float32")):
    """Rows go where an index says; nothing of them can be shared, the columns can."""
    for i, j in T.grid(6, 5):
        with T.sblock("put"):
            vi, vj = T.axis.remap("SS", [i, j])
            Y[vj, idx[vi]] = X[vi, vj]


FUNCTIONS = {
    "rotary": rotary(),
    "in place": in_place,
    "append": append,
    "stencil": stencil,
    "scan": scan,
    "outer sum": outer_sum,
    "overwritten": overwritten,
    "scaled sums": scaled_sums,
    "biased in place": biased_in_place,
    "accumulated": accumulated,
    "joined sum": joined_sum,
    "started elsewhere": started_elsewhere,
    "grouped rows": grouped_rows,
    "with predicate": with_predicate,
    "transposed scatter": transposed_scatter,
}
"""Functions of several blocks, each with something that a rule can get wrong."""
