"""From a plan to a function that upstream compiles for a CPU."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from tvm_axe.tile.dispatch import TypeTable
from tvm_axe.tile.nodes import (
    Assign,
    Branch,
    Copy,
    Fill,
    Gemm,
    Let,
    Loop,
    Node,
    Parallel,
    Print,
    Reduce,
    Scan,
    Signal,
    Sort,
    Wait,
)
from tvm_axe.tile.philox import draws
from tvm_axe.tile.targets.llvm import atomics, flags, guards, philox
from tvm_axe.tile.targets.llvm.conversions import compute_dtype, convert
from tvm_axe.tile.targets.llvm.copies import write_copy, write_fill
from tvm_axe.tile.targets.llvm.elements import write_parallel
from tvm_axe.tile.targets.llvm.gemm import write_gemm
from tvm_axe.tile.targets.llvm.orders import write_scan, write_sort
from tvm_axe.tile.targets.llvm.plan import CpuPlan
from tvm_axe.tile.targets.llvm.prints import source as printing
from tvm_axe.tile.targets.llvm.prints import write_print
from tvm_axe.tile.targets.llvm.reduces import write_reduce
from tvm_axe.tile.targets.llvm.writer import Writer


def lower(plan: CpuPlan, *, check_bounds: bool = False) -> tirx.PrimFunc:
    """Write the function: the blocks in a loop, parallel if none waits, each a sequence of loops over its tiles.

    Parameters
    ----------
    plan : CpuPlan
        The plan.
    check_bounds : bool
        Check every index of every load and store. The function then raises TileError after its last block if one was
        out of bounds; what was to be loaded or stored there was element 0 instead. Slow.
    """
    program = plan.program
    checks = guards.Guards() if check_bounds else None
    writer = Writer(plan, checks)
    imported = [guards.SOURCE] if check_bounds else []
    meets = plan.serial
    imported += [flags.SOURCE] if meets else []
    joins = (join for node in program.nodes() for join in node.joins if join[0].scope == "global")
    kinds = dict.fromkeys((kind, tile.dtype) for tile, kind in joins)
    imported += [atomics.source(kind, dtype) for kind, dtype in kinds]
    imported += printing(program)
    imported += [philox.source()] if draws(program.func) else []
    extents = [extent for _, extent in program.grid]
    with IRBuilder() as builder, T.prim_func(s_tir=True), ExitStack() as scope:
        if imported:
            scope.enter_context(T.attr(0, "pragma_import_llvm", "".join(imported)))
        with (T.serial if meets else T.parallel)(functools.reduce(operator.mul, extents)) as block:
            for var, extent in program.grid[:0:-1]:
                writer.scalars[var] = T.Bind(block % extent)
                block = block // extent
            # There are as many as the slowest has. A remainder by an extent that isn't known would keep upstream's
            # simplifier busy for longer than all of LLVM.
            writer.scalars[program.grid[0][0]] = T.Bind(block)
            writer.allocate()
            _write(writer, program.body)
        if checks is not None:
            checks.raise_first()
    body = builder.get().body
    # Others write while a kernel that waits runs, so no pointer of its has memory to itself.
    return program.func.with_body(body).with_attr({"global_symbol": program.name, "tirx.noalias": not meets})


def _write(writer: Writer, body: Sequence[Node]) -> None:
    for node in body:
        if node not in writer.plan.left_out:
            _NODES.of(node)(writer, node)


def _loop(writer: Writer, node: Loop) -> None:
    if node.until is not None and node.is_endless:
        with T.While(tirx.Not(writer.expr(node.until))):
            _write(writer, node.body)
        return
    with T.serial(writer.expr(node.extent)) as i:
        writer.scalars[node.var] = writer.expr(node.start) + i
        _write(writer, node.body)
        if node.until is not None:
            with T.If(writer.expr(node.until)), T.Then():
                T.evaluate(tirx.break_loop())


def _branch(writer: Writer, node: Branch) -> None:
    with T.If(writer.expr(node.condition)):
        with T.Then():
            _write(writer, node.then)
        if node.otherwise:
            with T.Else():
                _write(writer, node.otherwise)


def _let(writer: Writer, node: Let) -> None:
    writer.scalars[node.var] = T.Bind(writer.expr(node.value))


def _assign(writer: Writer, node: Assign) -> None:
    value = convert(writer.expr(node.value), compute_dtype(node.tile.dtype))
    writer.store(node.tile, writer.exprs(node.indices), value)


_NODES: TypeTable[Callable[[Writer, Any], None]] = TypeTable(
    "code for a CPU",
    {
        Assign: _assign,
        Branch: _branch,
        Copy: write_copy,
        Fill: write_fill,
        Gemm: write_gemm,
        Let: _let,
        Loop: _loop,
        Parallel: write_parallel,
        Print: write_print,
        Reduce: write_reduce,
        Scan: write_scan,
        Sort: write_sort,
        Signal: flags.write_signal,
        Wait: flags.write_wait,
    },
)
