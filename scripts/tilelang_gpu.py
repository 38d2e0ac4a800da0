"""TileLang's side of scripts/bench_gpu.py: compiles, checks, chooses and times its programs in a process of its own.

It reads a line of JSON for each question and answers with one. Of each kernel every candidate of
`tilelang_programs.candidates` is compiled; what fails to, or computes what is wrong, is named and left out, and the
fastest of the others is what is timed beside ours: on the same inputs, from a CUDA graph, by the same clock. One that
the GPU stops at ends all that this process can do there: it is named, and whoever asks starts another process.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import tilelang
import tilelang_programs
from tensors_gpu import Spec
from tilelang_written import Written
from timing_gpu import Captured, captured

TARGET = {"kind": "cuda", "arch": "sm_90a"}


class TileLang:
    """What is compiled, by kernel and problem, and the graph that is timed."""

    def __init__(self) -> None:
        self._compiled: dict[str, list[tuple[str, Written, Sequence[Any]]]] = {}
        self._failed: dict[str, dict[str, str]] = {}
        self._graph: Captured | None = None

    def compile(self, cases: Sequence[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
        """Compile all candidates of all cases, on all cores."""
        made: list[tuple[str, str, Written]] = []
        for kernel, problem in cases:
            key = key_of(kernel, problem)
            if key not in self._compiled:
                self._compiled[key], self._failed[key] = [], {}
                made += [
                    (key, f"{make.__name__} {knobs}", make(problem, **knobs))
                    for make, knobs in tilelang_programs.candidates(kernel, problem)
                ]
        programs = [program for *_, written in made for program in written.programs]
        kernels = iter(
            tilelang.par_compile(programs, target=TARGET, num_workers=os.cpu_count(), ignore_error=True)
            if programs
            else ()
        )
        for key, name, written in made:
            own = [next(kernels) for _ in written.programs]
            if None in own:
                self._failed[key][name] = "is not compiled"
            else:
                self._compiled[key].append((name, written, own))
        return {"compiled": len(programs), "left_out": {key: names for key, names in self._failed.items() if names}}

    def choose(
        self, spec: Mapping[str, Any], seeds: Sequence[int], calls: int, without: Mapping[str, str]
    ) -> dict[str, Any]:
        """Check and time each candidate on tensors of these seeds; the fastest that is right is timed from now on.

        `without` names candidates that are left out, and why. Of one that the GPU stopped at the answer says only which
        it is, as `lost`, and `why`.
        """
        self._graph = None
        own = Spec(**spec)
        self.compile([(own.kernel, own.problem)])
        key, sets = key_of(own.kernel, own.problem), [own.drawn(seed) for seed in seeds]
        sums, best, left_out = own.sums(sets[0]), ("", 0.0, float("inf")), {**self._failed[key], **without}
        for name, written, kernels in self._compiled[key]:
            if name in left_out:
                continue
            try:
                more = [{**made, **scratch(written), **written.tables(made)} for made in sets]
                graph = captured({name: partial(run, written, kernels)}, more, calls)[name]
                for output in own.outputs:
                    sets[0][output].fill_(float("nan"))
                graph.graph.replay()
                error = own.error(sets[0])
            except Exception as problem:  # others are measured whatever one does
                left_out[name] = f"{type(problem).__name__}: {str(problem).strip()[:300]}"
                if not answers():
                    return {"lost": name, "why": left_out[name]}
                continue
            milliseconds = min(graph.timed(0.002) for _ in range(5))
            if milliseconds < best[2]:
                best, self._graph = (name, error, milliseconds), graph
        if self._graph is None:
            raise RuntimeError(f"no candidate is right: {left_out}")
        return {"knobs": best[0], "error": best[1], "sums": sums, "left_out": left_out}

    def time(self, seconds: float) -> dict[str, Any]:
        """Milliseconds of a call."""
        assert self._graph is not None
        return {"milliseconds": self._graph.timed(seconds)}


def answers() -> bool:
    """Whether the GPU still does what this process asks for, which it doesn't once a kernel faulted."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def key_of(kernel: str, problem: Mapping[str, Any]) -> str:
    """A kernel on a problem, as text."""
    return json.dumps([kernel, problem], sort_keys=True)


def scratch(written: Written) -> dict[str, Any]:
    """Tensors of NaN, or of zeros, that a program writes for the next."""
    import torch

    return {
        name: torch.full(
            tuple(shape), float("nan") if "float" in dtype else 0, dtype=getattr(torch, dtype), device="cuda"
        )
        for name, (shape, dtype) in written.scratch.items()
    }


def run(written: Written, kernels: Sequence[Any], made: Mapping[str, Any]) -> None:
    """Call the programs one after the other."""
    for kernel, names in zip(kernels, written.arguments):
        kernel(*(made[name] for name in names))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    tilelang.set_log_level("ERROR")
    peer = TileLang()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = getattr(peer, asked.pop("do"))(**asked)
        except Exception as error:  # said to who asks
            answer = {"failed": f"{type(error).__name__}: {str(error).strip()[-1000:]}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
