"""What several commands are given: a kernel, the mesh and the schedule of it, and an engine."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from inspect import isfunction
from typing import TYPE_CHECKING, Any, NamedTuple

from tvm_axe.cli.command import names, positive
from tvm_axe.collective import registry
from tvm_axe.defaults import WORK_DIR
from tvm_axe.errors import InputError

if TYPE_CHECKING:
    from types import ModuleType

    from tvm.ir import IRModule
    from tvm.tirx import PrimFunc

    from tvm_axe.collective import Workers
    from tvm_axe.executable import Executable
    from tvm_axe.layout import Mesh
    from tvm_axe.schedule import Schedule

__all__ = [
    "MAIN",
    "GivenKernel",
    "add_engine_argument",
    "add_hosts_argument",
    "add_kernel_arguments",
    "engine_options",
    "given_kernel",
    "given_target",
    "given_workers",
    "mesh_of",
]

MAIN = "from tvm_axe.cli import main; raise SystemExit(main())"  # what a rank runs, and a host that is asked


class GivenKernel(NamedTuple):
    """What the arguments that the commands share come to."""

    func: PrimFunc
    mesh: Mesh
    schedule: Schedule | None

    def compile(self, target: str, work_dir: str | None) -> Executable:
        """Compile the function as it is scheduled."""
        import tvm_axe as axe

        if self.schedule is not None:
            return axe.compile(self.schedule, target=target, work_dir=work_dir)
        return axe.compile(self.func, mesh=self.mesh, target=target, work_dir=work_dir)


def add_kernel_arguments(
    parser: argparse.ArgumentParser, kernel: str = "a @T.prim_func(s_tir=True) in a Python file"
) -> None:
    """Add the arguments that the commands share."""
    parser.add_argument("kernel", metavar="FILE.py:NAME", help=kernel)
    parser.add_argument("--mesh", metavar="AXIS=SIZE,...", help="devices by mesh axis; default: the file's `mesh`")
    parser.add_argument(
        "--schedule",
        metavar="FILE.py:NAME",
        help="a function that takes an axe.Schedule and applies primitives to it, or a trace that search saved (.json)",
    )
    parser.add_argument(
        "--target",
        help="what to compile for, such as llvm, cuda or cuda:sm_90a (default: what the devices run, llvm without)",
    )
    parser.add_argument(
        "--work-dir", default=WORK_DIR, metavar="DIR", help="where tuning records are (default: %(default)s)"
    )


def add_engine_argument(parser: argparse.ArgumentParser, ranks: bool = False, gpus: bool = False) -> None:
    """Add the choice of an engine; for a command that starts `ranks`, of their number too, or of the `gpus`."""
    engines = registry.names()
    parser.add_argument(
        "--engine", default=engines[0], help=f"what a mesh's devices are: {', '.join(engines)} (default: %(default)s)"
    )
    if gpus:
        parser.add_argument(
            "--gpus",
            type=_numbers,
            metavar="N,...",
            help="with --engine cuda: the GPU of each device",
        )
    if ranks:
        parser.add_argument("-n", type=positive, metavar="RANKS", help="with --engine mpi: how many ranks to start")
        add_hosts_argument(
            parser, "with --engine mpi, ranks or cuda: start as many ranks on each of these hosts, or as a:3,b:1 says"
        )


def add_hosts_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the hosts, and what reaches them."""
    parser.add_argument("--hosts", type=names, metavar="HOST,...", help=what)
    parser.add_argument(
        "--launcher", metavar="PROGRAM", help="what runs commands on hosts and takes ssh's arguments (default: ssh)"
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """What the engine that the arguments name is launched with, beside the mesh."""
    return {} if args.gpus is None else {"gpus": args.gpus}


def given_target(args: argparse.Namespace) -> str:
    """What to compile for: what the arguments say, or what the engine's devices run."""
    if args.target is not None:
        return str(args.target)
    return registry.find(args.engine).target if "engine" in args else "llvm"


def given_kernel(args: argparse.Namespace, needed: str | None = None) -> GivenKernel:
    """Load the kernel, the mesh and the schedule that the arguments name; `needed` says what a mesh is needed for."""
    from tvm import IRModule, tirx

    from tvm_axe.cli.inputs import call_given, load_attribute, read_trace
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
    mesh = Mesh.parse(args.mesh) if args.mesh is not None else mesh_of(files, needed or (apply and "a schedule"))
    if apply is None:
        return GivenKernel(func, mesh, None)
    sch = Schedule(func, mesh=mesh)
    call_given(args.schedule, apply, sch)
    return GivenKernel(func, mesh, sch)


def given_workers(args: argparse.Namespace, mesh: Mesh) -> Workers:
    """Launch the engine that the arguments name, in a job of ranks if it has them.

    To be called before anything is computed, because the other ranks of a job go no further.
    """
    from tvm_axe.collective import launch
    from tvm_axe.collective.dealing import deal
    from tvm_axe.collective.hosts import start_on_hosts
    from tvm_axe.collective.reaching import launcher_of
    from tvm_axe.collective.start import check_count, start_ranks
    from tvm_axe.processes import interpreter

    program = interpreter(MAIN, *args.arguments)
    if args.hosts is not None and args.engine not in ("mpi", "ranks", "cuda"):
        raise InputError(f"--hosts is for --engine mpi, ranks or cuda; {args.engine} is on this machine alone")
    if args.launcher is not None and args.hosts is None:
        raise InputError("--launcher is what reaches --hosts, and there are none")
    hosts = () if args.hosts is None else deal(args.hosts, mesh)
    if args.engine == "ranks" or (hosts and args.engine != "mpi"):
        check_count(mesh, args.n)
        start_on_hosts(hosts or deal(["localhost"], mesh), program, launcher_of(args.launcher))
    elif registry.find(args.engine).has_ranks:
        start_ranks(mesh, args.n, program, hosts, args.launcher)
    elif args.n is not None:
        by_ranks = " or ".join(name for name in registry.names() if registry.find(name).has_ranks)
        raise InputError(f"-n is for --engine {by_ranks}; {args.engine} has a worker for each of the mesh's devices")
    return launch(mesh, engine=args.engine, **engine_options(args))


def _only_function(spec: str, mod: IRModule) -> PrimFunc:
    """The function of a module that holds one function."""
    from tvm import tirx

    found = [func for func in mod.functions.values() if isinstance(func, tirx.PrimFunc)]
    if len(found) != 1 or len(mod.functions) != 1:
        names = ", ".join(sorted(var.name_hint for var in mod.functions)) or "nothing"
        raise InputError(f"{spec}: a module that holds one PrimFunc is needed; this one holds {names}")
    return found[0]


def mesh_of(files: Sequence[ModuleType], needed: str | None) -> Mesh:
    """The variable `mesh` of the first file that has one; one device where nothing that is `needed` has one."""
    from tvm_axe.layout import Mesh

    for file in files:
        mesh = getattr(file, "mesh", None)
        if isinstance(mesh, Mesh):
            return mesh
    if needed:
        raise InputError(f"{needed} needs a mesh: give --mesh, as in --mesh tp=2, or a variable `mesh` in its file")
    return Mesh({"device": 1})
