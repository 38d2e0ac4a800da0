"""What programs of TileLang are made of that scripts/bench_gpu.py runs beside the package's kernels.

This module and those that import it know nothing of TVM, as TileLang brings one of its own. They evaluate annotations
at once, since TileLang reads those of its programs.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tilelang.language as T

Problem = Mapping[str, Any]
Knobs = dict[str, int]

LOG2E = 1.4426950408889634
F32 = "float32"
TYPES = {"int32": T.int32, "uint8": T.uint8, "float32": T.float32, "bfloat16": T.bfloat16, "float16": T.float16}


@dataclass(frozen=True)
class Written:
    """Programs that run one after the other, the names of each one's tensors, and scratch tensors by name.

    `tables` makes, of a set of tensors, those that the host code of an example would make before the launch.
    """

    programs: Sequence[Any]
    arguments: Sequence[Sequence[str]]
    scratch: Mapping[str, tuple[Sequence[int], str]] = field(default_factory=dict)
    tables: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda made: {}


def of(problem: Problem, *names: str) -> tuple[Any, ...]:
    """Sizes of a problem, in the order of their names, and behind them TileLang's type of its elements."""
    return *(problem[name] for name in names), TYPES[problem["dtype"]]


def every(**values: Sequence[int]) -> Iterator[Knobs]:
    """All combinations of values of knobs."""
    for chosen in itertools.product(*values.values()):
        yield dict(zip(values, chosen))
