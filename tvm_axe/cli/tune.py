"""`tvm-axe tune`: a kernel, a model, or how a program is scheduled on a mesh."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tvm_axe.cli.command import Command, names, positive
from tvm_axe.cli.given import (
    GivenKernel,
    add_engine_argument,
    add_kernel_arguments,
    engine_options,
    given_kernel,
    given_target,
    mesh_of,
)
from tvm_axe.errors import InputError

if TYPE_CHECKING:
    from tvm.ir import IRModule
    from tvm.tirx import PrimFunc

    from tvm_axe.meta import TaskResult
    from tvm_axe.meta.fleet.crew import Machine

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_kernel_arguments(
        parser,
        "in a Python file: a @T.prim_func(s_tir=True), a module of such, a Relax model or a tile program with knobs",
    )
    add_engine_argument(parser, gpus=True)
    parser.add_argument(
        "--trials", type=positive, default=64, help="measurements for each kernel on average (default: %(default)s)"
    )
    parser.add_argument(
        "--patience", type=positive, metavar="N", help="leave a kernel that N measurements in a row didn't make faster"
    )
    parser.add_argument("--seed", type=int, help="what the search draws by: the same seed, the same first candidates")
    parser.add_argument(
        "--pack-weights",
        action="store_true",
        help="of a Relax model: let kernels have their weights packed once, as compile(..., pack_weights=True) does",
    )
    parser.add_argument(
        "--values",
        action="append",
        type=_representatives,
        metavar="NAME=VALUE,...",
        help="of a model: at which values to tune kernels of unknown extents, such as n=1,16,128; once a variable",
    )
    parser.add_argument("--report", metavar="OUT.html", help="the page on this job (default: in the work directory)")
    parser.add_argument(
        "--keep", default="", metavar="NAME,...", help="outputs that a mesh's schedule may leave sharded"
    )
    parser.add_argument("--fleet", metavar="HOST:PORT", help="the tracker whose machines measure (default: this one)")
    parser.add_argument("--key", metavar="NAME", help="with --fleet: what the machines are called there")
    parser.add_argument("--workers", type=positive, metavar="N", help="with --fleet: how many machines at most")
    parser.add_argument("--save", metavar="BEST.json", help="write a mesh's best schedule's trace, for --schedule")


def _representatives(text: str) -> tuple[str, tuple[int, ...]]:
    """``n=1,16,128`` as a name and numbers."""
    name, equals, numbers = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a variable and its values, such as n=1,16,128")
    return name, tuple(positive(number) for number in numbers.split(","))


def _tune(args: argparse.Namespace) -> None:
    """`tvm-axe tune`"""
    from tvm_axe.meta import tune

    common = {name: getattr(args, name) for name in ("trials", "patience", "work_dir", "report", "seed")}
    common |= {name: getattr(args, name) for name in ("fleet", "key", "workers")}
    kernels: PrimFunc | IRModule
    if (model := _model(args)) is not None:
        kernels, target = model
    elif (program := given_kernel(args)).schedule is not None:
        # The target of the local kernels, as a device has only its share of the cores.
        exe = program.compile(given_target(args), None)
        kernels, target = exe.module, exe.target
    elif program.mesh.size == 1:
        kernels, target = program.func, given_target(args)
    else:
        if args.pack_weights:
            raise InputError("--pack-weights is for a Relax model on one device; leave it out")
        if args.values:
            raise InputError("--values is for kernels of unknown extents; those of a program on a mesh are constant")
        _tune_schedule(args, program, common)
        return
    values = dict(args.values) if args.values else None
    result = tune(kernels, target=target, pack_weights=args.pack_weights, values=values, **common)
    _print_tasks(result.tasks)
    for name, why in result.left_out.items():
        print(f"{name}: not tuned: {why}")
    _print_machines(result.machines)
    print(f"report: {result.report}")


def _tune_schedule(args: argparse.Namespace, program: GivenKernel, common: Mapping[str, Any]) -> None:
    """`tvm-axe tune` of how a program is scheduled on a mesh."""
    from tvm_axe.cli.inputs import write_trace
    from tvm_axe.meta.fleet.fleet import fleet_of
    from tvm_axe.meta.mesh import tune_program

    common = dict(common)
    common["fleet"] = fleet_of(*(common.pop(name) for name in ("fleet", "key", "workers")))
    common = {**common, "engine": args.engine, "options": engine_options(args), "keep": names(args.keep)}
    result = tune_program(program.func, program.mesh, target=given_target(args), **common)
    _print_tasks(result.tasks)
    _print_machines(result.machines)
    print(f"report: {result.report}")
    print(f"the fastest schedule: {result.notation}")
    if args.save is not None:
        write_trace(args.save, result.schedule.trace)


def _model(args: argparse.Namespace) -> tuple[IRModule, Any] | None:
    """The kernels of the Relax model that the arguments name, and their target; None if they name something else."""
    from tvm import IRModule, tirx

    import tvm_axe as axe
    from tvm_axe.cli.inputs import load_attribute
    from tvm_axe.layout import Mesh
    from tvm_axe.relax.fuse import is_model

    model, file = load_attribute(
        args.kernel, lambda value: isinstance(value, tirx.PrimFunc | IRModule), "a PrimFunc, or a module"
    )
    if not isinstance(model, IRModule) or not is_model(model):
        return None
    if args.schedule is not None:
        raise InputError(f"--schedule is for a kernel; {args.kernel} is a Relax model, which needs none")
    mesh = Mesh.parse(args.mesh) if args.mesh is not None else mesh_of([file], needed=None)
    if mesh.size == 1:
        return model, given_target(args)
    exe = axe.compile(model, mesh=mesh, target=given_target(args), work_dir=None)
    return exe.module, exe.target


def _print_tasks(tasks: Sequence[TaskResult]) -> None:
    """A line for each task."""
    for task in tasks:
        before, best = (f"{ms:.3f} ms" if ms is not None else "no result" for ms in (task.before_ms, task.best_ms))
        failed = f", {len(task.failures)} failed" if task.failures else ""
        if task.best_ms is None and task.failures:
            failed += f", the first: {task.failures[0]}"
        print(f"{task.name}: {before} untuned, {best} tuned ({task.trials} trials{failed})")


def _print_machines(machines: Sequence[Machine]) -> None:
    """A line for each machine of a fleet."""
    for machine in machines:
        print(f"machine {machine}")


COMMAND = Command(
    "tune",
    "tune a kernel, a Relax model, a schedule's local kernels, or a mesh's schedule",
    _add_arguments,
    _tune,
)
