"""What a target is: its complete form, its machine and back end, its compilers, the cache of what these made.

`resolve_target` makes a complete `Target` of what a user wrote; `backend_of` and `machine_of` say everything that is
particular to it, so that nobody asks for its name.
"""

from tvm_axe.machines.backend import Backend, Built
from tvm_axe.machines.machine import Cpu, Gpu, Machine
from tvm_axe.machines.registry import backend_of, find_backend, kinds_by_device, machine_of
from tvm_axe.machines.target import resolve_target

__all__ = [
    "Backend",
    "Built",
    "Cpu",
    "Gpu",
    "Machine",
    "backend_of",
    "find_backend",
    "kinds_by_device",
    "machine_of",
    "resolve_target",
]
