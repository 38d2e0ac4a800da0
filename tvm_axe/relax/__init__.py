"""A Relax model: on one device its kernels as they were tuned, on a mesh its values shared.

`share_model` shares any model over a mesh axis; ``tvm_axe.compile(model, mesh)`` compiles what it makes.
`schedule_model` makes one program out of a model, whose pairs of matmuls it shards by the primitives of
`tvm_axe.schedule`, with the sums over the devices fused with what follows them:
``tvm_axe.compile(schedule_model(model, mesh), mesh)``. So does the pipeline ``"axe"`` of ``tvm.relax.get_pipeline``, as
far as the module that each device runs.

>>> from tvm.relax.frontend import nn
>>> from tvm_axe import Mesh
>>> class Block(nn.Module):
...     def __init__(self):
...         self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8)
...     def forward(self, x):
...         return self.down(nn.op.relu(self.up(x))) + x
>>> mod, _ = Block().export_tvm({"forward": {"x": nn.spec.Tensor([4, 8], "float32")}})
>>> from tvm_axe.lower import lower
>>> lowered = lower(schedule_model(mod, Mesh({"tp": 2})), Mesh({"tp": 2}))
>>> for name in ("up_weight", "down_weight", "down_bias"):
...     print(f"{name:<11} {lowered.layouts[name]}")
up_weight   S[(2, 16, 8) : (1@tp, 8, 1)]
down_weight S[(8, 2, 16) : (16, 1@tp, 1)]
down_bias   S[8 : 1] + R[2 : 1@tp]
>>> for stage in lowered.stages:
...     print(f"{stage.name:<20} {stage.kind}, {stage.bytes} bytes")
matmul               local, 0 bytes
relu                 local, 0 bytes
matmul1_rf           local, 0 bytes
matmul1_gv_gv_global mesh kernel, 128 bytes
"""

from tvm_axe.relax.alone import compile_model
from tvm_axe.relax.merging import merge
from tvm_axe.relax.model import schedule_model
from tvm_axe.relax.pairs import Pair, find_pairs
from tvm_axe.relax.pipeline import axe_pipeline
from tvm_axe.relax.sharing import share_model

__all__ = ["Pair", "axe_pipeline", "compile_model", "find_pairs", "merge", "schedule_model", "share_model"]
