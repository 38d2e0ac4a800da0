"""Loops with remainders in their indices, which LLVM's vectorizer has taken for loops without: beside numpy."""

import itertools
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
import tvm
from tvm.script import tirx as T
from tvm.target import Target

from tvm_axe import _tvm
from tvm_axe.machines import resolve_target
from tvm_axe.tile.targets.llvm.backend import BACKEND

PROGRAM = """@T.prim_func(s_tir=True)
def main(x: T.Buffer({held}, "{dtype}"), z: T.Buffer((64,), "{dtype}"), y: T.Buffer({made}, "{dtype}")):
    for i, j, k in T.grid({loops}):
        with T.sblock("read"):
            vi, vj, vk = T.axis.remap("SSS", [i, j, k])
            y[vi, vj, vk] = {value}
"""


class Case(NamedTuple):
    """A tensor that is read on at its begin wherever it ends, along all of its dimensions."""

    held: tuple[int, ...]
    made: tuple[int, ...]
    value: str
    dtype: str = "float32"
    index: str = "int32"

    def source(self) -> str:
        loops = ", ".join(f"T.{self.index}({extent})" for extent in self.made)
        return PROGRAM.format(loops=loops, **self._asdict())


def repeated(made: tuple[int, ...], held: tuple[int, ...], index: str = "int32") -> Case:
    """What `numpy.tile` does."""
    return Case(held, made, f"x[vi % {held[0]}, vj % {held[1]}, vk % {held[2]}]", index=index)


KNOWN = [
    repeated((6, 16, 10), (3, 4, 5), "int64"),
    repeated((10, 16, 20), (5, 8, 5)),
    repeated((30, 24, 12), (5, 4, 3)),
    repeated((20, 32, 16), (5, 8, 4)),
    repeated((9, 16, 16), (3, 4, 4)),
    Case((5, 16, 16), (15, 49, 32), "x[vi % 5, vk % 16, vj % 16] + z[vj % 8]", "int8", "int64"),
    Case((6, 32, 5), (18, 128, 15), "x[vi % 6, vj % 32, vk % 5] + z[vj % 8]"),
]
"""Wrong on CPUs with AVX-512, some on those with AVX2, as LLVM 22 compiles them if it isn't told otherwise."""


def drawn(seed: int) -> Case:
    rng = random.Random(seed)
    p, m, n = rng.choice((1, 3, 5, 6, 7)), rng.choice((4, 8, 16, 32)), rng.choice((1, 2, 3, 4, 5, 8, 16))
    made = p * rng.randint(1, 3), m * rng.choice((1, 2, 3, 4, 6)) + rng.choice((0, 0, 0, 1, 5)), n * rng.randint(1, 3)
    factor, added = rng.choice((1, 1, 1, 2, 3)), rng.choice((0, 0, 1, 2, 5))
    held, indices = [p, m, n], [f"vi % {p}", f"({factor} * vj + {added}) % {m}", f"vk % {n}"]
    if rng.random() < 0.5:
        held[1:], indices[1:] = held[:0:-1], indices[:0:-1]
    value = f"x[{', '.join(indices)}]" + rng.choice(("", "", " + z[vj % 8]", " + z[(vj + 3) % 16]", " + z[vk % 4]"))
    dtype = rng.choice(("float32", "float32", "int8", "float64", "int32"))
    return Case(tuple(held), made, value, dtype, rng.choice(("int32", "int64")))


def is_right(case: Case, target: Target) -> bool:
    func = tvm.script.from_source(case.source(), extra_vars={"T": T})
    kernel = BACKEND.build(tvm.IRModule({"main": func}), target).module["main"]
    rng = np.random.default_rng()
    x, z = ((rng.random(shape) * 50).astype(case.dtype) for shape in (case.held, (64,)))
    y = tvm.runtime.tensor(np.full(case.made, 99, case.dtype))
    kernel(tvm.runtime.tensor(x), tvm.runtime.tensor(z), y)
    vi, vj, vk = np.meshgrid(*map(np.arange, case.made), indexing="ij")
    return np.array_equal(y.numpy(), eval(case.value, {"x": x, "z": z, "vi": vi, "vj": vj, "vk": vk}))


@pytest.mark.parametrize("case", KNOWN)
def test_what_was_wrong_is_right(case):
    assert is_right(case, resolve_target("llvm"))


def test_what_is_drawn_is_right():
    target = resolve_target("llvm")
    assert [seed for seed in range(60) if not is_right(drawn(seed), target)] == []


def test_what_is_loaded_names_the_target_s_own_options_alone():
    """Upstream sets those that it names, for the whole process, whenever a function is looked up (0113)."""
    func = tvm.script.from_source(KNOWN[0].source(), extra_vars={"T": T})
    for mine in [], ["-unroll-count:uint=2"], ["-unroll-count:uint=2", "-enable-pipeliner:bool=false"]:
        target = Target({"kind": "llvm", "cl-opt": mine})
        module = BACKEND.build(tvm.IRModule({"main": func}), target).module
        named = json.loads(module.get_function("_get_target_string")())
        assert named.get("cl-opt", []) == mine


def test_one_thread_at_a_time_compiles():
    """Options that two targets set and set back in turns are found set, or not, by neither as they should be."""
    inside, most = 0, 0

    def entered(mod: tvm.IRModule, context: object) -> tvm.IRModule:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.05)
        inside -= 1
        return mod

    slow = tvm.ir.transform.module_pass(entered, opt_level=0)
    _tvm.register_pipeline("test.slow", "s_tir", slow, tvm.ir.transform.Sequential([]))
    func = tvm.script.from_source(KNOWN[0].source(), extra_vars={"T": T}).with_attr("global_symbol", "main")
    mod = tvm.IRModule({"main": func})
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda _: _tvm.compile_llvm(mod, Target("llvm"), "test.slow"), range(4)))
    assert most == 1 and len(set(made)) == 1


def test_vectors_of_a_schedule_stay():
    """What is vectorized by the schedule isn't LLVM's to refuse; strided loads in vectors among it."""
    extents = list(itertools.product((16, 64), (2, 3)))
    for columns, stride in extents:
        source = PROGRAM.format(
            held=(1, 1, columns * stride), made=(1, 1, columns), dtype="float32", loops=f"1, 1, {columns}",
            value=f"x[vi, vj, vk * {stride}]",
        )  # fmt: skip
        sch = tvm.s_tir.Schedule(tvm.script.from_source(source, extra_vars={"T": T}))
        sch.vectorize(sch.get_loops(sch.get_sblock("read"))[-1])
        module = _tvm.load_llvm(_tvm.compile_llvm(sch.mod, resolve_target({"kind": "llvm", "mcpu": "x86-64-v3"})))
        assert " x float>" in module.inspect_source("ll")
