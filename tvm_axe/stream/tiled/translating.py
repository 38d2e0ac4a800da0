"""Tile programs as streaming programs: `from_tile`.

A tile program is also a streaming program: its grid and its loops are dims of streams, copies from global memory are
loads, what is computed of tiles are functions, what a loop adds to are accumulations, copies to global memory stores.

>>> from tvm_axe.stream import Accelerator, from_tile
>>> from tvm_axe.tile.kernels.gemm import MATMUL
>>> product = MATMUL.make(64, 32, 48, "float32", block_m=16, block_n=16, block_k=16)
>>> print(from_tile(product.programs[0], Accelerator()).streams)
program 'matmul'
  A0 = LinearOffChipLoad(): [4, 2, 3] of Tile(16, 16, float32)
  B0 = LinearOffChipLoad(): [4, 2, 3] of Tile(16, 16, float32)
  gemm_c0 = Accum(A0, B0): [4, 2] of Tile(16, 16, float32)
  store_C0 = LinearOffChipStore(gemm_c0)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import tirx

from tvm_axe.errors import StreamError
from tvm_axe.stream.memory import Accelerator
from tvm_axe.stream.operators.off_chip import LinearLoad, RandomLoad
from tvm_axe.stream.program import StreamProgram
from tvm_axe.stream.report import Report
from tvm_axe.stream.tiled.blocks import Block, block_of, boxes_by_tensor
from tvm_axe.stream.tiled.boxes import Matrix, NoMatrix, matrix_of
from tvm_axe.stream.tiled.building import Building
from tvm_axe.stream.tiled.expressions import Evaluator
from tvm_axe.stream.tiled.lines import Lines
from tvm_axe.stream.tiled.points import Side
from tvm_axe.tile.cuts import is_sequence
from tvm_axe.tile.nodes import Node
from tvm_axe.tile.program import TileProgram, TileSequence, name_of
from tvm_axe.tile.reading import read
from tvm_axe.tile.regions import Tile as TileBuffer
from tvm_axe.tile.regions import first_strided
from tvm_axe.tile.walking import variables_in


@dataclass(frozen=True, eq=False)
class TileStreams:
    """A tile program as a streaming program.

    Attributes
    ----------
    source : TileProgram
        The tile program.
    streams : StreamProgram
        The streaming program. Its tensors are the tile program's as matrices.
    accelerator : Accelerator
        What it is simulated on.
    inputs : Mapping
        The values of its input streams: the numbers of tiles, and the variables of loops that are computed with.
    matrices : Mapping
        How each tensor that is moved lies in its matrix, by name.
    shapes : Mapping
        The shape of each tensor, by name.
    """

    source: TileProgram
    streams: StreamProgram
    accelerator: Accelerator
    inputs: Mapping[str, Any]
    matrices: Mapping[str, Matrix]
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def loaded(self) -> tuple[str, ...]:
        """The tensors that a run with values is given."""
        loads = (LinearLoad, RandomLoad)
        names = [n.operator.tensor.name for n in self.streams.nodes if isinstance(n.operator, loads)]
        return tuple(dict.fromkeys(names))

    def run(
        self,
        arrays: Mapping[str, np.ndarray] | None = None,
        values: bool = True,
        trace: bool = False,
        max_cycles: int | None = None,
    ) -> Report:
        """Compute and simulate the program, or only simulate it; see `StreamProgram.run`.

        Parameters
        ----------
        arrays : Mapping
            The array of each tensor that is loaded, of its shape in the tile program; not needed without values.

        Returns
        -------
        Report
            What `StreamProgram.run` returns, with the tensors that were stored as the tile program has them.

        Raises
        ------
        StreamError
            If an array isn't of its tensor's shape, or `StreamProgram.run` raises it.
        """
        given = {}
        for name, array in (arrays or {}).items():
            if name not in self.matrices:
                known = ", ".join(self.matrices)
                raise StreamError(f"tile program {self.source.name!r} moves no tensor {name!r}; there are {known}")
            matrix = self.matrices[name]
            if np.shape(array) != matrix.shape:
                raise StreamError(f"tensor {name!r} is of shape {matrix.shape}, and gets an array of {np.shape(array)}")
            given[name] = matrix.filled(array)
        report = self.streams.run({**self.inputs, **given}, self.accelerator, values, trace, max_cycles)
        return replace(report, tensors={name: self.matrices[name].cut(a) for name, a in report.tensors.items()})


def from_tile(
    program: tirx.PrimFunc | TileProgram | TileSequence,
    accelerator: Accelerator,
    given: Mapping[str, float | np.ndarray] | None = None,
) -> TileStreams:
    """Return a tile program as a streaming program for an accelerator.

    Each loop is a dim, the grid's first; each statement a unit, whose results go straight to the next. What a loop
    hands on from one iteration to the next is an Accum, or a Scan if the loop itself takes it. Tensors are matrices
    off-chip, filled up with zeros to whole tiles. Where a loop's length depends on the loops around it, its dim is
    ragged; where tiles aren't an affine view of a tensor, their numbers are an input stream.

    Parameters
    ----------
    program : PrimFunc or TileProgram
        The program, as `tvm_axe.tile.read` takes or returns it.
    accelerator : Accelerator
        What it is to be simulated on.
    given : Mapping, optional
        The values of scalar parameters and of variables in the shapes of tensors, by name; and arrays of tensors that
        say which tiles come and how often loops run, such as those of routing, lengths or pages.

    Raises
    ------
    StreamError
        If streams have nothing for a statement: the message names it, its line and what to write instead. Or if the
        program has several kernels, or a scalar or a variable has no value.
    TileError
        If the program is none, as `tvm_axe.tile.read` says.
    """
    func = program if isinstance(program, tirx.PrimFunc) else program.func
    if is_sequence(func):
        raise StreamError(
            f"tile program {name_of(func)!r}: several kernels, or scratch; valid is one kernel, such as each of "
            "tile.read_sequence(program).kernels by itself"
        )
    source = program if isinstance(program, TileProgram) else read(func)
    if source.devices > 1:
        raise StreamError(f"tile program {source.name!r}: tensors of a mesh; valid is a program of one device")
    strided = first_strided(source.params)
    if strided is not None:
        raise StreamError(
            f"tile program {source.name!r}: {strided}, and streams load matrices in row-major order; valid is a tensor "
            "without strides"
        )
    settled, lines = dict(given or {}), Lines(source)
    tensors = {tile: np.asarray(settled.pop(tile.name)) for tile in source.params if tile.name in settled}
    known = _known(source, settled)
    shapes = {tile: tuple(int(Evaluator(known)(extent)) for extent in tile.shape) for tile in source.params}
    for tile, array in tensors.items():
        if array.shape != shapes[tile]:
            raise StreamError(f"tensor {tile.name!r} is of shape {shapes[tile]}, and gets an array of {array.shape}")
    block = block_of(source, known, {tile.buffer: array for tile, array in tensors.items()}, lines)
    matrices = _matrices(source, block, shapes)
    _check_stores(source, block, lines)
    building = Building(StreamProgram(source.name), matrices, lines)
    building.block(block, {}, set(), loop=False)
    building.finish()
    return TileStreams(
        source,
        building.program,
        accelerator,
        building.inputs,
        {tensor.name: matrix for tensor, matrix in matrices.items()},
        {tensor.name: shape for tensor, shape in shapes.items()},
    )


def _known(source: TileProgram, given: dict[str, Any]) -> dict[tirx.Var, float]:
    """Return the values of a program's scalars and of the variables in its shapes.

    Raises
    ------
    StreamError
        If one has none, or there is no such variable.
    """
    found: dict[tirx.Var, float] = {}
    shapes = [extent for tile in source.params for extent in tile.shape if not isinstance(extent, int)]
    for var in dict.fromkeys((*source.scalars, *sorted(variables_in(*shapes), key=lambda var: str(var.name)))):
        name = str(var.name)
        if name not in given:
            raise StreamError(
                f"tile program {source.name!r}: {name} isn't known, and streams are made for one value of it; pass "
                f"given={{{name!r}: a number}}"
            )
        found[var] = given.pop(name)
    if given:
        raise StreamError(f"tile program {source.name!r} has no scalar or variable {next(iter(given))!r}")
    return found


def _matrices(
    source: TileProgram, block: Block, shapes: Mapping[TileBuffer, tuple[int, ...]]
) -> dict[TileBuffer, Matrix]:
    """Return the matrix of each tensor that is loaded or stored."""
    found = {}
    for tensor, boxes in boxes_by_tensor(block).items():
        try:
            found[tensor] = matrix_of(tensor, shapes[tensor], boxes)
        except NoMatrix as reason:
            raise StreamError(
                f"tile program {source.name!r}, {boxes[0].where}: {tensor.name} can't be cut into tiles; {reason}"
            ) from reason
    return found


def _check_stores(source: TileProgram, block: Block, lines: Lines) -> None:
    """Refuse what would need an order between stores and other accesses of a tensor."""
    stored: dict[TileBuffer, Node] = {}
    sides: dict[TileBuffer, Side | None] = {}
    for step in block.steps():
        if step.store is None:
            continue
        tensor, side = step.store.region.tile, step.store.points.side
        if tensor in stored and not (side is not None and side.excludes(sides[tensor])):
            raise lines.refuse(
                step.node, f"{tensor.name} is stored at {lines.place(stored[tensor])} too; store each tensor once"
            )
        stored[tensor], sides[tensor] = step.node, side
    for step in block.steps():
        for box in step.boxes:
            if box.region.tile in stored:
                raise lines.refuse(
                    step.node,
                    f"{box.region.tile.name} is stored too, at {lines.place(stored[box.region.tile])}, and streams "
                    "have no order between the two; store to another tensor",
                )
