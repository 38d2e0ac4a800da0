"""`tvm-axe run`: a kernel on arrays from a file."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from tvm_axe.cli.command import Command
from tvm_axe.cli.given import add_engine_argument, add_kernel_arguments, given_kernel, given_target, given_workers
from tvm_axe.errors import InputError

__all__ = ["COMMAND"]

REPEAT = 5


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_kernel_arguments(parser)
    add_engine_argument(parser, ranks=True, gpus=True)
    parser.add_argument("--inputs", required=True, metavar="IN.npz", help="one array for each input, by parameter name")
    parser.add_argument("--output", required=True, metavar="OUT.npz", help="the outputs are written here")
    parser.add_argument(
        "--timeline", metavar="T.json", help="what each device did when in one more run, for ui.perfetto.dev"
    )


def _run(args: argparse.Namespace) -> None:
    """`tvm-axe run`"""
    import numpy as np

    from tvm_axe.analysis.parameters import parameters
    from tvm_axe.cli.inputs import match_arrays, read_npz

    program = given_kernel(args)
    with given_workers(args, program.mesh) as workers:
        params = parameters(program.func)
        arrays = read_npz(args.inputs)
        exe = program.compile(given_target(args), args.work_dir)
        inputs = match_arrays(args.inputs, arrays, [params[name] for name in exe.inputs])
        result = exe.run(workers, *inputs)
        milliseconds = 1e3 * statistics.median(exe.time(workers, *inputs, repeat=REPEAT))
        timeline = None if args.timeline is None else exe.trace(workers, *inputs)
    outputs: dict[str, Any] = dict(zip(exe.outputs, result if isinstance(result, tuple) else (result,)))
    try:
        # An open file, as savez adds .npz to a name that lacks it.
        with open(args.output, "wb") as file:
            np.savez(file, **outputs)
    except OSError as error:
        raise InputError(f"{args.output}: cannot be written: {error.strerror}") from error
    if timeline is not None:
        timeline.save(args.timeline)
    written = ", ".join(str(params[name]) for name in outputs)
    print(
        f"{args.kernel} on {program.mesh} ({args.engine}, {given_target(args)}): {written} to {args.output}; "
        f"median of {REPEAT} runs {milliseconds:.3f} ms; {exe.bytes:,} bytes received by the busiest device"
    )
    if timeline is not None:
        print(timeline.text())


COMMAND = Command("run", "run a kernel on arrays from an npz file", _add_arguments, _run)
