"""Programs on tensors of the mesh, on all devices together and in many orders; and their mistakes, each caught."""

import re
from pathlib import Path

import numpy as np
import programs_mesh as programs
import pytest
from interpreter import Fault
from interpreter_mesh import interpret_mesh
from tvm.script import from_source
from tvm.script import tirx as T

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.tile.reading import Reader

DEVICES = (2, 3, 4)
ORDERS = 8


def unchecked(func):
    """A program as it is read, with nothing refused: what the interpreter alone finds."""
    return Reader(func).program()


def drawn(rng, *shape):
    return rng.standard_normal(shape)


# ---- Products --------------------------------------------------------------------------------------------------------


def product(devices, rng, rows=16, n=32, k=16):
    """Operands of a product whose depth is spread over devices, and the whole result."""
    m = devices * rows
    a, b = drawn(rng, devices, m, k), drawn(rng, devices, k, n)
    return (m, n, k), a.reshape(devices, devices, rows, k), b, np.einsum("dmk,dkn->mn", a, b).reshape(devices, rows, n)


def scattered(devices, seed, program, running=None):
    rng = np.random.default_rng(seed)
    (m, n, _), a, b, want = product(devices, np.random.default_rng(0))
    unit = np.broadcast_to(np.eye(16), (devices, 16, 16))
    parts = np.full((devices, devices, m // devices, n), np.nan)
    flags = np.zeros((devices, devices, m // devices // 16, n // 16), "int32")
    *_, parts, flags = interpret_mesh(program, a, b, unit, None, parts, flags, rng=rng, running=running)
    np.testing.assert_allclose([parts[d, d] for d in range(devices)], want, rtol=1e-12, atol=1e-12)
    assert not flags.any()


@pytest.mark.parametrize("devices", DEVICES)
def test_a_product_whose_parts_are_scattered(devices):
    program = tile.read(programs.product_scatter(devices, devices * 16, 32, 16, programs.SMALL))
    for seed in range(ORDERS):
        scattered(devices, seed, program, running=[None, 1, 2][seed % 3])


@pytest.mark.parametrize("devices", DEVICES)
def test_a_product_whose_parts_a_copy_engine_sends(devices):
    (m, n, k), a, b, want = product(devices, np.random.default_rng(0), k=32)
    rows, groups = m // devices, 2
    program = tile.read(programs.product_send(devices, m, n, k, groups, block=programs.SMALL, ahead=1))
    count, columns = rows // 16 * (n // groups // 16), n // groups

    def engine(agent):
        for s in range(devices - 1):
            owner = (agent.device + 1 + s) % devices
            for group in range(groups):
                yield from agent.wait("done", (agent.device, owner, group), count)
                part = (slice(None), slice(group * columns, (group + 1) * columns))
                agent.copy(("mine", (agent.device, owner, *part)), ("arrived", (owner, agent.device, *part)))
                yield None
                agent.signal("flags", (owner, agent.device, group), 3)

    unit = np.broadcast_to(np.eye(16), (devices, 16, 16))
    for seed in range(ORDERS):
        mine, arrived = (np.full((devices, devices, rows, n), np.nan) for _ in range(2))
        done, flags = (np.zeros((devices, devices, groups), "int32") for _ in range(2))
        given = a, b, unit, None, 3, mine, done, arrived, flags
        found = interpret_mesh(program, *given, rng=np.random.default_rng(seed), agents=[engine] * devices)
        np.testing.assert_allclose([found[3][d, d] for d in range(devices)], want, rtol=1e-12, atol=1e-12)


def gathering(devices, seed, late=False):
    """A product of rows that copy engines bring; `late` engines tell of them before."""
    rng = np.random.default_rng(seed)
    rows, n, k = 16, 32, 16
    a, b = drawn(rng, devices, rows, k), drawn(rng, devices, k, n)
    gathered = np.full((devices, devices, rows, k), np.nan)
    for d in range(devices):
        gathered[d, d] = a[d]

    def engine(agent):
        for to in range(1, devices):
            peer = (agent.device - to) % devices
            if late:
                agent.signal("flags", (peer, agent.device), 1)
                yield None
            agent.copy(("A", (agent.device, agent.device)), ("A", (peer, agent.device)))
            yield None
            if not late:
                agent.signal("flags", (peer, agent.device), 1)

    program = tile.read(programs.gather_product(devices, devices * rows, n, k, block=programs.SMALL))
    flags, out = np.zeros((devices, devices), "int32"), np.full((devices, devices, rows, n), np.nan)
    found = interpret_mesh(program, gathered, b, None, flags, out, rng=rng, agents=[engine] * devices)[-1]
    np.testing.assert_allclose(found, np.einsum("dmk,ekn->edmn", a, b), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("devices", DEVICES)
def test_a_product_whose_operand_is_gathered(devices):
    for seed in range(ORDERS):
        gathering(devices, seed)


def test_an_engine_that_tells_too_early():
    with pytest.raises(Fault, match=r"mesh A.*: an element is (stored|read), and another's .* isn't ordered"):
        for seed in range(ORDERS):
            gathering(3, seed, late=True)


def test_the_tours_program():
    """The cell of docs/tours/tile.py that has it, so that what is shown is what was judged."""
    tour = (Path(__file__).parents[2] / "docs" / "tours" / "tile.py").read_text()
    (cell,) = [cell for cell in tour.split("# %%") if "def all_reduce(" in cell]
    devices, rows, columns = 3, 4, 64
    definition = cell[cell.index("@T.prim_func") : cell.index("print(")].replace("1024", str(columns))
    made = from_source(definition, {"T": T, "tile": tile, "DEVICES": devices, "ROWS": rows})
    x = drawn(np.random.default_rng(0), devices, rows, columns)
    for seed in range(ORDERS):
        flags, out = np.zeros((devices, devices, rows), "int32"), np.full((devices, rows, columns), np.nan)
        for turn in (1, 2):  # flags only grow
            rng = np.random.default_rng([seed, turn])
            *_, flags, found = interpret_mesh(made, x, None, turn, flags, out, rng=rng)
            np.testing.assert_allclose(found, np.broadcast_to(x.sum(axis=0), found.shape), rtol=1e-12, atol=1e-12)


# ---- Norms -----------------------------------------------------------------------------------------------------------


def norm(program, devices, rows, n, seed, name, running=None):
    """Run a norm of a sum over devices in one order, and compare."""
    rng = np.random.default_rng(seed)
    x, residual = drawn(rng, devices, rows, n), drawn(rng, rows, n)
    weight, each = drawn(rng, n), devices if name == "scatter_norm_gather" else 1
    total = x.sum(axis=0) + residual
    want = total / np.sqrt((total**2).mean(axis=1, keepdims=True) + 1e-6) * weight
    same = [np.broadcast_to(array, (devices, *array.shape)) for array in (residual, weight)]
    out = np.full((devices, rows, n), np.nan)
    if each > 1:
        flags = np.zeros((devices, devices, rows // devices, 2), "int32")
        given = x, *same, None, flags, out
    else:
        flags = np.zeros((devices, devices, rows), "int32")
        given = x, np.full((devices, devices, rows, n), np.nan), *same, None, flags, out
    found = interpret_mesh(program, *given, rng=rng, running=running)
    np.testing.assert_allclose(found[-1], np.broadcast_to(want, out.shape), rtol=1e-12, atol=1e-12)
    assert not found[-2].any()


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("options", [{}, {"ordered": False}, {"push": True}], ids=["ordered", "pull", "push"])
def test_a_norm_of_a_sum(devices, options):
    program = tile.read(programs.reduce_norm(devices, 6, 8, **options))
    for seed in range(ORDERS):
        norm(program, devices, 6, 8, seed, "reduce_norm", [None, 1, 2][seed % 3])


@pytest.mark.parametrize("devices", DEVICES)
def test_a_norm_in_two_steps(devices):
    program = tile.read(programs.scatter_norm_gather(devices, 2 * devices, 8))
    for seed in range(ORDERS):
        norm(program, devices, 2 * devices, 8, seed, "scatter_norm_gather", [None, 1][seed % 2])


# ---- Mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("wait left out", "an element is (stored|read), and another's (store|read of it) isn't ordered"),
        ("signal too early", "an element is (stored|read), and another's (store|read of it) isn't ordered"),
        ("unordered signal", "an element is (stored|read), and another's (store|read of it) isn't ordered"),
        ("wrong peer", "deadlock: nobody can go on"),
    ],
)
def test_mistakes_of_a_product(mistake, message):
    program = unchecked(programs.product_scatter(3, 48, 32, 16, programs.SMALL, mistake))
    for seed in range(4):
        with pytest.raises(Fault, match=message):
            scattered(3, seed, program)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: programs.reduce_norm(3, 6, 8, mistake="wait left out"), "isn't ordered"),
        (lambda: programs.reduce_norm(3, 6, 8, push=True, mistake="signal too early"), "isn't ordered"),
        (lambda: programs.scatter_norm_gather(3, 6, 8, mistake="end without a wait"), "device . ends, and a store"),
        (lambda: programs.scatter_norm_gather(3, 6, 8, mistake="one flag for two"), "flag .* is set, and another's"),
    ],
    ids=["wait left out", "signal too early", "end without a wait", "flag reset too early"],
)
def test_mistakes_of_a_norm(made, message):
    func = made()
    name = str(func.attrs["global_symbol"])
    with pytest.raises(Fault, match=message):
        for seed in range(ORDERS):
            norm(unchecked(func), 3, 6, 8, seed, name)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            lambda: programs.reduce_norm(3, 6, 8, mistake="wait left out"),
            r"loads from slabs of mesh x: .*, which are other devices', and no wait comes before it.*; valid is tile",
        ),
        (
            lambda: programs.reduce_norm(3, 6, 8, push=True, mistake="signal too early"),
            r"stores to slabs of mesh inbox: .* and no ordered signal comes behind it.*; valid is tile.signal",
        ),
        (
            lambda: programs.product_scatter(3, 48, 32, 16, programs.SMALL, "unordered signal"),
            r"stores to slabs of mesh parts: .* and no ordered signal comes behind it",
        ),
        (
            lambda: programs.product_scatter(3, 48, 32, 16, programs.SMALL, "wrong peer"),
            r"wait for flags.*: with me=0, s=2, i=0, j=0, flags\[0, 2, 0, 0\] stays unset, as nobody signals it",
        ),
    ],
)
def test_mistakes_that_are_refused(made, message):
    with pytest.raises(TileError, match=message):
        tile.read(made())


def meeting(name):
    """Two devices that meet, in a right order or in one that never ends."""

    @T.prim_func
    def func(me: T.int32, flags: tile.mesh_tensor((2, 2), "int32"), other: tile.mesh_tensor((2, 2), "int32")):
        with tile.kernel(2, device=me) as i:
            if name == "answer behind":
                tile.wait(flags[me, i])
                tile.signal(flags[1 - me, i])
            elif name == "nobody":
                tile.wait(other[me, i])
                tile.signal(flags[1 - me, i])
            elif name == "all devices set":
                tile.signal(flags[0, i])
                tile.wait(flags[me, i])
            elif name == "all devices reset":
                tile.signal(flags[1 - me, i])
                tile.wait(flags[0, i], reset=True)
            elif name == "circle":
                if me == 0:
                    tile.wait(flags[me, i])
                    tile.signal(other[1 - me, i])
                else:
                    tile.wait(other[me, i])
                    tile.signal(flags[1 - me, i])
            elif name == "other block":
                tile.signal(flags[1 - me, i])
                tile.wait(flags[me, 1 - i])
            else:
                tile.signal(flags[1 - me, i])
                tile.wait(flags[me, i])

    return func


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("answer behind", r"with me=0, i=0, flags\[0, 0\] stays unset, as what would signal it, at me=1, i=0, comes "),
        ("nobody", r"no signal of the program is on mesh other.*; valid is .* T.Buffer, for flags that others"),
        ("circle", r"with me=0, i=0, flags\[0, 0\] stays unset, as what would signal it, at me=1, i=0, comes behind"),
        ("all devices set", "all 2 devices set the same flags of mesh flags"),
        ("all devices reset", "all 2 devices wait for and reset the same flags of mesh flags"),
    ],
)
def test_meetings_refused(name, message):
    tile.read(meeting("right"))
    tile.read(meeting("other block"))
    with pytest.raises(TileError, match=message):
        tile.read(meeting(name))


def shapes(name):
    @T.prim_func
    def func(
        x: tile.mesh_tensor((2, 4), "float32"),
        y: tile.mesh_tensor((3 if name == "devices" else 2, 4), "float32"),
        me: T.int64 if name == "type" else T.int32,
        z: T.Buffer((4,), "float32"),
    ):
        with tile.kernel(4, device=None if name == "none" else me) as i:
            part = tile.fragment((1,), "float32")
            tile.copy(x[me, i], part)
            if name == "one slab":
                tile.copy(part, y[0, i])
            else:
                tile.copy(part, z[i])

    return func


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("devices", r"mesh y: .*: a mesh tensor of 3 devices, and mesh x: .* of 2; valid are .* along one axis"),
        ("type", r"kernel: device is me; valid is a scalar parameter of the function, me: T.int32"),
        ("none", r"mesh x: .*: a mesh tensor, and the kernel isn't told .*; valid is tile.kernel\(..., device=me\)"),
        (
            "one slab",
            r"all 2 devices store to one part of mesh y: .*; valid is a place, or an `if`, that depends",
        ),
    ],
)
def test_mesh_tensors_refused(name, message):
    tile.read(shapes("valid"))
    with pytest.raises(TileError, match=message):
        tile.read(shapes(name))


def test_a_device_without_tensors_of_the_mesh():
    @T.prim_func
    def func(me: T.int32, x: T.Buffer((4,), "float32")):
        with tile.kernel(4, device=me) as i:
            part = tile.fragment((1,), "float32")
            tile.copy(x[i], part)

    with pytest.raises(TileError, match=re.escape("kernel: device=me, and no parameter is a mesh tensor")):
        tile.read(func)


@pytest.mark.parametrize("shape", [(4,), (0, 4), (2, -1)])
def test_shapes_of_mesh_tensors(shape):
    with pytest.raises(TileError, match=r"mesh_tensor: shape .*; valid are the number of devices"):
        tile.mesh_tensor(shape, "float32")
