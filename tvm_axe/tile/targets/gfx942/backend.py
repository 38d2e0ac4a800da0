"""How functions are compiled for AMD's GPUs, and which tile programs are."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.errors import TileError
from tvm_axe.machines import Built, Gpu
from tvm_axe.machines.cache import Cache
from tvm_axe.machines.threads import with_threads
from tvm_axe.tile.backend import TileBackend
from tvm_axe.tile.checks import check_atomics
from tvm_axe.tile.nodes import Gemm, Print, Signal, Sort, Wait
from tvm_axe.tile.philox import draws
from tvm_axe.tile.plans import Plan
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.targets.cuda.uniform.emit import lower
from tvm_axe.tile.targets.cuda.uniform.plan import UniformPlan, decide
from tvm_axe.tile.targets.gfx942 import words

_ATOMICS = ("int32", "float32")  # the types of which upstream has an addition


@dataclass(frozen=True, kw_only=True)
class AmdTileBackend(TileBackend):
    """A back end of AMD's GPUs: tile programs in the uniform model, compiled by upstream's LLVM.

    Attributes
    ----------
    gpu : Gpu
        The largest GPU of the architecture.
    """

    gpu: Gpu

    def machine(self, target: Target) -> Gpu:
        return self.gpu

    def plan(self, program: TileProgram, target: Target) -> Plan:
        check_atomics(program)
        self._check(program)
        return decide(program, target, f"{self.name} runs no other model of a kernel")

    def emit(self, plan: Plan, apart: int = 1) -> tirx.PrimFunc:
        assert isinstance(plan, UniformPlan), plan
        return words.of(lower(plan, words.AmdPlaces))

    def build(self, mod: tvm.IRModule, target: Target, store: Cache | None = None, overlap: bool = False) -> Built:
        mod = with_threads(mod)
        scheduled = any("s_tir" in (func.attrs or {}) for func in mod.functions.values())
        return Built(*_tvm.build_rocm(mod, target, "s_tir" if scheduled else "tirx", words.finished))

    def _check(self, program: TileProgram) -> None:
        """Refuse what is written for CUDA's GPUs alone, by its word."""
        if program.devices > 1:
            raise TileError(f"{program.name}: {self.name} has no programs of a mesh; valid are cuda and llvm")
        if program.options.get("roles") == "specialized":
            raise TileError(f"kernel: roles='specialized', but {self.name} has no warps that load; leave roles out")
        if draws(program.func):
            raise TileError(f"random: {self.name} has no random numbers; pass them in a tensor")
        for node in program.nodes():
            if isinstance(node, Wait | Signal):
                raise TileError(f"{node}: {self.name} has no flags in global memory; valid is a kernel for each phase")
            if isinstance(node, Print):
                raise TileError(f"{node}: {self.name} prints nothing; copy it to a tensor")
            if isinstance(node, Gemm) and node.instruction not in (None, "fma"):
                raise TileError(
                    f"{node}: instruction {node.instruction!r}, but products of {self.name} are multiply-adds; leave "
                    "it out"
                )
            if isinstance(node, Sort) and node.src.tile.dtype == "bfloat16" and node.src.tile.scope == "shared":
                raise TileError(
                    f"{node}: upstream has no code for the order of bfloat16 in shared memory on {self.name}; copy "
                    f"{node.src.tile.name} to a fragment"
                )
            for tile, kind in node.joins:
                if kind != "add" or tile.dtype not in _ATOMICS:
                    raise TileError(
                        f"{node}: {self.name} has no atomic {kind} of {tile.dtype}; valid is add of "
                        f"{' and '.join(_ATOMICS)}"
                    )
