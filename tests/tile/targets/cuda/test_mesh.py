"""Tensors of the mesh on GPUs: distances between slabs, loads behind waits, and what a specialized kernel refuses."""

import re

import programs_mesh as programs
import pytest
import tvm
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import tile
from tvm_axe.errors import TileError
from tvm_axe.machines import cache, nvcc
from tvm_axe.tile.targets.cuda.specialized.plan import SpecializedPlan
from tvm_axe.tile.targets.cuda.uniform.plan import UniformPlan

AMPERE, HOPPER = (Target({"kind": "cuda", "arch": arch}) for arch in ("sm_80", "sm_90a"))
PAGE = 2 << 20


def strides(func, target):
    """The strides of each mesh tensor of a lowered function, by name."""
    lowered = tile.lower(func, target)
    return {param.name: [int(s) for s in param.strides] for param in lowered.params if getattr(param, "strides", ())}


def source(func):
    """The CUDA code of a program."""
    mod = tvm.IRModule({"main": tile.lower(func, HOPPER).with_attr("global_symbol", "main")})
    return str(tvm.compile(mod, HOPPER, tir_pipeline="tirx").mod.imports[0].inspect_source())


@pytest.mark.parametrize("target", [AMPERE, HOPPER], ids=["sm_80", "sm_90a"])
def test_slabs_are_whole_pages_apart(target):
    found = strides(programs.product_scatter(2, 512, 512, 256), target)
    assert found["flags"] == [PAGE // 4, 4, 2, 1]
    assert found["parts"] == [PAGE // 2, 256 * 512, 512, 1]  # a slab of half a MiB
    found = strides(programs.reduce_norm(4, 3000, 512), target)
    assert found["x"] == [2 * PAGE // 2, 512, 1]  # of 3,072,000 bytes


def test_one_device_has_pages_too():
    assert strides(programs.reduce_norm(1, 8, 512), HOPPER)["x"] == [PAGE // 2, 512, 1]


def test_a_coordinate_needs_no_guard():
    text = source(programs.reduce_norm(4, 8, 512))
    text = text[text.rindex("__global__") :]
    assert f"me * {PAGE // 4}" in text and "% 4" not in text and "me <" not in text


def test_parts_are_stored_and_loaded_by_tma():
    plan = tile.plan(programs.product_scatter(2, 512, 512, 256), HOPPER)
    assert isinstance(plan, SpecializedPlan) and plan.has_storing_warp
    staged = {copy.dst.tile.name for copy in plan.memory.staging}
    loaded = {copy.src.tile.name for b in plan.memory.buffers for copy in b.copies + b.others}
    assert "parts" in staged & loaded


def joins(dtype):
    """A device joins values with its peer's elements, in every way, and with those of a tensor of its own."""
    shape = (2, 64)

    @T.prim_func
    def joins(
        me: T.int32,
        added: tile.mesh_tensor(shape, dtype),
        most: tile.mesh_tensor(shape, dtype),
        least: tile.mesh_tensor(shape, dtype),
        own: T.Buffer((64,), dtype),
        flags: tile.mesh_tensor((2, 1), "int32"),
    ):
        with tile.kernel(1, device=me) as i:
            part = tile.fragment((64,), dtype)
            tile.copy(own[i * 64], part)
            tile.atomic_add(part, added[1 - me, 0:64])
            with tile.parallel(64) as k:
                tile.atomic_max(part[k], most[1 - me, 63 - k])
                tile.atomic_min(part[k], least[1 - me, k // 2])
            tile.signal(flags[1 - me, 0])
            tile.wait(flags[me, 0], reset=True)

    return joins


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "uint32", "int64"])
def test_peers_join_at_the_scope_of_the_system(dtype):
    text = source(joins(dtype))
    calls = set(re.findall(r"axe_atomic_\w+(?=\()", text[text.rindex("__global__") :]))
    assert calls == {f"axe_atomic_{kind}_{dtype}_system" for kind in ("add", "max", "min")}
    for call in calls:
        made = text[text.index(f"void {call}(") :].partition("\n}\n")[0]
        assert re.search(r"atomic(Add|Max|Min|CAS)_system\(|atom.relaxed.sys.cas.b16", made)
        assert not re.search(r"atomic(Add|Max|Min|CAS)\(", made)


def test_what_a_kernel_stores_is_loaded_behind_a_wait():
    @T.prim_func
    def again(x: tile.mesh_tensor((2, 128, 64), "bfloat16"), me: T.int32, w: T.Buffer((64, 64), "bfloat16")):
        with tile.kernel(1, device=me, roles="specialized") as i:
            a = tile.shared((128, 64), "bfloat16")
            b = tile.shared((64, 64), "bfloat16")
            c = tile.fragment((128, 64), "float32")
            tile.copy(x[me, i * 128, 0], a)
            tile.copy(w, b)
            tile.gemm(a, b, c, accumulate=False)
            tile.copy(c, x[me, i * 128, 0])

    with pytest.raises(TileError, match=r"the producer loads from mesh x: .*; valid .* is a wait for who stores"):
        tile.plan(again, HOPPER)
    tile.plan(again, "llvm")


@pytest.mark.parametrize("target", [AMPERE, HOPPER], ids=["sm_80", "sm_90a"])
def test_programs_become_cubins(target, tmp_path):
    try:
        nvcc.find_compiler()
    except TileError as error:
        pytest.skip(str(error))
    made = [
        programs.product_scatter(2, 512, 512, 256),
        programs.product_send(2, 512, 512, 512),
        programs.gather_product(4, 1024, 512, 128),
        programs.reduce_norm(2, 8, 1024),
        programs.reduce_norm(4, 8, 1024, push=True),
        programs.scatter_norm_gather(2, 8, 512),
        *map(joins, ("float16", "bfloat16", "float64", "int64")),
    ]
    named = [func.with_attr("global_symbol", f"program_{at}") for at, func in enumerate(made)]
    compiled = tile.compile_all(named, target, cache.Cache(tmp_path))
    assert all("#define __restrict__" in exe.source for exe in compiled)


def test_models():
    for func in (programs.reduce_norm(2, 8, 1024), programs.scatter_norm_gather(2, 8, 512)):
        assert isinstance(tile.plan(func, HOPPER), UniformPlan)
    for func in (programs.product_send(2, 512, 512, 512), programs.gather_product(2, 512, 512, 128)):
        assert isinstance(tile.plan(func, HOPPER), SpecializedPlan)
