"""The programs on made-up requests, for the command line, the documentation and the tests.

>>> sample = make_sample("moe-dynamic", SMALL, batch=6, seed=0)
>>> report = sample.run()
>>> sample.error(report) < 1e-5, report.cycles > 0
(True, True)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tvm_axe.errors import StreamError
from tvm_axe.stream.memory import Accelerator
from tvm_axe.stream.program import StreamProgram
from tvm_axe.stream.programs.cached_attention import attention, attention_inputs, cached_tiles
from tvm_axe.stream.programs.decoder import decoder_inputs, decoder_layer
from tvm_axe.stream.programs.moe import moe_inputs, moe_layer
from tvm_axe.stream.programs.reference import attention_reference, decoder_reference, moe_reference
from tvm_axe.stream.programs.workloads import MIXTRAL_8X7B, QWEN3_30B_A3B, Heads, Model, MoE, lengths, routing
from tvm_axe.stream.report import Report

__all__ = ["MODELS", "PROGRAMS", "SMALL", "Sample", "make_sample"]

SMALL = Model("small", MoE(experts=8, chosen=2, width=64, hidden=96), Heads(groups=2, queries=4, size=16))
MODELS = {model.name: model for model in (SMALL, MIXTRAL_8X7B, QWEN3_30B_A3B)}
REGIONS = 4


@dataclass(frozen=True)
class Sample:
    """A program and something to run it on.

    Attributes
    ----------
    program : StreamProgram
        The program.
    streams : dict
        The values of its input streams.
    accelerator : Accelerator
        The accelerator that it is simulated on.
    reference : Callable
        A function from arrays to the float64 results of some tensors, NaN where nothing is said.
    seed : int
        The seed of the arrays.
    """

    program: StreamProgram
    streams: dict[str, Any]
    accelerator: Accelerator
    reference: Callable[[dict[str, np.ndarray]], dict[str, NDArray[np.float64]]]
    seed: int

    def arrays(self) -> dict[str, np.ndarray]:
        """Draw an array for each tensor; those that are results only aren't given to the program."""
        rng = np.random.default_rng(self.seed)
        return {
            name: (rng.standard_normal((tensor.rows, tensor.columns)) / np.sqrt(tensor.columns)).astype(tensor.dtype)
            for name, tensor in self.program.tensors.items()
            if name not in ("y", "out")
        }

    def run(self, values: bool = True, trace: bool = False, max_cycles: int | None = None) -> Report:
        """Compute and simulate the program, or only simulate it; see `StreamProgram.run`."""
        given = self.arrays() if values else {}
        return self.program.run({**self.streams, **given}, self.accelerator, values, trace, max_cycles)

    def error(self, report: Report) -> float:
        """Return the largest difference of a run's results from the reference, over the largest value; NaN is wrong."""
        worst = 0.0
        for name, expected in self.reference(self.arrays()).items():
            known = ~np.isnan(expected)
            found = report.tensors[name].astype(np.float64)[known]
            worst = np.maximum(worst, np.abs(found - expected[known]).max() / np.abs(expected[known]).max())
        return float(worst)


def make_sample(name: str, model: Model, batch: int, seed: int, **sizes: Any) -> Sample:
    """Return a program of the table on made-up requests.

    Parameters
    ----------
    **sizes : Any
        Regions and blocks of attention, `regions` and `block`, as `attention` takes them; by default `REGIONS` of each.

    Raises
    ------
    StreamError
        If there is no such program, or it has no such sizes.
    """
    if name not in PROGRAMS:
        raise StreamError(f"there is no program {name!r}; there are {', '.join(PROGRAMS)}")
    kind, _, variant = name.partition("-")
    if kind == "attention":
        return _attention(model, variant, batch, seed, **sizes)
    if sizes:
        raise StreamError(f"{name} takes no {' and no '.join(sizes)}; programs of attention do")
    return {"moe": _moe, "decoder": _decoder}[kind](model, variant, batch, seed)


PROGRAMS = {
    "moe-static": "a mixture of experts (SwiGLU) on tiles of 16 tokens, a region an expert",
    "moe-dynamic": "the same on tiles as high as an expert has tokens",
    "moe-shared": f"the same with {REGIONS} regions that the experts share (configuration time-multiplexing)",
    "attention-coarse": "attention over caches of different lengths, requests in fixed blocks to the regions",
    "attention-interleaved": f"the same with the requests sent to {REGIONS} regions in turn",
    "attention-dynamic": f"the same with each request sent to the first of {REGIONS} regions that is free",
    "decoder": "a decoder layer: heads, attention and experts, with dynamic tiles",
}
"""The names of the samples, each with what it is."""


def _columns(moe: MoE) -> int:
    """Return a piece of the hidden dim that divides it: 64, or less."""
    return int(np.gcd(moe.hidden, 64))


def _moe(model: Model, variant: str, batch: int, seed: int) -> Sample:
    moe, chosen = model.moe, routing(batch, model.moe, seed)
    tile, regions = 16 if variant == "static" else None, REGIONS if variant == "shared" else None
    program = moe_layer(moe, batch, tile, _columns(moe), regions)
    return Sample(program, moe_inputs(chosen), Accelerator(), lambda arrays: moe_reference(arrays, chosen, moe), seed)


def _attention(
    model: Model,
    variant: str,
    batch: int,
    seed: int,
    regions: int = REGIONS,
    block: int | Sequence[int] | None = None,
) -> Sample:
    heads, cached = model.heads, lengths(batch, seed)
    sizes: dict[str, Any] = {"regions": min(regions, batch), "block": block or -(-batch // regions)}
    program = attention(heads, batch, int(cached_tiles(cached, 32).max()), variant, **sizes)
    streams = attention_inputs(cached, heads, variant, **sizes)
    accelerator = Accelerator(compute=2048, depth=1)
    return Sample(program, streams, accelerator, lambda arrays: attention_reference(arrays, cached, heads), seed)


def _decoder(model: Model, variant: str, batch: int, seed: int) -> Sample:
    heads, moe = model.heads, model.moe
    cached, chosen = lengths(batch, seed), routing(batch, moe, seed)
    program = decoder_layer(model, batch, int(cached_tiles(cached, 32).max()), None, _columns(moe), REGIONS)
    streams = decoder_inputs(cached, chosen, heads, REGIONS)

    def reference(arrays: dict[str, np.ndarray]) -> dict[str, NDArray[np.float64]]:
        return decoder_reference(arrays, cached, chosen, heads, moe)

    return Sample(program, streams, Accelerator(compute=4096), reference, seed)
