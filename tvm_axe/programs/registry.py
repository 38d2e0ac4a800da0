"""The programs, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tvm_axe.programs.ag_mm import AG_MM
from tvm_axe.programs.attention import ATTENTION
from tvm_axe.programs.lamb import LAMB
from tvm_axe.programs.layers import LAYERS
from tvm_axe.programs.mlp import MLP
from tvm_axe.programs.moe import MOE
from tvm_axe.programs.moe_ragged import MOE_RAGGED
from tvm_axe.programs.norm import NORM
from tvm_axe.programs.optimizers import ADAM, ADAM_F16, SGD
from tvm_axe.programs.pipeline import PIPELINE
from tvm_axe.programs.program import ProgramFactory

__all__ = ["PROGRAMS"]

PROGRAMS: Mapping[str, ProgramFactory] = MappingProxyType(
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
        "moe_ragged": MOE_RAGGED,
        "layers": LAYERS,
    }
)
