"""A new target as one folder: a CPU of small vectors that upstream calls "c", and that this host stands in for."""

from tvm_axe.machines import Cpu, resolve_target
from tvm_axe.tile.targets.llvm.backend import LlvmBackend

CPU = Cpu(processors=3, vector_bits=64, vector_registers=8)


class ToyBackend(LlvmBackend):
    def machine(self, target):
        return CPU

    def build(self, mod, target, store=None, overlap=False):
        return super().build(mod, resolve_target("llvm", threads=1), store, overlap)

    def stand_ins(self, target):
        return []


BACKEND = ToyBackend(name="toy", device="cpu", alignment=32, rules="llvm", timeout=5.0, joins_blocks=True)
