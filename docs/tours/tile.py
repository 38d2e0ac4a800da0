"""
Tile programs, from a matrix product to attention
=================================================

Run it by ``python docs/tours/tile.py``: it prints what follows.

A tile program says what moves and what is computed, tile by tile. Which thread does what, where an element of a tile
lives, which instruction multiplies and how loads run ahead is inferred, for Hopper's and Ampere's tensor cores as for a
CPU's vectors. Here all of it runs on the CPU.
"""

import math

import numpy as np
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.collective import MeshKernel, launch
from tvm_axe.errors import TileError
from tvm_axe.layout import Mesh

rng = np.random.default_rng(0)


def check(executable: tile.TileExecutable, inputs: list[np.ndarray], expected: np.ndarray, error: float) -> None:
    """Run on an output of NaNs, and compare with numpy's result in float64."""
    out = np.full(expected.shape, np.nan, inputs[0].dtype)
    executable(*inputs, out)
    found = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    assert found < error, found
    print(f"{executable.name}: relative error {found:.1e}\n")


# %%
# 1. A matrix product
# -------------------
#
# `with` opens what runs at once and in no order: here one block for each 64 x 64 tile of C. Within a block, statements
# run in order. A tile in `shared` memory is seen by all of a block's threads, a `fragment` is spread over their
# registers; on a CPU, both are buffers in the core's cache. `A[m * 64, k * 32]` names the tile that starts there. 100
# and 200 divide by no tile: what lies beyond a tensor's end reads as zero and is not written.

M, N, K = 100, 200, 300


@T.prim_func
def matmul(A: T.Buffer((M, K), "float32"), B: T.Buffer((K, N), "float32"), C: T.Buffer((M, N), "float32")):
    with tile.kernel(tile.cdiv(M, 64), tile.cdiv(N, 64)) as (m, n):
        a = tile.shared((64, 32), "float32")
        b = tile.shared((32, 64), "float32")
        c = tile.fragment((64, 64), "float32")
        tile.fill(c, 0)
        for k in tile.pipelined(tile.cdiv(K, 32)):
            tile.copy(A[m * 64, k * 32], a)
            tile.copy(B[k * 32, n * 64], b)
            tile.gemm(a, b, c)
        tile.copy(c, C[m * 64, n * 64])


A, B = rng.standard_normal((M, K), dtype="float32"), rng.standard_normal((K, N), dtype="float32")
executable = tile.compile(matmul, "llvm")
check(executable, [A, B], A.astype("float64") @ B, 1e-5)

# %%
# What was read, and what was decided about it. The same program for a GPU; compiling needs none:

print(tile.read(matmul), end="\n\n")
print(executable.explain(), end="\n\n")

# %%
# 2. The same program for tensor cores
# ------------------------------------
#
# In bfloat16 Hopper has an instruction for it (wgmma): a producer warp loads tiles with TMA into a circular buffer of
# slots, as many as fit, while others multiply. `explain` decides, but compiles nothing, so it needs neither GPU nor
# nvcc. `tvm-axe tile explain docs/tours/tile.py:linear --target cuda:sm_80` prints the same for another one.


@T.prim_func
def linear(
    X: T.Buffer((4096, 4096), "bfloat16"),
    W: T.Buffer((4096, 4096), "bfloat16"),
    bias: T.Buffer((4096,), "float32"),
    Y: T.Buffer((4096, 4096), "bfloat16"),
):
    with tile.kernel(32, 16) as (m, n):
        x = tile.shared((128, 64), "bfloat16")
        w = tile.shared((256, 64), "bfloat16")
        y = tile.fragment((128, 256), "float32")
        tile.fill(y, 0)
        for k in tile.pipelined(64):
            tile.copy(X[m * 128, k * 64], x)
            tile.copy(W[n * 256, k * 64], w)
            tile.gemm(x, w, y, transpose_b=True)
        with tile.parallel(128, 256) as (i, j):
            y[i, j] = T.max(y[i, j] + bias[n * 256 + j], 0)
        tile.copy(y, Y[m * 128, n * 256])


# %%
# `parallel` stores elements, for every point, in no order: the bias and the activation, before the tile is rounded.

plan = tile.plan(linear, "cuda:sm_90a")
assert any("TMA" in decision.reason for decision in plan.decisions)
print(plan.explain(), end="\n\n")

# %%
# 3. Rows: reductions
# -------------------
#
# A softmax of rows, eight rows a block, each held in registers. Reductions drop the axis that they run along.

ROWS, WIDTH = 50, 300


@T.prim_func
def softmax(X: T.Buffer((ROWS, WIDTH), "float32"), Y: T.Buffer((ROWS, WIDTH), "float32")):
    with tile.kernel(tile.cdiv(ROWS, 8)) as m:
        x = tile.fragment((8, WIDTH), "float32")
        row = tile.fragment((8,), "float32")
        tile.copy(X[m * 8, 0], x)
        tile.max(x, row)
        with tile.parallel(8, WIDTH) as (i, j):
            x[i, j] = T.exp(x[i, j] - row[i])
        tile.sum(x, row)
        with tile.parallel(8, WIDTH) as (i, j):
            x[i, j] = x[i, j] / row[i]
        tile.copy(x, Y[m * 8, 0])


X = rng.standard_normal((ROWS, WIDTH), dtype="float32")
weights = np.exp(X.astype("float64"))
check(tile.compile(softmax, "llvm"), [X], weights / weights.sum(axis=1, keepdims=True), 1e-5)

# %%
# Order within rows: the experts that a token goes to are those with the four largest of its scores. `top_k` gives them
# in order, the first of equal ones first, and where they were; their softmax are the weights.

TOKENS, EXPERTS, CHOSEN = 100, 64, 4


@T.prim_func
def route(
    scores: T.Buffer((TOKENS, EXPERTS), "float32"),
    experts: T.Buffer((TOKENS, CHOSEN), "int32"),
    weights: T.Buffer((TOKENS, CHOSEN), "float32"),
):
    with tile.kernel(tile.cdiv(TOKENS, 8)) as m:
        x = tile.fragment((8, EXPERTS), "float32")
        best = tile.fragment((8, CHOSEN), "float32")
        where = tile.fragment((8, CHOSEN), "int32")
        total = tile.fragment((8,), "float32")
        tile.copy(scores[m * 8, 0], x)
        tile.top_k(x, best, where)
        with tile.parallel(8, CHOSEN) as (i, j):
            best[i, j] = T.exp(best[i, j])
        tile.sum(best, total)
        with tile.parallel(8, CHOSEN) as (i, j):
            best[i, j] = best[i, j] / total[i]
        tile.copy(where, experts[m * 8, 0])
        tile.copy(best, weights[m * 8, 0])


scores = rng.standard_normal((TOKENS, EXPERTS), dtype="float32")
order = np.argsort(-scores, axis=1)[:, :CHOSEN]
experts, found = np.full((TOKENS, CHOSEN), -1, "int32"), np.full((TOKENS, CHOSEN), np.nan, "float32")
tile.compile(route, "llvm")(scores, experts, found)
chosen = np.exp(np.take_along_axis(scores, order, 1).astype("float64"))
assert (experts == order).all() and np.allclose(found, chosen / chosen.sum(axis=1, keepdims=True))
print(f"route: the first token goes to experts {experts[0].tolist()}\n")

# %%
# A tile is reduced by any function of two numbers that is associative and commutative, too: `reduce` takes it with the
# number that it changes nothing by. Here rows' checksums, and the logarithm of the sum of their exponentials.


def log_add_exp(a, b):
    most = T.max(a, b)
    return most + T.log(T.exp(a - most) + T.exp(b - most))


@T.prim_func
def fold(words: T.Buffer((100, 64), "int32"), sums: T.Buffer((100,), "int32"), logs: T.Buffer((100,), "float32")):
    with tile.kernel(tile.cdiv(100, 8)) as m:
        w = tile.fragment((8, 64), "int32")
        x = tile.fragment((8, 64), "float32")
        check = tile.fragment((8,), "int32")
        log = tile.fragment((8,), "float32")
        tile.copy(words[m * 8, 0], w)
        tile.cast(w, x)
        tile.reduce(w, check, lambda a, b: a ^ b, identity=0)
        tile.reduce(x, log, log_add_exp, identity=-1e30)
        tile.copy(check, sums[m * 8])
        tile.copy(log, logs[m * 8])


words = rng.integers(-9, 9, (100, 64)).astype("int32")
sums, logs = np.full(100, -1, "int32"), np.full(100, np.nan, "float32")
tile.compile(fold, "llvm")(words, sums, logs)
assert (sums == np.bitwise_xor.reduce(words, axis=1)).all()
assert np.allclose(logs, np.logaddexp.reduce(words.astype("float64"), axis=1))
print(f"fold: the first row's checksum is {sums[0]}\n")

# %%
# 4. Attention
# ------------
#
# softmax(Q K^T / sqrt(D)) V, causal: a token sees itself and those before it. The scores are never whole: 32 keys at a
# time, with the largest score and the sum of each row so far, and what was summed before is scaled when a larger score
# turns up. A loop's extent may depend on the block. Exponentials are powers of 2, which GPUs have an instruction for.

HEADS, TOKENS, D = 2, 150, 64
SCALE = math.log2(math.e) / math.sqrt(D)


@T.prim_func
def attention(
    Q: T.Buffer((HEADS, TOKENS, D), "float32"),
    K: T.Buffer((HEADS, TOKENS, D), "float32"),
    V: T.Buffer((HEADS, TOKENS, D), "float32"),
    O: T.Buffer((HEADS, TOKENS, D), "float32"),
):
    with tile.kernel(HEADS, tile.cdiv(TOKENS, 64)) as (h, m):
        q = tile.shared((64, D), "float32")
        k = tile.shared((32, D), "float32")
        v = tile.shared((32, D), "float32")
        s = tile.fragment((64, 32), "float32")
        o = tile.fragment((64, D), "float32")
        top = tile.fragment((64,), "float32")
        before = tile.fragment((64,), "float32")
        total = tile.fragment((64,), "float32")
        tile.copy(Q[h, m * 64, 0], q)
        tile.fill(o, 0)
        tile.fill(total, 0)
        tile.fill(top, -1e30)
        for j in tile.pipelined(T.min((m + 1) * 2, tile.cdiv(TOKENS, 32))):
            tile.copy(K[h, j * 32, 0], k)
            tile.copy(V[h, j * 32, 0], v)
            tile.gemm(q, k, s, transpose_b=True, accumulate=False)
            tile.copy(top, before)
            with tile.parallel(64, 32) as (x, y):
                s[x, y] = T.if_then_else(j * 32 + y <= m * 64 + x, s[x, y] * SCALE, -1e30)
            tile.max(s, top, accumulate=True)
            with tile.parallel(64) as x:
                before[x] = T.exp2(before[x] - top[x])
                total[x] = total[x] * before[x]
            with tile.parallel(64, 32) as (x, y):
                s[x, y] = T.exp2(s[x, y] - top[x])
            tile.sum(s, total, accumulate=True)
            with tile.parallel(64, D) as (x, y):
                o[x, y] = o[x, y] * before[x]
            tile.gemm(s, v, o)
        with tile.parallel(64, D) as (x, y):
            o[x, y] = o[x, y] / total[x]
        tile.copy(o, O[h, m * 64, 0])


q, k, v = (rng.standard_normal((HEADS, TOKENS, D), dtype="float32") for _ in range(3))
scores = q.astype("float64") @ k.transpose(0, 2, 1) / math.sqrt(D)
weights = np.exp(np.where(np.tri(TOKENS, dtype=bool), scores, -np.inf))
check(tile.compile(attention, "llvm"), [q, k, v], weights / weights.sum(axis=2, keepdims=True) @ v, 1e-5)

# %%
# 5. Several kernels
# ------------------
#
# A function may have several kernels, which run one after the other: each sees what those before it have stored. What
# one leaves for the next lies in `scratch`, global memory that is there for a call. A product of few tiles and a long
# sum keeps more of a GPU busy if its sum is split, and a second kernel adds the pieces up. How many there are is a
# knob, of both kernels; with one piece an `if` of it would choose another kernel.


@T.prim_func
def split(A: T.Buffer((64, 4096), "float32"), B: T.Buffer((4096, 64), "float32"), C: T.Buffer((64, 64), "float32")):
    pieces = tile.knob("pieces", (8, 4, 16))
    parts = tile.scratch((pieces, 64, 64), "float32")
    with tile.kernel(pieces) as p:
        a = tile.shared((64, 64), "float32")
        b = tile.shared((64, 64), "float32")
        c = tile.fragment((64, 64), "float32")
        tile.fill(c, 0)
        for k in tile.pipelined(64 // pieces):
            tile.copy(A[0, (p * (64 // pieces) + k) * 64], a)
            tile.copy(B[(p * (64 // pieces) + k) * 64, 0], b)
            tile.gemm(a, b, c)
        tile.copy(c, parts[p, 0, 0])
    with tile.kernel(4) as m:
        every = tile.fragment((pieces, 16, 64), "float32")
        total = tile.fragment((16, 64), "float32")
        tile.copy(parts[0, m * 16, 0], every)
        tile.sum(every, total, axis=0)
        tile.copy(total, C[m * 16, 0])


A, B = rng.standard_normal((64, 4096), dtype="float32"), rng.standard_normal((4096, 64), dtype="float32")
check(tile.compile(split, "llvm"), [A, B], A.astype("float64") @ B.astype("float64"), 1e-5)

# %%
# It is one function to whoever calls, exports or tunes it; its plan has each kernel under its name. Scratch that a
# kernel reads and none before it wrote is refused.

print(tile.explain(split, "cuda:sm_90a"), end="\n\n")

# %%
# 6. Kernels that meet
# --------------------
#
# Kernels may meet while they run: `tile.signal` sets flags, int32 in global memory of any device, when all that a block
# has read and written so far is done, and `tile.wait` goes on when flags have a value. A parameter may be a tensor of
# the mesh, whose dim 0 is the device; `device=` names the scalar that is the coordinate of the device that runs. Here
# every device tells the others that its x is there, and adds up the x of all.
DEVICES, ROWS = 4, 8


@T.prim_func
def all_reduce(
    x: tile.mesh_tensor((DEVICES, ROWS, 1024), "float32"),
    me: T.int32,
    turn: T.int32,
    flags: tile.mesh_tensor((DEVICES, DEVICES, ROWS), "int32"),
    out: T.Buffer((ROWS, 1024), "float32"),
):
    with tile.kernel(ROWS, device=me) as r:
        part = tile.fragment((1, 1024), "float32")
        total = tile.fragment((1, 1024), "float32")
        tile.fill(total, 0)
        tile.signal(flags[0:DEVICES, me, r], turn)
        tile.wait(flags[me, 0:DEVICES, r], turn)
        for d in range(DEVICES):
            tile.copy(x[d, r, 0], part)
            with tile.parallel(1, 1024) as (z, y):
                total[z, y] = total[z, y] + part[z, y]
        tile.copy(total, out[r, 0])


print(tile.explain(all_reduce, "cuda:sm_90a"))

# %%
# Workers run it, each with its own coordinate: all slabs of a mesh tensor are in reach, any other tensor is a device's.

with launch(Mesh({"tp": DEVICES}), engine="threads") as workers:
    kernel = MeshKernel(workers, all_reduce)
    slabs, out = (workers.mesh_tensor((ROWS, 1024), "float32") for _ in range(2))
    flags = workers.mesh_tensor((DEVICES, ROWS), "int32")
    for turn in (1, 2):
        inputs = rng.standard_normal((DEVICES, ROWS, 1024), dtype="float32")
        for device in range(DEVICES):
            slabs.slab(device)[:] = inputs[device]
            out.slab(device)[:] = np.nan
        kernel(slabs, turn, flags, out)
        for device in range(DEVICES):
            np.testing.assert_allclose(out.slab(device), inputs.astype("float64").sum(axis=0), rtol=1e-5, atol=1e-5)

# %%
# A program in which nobody is told of what is stored to a peer, or whose devices would wait for each other for ever, is
# refused. Here each of two devices wants the other to be first:


@T.prim_func
def polite(me: T.int32, flags: tile.mesh_tensor((2, 4), "int32")):
    with tile.kernel(4, device=me) as i:
        tile.wait(flags[me, i])
        tile.signal(flags[1 - me, i])


try:
    tile.read(polite)
except TileError as refusal:
    print(refusal)
    assert "flags[0, 0] stays unset" in str(refusal)
else:
    raise AssertionError("the deadlock went unseen")

# %%
# 7. What goes wrong
# ------------------
#
# A program that can't be right on any target is refused when it is read, with what was seen and what would be valid.
# Points of a `parallel` run in no order, so none may read what another stores:


@T.prim_func
def running(X: T.Buffer((64,), "float32")):
    with tile.kernel(1):
        x = tile.shared((64,), "float32")
        tile.copy(X, x)
        with tile.parallel(64) as i:
            if i > 0:
                x[i] = x[i] + x[i - 1]
        tile.copy(x, X)


try:
    tile.read(running)
except TileError as refusal:
    print(refusal)
    assert "x[i - 1] is read at i=2" in str(refusal)
else:
    raise AssertionError("the race went unseen")

# %%
# A result that is wrong is looked into where it is made: `tile.print` prints a tile, a part of one or a number, of one
# block or under a condition, on CPUs and on GPUs. Lines go to the standard output, each with its element and block.


@T.prim_func
def largest(X: T.Buffer((64, 8), "float32"), Y: T.Buffer((64,), "float32")):
    with tile.kernel(8) as b:
        x = tile.fragment((8, 8), "float32")
        most = tile.fragment((8,), "float32")
        tile.copy(X[b * 8, 0], x)
        tile.max(x, most)
        tile.print("most", most[0:2], block=(3,))  # most[0] = 1.87535894 in block (3), and most[1]
        tile.copy(most, Y[b * 8])


X, most = rng.standard_normal((64, 8), dtype="float32"), np.full(64, np.nan, "float32")
tile.compile(largest, "llvm")(X, most)
assert (most == X.max(axis=1)).all()
