"""What of a target's hardware decides how its code is made: `Cpu` and `Gpu`, each fact once.

A `tvm_axe.machines.Backend` makes one of a `Target`; `tvm_axe.machines.machine_of` gives it. Nothing here is measured:
these are what the vendors' documents say (NVIDIA, CUDA C++ Programming Guide, "Compute Capabilities").
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm_axe.layout.dtypes import dtype_bits

__all__ = ["Cpu", "Gpu", "Machine"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What every machine has.

    Attributes
    ----------
    processors : int
        How many work at once: the cores that a kernel may use, or the multiprocessors of a GPU.
    vector_bits : int
        The most bits that an instruction loads: the width of a vector register, or what a thread of a GPU takes.

    Raises
    ------
    ValueError
        One of them is not positive.
    """

    processors: int
    vector_bits: int

    def __post_init__(self) -> None:
        if min(self.processors, self.vector_bits) < 1:
            raise ValueError(f"machine: processors and vector_bits are positive, got {self}")


@dataclass(frozen=True, kw_only=True)
class Cpu(Machine):
    """Cores with vector units.

    Attributes
    ----------
    vector_registers : int
        Number of architectural vector registers.
    """

    vector_registers: int

    def lanes(self, dtype: str) -> int:
        """Elements of a vector; at least one."""
        return max(1, self.vector_bits // max(dtype_bits(dtype), 8))


@dataclass(frozen=True, kw_only=True)
class Gpu(Machine):
    """Multiprocessors that run blocks of threads. What has a default is the same for all that CUDA still supports.

    Attributes
    ----------
    shared_bytes : int
        The most shared memory that a block may have, in bytes.
    tensor_cores : str
        The instructions that multiply matrices: ``"mma"``, by warps from registers (PTX ISA, "Matrix
        multiply-accumulate operation using mma instruction"), or ``"wgmma"``, by warpgroups from shared memory, which
        TMA fills ("Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions"). Those with ``"wgmma"`` have
        ``"mma"`` too. ``"none"`` of these: products are multiply-adds.
    float8 : bool
        Whether it converts and multiplies 8-bit floats.
    dependent_launch : bool
        Whether a kernel may be launched while the one before it still runs (programmatic dependent launch).
    asynchronous_copies : bool
        Whether loads from global to shared memory run ahead of the threads that ask for them (``cp.async``).
    block_threads : int
        The most threads of a block.
    resident_threads, resident_blocks : int
        The most threads and blocks that a multiprocessor runs at once.
    registers : int
        Registers of a multiprocessor, of 32 bits.

    Raises
    ------
    ValueError
        There are no such `tensor_cores`.
    """

    shared_bytes: int
    tensor_cores: str
    float8: bool
    dependent_launch: bool
    vector_bits: int = 128
    asynchronous_copies: bool = True
    block_threads: int = 1024
    resident_threads: int = 2048
    resident_blocks: int = 32
    registers: int = 64 << 10

    def by_tensor_cores(self, dtype: str) -> bool:
        """Whether products of operands of a type, float32 being exact, are the tensor cores'."""
        return dtype != "float32" and self.tensor_cores != "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensor_cores not in ("mma", "wgmma", "none"):
            raise ValueError(f"tensor_cores: valid are 'mma', 'wgmma' and 'none', got {self.tensor_cores!r}")
