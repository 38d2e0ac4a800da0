"""A Relax model: on one device its kernels as they were tuned, on a mesh its values shared.

`share_model` shares any model over a mesh axis; ``tvm_axe.compile(model, mesh)`` compiles what it makes. So does the
pipeline ``"axe"`` of ``tvm.relax.get_pipeline``, as far as the module that each device runs.

>>> from tvm.relax.frontend import nn
>>> from tvm_axe import Mesh
>>> class Block(nn.Module):
...     def __init__(self):
...         self.up, self.down, self.norm = nn.Linear(8, 64, bias=False), nn.Linear(64, 8), nn.LayerNorm(8)
...     def forward(self, x):
...         return self.up(self.norm(self.down(nn.op.relu(self.up(x))) + x))
>>> mod, _ = Block().export_tvm({"forward": {"x": nn.spec.Tensor([4, 8], "float32")}})
>>> shared = share_model(mod, Mesh({"tp": 2}))
>>> for step in shared.functions["forward"].steps:
...     print(step.name, *step.moves, sep=", ")
NT_matmul_relu
NT_matmul1
lv1_taken_fused_add_add1, reduce-scatter of lv1, all-gather of lv
layer_norm
NT_matmul
"""

from tvm_axe._tvm import from_onnx, torch_converters
from tvm_axe.relax.alone import compile_model
from tvm_axe.relax.pipeline import axe_pipeline
from tvm_axe.relax.sharing import share_model

__all__ = ["axe_pipeline", "compile_model", "from_onnx", "share_model", "torch_converters"]
