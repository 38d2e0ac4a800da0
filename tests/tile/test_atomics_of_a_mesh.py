"""Atomics of several devices into one slab, in one launch: every value counts once, on CPU workers and on GPUs."""

from collections.abc import Iterator

import numpy as np
import pytest
import tvm
from test_mesh_on_workers import put
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.collective import MeshKernel, MeshTensor, Workers, launch
from tvm_axe.errors import InputError
from tvm_axe.layout import Mesh
from tvm_axe.tile.atomics import SWAPPED
from tvm_axe.tile.checks import ATOMIC

KINDS = {"add": np.add, "max": np.maximum, "min": np.minimum}
ENGINES = {"threads": 3, "processes": 2}
BLOCKS, N, PLACES, TURNS = 4, 64, 8, 2

BODY = """@T.prim_func
def func(me: T.int32, {params}, done: tile.mesh_tensor(({devices}, {blocks}), "int32")):
    with tile.kernel({blocks}, device=me) as b:
        a = tile.fragment(({n},), "{dtype}")
        tile.copy(A[b, 0], a)
        for d in range({devices}):
{lines}
            tile.signal(done[d, b], add=True)
        tile.wait(done[me, b], {devices}, reset=True)
"""


def made(params: str, lines: list[str], devices: int, dtype: str) -> tirx.PrimFunc:
    """The program whose blocks do so with what each device owns, and end when all devices have."""
    body = "\n".join(f"            {line}" for line in lines)
    source = BODY.format(params=params, lines=body, devices=devices, dtype=dtype, blocks=BLOCKS, n=N)
    return tvm.script.from_source(source, extra_vars={"tile": tile, "T": T})


def joining(kind: str, dtype: str, devices: int) -> tirx.PrimFunc:
    """Every block joins its row with a row of each device, as a tile, and with few elements, each by itself."""
    params = (
        f'A: T.Buffer(({BLOCKS}, {N}), "{dtype}"), B: T.Buffer(({N},), "int32"), '
        f'C: tile.mesh_tensor(({devices}, {N}), "{dtype}"), E: tile.mesh_tensor(({devices}, {PLACES}), "{dtype}")'
    )
    word = f"tile.atomic_{kind}"
    lines = [f"{word}(a, C[d, 0:{N}])", f"with tile.parallel({N}) as i:", f"    {word}(a[i], E[d, B[i]])"]
    return made(params, lines, devices, dtype)


def claiming(dtype: str, devices: int) -> tirx.PrimFunc:
    """Every point wants a place of each device, writes its number there if that is free, and keeps what it found."""
    params = (
        f'A: T.Buffer(({BLOCKS}, {N}), "{dtype}"), K: tile.mesh_tensor(({devices}, {N}), "{dtype}"), '
        f'W: T.Buffer(({devices}, {BLOCKS}, {N}), "{dtype}")'
    )
    number = f'T.cast(me * {BLOCKS * N} + b * {N} + i + 1, "{dtype}")'
    place = 'K[d, T.cast(a[i], "int32")]'
    lines = [f"with tile.parallel({N}) as i:", f"    W[d, b, i] = tile.atomic_cas(0, {number}, {place})"]
    return made(params, lines, devices, dtype)


def slabs(tensor: MeshTensor, devices: int) -> np.ndarray:
    return np.stack([tensor.slab(device).astype("float64") for device in range(devices)])


def judge_joining(workers: Workers, kind: str, dtype: str) -> None:
    """Beside numpy in float64, in turns on what was there; sums are exact in every type."""
    devices, rng = workers.mesh.size, np.random.default_rng(len(kind + dtype))
    low, high = (0 if dtype.startswith("u") else -1, 2) if kind == "add" else (0 if dtype.startswith("u") else -9, 9)
    shapes = [(BLOCKS, N), (N,), (PLACES,)]
    a, c, e = (rng.integers(low, high, (devices, *shape)) for shape in shapes)
    b = rng.integers(0, PLACES, (devices, N))
    given = [put(workers, array, "int32" if array is b else dtype) for array in (a, b, c, e)]
    done = workers.mesh_tensor((BLOCKS,), "int32")
    kernel, join = MeshKernel(workers, joining(kind, dtype, devices)), KINDS[kind]
    wants = [c.astype("float64"), e.astype("float64")]
    for _ in range(TURNS):
        kernel(*given, done)
        for device in range(devices):
            for owner in range(devices):
                for row in a[device].astype("float64"):
                    wants[0][owner] = join(wants[0][owner], row)
                    join.at(wants[1][owner], b[device], row)
        for tensor, want in zip(given[2:], wants):
            np.testing.assert_array_equal(slabs(tensor, devices), want)
        assert not slabs(done, devices).any()


def judge_claiming(workers: Workers, dtype: str) -> None:
    """One of those who want a place finds it free, all others find him; nobody else's number is there."""
    devices, rng = workers.mesh.size, np.random.default_rng(3)
    wanted = rng.integers(0, N - 8, (devices, BLOCKS, N))
    tensors = [put(workers, wanted, dtype), put(workers, np.zeros((devices, N)), dtype)]
    tensors.append(put(workers, np.full((devices, devices, BLOCKS, N), 99999), dtype))
    MeshKernel(workers, claiming(dtype, devices))(*tensors, workers.mesh_tensor((BLOCKS,), "int32"))
    holds, found = (slabs(tensor, devices) for tensor in tensors[1:])
    numbers = np.arange(1, wanted.size + 1)
    for owner in range(devices):
        for place in range(N):
            those = numbers[wanted.ravel() == place]
            winner = holds[owner, place]
            assert winner in those if len(those) else winner == 0
            seen = found[:, owner].ravel()[those - 1]
            np.testing.assert_array_equal(seen, np.where(those == winner, 0, winner))


@pytest.fixture(scope="module", params=ENGINES)
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    with launch(Mesh({"tp": ENGINES[request.param]}), engine=request.param) as workers:
        yield workers


@pytest.mark.parametrize("kind, dtype", [("add", "float32"), ("max", "bfloat16"), ("min", "int64")])
def test_on_cpus(workers, kind, dtype):
    judge_joining(workers, kind, dtype)


def test_compare_and_swap_on_cpus(workers):
    judge_claiming(workers, "int32")


@pytest.fixture(scope="module", params=[(2, True), (2, False), (4, True)], ids=["two", "one context", "four"])
def gpus(request: pytest.FixtureRequest, on_gpus) -> Iterator[Workers]:
    devices, processes = request.param
    placed = on_gpus(devices, "device")
    if not processes and len(set(placed["gpus"])) < devices:
        pytest.skip("a kernel that waits for a peer's in one context needs a GPU for each, and there is one")
    with launch(Mesh({"tp": devices}), engine="cuda", processes=processes, **placed) as workers:
        yield workers


@pytest.mark.gpu
def test_threads_that_share_a_gpu_are_refused(cuda):
    with (
        launch(Mesh({"tp": 2}), engine="cuda", gpus=(0, 0), processes=False) as workers,
        pytest.raises(InputError, match=r"func waits while it runs, .* share a GPU, .* or launch processes"),
    ):
        MeshKernel(workers, joining("add", "float32", 2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ATOMIC)
@pytest.mark.parametrize("kind", KINDS)
def test_on_gpus(gpus, kind, dtype):
    judge_joining(gpus, kind, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", SWAPPED)
def test_compare_and_swap_on_gpus(gpus, dtype):
    judge_claiming(gpus, dtype)
