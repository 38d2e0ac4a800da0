"""How devices talk: workers on a mesh, the tensors that they share, and the collectives on them. ::

    with launch(Mesh({"tp": 2})) as workers:        # two processes, one of them a thread of this one
        x = workers.mesh_tensor((512, 768), "float32")
        x.slab(0)[:] = ...                          # numpy arrays over the shared memory
        program = workers.load(mod, "llvm")         # a Relax module, compiled by each worker
        workers.call(program, [(x, "tp"), Coord("tp")])

What a worker is depends on the engine; `tvm_axe.collective.registry` has the engines by name.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tvm_axe.collective.launching import launch
    from tvm_axe.collective.recording import Called, Recording
    from tvm_axe.collective.tensor import ALL, SLAB, Coord, Inside, MeshTensor, slab_stride
    from tvm_axe.collective.tiles import MeshKernel
    from tvm_axe.collective.workers import Argument, BoundCall, DeviceObject, LoadedProgram, Workers
    from tvm_axe.errors import WorkerError
    from tvm_axe.timeline import Arrow, Event, Timeline

__all__ = [
    "ALL",
    "SLAB",
    "Argument",
    "Arrow",
    "BoundCall",
    "Called",
    "Coord",
    "DeviceObject",
    "Event",
    "Inside",
    "LoadedProgram",
    "MeshKernel",
    "MeshTensor",
    "Recording",
    "Timeline",
    "WorkerError",
    "Workers",
    "launch",
    "slab_stride",
]

_HOMES = {
    "tvm_axe.collective.recording": ["Called", "Recording"],
    "tvm_axe.collective.tensor": ["ALL", "SLAB", "Coord", "Inside", "MeshTensor", "slab_stride"],
    "tvm_axe.collective.tiles": ["MeshKernel"],
    "tvm_axe.timeline": ["Arrow", "Event", "Timeline"],
    "tvm_axe.collective.launching": ["launch"],
    "tvm_axe.collective.workers": ["Argument", "BoundCall", "DeviceObject", "LoadedProgram", "Workers"],
    "tvm_axe.errors": ["WorkerError"],
}


def __getattr__(name: str) -> object:
    # When it is first used, so that the command line knows the engines' names without the compiler.
    for home, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(home), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
