"""What of a CPU the lowering depends on: its vectors, its registers and the room for a block's tiles."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.target import Target

from tvm_axe.layout.dtypes import dtype_bits
from tvm_axe.machines.target import vector_bits, vector_registers

TILE_BYTES = 32 << 20
"""What the tiles of one block may take, in bytes: they are of use only while the caches hold them."""


@dataclass(frozen=True)
class Machine:
    """A CPU's vector unit.

    Attributes
    ----------
    bits : width of a vector, in bits
    registers : how many vectors the registers hold
    """

    bits: int
    registers: int

    @staticmethod
    def of(target: Target) -> Machine:
        """The machine of an llvm target."""
        return Machine(vector_bits(target), vector_registers(target))

    def lanes(self, dtype: str) -> int:
        """Elements of a vector."""
        return max(1, self.bits // max(dtype_bits(dtype), 8))
