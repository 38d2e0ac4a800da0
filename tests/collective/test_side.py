"""Steps of the side stream: what they move, on every engine, and that devices meet in words."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tvm
from apart import launched
from tvm.script import tirx as T

from tvm_axe.collective import Workers
from tvm_axe.collective.side import Rectangle, rectangle, step
from tvm_axe.errors import WorkerError
from tvm_axe.layout import Mesh
from tvm_axe.machines import resolve_target

DEVICES, ROWS, COLUMNS = 3, 5, 48
GROUPS = ((0, 16), (16, COLUMNS))  # columns
_GPUS = [pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "cuda-threads", "cuda-meeting")]
PLACES = ["processes", "threads", "apart", "apart-threads", *_GPUS]


@pytest.mark.parametrize(
    ("source", "numbers", "expected"),
    [
        ((6, 8), (2, 1, 1, 0, 8), Rectangle(2, 4, 2, 2, 0, 8)),  # what is for the next device
        ((3, 2, 8), (2, 0, 2, 4, 8), Rectangle(0, 2, 2, 2, 4, 8)),  # its own slot, to the one before it
        ((2, 8), (2, 0, 1, 0, 3), Rectangle(2, 0, 2, 2, 0, 3)),  # its only slot
    ],
)
def test_rectangles(source: tuple[int, ...], numbers: tuple[int, ...], expected: Rectangle) -> None:
    assert rectangle(source, (6, 8), 3, 1, *numbers) == expected


def test_columns_of_a_peers_slot() -> None:
    source, target = np.arange(24.0).reshape(3, 2, 4), np.zeros((3, 3, 2, 4))
    step("copy", [source, target], [2, 2, 2, 1, 3], 1)
    expected = np.zeros_like(target)
    expected[0, 1, :, 1:3] = source[0, :, 1:3]
    assert (target == expected).all()


def test_a_counter_that_is_behind_is_named() -> None:
    words = np.zeros((2, 3, 2), "int32")
    words[1, 2, 1] = 4
    step("wait_count", [words], [1, 1, 4], 1)
    with pytest.raises(WorkerError, match=r"4 of 5 tiles for device 2 in group 1 are made, .*behind the kernel"):
        step("wait_count", [words], [1, 1, 5], 1)


def exchanging() -> tvm.IRModule:
    """Each device makes rows for each, counts them, sends them in groups of columns, and adds up what has arrived."""
    shape, words_shape = (DEVICES, ROWS, COLUMNS), (2, DEVICES, len(GROUPS))

    @T.prim_func(s_tir=True)
    def prepare(words: T.Buffer(words_shape, "int32")) -> None:
        for u, d, g in T.grid(2, DEVICES, len(GROUPS)):
            with T.sblock("clear"):
                vu, vd, vg = T.axis.remap("SSS", [u, d, g])
                words[vu, vd, vg] = 0

    @T.prim_func(s_tir=True)
    def make(
        x: T.Buffer((COLUMNS,), "float32"), mine: T.Buffer(shape, "float32"), words: T.Buffer(words_shape, "int32")
    ) -> None:
        for d, r, c in T.grid(DEVICES, ROWS, COLUMNS):
            with T.sblock("make"):
                vd, vr, vc = T.axis.remap("SSS", [d, r, c])
                mine[vd, vr, vc] = x[vc] * T.cast(1 + vd * ROWS + vr, "float32")
        for d, g in T.grid(DEVICES, len(GROUPS)):
            with T.sblock("count"):
                vd, vg = T.axis.remap("SS", [d, g])
                words[1, vd, vg] = 7

    @T.prim_func(s_tir=True)
    def take(
        arrived: T.Buffer(shape, "float32"), words: T.Buffer(words_shape, "int32"), out: T.Buffer(shape, "float32")
    ) -> None:
        for d, r, c in T.grid(DEVICES, ROWS, COLUMNS):
            with T.sblock("take"):
                vd, vr, vc = T.axis.remap("SSS", [d, r, c])
                out[vd, vr, vc] = arrived[vd, vr, vc] * T.cast(words[0, vd, T.Select(vc < 16, 0, 1)], "float32")

    builder = tvm.relax.BlockBuilder()
    functions = {}
    for name, func in (("prepare", prepare), ("make", make), ("take", take)):
        func = func.with_attr("tirx.noalias", True)
        functions[name] = builder.add_func(func.with_attr("global_symbol", name), name)

    def tensor(name: str, *extents: int, dtype: str = "float32") -> tvm.relax.Var:
        return tvm.relax.Var(name, tvm.relax.TensorType(list(extents), dtype))

    x, mine, arrived, out = (
        tensor("x", COLUMNS),
        tensor("mine", *shape),
        tensor("arrived", *shape),
        tensor("out", *shape),
    )
    words, all_words = tensor("words", *words_shape, dtype="int32"), tensor("ws", DEVICES, *words_shape, dtype="int32")
    all_arrived = tensor("as", DEVICES, *shape)

    def tell(name: str, *arguments: object) -> None:
        given = [
            tvm.relax.prim_value(a) if isinstance(a, int) else tvm.ir.StringImm(a) if isinstance(a, str) else a
            for a in arguments
        ]
        call = tvm.relax.Call(tvm.relax.ExternFunc(f"axe.{name}"), given, ty_args=[tvm.relax.TupleType([])])
        builder.emit(call)

    with builder.function("main", [x, mine, arrived, all_arrived, words, all_words, out], pure=False):
        builder.emit(tvm.relax.Call(functions["prepare"], [words]))
        tell("barrier")
        builder.emit(tvm.relax.Call(functions["make"], [x, mine, words]))
        tell("fork", 0)
        for shift in range(DEVICES):
            for group, columns in enumerate(GROUPS):
                tell("wait_count", words, shift, group, 7, "tp")
                tell("copy", mine, all_arrived, ROWS, shift, shift, *columns, "tp")
                tell("flag", all_words, shift, group, "tp")
        tell("join", 0)
        tell("barrier")
        builder.emit(tvm.relax.Call(functions["take"], [arrived, words, out]))
        builder.emit_func_output(tvm.relax.Tuple([]))
    return builder.finalize()


@pytest.fixture(params=PLACES)
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    if str(request.param).startswith("cuda"):
        request.getfixturevalue("cuda")
    with launched(Mesh({"tp": DEVICES}), request.param) as started:
        yield started


def test_groups_are_sent_and_flagged(workers: Workers) -> None:
    """Run after run with other data; on GPUs that meet by themselves, launches of a graph from the third on."""
    shape, words_shape = (DEVICES, ROWS, COLUMNS), (2, DEVICES, len(GROUPS))
    x = workers.mesh_tensor((COLUMNS,), "float32")
    mine, arrived, out = (workers.mesh_tensor(shape, "float32") for _ in range(3))
    words = workers.mesh_tensor(words_shape, "int32")
    program = workers.load(exchanging(), resolve_target(workers.target))
    arguments = [
        (x, "slab"),
        (mine, "slab"),
        (arrived, "slab"),
        (arrived, "tp"),
        (words, "slab"),
        (words, "tp"),
        (out, "slab"),
    ]
    for turn in range(5):
        for device in range(DEVICES):
            x.slab(device)[:] = np.arange(COLUMNS) + 100 * device + 1000 * turn
            arrived.slab(device)[:] = np.nan
        workers.call(program, arguments)
        for device in range(DEVICES):
            for sender in range(DEVICES):
                rows = 1 + device * ROWS + np.arange(ROWS)[:, np.newaxis]
                expected = (np.arange(COLUMNS) + 100 * sender + 1000 * turn) * rows
                assert (out.slab(device)[sender] == expected).all()
