"""The tensors of scripts/bench_gpu.py, and what PyTorch says is right; processes that draw by one seed have the same.

This module knows nothing of TVM, since the process of a peer may have another one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import convolutions_gpu
import kernels_gpu

EXPERTS = {"groups": 128, "choices": 8, "hidden": 2048, "inner": 768}
"""Of Qwen3-30B-A3B: experts, how many of them a token chooses, the widths of the model and of an expert."""


@dataclass(frozen=True)
class Spec:
    """A kernel's tensors on a problem, by name as (shape, dtype), and how far off its outputs may be."""

    kernel: str
    problem: Mapping[str, Any]
    tensors: Mapping[str, tuple[Sequence[int], str]]
    inputs: Sequence[str]
    outputs: Sequence[str]
    tolerance: float

    def drawn(self, seed: int) -> dict[str, Any]:
        """Random tensors by name, with the outputs and scratch of NaN."""
        import torch

        torch.manual_seed(seed)
        made: dict[str, Any] = {}
        for name, (shape, dtype) in self.tensors.items():
            kind = getattr(torch, dtype)
            if name not in self.inputs:
                made[name] = poisoned(shape, kind)
            elif name == "lengths":
                made[name] = torch.full(shape, self.problem["capacity"], dtype=kind, device="cuda")
            elif name == "starts":
                made[name] = routed(self.problem["rows"], self.problem["groups"])
            elif name == "table":  # of a cache whose pages came one by one
                made[name] = torch.randperm(self.problem["pages"], device="cuda").to(kind).reshape(shape)
            elif dtype == "uint8":
                made[name] = torch.randint(0, 256, shape, dtype=kind, device="cuda")
            else:
                made[name] = torch.randn(shape, device="cuda").to(kind)
        for name in {"a_scale", "b_scale"} & made.keys():
            made[name] = made[name].abs() + 0.5
        kernels_gpu.completed(self.kernel, self.problem, made)
        return made

    def beside(self, made: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors with the inputs of others, drawn for the same problem, and with outputs and scratch of their own."""
        import torch

        return {
            name: made[name] if name in self.inputs else poisoned(shape, getattr(torch, dtype))
            for name, (shape, dtype) in self.tensors.items()
        }

    def sums(self, made: Mapping[str, Any]) -> dict[str, float]:
        """A number of each input, by which two processes see that they have the same."""
        return {name: float(made[name].double().square().sum()) for name in self.inputs}

    def error(self, made: Mapping[str, Any]) -> float:
        """The relative error of the norm against float32 or float64 in PyTorch, on a part where all is too much.

        Raises
        ------
        AssertionError
            It is more than the tolerance, or an output isn't finite everywhere.
        """
        got, expected = compared(self.kernel, self.problem, made)
        error = float((got.double() - expected.double()).norm() / expected.double().norm())
        whole = all(bool(made[name].isfinite().all()) for name in self.outputs)
        if not (whole and error <= self.tolerance):
            raise AssertionError(f"relative error {error:.1e}, finite everywhere: {whole}")
        return error


def poisoned(shape: Sequence[int], dtype: Any) -> Any:
    """A tensor that is to be written: of NaN, or of random bits where its type has none."""
    import torch

    if dtype.is_floating_point:
        return torch.full(shape, math.nan, device="cuda").to(dtype)
    whole = torch.iinfo(dtype)
    return torch.randint(whole.min, whole.max, shape, dtype=dtype, device="cuda")


def routed(rows: int, groups: int) -> Any:
    """Where each group's rows start, if tokens choose experts at random, none of them twice."""
    import torch

    tokens = rows // EXPERTS["choices"]
    chosen = torch.rand(tokens, groups, device="cuda").topk(EXPERTS["choices"]).indices
    counts = torch.bincount(chosen.flatten(), minlength=groups)
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()


def compared(name: str, problem: Mapping[str, Any], made: Mapping[str, Any]) -> tuple[Any, Any]:
    """What a kernel computed and what it should be, both of a part of the output if that is large."""
    import torch

    if name in ("attention", "decode_attention"):
        group = problem["heads"] // problem["kv_heads"]
        heads = [0, problem["heads"] - 1]
        pairs = []
        for h in heads:
            q = made["Q"][-1, h].double().reshape(-1, problem["dim"])
            k, v = (cached(problem, made, x)[h // group].double() for x in "KV")
            scores = q @ k.T / math.sqrt(problem["dim"])
            if problem.get("causal", False):
                scores.masked_fill_(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
            pairs.append((made["O"][-1, h].reshape(-1, problem["dim"]), scores.softmax(-1) @ v))
        return torch.cat([got for got, _ in pairs]), torch.cat([expected for _, expected in pairs])
    if name == "rms_norm":
        x, weight = (made["X"] + made["R"] if "R" in made else made["X"]).double(), made["weight"].double()
        got = made["Y"].double() * made["scales"].unsqueeze(1) if "scales" in made else made["Y"]
        return got, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
    if name == "softmax":
        return made["Y"], made["X"].double().softmax(-1)
    if name == "transpose":
        return made["Y"], made["X"].T
    if name == "grouped_matmul":
        bounds = made["starts"].tolist()
        parts = [made["X"][a:b].float() @ w.float().T for a, b, w in zip(bounds, bounds[1:], made["W"])]
        return made["Y"], gated(problem, torch.cat(parts))
    if name == "einsum":
        return made["C"], torch.einsum(equation(problem), made["A"].float(), made["B"].float())
    if name == "conv2d":
        return convolutions_gpu.compared(problem, made)
    if name in kernels_gpu.COMPARED:
        return kernels_gpu.compared(name, problem, made)
    scale = made["a_scale"] * made["b_scale"] if "a_scale" in made else 1.0
    return made["C"], made["A"].float() @ made["B"].float().T * scale


def cached(problem: Mapping[str, Any], made: Mapping[str, Any], name: str) -> Any:
    """Keys or values of the last sequence, (heads, keys, columns), wherever its pages lie."""
    if "page" not in problem:
        return made[name][-1]
    return made[name][made["table"][-1].long()].transpose(0, 1).flatten(1, 2)


def gated(problem: Mapping[str, Any], product: Any) -> Any:
    """What a grouped product is followed by, in PyTorch."""
    import torch

    if not problem.get("gated", False):
        return product
    gate, up = product.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def equation(problem: Mapping[str, Any]) -> str:
    """A problem of the kernel einsum, of whole tensors, as numpy and torch write it."""
    a, b, c = ("".join(word.split(":")[0] for word in problem[name].split()) for name in "abc")
    return f"{a},{b}->{c}"
