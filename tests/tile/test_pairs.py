"""Pairs of a product and a collective: kernels and steps of all devices, in any order of events, against float64.

Arrays are not rounded here, so what comes out is exact but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from beside import Devices, Stuck
from interpreter import interpret
from programs_pairs import scheduled

import tvm_axe as axe
from tvm_axe import tile
from tvm_axe.collective.tensor import check_dtype
from tvm_axe.errors import WorkerError
from tvm_axe.layout import Mesh
from tvm_axe.lower import pairs
from tvm_axe.lower.calls import Call
from tvm_axe.lower.derive import derive_steps
from tvm_axe.lower.emit import Emitter
from tvm_axe.lower.infer import infer_shardings
from tvm_axe.lower.parsing import parse_program
from tvm_axe.machines import resolve_target
from tvm_axe.machines.builder import build_program
from tvm_axe.schedule import layouts_of
from tvm_axe.tile.kernels.pairs import matmul_of_shares

HOPPER = resolve_target("cuda:sm_90a")
TILES = {"block_m": 64, "block_n": 64, "block_k": 32}
SUMS = ("scatter", "scatter transposed", "reduce", "stages", "whole", "whole finished transposed")
FORMS = (*SUMS, "gather", "gather transposed", "gather finished")
pytestmark = pytest.mark.usefixtures("pairs_at_any_size")
WIDE = ("scatter wide", "reduce wide", "whole finished transposed wide")
"""Of bfloat16, whose partial sums are float32."""


def expected_of(form: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The result in float64."""
    x, w, *others = (array.astype("float64") for array in arrays)
    product = x @ (w.T if "transposed" in form else w)
    return np.maximum(product + others[0], 0) + others[1] if others else product


class Case:
    """A schedule whose only stages are a pair, lowered for Hopper."""

    def __init__(self, form: str, devices: int, m: int = 0, n: int = 200, k: int = 96, chunks: int = 2) -> None:
        self.mesh, self.form = Mesh({"tp": devices}), form
        self.m, self.n, self.k = m or 96 * devices, n, k * devices
        size = (self.m, n * devices, k) if "gather" in form else (self.m, n, self.k)
        dtype = "bfloat16" if form in WIDE else "float16"
        sch = scheduled(form, self.mesh, *size, chunks=chunks, tiles=TILES, dtype=dtype)
        func = sch.mod["main"]
        program = parse_program(func, self.mesh, 2 << 20)
        shardings = infer_shardings(program, layouts_of(func))
        emitter = Emitter(program, derive_steps(program, shardings), shardings, HOPPER)
        emitted = emitter.module()
        assert emitter.pairs, emitted.forms
        (pair,) = emitter.pairs.values()
        self.calls, self.names, self.shardings = emitted.calls, emitted.names, emitted.shardings
        named = [call.kernel for call in self.calls if call.kernel is not None]
        assert len(named) == 2, named
        self.launches = dict(zip(named, (pair.prepare, pair.kernel)))
        self.buffers = {emitted.names[buffer]: buffer for buffer in emitted.mesh_buffers}
        self.arrays = {name: self._poisoned(name) for name in self.buffers}
        self.devices = Devices(self.arrays, self.launches, self.names)

    def _poisoned(self, name: str) -> np.ndarray:
        buffer = self.buffers[name]
        shape = (self.mesh.size, *self.shardings[buffer].stored)
        return np.full(shape, 7, "int64") if "int" in str(buffer.dtype) else np.full(shape, np.nan)

    def check(self, rng: np.random.Generator, calls: Sequence[Call] | None = None) -> None:
        """Run it on new data and compare."""
        devices = self.mesh.size
        whole = {}
        for name in ("X", "W", "bias", "residual"):
            if name in self.buffers:
                whole[name] = rng.standard_normal([int(extent) for extent in self.buffers[name].shape])
                for device in range(devices):
                    self._own(name, device, whole[name])
        self.devices.run(self.calls if calls is None else calls, rng)
        expected = expected_of(self.form, [*whole.values()])
        for device in range(devices):
            found, wanted = self.arrays["out"][device], self._piece("out", device, expected)
            np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)

    def _piece(self, name: str, device: int, whole: np.ndarray) -> np.ndarray:
        for dim, cut in enumerate(self.shardings[self.buffers[name]].cuts):
            if cut:
                whole = np.split(whole, self.mesh.size, axis=dim)[device]
        return whole

    def _own(self, name: str, device: int, whole: np.ndarray) -> None:
        self.arrays[name][device] = self._piece(name, device, whole)


@pytest.mark.parametrize(("form", "devices"), [*((f, n) for f in FORMS for n in (2, 3)), *((f, 2) for f in WIDE)])
def test_any_order_of_events(form: str, devices: int) -> None:
    case = Case(form, devices)
    for seed in range(
        4 if form in FORMS else 2
    ):  # one after the other on the same memory, which nothing clears but the program
        case.check(np.random.default_rng(seed))


@pytest.mark.parametrize(("m", "n", "k", "chunks"), [(4, 8, 8, 1), (140, 264, 40, 3), (128, 64, 256, 1)])
def test_tiles_that_reach_over_the_end(m: int, n: int, k: int, chunks: int) -> None:
    for form in FORMS:
        Case(form, 2, m, n, k, chunks if m % (2 * chunks) == 0 else 1).check(np.random.default_rng(0))


# ---- Mistakes are caught ---------------------------------------------------------------------------------------------


def flag_first(calls: Sequence[Call]) -> list[Call]:
    """A flag is set before what it is for is copied."""
    changed = list(calls)
    at = next(i for i, call in enumerate(changed) if call.function == "axe.flag")
    changed[at - 1], changed[at] = changed[at], changed[at - 1]
    return changed


def count_less(calls: Sequence[Call]) -> list[Call]:
    """Columns are copied when all of their tiles but one are made."""
    return [
        replace(call, arguments=(*call.arguments[:3], call.arguments[3] - 1, call.arguments[4]))
        if call.function == "axe.wait_count"
        else call
        for call in calls
    ]


def without(*functions: str) -> Callable[[Sequence[Call]], list[Call]]:
    def change(calls: Sequence[Call]) -> list[Call]:
        return [call for call in calls if call.function not in functions and not call.function.endswith(functions)]

    change.__doc__ = f"There is no {' and no '.join(functions)}."
    return change


def other_slot(calls: Sequence[Call]) -> list[Call]:
    """A copy takes the rows of another device."""
    at = next(i for i, call in enumerate(calls) if call.function == "axe.copy")
    source, target, rows, slot, *others = calls[at].arguments
    assert isinstance(slot, int)
    return [*calls[:at], replace(calls[at], arguments=(source, target, rows, slot + 1, *others)), *calls[at + 1 :]]


MISTAKES = {
    "flag first": (flag_first, FORMS),
    "count less": (count_less, SUMS),
    "no barrier": (without("axe.barrier"), FORMS),
    "words aren't cleared": (without("_prepare"), FORMS),
    "nobody joins": (without("axe.join"), ("reduce", "stages", "whole")),
    "another slot": (other_slot, SUMS),
    "no flags": (without("axe.flag"), FORMS),
}


@pytest.mark.parametrize(("mistake", "form"), [(name, form) for name, (_, forms) in MISTAKES.items() for form in forms])
def test_mistakes_are_caught(mistake: str, form: str) -> None:
    change, _ = MISTAKES[mistake]
    case = Case(form, 2)
    for seed in range(16):
        try:
            case.check(np.random.default_rng(seed), change(case.calls))
        except (Stuck, AssertionError):
            return
    raise AssertionError(f"{change.__doc__} Nothing of it was seen")


# ---- On GPUs ---------------------------------------------------------------------------------------------------------


TYPED = [*((form, dtype) for form in FORMS for dtype in ("float16", "bfloat16")), *((f, "bfloat16") for f in WIDE)]


@pytest.mark.gpu
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize(("form", "dtype"), TYPED)
def test_on_gpus(on_gpus: Callable[..., Any], form: str, devices: int, dtype: str) -> None:
    """Poisoned at first; then run after run on other inputs, and twice on the same ones, bit for bit alike.

    Two devices meet by themselves, so that their runs are launches of graphs from the third on.
    """
    mesh, columns = Mesh({"tp": devices}), 520 * (devices if "gather" in form else 1)
    sch = scheduled(form, mesh, 480 * devices, columns, 384, chunks=3, dtype=dtype)
    exe = axe.compile(sch, target="cuda", work_dir=None)
    assert "one kernel" in exe.lowered.forms[0], exe.lowered.forms
    rng = np.random.default_rng(1)
    barriers = "device" if devices == 2 else "host"
    with axe.launch(mesh, engine="cuda", **on_gpus(devices, barriers)) as workers:
        shapes = {buffer.name: (buffer.shape, buffer.dtype) for buffer in exe.lowered.inputs}
        poison = [np.full(shape, np.nan, check_dtype(kind)) for shape, kind in shapes.values()]
        exe.run(workers, *poison)
        for _ in range(6):
            arrays = [rng.standard_normal(shape).astype(check_dtype(kind)) for shape, kind in shapes.values()]
            first, second = (np.array(exe.run(workers, *arrays)) for _ in range(2))
            assert first.tobytes() == second.tobytes()
            wanted = expected_of(form, arrays)
            # Three numbers of bfloat16 have all of a float32's bits, two 16 of them, which are rounded once.
            worst = 6e-3 if form in FORMS else 1e-5 if form == "scatter wide" else 1.8e-3
            assert np.linalg.norm(first.astype("float64") - wanted) < worst * np.linalg.norm(wanted)
        timeline = exe.trace(workers, *arrays)
        called = {exe.stages[call.stage].name for call in exe.lowered.calls if call.stage is not None}
        assert {event.name for event in timeline.events} >= called != set()


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_small_ones_on_gpus(on_gpus: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    """By default they are a product and a collective, one behind the other, but where more is done of the sum."""
    monkeypatch.setattr(pairs, "WAVES", 1)
    mesh, rng = Mesh({"tp": 2}), np.random.default_rng(3)
    exe = axe.compile(scheduled(form, mesh, 256, 512, 384, chunks=2), target="cuda", work_dir=None)
    more = form in ("reduce", "stages", "whole finished transposed")
    assert ("one kernel" if more else "one behind") in exe.lowered.forms[0]
    with axe.launch(mesh, engine="cuda", **on_gpus(2)) as workers:
        for _ in range(4):
            arrays = [rng.standard_normal(b.shape).astype(check_dtype(b.dtype)) for b in exe.lowered.inputs]
            found, wanted = np.array(exe.run(workers, *arrays)), expected_of(form, arrays)
            assert np.linalg.norm(found.astype("float64") - wanted) < 6e-3 * np.linalg.norm(wanted)


@pytest.mark.parametrize(("form", "dtype"), TYPED)
def test_compiles_for_hopper(form: str, dtype: str) -> None:
    sch = scheduled(form, Mesh({"tp": 2}), 512, 512, 512, dtype=dtype)
    exe = axe.compile(sch, target="cuda:sm_90a", work_dir=None)
    assert "one kernel" in exe.lowered.forms[0] and exe.lowered.forms[0] in exe.show()
    build_program(exe.runnable, exe.target)


@pytest.mark.parametrize("form", ["scatter", "reduce", "gather"])
def test_chunks_of_float32_compile_for_hopper(form: str) -> None:
    """No pair, but kernels on windows, which a function calls."""
    exe = axe.compile(
        scheduled(form, Mesh({"tp": 2}), 512, 512, 512, dtype="float32"), target="cuda:sm_90a", work_dir=None
    )
    assert "in 2 chunks: " in exe.lowered.forms[0]
    build_program(exe.runnable, exe.target)


@pytest.mark.gpu
def test_threads_that_share_a_gpu_are_refused(cuda: object) -> None:
    mesh, rng = Mesh({"tp": 2}), np.random.default_rng(2)
    exe = axe.compile(scheduled("scatter", mesh, 256, 256, 256, tiles=TILES), target="cuda", work_dir=None)
    arrays = [rng.standard_normal(buffer.shape).astype("float16") for buffer in exe.lowered.inputs]
    with (
        axe.launch(mesh, engine="cuda", gpus=(0, 0), processes=False) as workers,
        pytest.raises(WorkerError, match=r"axe.fork: 2 workers of this process share GPU 0, and .* launch processes"),
    ):
        exe.run(workers, *arrays)


@pytest.mark.parametrize("transpose_b", [True, False])
@pytest.mark.parametrize(
    ("devices", "first", "count", "own"), [(2, 1, 1, False), (2, 0, 1, True), (3, 1, 2, False), (4, 3, 2, False)]
)
def test_products_of_some_devices_rows_leave_the_others(devices, first, count, own, transpose_b):
    rows, n, k, rng = 40, 72, 56, np.random.default_rng(devices)
    (program,) = matmul_of_shares(
        devices, devices * rows, n, k, "float16", transpose_b, first=first, count=count, own=own, block_m=32,
        block_n=32, block_k=16,
    ).programs  # fmt: skip
    assert tile.explain(program, HOPPER)
    a = rng.integers(-2, 3, (devices, rows, k)).astype("float16")
    b = rng.integers(-2, 3, (n, k) if transpose_b else (k, n)).astype("float16")
    exact = a.astype("float64") @ (b.T if transpose_b else b).astype("float64")
    compiled = tile.compile(program, "llvm")
    for me in range(devices):
        c = np.full((devices, rows, n), np.nan, "float16")
        given = (a[me] if own else a, b, me, c)
        wanted = [(me + first + at) % devices for at in range(count)]
        *_, interpreted = interpret(program, *given)
        compiled(*given)
        for device in range(devices):
            for got in (c[device], interpreted[device]):
                assert (got == exact[device]).all() if device in wanted else np.isnan(got).all()
