"""`tvm-axe stream`: streaming programs.

They need packages that the rest of the command line does without.
"""

from __future__ import annotations

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_axe.cli.command import Command, Group, positive
from tvm_axe.cli.tile import add_knob_argument, tile_program
from tvm_axe.errors import InputError

if TYPE_CHECKING:
    from tvm_axe.stream import Report, TileStreams

__all__ = ["COMMAND"]


def _add_no_arguments(parser: argparse.ArgumentParser) -> None:
    """`list` takes none."""


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="as `list` names it")
    parser.add_argument(
        "--tile",
        metavar="FILE.py:NAME",
        help="a tile program instead, or a function that returns one without arguments",
    )
    add_knob_argument(parser)
    parser.add_argument(
        "--given",
        action="append",
        type=_number,
        metavar="NAME=VALUE",
        help="with --tile, what a scalar or a variable in a tensor's shape is; once for each",
    )
    parser.add_argument(
        "--model",
        default="small",
        help="small, mixtral or qwen; the two real ones are simulated without values (default: %(default)s)",
    )
    parser.add_argument("--batch", type=positive, default=16, help="tokens or requests (default: %(default)s)")
    parser.add_argument(
        "--block",
        type=_block,
        metavar="N[,N...]",
        help="of attention-coarse, the requests of a block, or those of each; regions get blocks in turn",
    )
    parser.add_argument("--regions", type=positive, metavar="N", help="of attention, side by side (default: 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the requests and the arrays (default: %(default)s)")
    parser.add_argument("--max-cycles", type=positive, metavar="N", help="give up after so many cycles")
    parser.add_argument("--units", action="store_true", help="say what each unit did, too")
    parser.add_argument("--trace", metavar="T.json", help="what each unit did when, for ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def _block(text: str) -> int | tuple[int, ...]:
    """``16`` as a number, ``16,16,32`` as several."""
    sizes = tuple(map(positive, text.split(",")))
    return sizes if len(sizes) > 1 else sizes[0]


def _number(text: str) -> tuple[str, float]:
    """``scale=0.5`` as a name and a number."""
    name, _, value = text.partition("=")
    try:
        return name, int(value) if value.lstrip("-").isdigit() else float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a name and its number, such as scale=0.5") from None


def _add_reproduce_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data", metavar="DIR", help="where other moe_routing/, kv_traces/ and published/ are than the package's"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def _check_packages() -> None:
    """Say what is missing, if something is."""
    if find_spec("sympy") is None:
        raise InputError("tvm-axe stream needs sympy: pip install tvm-axe[stream]")


def _list(args: argparse.Namespace) -> None:
    """`tvm-axe stream list`"""
    _check_packages()
    from tvm_axe.stream.programs.samples import PROGRAMS

    for name, meaning in PROGRAMS.items():
        print(f"{name:24}{meaning}")


def _run(args: argparse.Namespace) -> int:
    """`tvm-axe stream run`"""
    _check_packages()
    if (args.name is None) == (args.tile is None):
        raise InputError("stream run takes the NAME of a program, as `list` names it, or --tile FILE.py:NAME")
    return _run_sample(args) if args.tile is None else _run_tile(args)


def _run_tile(args: argparse.Namespace) -> int:
    """Run a tile program on made-up arrays as streams, and beside them compiled for this machine's CPU."""
    from tvm_axe.stream import Accelerator, from_tile
    from tvm_axe.tile.sequences import read_function

    given = dict(args.given or ())
    program = read_function(tile_program(args.tile), dict(args.knob or ()))
    translated = from_tile(program, Accelerator(), given)
    arrays = _drawn(translated, args.seed)
    loaded = {name: arrays[name] for name in translated.loaded}
    report = translated.run(loaded, trace=args.trace is not None, max_cycles=args.max_cycles)
    error, most = _beside_cpu(translated, report, arrays, given)
    _say(args, report, {"program": args.tile, "seed": args.seed}, error, "the program compiled for this CPU")
    return 0 if error <= most else 1


def _drawn(translated: TileStreams, seed: int) -> dict[str, Any]:
    """Draw an array for each tensor: floats from a normal distribution, integers from 0 to 9."""
    import numpy as np

    rng = np.random.default_rng(seed)
    found = {}
    for tensor in translated.source.params:
        dtype, shape = np.dtype(tensor.dtype), translated.shapes[tensor.name]
        drawn = rng.integers(0, 10, shape) if dtype.kind in "iu" else rng.standard_normal(shape)
        found[tensor.name] = drawn.astype(dtype)
    return found


def _beside_cpu(
    translated: TileStreams, report: Report, arrays: dict[str, Any], given: dict[str, float]
) -> tuple[float, float]:
    """Compare a run's results with those of the program compiled for this machine's CPU.

    Returns the largest difference over the largest value, and the most that rounding accounts for: four units in the
    last place of the program's coarsest type, or 1e-4.
    """
    import ml_dtypes
    import numpy as np

    from tvm_axe.tile import compile

    source = translated.source
    held = {**given, **{name: array.copy() for name, array in arrays.items()}}
    compile(source, target="llvm")(*(held[param.name] for param in source.func.params))
    worst = 0.0
    for name, found in report.tensors.items():
        expected = held[name].astype(np.float64)
        worst = float(np.maximum(worst, np.abs(found.astype(np.float64) - expected).max() / np.abs(expected).max()))
    floats = [tile.dtype for tile in (*source.params, *source.tiles) if "float" in tile.dtype]
    return worst, max([1e-4, *(4 * float(ml_dtypes.finfo(dtype).eps) for dtype in floats)])


def _run_sample(args: argparse.Namespace) -> int:
    """Run a program that comes with the package."""
    from tvm_axe.stream.programs.samples import MODELS, SMALL, make_sample

    if args.model not in MODELS:
        raise InputError(f"--model must be one of {', '.join(MODELS)}, not {args.model}")
    model = MODELS[args.model]
    sizes = {name: value for name in ("regions", "block") if (value := getattr(args, name)) is not None}
    if args.block is not None and args.name != "attention-coarse":
        raise InputError(f"--block is of attention-coarse, not of {args.name}, where requests are in no blocks")
    sample = make_sample(args.name, model, args.batch, args.seed, **sizes)
    report = sample.run(values=model is SMALL, trace=args.trace is not None, max_cycles=args.max_cycles)
    error = sample.error(report) if model is SMALL else None
    said = {"program": args.name, "model": args.model, "batch": args.batch, "seed": args.seed}
    _say(args, report, said, error, "numpy in float64")
    return 0 if error is None or error < 1e-4 else 1


def _say(args: argparse.Namespace, report: Report, said: dict[str, Any], error: float | None, judge: str) -> None:
    """Print a run's report, and how far from a judge its results are."""
    if args.trace is not None:
        report.save_trace(args.trace)
    if args.json:
        found = {
            **said,
            "relative_error": error,
            "cycles": report.cycles,
            "flops": report.flops,
            "utilization": report.utilization,
            "read_bytes": report.read,
            "written_bytes": report.written,
            "tokens": report.tokens,
        }
        print(json.dumps(found))
        return
    print(report if args.units else str(report).splitlines()[0])
    if error is not None:
        print(f"relative error beside {judge}: {error:.1e}")


def _reproduce(args: argparse.Namespace) -> None:
    """`tvm-axe stream reproduce`"""
    _check_packages()
    from tvm_axe.stream.published import DATA
    from tvm_axe.stream.reproduce import reproduce

    found = reproduce(DATA if args.data is None else Path(args.data))
    print(found.json() if args.json else found.text())


COMMAND = Group(
    "stream",
    "streaming tensor programs, computed and simulated",
    (
        Command("list", "the programs that come with the package", _add_no_arguments, _list),
        Command(
            "run", "run a program, or a tile program, on made-up data and beside a judge", _add_run_arguments, _run
        ),
        Command("reproduce", "simulate the published results again", _add_reproduce_arguments, _reproduce),
    ),
)
