"""Quantized weights on meshes: packed 4-bit groups and 8-bit floats, each device with its part of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from packed_models import GROUP, OF_CODES, PACKINGS, ROWS, WIDTH, drawn, layer

import tvm_axe as axe
from tvm_axe import compiler
from tvm_axe.analysis.annotations import KERNEL
from tvm_axe.machines import builder, resolve_target
from tvm_axe.relax.prepacked import with_made_once
from tvm_axe.relax.quantized import with_decoding_products

GPU = resolve_target("cuda:sm_90a")
MESHES: dict[str, dict[str, int]] = {"2": {"tp": 2}, "3": {"tp": 3}, "2x2": {"dp": 2, "tp": 2}}
EVEN, UNEVEN = 192, 160
"""Inner columns: six groups, which two and three devices divide, and five."""
BOUND = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
ACROSS: dict[str, int | None] = {"down.scale": 1, "down.zero": 1}
"""Pins: the last product's weight is shared by its terms, in groups."""


def compared(exe: Any, workers: Any, form: str, inner: int, dtype: str, rows: int = ROWS) -> None:
    """Results of a session, and what a device holds of the weights."""
    x, weights, want = drawn(form, inner, dtype, rows)
    with exe.load(workers, weights) as session:
        got = np.asarray(session.main(x)).astype("float64")
    assert np.abs(got - want).max() / np.abs(want).max() < BOUND[dtype]


def kernels(module: tvm.IRModule) -> list[dict[str, Any]]:
    """The problems of the products that a kernel computes."""
    found = [func.attrs for func in module.functions.values() if KERNEL in (func.attrs or {})]
    assert all(str(attrs[KERNEL]) == "w4a16_matmul" for attrs in found)
    return [{name: int(attrs[f"{KERNEL}.{name}"]) for name in ("n", "k", "group")} for attrs in found]


def parts(exe: Any, devices: int) -> float:
    """What a device holds of the weights, in parts of what it would of all divided."""
    here, there = exe.shared.functions["main"].chosen.weights
    return here / there * devices


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("form", PACKINGS)
def test_each_device_decodes_its_part(form: str, mesh: str, workers: Any) -> None:
    """Whoever knows no kernel."""
    over = axe.Mesh(MESHES[mesh])
    for inner in (EVEN, UNEVEN):
        exe = axe.compile(layer(form, inner, "float32"), mesh=over, work_dir=None, keep=False)
        assert "100% of the products' operations are shared" in exe.show()
        assert parts(exe, over.size) < 1 + 0.05 * over.size
        compared(exe, workers(over), form, inner, "float32")


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("form", OF_CODES)
def test_each_device_multiplies_by_the_kernel(form: str, mesh: str, workers: Any) -> None:
    """On a CPU, whose programs are the same."""
    over = axe.Mesh(MESHES[mesh])
    for inner in (EVEN, UNEVEN):
        model = with_decoding_products(layer(form, inner, "float16"), GPU)
        exe = axe.compile(model, mesh=over, work_dir=None, keep=False)
        assert "100% of the products' operations are shared" in exe.show()
        assert parts(exe, over.size) < 1 + 0.05 * over.size
        assert 1 <= len(kernels(exe.shared.module)) <= 3
        compared(exe, workers(over), form, inner, "float16")


@pytest.mark.parametrize("target", ["llvm", "cuda:sm_90a"])
@pytest.mark.parametrize(("devices", "inner"), [(2, EVEN), (3, EVEN), (3, UNEVEN), (4, UNEVEN)])
def test_by_columns_and_by_terms(devices: int, inner: int, target: str, workers: Any) -> None:
    """Groups are whole; where devices don't divide them, terms that two have are zero for one."""
    model = with_decoding_products(layer("bytes", inner, "float16"), GPU)
    exe: Any = axe.compile(
        model, mesh={"tp": devices}, target=target, pins=ACROSS, memory=1.0, work_dir=None, keep=False
    )
    groups = -(-inner // GROUP // devices)
    names = [choice.node.name for choice in exe.shared.functions["main"].chosen.choices]
    assert {"n": WIDTH, "k": groups * GROUP, "group": GROUP} in kernels(exe.shared.module)
    assert any(name.endswith("_counted") for name in names) == (groups * GROUP * devices != inner)
    if target == "llvm":
        compared(exe, workers(devices), "bytes", inner, "float16")
    else:
        builder.build_program(exe.runnable, GPU)


@pytest.mark.parametrize("devices", [3, 4])
def test_groups_that_are_cut_are_no_kernels(devices: int, workers: Any) -> None:
    """Where a user pins codes so that a device has a part of its first group and of its last."""
    model = with_decoding_products(layer("bytes", UNEVEN, "float16"), GPU)
    pins = {"down.packed": 1}
    exe: Any = axe.compile(model, mesh={"tp": devices}, pins=pins, memory=1.0, work_dir=None, keep=False)
    assert {"n": WIDTH, "k": UNEVEN, "group": GROUP} not in kernels(exe.shared.module)
    compared(exe, workers(devices), "bytes", UNEVEN, "float16")


def called(func: tvm.relax.Function) -> list[str]:
    """The kernels that a function calls, by name."""
    values = [binding.value for block in func.body.blocks for binding in block.bindings]
    return [str(value.op.name_hint) for value in values if isinstance(value.op, tvm.ir.GlobalVar)]


@pytest.mark.parametrize(("form", "devices", "inner"), [("bytes", 2, EVEN), ("awq", 3, UNEVEN)])
def test_weights_are_packed_once(form: str, devices: int, inner: int, workers: Any, monkeypatch: Any) -> None:
    """When they are placed, as on GPUs, by the same kernels in code for CPUs."""
    monkeypatch.setattr(compiler, "with_free_weights", with_made_once)
    model = with_decoding_products(layer(form, inner, "float16"), GPU)
    exe: Any = axe.compile(model, mesh={"tp": devices}, work_dir=None, keep=False, pack_weights=True)
    packers = {pack.packer: called(exe.runnable[pack.packer]) for pack in exe.shared.packs}
    assert not any("packed" in name for name in called(exe.runnable["main"]))
    assert packers and all("packed" in kernel for kernels_of in packers.values() for kernel in kernels_of)
    assert {pack.coordinates for pack in exe.shared.packs} == ({()} if devices == 2 else {(), ("tp",)})
    compared(exe, workers(devices), form, inner, "float16")


def test_floats_are_decoded_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device may hold of weights is limited, and they would take twice as much."""
    monkeypatch.setattr(compiler, "with_free_weights", with_made_once)
    model = layer("fp8 of rows", EVEN, "float16")
    exe: Any = axe.compile(model, mesh={"tp": 2}, work_dir=None, keep=False, pack_weights=True)
    assert not exe.shared.packs


@pytest.mark.parametrize("form", OF_CODES)
def test_a_gpus_share_is_the_kernel(form: str) -> None:
    """And compiles to a cubin, with whatever packs what lies in another order, which no call does."""
    exe: Any = axe.compile(
        layer(form, EVEN, "bfloat16"), mesh={"tp": 2}, target=GPU, work_dir=None, keep=False, pack_weights=True
    )
    assert not any("packed" in name for name in called(exe.runnable["main"]))
    assert kernels(exe.shared.module)
    lowered = exe.runnable
    assert not kernels(lowered)
    products = [
        func
        for variable, func in lowered.functions_items()
        if str(variable.name_hint).startswith("w4a16_matmul") and isinstance(func, tvm.tirx.PrimFunc)
    ]
    assert products and all("s_tir" not in (func.attrs or {}) for func in products)
    assert not any("NT_matmul" in str(variable.name_hint) for variable in lowered.get_global_vars())
    builder.build_program(lowered, GPU)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("form", "devices", "inner"), [("bytes", 2, EVEN), ("words", 2, EVEN), ("awq", 3, UNEVEN)])
def test_on_gpus(form: str, devices: int, inner: int, packed: bool, on_gpus: Any) -> None:
    exe: Any = axe.compile(
        layer(form, inner, "float16"), mesh={"tp": devices}, target="cuda", work_dir=None, pack_weights=packed
    )
    with axe.launch(exe.mesh, engine="cuda", **on_gpus(devices)) as of_gpus:
        compared(exe, of_gpus, form, inner, "float16")
