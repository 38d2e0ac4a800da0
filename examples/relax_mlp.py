"""A Relax model on a mesh: an MLP of two blocks, its weights shared by two worker processes.

Run it with ``python examples/relax_mlp.py``. Nothing in the model knows of devices: `axe.compile` cuts the first
matmul of each block by columns and the second by rows, because that is cheapest.
"""

from __future__ import annotations

import numpy as np
from tvm.relax.frontend import nn

import tvm_axe as axe
from tvm_axe.relax.sharing import described

TOKENS, WIDTH, HIDDEN = 64, 96, 384


class Block(nn.Module):
    """``x + down(gelu(up(x)))``."""

    def __init__(self) -> None:
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.down(nn.op.gelu(self.up(x))) + x


class Model(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        self.first, self.second = Block(), Block()

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.second(self.first(x))


def main() -> float:
    """Run the model on a mesh and on one device; return the largest relative difference."""
    model, _ = Model().export_tvm({"forward": {"x": nn.spec.Tensor([TOKENS, WIDTH], "float32")}})

    mesh = axe.Mesh({"tp": 2})
    exe = axe.compile(model, mesh=mesh)
    print(described(exe.shared))
    print("weights")
    for each in exe.shared.functions["forward"].inputs:
        print(f"  {each.name:<18} {each.tensors[0].shown}")

    rng = np.random.default_rng(0)
    shapes = [[int(extent) for extent in param.ty.shape] for param in model["forward"].params]
    arrays = [rng.standard_normal(shape, dtype="float32") / np.float32(np.sqrt(shape[-1])) for shape in shapes]
    with axe.launch(mesh) as workers:
        out = exe.run(workers, *arrays)

    want = axe.compile(model)(*arrays)  # without a mesh, for one device
    difference = float(np.abs(out - want).max() / np.abs(want).max())
    print(f"largest relative difference from one device: {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
