"""Modules that the package makes itself, of every sort that there is: all of them must be accepted as workloads."""

from __future__ import annotations

import random
from collections.abc import Iterator

import tvm
from tvm import s_tir
from tvm.ir import IRModule
from tvm.s_tir import meta_schedule as ms

import tvm_axe as axe
from tvm_axe.programs import PROGRAMS
from tvm_axe.records.database import find_databases, read_workloads
from tvm_axe.records.shipped import SHIPPED
from tvm_axe.tile.kernels.registry import KERNELS


def programs() -> Iterator[tuple[str, IRModule]]:
    """Every distributed program, as it is and with each of its schedules."""
    for name, build in PROGRAMS.items():
        first, *others = build.axes
        program = build(axe.Mesh({first: 2, **dict.fromkeys(others, 2)}), "test")
        yield name, IRModule({"main": program.func})
        for schedule in program.schedules:
            yield f"{name}, {schedule}", program.schedule(schedule).mod


def kernels() -> Iterator[tuple[str, IRModule]]:
    """Every program of every tile kernel, before it is lowered."""
    for name, kernel in KERNELS.items():
        for target in ({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}, {"kind": "cuda", "arch": "sm_90a"}):
            resolved = axe.machines.resolve_target(target)
            for func in kernel.recipe(resolved, kernel.cases[0]).programs:
                yield f"{name}, {target['kind']}", IRModule({"main": func.func})


def shipped() -> Iterator[tuple[str, IRModule]]:
    """The workloads of the databases that ship."""
    for folder in find_databases(SHIPPED):
        for line in read_workloads(folder):
            if line is not None:
                yield folder.name, ms.database.Workload.from_json(list(line)).mod


def drawn(mod: IRModule, seed: int, steps: int = 6) -> s_tir.Schedule:
    """A schedule of random stock primitives; those that don't apply are passed over."""
    choose, sch = random.Random(seed), s_tir.Schedule(mod, seed=seed + 1)
    for _ in range(steps):
        blocks = sch.get_child_blocks(sch.get_sblock("root", func_name="main"))
        block = choose.choice(blocks)
        loops = sch.get_loops(block)
        kind = choose.choice(["split", "tile", "fuse", "reorder", "vectorize", "unroll", "read", "write", "annotate"])
        try:
            match kind:
                case "split":
                    sch.split(choose.choice(loops), [None, choose.choice([2, 3, 4])])
                case "tile":
                    loop = choose.choice(loops)
                    sch.split(loop, sch.sample_perfect_tile(loop, 3, 8))
                case "fuse":
                    at = choose.randrange(len(loops) - 1)
                    sch.fuse(loops[at], loops[at + 1])
                case "reorder":
                    sch.reorder(*choose.sample(loops, 2))
                case "vectorize":
                    sch.vectorize(loops[-1])
                case "unroll":
                    sch.unroll(choose.choice(loops))
                case "read":
                    sch.cache_read(block, 0, "global")
                case "write":
                    sch.cache_write(block, 0, "global")
                case "annotate":
                    factor = sch.sample_categorical([1, 2, 4], [0.5, 0.25, 0.25])
                    sch.annotate(loops[0], "pragma_auto_unroll_max_step", factor)
        except (tvm.error.InternalError, s_tir.ScheduleError, ValueError, RuntimeError):
            continue
    return sch
