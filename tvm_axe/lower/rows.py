"""A sum over devices that ends in what is computed of its rows: one kernel, in which the devices meet by themselves.

A fused kernel of a few rows takes no longer than the barrier in front of it. So where kernels of several devices can
wait for each other, one of at most `MOST` rows is a tile program: a block has a row, tells all peers that the row of
its own terms is there, loads what else it needs meanwhile, waits for them, and adds up all devices' terms where they
are. All that follows is computed of the row, which stays in registers: elements, its sum, its largest, and what is made
of those, down to its scale and its elements in eight bits. Each device does all rows, or with many of them its share,
which it stores to all.

    barrier, mm_hidden_squares_norm_Y_global   ->   mm_hidden_squares_norm_Y_global, which meets

`tvm_axe.tile.kernels.reduce_norm` is such a program of one norm; here it is written for the blocks of a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from tvm import ir, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T
from tvm.target import Target

from tvm_axe import _tvm, tile
from tvm_axe.analysis.expressions import alike, is_zero, loads_in
from tvm_axe.analysis.patterns import REDUCE, added, is_copy, is_pointwise, joined, summed
from tvm_axe.collective.ops import wide_type
from tvm_axe.collective.tensor import check_dtype, peers_of
from tvm_axe.errors import TileError
from tvm_axe.layout.dtypes import dtype_bytes
from tvm_axe.lower.derive import MESH_KERNEL, Step
from tvm_axe.lower.infer import Sharding
from tvm_axe.lower.localize import OWN, Kernel
from tvm_axe.lower.pairing import Unfit
from tvm_axe.lower.program import Block, ScheduledProgram
from tvm_axe.machines import backend_of
from tvm_axe.tile import lowering
from tvm_axe.tile.backend import TileBackend
from tvm_axe.tile.kernels.reduce_norm import share_of
from tvm_axe.tile.kernels.rows import padded
from tvm_axe.tile.program import TileProgram

__all__ = ["MOST", "Meeting", "meeting_of"]

MOST = 64
"""Rows up to which a stage is such a kernel; beyond, copies and a kernel that fills the processors are as good."""
_REDUCED = {tirx.Add: tile.sum, tirx.Max: tile.max, tirx.Min: tile.min}
"""What reduces a row, by the operator that a block has for it."""
_CONSTANT = (tirx.IntImm, tirx.FloatImm)


@dataclass(frozen=True, eq=False)
class Meeting:
    """A stage as such a kernel.

    Attributes
    ----------
    program : TileProgram
        What all devices run together.
    kernel : Kernel
        Its function.
    shardings : Mapping[Buffer, Sharding]
        Of the buffer that it has beside the program's, its flags, which are zero before a run and behind it.
    step : Step
        The stage with what it moves now.
    about : str
        What it is, in words.
    """

    program: TileProgram
    kernel: Kernel
    shardings: Mapping[tirx.Buffer, Sharding]
    step: Step
    about: str


def meeting_of(
    program: ScheduledProgram,
    step: Step,
    shardings: Mapping[tirx.Buffer, Sharding],
    private: frozenset[tirx.Buffer],
    target: Target,
) -> Meeting | str | None:
    """Return the kernel that a stage is, why it is none, or None where nobody would think so.

    Parameters
    ----------
    program : ScheduledProgram
        The program.
    step : Step
        The stage.
    shardings : Mapping[Buffer, Sharding]
        Where the program's buffers live.
    private : frozenset of Buffer
        The intermediates that live inside one step.
    target : Target
        Resolved.
    """
    backend = backend_of(target)
    if step.kind != MESH_KERNEL or step.stage.overlap is not None or step.axis not in program.mesh.names:
        return None
    if not isinstance(backend, TileBackend) or not backend.meets:
        return None
    if added(step.stage.blocks[0].realize.block) is None:
        return None
    try:
        return _Rows(program, step, shardings, private, target).meeting()
    except (Unfit, TileError) as error:
        return str(error)


class _Rows:
    """The blocks of a stage, by what they make of a row."""

    def __init__(
        self,
        program: ScheduledProgram,
        step: Step,
        shardings: Mapping[tirx.Buffer, Sharding],
        private: frozenset[tirx.Buffer],
        target: Target,
    ) -> None:
        self.program, self.step, self.shardings, self.private, self.target = program, step, shardings, private, target
        assert step.axis is not None  # as asked for
        self.axis, self.devices = step.axis, program.mesh.axis_size(step.axis)
        first, *self.others = step.stage.blocks
        self.terms, self.total = first.reads[0].buffer, first.writes[0].buffer
        self.rows, self.columns = self._extents(first)
        self.width = padded(self.columns)
        self.results = self._results()
        self.given, sliced = self._given()
        self.share = self.rows // self.devices if sliced else share_of(self.devices, self.rows)

    def _extents(self, first: Block) -> tuple[int, int]:
        """The rows and columns of the sum, of which each device has a term."""
        load, statement = summed(first.realize.block), first.realize.block
        shape = _shape(self.total)
        if load is None or not alike(list(load.indices)[1:], list(statement.body.indices)):
            raise Unfit(f"block {first.name!r} is no sum over the devices of {self.axis}")
        terms = self.shardings[self.terms]
        if len(shape) != 2 or terms.partial != {0} or terms.cuts != ((self.axis,), (), ()) or terms.memory is not None:
            raise Unfit(f"{self.terms.name} isn't a matrix of terms on each device")
        if shape[0] > MOST:
            raise Unfit(f"{shape[0]} rows; a kernel that meets by itself has at most {MOST}")
        return shape[0], shape[1]

    def _results(self) -> dict[tirx.Buffer, tirx.Buffer]:
        """What all devices have in the end, each of which buffer of the kernel."""
        found: dict[tirx.Buffer, tirx.Buffer] = {}
        for block in self.step.stage.blocks:
            out = block.writes[0].buffer
            if out in self.private:
                continue
            sharding = self.shardings[out]
            if any(sharding.cuts) or sharding.memory is not None or sharding.root is not None:
                raise Unfit(f"{out.name} lies as {sharding.layout}; valid is the whole of it on each device")
            if _shape(out) not in ((self.rows, self.columns), (self.rows,)):
                raise Unfit(f"{out.name} isn't as large as the sum, {self.rows} x {self.columns}, nor a number a row")
            found[out] = block.reads[0].buffer if self._copies(block) else out
        self.computed = [
            block for block in self.others if not (block.writes[0].buffer in found and self._copies(block))
        ]
        return found

    def _copies(self, block: Block) -> bool:
        return is_copy(block.realize.block) and block.reads[0].buffer in self.private

    def _given(self) -> tuple[dict[tirx.Buffer, bool], bool]:
        """What it reads beside the terms, and whether a device has its share of the rows alone; and if any is so.

        They are matrices as large as the sum, or vectors of a row's elements.
        """
        made = {block.writes[0].buffer for block in self.step.stage.blocks}
        found: dict[tirx.Buffer, bool] = {}
        for buffer in (read.buffer for block in self.computed for read in block.reads if read.buffer not in made):
            sharding, shape = self.shardings[buffer], _shape(buffer)
            if shape not in ((self.rows, self.columns), (self.columns,)) or buffer.same_as(self.terms):
                raise Unfit(f"{buffer.name} is no matrix as large as the sum, nor a vector of a row's elements")
            found[buffer] = len(shape) == 2 and sharding.cuts == ((self.axis,), ())
            if (any(sharding.cuts) and not found[buffer]) or sharding.memory is not None or sharding.root is not None:
                raise Unfit(f"{buffer.name} lies as {sharding.layout}; valid is the whole of it on each device")
            if found[buffer] and self.rows % self.devices:
                raise Unfit(
                    f"each device has a share of {buffer.name}'s {self.rows} rows, and they aren't equal; fuse an "
                    "all-reduce that isn't split, of which each device computes all rows, or declare it whole"
                )
        return found, any(found.values())

    def meeting(self) -> Meeting:
        """The kernel."""
        flags, sharding = self._flags()
        made = tile.read(self._program())
        decided = lowering.plan(made, self.target)
        func = lowering.emit(decided, peers_of(self.program.mesh, self.axis)[1])
        attrs = {str(key): value for key, value in func.attrs.items() if key != "global_symbol"}
        spread = OWN if not self.share else self.axis
        arguments = (
            (self.terms, self.axis),
            *((buffer, OWN) for buffer in self.given),
            (flags, self.axis),
            *((buffer, spread) for buffer in self.results),
        )
        last = len(arguments) - len(self.results)
        touched = tuple((number, number >= last) for number in range(len(arguments)) if number != last - 1)
        kernel = Kernel(
            tirx.PrimFunc(func.params, func.body, func.ret_type).with_attrs(attrs),
            arguments,
            (self.axis,),
            touched=touched,
        )
        terms, outs = (sum(self._row_bytes(buffer) for buffer in each) for each in ([self.terms], self.results))
        moved = (self.devices - 1) * (self.share * (terms + outs) if self.share else self.rows * terms)
        pushed = frozenset(self.results) if self.share else frozenset[tirx.Buffer]()
        received = (moved,) * self.program.mesh.size
        step = replace(self.step, pulled=frozenset({self.terms}), pushed=pushed, received=received)
        whose = f"its share of {self.share}" if self.share else f"all {self.rows}"
        about = (
            f"one kernel, in which the devices meet; each computes {whose} row{'s' * ((self.share or self.rows) > 1)}"
        )
        return Meeting(made, kernel, {flags: sharding}, step, about)

    def _row_bytes(self, buffer: tirx.Buffer) -> int:
        """The bytes of a row of the terms, or of a result."""
        return dtype_bytes(str(buffer.dtype), 1 if _shape(buffer) == (self.rows,) else self.columns)

    def _flags(self) -> tuple[tirx.Buffer, Sharding]:
        mesh = self.program.mesh
        slab = (self.devices, self.rows, 2)
        shape = (*(mesh.axis_size(axis) for axis in mesh.names), *slab)
        cuts = (*((axis,) for axis in mesh.names), *(() for _ in slab))
        sharding = Sharding.blocks(shape, mesh, cuts, frozenset(range(len(mesh.names))))
        return tirx.decl_buffer(list(slab), "int32", f"{self.program.names[self.terms]}_flags"), sharding

    def _program(self) -> tirx.PrimFunc:
        """The tile program: terms, what it reads beside, flags, what it leaves, the device."""
        devices, rows, columns, share, width = self.devices, self.rows, self.columns, self.share, self.width
        with IRBuilder() as builder, T.prim_func():
            T.func_name("reduce_rows")
            x = T.arg("x", tile.mesh_tensor((devices, rows, columns), str(self.terms.dtype)))
            tensors = {
                buffer: T.arg(f"in_{n}", T.Buffer((share, columns) if sliced else _shape(buffer), str(buffer.dtype)))
                for n, (buffer, sliced) in enumerate(self.given.items())
            }
            flags = T.arg("flags", tile.mesh_tensor((devices, devices, rows, 2), "int32"))
            slabs = (devices,) if share else ()
            typed: Callable[..., Any] = tile.mesh_tensor if share else T.Buffer
            outs = [
                T.arg(f"out_{n}", typed((*slabs, *_shape(out)), str(out.dtype))) for n, out in enumerate(self.results)
            ]
            me = T.arg("me", T.int32())
            with tile.kernel(share or rows, device=me) as i:
                row = me * share + i if share else i
                made = (self.total, *(block.writes[0].buffer for block in self.computed))
                held = {buffer: tile.fragment((1, width), str(buffer.dtype)) for buffer in self.given}
                held |= {buffer: tile.fragment((1, width)[: len(_shape(buffer))], str(buffer.dtype)) for buffer in made}
                part = tile.fragment((1, width), str(self.terms.dtype))
                wide = wide_type(check_dtype(str(self.total.dtype))).name
                total = held[self.total] if str(self.total.dtype) == wide else tile.fragment((1, width), wide)
                tile.signal(flags[0:devices, me, i, 0])
                for (buffer, sliced), tensor in zip(self.given.items(), tensors.values()):
                    own = i if sliced else row
                    tile.copy(tensor[own, 0] if len(_shape(buffer)) == 2 else tensor[0], held[buffer])
                tile.fill(total, 0)
                tile.wait(flags[me, 0:devices, i, 0], reset=True)
                with T.serial(devices) as d:
                    tile.copy(x[d, row, 0], part)
                    with tile.parallel(1, width) as (r, c):
                        T.buffer_store(total, total[r, c] + _as(part[r, c], wide), [r, c])
                if not total.same_as(held[self.total]):
                    with tile.parallel(1, width) as (r, c):
                        T.buffer_store(held[self.total], T.cast(total[r, c], str(self.total.dtype)), [r, c])
                for block in self.computed:
                    self._compute(block, held, row)
                if share:
                    with T.serial(devices) as d:
                        for out, source in zip(outs, self.results.values()):
                            tile.copy(held[source], out[(d, row, 0)[: len(out.shape)]])
                    tile.signal(flags[0:devices, me, i, 1])
                    tile.wait(flags[me, 0:devices, i, 1], reset=True)
                else:
                    for out, source in zip(outs, self.results.values()):
                        tile.copy(held[source], out[(row, 0)[: len(out.shape)]])
        return builder.get()

    def _compute(self, block: Block, held: Mapping[tirx.Buffer, tirx.Buffer], row: tirx.Expr) -> None:
        """A block's part of the row."""
        statement = block.realize.block
        out, own = statement.body.buffer, held[statement.body.buffer]
        row_var, column_var = self._iterators(block)
        if is_pointwise(statement) and len(_shape(out)) == 2:
            with tile.parallel(1, self.width) as (r, c):
                value = self._value(block, statement.body.value, held, (row_var, row), (column_var, c), r)
                T.buffer_store(own, value, [r, c])
        elif is_pointwise(statement):
            with tile.parallel(1) as r:
                value = self._value(block, statement.body.value, held, (row_var, row), (None, None), r)
                T.buffer_store(own, value, [r])
        else:
            self._reduce(block, held, row)

    def _reduce(self, block: Block, held: Mapping[tirx.Buffer, tirx.Buffer], row: tirx.Expr) -> None:
        """A block's sum of the row, or the largest or smallest of what it makes of the row's elements."""
        statement = block.realize.block
        out, start = statement.body.buffer, statement.init.value
        row_var, column_var = self._iterators(block)
        kind = type(statement.body.value)
        word, term = _REDUCED.get(kind), joined(statement, kind)
        alone = term is not None and not any(load.source.same_as(out) for load in loads_in([term]))
        exact = word is not tile.sum or (is_zero(start) and str(out.dtype) == "float32")
        if word is None or not alone or not exact or column_var is None or not isinstance(start, _CONSTANT):
            raise Unfit(f"block {block.name!r} is no sum of a row in float32, nor the largest or smallest of one")
        each = tile.fragment((1, self.width), str(out.dtype))
        with tile.parallel(1, self.width) as (r, c):
            value = _as(self._value(block, term, held, (row_var, row), (column_var, c), r), str(out.dtype))
            inside = value if self.width == self.columns else T.Select(c < self.columns, value, start)
            T.buffer_store(each, inside, [r, c])
        # A sum starts from zero by itself; the largest of a row may be what it starts from.
        if word is not tile.sum:
            tile.fill(held[out], start)
        word(each, held[out], accumulate=word is not tile.sum)

    def _iterators(self, block: Block) -> tuple[tirx.Var, tirx.Var | None]:
        """The iterators over rows and over a row's elements."""
        statement = block.realize.block
        out = _shape(statement.body.buffer)
        spatial = [it for it in statement.iter_vars if it.iter_type != REDUCE]
        sums = [it for it in statement.iter_vars if it.iter_type == REDUCE]
        wanted = out in ((self.rows, self.columns), (self.rows,)) and len(sums) == (statement.init is not None)
        places = [it for i in statement.body.indices for it in spatial if it.var.same_as(i)]
        columns = places[1] if len(places) == 2 else sums[0] if sums else None
        same = columns is None or int(columns.dom.extent) == self.columns
        if not wanted or not len(places) == len(spatial) == len(out) or not same or (len(out) == 2 and sums):
            raise Unfit(f"block {block.name!r} makes no row of its own, nor a sum of one")
        return places[0].var, None if columns is None else columns.var

    def _value(
        self,
        block: Block,
        value: tirx.Expr,
        held: Mapping[tirx.Buffer, tirx.Buffer],
        row: tuple[tirx.Var | None, tirx.Expr],
        column: tuple[tirx.Var | None, tirx.Expr | None],
        at: tirx.Expr,
    ) -> tirx.Expr:
        """An expression of a block at a place of the row: its iterators with what they are, and its part's only row."""

        def on_load(load: ir.TensorLoad) -> tirx.Expr:
            own, rank = held.get(load.source), len(load.indices)
            wanted = [row[0], column[0]] if rank == 2 else [column[0] if load.source in self.given else row[0]]
            same = [var is not None and index.same_as(var) for index, var in zip(load.indices, wanted)]
            if own is None or len(same) != rank or not all(same):
                raise Unfit(f"block {block.name!r} reads {load.source.name} elsewhere than at its own place")
            return own[at, column[1]] if len(own.shape) == 2 else own[at]

        def on_var(var: tirx.Var) -> tirx.Expr:
            for own, place in (row, column):
                if own is not None and own.same_as(var):
                    return _as(place, str(var.ty.dtype))
            return var

        # Indices are mapped before the load that has them, so loads go first.
        return _tvm.structural_map(_tvm.structural_map(value, (ir.TensorLoad, on_load)), (tirx.Var, on_var))


def _as(value: tirx.Expr, dtype: str) -> tirx.Expr:
    return value if str(value.ty.dtype) == dtype else tirx.Cast(dtype, value)


def _shape(buffer: tirx.Buffer) -> tuple[int, ...]:
    return tuple(int(extent) for extent in buffer.shape)
