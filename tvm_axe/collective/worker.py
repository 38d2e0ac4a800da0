"""One worker: what it does for the controller's commands, and the functions that its programs may call.

A worker is a thread of a Disco session: worker 0 (with the engine `threads`, every worker) in the controller's process,
the others each alone in a process that runs `serve`. Whatever goes wrong in a command is answered through the control
block; nothing may be raised to Disco, which would end the process.

Functions that a program may call with `R.call_packed`, on the tensors that it got as arguments; none of them waits,
except the barrier:

| name | arguments |
|---|---|
| `axe.barrier` | |
| `axe.all_reduce` | source (n, *shape), target (n, *shape), rank |
| `axe.reduce_scatter` | source (n, *shape), target (*local shape), dim, rank |
| `axe.all_gather` | source (*local shape), target (n, *shape), dim, rank |

(n, *shape) is the view of a mesh tensor along an axis, `rank` the worker's coordinate on it; see `ops`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tvm_axe import _tvm
from tvm_axe.collective import ops
from tvm_axe.collective.arena import Arena
from tvm_axe.collective.sync import ABORTED, DONE, FAILED, LATE, Aborted, Control, Late
from tvm_axe.collective.tensor import decode_view
from tvm_axe.layout import Mesh


class Site:
    """What the workers of one launch that live in this process have in common: their memory and compiled programs."""

    def __init__(self, mesh: Mesh, arena: Arena, timeout: float, cores: Sequence[int]) -> None:
        self.mesh = mesh
        self.arena = arena
        self.timeout = timeout
        self.cores = tuple(cores)
        self.control = Control(arena.map, mesh.size)
        self._executables: dict[int, Any] = {}
        self._compiling = threading.Lock()

    def executable(self, program: int, compile_it: Callable[[], Any]) -> Any:
        """Return the program's executable, compiled by the first worker here that asks for it."""
        with self._compiling:
            if program not in self._executables:
                self._executables[program] = compile_it()
            return self._executables[program]

    def unload(self, program: int) -> None:
        """Drop the program's executable."""
        with self._compiling:
            self._executables.pop(program, None)


class Worker:
    """Worker `rank` of a launch."""

    def __init__(self, site: Site, rank: int) -> None:
        self.rank = rank
        self._site = site
        self._coords = site.mesh.coords(rank)
        self._programs: dict[int, relax.VirtualMachine] = {}
        self._left_barrier: tuple[int, str] | None = None

    def barrier(self) -> None:
        """Wait for all the workers of the launch."""
        try:
            self._site.control.barrier(self.rank, self._site.timeout)
        except Aborted:
            self._left_barrier = ABORTED, ""  # what the program makes of the error isn't an Aborted any more
            raise
        except Late as error:
            self._left_barrier = LATE, json.dumps(error.missing)
            raise

    def execute(self, sequence: int, command: str) -> None:
        """Run a command (JSON: a name and its arguments) and answer it; raises nothing."""
        control = self._site.control
        self._left_barrier = None
        outcome, text = DONE, ""
        try:
            name, *arguments = json.loads(command)
            with np.errstate(all="ignore"):  # as in compiled code, an overflow is an infinity and not worth a warning
                _COMMANDS[name](self, *arguments)
        except BaseException as error:
            failure = FAILED, "".join(traceback.format_exception(error))
            outcome, text = self._left_barrier or failure
            traceback.clear_frames(error.__traceback__)  # else a cycle with it may keep the arena mapped for long
            control.abort()
        control.finish(self.rank, sequence, outcome, text)

    def start(self) -> None:
        """Give this worker its share of the cores."""
        _tvm.use_threads(max(1, len(self._site.cores) // self._site.mesh.size), self._site.cores)

    def load(self, program: int, module: Sequence[Any], target: str) -> None:
        """Compile a module, given as JSON text in shared memory, and make a virtual machine for it."""

        def compile_it() -> Any:
            text = decode_view(module, self._site.arena, self._site.mesh, self._coords).tobytes().decode()
            return tvm.compile(tvm.ir.load_json(text), tvm.target.Target(json.loads(target)))

        self._programs[program] = relax.VirtualMachine(self._site.executable(program, compile_it), tvm.cpu())

    def unload(self, program: int) -> None:
        """Drop a program."""
        self._programs.pop(program, None)
        self._site.unload(program)

    def run(self, program: int, function: str, arguments: Sequence[Any]) -> None:
        """Run a function of a program once."""
        self._programs[program][function](*map(self._decode, arguments))

    def time(
        self, program: int, function: str, arguments: Sequence[Any], warmup: int, repeat: int, seconds: Sequence[Any]
    ) -> None:
        """Run a function `repeat` times and write the seconds of each run, without the wait before it, to `seconds`."""
        entry, values = self._programs[program][function], [self._decode(argument) for argument in arguments]
        result = decode_view(seconds, self._site.arena, self._site.mesh, self._coords)
        for i in range(-warmup, repeat):
            self.barrier()
            start = time.perf_counter()
            entry(*values)
            stop = time.perf_counter()
            if i >= 0:
                result[i] = stop - start

    def collective(self, name: str, source: Sequence[Any], target: Sequence[Any], numbers: Sequence[Any]) -> None:
        """Run one of the collectives on two mesh tensors; `numbers` are its dim, if it has one, and its rank."""
        site = self._site
        arrays = (decode_view(tensor, site.arena, site.mesh, self._coords) for tensor in (source, target))
        getattr(ops, name)(*arrays, *map(self._decode, numbers))

    def _decode(self, argument: Any) -> Any:
        """Return the value of an encoded argument: an int, the name of a mesh axis, or a view of a mesh tensor."""
        if isinstance(argument, int):
            return argument
        if isinstance(argument, str):
            return self._coords[argument]
        return _tvm.as_tensor(decode_view(argument, self._site.arena, self._site.mesh, self._coords))


_COMMANDS: dict[str, Callable[..., None]] = {
    "start": Worker.start,
    "load": Worker.load,
    "unload": Worker.unload,
    "run": Worker.run,
    "time": Worker.time,
    "collective": Worker.collective,
}

# The workers of this process by launch and rank, and the one whose command the calling thread is in.
WORKERS: dict[tuple[str, int], Worker] = {}
_current = threading.local()


def _execute(launch: str, sequence: int, command: str) -> None:
    _current.worker = WORKERS[launch, _tvm.disco_rank()]
    _current.worker.execute(sequence, command)


def _barrier() -> None:
    _current.worker.barrier()


def _all_reduce(source: Any, target: Any, rank: int) -> None:
    ops.all_reduce(_tvm.as_array(source), _tvm.as_array(target), rank)


def _reduce_scatter(source: Any, target: Any, dim: int, rank: int) -> None:
    ops.reduce_scatter(_tvm.as_array(source), _tvm.as_array(target), dim, rank)


def _all_gather(source: Any, target: Any, dim: int, rank: int) -> None:
    ops.all_gather(_tvm.as_array(source), _tvm.as_array(target), dim, rank)


_tvm.register_functions(
    {
        _tvm.DISCO_EXECUTE: _execute,
        "axe.barrier": _barrier,
        "axe.all_reduce": _all_reduce,
        "axe.reduce_scatter": _reduce_scatter,
        "axe.all_gather": _all_gather,
    }
)


def serve(
    launch: str,
    rank: int,
    axes: dict[str, int],
    memory: tuple[int, int],
    pipe: tuple[int, int],
    parent: int,
    timeout: float,
    cores: list[int],
) -> None:
    """Be worker `rank` of a launch, in a process of its own, until the controller closes it or is gone.

    Parameters
    ----------
    launch : str
        The launch's name.
    axes : dict
        The mesh.
    memory : (int, int)
        The arena's file descriptor and its size in bytes.
    pipe : (int, int)
        The file descriptors to read commands from and to write to.
    parent : int
        The controller's process id.
    timeout : float
        Seconds to wait at a barrier.
    cores : list of int
        The cores that the launch may use.
    """
    # Ctrl-C in a terminal goes to every process in it; the controller decides what becomes of its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    os.sched_setaffinity(0, cores)
    mesh = Mesh(axes)
    WORKERS[launch, rank] = Worker(Site(mesh, Arena(*memory), timeout, cores), rank)
    _tvm.disco_serve(rank, mesh.size, *pipe)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # there is nothing to save, and taking the compiler down takes longer than the rest of closing


def _follow(parent: int) -> None:
    """End this process when the controller is gone.

    The kernel's own means, PR_SET_PDEATHSIG, follows the thread that started the process, not its process.
    """
    while os.getppid() == parent:
        time.sleep(0.25)
    os._exit(1)
