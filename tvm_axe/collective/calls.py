"""What a worker's programs may call, and which worker it is that a call is for.

Functions that a program may call with `R.call_packed`, on the tensors that it got as arguments; none of them waits,
except the barrier:

| name | arguments |
|---|---|
| `axe.barrier` | |
| `axe.arrive` | : says that what this worker did until now is done |
| `axe.wait` | behind: waits until all have arrived as often as this worker less `behind` times |
| `axe.all_reduce` | source (n, *shape), target (n, *shape), axis |
| `axe.reduce_scatter` | source (n, *shape), target (*block), dim, axis |
| `axe.all_gather` | source (*block), target (n, *shape), dim, axis |
| `axe.all_gather_in_place` | source (n, *shape), target (n, *shape), which is the source, dim, axis |
| `axe.all_to_all` | source (n, *piece), target (*piece), gathered, scattered, axis |
| `axe.send` | source (n, *shape), target (*shape), shift, axis |
| `axe.reduce` | source (n, *shape), target (*shape), root, axis |
| `axe.broadcast` | source (n, *shape), target (*shape), root, axis |
| `axe.all_reduce:beside` and so on | the same, on the device's side stream, if it has one |
| `axe.keep` | number, object : keeps the object on this worker in the place of a number |
| `axe.kept` | number : what was kept there |
| `axe.fork`, `axe.wait_count`, `axe.copy`, `axe.flag`, `axe.join` | see `tvm_axe.collective.side` |

(n, *shape) is the view of a mesh tensor along the mesh axis named last; without n it is the worker's own slab.
`plan` says what each one does.

A program says nothing of its worker: it is the one whose command the calling thread is in (`attend`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tvm_axe import _tvm
from tvm_axe.collective.merging import HELD, MERGED, Held
from tvm_axe.collective.plan import VIEWS
from tvm_axe.collective.side import BESIDE, STEPS
from tvm_axe.collective.worker import Worker

# The workers of this process by launch and rank, and the one whose command the calling thread is in.
WORKERS: dict[tuple[str, int], Worker] = {}
_current = threading.local()


def _execute(launch: str, sequence: int, command: str) -> None:
    attend(WORKERS[launch, _tvm.disco_rank()], sequence, command)


def attend(worker: Worker, sequence: int, command: str) -> None:
    """Have a worker execute a command in the calling thread."""
    _current.worker = worker
    worker.execute(sequence, command)


def _barrier() -> None:
    _current.worker.barrier()


def _arrive() -> None:
    _current.worker.arrive()


def _wait(behind: int) -> None:
    _current.worker.wait(behind)


def _keep(number: int, value: Any) -> None:
    _current.worker.objects.keep(number, value)


def _kept(number: int) -> Any:
    return _current.worker.objects.kept(number)


def _merged() -> None:
    """A barrier that the collective beside it holds."""


def _packed(name: str, holds: Held, beside: bool = False) -> Callable[..., None]:
    """What a program calls: tensors for arrays, and the name of the axis for the worker's coordinate on it."""

    def call(source: Any, target: Any, *arguments: Any) -> None:
        *numbers, axis = arguments
        _current.worker.take_part(name, source, target, *numbers, axis=axis, holds=holds, beside=beside)

    return call


def _step(name: str) -> Callable[..., None]:
    """What a program calls for a step of the side stream: its tensors, its numbers, and the name of the axis."""
    count = STEPS[name]

    def call(*arguments: Any) -> None:
        tensors, numbers = arguments[:count], list(arguments[count:])
        axis = str(numbers.pop()) if numbers and not isinstance(numbers[-1], int) else None
        _current.worker.step(name, tensors, [int(number) for number in numbers], axis)

    return call


_tvm.register_functions(
    {_tvm.DISCO_EXECUTE: _execute, "axe.barrier": _barrier, "axe.arrive": _arrive, "axe.wait": _wait}
)
_tvm.register_functions({"axe.keep": _keep, "axe.kept": _kept})
_tvm.register_functions({f"axe.{MERGED}": _merged})
_tvm.register_functions({f"axe.{name}{end}": _packed(name, holds) for name in VIEWS for end, holds in HELD.items()})
_tvm.register_functions({f"axe.{name}{BESIDE}": _packed(name, HELD[""], beside=True) for name in VIEWS})
_tvm.register_functions({f"axe.{name}": _step(name) for name in STEPS})
