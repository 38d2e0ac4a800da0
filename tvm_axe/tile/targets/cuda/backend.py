"""What the back ends of CUDA GPUs share: how functions are compiled and run there, and how tile programs are lowered.

A folder beside this one says of an architecture what it is, by a `Gpu`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import tvm
from tvm import tirx
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.analysis.annotations import ALIGNED
from tvm_axe.errors import TileError
from tvm_axe.machines import Backend, Built, Gpu, nvcc
from tvm_axe.machines.cache import Cache
from tvm_axe.machines.cubins import Resources, resources
from tvm_axe.machines.maxima import in_cuda
from tvm_axe.machines.threads import with_threads
from tvm_axe.tile.backend import TileBackend
from tvm_axe.tile.mesh import in_pages
from tvm_axe.tile.nodes import Print
from tvm_axe.tile.plans import Plan
from tvm_axe.tile.profiling import Samples
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.targets.cuda.models import decide, lower
from tvm_axe.tile.targets.cuda.plan import CudaPlan
from tvm_axe.tile.targets.cuda.residency import describe, find_slow

__all__ = ["CudaBackend", "CudaTileBackend"]


@dataclass(frozen=True, kw_only=True)
class CudaBackend(Backend):
    """How functions are compiled, run and tuned on a CUDA GPU.

    Attributes
    ----------
    gpu : Gpu
        The largest GPU of the architecture: what is right on all of them is fastest on it.
    """

    gpu: Gpu
    device: str = "cuda"
    alignment: int = 16  # that of TMA and of the longest loads
    rules: str = "cuda"
    timeout: float = 60.0  # nvcc takes long
    page: int = 2 << 20  # the granularity of CUDA's virtual memory on every GPU there is

    def machine(self, target: Target) -> Gpu:
        return self.gpu

    def build(self, mod: tvm.IRModule, target: Target, store: Cache | None = None, overlap: bool = False) -> Built:
        kept = Cache() if store is None else store
        mod = with_threads(mod)
        # Tile programs become functions of TIRx, which upstream's other pipeline takes for something else.
        scheduled = any("s_tir" in (func.attrs or {}) for func in mod.functions.values())
        pipeline = "s_tir" if scheduled else "tirx"
        made: dict[str, Resources] = {}
        said: dict[str, list[str]] = {}

        def to_cubin(source: str) -> bytes:
            cubin = nvcc.cubin(source, target, kept)
            made.update(resources(cubin))
            said.update(nvcc.remarks(source, target, kept))
            return cubin

        module, source = _tvm.build_cuda(mod, target, to_cubin, overlap, pipeline, ALIGNED, in_cuda)
        return Built(module, source, made, said)


@dataclass(frozen=True, kw_only=True)
class CudaTileBackend(CudaBackend, TileBackend):
    """The same on an architecture that tile programs are lowered for, in the model that its instructions allow."""

    joins_blocks: bool = False
    by_default: bool = True

    @property
    def pairs(self) -> bool:
        return self.gpu.tensor_cores == "wgmma"  # the specialized model's, whose producer alone waits

    @property
    def meets(self) -> bool:
        return True

    def plan(self, program: TileProgram, target: Target) -> Plan:
        return decide(program, target)

    def emit(self, plan: Plan, apart: int = 1) -> tirx.PrimFunc:
        assert isinstance(plan, CudaPlan), plan
        return in_pages(lower(plan), self.page, apart)

    def sampled(self, plan: Plan, blocks: int, most: int) -> tuple[tirx.PrimFunc, Samples]:
        assert isinstance(plan, CudaPlan), plan
        if plan.program.devices > 1:
            raise TileError(f"profile: {plan.program.name} is a program of a mesh; valid are those of one device")
        samples = Samples(plan.roles, blocks, most)
        return lower(replace(plan, samples=samples)), samples

    def compiled(self, plan: Plan, built: Built) -> list[str]:
        assert isinstance(plan, CudaPlan), plan
        found = _resources_of(plan, built)
        return [] if found is None else describe(plan, found)

    def slow(self, plan: Plan, built: Built) -> list[str]:
        found = _resources_of(plan, built)
        # One that prints has a stack for that, and isn't what is to be fast.
        if found is None or any(isinstance(node, Print) for node in plan.program.nodes()):
            return []
        return find_slow(found) + built.remarks.get(_kernel_of(plan), [])


def _resources_of(plan: Plan, built: Built) -> Resources | None:
    """What threads of a program's kernel take."""
    return built.resources.get(_kernel_of(plan))


def _kernel_of(plan: Plan) -> str:
    """The name that upstream gives a program's kernel."""
    return f"{plan.program.name}_kernel"
