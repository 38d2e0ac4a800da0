"""Back ends are found by target, say what a machine is, and are the only ones that are asked for a target's name."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import toy_target
import tvm
from tvm import s_tir, te
from tvm.script import tirx as T
from tvm.target import Target

import tvm_axe
from tvm_axe import tile
from tvm_axe.errors import TileError, TuneError
from tvm_axe.lower.tiles import with_tile_kernels
from tvm_axe.machines import Cpu, backend_of, find_backend, machine_of, registry, resolve_target
from tvm_axe.machines.cache import Cache
from tvm_axe.meta.measure.devices import OnCpu, device_for
from tvm_axe.meta.spaces.space import space_for
from tvm_axe.records.shipped import stand_ins
from tvm_axe.schedule import tile_kernel
from tvm_axe.tile.kernels import KERNELS, matmul_for
from tvm_axe.tile.kernels.check import checked

AMPERE, ADA, HOPPER, BLACKWELL = (
    Target({"kind": "cuda", "arch": arch}) for arch in ("sm_80", "sm_89", "sm_90a", "sm_100a")
)
ORIN = Target({"kind": "cuda", "arch": "sm_87"})  # which nobody has described
TOY = Target("c")
PACKAGE = Path(tvm_axe.__file__).parent


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    registry.register("toy", "toy_target", "c")
    return toy_target.BACKEND


@T.prim_func
def add(A: T.Buffer((64, 16), "float32"), B: T.Buffer((64, 16), "float32"), C: T.Buffer((64, 16), "float32")):
    with tile.kernel(8) as i:
        a = tile.fragment((8, 16), "float32")
        b = tile.fragment((8, 16), "float32")
        tile.copy(A[i * 8, 0], a)
        tile.copy(B[i * 8, 0], b)
        with tile.parallel(8, 16) as (x, y):
            a[x, y] = a[x, y] + b[x, y]
        tile.copy(a, C[i * 8, 0])


def product(n=64):
    a, b, k = te.placeholder((n, n), name="A"), te.placeholder((n, n), name="B"), te.reduce_axis((0, n), "k")
    return te.create_prim_func([a, b, te.compute((n, n), lambda i, j: te.sum(a[i, k] * b[k, j], k), "C")])


# ---- The back ends that there are --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "name"),
    [
        *((Target("llvm"), "llvm"), (AMPERE, "sm_80"), (ADA, "sm_89"), (HOPPER, "sm_90a"), (BLACKWELL, "sm_100a")),
        *((ORIN, "cuda"), (resolve_target("llvm"), "llvm")),
    ],
    ids=str,
)
def test_a_target_has_the_back_end_that_says_most_of_it(target, name):
    assert backend_of(target).name == name
    assert find_backend(target) is backend_of(target)


def test_an_unknown_target_is_refused_with_the_valid_names():
    assert find_backend(Target("vulkan")) is None
    able = "llvm, sm_90a, sm_80, sm_89, sm_100a"
    with pytest.raises(TuneError, match=rf"target vulkan: it has no back end; there are {able}, cuda, gfx942$"):
        backend_of(Target("vulkan"))
    valid = "tile programs run on none such; valid are llvm, cuda:sm_90a, cuda:sm_80, .*, rocm:gfx942$"
    for target, name in ((Target("vulkan"), "vulkan"), (ORIN, "sm_87")):
        with pytest.raises(TileError, match=f"target {name}: {valid}"):
            tile.plan(add, target)


def test_a_name_is_registered_once():
    with pytest.raises(
        TuneError, match=r"the back end sm_80 is registered, in tvm_axe.tile.targets.sm_80; take another"
    ):
        registry.register("sm_80", "elsewhere", "cuda")


def test_machines():
    target = resolve_target({"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 5})
    assert machine_of(target) == Cpu(processors=5, vector_bits=256, vector_registers=16)
    assert machine_of(target) is machine_of(resolve_target(target))  # made once
    assert [machine_of(target).lanes(dtype) for dtype in ("float32", "int8", "int4", "float64")] == [8, 32, 32, 4]
    ampere, hopper = machine_of(AMPERE), machine_of(HOPPER)
    assert (ampere.processors, ampere.shared_bytes, ampere.tensor_cores) == (108, 163 << 10, "mma")
    assert (hopper.processors, hopper.shared_bytes, hopper.tensor_cores) == (132, 227 << 10, "wgmma")
    assert machine_of(ORIN) == ampere
    ada, blackwell = machine_of(ADA), machine_of(BLACKWELL)
    assert (ada.processors, ada.shared_bytes, ada.resident_threads, ada.float8) == (142, 99 << 10, 1536, True)
    assert blackwell == replace(hopper, processors=148, tensor_cores="mma")


def test_machines_that_are_none():
    with pytest.raises(ValueError, match=r"processors and vector_bits are positive, got Cpu\(processors=0"):
        Cpu(processors=0, vector_bits=128, vector_registers=16)
    with pytest.raises(ValueError, match="tensor_cores: valid are 'mma', 'wgmma' and 'none', got 'wmma'"):
        replace(machine_of(HOPPER), tensor_cores="wmma")


# ---- A new one: a folder and a line ------------------------------------------------------------------------------


def test_a_new_target_has_no_back_end_until_it_is_registered(toy, monkeypatch):
    assert backend_of(TOY) is toy
    monkeypatch.undo()
    assert find_backend(TOY) is None


def test_a_new_target_compiles_and_runs_tile_programs(toy, tmp_path):
    plan = tile.plan(add, TOY)
    assert plan.machine is toy_target.CPU
    assert "the CPU has 8 vectors of 64 bits" in tile.explain(add, "c")
    a, b, c = (np.random.default_rng(0).standard_normal((64, 16), "float32") for _ in range(3))
    exe = tile.compile(add, "c", Cache(tmp_path))
    exe(a, b, c)
    np.testing.assert_array_equal(c, a + b)
    assert len(exe.time(a, b, c, repeat=2)) == 2


def test_a_new_target_has_the_kernels_with_the_defaults_for_its_machine(toy):
    problem = {"m": 512, "n": 512, "k": 512, "dtype": "float32"}
    assert matmul_for(TOY, problem) is KERNELS["matmul"]
    assert KERNELS["stream_k_matmul"].parameters(TOY, problem)["workers"] == (3, 6)
    row, fault = checked(KERNELS["matmul"], KERNELS["matmul"].cases[0], TOY, np.random.default_rng(0))
    assert row.ok and row.target == "cpu", fault


def test_a_new_target_has_blocks_computed_by_kernels(toy, tmp_path):
    sch = s_tir.Schedule(product())
    tile_kernel(sch, sch.get_sblock("C"), "matmul", block_m=32)
    mod = with_tile_kernels(sch.mod, TOY)
    module = toy.build(mod, TOY, Cache(tmp_path)).module
    a, b = (np.random.default_rng(0).standard_normal((64, 64), "float32") for _ in range(2))
    arguments = [tvm.runtime.tensor(array) for array in (a, b, np.full((64, 64), np.nan, "float32"))]
    module["main"](*arguments)
    np.testing.assert_allclose(arguments[2].numpy(), a @ b, rtol=1e-4, atol=1e-4)


def test_a_new_target_has_design_spaces_for_its_machine(toy):
    generator = space_for(product(), TOY)
    spaces = generator.generate_design_space(tvm.IRModule({"main": product()}))
    assert spaces
    found = "".join(str(sch.trace) for sch in spaces)
    assert '"matmul"' in found and "axe.tile" in found
    assert isinstance(device_for(TOY, [[np.zeros(4, "float32")]]), OnCpu)
    assert stand_ins(TOY) == [TOY]


# ---- One home ----------------------------------------------------------------------------------------------------

_ASKED = re.compile(
    r"""\.kind\.name|\bis_cuda\b|\.arch\b|\bgpu_arch\b|attrs(\[|\.get\()["'](arch|mcpu|mtriple|keys)["']|"""
    r"""(==|!=|\bin\b)\s*\(?["'](llvm|cuda|sm_\d+a?)["']|["'](llvm|cuda|sm_\d+a?)["']\s*(==|!=|:)"""
)
_MAY_ASK = {
    "machines/registry.py": "it finds the back end",
    "machines/target.py": "it makes targets of names",
    "_tvm/building.py": "upstream's names of source formats",
    "_tvm/relax.py": "upstream's names of devices",
    "_tvm/meta_schedule.py": "kinds of MetaSchedule's instructions",
}


def test_nobody_else_asks_for_a_targets_name():
    asking = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        found = [line.strip() for line in lines if _ASKED.search(line) and not line.lstrip().startswith((">>>", "#"))]
        if found:
            asking[str(path.relative_to(PACKAGE))] = found
    others = {path: lines for path, lines in asking.items() if path not in _MAY_ASK}
    assert not others, f"ask the machine or the back end (tvm_axe.machines): {others}"
    assert set(asking) == set(_MAY_ASK)  # none is excused for nothing


@pytest.mark.parametrize(
    "line", ['if target.kind.name == "cuda":', 'target.attrs["arch"]', 'if kind in ("llvm",)', "at.target.arch"]
)
def test_what_is_looked_for(line):
    assert _ASKED.search(line)


def test_each_fact_has_one_home():
    """The figures of GPUs, which stood in five places, as they would be written again."""
    figures = re.compile(r"\b(227|163)\s*(\*\s*1024|<<\s*10)|\b(108|132)\b(?!\.)")
    homes = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if figures.search(re.sub(r'""".*?"""|#.*', "", path.read_text(encoding="utf-8"), flags=re.DOTALL))
    }
    assert homes == {f"tile/targets/{name}/__init__.py" for name in ("sm_80", "sm_90a", "sm_100a")}
