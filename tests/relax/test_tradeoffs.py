"""The prices of bytes and weights: what a search finds by them, and choices that are made of two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tvm.relax.frontend import nn

import tvm_axe as axe
from tvm_axe.layout import Link, Mesh
from tvm_axe.relax import share_model, tradeoffs
from tvm_axe.relax.tradeoffs import Call, Found, Point, fewest_bytes, prices


class Known:
    """A search among choices that are known: of equal layers, each in one of some ways, in us, kB and MB."""

    link = Link(1e-6, 1e9)

    def __init__(self, ways: Sequence[Point], layers: int, alike: bool) -> None:
        self.ways = [Point(way.seconds * 1e-6, way.bytes * 1e3, way.weights * 1e6) for way in ways]
        self.layers, self.searches = layers, 0
        self.held: list[object] = [None if alike else way for way in range(len(ways))]

    def solved(self, price: float, toll: float) -> Found:
        self.searches += 1
        costs = [way.seconds + toll * way.bytes + price * way.weights for way in self.ways]
        best = int(np.argmin(costs))
        choice: Any = best
        return self.found([Call(choice, self.held[best], self.ways[best])] * self.layers)

    def found(self, calls: Sequence[Call]) -> Found:
        point = Point(*np.sum([call.point for call in calls], axis=0).tolist())
        chosen: Any = SimpleNamespace(divided=1.0, point=point, ways=[call.choice for call in calls])
        return Found(chosen, calls, point)

    def keep_shared(self, found: Found) -> None:
        pass


WAYS = [
    Point(100.0, 50.0, 10.0),  # the fastest
    Point(102.0, 20.0, 10.0),  # where a byte costs 1/15 and more
    Point(102.9, 12.0, 10.0),  # 0.11
    Point(108.0, 10.0, 10.0),  # 2.6: too slow
    Point(99.0, 1.0, 30.0),  # holds too much
]


def test_the_fewest_bytes_are_found_whatever_they_must_cost() -> None:
    """What bytes cost is worked out where no step of it finds them, ten times as dear, too."""
    for scale in (1.0, 0.1):
        search = Known([way._replace(bytes=way.bytes * scale) for way in WAYS], 1, alike=False)
        chosen: Any = fewest_bytes(search, 100e6, 12e6, 0.0)
        assert chosen.ways == [2]


@pytest.mark.parametrize(
    ("met", "moved", "found"), [(20e3, (10.0, 5.0), 0), (15e3, (10.0, 5.0), 1), (0.0, (17.0, 14.0), 0)]
)
def test_time_is_spent_on_bytes_above_the_closed_form(met: float, moved: tuple[float, float], found: int) -> None:
    """The second way isn't found by steps; half of the bytes are worth 2% of the time, 15% of them aren't."""
    less, least = moved
    ways = [Point(10000.0, 20.0, 10.0), Point(10200.0, less, 10.0), Point(10500.0, least, 10.0)]
    search = Known(ways, 1, alike=False)
    chosen: Any = fewest_bytes(search, 0.0, math.inf, met)
    assert chosen.ways == [found]
    assert (search.searches > 3) == (met < 20e3)


def test_layers_are_held_in_two_ways_for_much_fewer_bytes() -> None:
    """Where one gives way to the other between two calls: within the limits of time and of weights."""
    ways = [Point(100.0, 50.0, 10.0), Point(105.9, 10.0, 10.0), Point(100.0, 0.0, 20.0)]
    chosen: Any = fewest_bytes(Known(ways, 8, alike=True), 1000e6, 80e6, 0.0)
    assert (chosen.ways.count(0), chosen.ways.count(1)) == (4, 4)  # half of them: 3% of the time
    chosen = fewest_bytes(Known(ways[::2], 8, alike=True), 1000e6, 120e6, 0.0)
    assert (chosen.ways.count(0), chosen.ways.count(1)) == (4, 4)  # half of them: as much as may be held
    chosen = fewest_bytes(Known(ways, 8, alike=False), 1000e6, 80e6, 0.0)
    assert set(chosen.ways) == {0}  # nowhere can one follow the other


def test_prices_are_those_of_the_best_mix() -> None:
    """Three ways, of which each is over a limit or moves much; the mix was worked out by hand."""
    points = [Point(100.0, 60.0, 10.0), Point(120.0, 0.0, 10.0), Point(100.0, 0.0, 20.0)]
    found = prices(points, longest=105.0, most=12.0, dearest=1e3)
    # A quarter of the second and a fifth of the third: 60 * (1 - 1/4 - 1/5).
    assert math.isclose(found.bound, 33.0)
    assert math.isclose(found.toll, 20 / 60) and math.isclose(found.price, 6 * found.toll)


class Layers(nn.Module):
    """Three layers with a residual each."""

    def __init__(self) -> None:
        self.ups = nn.ModuleList([nn.Linear(64, 128, bias=False) for _ in range(3)])
        self.downs = nn.ModuleList([nn.Linear(128, 64, bias=False) for _ in range(3)])

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        for up, down in zip(self.ups, self.downs):
            x = down(nn.op.relu(up(x))) + x
        return x


def test_what_is_made_of_two_choices_is_right(workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One layer's weights are whole on both devices, so that what they hold is nearer to the limit."""
    model, params = Layers().export_tvm({"forward": {"x": nn.spec.Tensor([16, 64], "float32")}})  # type: ignore[attr-defined]
    exe: Any = axe.compile(model, mesh={"tp": 2}, memory=0.7, work_dir=None, keep=False)
    chosen = exe.shared.functions["forward"].chosen
    monkeypatch.setattr(tradeoffs, "ALIKE", math.inf)
    alike = share_model(model, Mesh({"tp": 2}), memory=0.7).functions["forward"].chosen
    assert tradeoffs.NEAR * chosen.bytes < alike.bytes
    assert alike.weights[0] < chosen.weights[0] <= 0.7 * chosen.weights[1]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16, 64)).astype("float32")
    weights = {
        name: (rng.standard_normal([int(extent) for extent in param.shape]) / 8).astype("float32")
        for name, param in params
    }
    want = x.astype("float64")
    for layer in range(3):
        up, down = (weights[f"{name}.{layer}.weight"].astype("float64") for name in ("ups", "downs"))
        want = np.maximum(want @ up.T, 0) @ down.T + want
    with exe.load(workers(2), weights) as session:
        got = np.asarray(session.forward(x))
    assert np.abs(got - want).max() / np.abs(want).max() < 1e-5
