"""Names and memory within a vectorized loop, of which each lane has its own, beside the same loop as it is written."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import tvm
from tvm import tirx
from tvm.script import tirx as T

from tvm_axe import _tvm  # it has upstream's vectorization keep them

HEAD = """@T.prim_func(s_tir=True)
def main(
    a: T.Buffer((16,), "float32"), w: T.Buffer((16,), "int32"), b: T.Buffer((16,), "float32"),
    c: T.Buffer((16,), "float32"),
):
    T.func_attr({"global_symbol": "main"})
    for i in LOOP(16):
"""
FLOATS = ("a[i]", "a[15 - i]", "b[i]", "c[i]", "a[w[i]]", "T.float32(0.5)", "a[3]")
INTEGERS = ("w[i]", "i", "T.int32(3)", "w[5]")
OF_FLOATS = (
    "(FLOAT + FLOAT)", "(FLOAT * FLOAT)", "(FLOAT - FLOAT)", "T.Select(TRUTH, FLOAT, FLOAT)", "T.max(FLOAT, FLOAT)",
    "T.if_then_else(TRUTH, FLOAT, FLOAT)", "T.exp(T.min(FLOAT, T.float32(2)))", "T.erf(FLOAT)", "T.floor(FLOAT)",
    "T.Cast('float32', INTEGER)", "T.reinterpret('float32', T.reinterpret('int32', FLOAT))", "T.abs(FLOAT)",
    "T.sqrt(T.abs(FLOAT))", "T.pow(T.abs(FLOAT), T.float32(2))", "T.log(T.abs(FLOAT) + T.float32(1))", "T.tanh(FLOAT)",
)  # fmt: skip
OF_INTEGERS = (
    "(INTEGER + INTEGER)", "T.bitwise_and(INTEGER, INTEGER)", "T.shift_right(INTEGER, T.int32(1))",
    "T.Select(TRUTH, INTEGER, INTEGER)", "T.Cast('int32', T.clz(T.abs(INTEGER) + 1))", "T.popcount(INTEGER)",
)  # fmt: skip
OF_TRUTHS = (
    "(FLOAT < FLOAT)", "T.isnan(FLOAT)", "T.And(FLOAT < FLOAT, FLOAT > T.float32(0))", "T.Not(FLOAT < FLOAT)",
    "(INTEGER < 7)",
)  # fmt: skip


class Writer:
    """Statements of a loop over i that stores each element for itself, drawn at random."""

    def __init__(self, seed: int) -> None:
        self.rng, self.count, self.lines = random.Random(seed), 0, list[str]()
        self.statements(8, self.rng.randint(2, 4), {"FLOAT": [*FLOATS], "INTEGER": [*INTEGERS], "TRUTH": []})

    def value(self, kind: str, names: dict[str, list[str]], depth: int) -> str:
        written, formed = names[kind], {"FLOAT": OF_FLOATS, "INTEGER": OF_INTEGERS, "TRUTH": OF_TRUTHS}[kind]
        if written and (depth <= 0 or self.rng.random() < 0.2):
            return self.rng.choice(written[-8:])  # what was named last, too
        text = self.rng.choice(formed)
        for part in ("FLOAT", "INTEGER", "TRUTH"):
            while part in text:
                text = text.replace(part, self.value(part, names, depth - 1), 1)
        return text

    def write(self, indent: int, text: str) -> None:
        self.lines.append(" " * indent + text)

    def new(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def statements(self, indent: int, count: int, names: dict[str, list[str]]) -> None:
        kinds = ("name", "name", "own", "own", "flag", "store", *(("if", "loop") if indent < 16 else ()))
        for _ in range(count):
            getattr(self, self.rng.choice(kinds) + "_")(indent, names)
        self.write(indent, f"c[i] = c[i] + {self.value('FLOAT', names, 1)}")

    def name_(self, indent: int, names: dict[str, list[str]]) -> None:
        kind, name = self.rng.choice(("FLOAT", "FLOAT", "INTEGER")), self.new("v")
        dtype = "float32" if kind == "FLOAT" else "int32"
        self.write(indent, f"{name}: T.let[T.{dtype}] = {self.value(kind, names, 2)}")
        names[kind].append(name)

    def flag_(self, indent: int, names: dict[str, list[str]]) -> None:
        name = self.new("t")
        self.write(indent, f"{name}: T.let[T.bool] = {self.value('TRUTH', names, 1)}")
        names["TRUTH"].append(name)

    def own_(self, indent: int, names: dict[str, list[str]]) -> None:
        name = self.new("o")
        if self.rng.random() < 0.5:
            self.write(indent, f"{name}: T.float32 = {self.value('FLOAT', names, 2)}")
            names["FLOAT"].append(name)
            return
        self.write(indent, f"{name} = T.alloc_buffer((3,), 'float32', scope='local')")
        for place in range(3):
            self.write(indent, f"{name}[{place}] = {self.value('FLOAT', names, 1)}")
        names["FLOAT"] += [f"{name}[{place}]" for place in (0, 2, "w[i] % 3")]

    def store_(self, indent: int, names: dict[str, list[str]]) -> None:
        self.write(indent, f"{self.rng.choice('bc')}[i] = {self.value('FLOAT', names, 2)}")

    def if_(self, indent: int, names: dict[str, list[str]]) -> None:
        self.write(indent, f"if {self.value('TRUTH', names, 1)}:")
        self.within(indent, names)

    def loop_(self, indent: int, names: dict[str, list[str]]) -> None:
        self.write(indent, f"for {self.new('j')} in range(2):")
        self.within(indent, names)

    def within(self, indent: int, names: dict[str, list[str]]) -> None:
        self.statements(indent + 4, self.rng.randint(1, 2), {kind: [*known] for kind, known in names.items()})


def computed(lines: Sequence[str], loop: str) -> list[np.ndarray]:
    text = HEAD.replace("LOOP", loop) + "\n".join(lines)
    kernel = tvm.compile(tvm.IRModule({"main": tvm.script.from_source(text, {"T": T})}), "llvm")["main"]
    rng = np.random.default_rng(len(lines))
    given = rng.standard_normal(16), rng.integers(0, 16, 16), rng.standard_normal(16), np.full(16, 7)
    types = "float32", "int32", "float32", "float32"
    tensors = [tvm.runtime.tensor(array.astype(dtype)) for array, dtype in zip(given, types)]
    kernel(*tensors)
    return [tensor.numpy() for tensor in tensors]


def differs(lines: Sequence[str]) -> bool:
    plain, vectors = (computed(lines, loop) for loop in ("range", "T.vectorized"))
    return not all(np.allclose(*pair, rtol=1e-4, atol=1e-5, equal_nan=True) for pair in zip(plain, vectors))


KNOWN = {
    "a name of what has no vector form": ["v: T.let[T.float32] = T.erf(a[i])", "c[i] = v + a[i]"],
    "a name, where a condition is a lane's": [
        "v: T.let[T.float32] = a[i] * a[i]", "if w[i] < 7:", "    b[i] = v", "c[i] = v"
    ],
    "a name of a truth value": ["v: T.let[T.bool] = a[i] < b[i]", "c[i] = T.Select(v, a[i], b[i])"],
    "memory of one element": ["v: T.float32 = a[i]", "v = v * v", "c[i] = v"],
    "memory that is indexed": [
        "v = T.alloc_buffer((3,), 'float32', scope='local')", "for j in range(3):", "    v[j] = a[(i + j) % 16]",
        "c[i] = v[w[i] % 3]",
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", KNOWN)
def test_each_lane_has_its_own(case: str) -> None:
    assert not differs([" " * 8 + line for line in KNOWN[case]])


def test_what_is_drawn_is_as_it_is_written() -> None:
    wrong = [seed for seed in range(60) if differs(Writer(seed).lines)]
    assert wrong == []


def test_memory_that_is_passed_on_is_of_a_loop() -> None:
    """A pointer is to elements beside each other, which a lane's aren't."""

    @T.prim_func(s_tir=True)
    def main(a: T.Buffer((4,), "float32"), c: T.Buffer((4,), "float32")):
        T.func_attr({"global_symbol": "main"})
        for i in T.vectorized(4):
            v = T.alloc_buffer((2,), "float32", scope="local")
            v[0] = a[i]
            v[1] = a[i] + T.float32(1)
            T.evaluate(T.call_extern("int32", "keep", T.address_of(v[0])))
            c[i] = v[1]

    lowered = tirx.transform.VectorizeLoop()(tvm.IRModule({"main": main})).script()
    assert "T.vectorized" not in lowered and "c[i] = v[1]" in lowered


def test_vectors_without_names_stay_what_they_are() -> None:
    @T.prim_func(s_tir=True)
    def main(a: T.Buffer((16,), "float32"), c: T.Buffer((16,), "float32")):
        for i in T.vectorized(16):
            v: T.let[T.float32] = a[i] * a[i]
            c[i] = v + T.exp(v)

    lowered = tirx.transform.VectorizeLoop()(tvm.IRModule({"main": main})).script()
    assert "alloc" not in lowered and "c[0:16]" in lowered and _tvm.keep_lanes() is None
