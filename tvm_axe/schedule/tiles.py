"""tile_kernel: a block is computed by one of the tile kernels."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import s_tir, tirx
from tvm.s_tir.schedule import ExprRV, SBlockRV

from tvm_axe.analysis.annotations import TILE
from tvm_axe.analysis.blocks import NestedBlock, covers
from tvm_axe.analysis.order import shared_loops
from tvm_axe.analysis.patterns import SPATIAL, is_pointwise
from tvm_axe.analysis.sharing import bound_loops, driving_loop
from tvm_axe.analysis.sizes import Extent
from tvm_axe.errors import ScheduleError
from tvm_axe.schedule import query
from tvm_axe.schedule.einsum import Einsum, einsum_of
from tvm_axe.schedule.gathered import Gathered, gathered_of
from tvm_axe.schedule.product import Product, product_of
from tvm_axe.tile.backend import tile_targets
from tvm_axe.tile.kernels import KERNELS, Kernel
from tvm_axe.tile.kernels.kernel import Problem

PRODUCTS = ("matmul", "batched_matmul", "split_k_matmul", "stream_k_matmul", "skinny_matmul")
"""The kernels that compute a product of matrices, so that a block can be annotated with them."""

SUMS = "einsum"
"""The kernel that computes a product of any order of dimensions, and of parts of tensors."""

GATHERED = "gathered_matmul"
"""The kernel that computes a product whose matrix each row chooses."""

_ANY_ROWS = ("matmul", "skinny_matmul")
_EITHER_ORDER = ("matmul", "batched_matmul")
_DTYPES = ("float32", "float16", "bfloat16")

AnyProduct = Product | Einsum | Gathered


@dataclass(frozen=True)
class Choice:
    """What a block's annotations say: the kernel's name, and those of its parameters that aren't left to it."""

    kernel: str
    parameters: Mapping[str, int]

    def __str__(self) -> str:
        return f"{self.kernel}({', '.join(f'{name}={value}' for name, value in self.parameters.items())})"


@query.all_or_nothing
def tile_kernel(
    sch: s_tir.Schedule,
    /,
    block: SBlockRV,
    kernel: str,
    epilogue: SBlockRV | None = None,
    **parameters: int | ExprRV,
) -> None:
    """Have `block` computed by a tile kernel, and `epilogue` in the same kernel. ::

        for i, j, k in T.grid(M, N, K):            for i in range(M):
            with T.sblock("mm"):                       for j, k in T.grid(N, K):
                C[vi, vj] += A[vi, vk] * B[vk, vj]         with T.sblock("mm"):
        for i, j in T.grid(M, N):                              T.sblock_attr({"axe.tile": "matmul",
            with T.sblock("epi"):                  ->                         "axe.tile.block_m": 64})
                out[vi, vj] = T.max(C[vi, vj], 0)              C[vi, vj] += A[vi, vk] * B[vk, vj]
                                                       for j in range(N):
                                                           with T.sblock("epi"):
                                                               out[vi, vj] = T.max(C[vi, vj], 0)

    The annotated program computes what it did; the kernel takes the block's place, on what each device holds, when the
    program is compiled (`tvm_axe.lower.tiles`).

    Valid when `block` is a product of two tensors of one type that `kernel` computes, `parameters` are the kernel's,
    and `epilogue`, if given, is pointwise and alone reads the product.

    Leaves ``axe.tile`` on the block, and ``axe.tile.NAME`` for each parameter NAME.

    Parameters
    ----------
    sch : s_tir.Schedule
        The schedule.
    block : SBlockRV
        A matrix product: ``C[batch, i, j] += A[batch, i, k] * B[batch, k, j]``, where each of these may be several
        dimensions, B may be transposed, and the operands may be cast. For ``"einsum"`` in any order of dimensions,
        and of parts of tensors; for ``"gathered_matmul"`` with ``B[labels[i], k, j]``, a matrix that each row chooses.
    kernel : str
        One of `PRODUCTS`, `SUMS` or `GATHERED`.
    epilogue : SBlockRV, optional
        The pointwise block that alone reads the product; it is moved into the block's nest, unless it is there.
    **parameters : int or ExprRV
        The kernel's parameters (``tvm-axe kernels`` lists them), which the schedule may sample; those left out have
        their defaults for the target.

    Raises
    ------
    ScheduleError
        If the block is no such product, or of several types, the kernel isn't one for products, it has no such
        parameter on any target, or the epilogue cannot be moved.

    Examples
    --------
    >>> import tvm_axe as axe
    >>> from tvm_axe.programs import PROGRAMS
    >>> mlp = PROGRAMS["mlp"](axe.Mesh({"tp": 2}))
    >>> sch = axe.Schedule(mlp.func, mesh=mlp.mesh)
    >>> mm = sch.get_sblock("mm")
    >>> sch.tile_kernel(mm, "matmul", epilogue=sch.get_sblock("epi"), block_m=64)
    >>> print(sch.get(mm).annotations)
    {"axe.tile": "matmul", "axe.tile.block_m": 64}
    """
    query.given(sch, block, "tile_kernel")
    name = query.name_of(sch, block)
    try:
        made = kernel_for(kernel)
        product = product_at(sch, block, kernel)
        problem = problem_of(made, product, _left(sch, block, product, epilogue))
    except ScheduleError as error:
        raise ScheduleError(f"tile_kernel: block {name!r}: {error}") from error
    known = {key: None for target in tile_targets() for key in made.parameters(target, problem)}
    unknown = [key for key in parameters if key not in known]
    if unknown:
        raise ScheduleError(
            f"tile_kernel: block {name!r}: {kernel} has no parameter {', '.join(unknown)}; valid are {', '.join(known)}"
        )
    if epilogue is not None:
        query.given(sch, epilogue, "tile_kernel")
        _check_epilogue(sch, block, epilogue, product)
        rows = [it.var for it in product.spatial]
        nest = query.nest_of(sch, block)
        row = next((loop for loop in (driving_loop(nest, var) for var in rows) if loop is not None), None)
        if row is None:
            raise ScheduleError(
                f"tile_kernel: block {name!r}: none of its loops is a row or column alone; choose the kernel before "
                "loops are split"
            )
        if not any(loop.loop_var.same_as(row.loop_var) for loop in query.nest_of(sch, epilogue).loops):
            query.checked("tile_kernel", name, lambda: sch.reverse_compute_at(epilogue, query.loop_rv(sch, block, row)))
    sch.annotate(block, TILE, kernel)
    for key, value in parameters.items():
        sch.annotate(block, f"{TILE}.{key}", value)


def product_at(sch: s_tir.Schedule, block: SBlockRV, kernel: str = "matmul") -> AnyProduct:
    """Return the product that a block computes, on one device, as a kernel takes it.

    Raises
    ------
    ScheduleError
        If the block computes no such product, or not all of one.
    """
    nest = query.nest_of(sch, block)
    if not covers(nest.realize, nest.loops):
        raise ScheduleError(f"block {nest.block.name_hint!r}: its loops don't run over all of the product")
    return product_in(nest.block, kernel, _devices(nest))


def product_in(block: s_tir.SBlock, kernel: str, devices: Collection[tirx.Var] = ()) -> AnyProduct:
    """Return the product that a block is, as a kernel takes it; on one device, if `devices` are iterators over devices.

    Raises
    ------
    ScheduleError
        If the block is no such product.
    """
    if kernel == GATHERED:
        return gathered_of(block, devices)
    return einsum_of(block, devices) if kernel == SUMS else product_of(block, devices)


def choice_of(block: s_tir.SBlock) -> Choice | None:
    """Return the kernel that a block's annotations choose, or None."""
    if TILE not in block.annotations:
        return None
    parameters = {
        str(key).removeprefix(f"{TILE}."): int(value)
        for key, value in block.annotations.items()
        if str(key).startswith(f"{TILE}.")
    }
    return Choice(str(block.annotations[TILE]), parameters)


def has_choice(part: tirx.PrimFunc | tirx.Stmt) -> bool:
    """Return whether a kernel was chosen for any block of a function, or of a part of one."""
    return bool(choices_in(part))


def choices_in(part: tirx.PrimFunc | tirx.Stmt) -> list[Choice]:
    """Return the kernels that were chosen for blocks of a function, or of a part of one."""
    body = part.body if isinstance(part, tirx.PrimFunc) else part
    found: list[Choice | None] = []
    tvm_ffi.structural_walk(body, (s_tir.SBlock, lambda block: found.append(choice_of(block))))
    return [choice for choice in found if choice is not None]


def heights_in(func: tirx.PrimFunc) -> list[tirx.Expr]:
    """Return how many rows the products have for which kernels were chosen, of those of which that isn't known."""
    found: list[Extent] = []

    def visit(block: s_tir.SBlock) -> None:
        choice = choice_of(block)
        product = None if choice is None else product_in(block, choice.kernel)
        if isinstance(product, Product):
            found.append(product.height)

    tvm_ffi.structural_walk(func.body, (s_tir.SBlock, visit))
    return [height for height in found if not isinstance(height, int)]


def kernel_for(name: str) -> Kernel:
    """Return the kernel of that name, if it computes products of matrices.

    Raises
    ------
    ScheduleError
        If there is no such kernel, or it doesn't compute products.
    """
    valid = (*PRODUCTS, SUMS, GATHERED)
    if name not in valid:
        raise ScheduleError(f"{name!r} is no kernel for products of matrices; valid are {', '.join(valid)}")
    return KERNELS[name]


def problem_of(kernel: Kernel, product: AnyProduct, out_dtype: str) -> Problem:
    """Return a product as the kernel's problem, in which a variable stands for rows that aren't known.

    Raises
    ------
    ScheduleError
        If the kernel doesn't compute the product: one with a batch where it takes none, or of operands of other types.
    """
    dtype, other = str(product.a.dtype), str(product.b.dtype)
    if dtype != other or dtype not in _DTYPES:
        raise ScheduleError(
            f"{kernel.name} multiplies two operands of one type of {', '.join(_DTYPES)}; {product.a.name} is {dtype}, "
            f"{product.b.name} is {other}"
        )
    if isinstance(product, Einsum):
        return {**product.operands.texts, "dtype": dtype, "out_dtype": out_dtype}
    if isinstance(product, Gathered):
        if out_dtype != dtype:
            raise ScheduleError(f"{kernel.name} leaves what its operands are, {dtype}; the block leaves {out_dtype}")
        rows, n, k = product.shape
        told = {"rows": rows, "n": n, "k": k, "groups": product.groups}
        return {**told, "dtype": dtype, "transpose_b": product.transpose_b}
    batch, n, k = product.batches, product.width, product.terms
    m = product.height
    if not isinstance(m, int):
        if kernel.name not in _ANY_ROWS:
            raise ScheduleError(f"{kernel.name} takes known rows, here {m}; valid are {', '.join(_ANY_ROWS)}")
        m = tirx.Var("m", "int64")
    problem: dict[str, Any] = {"m": m, "n": n, "k": k, "dtype": dtype}
    takes_batch = kernel.name == "batched_matmul"
    if takes_batch and not product.batch:
        raise ScheduleError(f"{kernel.name} takes a batch; valid is matmul")
    if product.batch and not takes_batch:
        raise ScheduleError(f"{kernel.name} takes no batch, here of {batch}; valid is batched_matmul")
    if takes_batch:
        problem["batch"] = batch
    if kernel.name in _EITHER_ORDER:
        problem["transpose_b"] = product.transpose_b
    elif not product.transpose_b:
        raise ScheduleError(f"{kernel.name} takes B by columns, B[j, k]; {product.b.name} is B[k, j]: valid is matmul")
    if kernel.name == "matmul":
        problem["out_dtype"] = out_dtype
    elif out_dtype != dtype:
        raise ScheduleError(f"{kernel.name} leaves what its operands are, {dtype}; the block leaves {out_dtype}")
    return problem


def _devices(nest: NestedBlock) -> list[tirx.Var]:
    """Return the block's iterators that are a device's coordinate: driven by a mesh-bound loop alone."""
    bound = [loop.loop_var for loop in bound_loops(nest, SPATIAL).values()]
    return [var for var, value in nest.bound.items() if any(value.same_as(driver) for driver in bound)]


def _left(sch: s_tir.Schedule, block: SBlockRV, product: AnyProduct, epilogue: SBlockRV | None) -> str:
    """Return the type that a kernel would leave: that of its epilogue, given or in the block's nest already."""
    nest = query.nest_of(sch, block)
    readers = [reader for reader in query.tree(sch).consumers(nest) if shared_loops(nest, reader)]
    found = readers if epilogue is None else [query.nest_of(sch, epilogue)]
    return str(found[0].block.writes[0].source.dtype if len(found) == 1 else product.c.dtype)


def _check_epilogue(sch: s_tir.Schedule, block: SBlockRV, epilogue: SBlockRV, product: AnyProduct) -> None:
    name = query.name_of(sch, block)
    stmt, tree = query.nest_of(sch, epilogue).block, query.tree(sch)
    readers = [str(reader.block.name_hint) for reader in tree.consumers(query.nest_of(sch, block))]
    if readers != [str(stmt.name_hint)] or tree.is_parameter(product.c):
        raise ScheduleError(
            f"tile_kernel: block {name!r}: its product {product.c.name!r} is "
            + ("a parameter" if tree.is_parameter(product.c) else f"read by {', '.join(readers) or 'no block'}")
            + f"; valid is an epilogue that alone reads it, here {stmt.name_hint!r}"
        )
    if not is_pointwise(stmt):
        raise ScheduleError(
            f"tile_kernel: block {name!r}: its epilogue {stmt.name_hint!r} sums; valid is a pointwise block"
        )
