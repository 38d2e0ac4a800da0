"""
Streaming tensor programs
=========================

Run it by ``python docs/tours/stream.py``: it prints what follows.

Every statement below is checked when the script runs, and the pictures are those that it makes.
"""

import numpy as np
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.stream import (
    Accelerator,
    Scalar,
    Selector,
    StreamProgram,
    StreamType,
    Tile,
    from_tile,
    functions,
    metrics,
    rewrites,
    symbol,
)
from tvm_axe.stream.draw import graph_svg, pareto_svg, timeline_svg
from tvm_axe.stream.explore import explore, front
from tvm_axe.stream.programs import MoE, attention, attention_inputs, lengths, moe_inputs, moe_layer, routing
from tvm_axe.stream.programs.cached_attention import cached_tiles
from tvm_axe.stream.programs.moe import cut_rows
from tvm_axe.stream.programs.reference import moe_reference
from tvm_axe.stream.programs.workloads import Heads

PICTURES = {}

# %%
# 1. Operators send tiles to each other
# -------------------------------------
#
# A program is a graph of operators for an accelerator of many units with memory of their own, as it is laid out on the
# chip. What flows between them are streams: tensors of tiles, sent one tile after the other, in which stop tokens close
# the dims. Here sixteen tokens, rows of 32 numbers, are loaded from off-chip memory, and each is sent to one or both of
# two experts, which the input `route` says. An expert packs all that it gets into one tile and multiplies it by its
# weights.

p = StreamProgram("two experts")
tokens = p.load(p.tensor("x", 16, 32), (1, 32), name="tokens").flatten()
parts = tokens.partition(p.input("route", StreamType((16,), Selector(2))))
for expert, part in enumerate(parts):
    packed = part.reshape(None).accum(functions.retile(), name=f"pack{expert}")
    weights = packed.load(p.tensor(f"w{expert}", 32, 8), (32, 8), name=f"weights{expert}").flatten(0, 2)
    packed.map(functions.matmul(), weights, name=f"multiply{expert}").store(p.tensor(f"y{expert}", 16, 8))
print(p, end="\n\n")
PICTURES["graph"] = graph_svg(p)

# %%
# How many tokens an expert gets is known only when the program runs: its type has a symbol there. It is checked all the
# same, operator by operator, when the program is built; and how much it loads is an expression in these symbols:

print("off-chip bytes:", metrics.off_chip_traffic(p), end="\n\n")

# %%
# 2. One run computes, and says how long it takes
# -----------------------------------------------

rng = np.random.default_rng(0)
x, *w = (rng.standard_normal(shape, dtype="float32") for shape in [(16, 32), (32, 8), (32, 8)])
route = [(0,), (0, 1), (1,), (0,)] * 4
accelerator = Accelerator(compute=64)  # FLOPs a cycle of a unit; on-chip and off-chip memory as in the paper
report = p.run({"x": x, "w0": w[0], "w1": w[1], "route": route}, accelerator)
for expert in range(2):
    mine = [token for token, experts in enumerate(route) if expert in experts]
    np.testing.assert_allclose(report.tensors[f"y{expert}"][: len(mine)], x[mine] @ w[expert], rtol=1e-4, atol=1e-5)
assert metrics.evaluate(metrics.off_chip_traffic(p), report.bindings) == report.traffic
print(report, end="\n\n")

# %%
# The same run without values takes the same cycles, and no arrays: that is how models of real size are simulated.

assert p.run({"route": route}, accelerator, values=False).cycles == report.cycles

# %%
# 3. A mixture of experts
# -----------------------
#
# The package has the programs of the paper (arXiv 2511.07776). A layer of SwiGLU experts packs an expert's tokens into
# tiles of a fixed height, the last one filled up, or into one of as many tokens as there are. The first loads the
# weights once for each tile, or computes padding; the second does neither.

moe = MoE(experts=8, chosen=2, width=256, hidden=512)
chosen = routing(64, moe, seed=1)
big = Accelerator(compute=1024)


def simulate(program):
    """Run a layer without values."""
    return program.run(moe_inputs(chosen), big, values=False)


runs = {height: simulate(moe_layer(moe, 64, height, columns=64)) for height in (4, 16, 64, None)}
for height, run in runs.items():
    print(f"tiles of {height or 'all'} tokens: {run.cycles:,} cycles, {run.traffic:,} B, {run.flops:,} FLOPs")
assert runs[4].traffic > runs[16].traffic > runs[64].traffic == runs[None].traffic
assert runs[64].flops > runs[None].flops == min(run.flops for run in runs.values())
print()

# %%
# It computes what numpy computes:

program = moe_layer(moe, 64, None, columns=64)
arrays = {
    name: rng.standard_normal((tensor.rows, tensor.columns), dtype="float32") / 8
    for name, tensor in program.tensors.items()
    if name != "y"
}
y = program.run({**moe_inputs(chosen), **arrays}).tensors["y"]
np.testing.assert_allclose(y, moe_reference(arrays, chosen, moe)["y"], rtol=1e-3, atol=1e-4)

# %%
# 4. Optimizations are rewrites
# -----------------------------
#
# Dynamic tiling replaces the padded tiles of a program; configuration time-multiplexing lets several regions be one,
# which takes whichever expert's tile is ready and loads the weights for it.

static = moe_layer(moe, 64, 16, columns=64)
regions = [(f"pack{expert}", f"expert{expert}") for expert in range(moe.experts)]
assert simulate(rewrites.dynamic_tiling(static)).flops == runs[None].flops
assert simulate(rewrites.time_multiplexing(static, regions, share=4)).compute < simulate(static).compute / 2


def build(tile, share):
    """One design: tiles of so many tokens (0: dynamic), and so many experts a region."""
    layer = moe_layer(moe, 64, tile or 64, columns=64)
    layer = layer if tile else rewrites.dynamic_tiling(layer)
    return layer if share == 1 else rewrites.time_multiplexing(layer, regions, share)


designs = explore(build, {"tile": [0, 8, 16, 64], "share": [1, 2, 4]}, moe_inputs(chosen), big)
best = front(designs)
for design in best:
    print(f"{design.choices}: {design.cycles:,} cycles, {design.on_chip:,} B on chip")
assert all(design.choices["tile"] != 64 for design in best)
PICTURES["pareto"] = pareto_svg(designs, best)
print()

# %%
# 5. Requests of different length
# -------------------------------
#
# Attention over caches of keys and values, four regions side by side. Requests go to the regions in turn. Or each goes
# to the first region that is free, which is another rewrite: a feedback edge says who has loaded its request's keys.

cached = lengths(16, seed=3)
heads = Heads(groups=1, queries=8, size=64)
loads = [f"keys{region}" for region in range(4)]
single = Accelerator(compute=2048, depth=1)

in_turn = attention(heads, 16, int(cached_tiles(cached, 32).max()), "interleaved", dtype="bfloat16")
streams = attention_inputs(cached, heads, "interleaved")
timed = {"interleaved": in_turn.run(streams, single, values=False, trace=True)}
del streams["region"]
first_free = rewrites.dynamic_parallelization(in_turn, "region", loads)
timed["dynamic"] = first_free.run(streams, single, values=False, trace=True)
for way, run in timed.items():
    print(f"{way}: {run.cycles:,} cycles")
    PICTURES[way] = timeline_svg(run, units=loads)
assert timed["dynamic"].cycles < 0.8 * timed["interleaved"].cycles

# %%
# 6. Loops
# --------
#
# What is done how often may depend on what comes out of it. `Stream.loop` sends elements through a body, a graph of the
# same operators, until `Loop.close` is told of each that it is done. They go around in rounds: here each sequence has
# so many tokens left, and a round multiplies the rows of all that go on, packed into one tile, by weights that are
# loaded once a round. The loop ends by itself, and leaves no token behind.

p = StreamProgram("generate")
steps = p.input("steps", StreamType((5,), Scalar()))
loop = p.load(p.tensor("x", 5, 32), (1, 32)).flatten().zip(steps).loop(capacity=5, name="generate")
left = loop.stream.map(functions.number("left", lambda row, left: left - 1))
row = functions.TileFunction("row", lambda row, left: row, lambda row, left: row, lambda *_: 0)
packed = loop.stream.map(row).reshape(None).accum(functions.retile())
weights = packed.load(p.tensor("w", 32, 32), (32, 32)).flatten(0, 2)
rows = packed.map(functions.matmul(), weights).flat_map(cut_rows, StreamType((symbol("rows"),), Tile(1, 32))).flatten()
done = loop.close(rows.zip(left), left.map(functions.number("goes_on", lambda left: left > 0))).output("y")

x, w = (rng.standard_normal(shape, dtype="float32") / 4 for shape in [(5, 32), (32, 32)])
report = p.run({"x": x, "w": w, "steps": [3, 1, 4, 1, 2]}, Accelerator())
print("rounds:", report.bindings[symbol("generate_rounds")], "off-chip bytes:", metrics.off_chip_read(p))
for at, (found, _) in zip([1, 3, 4, 0, 2], report.outputs["y"], strict=True):  # in the order in which they end
    np.testing.assert_allclose(found[0], x[at] @ np.linalg.matrix_power(w, [3, 1, 4, 1, 2][at]), rtol=1e-3, atol=1e-4)
assert report.read == x.nbytes + 4 * w.nbytes
PICTURES["loop"] = graph_svg(p)
print()

# %%
# 7. Tile programs are streaming programs
# ---------------------------------------
#
# A kernel that is written tile by tile, for GPUs and CPUs (`docs/tours/tile.py`), is a streaming program as well. Its
# grid and its loops are dims, copies from global memory loads of streams, what is computed of tiles functions; what a
# loop adds to is an accumulation. Attention with an online softmax hands three things on from one tile of keys to the
# next: the largest scores, which the loop itself takes, so that they are a Scan; the sums of weights, and the weighted
# sums of values, whose last states alone matter, so that they are Accums.


@T.prim_func
def attend(
    Q: T.Buffer((128, 32), "float32"),
    K: T.Buffer((256, 32), "float32"),
    V: T.Buffer((256, 32), "float32"),
    O: T.Buffer((128, 32), "float32"),
):
    with tile.kernel(4) as i:
        q = tile.shared((32, 32), "float32")
        k = tile.shared((64, 32), "float32")
        v = tile.shared((64, 32), "float32")
        s = tile.fragment((32, 64), "float32")
        o = tile.fragment((32, 32), "float32")
        top = tile.fragment((32,), "float32")
        before = tile.fragment((32,), "float32")
        total = tile.fragment((32,), "float32")
        row = tile.fragment((32,), "float32")
        tile.copy(Q[i * 32, 0], q)
        tile.fill(o, 0)
        tile.fill(total, 0)
        tile.fill(top, -1e30)
        for step in tile.pipelined(4):
            tile.copy(K[step * 64, 0], k)
            tile.copy(V[step * 64, 0], v)
            tile.gemm(q, k, s, transpose_b=True, accumulate=False)
            tile.copy(top, before)
            tile.max(s, top, accumulate=True)
            with tile.parallel(32, 64) as (x, y):
                s[x, y] = T.exp(s[x, y] - top[x])
            tile.sum(s, row)
            with tile.parallel(32) as x:
                before[x] = T.exp(before[x] - top[x])
                total[x] = total[x] * before[x] + row[x]
            with tile.parallel(32, 32) as (x, y):
                o[x, y] = o[x, y] * before[x]
            tile.gemm(s, v, o)
        with tile.parallel(32, 32) as (x, y):
            o[x, y] = o[x, y] / total[x]
        tile.copy(o, O[i * 32, 0])


translated = from_tile(attend, Accelerator())
print(translated.streams)
given = {name: rng.standard_normal((rows, 32), dtype="float32") for name, rows in [("Q", 128), ("K", 256), ("V", 256)]}
report = translated.run(given)
weights = np.exp(given["Q"] @ given["K"].T)
np.testing.assert_allclose(
    report.tensors["O"], weights @ given["V"] / weights.sum(axis=1, keepdims=True), rtol=1e-3, atol=1e-4
)
print(f"attention from its tile program: {report.cycles:,} cycles, {report.traffic:,} B")

# %%
# What streams have nothing for is refused, with the line that says it and what to write instead. On the command line
# `tvm-axe stream run --tile FILE.py:attend` does the same, and compares with the program compiled for this CPU.
#
# `report.save_trace(path)` writes all the units' work for https://ui.perfetto.dev. On the command line::
#
#     tvm-axe stream list
#     tvm-axe stream run attention-dynamic --trace t.json
#     tvm-axe stream reproduce        # the published results, docs/results/2026-11-20-streams.md
