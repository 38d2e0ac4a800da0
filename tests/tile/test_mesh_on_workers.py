"""Programs on tensors of the mesh run by workers: beside numpy in float64, in turns, with outputs poisoned."""

from collections.abc import Iterator

import numpy as np
import programs_flags
import programs_mesh as programs
import pytest
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.collective import MeshKernel, MeshTensor, Workers, launch
from tvm_axe.errors import InputError, TileError, WorkerError
from tvm_axe.layout import Mesh
from tvm_axe.tile.targets.llvm import flags as on_cpu

MESHES = [{"tp": 1}, {"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 2}]
ENGINES = ["threads", "processes"]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=MESHES, ids=str)
def workers(request: pytest.FixtureRequest, engine: str) -> Iterator[Workers]:
    with launch(Mesh(request.param), engine=engine) as workers:
        yield workers


@pytest.fixture(scope="module")
def two(engine: str) -> Iterator[Workers]:
    with launch(Mesh({"tp": 2}), engine=engine) as workers:
        yield workers


def put(workers: Workers, slabs: np.ndarray, dtype: str) -> MeshTensor:
    """A mesh tensor with a slab of each device."""
    tensor = workers.mesh_tensor(slabs.shape[1:], dtype)
    for device, slab in enumerate(slabs):
        tensor.slab(device)[...] = slab
    return tensor


def groups(workers: Workers, axis: str) -> list[list[int]]:
    """The devices along an axis, of each group in the order of their coordinates."""
    found: dict[tuple, list[int]] = {}
    for device in range(workers.mesh.size):
        found.setdefault(tuple(workers.mesh.group(device, axis)), []).append(device)
    return [list(group) for group in found]


def check_norms(workers: Workers, axis: str, rows: int, n: int, options: dict, turns: int, error: float) -> None:
    """A norm of a sum along an axis, in turns with new rows each; every device has the same result."""
    devices, size, dtype = workers.mesh.axis_size(axis), workers.mesh.size, options.get("dtype", programs.BF16)
    norm, rng = MeshKernel(workers, programs.reduce_norm(devices, rows, n, **options), axis), np.random.default_rng(0)
    flags, poison = workers.mesh_tensor((devices, rows), "int32"), np.full((size, devices, rows, n), np.nan)
    residual, weight = rng.standard_normal((rows, n)), rng.standard_normal(n)
    both = [put(workers, np.broadcast_to(array, (size, *array.shape)), dtype) for array in (residual, weight)]
    x, inbox, out = (put(workers, p, dtype) for p in (poison[:, 0], poison, poison[:, 0]))
    residual, weight = (tensor.slab(0).astype("float64") for tensor in both)
    for _ in range(turns):
        for device in range(size):
            x.slab(device)[...] = rng.standard_normal((rows, n))
            inbox.slab(device)[...] = out.slab(device)[...] = np.nan
        norm(x, inbox, *both, flags, out)
        for group in groups(workers, axis):
            total = sum(x.slab(device).astype("float64") for device in group) + residual
            want = total / np.sqrt((total**2).mean(axis=1, keepdims=True) + 1e-6) * weight
            for device in group:
                found = out.slab(device).astype("float64")
                assert np.linalg.norm(found - want) / np.linalg.norm(want) < error
                assert not flags.slab(device).any()


@pytest.mark.parametrize("options", [{}, {"ordered": False}, {"push": True}], ids=["ordered", "pull", "push"])
def test_a_norm_of_a_sum(workers, options):
    for axis in workers.mesh.names:
        check_norms(workers, axis, 5, 40, {"dtype": "float32", **options}, 5, 1e-6)


def test_a_norm_in_bfloat16(two):
    check_norms(two, "tp", 5, 40, {}, 2, 4e-3)


def check_scatters(workers: Workers, rows: int, n: int, k: int, block: tuple, turns: int) -> None:
    """A product whose depth is spread over devices, each of which gets the sum of its rows."""
    devices, rng = workers.mesh.size, np.random.default_rng(1)
    m = rows * devices
    kernel = MeshKernel(workers, programs.product_scatter(devices, m, n, k, block))
    flags = workers.mesh_tensor((devices, rows // block[0], n // block[1]), "int32")
    eye = np.broadcast_to(np.eye(block[0]), (devices, block[0], block[0]))
    parts = put(workers, np.full((devices, devices, rows, n), np.nan), programs.BF16)
    unit = put(workers, eye, programs.BF16)
    for _ in range(turns):
        a, b = rng.standard_normal((devices, devices, rows, k)), rng.standard_normal((devices, k, n))
        a, b = put(workers, a, programs.BF16), put(workers, b, programs.BF16)
        for device in range(devices):
            parts.slab(device)[...] = np.nan
        kernel(a, b, unit, parts, flags)
        for device in range(devices):
            want = sum(a.slab(d)[device].astype("float64") @ b.slab(d).astype("float64") for d in range(devices))
            found = parts.slab(device)[device].astype("float64")
            assert np.linalg.norm(found - want) / np.linalg.norm(want) < 4e-3
            assert not flags.slab(device).any()


def test_a_product_whose_parts_are_scattered(two):
    check_scatters(two, 32, 32, 24, programs.SMALL, 3)


def test_a_norm_in_two_steps(two):
    rows, n, rng = 4, 24, np.random.default_rng(2)
    kernel = MeshKernel(two, programs.scatter_norm_gather(2, rows, n, dtype="float32"))
    x = put(two, rng.standard_normal((2, rows, n)), "float32")
    residual, weight = rng.standard_normal((rows, n)).astype("float32"), rng.standard_normal(n).astype("float32")
    both = [put(two, np.stack([array] * 2), "float32") for array in (residual, weight)]
    flags = two.mesh_tensor((2, rows // 2, 2), "int32")
    out = put(two, np.full((2, rows, n), np.nan), "float32")
    kernel(x, *both, flags, out)
    total = x.slab(0).astype("float64") + x.slab(1) + residual
    want = total / np.sqrt((total**2).mean(axis=1, keepdims=True) + 1e-6) * weight
    for device in range(2):
        np.testing.assert_allclose(out.slab(device), want, rtol=1e-5, atol=1e-5)


# ---- Refused ---------------------------------------------------------------------------------------------------------


def test_a_flag_that_nobody_sets(two, monkeypatch):
    monkeypatch.setattr(on_cpu, "SECONDS", 1)

    @T.prim_func
    def waits(x: tile.mesh_tensor((2, 4), "float32"), me: T.int32, flags: T.Buffer((2,), "int32")):
        with tile.kernel(1, device=me) as i:
            part = tile.fragment((4,), "float32")
            tile.wait(flags[1 - me], 3)
            tile.copy(x[1 - me, i * 4], part)

    # Its own process for each test: workers whose command has failed are used no more.
    with launch(two.mesh) as workers:
        kernel = MeshKernel(workers, waits)
        flags = workers.mesh_tensor((2,), "int32")
        with pytest.raises(
            WorkerError, match=r"wait for flags\[1 - me\] >= 3: flags\[1 - me\] was not signalled in 1 s"
        ):
            kernel(workers.mesh_tensor((4,), "float32"), flags)


def test_a_cpu_runs_blocks_in_order():
    @T.prim_func
    def backwards(me: T.int32, flags: tile.mesh_tensor((2, 4), "int32")):
        with tile.kernel(4, device=me) as i:
            if i < 3:
                tile.wait(flags[1 - me, i + 1])
            tile.signal(flags[me, i])

    assert tile.read(backwards).devices == 2
    tile.plan(backwards, "cuda:sm_80")
    message = (
        r"with me=0, i=0, flags\[1, 1\] stays unset on a CPU, where a device's blocks run one after the other, .*: "
        r"what signals it, at me=1, i=1, comes later; valid is a grid in which it comes before, a CUDA target"
    )
    with pytest.raises(TileError, match=message):
        tile.plan(backwards, "llvm")


def test_decisions_are_said():
    assert "its blocks one after the other, in the order of the grid" in tile.explain(
        programs.reduce_norm(2, 4, 8), "llvm"
    )


def test_arguments_are_checked(two):
    norm = MeshKernel(two, programs.reduce_norm(2, 3, 8, dtype="float32"))
    x, inbox, weight = (two.mesh_tensor(shape, "float32") for shape in ((3, 8), (2, 3, 8), (8,)))
    flags = two.mesh_tensor((2, 3), "int32")
    for given, message in [
        ((x, inbox, x, weight, flags), r"takes 6 arguments \(x: float32\[2, 3, 8\], .*\); got 5"),
        ((x, x, x, weight, flags, x), r"a slab of inbox is float32\[2, 3, 8\]; got float32\[3, 8\]"),
        ((x, inbox, x, weight, inbox, x), r"a slab of flags is int32\[2, 3\]; got float32"),
        ((x, inbox, 3, weight, flags, x), r"residual: .* is a tensor of each device; got int"),
        (
            (two.mesh_tensor((3, 8), "float32", shared=True), inbox, x, weight, flags, x),
            "x has a slab for each device; got a tensor that they share",
        ),
    ]:
        with pytest.raises(InputError, match=message):
            norm(*given)
    with pytest.raises(InputError, match=r"is a program of 3 devices, .*; axis 'tp' of the mesh has 2"):
        MeshKernel(two, programs.reduce_norm(3, 3, 8))
    with pytest.raises(InputError, match=r"factor: float32 is a parameter; valid for workers are int32 and tensors"):
        MeshKernel(two, scaled())


def scaled():
    @T.prim_func
    def scaled(x: tile.mesh_tensor((2, 4), "float32"), me: T.int32, factor: T.float32):
        with tile.kernel(1, device=me) as i:
            part = tile.fragment((4,), "float32")
            tile.copy(x[me, i * 4], part)
            with tile.parallel(4) as j:
                part[j] = part[j] * factor
            tile.copy(part, x[me, i * 4])

    return scaled


def test_an_axis_is_named():
    with (
        launch(Mesh({"dp": 2, "tp": 2}), engine="threads") as workers,
        pytest.raises(InputError, match="the mesh has the axes dp, tp; valid is axis=, one of them"),
    ):
        MeshKernel(workers, programs.reduce_norm(2, 3, 8))


def test_a_device_outside_of_the_mesh():
    exe = tile.compile(scaled(), "llvm")
    x = np.ones((2, 4), "float32")
    exe(x, 1, 3.0)
    np.testing.assert_array_equal(x, [[1] * 4, [3] * 4])
    for device in (-1, 2):
        with pytest.raises(
            InputError, match=rf"me is the device that runs, 0 to 1 of the mesh tensors' 2; got {device}"
        ):
            exe(x, device, 3.0)


def test_flags_of_one_device(monkeypatch):
    """Kernels one after the other meet in flags, too; a wait that nobody answers ends with an error."""
    monkeypatch.setattr(on_cpu, "SECONDS", 1)
    put_rows, take_rows = (
        tile.compile(made(6, 40), "llvm") for made in (programs_flags.put_rows, programs_flags.take_rows)
    )
    a, flags = np.random.default_rng(3).standard_normal((6, 40)).astype("float32"), np.zeros(6, "int32")
    b, c = np.full_like(a, np.nan), np.full_like(a, np.nan)
    put_rows(a, 2, b, flags)
    take_rows(b, 2, flags, c)
    np.testing.assert_array_equal(c, 2 * a + 1)
    with pytest.raises(RuntimeError, match=r"wait for flags >= turn: flags\[0\] was not signalled in 1 seconds"):
        take_rows(b, 3, flags, c)


# ---- On GPUs ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"push": True}], ids=["ordered", "push"])
def test_a_norm_on_gpus(on_gpus, options):
    with launch(Mesh({"tp": 2}), engine="cuda", **on_gpus(2)) as workers:
        check_norms(workers, "tp", 8, 1024, options, 3, 4e-3)


@pytest.mark.gpu
def test_a_norm_along_either_axis_on_gpus(on_gpus):
    mesh = Mesh({"dp": 2, "tp": 2})
    with launch(mesh, engine="cuda", **on_gpus(4, "device")) as workers:
        for axis in mesh.names:
            check_norms(workers, axis, 8, 1024, {}, 3, 4e-3)


@pytest.mark.gpu
def test_a_product_on_gpus(on_gpus):
    with launch(Mesh({"tp": 2}), engine="cuda", **on_gpus(2)) as workers:
        check_scatters(workers, 256, 512, 256, programs.BLOCK, 3)
