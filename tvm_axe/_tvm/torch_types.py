"""Types of PyTorch that upstream's importer doesn't know."""

from __future__ import annotations

from typing import Any

SMALL_FLOATS = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
"""Floats of eight bits that have one name in PyTorch and here."""


def know_small_floats() -> None:
    """Have upstream's importer take floats of eight bits, in every import of this process."""
    from tvm.relax.frontend.torch.base_fx_graph_translator import BaseFXGraphImporter

    upstream = BaseFXGraphImporter._convert_data_type
    if upstream.__module__ == __name__:
        return

    def converted(kind: Any, env: Any = None) -> str:
        """The type here of one of PyTorch, or of its name."""
        name = str(kind).removeprefix("torch.")
        return name if name in SMALL_FLOATS else upstream(kind, env)

    BaseFXGraphImporter._convert_data_type = staticmethod(converted)
