"""Calls: what main calls, and whose elements each call touches on which device."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm import ir, relax, tirx

from tvm_axe.layout import Mesh
from tvm_axe.lower import Lowered, lower
from tvm_axe.lower.calls import Argument, Box, Tensor, Touches
from tvm_axe.programs.registry import PROGRAMS

TWO = {name: Mesh(dict.fromkeys(program.axes, 2)) for name, program in PROGRAMS.items()}


def lowered_of(program: str, schedule: str, mesh: Mesh, size: str = "test") -> Lowered:
    sch = PROGRAMS[program](mesh, size).schedule(schedule)
    return lower(sch.mod["main"], mesh)


def touched(lowered: Lowered, number: int, device: int) -> set[tuple]:
    """(r or w, buffer, device, start, stop) of each touch of a call by a device."""
    touches = Touches(lowered.mesh, lowered.module, lowered.buffers).of(lowered.calls[number], device)
    return {("rw"[t.is_write], t.buffer, t.device, t.box.start, t.box.stop) for t in touches}


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    start = tuple(draw(st.integers(0, extent - 1)) for extent in shape)
    return Box(shape, start, tuple(draw(st.integers(at + 1, extent)) for at, extent in zip(start, shape)))


def elements(box: Box) -> set[int]:
    """The positions in memory of the elements in a box."""
    numbers = np.arange(np.prod(box.shape)).reshape(box.shape)
    return set(numbers[tuple(slice(*span) for span in zip(box.start, box.stop))].ravel().tolist())


@given(boxes((3, 4, 5)), boxes((3, 4, 5)))
def test_boxes_meet_if_they_share_an_element(one: Box, other: Box) -> None:
    assert one.meets(other) == other.meets(one) == bool(elements(one) & elements(other))


@given(boxes((3, 4, 5)), boxes((60,)))
def test_boxes_of_two_shapes_meet_if_their_ranges_do(one: Box, other: Box) -> None:
    ranges = [set(range(min(found), max(found) + 1)) for found in (elements(one), elements(other))]
    assert one.meets(other) == other.meets(one) == bool(ranges[0] & ranges[1])


def test_a_scalar_meets_itself() -> None:
    assert Box((), (), ()).meets(Box((), (), ()))


def test_the_calls_of_main_by_stage() -> None:
    lowered = lowered_of("mlp", "MM-RS-C-AG", Mesh({"tp": 2}))
    assert [(call.function, call.stage) for call in lowered.calls] == [
        ("mm_rf", 0),
        ("axe.barrier", None),
        ("axe.reduce_scatter", 1),
        ("epi", 2),
        ("axe.all_gather", 3),
    ]
    assert all((call.step, call.chunk) == (None, None) for call in lowered.calls)
    assert touched(lowered, 1, 0) == set()


def test_collectives_touch_what_the_engine_plans() -> None:
    lowered = lowered_of("mlp", "MM-RS-C-AG", Mesh({"tp": 3}), "uneven")  # 7 rows of 5: three each, and one
    for device, rows in enumerate([(0, 3), (3, 6), (6, 7)]):
        start, stop = (rows[0], 0), (rows[1], 5)
        # Nobody else sees what the device sums into, nor what it gathers from.
        assert touched(lowered, 2, device) == {("r", "C_rf", peer, start, stop) for peer in range(3)}
        assert touched(lowered, 4, device) == {("w", "out", peer, start, stop) for peer in range(3)}


def test_a_mesh_kernel_touches_its_slice_on_each_device() -> None:
    lowered = lowered_of("mlp", "MM-fuse(RS-C-AG)", Mesh({"tp": 3}))  # 12 rows of 8
    found = touched(lowered, 2, 1)
    assert {touch for touch in found if touch[1] in ("C_rf", "out")} == {
        (what, buffer, peer, (4, 0), (8, 8)) for what, buffer in (("r", "C_rf"), ("w", "out")) for peer in range(3)
    }
    assert {touch[2] for touch in found if touch[1] not in ("C_rf", "out")} == {1}


@pytest.mark.parametrize("size", ["test", "bench"])  # on rows with the chunk's number, and on windows without
def test_a_chunk_touches_its_rows(size: str) -> None:
    tokens, outer = {"test": (12, 8), "bench": (4096, 768)}[size]
    lowered = lowered_of("mlp", "ol(MM, fuse(RS-C-AG))", Mesh({"tp": 3 if size == "test" else 2}), size)
    devices = 3 if size == "test" else 2
    chunks = 4
    rows = tokens // devices // chunks
    seen = set()
    for number, call in enumerate(lowered.calls):
        for device in range(devices):
            if call.stage == 0:
                assert call.step is not None and call.chunk is not None
                at = (device + call.step) % devices * tokens // devices + call.chunk * rows
                assert ("w", "C_rf", device, (at, 0), (at + rows, outer)) in touched(lowered, number, device)
                seen.add((device, at))
            elif call.stage == 1:
                assert call.step is None and call.chunk is not None
                at = device * tokens // devices + call.chunk * rows
                assert {touch for touch in touched(lowered, number, device) if touch[1] in ("C_rf", "out")} == {
                    (what, buffer, peer, (at, 0), (at + rows, outer))
                    for what, buffer in (("r", "C_rf"), ("w", "out"))
                    for peer in range(devices)
                }
    assert len(seen) == devices * devices * chunks


def test_a_send_reads_the_device_before() -> None:
    mesh = Mesh({"pp": 3, "tp": 2})
    lowered = lowered_of("pipeline", "ol(RS, fuse(P2P-C), AG)", mesh)
    number = next(n for n, call in enumerate(lowered.calls) if call.stage is not None and call.function == "send_epi")
    for device in range(mesh.size):
        read = {touch[2] for touch in touched(lowered, number, device) if touch[:2] == ("r", "C_global")}
        assert read == {mesh.device({"pp": (device // 2 - 1) % 3, "tp": device % 2})}


@pytest.mark.parametrize(
    ("program", "schedule", "size"),
    [(name, schedule, "test") for name, cls in PROGRAMS.items() for schedule in cls(TWO[name]).schedules]
    + [("mlp", "ol(MM, fuse(RS-C-AG))", "bench")],  # a kernel on windows
)
def test_main_is_printed_from_the_calls(program: str, schedule: str, size: str) -> None:
    """What the module says, read back: the same functions on tensors of the same shapes, with the same numbers."""
    lowered = lowered_of(program, schedule, TWO[program], size)
    main, found = lowered.module["main"], []
    known = dict(zip(main.params, [*lowered.arguments, *lowered.coordinates]))
    for binding in (binding for block in main.body.blocks for binding in block.bindings):
        op = binding.value.op
        if isinstance(op, ir.GlobalVar | relax.ExternFunc):
            name = op.name_hint if isinstance(op, ir.GlobalVar) else op.global_symbol
            found.append((str(name), [_read(argument, known) for argument in binding.value.args]))
    on_mesh = {f"{name}.{view}" for name, view in lowered.arguments}
    assert found == [(call.function, [_said(a, on_mesh) for a in call.arguments]) for call in lowered.calls]
    kernels = {name for call in lowered.calls for name in (call.function, call.kernel) if call.kernel is not None}
    functions = {str(var.name_hint) for var in lowered.module.get_global_vars()}
    assert functions == kernels | {"main"}
    stages = [lowered.stages[call.stage].kernel for call in lowered.calls if call.stage is not None]
    assert stages == [call.kernel for call in lowered.calls if call.stage is not None]


def _read(argument: relax.Expr, known: dict) -> object:
    """A number, a mesh axis, or a tensor's shape behind its place on the mesh, if it has one."""
    if isinstance(argument, tirx.IntImm):
        return int(argument)
    if isinstance(argument, ir.StringImm):
        return str(argument.value)
    what = known.get(argument, ("", ""))
    return what if isinstance(what, str) else (".".join(what), tuple(map(int, argument.ty.shape.values)))


def _said(argument: Argument, on_mesh: set[str]) -> object:
    if not isinstance(argument, Tensor):
        return argument
    place = f"{argument.buffer}.{argument.view}"
    return place if place in on_mesh else ".", argument.shape


def test_an_index_that_is_loaded_may_be_any() -> None:
    lowered = lowered_of("moe", "A2A-MM-A2A", Mesh({"ep": 2}))
    tokens = {touch for touch in touched(lowered, 0, 1) if touch[1] == "X"}
    (whole,) = tokens
    assert whole[3] == (0,) * len(whole[4]) and whole[2] == 1
