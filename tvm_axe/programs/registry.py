"""The programs, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .ag_mm import AG_MM
from .attention import ATTENTION
from .lamb import LAMB
from .mlp import MLP
from .moe import MOE
from .norm import NORM
from .optimizers import ADAM, ADAM_F16, SGD
from .pipeline import PIPELINE
from .program import Builder

__all__ = ["PROGRAMS"]

PROGRAMS: Mapping[str, Builder] = MappingProxyType(
    {
        "sgd": SGD,
        "adam": ADAM,
        "adam_f16": ADAM_F16,
        "lamb": LAMB,
        "mlp": MLP,
        "attention": ATTENTION,
        "norm": NORM,
        "ag_mm": AG_MM,
        "pipeline": PIPELINE,
        "moe": MOE,
    }
)
