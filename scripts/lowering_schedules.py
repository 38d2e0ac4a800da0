"""What `record_lowering` hashes of schedules: the tests' small programs, under every primitive, on several meshes.

Extents are those that 2, 3 and 4 devices divide, and those that they don't. A schedule that a rule refuses on some mesh
is recorded as refused.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

from lowering_cases import TESTS, Job, Texts, scheduled
from lowering_names import Layout, with_layouts
from tvm import tirx

import tvm_axe as axe

# Axes, and whether extents divide.
MESHES: tuple[tuple[dict[str, int], bool], ...] = (
    ({"tp": 2}, True),
    ({"tp": 2}, False),
    ({"tp": 3}, False),
    ({"tp": 4}, True),
    ({"dp": 2, "tp": 2}, True),
    ({"dp": 2, "tp": 2}, False),
)
Make = Callable[[axe.Mesh, bool], axe.Schedule]


@cache
def programs() -> Any:
    """The tests' small programs, by their names."""
    spec = importlib.util.spec_from_file_location("small_programs", TESTS / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Programs


def _extents(even: bool, count: int) -> tuple[int, ...]:
    return ((24, 12, 24) if even else (7, 5, 11))[:count]


def _loops(sch: axe.Schedule, name: str) -> list[Any]:
    return sch.get_loops(sch.get_sblock(name))


def _declared(func: tirx.PrimFunc, mesh: axe.Mesh, buffer: str, dims: dict[int, str]) -> tirx.PrimFunc:
    """The function with a parameter declared as sharded."""
    (shape,) = [[int(extent) for extent in param.shape] for param in func.params if param.name == buffer]
    return with_layouts(func, {buffer: Layout.sharded(tuple(shape), mesh, dims)})


def _on_rows(sch: axe.Schedule, *names: str) -> None:
    """Share the first loop of blocks over dp, if the mesh has it."""
    for name in names if "dp" in sch.mesh.names else ():
        sch.shard(_loops(sch, name)[0], "dp")


# ---- relu(A W + bias) + residual -------------------------------------------------------------------------------------


def _block(mesh: axe.Mesh, even: bool, dtype: str = "float32", rows: str | None = None) -> axe.Schedule:
    """The program, its result's rows sharded over an axis or not."""
    func = programs().block(*_extents(even, 3), dtype).func
    return axe.Schedule(func if rows is None else _declared(func, mesh, "out", {0: rows}), mesh=mesh)


def _summed(mesh: axe.Mesh, even: bool, dim: int) -> tuple[axe.Schedule, Any, Any]:
    """The reduction over tp; if `dim` isn't that of the rows, they are over dp, where the mesh has it."""
    rows = "dp" if dim == 1 and "dp" in mesh.names else None
    sch = _block(mesh, even, rows=rows)
    sums, reduce = sch.shard(_loops(sch, "mm")[2], "tp")
    if rows is not None:
        _on_rows(sch, "mm_rf", "mm", "epi")
    return sch, sums, reduce


def _untouched(mesh: axe.Mesh, even: bool) -> axe.Schedule:
    return _block(mesh, even)


def _reduced(mesh: axe.Mesh, even: bool, dim: int = 0) -> axe.Schedule:
    return _summed(mesh, even, dim)[0]


def _split(mesh: axe.Mesh, even: bool, dim: int = 0, root: int | None = None) -> axe.Schedule:
    sch, _, reduce = _summed(mesh, even, dim)
    sch.split_collective(reduce, dim, root)
    return sch


def _sliced(mesh: axe.Mesh, even: bool, dim: int) -> tuple[axe.Schedule, list[Any]]:
    sch, sums, reduce = _summed(mesh, even, dim)
    scatter, gather = sch.split_collective(reduce, dim)
    epi = sch.get_sblock("epi")
    (gather,) = sch.reorder_collective(gather, [epi])
    return sch, [sums, scatter, epi, gather]


def _reordered(mesh: axe.Mesh, even: bool, dim: int = 0) -> axe.Schedule:
    return _sliced(mesh, even, dim)[0]


def _fused(mesh: axe.Mesh, even: bool, dim: int = 0) -> axe.Schedule:
    sch, stages = _sliced(mesh, even, dim)
    sch.fuse_collective(stages[1:])
    return sch


def _overlapped(mesh: axe.Mesh, even: bool, chunks: int, fuse: bool, dim: int = 0) -> axe.Schedule:
    sch, stages = _sliced(mesh, even, dim)
    if fuse:
        sch.fuse_collective(stages[1:])
    sch.overlap(stages[:2] if fuse else stages, "tp", chunks)
    return sch


def _columns(mesh: axe.Mesh, even: bool) -> axe.Schedule:
    func = programs().block(*_extents(even, 3)).func
    dims = {1: "tp"} | ({0: "dp"} if "dp" in mesh.names else {})
    sch = axe.Schedule(_declared(func, mesh, "out", dims), mesh=mesh)
    for name in ("mm", "epi"):
        sch.shard(_loops(sch, name)[1], "tp")
    _on_rows(sch, "mm", "epi")
    return sch


def _rows_gathered(mesh: axe.Mesh, even: bool) -> axe.Schedule:
    sch = _block(mesh, even)
    sch.shard(_loops(sch, "mm")[0], "tp")
    sch.redistribute(sch.get_sblock("epi"), "C", "tp")
    return sch


def _tiled(mesh: axe.Mesh, even: bool) -> axe.Schedule:
    sch = _block(mesh, even)
    sch.tile_kernel(sch.get_sblock("mm"), "matmul", sch.get_sblock("epi"), block_m=64, block_n=16)
    return sch


def _tiled_sums(mesh: axe.Mesh, even: bool, fuse: bool) -> axe.Schedule:
    sch, stages = _sliced(mesh, even, 0)
    sch.tile_kernel(stages[0], "matmul")
    if fuse:
        sch.fuse_collective(stages[1:])
    return sch


def _tiled_columns(mesh: axe.Mesh, even: bool) -> axe.Schedule:
    sch = _columns(mesh, even)
    sch.tile_kernel(sch.get_sblock("mm"), "matmul")
    return sch


def _laid_out(mesh: axe.Mesh, even: bool, buffer: str, columns_first: bool) -> axe.Schedule:
    sch = _block(mesh, even)
    rows, columns, depth = _extents(even, 3)
    shape = {"C": (rows, columns), "W": (depth, columns), "out": (rows, columns)}[buffer]
    strides = (1, shape[0] + 3) if columns_first else (shape[1] + 1, 1)
    sch.shard(_loops(sch, "mm")[2], "tp")
    sch.set_layout(buffer, f"S[{shape} : {strides}]")
    return sch


def _half(mesh: axe.Mesh, even: bool) -> axe.Schedule:
    sch = _block(mesh, even, "float16")
    sch.shard(_loops(sch, "mm")[2], "tp")
    return sch


def _left_sharded(mesh: axe.Mesh, even: bool) -> axe.Schedule:
    sch = _block(mesh, even, rows="tp")
    _, reduce = sch.shard(_loops(sch, "mm")[2], "tp")
    _, gather = sch.split_collective(reduce)
    (gather,) = sch.reorder_collective(gather, [sch.get_sblock("epi")])
    sch.as_slice(gather)
    return sch


# ---- Consumers that read each other; a norm --------------------------------------------------------------------------


def _chain(mesh: axe.Mesh, even: bool, behind: tuple[str, ...], dim: int = 0, fuse: bool = False) -> axe.Schedule:
    sch = axe.Schedule(programs().chain(*_extents(even, 3)).func, mesh=mesh)
    _, reduce = sch.shard(_loops(sch, "mm")[2], "tp")
    scatter, gather = sch.split_collective(reduce, dim)
    consumers = [sch.get_sblock(name) for name in behind]
    gathers = sch.reorder_collective(gather, consumers) if behind else [gather]
    if fuse:
        sch.fuse_collective([scatter, *consumers, *gathers])
    return sch


def _norm(mesh: axe.Mesh, even: bool, dim: int) -> axe.Schedule:
    func = programs().norm(*_extents(even, 3)).func
    over_rows = dim == 1 and "dp" in mesh.names
    sch = axe.Schedule(_declared(func, mesh, "out", {0: "dp"}) if over_rows else func, mesh=mesh)
    _, reduce = sch.shard(_loops(sch, "mm")[2], "tp")
    if over_rows:
        _on_rows(sch, "mm_rf", "mm", "squares", "scale")
    _, gather = sch.split_collective(reduce, dim)
    sch.reorder_collective(gather, [sch.get_sblock("squares"), sch.get_sblock("scale")])
    return sch


# ---- Gradients, a pipeline, experts ----------------------------------------------------------------------------------


def _update(
    mesh: axe.Mesh, even: bool, dim: int | None, slices: tuple[int, ...] = (), fuse: bool = False, half: bool = False
) -> axe.Schedule:
    dtype = "float16" if half else "float32"
    sch = axe.Schedule(programs().update(mesh.axis_size("tp"), *_extents(even, 2), dtype).func, mesh=mesh)
    reduce = sch.all_reduce(_loops(sch, "sum")[2], "tp")
    if dim is None:
        return sch
    _, gather = sch.split_collective(reduce, dim)
    consumers = [sch.get_sblock(name) for name in ("state", "step")]
    gathers = sch.reorder_collective(gather, consumers)
    ends = [sch.as_slice(gather) if n in slices else gather for n, gather in enumerate(gathers)]
    if fuse:
        sch.fuse_collective([sch.get_sblock("sum"), *map(sch.get_sblock, ("state", "step")), *ends])
    return sch


def _pipeline(mesh: axe.Mesh, even: bool, shift: int, given: bool = False) -> axe.Schedule:
    func = programs().pipeline(mesh.axis_size("tp"), 8 if even else 5, shift).func
    for buffer in ("X", "out") if given else ("out",):
        func = _declared(func, mesh, buffer, {0: "tp"})
    sch = axe.Schedule(func, mesh=mesh)
    for name in ("double", "add"):
        sch.shard(_loops(sch, name)[0], "tp")
    sch.send(sch.get_sblock("send"), "tp")
    return sch


def _experts(mesh: axe.Mesh, even: bool, dim: int | None, back: bool = False) -> axe.Schedule:
    func = programs().experts(*((12, 12, 4, 3) if even else (5, 7, 3, 2))).func
    sch = axe.Schedule(_declared(func, mesh, "Y", {0 if back else 1: "tp"}), mesh=mesh)
    sch.shard(_loops(sch, "dispatch")[0], "tp")
    sch.shard(_loops(sch, "mm")[1], "tp")
    sch.redistribute(sch.get_sblock("mm"), "D", "tp", dim)
    sch.shard(_loops(sch, "combine")[0 if back else 1], "tp")
    if back:
        sch.redistribute(sch.get_sblock("combine"), "H", "tp", 0)
    return sch


_MAKERS: dict[str, Make] = {
    "block/untouched": _untouched,
    "block/all_reduce": _reduced,
    "block/all_reduce-rows": partial(_reduced, dim=1),
    "block/split-0": _split,
    "block/split-1": partial(_split, dim=1),
    "block/root-0": partial(_split, root=0),
    "block/root-1": partial(_split, root=1),
    "block/reorder-0": _reordered,
    "block/reorder-1": partial(_reordered, dim=1),
    "block/fuse-0": _fused,
    "block/fuse-1": partial(_fused, dim=1),
    "block/overlap-2": partial(_overlapped, chunks=2, fuse=False),
    "block/overlap-fuse-2": partial(_overlapped, chunks=2, fuse=True),
    "block/overlap-fuse-3": partial(_overlapped, chunks=3, fuse=True),
    "block/columns": _columns,
    "block/rows-redistribute": _rows_gathered,
    "block/tile_kernel": _tiled,
    "block/tile_kernel-sums": partial(_tiled_sums, fuse=False),
    "block/tile_kernel-fuse": partial(_tiled_sums, fuse=True),
    "block/tile_kernel-columns": _tiled_columns,
    "block/set_layout-C": partial(_laid_out, buffer="C", columns_first=False),
    "block/set_layout-W": partial(_laid_out, buffer="W", columns_first=True),
    "block/set_layout-out": partial(_laid_out, buffer="out", columns_first=True),
    "block/float16": _half,
    "block/as_slice": _left_sharded,
    "chain/split": partial(_chain, behind=()),
    "chain/reorder-0": partial(_chain, behind=("double", "first", "second")),
    "chain/reorder-1": partial(_chain, behind=("double", "first", "second"), dim=1),
    "chain/fuse": partial(_chain, behind=("double", "first", "second"), fuse=True),
    "chain/reorder-flip": partial(_chain, behind=("double", "first", "second", "flip")),
    "norm/rows": partial(_norm, dim=0),
    "norm/columns": partial(_norm, dim=1),
    "update/all_reduce": partial(_update, dim=None),
    "update/float16": partial(_update, dim=None, half=True),
    "update/reorder-0": partial(_update, dim=0),
    "update/reorder-1": partial(_update, dim=1),
    "update/as_slice-0": partial(_update, dim=0, slices=(0,)),
    "update/as_slice-both": partial(_update, dim=1, slices=(0, 1)),
    "update/as_slice-fuse": partial(_update, dim=0, slices=(0,), fuse=True),
    "pipeline/send": partial(_pipeline, shift=1),
    "pipeline/send-given": partial(_pipeline, shift=1, given=True),
    "pipeline/send-back": partial(_pipeline, shift=-1),
    "experts/gather": partial(_experts, dim=None),
    "experts/all-to-all": partial(_experts, dim=1),
    "experts/there-and-back": partial(_experts, dim=1, back=True),
    "experts/of-a-reduction": partial(_experts, dim=2),
}


def _made(name: str, axes: dict[str, int], even: bool) -> Texts:
    return scheduled(_MAKERS[name](axe.Mesh(axes), even))


def small_schedules() -> Iterator[tuple[str, Job]]:
    """Each of the schedules on each mesh."""
    for name in _MAKERS:
        for axes, even in MESHES:
            on = ",".join(f"{axis}={size}" for axis, size in axes.items())
            yield f"schedules/{name}/{on}/{'even' if even else 'uneven'}", partial(_made, name, axes, even)


GROUPS = (small_schedules,)
