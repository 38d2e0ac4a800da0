"""What a target is: its completed form, the compilers for it, and the cache of what they made."""

from tvm_axe.machines.target import resolve_target

__all__ = ["resolve_target"]
