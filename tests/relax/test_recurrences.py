"""Recurrences that are unrolled: what each step leaves is handed over to the one call that takes them all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tvm import relax
from tvm.relax.frontend import nn

import tvm_axe as axe
from tvm_axe.collective.engine import HOST
from tvm_axe.relax import choosing, collecting, sharing
from tvm_axe.relax.operators import Operators
from tvm_axe.relax.reading import graph_of, legalized

WIDTH, BATCH, ENOUGH = 12, 4, 512


class Recurrent(nn.Module):
    """Layers of h = tanh(h W + x) + x, of which the largest of all h goes on."""

    def __init__(self, steps: int, layers: int) -> None:
        self.steps = steps
        self.inner = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        for inner in self.inner:
            left, h = [], x
            for _ in range(self.steps):
                h = nn.op.tanh(inner(h) + x) + x
                left.append(h)
            x = nn.op.max(nn.op.reshape(nn.op.concat(left, dim=0), [self.steps, BATCH, WIDTH]), axis=0)
        return x


class ReadingParts(nn.Module):
    """Layers of h = tanh(h W + y[t]) for each step t from zeros on, where y = x V; the next layer's x are all h."""

    def __init__(self, steps: int, layers: int) -> None:
        self.steps = steps
        self.over = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
        self.inner = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        zeros = nn.op.zeros([len(self.inner), BATCH, ENOUGH])  # so many as upstream doesn't fold
        starts = [part(zeros, layer) for layer in range(len(self.inner))]
        for over, inner, start in zip(self.over, self.inner, starts):
            y, left = over(x), []
            parts, h = [part(y, at) for at in range(self.steps)], nn.op.sum(start, 1, keepdims=True)
            for each in parts:
                h = nn.op.tanh(inner(h + each) + each)
                left.append(h)
            x = nn.op.reshape(nn.op.concat(left, dim=0), [self.steps, BATCH, WIDTH])
        return x


class Scan(nn.Module):
    """h = (h + y[t]) * z[t] for each step t, where y = x V and z = x W, and its sums: no step has a weight."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.y, self.z = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        y, z = self.y(x), self.z(x)
        left, h = [], part(y, 0)
        for at in range(self.steps):
            h = (h + part(y, at)) * part(z, at)
            left.append(nn.op.sum(h, -1, keepdims=True))
        return nn.op.concat(left, dim=0)


def part(x: nn.Tensor, at: int) -> nn.Tensor:
    """What a tensor has at an index."""
    return nn.op.reshape(nn.op.wrap_nested(relax.op.strided_slice(x._expr, [0], [at], [at + 1]), "part"), x.shape[1:])


def reading_parts(steps: int, layers: int = 1) -> Any:
    spec = {"x": nn.spec.Tensor([steps, BATCH, WIDTH], "float32")}
    return ReadingParts(steps, layers).export_tvm({"forward": spec})[0]


def exported(steps: int, layers: int = 1) -> Any:
    spec = {"x": nn.spec.Tensor([BATCH, WIDTH], "float32")}
    return Recurrent(steps, layers).export_tvm({"forward": spec})[0]


def search_of(steps: int, devices: int) -> choosing._Search:
    return search_for(exported(steps), devices)


def search_for(model: Any, devices: int) -> choosing._Search:
    return choosing._Search(graph_of(legalized(model), "forward"), Operators(devices, HOST), {})


@pytest.mark.parametrize("devices", [2, 3])
def test_a_choice_costs_what_it_does_where_all_values_are_handed_over_at_once(
    devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = collecting.MANY + 1
    found = [search_of(steps, devices)]
    assert any(step.hands_over for step in found[0].steps)
    monkeypatch.setattr(collecting, "MANY", steps)
    monkeypatch.setattr(choosing, "BEAM", 4096)
    found.append(search_of(steps, devices))
    assert not any(step.hands_over for step in found[1].steps)
    for price, toll in ((0.0, 0.0), (1e-8, 1e-9)):
        one, other = (
            each.point.seconds + price * each.point.weights + toll * each.point.bytes
            for each in (search.solved(price, toll) for search in found)
        )
        assert one == pytest.approx(other)


@pytest.mark.parametrize(
    "model, sizes",
    [
        pytest.param(exported, (32, 64), id="equal steps"),
        pytest.param(reading_parts, (24, 48), id="steps that read other parts of a value"),
        pytest.param(lambda layers: reading_parts(10, layers), (5, 10), id="layers that start from parts of a value"),
    ],
)
def test_what_is_equal_is_solved_once(model: Any, sizes: tuple[int, int], solved_calls: list[int]) -> None:
    solved = []
    for size in sizes:
        solved_calls.clear()
        search_for(model(size), 2).solved(0.0, 0.0)
        solved.append(sum(solved_calls))
    assert solved[1] < 1.3 * solved[0]


def test_what_has_no_weight_is_solved_once_for_all_prices_of_weights(solved_calls: list[int]) -> None:
    spec = {"x": nn.spec.Tensor([24, BATCH, WIDTH], "float32")}
    search = search_for(Scan(24).export_tvm({"forward": spec})[0], 2)
    search.solved(1e-10, 0.0)
    first = sum(solved_calls)
    assert first > 0
    for price in (1e-9, 1e-8, 1e-7):
        solved_calls.clear()
        search.solved(price, 0.0)
        assert sum(solved_calls) < first / 2


@pytest.mark.parametrize("model", [exported, reading_parts])
def test_the_module_of_a_device_takes_work_that_grows_with_the_steps(
    model: Any, python_calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, counted = sharing.device_module, []

    def count(*args: Any) -> Any:
        found: list[Any] = []
        counted.append(python_calls(lambda: found.append(made(*args))))
        return found[0]

    monkeypatch.setattr(sharing, "device_module", count)
    for steps in (16, 32, 64, 128):  # the first has to do what is done once
        sharing.share_model(model(steps), axe.Mesh({"tp": 2}))
    assert counted[3] - counted[2] < 2.3 * (counted[2] - counted[1])


def test_equal_operators_become_functions_once(monkeypatch: pytest.MonkeyPatch) -> None:
    call_te, made = relax.BlockBuilder.call_te, []

    def count(self: relax.BlockBuilder, *args: Any, **given: Any) -> Any:
        made.append(args[0].__name__)
        return call_te(self, *args, **given)

    monkeypatch.setattr(relax.BlockBuilder, "call_te", count)
    numbers = []
    for steps in (4, 32):
        made.clear()
        legalized(exported(steps))
        numbers.append(sum("matmul" not in name for name in made))  # products with transposes are made before
        assert {"add", "tanh"} <= {*made}
    assert numbers[1] == numbers[0]


def test_devices_read_the_parts_that_one_does() -> None:
    steps, layers, rng = collecting.MANY + 1, 2, np.random.default_rng()
    x = rng.standard_normal((steps, BATCH, WIDTH)).astype("float32")
    weights = {
        f"{name}.{at}.weight": rng.standard_normal((WIDTH, WIDTH)).astype("float32") / 4
        for name in ("over", "inner")
        for at in range(layers)
    }
    want = x.astype("float64")
    for layer in range(layers):
        over, inner = (weights[f"{name}.{layer}.weight"].T.astype("float64") for name in ("over", "inner"))
        h, left = np.zeros((BATCH, WIDTH)), []
        for each in want @ over:
            h = np.tanh((h + each) @ inner + each)
            left.append(h)
        want = np.stack(left)
    exe = axe.compile(reading_parts(steps, layers), mesh={"tp": 2}, work_dir=None, keep=False)
    with axe.launch({"tp": 2}, engine="threads") as workers, exe.load(workers, weights) as session:
        np.testing.assert_allclose(np.asarray(session.forward(x)), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("devices", [2, 3])
def test_devices_compute_what_one_does(devices: int) -> None:
    steps, layers, rng = collecting.MANY + 1, 2, np.random.default_rng()
    x = rng.standard_normal((BATCH, WIDTH)).astype("float32")
    weights = {f"inner.{at}.weight": rng.standard_normal((WIDTH, WIDTH)).astype("float32") / 4 for at in range(layers)}
    want = x.astype("float64")
    for weight in weights.values():
        h, left = want, []
        for _ in range(steps):
            h = np.tanh(h @ weight.T.astype("float64") + want) + want
            left.append(h)
        want = np.max(left, axis=0)
    exe = axe.compile(exported(steps, layers), mesh={"tp": devices}, work_dir=None, keep=False)
    with axe.launch({"tp": devices}, engine="threads") as workers, exe.load(workers, weights) as session:
        np.testing.assert_allclose(np.asarray(session.forward(x)), want, rtol=1e-4, atol=1e-4)
