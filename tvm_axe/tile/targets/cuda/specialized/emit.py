"""Code of the specialized model: a producer warp that loads, warpgroups that multiply and compute.

The producer and the consumers run the same loops and branches. The producer, one thread of the last warpgroup, has the
copies from global memory into circular buffers: it waits for a slot to be empty, and TMA makes it full. The consumers
have the steps that `specialized.schedule` made of everything else. What one knows of the other is the barriers of the
slots.

A kernel that signals has a third role: a warp beside the producer that stores what consumers stage, and signals.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import _tvm
from tvm_axe.tile.targets.cuda import sampling
from tvm_axe.tile.targets.cuda.residency import MIN_BLOCKS
from tvm_axe.tile.targets.cuda.specialized.barriers import BlockContext, Values, when
from tvm_axe.tile.targets.cuda.specialized.consumer import Consumer
from tvm_axe.tile.targets.cuda.specialized.plan import SpecializedPlan
from tvm_axe.tile.targets.cuda.specialized.producer import Producer
from tvm_axe.tile.targets.cuda.specialized.storer import Storer


def lower(plan: SpecializedPlan) -> tirx.PrimFunc:
    """The function that upstream's ``tirx`` pipeline compiles."""
    with _tvm.builder() as builder:
        with _tvm.function_frame():
            T.func_name(plan.program.name)
            T.device_entry()
            # Without a number of blocks the assembler ignores setmaxnreg.
            with T.attr({MIN_BLOCKS: plan.residency.blocks}):
                _emit(BlockContext(plan))
        body = builder.get().body
    func = plan.program.func
    made = tirx.PrimFunc(sampling.parameters(func, plan.samples), body, func.ret_type)
    return made.with_attrs({"global_symbol": plan.program.name})


def _emit(context: BlockContext) -> None:
    """The roles; those that load and store, and the consumers, each in a branch of its own: what setmaxnreg needs."""
    plan = context.plan
    registers = plan.registers
    with T.If(context.group == plan.warpgroups):
        with T.Then():
            if registers:
                T.evaluate(T.ptx.setmaxnreg.dec.sync.aligned.u32(registers[0]))
            with when(context.warp == 0), when(T.cuda.elect_sync()):
                producer = Producer(context)
                _over_tiles(context, producer.tile)
                producer.waits.end()
            if plan.has_storing_warp:
                with when(context.warp == 1), when(T.cuda.elect_sync()):
                    storer = Storer(context)
                    _over_tiles(context, storer.tile)
                    storer.end()
                    storer.waits.end()
        with T.Else():
            if registers:
                T.evaluate(T.ptx.setmaxnreg.inc.sync.aligned.u32(registers[1]))
            consumer = Consumer(context)
            consumer.begin()
            _over_tiles(context, consumer.tile)
            consumer.end()
            consumer.waits.end()


def _over_tiles(context: BlockContext, tile: Callable[[Values], None]) -> None:
    """A role's tiles of the grid."""
    grid, blocks = context.plan.grid, context.plan.grid.blocks
    if not grid.persistent:
        tile({var: T.bind(value) for var, value in grid.point(context.block).items()})
        return
    with T.serial(0, grid.turns(context.block)) as turn:
        index = T.bind(context.block + turn * blocks)
        tile({var: T.bind(value) for var, value in grid.point(index).items()})
