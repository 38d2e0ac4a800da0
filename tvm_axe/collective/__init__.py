"""How devices talk: workers on a mesh, the tensors that they share, and the collectives on them.

```
with launch(Mesh({"tp": 2})) as workers:        # two processes, one of them a thread of this one
    x = workers.mesh_tensor((512, 768), "float32")
    x.slab(0)[:] = ...                          # numpy arrays over the shared memory
    program = workers.load(mod, "llvm")         # a Relax module, compiled by each worker
    workers.call(program, [(x, "tp"), Coord("tp")])
```
"""

from tvm_axe.collective.recording import Called, Recording
from tvm_axe.collective.tensor import Coord, MeshTensor, slab_stride
from tvm_axe.collective.timeline import Arrow, Event, Timeline
from tvm_axe.collective.workers import Argument, Program, Workers, launch
from tvm_axe.errors import WorkerError

__all__ = [
    "Argument",
    "Arrow",
    "Called",
    "Coord",
    "Event",
    "MeshTensor",
    "Program",
    "Recording",
    "Timeline",
    "WorkerError",
    "Workers",
    "launch",
    "slab_stride",
]
