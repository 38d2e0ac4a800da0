"""The words of a tile program, for use inside ``@T.prim_func``.

A tile program says what moves and what is computed, tile by tile; which thread does what, where an element of a tile
lives, which instruction multiplies and how loads run ahead is inferred (`tvm_axe.tile.explain` prints it). A matrix
product of 256 x 256 by 256 x 128:

>>> from tvm.script import tirx as T
>>> from tvm_axe import tile
>>> @T.prim_func
... def matmul(A: T.Buffer((256, 256), "float16"), B: T.Buffer((256, 128), "float16"),
...            C: T.Buffer((256, 128), "float16")):
...     with tile.kernel(2, 1) as (m, n):
...         a = tile.shared((128, 64), "float16")
...         b = tile.shared((64, 128), "float16")
...         c = tile.fragment((128, 128), "float32")
...         tile.fill(c, 0)
...         for k in tile.pipelined(4, stages=2):
...             tile.copy(A[m * 128, k * 64], a)
...             tile.copy(B[k * 64, n * 128], b)
...             tile.gemm(a, b, c)
...         tile.copy(c, C[m * 128, n * 128])

A ``with`` opens what runs at once and in no order (`kernel`, `parallel`), a ``for`` what runs in order (`pipelined`,
``range``), a ``while`` what runs as long as a condition on scalars holds; ``break`` ends them (`tvm_axe.tile.ending`).
The function stays an ordinary one: it prints as TVMScript, with upstream's tile primitives, and parses back.

In a `copy`, ``A[m * 128, k * 64]`` names the tile that starts there, of the other side's shape; a slice names it in
full. A tile may reach over the end of a tensor in global memory: what lies outside reads as zero and is not written.

Parameters of the function are tensors and scalars, such as the number of the device that runs: ``me: T.int32``. A
scalar is used wherever an integer or a number is; it is the same for all blocks. A tensor is row-major, each element
right behind the one before, unless it has strides: columns of a larger one, a transposed one, a row for all
(`tvm_axe.tile.strides`).

Kernels that run at once, on one device or on several whose memory each other addresses, meet in flags: int32 in global
memory that are 0 to begin with. `tvm_axe.tile.flags` has their words: `signal` sets flags, and `wait` goes on when they
are set:

>>> @T.prim_func
... def doubled(A: T.Buffer((8, 64), "float32"), B: T.Buffer((8, 64), "float32"),
...             turn: T.int32, ready: T.Buffer((8,), "int32"), done: T.Buffer((8,), "int32")):
...     with tile.kernel(8) as i:
...         a = tile.fragment((1, 64), "float32")
...         tile.wait(ready[i], turn)
...         tile.copy(A[i, 0], a)
...         with tile.parallel(1, 64) as (x, y):
...             a[x, y] = a[x, y] * 2.0
...         tile.copy(a, B[i, 0])
...         tile.signal(done[i], turn)

A block may wait for what earlier kernels, other devices or the host set; one that waits for another block of its own
kernel waits for ever where that block is not running yet. On a CPU, a device's blocks run in the order of the grid.

`sum`, `max` and `min` reduce a tile along a dimension, and `reduce` does by a function of one's own:
`tvm_axe.tile.reducers`.

Blocks that add to one element, keep the largest there, or swap it, do so in no order: `tvm_axe.tile.atomics`. Order
in a row, by `argmax`, `argmin`, `sort` and `top_k`, and sums up to each element, `cumsum`: `tvm_axe.tile.order`.
Random numbers of counters: `tvm_axe.tile.philox`. What a kernel has is printed from it by `tvm_axe.tile.printing`.

Numbers that are to be tried out, such as the extents of tiles, are left open by `tvm_axe.tile.knobs`. Sizes that
callers choose are variables of the tensors' shapes and strides; what they have in common is said by `assume`
(`tvm_axe.tile.assuming`), so that rows are loaded by TMA and vectors as where sizes are known.

Tensors that lie on all devices of a mesh axis are parameters of their own: `tvm_axe.tile.mesh`.

A function may have several kernels, which run one after the other; each sees what those before it have stored to global
memory. What one leaves for the next, and no caller is to see, it leaves in `scratch`. Sums of rows in two pieces each,
and then of the pieces:

>>> @T.prim_func
... def sums(A: T.Buffer((64, 256), "float32"), B: T.Buffer((64,), "float32")):
...     parts = tile.scratch((2, 64), "float32")
...     with tile.kernel(4, 2) as (m, s):
...         a = tile.fragment((16, 128), "float32")
...         part = tile.fragment((16,), "float32")
...         tile.copy(A[m * 16, s * 128], a)
...         tile.sum(a, part)
...         tile.copy(part, parts[s, m * 16])
...     with tile.kernel(1):
...         every = tile.fragment((2, 64), "float32")
...         total = tile.fragment((64,), "float32")
...         tile.copy(parts, every)
...         tile.sum(every, total, axis=0)
...         tile.copy(total, B)

Such a function is compiled, called, exported, tuned and explained as one; `tvm_axe.tile.sequences` reads it.

Source: TileLang (arXiv:2504.17577), section 3, for the level; the representation is TIRx's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tvm import ir, sym, tirx
from tvm.script import tirx as T
from tvm.script.tirx import tile as primitives

from tvm_axe import _tvm
from tvm_axe.errors import TileError
from tvm_axe.layout import ComposeLayout, Layout

FRAGMENT = "local.fragment"
"""Storage scope of a tile whose elements are spread over the registers of a block's threads."""

GRID = "axe.grid"
"""Annotation of a kernel's grid loops: 0 on the outermost, 1 on the next, ..."""

STAGES = "axe.stages"
"""Annotation of a loop whose loads run ahead: how many iterations' tiles are held at once."""

LAYOUT = "axe.layout"
"""Annotation of a tile's allocation: its layout's canonical text, instead of the inferred one."""

DEVICE = "axe.device"
"""Annotation of the outermost grid loop: the scalar parameter that is the coordinate of the device that runs."""

DISTINCT = "axe.distinct"
"""Annotation of the outermost loop of a `parallel` whose author says that data used as indices are distinct."""

ATOMICS = ("add", "max", "min")
"""How a copy joins its values with what a tensor holds."""

OPTIONS = ("threads", "persistent", "swizzle", "cluster", "roles", "order", "blocks_per_sm", "epilogue_tile")
"""What `kernel` takes beside the grid; each becomes the annotation ``axe.<name>`` of the outermost grid loop."""


@contextlib.contextmanager
def kernel(
    *grid: int | tirx.Expr,
    threads: int | tirx.Expr | None = None,
    persistent: bool | tirx.Expr | None = None,
    swizzle: int | tirx.Expr | None = None,
    cluster: Sequence[int] | None = None,
    roles: str | None = None,
    order: str | None = None,
    blocks_per_sm: int | tirx.Expr | None = None,
    epilogue_tile: Sequence[int] | None = None,
    device: tirx.Var | None = None,
) -> Iterator[Any]:
    """Open a kernel: one block for every point of `grid`, in no order; yields the block's coordinates.

    Parameters
    ----------
    grid : int or Expr
        One to three extents, the slowest first.
    threads : int, optional
        Threads of a block that compute, instead of the inferred number. On a GPU a multiple of 32.
    persistent : bool, optional
        Whether as many blocks start as the device holds and take tile after tile, instead of one block a point.
    swizzle : int, optional
        Rasterization: that many consecutive points of the last dimension but one are taken before the last advances,
        so that blocks that run at once share operands in cache. 1 is row-major order.
    cluster : sequence of int, optional
        Neighbouring blocks, a dimension each, that may load shared operands once (multicast). A hint that no
        target takes up yet: blocks load for themselves (docs/decisions/0013 says why).
    roles : str, optional
        ``"specialized"``: a producer warp loads, the others compute. ``"uniform"``: every warp does both. Left out, it
        is specialized where products, loads and flags allow it; `explain` says what doesn't.
    order : str, optional
        ``"given"``: points are taken in the order of the grid. Without it, a dimension along which loops grow longer
        is taken from its end.
    blocks_per_sm : int, optional
        How many blocks a multiprocessor of a GPU runs at once: each has its part of the registers and of the shared
        memory, so that rings of tiles are less deep. Without it a block may have all of them. A program that doesn't
        fit is refused.
    epilogue_tile : sequence of int, optional
        Rows and columns of the pieces in which a specialized kernel's storing warp writes tiles that leave through
        shared memory, each complete before the next begins; without it a tile is written at once. It asks for a
        storing warp, which a specialized kernel with a `signal` has anyway.
    device : Var, optional
        The scalar parameter that is the coordinate of the device that runs, from 0 up to the devices of the mesh
        tensors among the parameters (`tvm_axe.tile.mesh`), which need it.

    Raises
    ------
    TileError
        Not one to three extents, an option that is not positive, or an unknown word for `roles` or `order`.
    """
    if not 1 <= len(grid) <= 3:
        raise TileError(f"kernel: takes 1 to 3 extents, got {len(grid)}")
    if roles not in (None, "specialized", "uniform"):
        raise TileError(f"kernel: roles is 'specialized' or 'uniform', got {roles!r}")
    if order not in (None, "given"):
        raise TileError(f"kernel: order is 'given' or left out, got {order!r}")
    values = (threads, persistent, swizzle, cluster, roles, order, blocks_per_sm)
    options: dict[str, Any] = {f"axe.{name}": value for name, value in zip(OPTIONS, values) if value is not None}
    check_options(options)
    if epilogue_tile is not None:
        if len(epilogue_tile) != 2 or any(extent < 1 for extent in epilogue_tile):
            raise TileError(
                f"kernel: epilogue_tile has two positive extents, rows and columns of a piece, got {epilogue_tile}"
            )
        options["axe.epilogue_tile"] = [int(extent) for extent in epilogue_tile]
    if isinstance(persistent, bool):  # as upstream's annotations have it
        options["axe.persistent"] = int(persistent)
    if cluster is not None:
        if len(cluster) != len(grid) or any(extent < 1 for extent in cluster):
            raise TileError(
                f"kernel: cluster has one positive extent for each of the grid's {len(grid)} dimensions, got {cluster}"
            )
        options["axe.cluster"] = [int(extent) for extent in cluster]
    if device is not None:
        options[DEVICE] = device
    with contextlib.ExitStack() as loops:
        points = []
        for dimension, extent in enumerate(grid):
            annotations = {GRID: dimension, **(options if dimension == 0 else {})}
            points.append(loops.enter_context(T.serial(0, extent, annotations=annotations)))
        yield loops.enter_context(_named("kernel", points))


@contextlib.contextmanager
def parallel(*extents: Any, distinct: bool = False) -> Iterator[Any]:
    """Run the body once for every point of `extents`, in no order; yields the point's coordinates.

    The body stores elements: ``c[i, j] = T.max(c[i, j] + bias[j], 0)``. It may read and write tiles and tensors in
    global memory, by any index, under ``if``, so that gathers, masks and scatters are written here; it may give names
    to values, and sum a few terms in a small loop (`tvm_axe.tile.bodies`).

    Parameters
    ----------
    *extents : int
        How many points there are along each dimension.
    distinct : bool
        Whether no two points of the kernel store to one element where the index is data, loaded from a tensor or a
        tile, as in ``B[to[i], j] = a[i, j]`` with a permutation in `to`. Nothing checks it. Without it, a store is
        refused in which the data alone tell two points apart.

    Raises
    ------
    TileError
        There are no extents.
    """
    if not extents:
        raise TileError("parallel: takes at least one extent")
    annotations: dict[str, Any] = {DISTINCT: 1} if distinct else {}
    with contextlib.ExitStack() as loops:
        points = [
            loops.enter_context(T.parallel(0, extent, annotations={} if dimension else annotations))
            for dimension, extent in enumerate(extents)
        ]
        yield loops.enter_context(_named("parallel", points))


@contextlib.contextmanager
def _named(word: str, points: Sequence[tirx.Var]) -> Iterator[Any]:
    """Yield the coordinates of a ``with``; say how they are named if what stands behind ``as`` doesn't take them."""
    try:
        yield tuple(points) if len(points) > 1 else points[0]
    except Exception as error:
        if isinstance(error, TileError) or not _tvm.is_of_naming(error):
            raise
        names = "ijklmnop"[: len(points)]
        valid = f"({', '.join(names)})" if len(points) > 1 else "i, without brackets"
        extents = "1 extent, so 1 coordinate" if len(points) == 1 else f"{len(points)} extents, so as many coordinates"
        raise TileError(f"{word}: it has {extents}; valid is `as {valid}`") from error


def pipelined(start: Any, stop: Any = None, *, stages: Any = None) -> Any:
    """Open a loop, in order, whose loads run up to ``stages - 1`` iterations ahead; yields its variable.

    Parameters
    ----------
    start, stop : int or Expr
        The loop runs from `start` up to `stop`, or from 0 up to `start` where there is no `stop`.
    stages : int, optional
        How many iterations' tiles are held at once; inferred if left out, and where a knob's value is 0.

    Raises
    ------
    TileError
        `stages` is less than 1.
    """
    if isinstance(stages, int) and stages < 1:
        raise TileError(f"pipelined: stages must be at least 1, got {stages}")
    return T.serial(start, stop, annotations={STAGES: 0 if stages is None else stages})


def shared(shape: Sequence[Any], dtype: str, *, layout: Layout | ComposeLayout | None = None) -> tirx.Buffer:
    """Allocate a tile that all threads of a block see: shared memory on a GPU, a buffer in the core's cache on a CPU.

    Parameters
    ----------
    shape : sequence of int
        Its extents: constants, names of numbers, knobs.
    dtype : str
        The type of an element.
    layout : Layout or ComposeLayout, optional
        Where its elements lie, instead of the inferred layout; a `ComposeLayout` has a swizzle.
    """
    return _allocate(shape, dtype, "shared", layout)


def fragment(shape: Sequence[Any], dtype: str, *, layout: Layout | None = None) -> tirx.Buffer:
    """Allocate a tile, as `shared` does, that is spread over the registers of a block's threads."""
    return _allocate(shape, dtype, FRAGMENT, layout)


def local(shape: Sequence[Any], dtype: str) -> tirx.Buffer:
    """Allocate a small tile, as `shared` does, of which every thread holds all, such as a running length."""
    return _allocate(shape, dtype, "local", None)


def scratch(shape: Sequence[Any], dtype: str) -> tirx.Buffer:
    """Allocate a tensor in global memory that the function's kernels share, and that no caller gives or sees.

    It stands before the kernels. It is there for one call, and holds anything when that begins: a kernel before the one
    that reads it fills it.

    Parameters
    ----------
    shape : sequence of int or Expr
        Its extents: constants, knobs, and what is computed of the parameters' extents and scalars.
    dtype : str
        The type of an element.
    """
    return T.alloc_buffer(tuple(shape), dtype, scope="global")


def _allocate(shape: Sequence[Any], dtype: str, scope: str, layout: Layout | ComposeLayout | None) -> tirx.Buffer:
    annotations = {} if layout is None else {LAYOUT: str(layout)}
    return T.alloc_buffer(tuple(shape), dtype, scope=scope, annotations=annotations)


def copy(src: Any, dst: Any, *, atomic: str | None = None) -> Any:
    """Copy a tile, between any two of global memory, shared memory, fragments and locals; casts where types differ.

    Parameters
    ----------
    src, dst : Buffer, BufferRegion or an element
        A tile, a slice of one, or the element at which a tile of the other side's shape starts. Extents of 1 in front
        don't count.
    atomic : str, optional
        ``"add"``: add to what `dst`, in global memory, holds, in no order; ``"max"``, ``"min"``: keep the larger or
        the smaller of both (`tvm_axe.tile.atomics`). The program touches the tensor in no other way
        then, unless flags order that (`tvm_axe.tile.joining`).

    Raises
    ------
    TileError
        Both sides are elements; the shapes differ; `atomic` is none of these.
    """
    if atomic not in (None, *ATOMICS):
        raise TileError(f"copy: atomic is 'add', 'max' or 'min', got {atomic!r}")
    src, dst = _sides("copy", src, dst)
    return primitives.copy(dst, src, **({} if atomic is None else {"atomic": atomic}))


def cast(src: Any, dst: Any) -> Any:
    """Copy a tile into one of another type, rounding to the nearest; the same as `copy`."""
    return copy(src, dst)


def fill(dst: Any, value: float) -> Any:
    """Set every element of the tile `dst` to `value`, a number or an expression."""
    return primitives.fill(dst, tirx.const(value, _buffer(dst).dtype) if isinstance(value, (int, float)) else value)


def gemm(
    a: Any,
    b: Any,
    c: Any,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
    accumulate: bool = True,
    instruction: str | None = None,
) -> Any:
    """Multiply tiles: ``c += a @ b``, or ``c = a @ b`` with ``accumulate=False``.

    Parameters
    ----------
    a : Buffer or BufferRegion
        A tile of (M, K), or of (K, M) with `transpose_a`, in shared memory or a fragment.
    b : Buffer or BufferRegion
        A tile of (K, N), or of (N, K) with `transpose_b`, in shared memory.
    c : Buffer
        A fragment of (M, N), of float32 (int32 for integers, or the operands' type), in which products are accumulated.
    transpose_a, transpose_b : bool
        Whether an operand is stored transposed.
    accumulate : bool
        Whether `c` is added to, and not set.
    instruction : str, optional
        ``"wgmma"``, ``"mma"`` or ``"fma"`` instead of the inferred one.

    Raises
    ------
    TileError
        `instruction` is none of these.
    """
    if instruction not in (None, "wgmma", "mma", "fma"):
        raise TileError(f"gemm: instruction is 'wgmma', 'mma' or 'fma', got {instruction!r}")
    config = {} if instruction is None else {"instruction": instruction}
    return primitives.gemm(c, a, b, c, transpose_a, transpose_b, 1.0, 1.0 if accumulate else 0.0, **config)


def sum(src: Any, dst: Any, axis: int = -1, *, accumulate: bool = False) -> Any:
    """Sum a tile along one of its dimensions.

    Where `dst` is of integers, it is the result that becomes one of them, and not each element.

    Parameters
    ----------
    src : Buffer or BufferRegion
        The tile, such as one of (M, N).
    dst : Buffer
        The tile of the sums, of the shape without `axis`: (M,) for the last one.
    axis : int
        The dimension that is summed over; from the end if negative.
    accumulate : bool
        Whether the sums are added to what `dst` holds.
    """
    return primitives.sum(dst, src, axis, accumulate)


def max(src: Any, dst: Any, axis: int = -1, *, accumulate: bool = False) -> Any:
    """Keep in `dst` the largest element along `axis`, with `accumulate` of what it holds too; as `sum` takes them.

    A NaN is kept, as numpy's maximum does, and so it is by ``T.max`` of elements.
    """
    return primitives.max(dst, src, axis, accumulate)


def min(src: Any, dst: Any, axis: int = -1, *, accumulate: bool = False) -> Any:
    """Keep in `dst` the smallest element along `axis`, as `max` keeps the largest."""
    return primitives.min(dst, src, axis, accumulate)


def cdiv(a: Any, b: Any) -> Any:
    """Give the quotient rounded up: how many tiles of `b` cover `a`."""
    return -(-a // b) if isinstance(a, int) and isinstance(b, int) else (a + (b - 1)) // b


def _buffer(tile: Any) -> tirx.Buffer:
    return tile.source if isinstance(tile, (ir.TensorRegion, ir.TensorLoad)) else tile


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse options of a kernel, by annotation, that no kernel can have; knobs are checked once they are numbers.

    Raises
    ------
    TileError
        One isn't positive.
    """
    for name in ("threads", "swizzle", "blocks_per_sm"):
        value = options.get(f"axe.{name}", 1)
        if isinstance(value, int) and value < 1:
            raise TileError(f"kernel: {name} must be positive, got {value}")


def is_one(extent: Any) -> bool:
    """Whether an extent is 1 whatever knobs are."""
    return isinstance(extent, int) and extent == 1


def shape_of(tile: Any) -> tuple[Any, ...]:
    """The extents of a buffer or a region of one, integers where they are known before knobs are."""
    extents = [r.extent for r in tile.region] if isinstance(tile, ir.TensorRegion) else tile.shape
    return tuple(int(extent) if isinstance(extent, tirx.IntImm) else extent for extent in extents)


def _sides(word: str, src: Any, dst: Any) -> tuple[Any, Any]:
    """Both sides as buffers or regions: an element becomes the region of the other side's shape that starts there."""
    elements = [isinstance(side, ir.TensorLoad) for side in (src, dst)]
    if all(elements):
        raise TileError(f"{word}: both sides are elements; write one as a slice, or store in `parallel`")
    if elements[0]:
        src = _region_at(word, src, shape_of(dst))
    if elements[1]:
        dst = _region_at(word, dst, shape_of(src))
    shapes = [tuple(extent for extent in shape_of(side) if not is_one(extent)) for side in (src, dst)]
    analyzer = sym.Analyzer()
    if len(shapes[0]) != len(shapes[1]) or not all(analyzer.can_prove_equal(a, b) for a, b in zip(*shapes)):
        raise TileError(f"{word}: src has shape {shape_of(src)}, dst {shape_of(dst)}; they must be equal up to ones")
    return src, dst


def _region_at(word: str, element: ir.TensorLoad, shape: tuple[Any, ...]) -> tirx.BufferRegion:
    starts = list(element.indices)
    while len(shape) > len(starts) and is_one(shape[0]):
        shape = shape[1:]
    if len(shape) > len(starts):
        raise TileError(f"{word}: a tile of shape {shape} can't start in a tensor of {len(starts)} dimensions")
    shape = (1,) * (len(starts) - len(shape)) + shape
    ranges = [ir.Range.from_min_extent(start, extent) for start, extent in zip(starts, shape)]
    return tirx.BufferRegion(element.source, ranges)
