"""What becomes of a program's collectives and barriers, and that it computes the same."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import pytest
import tvm
from tvm import relax

from tvm_axe.collective import Workers, launch, ops
from tvm_axe.collective.link import SUPPORTED, link
from tvm_axe.collective.plan import VIEWS
from tvm_axe.collective.sync import Control
from tvm_axe.layout import Mesh
from tvm_axe.machines import resolve_target

Call = tuple[str, Sequence[object]]
ROWS, COLUMNS, PARTS = 7, 5, 2


def program(tensors: Sequence[tuple[Sequence[object], str]], calls: Sequence[Call]) -> tvm.IRModule:
    """A module whose main takes tensors of these shapes and types, and calls functions on them by their numbers."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"t{i}", relax.TensorType(shape, dtype)) for i, (shape, dtype) in enumerate(tensors)]
    with builder.function("main", params, pure=False):
        for name, (*indices, numbers, axis) in calls:
            arguments = [params[i] for i in indices] + [relax.prim_value(number) for number in numbers]
            arguments += [] if axis is None else [tvm.ir.StringImm(axis)]
            builder.emit(relax.Call(relax.ExternFunc(f"axe.{name}"), arguments, ty_args=[relax.TupleType([])]))
        builder.emit_func_output(relax.Tuple([]))
    return builder.finalize()


def called(mod: tvm.IRModule) -> list[str]:
    """What main calls, in order: functions of the module by their names, others with a star."""
    names = []
    for binding in mod["main"].body.blocks[0].bindings:
        op = binding.value.op
        names.append(f"*{op.global_symbol}" if isinstance(op, relax.ExternFunc) else op.name_hint)
    return names


def linked(mod: tvm.IRModule, axes: Sequence[str] = ("tp",), control: bool = True, rank: int = 1) -> tvm.IRModule:
    mesh = Mesh({"tp": PARTS})
    block = Control(mmap.mmap(-1, Control.nbytes(mesh.size)), mesh.size) if control else None
    return link(mod, mesh, rank, axes, block, 10)


SLAB, VIEW = (ROWS, COLUMNS), (PARTS, ROWS, COLUMNS)
BARRIER: Call = ("barrier", ([], None))


def test_equal_calls_become_one_function() -> None:
    reduce: Call = ("all_reduce", (0, 1, [], "tp"))
    mod = program([(VIEW, "float32")] * 2, [reduce, BARRIER, ("all_reduce", (1, 0, [], "tp")), BARRIER])
    assert called(mod) == ["*axe.all_reduce", "*axe.barrier"] * 2
    assert called(linked(mod)) == ["axe_all_reduce_0", "axe_barrier_1"] * 2
    other = program([(VIEW, "float32"), (VIEW, "float16")], [("all_reduce", (i, i, [], "tp")) for i in range(2)])
    assert len(set(called(linked(other)))) == 2
    waits = program([], [("arrive", ([], None)), ("wait", ([0], None)), ("wait", ([1], None)), ("wait", ([0], None))])
    assert called(linked(waits)) == ["axe_arrive_0", "axe_wait_1", "axe_wait_2", "axe_wait_1"]


def test_what_cannot_be_compiled_is_left_alone() -> None:
    n = tvm.tirx.Var("n", "int64")
    for tensors, name, arguments in [
        ([((PARTS, n), "float32"), ((PARTS, n), "float32")], "all_reduce", (0, 1, [], "tp")),  # of any length
        ([(VIEW, "float8_e4m3fn"), (SLAB, "float8_e4m3fn")], "reduce", (0, 1, [1], "tp")),  # no sums of these
    ]:
        mod = program(tensors, [(name, arguments), BARRIER])
        assert called(linked(mod)) == [f"*axe.{name}", "axe_barrier_0"]
    mod = program([(VIEW, "float32"), (SLAB, "float32")], [("send", (0, 1, [1], "tp")), BARRIER])
    assert called(linked(mod, axes=())) == ["*axe.send", "axe_barrier_0"]
    assert called(linked(mod, control=False)) == ["axe_send_0", "*axe.barrier"]


@pytest.mark.parametrize(
    ("tensors", "name", "numbers", "message"),
    [
        ([(SLAB, "float32"), (VIEW, "float32")], "all_reduce", [], r"source has shape \(7, 5\), not \(2, \.\.\.\)"),
        ([(VIEW, "float32"), (VIEW, "int32")], "all_reduce", [], "target has dtype int32, not the source's float32"),
        ([(VIEW, "float32"), (SLAB, "float32")], "reduce_scatter", [0], None),
        ([(VIEW, "float32"), ((3, 5), "float32")], "reduce_scatter", [0], r"slabs of shapes .* don't fit each other"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensors: list, name: str, numbers: list[int], message: str | None) -> None:
    mod = program(tensors, [(name, (0, 1, numbers, "tp"))])
    if message is None:
        linked(mod)  # more room than the block needs is none of the collective's business
        return
    with pytest.raises(RuntimeError, match=message):
        linked(mod, rank=0)


@pytest.mark.skipif(not SUPPORTED, reason="programs are linked on x86-64 only")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_linked_program_does_what_ops_does(workers: Workers, dtype: str) -> None:
    """Every collective in one program, on every axis; all of it runs without Python on workers alone in a process."""
    mesh = workers.mesh
    rng = np.random.default_rng(0)
    for axis in mesh.names:
        n = mesh[axis]
        by_rows, by_columns = (-(-ROWS // n), COLUMNS), (ROWS, -(-COLUMNS // n))
        cases: list[tuple[str, list[int], tuple[int, ...], tuple[int, ...]]] = [
            ("all_reduce", [], SLAB, SLAB),
            ("reduce_scatter", [1], SLAB, by_columns),
            ("all_gather", [0], by_rows, SLAB),
            ("all_gather_in_place", [0], SLAB, SLAB),
            ("all_to_all", [0, 1], by_rows, by_columns),
            ("send", [1], SLAB, SLAB),
            ("reduce", [n - 1], SLAB, SLAB),
            ("broadcast", [n - 1], SLAB, SLAB),
        ]
        tensors, arguments, calls, expected = [], [], [BARRIER], []
        for name, numbers, *shapes in cases:
            pair = [workers.mesh_tensor(shape, dtype) for shape in shapes]
            for device in range(mesh.size):
                pair[0].slab(device)[...] = (9 * rng.standard_normal(shapes[0])).astype(dtype)
                pair[1].slab(device)[...] = 77
            calls += [(name, (len(arguments), len(arguments) + 1, numbers, axis))]
            for tensor, is_view in zip(pair, VIEWS[name]):
                tensors.append(((n, *tensor.shape) if is_view else tensor.shape, dtype))
                arguments.append((tensor, axis if is_view else "slab"))
            expected.append((name, numbers, pair, reference(mesh, axis, name, numbers, pair)))
        compiled = workers.load(program(tensors, [*calls, BARRIER]), resolve_target(workers.target))
        workers.call(compiled, arguments)
        for name, _, (_, target), wanted in expected:
            for device in range(mesh.size):
                np.testing.assert_array_equal(target.slab(device), wanted[device], err_msg=name)
        workers.free(compiled)


def reference(mesh: Mesh, axis: str, name: str, numbers: list[int], pair: list) -> np.ndarray:
    """What numpy makes of copies of the slabs, all devices in turn."""
    source, target = (np.stack([tensor.slab(device) for device in range(mesh.size)]) for tensor in pair)
    for device in range(mesh.size):
        group = list(mesh.group(device, axis))
        views = [
            array[group] if is_view else array[device, ...] for array, is_view in zip((source, target), VIEWS[name])
        ]
        ops.collective(name, *views, *numbers, rank=group.index(device))
        if VIEWS[name][1]:  # the group's slabs were copied
            target[group] = views[1]
    return target


@pytest.mark.skipif(not SUPPORTED, reason="programs are linked on x86-64 only")
def test_no_python_runs_in_a_linked_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 0 is in this process, so that calls of the functions in Python would be seen."""
    tensors = [(VIEW, "float32"), (SLAB, "float32")]
    mod = program(tensors, [BARRIER, ("send", (0, 1, [1], "tp")), BARRIER])
    seen: list[str] = []
    monkeypatch.setattr(ops, "collective", lambda name, *_, **__: seen.append(name))
    for engine, expected in (("threads", ["send", "send"]), ("processes", [])):
        seen.clear()
        with launch(Mesh({"tp": PARTS}), engine=engine) as workers:
            a, b = (workers.mesh_tensor(SLAB, "float32") for _ in range(2))
            a.slab(1)[...] = 3
            workers.call(workers.load(mod, "llvm"), [(a, "tp"), (b, "slab")])
            assert seen == expected
            assert (b.slab(0) == 3).all() == (engine == "processes")
