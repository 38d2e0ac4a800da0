"""What a region of two stages is made of, for who makes a pair of it: its product, buffers of its own, and kernels.

A region that is none raises `Unfit`, which says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tvm import tirx
from tvm.target import Target

from tvm_axe.analysis.blocks import NestedBlock, covers, nested_blocks, statements
from tvm_axe.analysis.expressions import alike, substitute
from tvm_axe.analysis.patterns import is_copy, is_product
from tvm_axe.layout import Mesh
from tvm_axe.lower.derive import Step
from tvm_axe.lower.infer import Sharding
from tvm_axe.lower.localize import OWN, Kernel, localize
from tvm_axe.lower.program import Block, ScheduledProgram
from tvm_axe.lower.tiles import lowered_on
from tvm_axe.machines import backend_of
from tvm_axe.schedule.product import Product
from tvm_axe.schedule.tiles import Choice, choice_of, product_in
from tvm_axe.tile.backend import TileBackend
from tvm_axe.tile.epilogue import Epilogue, with_epilogue
from tvm_axe.tile.kernels.gemm import MATMUL
from tvm_axe.tile.kernels.kernel import Problem, Recipe
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.regions import Tile

__all__ = [
    "Found",
    "Launch",
    "Region",
    "SideStep",
    "Unfit",
    "default_tiles",
    "launch",
    "product_of_step",
    "said",
    "tiles_of",
    "with_block",
]

DTYPES = ("float16", "bfloat16")
"""The operands' types that tensor cores multiply in these kernels."""

_TILES = ("block_m", "block_n", "block_k", "stages", "swizzle")


class SideStep(NamedTuple):
    """A step of the side stream (`tvm_axe.collective.side`): on views of buffers, with numbers.

    A copy does a part of a step of the program, `of`.
    """

    name: str
    tensors: tuple[tuple[tirx.Buffer, str], ...]
    numbers: tuple[int, ...]
    of: Step | None = None


class Launch(NamedTuple):
    """A kernel of a pair: its function of own slabs of buffers, then of the coordinate, if it `asks` for that.

    It is the lowered `program`, each of whose tensors, by name, is a buffer. Its `resident` blocks run at once.
    """

    func: tirx.PrimFunc
    buffers: tuple[tirx.Buffer, ...]
    asks: bool
    program: TileProgram
    tensors: Mapping[str, tirx.Buffer]
    resident: int | None

    @property
    def reads(self) -> frozenset[tirx.Buffer]:
        """The buffers that it reads."""
        return self._touched(tile for node in self.program.nodes() for tile in node.reads)

    @property
    def writes(self) -> frozenset[tirx.Buffer]:
        """The buffers that it writes."""
        return self._touched(tile for node in self.program.nodes() for tile in node.writes)

    def _touched(self, tiles: Iterable[Tile]) -> frozenset[tirx.Buffer]:
        return frozenset(self.tensors[tile.name] for tile in tiles if tile.scope == "global")


class Unfit(Exception):
    """Why a region is no pair."""


@dataclass(frozen=True, eq=False)
class Region:
    """A region, and what is known around it."""

    program: ScheduledProgram
    steps: tuple[Step, ...]
    shardings: Mapping[tirx.Buffer, Sharding]
    private: frozenset[tirx.Buffer]
    users: Mapping[tirx.Buffer, Sequence[Step]]
    target: Target

    @property
    def mesh(self) -> Mesh:
        """The devices."""
        return self.program.mesh

    @property
    def chunks(self) -> int:
        """Into how many chunks the schedule cuts a slice."""
        overlap = self.steps[0].stage.overlap
        assert overlap is not None  # it is a region
        return overlap.chunks

    def local(self, step: Step) -> Local:
        """What a step is on a device, whole and not in chunks."""
        inside = tuple(
            buffer
            for buffer in self.private
            if any(a.buffer.same_as(buffer) for b in step.stage.blocks for a in b.accesses)
        )
        whole = replace(step, stage=replace(step.stage, overlap=None))
        kernel = localize(self.program, whole, self.shardings, inside)
        blocks = [block for nest in statements(kernel.func.body.block.body) for block in nested_blocks(nest)]
        for block in blocks:
            if not covers(block.realize, block.loops):
                raise Unfit(f"block {block.block.name_hint!r} does not run over all of its buffers on each device")
        return Local(kernel, blocks)

    def check_pieces(self, buffer: tirx.Buffer, dims: Mapping[int, str]) -> None:
        """Check that these mesh axes, and no others, share dimensions of a buffer, in equal pieces."""
        sharding = self.shardings[buffer]
        wanted = tuple((dims[dim],) if dim in dims else () for dim in range(len(sharding.cuts)))
        even = all(sharding.shape[dim] % self.mesh.axis_size(axis) == 0 for dim, axis in dims.items())
        if sharding.cuts != wanted or not even or sharding.memory is not None or sharding.root is not None:
            raise Unfit(
                f"{buffer.name} lies as {sharding.layout}; valid are equal pieces of the leading dimension over the "
                "one axis, row-major"
            )

    def check_shares(self, buffer: tirx.Buffer, axis: str) -> None:
        """Check that a mesh axis shares the leading dimension of a buffer that isn't of extent 1."""
        self.check_pieces(buffer, {_leading(_shape(buffer)): axis})

    def check_whole(self, buffer: tirx.Buffer, axis: str) -> None:
        """Check that all devices have all of a buffer, whose leading dimension a mesh axis divides."""
        shape = _shape(buffer)
        self.check_pieces(buffer, {})
        if shape[_leading(shape)] % self.mesh.axis_size(axis):
            raise Unfit(f"the leading dimension of {buffer.name}, {shape[_leading(shape)]}, isn't divided by {axis}")

    def is_whole(self, buffer: tirx.Buffer) -> bool:
        """Whether no mesh axis shares a dimension of a buffer."""
        return not any(self.shardings[buffer].cuts)

    def gathers(self, block: Block) -> bool:
        """Whether a block gives all devices what each has a share of."""
        source = block.reads[0].buffer if block.reads else None
        copies = source is not None and is_copy(block.realize.block) and not self.is_whole(source)
        return copies and self.is_whole(block.writes[0].buffer)

    def check_inside(self, buffer: tirx.Buffer) -> None:
        """Check that nothing but the region touches a buffer."""
        users = self.users.get(buffer)
        if users is None or any(user not in self.steps for user in users):
            raise Unfit(f"{buffer.name} is used beyond them")

    def check_gathers(self, gather: Block, source: tirx.Buffer, axis: str) -> None:
        """Check that a block gathers `source`, whose leading dimension the axis shares, on all devices."""
        statement, target = gather.realize.block, gather.writes[0].buffer
        if not (is_copy(statement) and gather.reads[0].buffer.same_as(source)):
            raise Unfit(f"block {gather.name!r} does more than gather {source.name}")
        self.check_shares(source, axis)
        self.check_pieces(target, {})
        same = alike(list(statement.body.value.indices), list(statement.body.indices))
        shapes, dtypes = ([get(each) for each in (source, target)] for get in (_shape, lambda each: str(each.dtype)))
        if not same or shapes[0] != shapes[1] or dtypes[0] != dtypes[1]:
            raise Unfit(f"block {gather.name!r} gathers {source.name} into other places or another type")

    def check_columns(self, buffer: tirx.Buffer, n: int) -> None:
        """Check that the last dimension of a buffer is the product's columns, groups of which are copied."""
        if _shape(buffer)[-1] != n:
            raise Unfit(f"the last dimension of {buffer.name} isn't all of the product's columns")

    def buffer(self, name: str, slab: Sequence[int], dtype: str) -> tuple[tirx.Buffer, Sharding]:
        """A new buffer of which each device has a slab of its own."""
        axes = self.mesh.names
        shape = (*(self.mesh.axis_size(axis) for axis in axes), *slab)
        cuts = (*((axis,) for axis in axes), *(() for _ in slab))
        made = Sharding.blocks(shape, self.mesh, cuts, frozenset(range(len(axes))))
        return tirx.decl_buffer(list(slab), dtype, name), made


@dataclass(frozen=True, eq=False)
class Local:
    """A step on a device: its kernel, and the blocks in it."""

    kernel: Kernel
    blocks: list[NestedBlock]

    def own(self, local: tirx.Buffer) -> tirx.Buffer:
        """The program's buffer whose own slab a buffer of the kernel is."""
        for param, (buffer, view) in zip(self.kernel.func.params, self.kernel.arguments):
            if param.same_as(local):
                if view != OWN:
                    break
                return buffer
        raise Unfit(f"{local.name} isn't a device's own")

    def slab(self, buffer: tirx.Buffer) -> tirx.Buffer:
        """The kernel's buffer that is the device's own slab of one of the program's."""
        for param, (given, view) in zip(self.kernel.func.params, self.kernel.arguments):
            if given.same_as(buffer) and view == OWN:
                return param
        raise Unfit(f"{buffer.name} isn't a device's own")

    def coordinates(self) -> dict[tirx.Var, str]:
        """The mesh axis of each of the kernel's parameters that is a coordinate."""
        return dict(zip(self.kernel.func.params[len(self.kernel.arguments) :], self.kernel.coordinates))


class Found(NamedTuple):
    """The product of a step on a device, the program's buffers that are its operands, and the kernel chosen for it."""

    product: Product
    a: tirx.Buffer
    b: tirx.Buffer
    choice: Choice | None


def product_of_step(region: Region, step: Step, written: tirx.Buffer, shared: tirx.Buffer) -> Found:
    """The product that a step is, into `written`, where the leading dimension of `shared` is one of its rows."""
    main = step.stage.blocks[0]
    if not is_product(main.realize.block) or not main.writes[0].buffer.same_as(written):
        raise Unfit(f"block {main.name!r} is no product")
    choice = choice_of(main.realize.block)
    backend = backend_of(region.target)
    if choice is None and not (isinstance(backend, TileBackend) and backend.by_default):
        raise Unfit(f"no tile kernel was chosen for block {main.name!r}")
    if choice is not None and choice.kernel != MATMUL.name:
        raise Unfit(f"the kernel {choice.kernel} was chosen for block {main.name!r}; valid is {MATMUL.name}")
    local = region.local(step)
    product = product_in(local.blocks[0].block, MATMUL.name)
    assert isinstance(product, Product)  # it is asked for
    if product.batch:
        raise Unfit(f"block {main.name!r} is a batch of products")
    dtypes = {str(product.a.dtype), str(product.b.dtype)}
    if len(dtypes) > 1 or not dtypes <= {*DTYPES}:
        raise Unfit(f"block {main.name!r} multiplies {' by '.join(sorted(dtypes))}; valid are {' and '.join(DTYPES)}")
    rows, shape = [int(it.dom.extent) for it in product.rows], _shape(shared)
    if max([1, *rows]) == 1 or rows[_leading(rows)] != shape[_leading(shape)]:
        raise Unfit(f"the leading dimension of {shared.name} isn't of the product's rows")
    return Found(product, local.own(product.a), local.own(product.b), choice)


def tiles_of(target: Target, found: Found, unit: bool, pieces: int = 1) -> dict[str, int]:
    """The parameters of the kernel: those that were chosen, and the product's defaults for the others.

    A tile that is stored in `pieces` has shared memory for each, and is half as wide for that.
    """
    product, (_, m, n, k) = found.product, found.product.shape
    problem = {"m": m, "n": n, "k": k, "dtype": str(product.a.dtype), "transpose_b": product.transpose_b}
    chosen = {} if found.choice is None else dict(found.choice.parameters)
    tiles = default_tiles(target, problem) | chosen
    if pieces > 1 and "block_n" not in chosen:
        tiles["block_n"] = min(tiles["block_n"], 128)
    if unit and "block_k" not in chosen:  # which divides the side of the unit matrix
        tiles["block_k"] = math.gcd(tiles["block_k"], tiles["block_n" if found.product.transpose_b else "block_m"])
    return tiles


def default_tiles(target: Target, problem: Problem) -> dict[str, int]:
    """The parameters that a product has by default on a target, of those that kernels of pairs take."""
    knobs = MATMUL.parameters(target, problem)
    return {name: int(knobs[name][0]) for name in _TILES if name in knobs}


def said(tiles: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={tiles[name]}" for name in _TILES[:3])


def with_block(
    recipe: Recipe, local: Local, block: Block, finished: tirx.Buffer, axis: str, tensors: dict[str, tirx.Buffer]
) -> Recipe:
    """The recipe with a block as its epilogue, which goes on with what is `finished`.

    What it reads beside is added to the tensors.
    """
    at = next(number for number, each in enumerate(local.blocks) if str(each.block.name_hint) == block.name)
    # What it is behind is written in the same nest, or by a stage of its own.
    behind = local.blocks[at - 1].block.body.buffer if at else local.slab(finished)
    epilogue = Epilogue.of(local.blocks[at].block, behind)
    coordinates = local.coordinates()
    if set(coordinates.values()) - {axis}:
        raise Unfit(f"block {block.name!r} asks where its device is on {', '.join(sorted(coordinates.values()))}")
    me = next(param for param in recipe.programs[-1].func.params if param.name == "me")
    value = substitute(epilogue.value, dict.fromkeys(coordinates, me))
    tensors |= {name: local.own(buffer) for name, buffer in epilogue.inputs.items()}
    return with_epilogue(recipe, replace(epilogue, value=value))


def launch(
    region: Region,
    program: TileProgram,
    tensors: Mapping[str, tirx.Buffer],
    made: Mapping[tirx.Buffer, Sharding],
    axis: str,
) -> Launch:
    """The function of a tile program, on the slabs of the buffers that are its tensors."""
    shardings = {**region.shardings, **made}
    buffers = tuple(dict.fromkeys(tensors[tile.name] for tile in program.params))
    params = {
        buffer: tirx.decl_buffer(list(shardings[buffer].stored), buffer.dtype, _name(buffer)) for buffer in buffers
    }
    coordinate = tirx.Var(axis, "int32")
    given = {tile.name: params[tensors[tile.name]] for tile in program.params}
    lowered = lowered_on(program, region.target, given, {"me": coordinate})
    asks = bool(program.scalars)
    func = lowered.function([*params.values(), *([coordinate] if asks else [])])
    used = {tile.name: tensors[tile.name] for tile in program.params}
    return Launch(func, buffers, asks, program, used, lowered.resident)


def _name(buffer: tirx.Buffer) -> str:
    return str(buffer.name).replace(".", "_")


def _shape(buffer: tirx.Buffer) -> tuple[int, ...]:
    return tuple(int(extent) for extent in buffer.shape)


def _leading(shape: Sequence[int]) -> int:
    """The first dimension that isn't of extent 1, or the last."""
    return next((dim for dim, extent in enumerate(shape) if extent > 1), len(shape) - 1)
