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
from tvm_axe.collective import MeshKernel
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


def quantized(rows: int, columns: int, devices: int, dtype: str, few: str) -> tirx.PrimFunc:
    """The sum of X over devices and residual, each row of it in `few` bits, with the row's scale."""
    most = 127 if few == "int8" else 448

    @T.prim_func(s_tir=True)
    def kernel(
        X: T.Buffer((devices, rows, columns), dtype),
        residual: T.Buffer((rows, columns), dtype),
        hidden: T.Buffer((rows, columns), "float32"),
        scale: T.Buffer((rows,), "float32"),
        small: T.Buffer((rows, columns), few),
    ) -> None:
        C = T.sblock_alloc_buffer((rows, columns), "float32")
        top = T.sblock_alloc_buffer((rows,), "float32")
        least = T.sblock_alloc_buffer((rows,), "float32")
        for i, j, d in T.grid(rows, columns, devices):
            with T.sblock("sum"):
                vi, vj, vd = T.axis.remap("SSR", [i, j, d])
                with T.init():
                    C[vi, vj] = T.float32(0)
                C[vi, vj] = C[vi, vj] + T.cast(X[vd, vi, vj], "float32")
        for i, j in T.grid(rows, columns):
            with T.sblock("hidden"):
                vi, vj = T.axis.remap("SS", [i, j])
                hidden[vi, vj] = C[vi, vj] + T.cast(residual[vi, vj], "float32")
        for i, j in T.grid(rows, columns):
            with T.sblock("top"):
                vi, vj = T.axis.remap("SR", [i, j])
                with T.init():
                    top[vi] = T.float32(0.125)
                top[vi] = T.max(top[vi], hidden[vi, vj])
        for i, j in T.grid(rows, columns):
            with T.sblock("least"):
                vi, vj = T.axis.remap("SR", [i, j])
                with T.init():
                    least[vi] = T.float32(-0.125)
                least[vi] = T.min(hidden[vi, vj], least[vi])
        for i in T.grid(rows):
            with T.sblock("scale"):
                vi = T.axis.spatial(rows, i)
                scale[vi] = T.max(top[vi], -least[vi]) * T.float32(1 / most)
        for i, j in T.grid(rows, columns):
            with T.sblock("small"):
                vi, vj = T.axis.remap("SS", [i, j])
                small[vi, vj] = T.cast(T.round(hidden[vi, vj] / scale[vi]), few)

    return kernel


BLOCKS = {
    "rms": ("hidden", "squares", "norm"),
    "layer": ("hidden", "total", "mean", "squares", "norm"),
    "int8": ("hidden", "top", "least", "scale", "small"),
    "float8_e4m3fn": ("hidden", "top", "least", "scale", "small"),
}


def scheduled(kind: str, rows: int, columns: int, devices: int, dtype: str, splits: bool = False) -> Schedule:
    """What follows an all-reduce, in its kernel: whole, or split in two around it."""
    mesh = Mesh({"tp": devices})
    make = normed if kind in ("rms", "layer") else quantized
    func = make(kind, rows, columns, devices, dtype) if make is normed else make(rows, columns, devices, dtype, kind)
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


@pytest.mark.parametrize("dtype", ["int32", "float64", "bfloat16"])
def test_sums_are_made_in_a_type_that_holds_them(dtype: str) -> None:
    """By CPU workers, whose numbers are of these types: 2^30 and 1 are no float32, and 1 + 2^-50 isn't."""
    devices, rows, columns = 3, 2, 8

    @T.prim_func(s_tir=True)
    def doubled(X: T.Buffer((devices, rows, columns), dtype), Y: T.Buffer((rows, columns), dtype)) -> None:
        C = T.sblock_alloc_buffer((rows, columns), dtype)
        for i, j, d in T.grid(rows, columns, devices):
            with T.sblock("sum"):
                vi, vj, vd = T.axis.remap("SSR", [i, j, d])
                with T.init():
                    C[vi, vj] = T.cast(0, dtype)
                C[vi, vj] = C[vi, vj] + X[vd, vi, vj]
        for i, j in T.grid(rows, columns):
            with T.sblock("doubled"):
                vi, vj = T.axis.remap("SS", [i, j])
                Y[vi, vj] = C[vi, vj] + C[vi, vj]

    mesh = Mesh({"tp": devices})
    sch = Schedule(with_layouts(doubled, {"X": Layout.sharded((devices, rows, columns), mesh, {0: "tp"})}), mesh=mesh)
    sch.all_reduce(sch.get_loops(sch.get_sblock("sum"))[2], "tp")
    sch.fuse_collective([sch.get_sblock("sum"), sch.get_sblock("doubled")])
    kind, rng = check_dtype(dtype), np.random.default_rng(7)
    # Their sum needs all bits of int32 and of float64; in bfloat16 the small ones count together alone.
    large = {"int32": 2**28, "float64": 1.0, "bfloat16": 1.0}[dtype]
    small = {"int32": 1, "float64": 2.0**-50, "bfloat16": 2.0**-9}[dtype]
    terms = np.array([large, small, small])[:, None, None] * rng.integers(1, 3, (devices, rows, columns))
    with axe.launch(mesh, engine="threads") as workers:
        x, y = workers.mesh_tensor((rows, columns), dtype), workers.mesh_tensor((rows, columns), dtype)
        for device in range(devices):
            x.slab(device)[...] = terms[device].astype(kind)
            y.slab(device)[...] = 77
        flags = workers.mesh_tensor((devices, rows, 2), "int32")
        MeshKernel(workers, met(sch).program)(x, flags, y)
        total = terms.astype("int64" if dtype == "int32" else "float64").sum(axis=0)
        for device in range(devices):
            assert np.array_equal(y.slab(device), (2 * total.astype(kind)).astype(kind))


@pytest.mark.parametrize(("rows", "splits"), [(3, False), (4, True)])
def test_rows_in_few_bits(rows: int, splits: bool) -> None:
    """Their largest and smallest, where those may be what the maximum and minimum start from, and a number a row."""
    devices, columns = 2, 40
    found = met(scheduled("int8", rows, columns, devices, "float32", splits))
    rng = np.random.default_rng(rows)
    x, residual = rng.standard_normal((devices, rows, columns)), rng.standard_normal((rows, columns))
    x[:, 0], residual[0] = 1e-3, -0.1  # no element is as large as the least scale
    poison = {1: np.full((devices, rows), np.nan), 2: np.full((devices, rows, columns), np.nan)}
    given = {"x": x, "me": None, "in_0": np.stack(np.split(residual, devices) if splits else [residual] * devices)}
    given["flags"] = np.zeros((devices, devices, rows, 2), "int64")
    given |= {"out_0": poison[2], "out_1": poison[1], "out_2": poison[2]}
    names = [param.name for param in found.program.func.params]
    results = interpret_mesh(found.program, *(given[name] for name in names), rng=rng)
    result = dict(zip([name for name in names if name != "me"], results))
    hidden = x.sum(axis=0) + residual
    scale = np.maximum(np.abs(hidden).max(axis=1), 0.125) / 127
    assert scale[0] == 0.125 / 127
    for device in range(devices):
        np.testing.assert_allclose(result["out_0"][device], hidden, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(result["out_1"][device], scale, rtol=1e-6)
        assert np.all(np.abs(result["out_2"][device] - hidden / scale[:, None]) < 0.51)
    terms, sent = 4 * columns, 4 * columns + 4 + columns
    assert set(found.step.received) == {rows // devices * (terms + sent) if splits else rows * terms}


@pytest.mark.parametrize(("kind", "dtype"), [("int8", "float16"), ("float8_e4m3fn", "bfloat16")])
def test_rows_in_few_bits_compile_for_gpus(kind: str, dtype: str) -> None:
    for rows, columns, splits in ((64, 1000, True), (8, 8192, False)):
        exe = axe.compile(scheduled(kind, rows, columns, 2, dtype, splits), target="cuda:sm_90a", work_dir=None)
        assert "in which the devices meet" in exe.lowered.forms[0], exe.lowered.forms
        build_program(exe.runnable, exe.target)


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
