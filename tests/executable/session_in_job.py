"""A session as rank 0 of an MPI job; run by test_mesh_session.py, with the path of a safetensors file to write."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

import tvm_axe as axe
from tvm_axe.executable import write_safetensors


class Pair(nn.Module):
    """Two products, of which the second leaves a sum over the devices."""

    def __init__(self) -> None:
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.down(op.relu(self.up(x)))


PINS = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "x": None}
SHAPES = (8, 64), (128, 64), (128,), (64, 128)


def drawn() -> list[np.ndarray]:
    """An input, and the weights."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, dtype="float32") for shape in SHAPES]


def main(path: Path) -> None:
    """Print the relative error of two calls, the second of what the first left, and the bytes copied for it."""
    mesh = axe.Mesh({"tp": 2})
    mod, _ = Pair().export_tvm({"forward": {"x": nn.spec.Tensor([8, 64], "float32")}})
    exe = axe.compile(mod, mesh=mesh, work_dir=None, pins=PINS)
    x, up, bias, down = drawn()
    with axe.launch(mesh, engine="mpi") as workers:  # the other ranks go no further
        weights = {"up.weight": up, "up.bias": bias, "down.weight": down}
        write_safetensors(path, weights)
        for params in (weights, path):
            with exe.load(workers, params) as model:
                want = x.astype("float64")
                value = x
                for _ in range(2):
                    before = model.copied
                    value = model.forward(value)
                    want = np.maximum(want @ up.T + bias, 0) @ down.T
                error = np.abs(value.numpy() - want).max() / np.abs(want).max()
                print(f"error {error:.1e}, copied {model.copied - before}, held {model.held}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
