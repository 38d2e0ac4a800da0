"""The demo's program: the second matmul of a transformer's MLP with its epilogue, and three schedules of it.

`out = relu(X @ W + bias) + residual`, float32. With the reduction sharded over the mesh axis "tp", each device
multiplies its columns of X with its rows of W, and the partial products are summed over the devices (Megatron's row
parallel layer). The schedules differ in how that sum meets the epilogue; they are the ones of CoCoNet's model-parallel
example (Jangda et al., ASPLOS 2022, section 2.2). Each is a function that the command line takes by name::

    tvm-axe show tvm_axe/demo/block.py:block --schedule tvm_axe/demo/block.py:mm_fuse
"""

from collections.abc import Callable

from tvm.s_tir.schedule import SBlockRV
from tvm.script import tirx as T

from tvm_axe.layout import Mesh
from tvm_axe.schedule import Schedule

TOKENS, INNER, OUTER = 512, 3072, 768

mesh = Mesh({"tp": 2})


@T.prim_func(s_tir=True)
def block(
    X: T.Buffer((TOKENS, INNER), "float32"),
    W: T.Buffer((INNER, OUTER), "float32"),
    bias: T.Buffer((OUTER,), "float32"),
    residual: T.Buffer((TOKENS, OUTER), "float32"),
    out: T.Buffer((TOKENS, OUTER), "float32"),
) -> None:
    C = T.sblock_alloc_buffer((TOKENS, OUTER), "float32")
    for i, j, k in T.grid(TOKENS, OUTER, INNER):
        with T.sblock("mm"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + X[vi, vk] * W[vk, vj]
    for i, j in T.grid(TOKENS, OUTER):
        with T.sblock("epi"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = T.max(C[vi, vj] + bias[vj], T.float32(0)) + residual[vi, vj]


def mm_ar_c(sch: Schedule) -> SBlockRV:
    """Schedule matmul, all-reduce, compute: the epilogue runs on the whole sum everywhere. Return the all-reduce."""
    mm = sch.get_sblock("mm")
    _, reduce = sch.shard(sch.get_loops(mm)[2], "tp")
    return reduce


def mm_rs_c_ag(sch: Schedule) -> list[SBlockRV]:
    """Schedule matmul, reduce-scatter, compute, all-gather: the epilogue runs on own rows. Return the last three."""
    epi = sch.get_sblock("epi")
    scatter, gather = sch.split_collective(mm_ar_c(sch))
    (gather,) = sch.reorder_collective(gather, [epi])
    return [scatter, epi, gather]


def mm_fuse(sch: Schedule) -> None:
    """Schedule the matmul, then one kernel that reads the peers' partials, sums, computes and writes to the peers."""
    sch.fuse_collective(mm_rs_c_ag(sch))


SCHEDULES: dict[str, Callable[[Schedule], object]] = {
    "MM-AR-C": mm_ar_c,
    "MM-RS-C-AG": mm_rs_c_ag,
    "MM-fuse(RS-C-AG)": mm_fuse,
}
