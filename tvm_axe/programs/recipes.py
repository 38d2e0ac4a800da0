"""The schedules that programs share: CoCoNet's AR-C and RS-C-AG, and what is fused and overlapped of them.

What a program computes behind a collective is given as *kernels*: groups of names of blocks, in program order, each
group one nest over the rows of the first. So C is one kernel in every schedule, and schedules differ in communication
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.s_tir.schedule import SBlockRV

from tvm_axe.programs.program import Rows
from tvm_axe.schedule import Schedule

__all__ = ["Recipe", "chunks_of", "data_parallel", "matmul_then", "on_slices", "received"]

Recipe = Callable[[Schedule], object]

CHUNKS = 4
"""More chunks hide more of the communication, and each costs a wait of all devices."""


def data_parallel(*kernels: Sequence[str], states: Sequence[str] = (), sums: Sequence[str] = ()) -> dict[str, Recipe]:
    """Return AR-C, RS-C-AG and fuse(RS-C-AG) of gradients that block "sum" adds up over the mesh axis "dp".

    Parameters
    ----------
    *kernels : Sequence[str]
        What is computed of the sum.
    states : Sequence[str]
        The blocks among them whose results stay slices.
    sums : Sequence[str]
        Sums over rows, computed between the first kernel and the second.
    """

    def reduce(sch: Schedule) -> SBlockRV:
        total = sch.get_sblock("sum")
        return sch.all_reduce(sch.get_loops(total)[-1], "dp")

    def ar_c(sch: Schedule) -> None:
        reduce(sch)
        for names in kernels:
            fuse_rows(sch, [sch.get_sblock(name) for name in names])

    def slices(sch: Schedule) -> tuple[SBlockRV, list[list[SBlockRV]], list[SBlockRV]]:
        return on_slices(sch, reduce(sch), kernels, states=states, sums=sums)

    def rs_c_ag(sch: Schedule) -> None:
        _, groups, _ = slices(sch)
        for blocks in groups:
            if len(blocks) > 1:
                sch.fuse_collective(blocks)

    def fused(sch: Schedule) -> None:
        scatter, groups, gathers = slices(sch)
        groups[0].insert(0, scatter)
        groups[-1] += gathers
        for blocks in groups:
            sch.fuse_collective(blocks)

    return {"AR-C": ar_c, "RS-C-AG": rs_c_ag, "fuse(RS-C-AG)": fused}


def matmul_then(
    share: Callable[[Schedule], tuple[SBlockRV, SBlockRV]], kernel: Sequence[str], extent: int, dim: int, what: str
) -> dict[str, Recipe]:
    """Return MM-AR-C, MM-RS-C-AG, MM-fuse(RS-C-AG) and ol(MM, fuse(RS-C-AG)) over mesh axis "tp", `what` for C.

    Parameters
    ----------
    share : Callable[[Schedule], tuple[SBlockRV, SBlockRV]]
        A function that shares the matmul; it returns the block of its partial products and their all-reduce.
    kernel : Sequence[str]
        What is computed of the product.
    extent, dim : int
        The dimension of the product that is scattered, and how long it is.
    """

    def ar_c(sch: Schedule) -> None:
        share(sch)
        fuse_rows(sch, [sch.get_sblock(name) for name in kernel])

    def rs_c_ag(sch: Schedule) -> None:
        _, (blocks,), _ = on_slices(sch, share(sch)[1], [kernel], dim)
        if len(blocks) > 1:
            sch.fuse_collective(blocks)

    def fused(sch: Schedule) -> tuple[SBlockRV, SBlockRV]:
        partial, reduce = share(sch)
        scatter, (blocks,), gathers = on_slices(sch, reduce, [kernel], dim)
        sch.fuse_collective([scatter, *blocks, *gathers])
        return partial, scatter

    def overlapped(sch: Schedule) -> None:
        sch.overlap(fused(sch), "tp", chunks_of(extent, sch.mesh["tp"]))

    return {
        f"MM-AR-{what}": ar_c,
        f"MM-RS-{what}-AG": rs_c_ag,
        f"MM-fuse(RS-{what}-AG)": fused,
        f"ol(MM, fuse(RS-{what}-AG))": overlapped,
    }


def received(name: str, rows: Rows) -> int:
    """Return the bytes of the schedule `name` of these, where the tensor that is summed is the one that is gathered."""
    if "AR-" in name:
        return rows.all_reduced
    return rows.fused if "fuse(RS-" in name else rows.reduce_scattered + rows.all_gathered


def chunks_of(extent: int, devices: int) -> int:
    """Into how many chunks a device's share of `extent` is cut: at most `CHUNKS`, which must divide it."""
    share = -(-extent // devices)
    return next(chunks for chunks in range(CHUNKS, 0, -1) if share % chunks == 0)


def on_slices(
    sch: Schedule,
    reduce: SBlockRV,
    kernels: Sequence[Sequence[str]],
    dim: int = 0,
    states: Sequence[str] = (),
    sums: Sequence[str] = (),
) -> tuple[SBlockRV, list[list[SBlockRV]], list[SBlockRV]]:
    """Split the all-reduce `reduce` and have `kernels` compute on its slices.

    Returns
    -------
    scatter : SBlockRV
        The reduce-scatter.
    groups : list[list[SBlockRV]]
        The blocks of each kernel with the copies of slices that it leaves to the caller.
    gathers : list[SBlockRV]
        What is gathered behind them.
    """
    scatter, gather = sch.split_collective(reduce, dim)
    first, *rest = [[sch.get_sblock(name) for name in names] for names in kernels]
    consumers = [*first, *(sch.get_sblock(name) for name in sums), *(block for blocks in rest for block in blocks)]
    copies: dict[str, SBlockRV] = {}
    gathers = []
    for copy in sch.reorder_collective(gather, consumers):
        name = str(sch.get(sch.get_producers(copy)[0]).name_hint)
        if name in states:
            copies[name] = sch.as_slice(copy)
        else:
            gathers.append(copy)
    groups = [
        [block for name in names for block in (sch.get_sblock(name), *([copies[name]] if name in copies else []))]
        for names in kernels
    ]
    return scatter, groups, gathers


def fuse_rows(sch: Schedule, blocks: Sequence[SBlockRV]) -> None:
    """Compute `blocks` in one nest over the rows of the first, each after the first from what earlier ones write."""
    row = sch.get_loops(blocks[0])[0]
    for block in blocks[1:]:
        sch.reverse_compute_at(block, row)
