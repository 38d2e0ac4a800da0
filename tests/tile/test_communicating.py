"""Programs that communicate, as they are first written: in random orders, by workers, and planned for GPUs."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from interpreter import Fault
from interpreter_mesh import interpret_mesh
from programs_communicating import OUT, PROGRAMS, ZEROS
from test_mesh_on_workers import put
from tvm.script import from_source
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.collective import MeshKernel, Workers, launch
from tvm_axe.errors import TileError
from tvm_axe.layout import Mesh
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.reading import Reader
from tvm_axe.tile.regions import Tile
from tvm_axe.tile.targets.cuda.uniform.plan import UniformPlan

TURNS = 2
"""Runs on new data, with the flags and counters that the run before has left."""


def slabs(param: Tile, devices: int, given: Any, left: dict[str, np.ndarray]) -> np.ndarray:
    """What a tensor holds on all devices before a run; `left` has what runs before it left."""
    shape = tuple(int(extent) for extent in param.shape)
    shape = shape if param.is_mesh else (devices, *shape)
    if given is ZEROS:
        return left.get(param.name, np.zeros(shape))
    if given is OUT:
        return np.full(shape, np.nan if "float" in param.dtype else -77)
    return np.asarray(given).reshape(shape)


def arguments(program: TileProgram, tensors: dict[str, Any], turn: int, device: list[None]) -> list[Any]:
    """An argument for each parameter, `device` for that."""
    found: list[Any] = []
    for param in program.func.params:
        found += device if param.same_as(program.device) else [tensors.get(param.name, turn + 1)]
    return found


def close(found: np.ndarray, want: np.ndarray, error: float) -> None:
    np.testing.assert_allclose(found, want, rtol=error, atol=error)


@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("make", PROGRAMS)
def test_in_any_order(make, devices):
    program, left = None, {}
    for turn in range(TURNS):
        func, given, want = make(devices, np.random.default_rng(turn))
        program = program or tile.read(func)
        tensors = {param.name: slabs(param, devices, given[param.name], left) for param in program.params}
        for running in (1, None, None):
            rng = np.random.default_rng([turn, running or 0])
            found = interpret_mesh(program, *arguments(program, tensors, turn, [None]), rng=rng, running=running)
            held = dict(zip(tensors, found, strict=True))
            for name, array in want.items():
                close(held[name], array, 1e-6)
        left = {name: held[name] for name, what in given.items() if what is ZEROS}


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with launch(Mesh({"tp": 3}), engine="threads") as workers:
        yield workers


@pytest.mark.parametrize("make", PROGRAMS)
def test_on_workers(make, workers):
    devices, left, kernel = 3, {}, None
    for turn in range(TURNS):
        func, given, want = make(devices, np.random.default_rng(turn))
        program = tile.read(func)
        kernel = kernel or MeshKernel(workers, func)
        arrays = {param.name: slabs(param, devices, given[param.name], left) for param in program.params}
        tensors = {param.name: put(workers, arrays[param.name], param.dtype) for param in program.params}
        kernel(*arguments(program, tensors, turn, []))
        held = {name: np.stack([tensor.slab(d) for d in range(devices)]) for name, tensor in tensors.items()}
        for name, array in want.items():
            close(held[name].astype("float64"), array, 1e-4)
        left = {name: held[name] for name, what in given.items() if what is ZEROS}


@pytest.mark.parametrize("target", ["cuda:sm_90a", "cuda:sm_80"])
@pytest.mark.parametrize("make", PROGRAMS)
def test_for_gpus(make, target):
    func, _, _ = make(3, np.random.default_rng(0))
    assert isinstance(tile.plan(func, target), UniformPlan)
    tile.lower(func, target)


# ---- Refused, or found by the interpreter ----------------------------------------------------------------------------


def counted(condition: bool, waits: bool, signals: bool = True):
    """Counters that all devices add to, and that each reads by a condition or by a loop's bound."""

    @T.prim_func
    def counted(
        x: T.Buffer((8,), "int32"),
        me: T.int32,
        held: tile.mesh_tensor((3, 4), "int32"),
        told: tile.mesh_tensor((3, 1), "int32"),
        y: T.Buffer((4,), "int32"),
    ):
        with tile.kernel(1, device=me):
            with tile.parallel(8) as i:
                tile.atomic_add(1, held[x[i] % 3, x[i] // 3 % 4])
            if signals:
                tile.signal(told[0:3, 0], add=True)
            if waits:
                tile.wait(told[me, 0], 3, reset=True)
            tile.fill(y, 0)
            for k in range(4):
                if condition:
                    if held[me, k] > 0:
                        y[k] = 1
                else:
                    for _ in range(held[me, k]):
                        y[k] = 1
            if not waits:
                tile.wait(told[me, 0], 3, reset=True)

    return counted


def run_counted(program: TileProgram) -> None:
    x = np.random.default_rng(0).integers(0, 12, (3, 8))
    want = np.bincount(x.ravel(), minlength=12).reshape(4, 3).T > 0
    for seed in range(6):
        held, told, y = np.zeros((3, 4), "int32"), np.zeros((3, 1), "int32"), np.full((3, 4), -1)
        *_, found = interpret_mesh(program, x, None, held, told, y, rng=np.random.default_rng(seed))
        np.testing.assert_array_equal(found, want)


@pytest.mark.parametrize("condition", [True, False], ids=["condition", "bound"])
def test_what_steers_is_behind_joins(condition):
    """Conditions and bounds read, too: what they read of a joined tensor is behind a signal and a wait, or refused."""
    run_counted(tile.read(counted(condition, waits=True)))
    for missing in (counted(condition, waits=False), counted(condition, waits=True, signals=False)):
        with pytest.raises(TileError, match=r"joins values with mesh held: .* atomically, and `(if|for) .*` reads or "):
            tile.read(missing)
    with pytest.raises(Fault, match=r"mesh held: .* an element is (read|joined), and another's (join|read) of it "):
        run_counted(Reader(counted(condition, waits=False)).program())


def test_a_bound_that_blocks_add_to():
    @T.prim_func
    def bounded(h: T.Buffer((1,), "int32"), y: T.Buffer((4,), "int32")):
        with tile.kernel(4) as b:
            count = tile.local((1,), "int32")
            count[0] = 0
            with tile.parallel(8):
                tile.atomic_add(1, h[0])
            for _ in range(h[0]):
                count[0] = count[0] + 1
            y[b] = count[0]

    with pytest.raises(TileError, match=r"joins values with global h: .* `for .*` reads or stores it, in no order"):
        tile.read(bounded)


def exchanged(place: str):
    """Rows that are stored to the next device at once, while it reads a part of the tensor that they are in."""
    source = f"""@T.prim_func
def exchanged(x: tile.mesh_tensor((3, 3, 8), "float32"), me: T.int32, told: tile.mesh_tensor((3, 1), "int32")):
    with tile.kernel(1, device=me) as b:
        row = tile.fragment((8,), "float32")
        tile.copy(x[{place}, 0], row)
        tile.copy(row, x[(me + 1) % 3, me, 0])
        tile.signal(told[(me + 1) % 3, 0])
        tile.wait(told[me, 0], reset=True)
"""
    return from_source(source, extra_vars={"tile": tile, "T": T})


def test_the_own_slab_before_any_wait():
    """It may be read where peers don't store; what peers store, or have, needs a wait."""
    assert tile.read(exchanged("me, me")).devices == 3
    with pytest.raises(TileError, match=r"slabs of mesh x: .*, which peers store to, and no wait comes before it"):
        tile.read(exchanged("me, (me + 2) % 3"))
    with pytest.raises(TileError, match=r"slabs of mesh x: .*, which are other devices', and no wait comes before it"):
        tile.read(exchanged("(me + 2) % 3, me"))


def test_slabs_that_only_kernels_before_have_written():
    @T.prim_func
    def pulled(x: tile.mesh_tensor((3, 8), "float32"), me: T.int32, y: T.Buffer((8,), "float32")):
        with tile.kernel(1, device=me) as b:
            row = tile.fragment((8,), "float32")
            tile.copy(x[(me + 1) % 3, b], row)
            tile.copy(row, y[b])

    with pytest.raises(TileError, match=r"no wait comes before it.*kernels before this one.*ordered=False\) on every"):
        tile.read(pulled)
