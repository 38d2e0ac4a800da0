"""`tvm-axe search`: the fastest communication schedule, by measuring all that may be it."""

from __future__ import annotations

import argparse

from tvm_axe.cli.command import Command, names, positive
from tvm_axe.cli.given import add_engine_argument, add_kernel_arguments, engine_options, given_kernel, given_target

__all__ = ["COMMAND"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_kernel_arguments(parser)
    add_engine_argument(parser, gpus=True)
    parser.add_argument("--keep", default="", metavar="NAME,...", help="outputs that may stay sharded, such as state")
    parser.add_argument("--inputs", metavar="IN.npz", help="arrays to run on (default: random ones)")
    parser.add_argument("--measure", type=positive, default=12, help="schedules to run at most (default: %(default)s)")
    parser.add_argument(
        "--trials", type=int, default=0, help="tune each schedule's local kernels first (default: as they are recorded)"
    )
    parser.add_argument("--save", metavar="BEST.json", help="write the best schedule's trace, for --schedule")


def _search(args: argparse.Namespace) -> None:
    """`tvm-axe search`"""
    from tvm_axe.analysis.parameters import parameters
    from tvm_axe.cli.inputs import match_arrays, read_npz, write_trace
    from tvm_axe.meta.mesh.exhaustive import search

    program = given_kernel(args, needed="a search")
    inputs = None
    if args.inputs is not None:
        params = parameters(program.func)
        order = program.compile(given_target(args), None).inputs
        inputs = match_arrays(args.inputs, read_npz(args.inputs), [params[name] for name in order])
    result = search(
        program.func if program.schedule is None else program.schedule,
        None if program.schedule is not None else program.mesh,
        given_target(args),
        keep=names(args.keep),
        inputs=inputs,
        engine=args.engine,
        options=engine_options(args),
        measure=args.measure,
        trials=args.trials,
        work_dir=args.work_dir,
    )
    print(result.table())
    print(f"the best, {result.best.notation}:")
    print("\n".join(f"  {step}" for step in result.best.steps))
    if args.save is not None:
        write_trace(args.save, result.trace)


COMMAND = Command("search", "find the fastest communication schedule", _add_arguments, _search)
