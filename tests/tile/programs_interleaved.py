"""Programs for Hopper whose tiles are loaded in one order and read in another, as text."""

import tvm
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import tile

LOOPS = {
    "range": "range({})",
    "pipelined": "tile.pipelined({})",
    "one stage": "tile.pipelined({}, stages=1)",
    "two stages": "tile.pipelined({}, stages=2)",
}

USES = {
    "g": "tile.gemm(a, b, c, transpose_b=True)",
    "h": "tile.gemm(b, b, e, transpose_b=True)",
    "i": "tile.gemm(a, a, e, transpose_b=True)",
    "s": "with tile.parallel(64) as x: d[x] = d[x] + s[x]",
    "t": "with tile.parallel(64) as x: d[x] = d[x] + t[x]",
    "x": "with tile.parallel(64) as x: d[x] = d[x] + s[x] * t[x]",
    "y": "with tile.parallel(64) as x: d[x] = d[x] + s[x] * a[x, 3]",
    "z": "with tile.parallel(64) as x: d[x] = d[x] + s[x] * b[5, x]",
}
"""What an iteration computes, of the tiles a and b (matrices), s and t (vectors), into sums."""

LOADS = {
    "a": "tile.copy(A[0, l * 64], a)",
    "b": "tile.copy(A[64, l * 64], b)",
    "s": "tile.copy(S[l, 0], s)",
    "t": "tile.copy(S[l + 1, 0], t)",
}


def interleaved(loads: str, uses: str, loop: str = "range", extent: object = 4, outer: object = 0) -> tirx.PrimFunc:
    """A loop that has `loads` in this order, and then `uses`; with `outer`, as often around it."""
    lines = [f"for l in {LOOPS[loop].format(extent)}:"]
    for made in [LOADS[name] for name in loads] + [USES[name] for name in uses]:
        head, colon, rest = made.partition(": ")
        lines += [f"    {head}{colon.strip()}", f"        {rest}"] if colon else [f"    {made}"]
    if outer:
        lines = [f"for o in range({outer}):", *(f"    {line}" for line in lines)]
    tiles = {name: "(64, 64)" if name in "ab" else "(64,)" for name in loads}
    source = [
        "@T.prim_func",
        "def func(A: T.Buffer((128, 1024), 'float16'), S: T.Buffer((17, 64), 'float16'), n: T.Buffer((8,), 'int32'),",
        "         C: T.Buffer((64, 64), 'float32'), E: T.Buffer((64, 64), 'float32'), D: T.Buffer((64,), 'float32')):",
        "    with tile.kernel(1):",
        *(f"        {name} = tile.shared({shape}, 'float16')" for name, shape in tiles.items()),
        "        c = tile.fragment((64, 64), 'float32')",
        "        e = tile.fragment((64, 64), 'float32')",
        "        d = tile.fragment((64,), 'float32')",
        "        tile.fill(c, 0)",
        "        tile.fill(e, 0)",
        "        tile.fill(d, 0)",
        *(f"        {line}" for line in lines),
        "        tile.copy(c, C[0, 0])",
        "        tile.copy(e, E[0, 0])",
        "        tile.copy(d, D[0])",
    ]
    return tvm.script.from_source("\n".join(source), extra_vars={"tile": tile, "T": T})
