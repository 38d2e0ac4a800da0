"""
Layouts, from the mesh down to the lane
=======================================

Run it by ``python docs/tours/layouts.py``: it prints what follows.

Every statement below is checked when the script runs, and the pictures are those that it makes.
"""

from tvm_axe.layout import ComposeLayout, Layout, Mesh
from tvm_axe.layout.draw import show
from tvm_axe.layout.explaining import explain
from tvm_axe.layout.memory import Access, bank_conflicts, sectors_touched
from tvm_axe.layout.placement import Placement
from tvm_axe.layout.redistributing import Link, plan_redistribution

PICTURES = {}

# %%
# 1. A layout says where each element lives
# -----------------------------------------
#
# The row-major index of an element is split into digits, the first the most significant, and each digit moves along an
# axis by its stride. Axes without a name are linear memory. Here 16 x 8 elements are spread over the 32 lanes of a warp
# as the accumulator of an m16n8 tensor-core instruction: rows 0 to 7 and 8 to 15, each row over four lanes, two
# elements a lane. A lane has four registers of them.

fragment = Layout.parse("S[(2, 8, 4, 2) : (2, 4@laneid, 1@laneid, 1)]")
(place,) = fragment.apply(9, 3, shape=(16, 8))
assert dict(place) == {"laneid": 5, "m": 3}

# %%
# How that comes about:

print(explain(fragment, "apply", 9, 3, shape=(16, 8)), end="\n\n")

# %%
# The whole of it, each element with its lane t and its register r:

PICTURES["fragment"] = show(fragment, (16, 8))
print(PICTURES["fragment"].text(), end="\n\n")

# %%
# 2. The same notation spreads a tensor over devices
# --------------------------------------------------
#
# Names that are neither threads nor memories are mesh axes. A matrix whose rows are cut over dp and whose columns are
# cut over tp; every device keeps its block row-major.

mesh = Mesh({"dp": 2, "tp": 4})
blocks = Layout.sharded((512, 1024), mesh, {0: "dp", 1: "tp"})
assert str(blocks) == "S[(2, 256, 4, 256) : (1@dp, 256, 1@tp, 1)]"
assert blocks.local_region((512, 1024), mesh, device=6) == (slice(256, 512), slice(512, 768))
PICTURES["mesh"] = show(blocks, (512, 1024), mesh)
print(PICTURES["mesh"].text(), end="\n\n")

# %%
# Axes that cut nothing hold replicas, R. Ten rows over four devices: three each, and one on the last.

rows = Layout.sharded((10, 8), mesh, {0: "tp"})
print(explain(rows, "local_region", (10, 8), mesh, 6), end="\n\n")
PICTURES["uneven"] = show(rows, (10, 8), mesh)

# %%
# 3. Operations follow laws
# -------------------------
#
# Tiling repeats a layout by another: four warps, two by two, each with a fragment.

warps = Layout.parse("S[(2, 2) : (2@warpid, 1@warpid)]")
print(explain(fragment, "tile", warps, (2, 2), (16, 8)), end="\n\n")

# %%
# 4. From one layout to another: collectives
# ------------------------------------------
#
# A partial sum over tp, one term on each device, becomes rows cut over tp, then dp: a reduce-scatter, and a slice that
# costs nothing. What is cheapest depends on the links; measure yours.

terms = Placement(((), ()), partial=frozenset({"tp"})).layout((512, 1024), mesh)
cut = Placement((("tp", "dp"), ())).layout((512, 1024), mesh)
plan = plan_redistribution(terms, cut, mesh, "bfloat16", (512, 1024), Link(latency=10e-6, bandwidth=300e9))
assert [step.kind for step in plan.steps] == ["reduce_scatter", "slice"]
assert plan.bytes == 3 * (512 * 1024 // 4) * 2
print(plan.explain(), end="\n\n")

# %%
# 5. What an access to memory costs
# ---------------------------------
#
# Eight rows of 64 half-precision elements in shared memory; eight lanes at a time read pieces of 16 bytes, one a row.
# In rows of 128 bytes these all lie in the same four banks:

tile = Layout.parse("S[(8, 64) : (64, 1)]")
pieces = Access("float16", lanes="column", vector=8)
assert bank_conflicts(tile, (8, 64), pieces).ways == 8
PICTURES["conflicts"] = show(tile, (8, 64), access=pieces)

# %%
# A swizzle under the layout exchanges the pieces of each row, and the conflicts are gone:

swizzled = ComposeLayout(3, 3, 3, tile)
assert bank_conflicts(swizzled, (8, 64), pieces).conflicts == 0
PICTURES["swizzled"] = show(swizzled, (8, 64), access=pieces)

# %%
# In global memory what counts is how many sectors of 32 bytes one access touches. Down a column of floats, every lane
# moves a sector for four bytes:

matrix = Layout.parse("S[(32, 32) : (32, 1)]")
column = Access("float32", lanes="column")
assert sectors_touched(matrix, (32, 32), column).efficiency == 4 / 32
assert sectors_touched(matrix, (32, 32), Access("float32", lanes="row")).efficiency == 1
PICTURES["coalescing"] = show(matrix, (32, 32), kind="coalescing", access=column)
for name in ("conflicts", "swizzled", "coalescing"):
    print(PICTURES[name].title, *PICTURES[name].notes, sep="\n", end="\n\n")

# %%
# The command line draws the same::
#
#     tvm-axe layout show "S[(8, 64) : (64, 1)]" --shape 8x64 --dtype float16 --access column --vector 8 --svg tile.svg
