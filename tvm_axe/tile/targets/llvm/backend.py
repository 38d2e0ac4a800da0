"""The back end llvm: this machine's CPU, or another one that LLVM makes code for."""

from __future__ import annotations

from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.machines import Built, Cpu, resolve_target
from tvm_axe.machines.cache import Cache, key
from tvm_axe.machines.keeping import content, sources
from tvm_axe.machines.vector_math import PIPELINE
from tvm_axe.tile.backend import TileBackend
from tvm_axe.tile.plans import Plan
from tvm_axe.tile.program import TileProgram
from tvm_axe.tile.targets.llvm.emit import lower
from tvm_axe.tile.targets.llvm.plan import CpuPlan, decide

_LEVELS = {512: ("x86-64-v4", "x86-64-v3"), 256: ("x86-64-v3",)}  # by bits of a vector register


@dataclass(frozen=True, kw_only=True)
class LlvmBackend(TileBackend):
    """How functions are compiled, run and tuned on a CPU."""

    def machine(self, target: Target) -> Cpu:
        """The CPU by LLVM's features of it: AVX-512 and AArch64 have 32 registers.

        `llvm_get_vector_width` says 512 bits whatever the CPU.
        """
        features = _tvm.cpu_features(target)
        return Cpu(
            processors=int(target.attrs.get("num-cores", 1)),
            vector_bits=512 if "avx512f" in features else 256 if "avx2" in features else 128,
            vector_registers=32 if "avx512f" in features or "neon" in features else 16,
        )

    def plan(self, program: TileProgram, target: Target) -> Plan:
        return decide(program, target)

    def emit(self, plan: Plan, apart: int = 1) -> tirx.PrimFunc:
        assert isinstance(plan, CpuPlan), plan  # and the distance is read from the tensor
        return lower(plan)

    def build(self, mod: tvm.IRModule, target: Target, store: Cache | None = None, overlap: bool = False) -> Built:
        def compiled() -> bytes:
            return _tvm.compile_llvm(mod, target, PIPELINE)

        text = None if store is None else content(mod)
        if store is None or text is None:
            code = compiled()
        else:
            code = store.get_or_make(key("llvm", text, str(target), sources()), compiled)
        module = _tvm.load_llvm(code)
        for variable in mod.get_global_vars():
            module.get_function(str(variable.name_hint))  # generates the code
        return Built(module, None)

    def stand_ins(self, target: Target) -> list[Target]:
        """The generic levels of x86-64 with the vectors that the target has."""
        cpu = self.machine(target)
        levels = _LEVELS.get(cpu.vector_bits, ())
        return [resolve_target({"kind": "llvm", "mcpu": level, "num-cores": cpu.processors}) for level in levels]


BACKEND = LlvmBackend(
    name="llvm",
    device="cpu",
    alignment=64,  # a cache line, and the widest vector
    rules="llvm",
    timeout=10.0,  # some candidates make LLVM unroll for minutes
    joins_blocks=True,
)
