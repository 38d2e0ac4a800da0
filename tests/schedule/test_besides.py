"""beside: which blocks may be marked, and that a send runs beside what doesn't need it."""

import numpy as np
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.layout import Layout, Mesh

RING = 2


@T.prim_func(s_tir=True)
def ring(K: T.Buffer((RING, 3), "float32"), Q: T.Buffer((RING, 3), "float32"), out: T.Buffer((RING, 3), "float32")):
    """A product with the own keys, and one with the next device's."""
    passed, own = T.sblock_alloc_buffer((RING, 3), "float32"), T.sblock_alloc_buffer((RING, 3), "float32")
    for p, i in T.grid(RING, 3):
        with T.sblock("pass"):
            d, v = T.axis.remap("SS", [p, i])
            passed[d, v] = K[(d + 1) % RING, v]
    for p, i in T.grid(RING, 3):
        with T.sblock("own"):
            d, v = T.axis.remap("SS", [p, i])
            own[d, v] = Q[d, v] * K[d, v]
    for p, i in T.grid(RING, 3):
        with T.sblock("out"):
            d, v = T.axis.remap("SS", [p, i])
            out[d, v] = own[d, v] + Q[d, v] * passed[d, v]


def test_a_send_beside_products(launched, refused):
    mesh = Mesh({"sp": RING})
    layouts = {name: Layout.sharded((RING, 3), mesh, {0: "sp"}) for name in ("K", "Q", "out")}
    sch = axe.Schedule(axe.with_layouts(ring, layouts), mesh=mesh)
    refused(sch, sch.beside, sch.get_sblock("own"), words=("'own' computes, and neither copies nor reduces",))
    sch.send("pass", "sp")
    for block in ("own", "out"):
        sch.shard(block, "p", "sp")
    sch.beside("pass")
    exe = axe.compile(sch, work_dir=None)
    assert exe.lowered.forms == ("pass: a send beside own",), exe.lowered.forms
    K, Q = np.random.default_rng(0).integers(-9, 9, (2, RING, 3)).astype("float32")
    workers = launched(mesh)
    exe.run(workers, K * np.nan, Q)
    np.testing.assert_array_equal(exe.run(workers, K, Q), Q * K + Q * np.roll(K, -1, 0))
