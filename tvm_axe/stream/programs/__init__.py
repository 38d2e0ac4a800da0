"""Programs of the paper: a mixture of experts, attention over caches of different lengths, a decoder layer."""

from tvm_axe.stream.programs.cached_attention import AttentionCase, attention, attention_inputs
from tvm_axe.stream.programs.decoder import decoder_inputs, decoder_layer
from tvm_axe.stream.programs.moe import MoECase, moe_inputs, moe_layer
from tvm_axe.stream.programs.outcome import Outcome
from tvm_axe.stream.programs.workloads import MIXTRAL_8X7B, QWEN3_30B_A3B, Heads, Model, MoE, lengths, routing

__all__ = [
    "MIXTRAL_8X7B",
    "QWEN3_30B_A3B",
    "AttentionCase",
    "Heads",
    "MoE",
    "MoECase",
    "Model",
    "Outcome",
    "attention",
    "attention_inputs",
    "decoder_inputs",
    "decoder_layer",
    "lengths",
    "moe_inputs",
    "moe_layer",
    "routing",
]
