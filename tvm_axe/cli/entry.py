"""The command line, `tvm-axe COMMAND`; docs/cli.md describes it.

What a user got wrong is said in one message and ends with exit code 2; anything else keeps its traceback. The compiler
is imported by the commands that need it, not by this module.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from inspect import isfunction
from typing import TYPE_CHECKING, Any, NamedTuple

from tvm_axe.cli.db import add_db_command
from tvm_axe.cli.layout import add_layout_command
from tvm_axe.cli.meta import add_meta_command
from tvm_axe.cli.stream import add_stream_command
from tvm_axe.collective import registry
from tvm_axe.errors import AxeError, InputError

if TYPE_CHECKING:
    from types import ModuleType

    from tvm.ir import IRModule
    from tvm.tirx import PrimFunc

    from tvm_axe.executable import Executable
    from tvm_axe.layout import Mesh
    from tvm_axe.meta import TaskResult
    from tvm_axe.schedule import Schedule

__all__ = ["main"]

REPEAT = 5


class Program(NamedTuple):
    """What the arguments that `run`, `show` and `tune` share come to."""

    func: PrimFunc
    mesh: Mesh
    schedule: Schedule | None

    def compile(self, target: str, work_dir: str | None) -> Executable:
        """Compile the function as it is scheduled."""
        import tvm_axe as axe

        if self.schedule is not None:
            return axe.compile(self.schedule, target=target, work_dir=work_dir)
        return axe.compile(self.func, mesh=self.mesh, target=target, work_dir=work_dir)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv
        The arguments behind the program's name; those of the process when left out.

    Returns
    -------
    The exit code: 0, or 1 when `programs` finds something wrong, or 2 when something that the user gave cannot be used.
    Malformed options exit with 2 too, by way of `SystemExit`, and Ctrl-C gives 130.
    """
    args = _parser().parse_args(argv)
    args.arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code: int | None = args.command(args)
        sys.stdout.flush()
    except AxeError as error:
        print(f"tvm-axe: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("tvm-axe: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. What is still buffered must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return code or 0


def _parser() -> argparse.ArgumentParser:
    """The arguments of all the commands."""
    parser = argparse.ArgumentParser(prog="tvm-axe", description="Distribute, tune and run TensorIR kernels.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    program = argparse.ArgumentParser(add_help=False)
    program.add_argument("kernel", metavar="FILE.py:NAME", help="a @T.prim_func(s_tir=True) in a Python file")
    program.add_argument("--mesh", metavar="AXIS=SIZE,...", help="devices by mesh axis; default: the file's `mesh`")
    program.add_argument(
        "--schedule",
        metavar="FILE.py:NAME",
        help="a function that takes an axe.Schedule and applies primitives to it, or a trace that search saved (.json)",
    )
    program.add_argument("--target", default="llvm", help="what to compile for (default: %(default)s)")
    program.add_argument(
        "--work-dir", default="tuning_logs", metavar="DIR", help="tuning records are here (default: %(default)s)"
    )

    engine = argparse.ArgumentParser(add_help=False)
    names = registry.names()
    engine.add_argument(
        "--engine", default=names[0], help=f"what a mesh's devices are: {', '.join(names)} (default: %(default)s)"
    )

    run = commands.add_parser("run", parents=[program, engine], help="run a kernel on arrays from an npz file")
    run.add_argument("--inputs", required=True, metavar="IN.npz", help="one array for each input, by parameter name")
    run.add_argument("--output", required=True, metavar="OUT.npz", help="the outputs are written here")
    run.add_argument(
        "--timeline", metavar="T.json", help="what each device did when in one more run, for ui.perfetto.dev"
    )
    run.add_argument("-n", type=_positive, metavar="RANKS", help="with --engine mpi: how many ranks to start")
    run.set_defaults(command=_run)

    show = commands.add_parser("show", parents=[program], help="print layouts, collectives, bytes and the local module")
    show.set_defaults(command=_show)

    tune = commands.add_parser(
        "tune",
        parents=[program, engine],
        help="tune a kernel, a Relax model, a schedule's local kernels, or a mesh's schedule",
    )
    tune.add_argument(
        "--trials", type=_positive, default=64, help="measurements for each kernel on average (default: %(default)s)"
    )
    tune.add_argument(
        "--patience", type=_positive, metavar="N", help="leave a kernel that N measurements in a row didn't make faster"
    )
    tune.add_argument("--seed", type=int, help="of the search; the first candidates are the same for the same seed")
    tune.add_argument(
        "--pack-weights",
        action="store_true",
        help="of a Relax model: let kernels have their weights packed once, as compile(..., pack_weights=True) does",
    )
    tune.add_argument("--report", metavar="OUT.html", help="the page on this job (default: in the work directory)")
    tune.add_argument("--keep", default="", metavar="NAME,...", help="outputs that a mesh's schedule may leave sharded")
    tune.add_argument("--save", metavar="BEST.json", help="write a mesh's best schedule's trace, for --schedule")
    tune.set_defaults(command=_tune)

    search = commands.add_parser("search", parents=[program, engine], help="find the fastest communication schedule")
    search.add_argument("--keep", default="", metavar="NAME,...", help="outputs that may stay sharded, such as state")
    search.add_argument("--inputs", metavar="IN.npz", help="arrays to run on (default: random ones)")
    search.add_argument("--measure", type=_positive, default=12, help="schedules to run at most (default: %(default)s)")
    search.add_argument(
        "--trials", type=int, default=0, help="tune each schedule's local kernels first (default: as they are recorded)"
    )
    search.add_argument("--save", metavar="BEST.json", help="write the best schedule's trace, for --schedule")
    search.set_defaults(command=_search)

    programs = commands.add_parser(
        "programs", parents=[engine], help="every distributed program under every schedule, beside numpy"
    )
    programs.add_argument(
        "--mesh", metavar="AXIS=SIZE,...", help="devices by mesh axis; default: two on each axis that a program uses"
    )
    programs.add_argument("--programs", metavar="NAME,...", help="which ones (default: all)")
    programs.add_argument("--size", choices=("test", "uneven", "bench"), default="test", help="(default: %(default)s)")
    programs.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    programs.set_defaults(command=_programs)

    add_db_command(commands)
    add_layout_command(commands)
    add_meta_command(commands)
    add_stream_command(commands)

    tile = commands.add_parser("tile", help="what becomes of a tile program").add_subparsers(
        metavar="COMMAND", required=True
    )
    explain = tile.add_parser("explain", help="print the program as it is read, and every decision about it")
    explain.add_argument(
        "program", metavar="FILE.py:NAME", help="a tile program, or a function that returns one without arguments"
    )
    explain.add_argument(
        "--target", default="llvm", help="llvm, cuda, cuda:sm_80 and the like, or JSON (default: %(default)s)"
    )
    explain.set_defaults(command=_explain)

    kernels = commands.add_parser("kernels", help="the tile kernels: their parameters, or each of them beside numpy")
    kernels.add_argument("names", nargs="*", metavar="NAME", help="which ones (default: all)")
    kernels.add_argument("--check", action="store_true", help="run each over a set of shapes, beside numpy in float64")
    kernels.add_argument("--target", default="cpu", help="cpu or cuda (default: %(default)s)")
    kernels.add_argument("--seed", type=int, help="draws the data of an earlier check again")
    kernels.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    kernels.set_defaults(command=_kernels)

    cache = commands.add_parser("cache", help="compiled tile kernels on disk: where, how many, how large")
    cache.add_argument("--clear", action="store_true", help="remove them")
    cache.set_defaults(command=_cache)

    demo = commands.add_parser("demo", help="a tensor-parallel MLP block on two workers, beside numpy")
    demo.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    demo.set_defaults(command=_demo)
    return parser


def _names(text: str) -> list[str]:
    """The names in a list with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _program(args: argparse.Namespace) -> Program:
    """Load the kernel, the mesh and the schedule that the arguments name."""
    from tvm import IRModule, tirx

    from tvm_axe.inputs import load_attribute, read_trace
    from tvm_axe.layout import Mesh
    from tvm_axe.schedule import Schedule

    func, kernel_file = load_attribute(
        args.kernel, lambda value: isinstance(value, tirx.PrimFunc | IRModule), "a PrimFunc, or a module of one"
    )
    if isinstance(func, IRModule):
        func = _only_function(args.kernel, func)
    files, apply = [kernel_file], None
    if args.schedule is not None and args.schedule.endswith(".json"):
        apply = read_trace(args.schedule)
    elif args.schedule is not None:
        apply, schedule_file = load_attribute(args.schedule, isfunction, "a function that takes an axe.Schedule")
        files.insert(0, schedule_file)
    mesh = Mesh.parse(args.mesh) if args.mesh is not None else _mesh_of(files, needed=apply is not None)
    if apply is None:
        return Program(func, mesh, None)
    sch = Schedule(func, mesh=mesh)
    apply(sch)
    return Program(func, mesh, sch)


def _only_function(spec: str, mod: IRModule) -> PrimFunc:
    """The function of a module that holds one function."""
    from tvm import tirx

    found = [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]
    if len(found) != 1 or len(mod.functions) != 1:
        names = ", ".join(sorted(var.name_hint for var in mod.functions)) or "nothing"
        raise InputError(f"{spec}: a module that holds one PrimFunc is needed; this one holds {names}")
    return found[0]


def _mesh_of(files: Sequence[ModuleType], needed: bool) -> Mesh:
    """The variable `mesh` of the first file that has one; one device where no mesh is needed."""
    from tvm_axe.layout import Mesh

    for file in files:
        mesh = getattr(file, "mesh", None)
        if isinstance(mesh, Mesh):
            return mesh
    if needed:
        raise InputError("a schedule needs a mesh: give --mesh, as in --mesh tp=2, or a variable `mesh` in its file")
    return Mesh({"device": 1})


def _run(args: argparse.Namespace) -> None:
    """`tvm-axe run`"""
    import numpy as np

    from tvm_axe.collective import launch
    from tvm_axe.collective.start import start_ranks
    from tvm_axe.inputs import match_arrays, parameters, read_npz

    program = _program(args)
    if registry.find(args.engine).has_ranks:
        start_ranks(program.mesh, args.n, ["-m", "tvm_axe", *args.arguments])
    elif args.n is not None:
        by_ranks = " or ".join(name for name in registry.names() if registry.find(name).has_ranks)
        raise InputError(f"-n is for --engine {by_ranks}; {args.engine} has a worker for each of the mesh's devices")
    # First, because the other ranks of an MPI job go no further.
    with launch(program.mesh, engine=args.engine) as workers:
        params = parameters(program.func)
        arrays = read_npz(args.inputs)
        exe = program.compile(args.target, args.work_dir)
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
        f"{args.kernel} on {program.mesh} ({args.engine}, {args.target}): {written} to {args.output}; "
        f"median of {REPEAT} runs {milliseconds:.3f} ms; {exe.bytes:,} bytes communicated by each device"
    )
    if timeline is not None:
        print(timeline.text())


def _show(args: argparse.Namespace) -> None:
    """`tvm-axe show`"""
    print(_program(args).compile(args.target, args.work_dir).show())


def _tune(args: argparse.Namespace) -> None:
    """`tvm-axe tune`"""
    from tvm_axe.meta import tune

    names = ("trials", "patience", "work_dir", "report", "seed")
    common = {name: getattr(args, name) for name in names}
    kernels: PrimFunc | IRModule
    if (model := _model(args)) is not None:
        kernels, target = model
    elif (program := _program(args)).schedule is not None:
        # The target of the local kernels, as a device has only its share of the cores.
        exe = program.compile(args.target, None)
        kernels, target = exe.module, exe.target
    elif program.mesh.size == 1:
        kernels, target = program.func, args.target
    else:
        if args.pack_weights:
            raise InputError("--pack-weights is for a Relax model on one device; leave it out")
        _tune_schedule(args, program, common)
        return
    result = tune(kernels, target=target, pack_weights=args.pack_weights, **common)
    _print_tasks(result.tasks)
    for name, why in result.left_out.items():
        print(f"{name}: not tuned: {why}")
    print(f"report: {result.report}")


def _tune_schedule(args: argparse.Namespace, program: Program, common: Mapping[str, Any]) -> None:
    """`tvm-axe tune` of how a program is scheduled on a mesh."""
    from tvm_axe.inputs import write_trace
    from tvm_axe.meta.mesh import tune_program

    result = tune_program(
        program.func, program.mesh, target=args.target, engine=args.engine, keep=_names(args.keep), **common
    )
    _print_tasks(result.tasks)
    print(f"report: {result.report}")
    print(f"the fastest schedule: {result.notation}")
    if args.save is not None:
        write_trace(args.save, result.schedule.trace)


def _model(args: argparse.Namespace) -> tuple[IRModule, Any] | None:
    """The kernels of the Relax model that the arguments name, and their target; None if they name something else."""
    from tvm import IRModule, tirx

    import tvm_axe as axe
    from tvm_axe.inputs import load_attribute
    from tvm_axe.layout import Mesh
    from tvm_axe.relax.fuse import is_model

    model, file = load_attribute(
        args.kernel, lambda value: isinstance(value, tirx.PrimFunc | IRModule), "a PrimFunc, or a module"
    )
    if not isinstance(model, IRModule) or not is_model(model):
        return None
    if args.schedule is not None:
        raise InputError(f"--schedule is for a kernel; {args.kernel} is a Relax model, which needs none")
    mesh = Mesh.parse(args.mesh) if args.mesh is not None else _mesh_of([file], needed=False)
    if mesh.size == 1:
        return model, args.target
    exe = axe.compile(model, mesh=mesh, target=args.target, work_dir=None)
    return exe.module, exe.target


def _print_tasks(tasks: Sequence[TaskResult]) -> None:
    """A line for each task."""
    for task in tasks:
        before, best = (f"{ms:.3f} ms" if ms is not None else "no result" for ms in (task.before_ms, task.best_ms))
        failed = f", {len(task.failures)} failed" if task.failures else ""
        if task.best_ms is None and task.failures:
            failed += f", the first: {task.failures[0]}"
        print(f"{task.name}: {before} untuned, {best} tuned ({task.trials} trials{failed})")


def _search(args: argparse.Namespace) -> None:
    """`tvm-axe search`"""
    from tvm_axe.inputs import match_arrays, parameters, read_npz, write_trace
    from tvm_axe.meta.mesh.exhaustive import search

    program = _program(args)
    inputs = None
    if args.inputs is not None:
        params = parameters(program.func)
        names = program.compile(args.target, None).inputs
        inputs = match_arrays(args.inputs, read_npz(args.inputs), [params[name] for name in names])
    result = search(
        program.func if program.schedule is None else program.schedule,
        None if program.schedule is not None else program.mesh,
        args.target,
        keep=_names(args.keep),
        inputs=inputs,
        engine=args.engine,
        measure=args.measure,
        trials=args.trials,
        work_dir=args.work_dir,
    )
    print(result.table())
    print(f"the best, {result.best.notation}:")
    print("\n".join(f"  {step}" for step in result.best.steps))
    if args.save is not None:
        write_trace(args.save, result.trace)


def _programs(args: argparse.Namespace) -> int:
    """`tvm-axe programs`"""
    from tvm_axe.layout import Mesh
    from tvm_axe.programs.report import main as run_programs

    mesh = None if args.mesh is None else Mesh.parse(args.mesh)
    names = None if args.programs is None else [name.strip() for name in args.programs.split(",")]
    return run_programs(mesh, args.engine, names, args.size, as_json=args.json)


def _explain(args: argparse.Namespace) -> None:
    """`tvm-axe tile explain`"""
    from tvm_axe.cli.tile import main as explain

    explain(args.program, args.target)


def _kernels(args: argparse.Namespace) -> int:
    """`tvm-axe kernels`"""
    from tvm_axe.tile.kernels.check import main as run_kernels

    return run_kernels(args.names, args.target, args.check, args.seed, as_json=args.json)


def _cache(args: argparse.Namespace) -> None:
    """`tvm-axe cache`"""
    from tvm_axe.machines.cache import Cache

    cache = Cache()
    if args.clear:
        print(f"{cache.folder}: {cache.clear()} compiled kernels removed")
        return
    entries = cache.entries()
    print(f"{cache.folder}: {len(entries)} compiled kernels, {sum(size for _, size, _ in entries):,} bytes")


def _demo(args: argparse.Namespace) -> None:
    """`tvm-axe demo`"""
    from tvm_axe.demo import main as run_demo

    run_demo(as_json=args.json)
