"""What is lost where a mesh's axes are chosen one after another: small models beside every choice along the outer one.

    python scripts/bench_mesh_axes.py --most 400

For each way to run each call along the outer axis (all of them, or so many at random), the inner axis is searched for
what that leaves. The best of these is what a search of both axes at once would find; printed is the time of a call as
the costs have it, of the search beside the best.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable

import numpy as np
import tvm
from tvm.relax.frontend import nn

from tvm_axe.collective.engine import HOST, Rates
from tvm_axe.layout import Link
from tvm_axe.relax import choosing, meshes
from tvm_axe.relax.graph import Graph
from tvm_axe.relax.local import local_graph
from tvm_axe.relax.reading import graph_of, legalized
from tvm_axe.relax.staged import in_pieces

SLOW = Rates(Link(latency=0.0, bandwidth=1e10), memory=1e12, operations=2e10)


class _MLP(nn.Module):
    def __init__(self) -> None:
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.down(nn.op.relu(self.up(x))) + x


class _Two(nn.Module):
    def __init__(self) -> None:
        self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 48, bias=False)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return self.b(nn.op.softmax(self.a(x), axis=-1))


def _exported(module: nn.Module, batch: int) -> tvm.IRModule:
    return module.export_tvm({"forward": {"x": nn.spec.Tensor([batch, 16, 64], "float32")}})[0]


def best(graph: Graph, rates: Rates, part: float, most: int) -> tuple[float, int]:
    """The least time over choices along the outer axis, and how many were tried."""
    outer, inner = meshes.operators_of({"dp": 2, "tp": 2}, rates)
    limit = part * meshes.weights_of(graph)
    search = choosing._Search(graph, outer, {})
    ways = [step.strategies for step in search.steps]
    count = math.prod(map(len, ways))
    rng = np.random.default_rng(0)
    tried = (
        itertools.product(*ways)
        if count <= most
        else ([each[int(rng.integers(len(each)))] for each in ways] for _ in range(most))
    )
    least, groups = math.inf, dict[object, int]()
    for picked in tried:
        for step, strategy in zip(search.steps, picked, strict=True):
            step.strategies = [strategy]
            step.group = groups.setdefault((id(step), strategy), len(groups))
        try:
            chosen = in_pieces(search.solved(0.0, 0.0).chosen, outer)
        except ValueError:
            continue  # terms that nobody combines
        found = choosing.choose(local_graph(chosen, outer), inner, limit)
        if found.weights[0] <= limit:
            least = min(least, found.seconds)
    return least, min(count, most)


def main(most: int) -> None:
    """Print a line for each model, limit and rates."""
    makers: dict[str, Callable[[], nn.Module]] = {"mlp": _MLP, "two products around a softmax": _Two}
    for (name, make), batch, (speed, rates), part in itertools.product(
        makers.items(), (1, 4), (("host", HOST), ("no latency", SLOW)), (0.3, 0.55)
    ):
        graph = graph_of(legalized(_exported(make(), batch)), "forward")
        levels = meshes.along_axes(graph, meshes.operators_of({"dp": 2, "tp": 2}, rates), part, {})
        least, tried = best(graph, rates, part, most)
        ratio = levels[-1].seconds / least
        print(
            f"{name}, batch {batch}, {speed}, {part:.0%} of the weights: {ratio:.3f} of the best of {tried}", flush=True
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=400)
    main(parser.parse_args().most)
