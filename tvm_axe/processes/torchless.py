"""Processes that import the compiler without PyTorch.

The compiler imports PyTorch where it is installed, and needs it for PyTorch's own tensors, and Relax modules with
functions in Python, only. That takes half of the time until the compiler is there, and starts threads where a GPU is,
with which no server can fork.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_COMPILER = ("tvm_ffi", "tvm")  # the runtime, which the compiler imports


def leave_out_torch() -> None:
    """Have this process import the compiler without PyTorch from now on, unless one of them is there already.

    Who imports PyTorch afterwards gets it, and its tensors go to compiled functions by DLPack.
    """
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the compiler where Python finds it, and has it loaded without PyTorch."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _COMPILER or "torch" in sys.modules:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads as another loader does, while nobody can import PyTorch."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader  # which knows its files, too
        sys.modules["torch"] = None  # type: ignore[assignment]  # an ImportError to who imports it
        try:
            self._loader.exec_module(module)
        finally:
            del sys.modules["torch"]
