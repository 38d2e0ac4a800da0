"""A tile program, as read: what `tvm_axe.tile`'s words became, as a tree of nodes that targets lower.

`tvm_axe.tile.reading` makes one of a function, `tvm_axe.tile.nodes` has the nodes, and says what it takes to add one.
A function of several kernels is a `TileSequence` of such (`tvm_axe.tile.sequences`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from tvm import ir, sym, tirx

from tvm_axe.notebook import preformatted
from tvm_axe.tile.assuming import Assumption, bind_assumed
from tvm_axe.tile.knobs import Setting
from tvm_axe.tile.nodes import Loop, Node
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.walking import walk


@dataclass(frozen=True, eq=False)
class TileProgram:
    """A kernel: its parameters, tiles, grid and options, and what a block does.

    Attributes
    ----------
    func : PrimFunc
        The function as written, with a number for each of its knobs.
    params : tuple of Tile
        Its tensors in global memory, in order.
    scalars : tuple of Var
        Its scalar parameters, in order; they stand between the tensors or behind them.
    tiles : tuple of Tile
        The tiles on chip, in order of allocation.
    grid : tuple of (Var, Expr)
        The dimensions of the grid, a variable and its extent each, the slowest first.
    options : mapping from str
        The options of `tvm_axe.tile.kernel`, only those given.
    body : tuple of Node
        What a block does, in order.
    device : Var or None
        The scalar that is the coordinate of the device that runs; None without mesh tensors.
    knobs : tuple of Setting
        What the knobs of the function that was written are in this one, in order, and why.
    assumptions : tuple of Assumption
        What it takes for granted of its open extents and its scalars.
    """

    func: tirx.PrimFunc
    params: tuple[Tile, ...]
    scalars: tuple[tirx.Var, ...]
    tiles: tuple[Tile, ...]
    grid: tuple[tuple[tirx.Var, tirx.Expr], ...]
    options: Mapping[str, object]
    body: tuple[Node, ...]
    device: tirx.Var | None = None
    knobs: tuple[Setting, ...] = ()
    assumptions: tuple[Assumption, ...] = ()

    @property
    def kernels(self) -> tuple[TileProgram, ...]:
        """Itself, the one kernel, as a `TileSequence` has several."""
        return (self,)

    @property
    def devices(self) -> int:
        """How many devices run it together, each with its own coordinate: 1 without mesh tensors."""
        return next((int(tile.shape[0]) for tile in self.params if tile.is_mesh), 1)

    @property
    def name(self) -> str:
        return name_of(self.func)

    def __str__(self) -> str:
        """What was read, a line a tile and a node; it reads like the source."""
        options = "".join(f", {name}={value}" for name, value in self.options.items())
        grid = ", ".join(f"{var.name} < {extent}" for var, extent in self.grid)
        lines = [f"kernel {self.name}({', '.join(str(p.name) for p in self.func.params)}) for {grid}{options}"]
        for scalar in self.scalars:
            is_device = self.device is not None and scalar.same_as(self.device)
            lines.append(f"    scalar {scalar.name}: {scalar.ty}" + f" < {self.devices}, the device" * is_device)
        lines += [f"    knob {setting}" for setting in self.knobs]
        lines += [f"    assume {assumption}" for assumption in self.assumptions]
        lines += [f"    {tile}" for tile in (*self.params, *self.tiles)]
        return "\n".join([*lines, *_lines(self.body, "    ")])

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def nodes(self) -> Iterator[Node]:
        """Every node, loops and branches before what is in them."""
        return walk(self.body)

    def analyzer(self) -> sym.Analyzer:
        """An analyzer that knows what is assumed, and the ranges of the variables of devices, the grid and loops."""
        analyzer = sym.Analyzer()
        bind_assumed(analyzer, self.assumptions)
        if self.device is not None:
            analyzer.bind(self.device, ir.Range.from_min_extent(0, self.devices))
        for var, extent in self.grid:
            analyzer.bind(var, ir.Range.from_min_extent(0, extent))
        for node in self.nodes():
            if isinstance(node, Loop):
                analyzer.bind(node.var, ir.Range.from_min_extent(node.start, node.extent))
        return analyzer


@dataclass(frozen=True, eq=False)
class TileSequence:
    """A function of several kernels, which run one after the other, and the scratch that they share.

    Attributes
    ----------
    func : PrimFunc
        The function as written, with a number for each of its knobs.
    params : tuple of Tile
        Its tensors in global memory, in order.
    scalars : tuple of Var
        Its scalar parameters, in order.
    scratch : tuple of Tile
        The tensors in global memory that it has for the time of a call, in order.
    kernels : tuple of TileProgram
        The kernels, in order: ``name_1``, ``name_2``, ... of what each uses of the parameters and of the scratch.
    knobs : tuple of Setting
        What the knobs of the function that was written are in this one, in order, and why.
    assumptions : tuple of Assumption
        What it takes for granted of its open extents and its scalars.
    """

    func: tirx.PrimFunc
    params: tuple[Tile, ...]
    scalars: tuple[tirx.Var, ...]
    scratch: tuple[Tile, ...]
    kernels: tuple[TileProgram, ...]
    knobs: tuple[Setting, ...] = ()
    assumptions: tuple[Assumption, ...] = ()

    device: ClassVar[None] = None
    devices: ClassVar[int] = 1

    @property
    def name(self) -> str:
        return name_of(self.func)

    def __str__(self) -> str:
        """What was read: the parameters, the scratch, and each kernel; it reads like the source."""
        lines = [f"function {self.name}({', '.join(str(p.name) for p in self.func.params)})"]
        lines += [f"    scalar {scalar.name}: {scalar.ty}" for scalar in self.scalars]
        lines += [f"    knob {setting}" for setting in self.knobs]
        lines += [f"    assume {assumption}" for assumption in self.assumptions]
        lines += [f"    {tile}" for tile in self.params]
        lines += [f"    scratch {str(tile).removeprefix('global ')}" for tile in self.scratch]
        return "\n".join([*lines, *(f"    {line}" for kernel in self.kernels for line in str(kernel).splitlines())])

    def _repr_html_(self) -> str:
        return preformatted(str(self))

    def nodes(self) -> Iterator[Node]:
        """Every node, a kernel's before those of the kernels after it."""
        return (node for kernel in self.kernels for node in kernel.nodes())


def name_of(func: tirx.PrimFunc) -> str:
    """The name of a function, under which it is compiled."""
    return str(func.attrs["global_symbol"]) if func.attrs and "global_symbol" in func.attrs else "main"


def _lines(body: tuple[Node, ...], indent: str) -> Iterator[str]:
    for node in body:
        yield f"{indent}{node}{':' if node.bodies else ''}"
        for number, inner in enumerate(node.bodies):
            if number and inner:
                yield f"{indent}else:"
            yield from _lines(inner, indent + "    ")
