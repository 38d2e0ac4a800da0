"""Sums over devices that end in norms of rows: the kernel in which devices meet, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from interpreter_mesh import interpret_mesh
from tvm import tirx
from tvm.script import tirx as T

import tvm_axe as axe
from tvm_axe.collective.tensor import check_dtype
from tvm_axe.layout import Layout, Mesh
from tvm_axe.lower.derive import derive_steps
from tvm_axe.lower.infer import infer_shardings
from tvm_axe.lower.lowered import Lowered, lower
from tvm_axe.lower.parsing import parse_program
from tvm_axe.lower.rows import Meeting, meeting_of
from tvm_axe.machines import resolve_target
from tvm_axe.machines.builder import build_program
from tvm_axe.programs import PROGRAMS
from tvm_axe.schedule import Schedule, layouts_of, with_layouts

HOPPER = resolve_target("cuda:sm_90a")
EPSILON = 1e-5


def normed(kind: str, rows: int, columns: int, devices: int, dtype: str) -> tirx.PrimFunc:
    """out = the norm of the sum of X over devices and residual, of which `hidden` is kept too."""

    @T.prim_func(s_tir=True)
    def rms(
        X: T.Buffer((devices, rows, columns), dtype),
        residual: T.Buffer((rows, columns), dtype),
        gamma: T.Buffer((columns,), dtype),
        hidden: T.Buffer((rows, columns), dtype),
        out: T.Buffer((rows, columns), dtype),
    ) -> None:
        C = T.sblock_alloc_buffer((rows, columns), dtype)
        squares = T.sblock_alloc_buffer((rows,), "float32")
        for i, j, d in T.grid(rows, columns, devices):
            with T.sblock("sum"):
                vi, vj, vd = T.axis.remap("SSR", [i, j, d])
                with T.init():
                    C[vi, vj] = T.cast(0, dtype)
                C[vi, vj] = C[vi, vj] + X[vd, vi, vj]
        for i, j in T.grid(rows, columns):
            with T.sblock("hidden"):
                vi, vj = T.axis.remap("SS", [i, j])
                hidden[vi, vj] = C[vi, vj] + residual[vi, vj]
        for i, j in T.grid(rows, columns):
            with T.sblock("squares"):
                vi, vj = T.axis.remap("SR", [i, j])
                with T.init():
                    squares[vi] = T.float32(0)
                squares[vi] = squares[vi] + T.cast(hidden[vi, vj], "float32") * T.cast(hidden[vi, vj], "float32")
        for i, j in T.grid(rows, columns):
            with T.sblock("norm"):
                vi, vj = T.axis.remap("SS", [i, j])
                out[vi, vj] = T.cast(
                    T.cast(hidden[vi, vj], "float32")
                    * T.rsqrt(squares[vi] * T.float32(1 / columns) + T.float32(EPSILON))
                    * T.cast(gamma[vj], "float32"),
                    dtype,
                )

    @T.prim_func(s_tir=True)
    def layer(
        X: T.Buffer((devices, rows, columns), dtype),
        residual: T.Buffer((rows, columns), dtype),
        gamma: T.Buffer((columns,), dtype),
        hidden: T.Buffer((rows, columns), dtype),
        out: T.Buffer((rows, columns), dtype),
    ) -> None:
        C = T.sblock_alloc_buffer((rows, columns), dtype)
        total = T.sblock_alloc_buffer((rows,), "float32")
        mean = T.sblock_alloc_buffer((rows,), "float32")
        squares = T.sblock_alloc_buffer((rows,), "float32")
        for i, j, d in T.grid(rows, columns, devices):
            with T.sblock("sum"):
                vi, vj, vd = T.axis.remap("SSR", [i, j, d])
                with T.init():
                    C[vi, vj] = T.cast(0, dtype)
                C[vi, vj] = C[vi, vj] + X[vd, vi, vj]
        for i, j in T.grid(rows, columns):
            with T.sblock("hidden"):
                vi, vj = T.axis.remap("SS", [i, j])
                hidden[vi, vj] = C[vi, vj] + residual[vi, vj]
        for i, j in T.grid(rows, columns):
            with T.sblock("total"):
                vi, vj = T.axis.remap("SR", [i, j])
                with T.init():
                    total[vi] = T.float32(0)
                total[vi] = total[vi] + T.cast(hidden[vi, vj], "float32")
        for i in T.grid(rows):
            with T.sblock("mean"):
                vi = T.axis.spatial(rows, i)
                mean[vi] = total[vi] * T.float32(1 / columns)
        for i, j in T.grid(rows, columns):
            with T.sblock("squares"):
                vi, vj = T.axis.remap("SR", [i, j])
                with T.init():
                    squares[vi] = T.float32(0)
                squares[vi] = squares[vi] + (T.cast(hidden[vi, vj], "float32") - mean[vi]) * (
                    T.cast(hidden[vi, vj], "float32") - mean[vi]
                )
        for i, j in T.grid(rows, columns):
            with T.sblock("norm"):
                vi, vj = T.axis.remap("SS", [i, j])
                out[vi, vj] = T.cast(
                    (T.cast(hidden[vi, vj], "float32") - mean[vi])
                    * T.rsqrt(squares[vi] * T.float32(1 / columns) + T.float32(EPSILON))
                    * T.cast(gamma[vj], "float32"),
                    dtype,
                )

    return rms if kind == "rms" else layer


BLOCKS = {"rms": ("hidden", "squares", "norm"), "layer": ("hidden", "total", "mean", "squares", "norm")}


def scheduled(kind: str, rows: int, columns: int, devices: int, dtype: str, splits: bool = False) -> Schedule:
    """The norm in the kernel of its all-reduce: whole, or split in two around it."""
    mesh = Mesh({"tp": devices})
    func = normed(kind, rows, columns, devices, dtype)
    layouts = {"X": Layout.sharded((devices, rows, columns), mesh, {0: "tp"})}
    sch = Schedule(with_layouts(func, layouts), mesh=mesh)
    sch.all_reduce(sch.get_loops(sch.get_sblock("sum"))[2], "tp")
    blocks = [sch.get_sblock(name) for name in BLOCKS[kind]]
    if not splits:
        sch.fuse_collective([sch.get_sblock("sum"), *blocks])
        return sch
    scatter, gather = sch.split_collective(sch.get_sblock("sum"))
    (*gathers,) = sch.reorder_collective(gather, blocks)
    sch.fuse_collective([scatter, *blocks, *gathers])
    return sch


def expected(kind: str, x: np.ndarray, residual: np.ndarray, gamma: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    hidden = x.astype("float64").sum(axis=0) + residual.astype("float64")
    centred = hidden - hidden.mean(axis=1, keepdims=True) if kind == "layer" else hidden
    factor = 1 / np.sqrt(np.square(centred).mean(axis=1, keepdims=True) + EPSILON)
    return hidden, centred * factor * gamma.astype("float64")


def met(sch: Schedule) -> Meeting:
    """The kernel of a schedule that has no other stage."""
    func = sch.mod["main"]
    program = parse_program(func, sch.mesh, 2 << 20)
    shardings = infer_shardings(program, layouts_of(func))
    (step,) = derive_steps(program, shardings)
    found = meeting_of(program, step, shardings, frozenset(program.intermediates), HOPPER)
    assert isinstance(found, Meeting), found
    return found


def lowered(sch: Schedule) -> Lowered:
    return lower(sch.mod["main"], sch.mesh, 2 << 20, HOPPER)


CASES = [("rms", 1, 2, False), ("rms", 5, 3, False), ("layer", 4, 2, False), ("layer", 4, 2, True), ("rms", 6, 3, True)]


@pytest.mark.parametrize(("kind", "rows", "devices", "splits"), [*CASES, ("rms", 32, 2, False), ("rms", 48, 3, False)])
def test_in_many_orders(kind: str, rows: int, devices: int, splits: bool) -> None:
    """All devices' blocks in random interleavings, outputs poisoned, flags zero again behind it."""
    columns = 40
    found = met(scheduled(kind, rows, columns, devices, "float32", splits))
    for seed in range(2):
        rng = np.random.default_rng([rows, seed])
        x, residual = rng.standard_normal((devices, rows, columns)), rng.standard_normal((rows, columns))
        gamma = rng.standard_normal(columns)
        sliced = splits or rows == 48
        own = np.stack(np.split(residual, devices)) if splits else np.stack([residual] * devices)
        given = {"in_0": own, "in_1": np.stack([gamma] * devices), "x": x, "me": None}
        given["flags"] = np.zeros((devices, devices, rows, 2), "int64")
        poison = np.full((devices, rows, columns), np.nan)
        names = [param.name for param in found.program.func.params]
        arguments = [given.get(name, poison) for name in names]
        tensors = [name for name in names if name != "me"]
        result = dict(zip(tensors, interpret_mesh(found.program, *arguments, rng=rng, running=1 + seed)))
        assert not result["flags"].any() and sliced == any(tile.is_mesh for tile in found.program.params[-2:])
        for name, wanted in zip(("out_0", "out_1"), expected(kind, x, residual, gamma)):
            np.testing.assert_allclose(result[name], np.broadcast_to(wanted, poison.shape), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_compiles_for_gpus(dtype: str) -> None:
    for rows, columns, splits in ((64, 1000, True), (8, 8192, False)):
        exe = axe.compile(scheduled("layer", rows, columns, 2, dtype, splits), target="cuda:sm_90a", work_dir=None)
        assert "in which the devices meet" in exe.show()
        build_program(exe.runnable, exe.target)


def test_on_a_mesh_of_two_axes_it_has_the_distance_of_its_peers() -> None:
    """Which are other devices' slabs apart where its axis isn't the last."""
    for names, apart in ((("tp", "dp"), 2), (("dp", "tp"), 1)):
        mesh = Mesh(dict.fromkeys(names, 2))
        exe = axe.compile(PROGRAMS["norm"](mesh, "test").schedule("MM-fuse(RS-Norm-AG)"), target=HOPPER, work_dir=None)
        (kernel,) = (
            func for name, func in exe.runnable.functions_items() if str(name.name_hint).endswith("norm_Y_global")
        )
        strides = [int(param.strides[0]) for param in kernel.params if getattr(param, "strides", ())]
        assert len(strides) == 3 and set(strides) == {apart * (2 << 20) // 4}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("kind", "rows", "devices", "splits"), [*CASES, ("rms", 64, 2, False)])
def test_on_gpus(on_gpus: Callable[..., Any], kind: str, rows: int, devices: int, splits: bool, dtype: str) -> None:
    """Poisoned at first, then run after run on other inputs, and twice on the same ones, bit for bit alike."""
    exe = axe.compile(scheduled(kind, rows, 1000, devices, dtype, splits), target="cuda", work_dir=None)
    assert "in which the devices meet" in exe.lowered.forms[0], exe.lowered.forms
    rng = np.random.default_rng(rows)
    shapes = [(buffer.shape, check_dtype(buffer.dtype)) for buffer in exe.lowered.inputs]
    with axe.launch(Mesh({"tp": devices}), engine="cuda", **on_gpus(devices)) as workers:
        exe.run(workers, *(np.full(shape, np.nan, kind) for shape, kind in shapes))
        for _ in range(5):
            arrays = [rng.standard_normal(shape).astype(kind) for shape, kind in shapes]
            first, second = (exe.run(workers, *arrays) for _ in range(2))
            for one, other, wanted in zip(first, second, expected(kind, *arrays)):
                assert np.array(one).tobytes() == np.array(other).tobytes()
                assert np.linalg.norm(np.array(one).astype("float64") - wanted) < 8e-3 * np.linalg.norm(wanted)
        assert len(exe.time(workers, *arrays, repeat=3, warmup=1)) == 3
