"""Products of any order of dimensions, and of parts of tensors, which a tile kernel computes where they lie."""

import numpy as np
import pytest
import tvm
from tvm import s_tir
from tvm.script import from_source
from tvm.script import tirx as T

from tvm_axe.errors import ScheduleError
from tvm_axe.lower.defaults import with_default_kernels
from tvm_axe.lower.tiles import with_tile_kernels
from tvm_axe.machines import backend_of, resolve_target
from tvm_axe.schedule import tile_kernel
from tvm_axe.schedule.einsum import einsum_of
from tvm_axe.schedule.tiles import choices_in
from tvm_axe.tile.kernels.einsum import Operands
from tvm_axe.tile.kernels.kernel import product_slack

LLVM = resolve_target("llvm", threads=2)
HOPPER = resolve_target({"kind": "cuda", "arch": "sm_90a"})
SEEDS = range(24)
START = 2
"""What the scalar `o` is, in tiles of 16."""


class Drawn:
    """A random product: the function, and what it computes.

    Indices b are of a batch, i of rows, j of columns, k of the sum. Some run over a part of a dimension alone, which
    starts at a number or at sixteen times the scalar `o`; some dimensions are at one place, a number or `o`.
    """

    def __init__(self, seed: int, dtype: str = "float32") -> None:
        self.rng, self.dtype = np.random.default_rng(seed), dtype
        draw = self.rng.integers
        counts = {"b": draw(0, 3), "i": draw(1, 3), "j": draw(1, 3), "k": draw(1, 3)}
        self.extents = {f"{kind}{n}": int(draw(1, 5)) for kind, count in counts.items() for n in range(count)}
        for kind in "ijk":  # one of each is longer than a tile
            self.extents[f"{kind}{draw(counts[kind])}"] = int(self.rng.choice([16, 48, 70, 96]))
        self.scalar = False
        # In the result what lies last may be of either factor.
        self.a, self.b = self._operand("bik"), self._operand("bkj")
        self.c = self._operand("bij", result=True)

    def _operand(self, kinds: str, result: bool = False) -> list[tuple[str, int, str]]:
        """Dimensions in random order, each with the index, its size, and where the index's part starts."""
        dims = []
        for index, extent in self.extents.items():
            if index[0] not in kinds:
                continue
            if extent % 16 == 0 and self.rng.random() < 0.3:
                start = "o * 16" if self.rng.random() < 0.5 else str(int(self.rng.integers(0, 3)) * 8)
                self.scalar = self.scalar or "o" in start
                dims.append((index, extent + 48, start))
            else:
                dims.append((index, extent, ""))
        if self.rng.random() < 0.3:
            start = "o" if self.rng.random() < 0.5 else "1"
            self.scalar = self.scalar or start == "o"
            dims.append(("", 4, start))
        return [dims[n] for n in self.rng.permutation(len(dims))]

    @property
    def func(self) -> tvm.tirx.PrimFunc:
        def at(dims):
            return ", ".join(" + ".join(filter(None, [start, index and f"v{index}"])) for index, _, start in dims)

        names, kinds = list(self.extents), "".join("R" if n[0] == "k" else "S" for n in self.extents)
        shapes = [tuple(size for _, size, _ in dims) for dims in (self.a, self.b, self.c)]
        a, b, c = (f"{name}[{at(dims)}]" for name, dims in zip("ABC", (self.a, self.b, self.c)))
        if self.rng.random() < 0.5:
            a, b = b, a
        source = f"""
@T.prim_func(s_tir=True)
def main(A: T.Buffer({shapes[0]}, "{self.dtype}"), B: T.Buffer({shapes[1]}, "{self.dtype}"),
         C: T.Buffer({shapes[2]}, "{self.dtype}"){", o: T.int32" if self.scalar else ""}):
    T.func_attr({{"global_symbol": "main"}})
    for {", ".join(names)} in T.grid({", ".join(str(self.extents[n]) for n in names)}):
        with T.sblock("sum"):
            {", ".join("v" + n for n in names)} = T.axis.remap("{kinds}", [{", ".join(names)}])
            with T.init():
                {c} = T.cast(T.float32(0), "{self.dtype}")
            {c} = {c} + {a} * {b}
"""
        return from_source(source, {"T": T})

    def arrays(self) -> list[np.ndarray]:
        shapes = [tuple(size for _, size, _ in dims) for dims in (self.a, self.b)]
        return [self.rng.standard_normal(shape).astype(self.dtype) for shape in shapes]

    @property
    def empty(self) -> np.ndarray:
        return np.full([size for _, size, _ in self.c], np.nan).astype(self.dtype)

    def expected(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple]:
        """The sums in float64, how far off each may be, and which part of C they are."""

        def part(dims):
            starts = [eval(start or "0", {"o": START}) for _, _, start in dims]
            return tuple(
                slice(at, at + self.extents[index]) if index else at for at, (index, _, _) in zip(starts, dims)
            )

        letters = {index: chr(ord("a") + n) for n, index in enumerate(self.extents)}
        texts = ["".join(letters[index] for index, _, _ in dims if index) for dims in (self.a, self.b, self.c)]
        x, y = a.astype("float64")[part(self.a)], b.astype("float64")[part(self.b)]
        equation = f"{texts[0]},{texts[1]}->{texts[2]}"
        terms = int(np.prod([extent for index, extent in self.extents.items() if index[0] == "k"]))
        slack = product_slack(self.dtype, self.dtype, terms, np.einsum(equation, np.abs(x), np.abs(y)))
        return np.einsum(equation, x, y), slack, part(self.c)

    def check(self, call) -> None:
        a, b = self.arrays()
        got = call(a, b, self.empty, *([START] if self.scalar else []))
        value, slack, part = self.expected(a, b)
        assert (np.abs(got[part].astype("float64") - value) <= slack).all()
        got[part] = 0
        assert np.isnan(got).sum() == got.size - value.size, "an element beside the part was written"


def annotated(drawn: Drawn) -> s_tir.Schedule:
    sch = s_tir.Schedule(drawn.func)
    tile_kernel(sch, sch.get_sblock("sum"), "einsum")
    return sch


@pytest.mark.parametrize("seed", SEEDS)
def test_random_products(seed):
    drawn = Drawn(seed)
    executable = tvm.compile(with_tile_kernels(annotated(drawn).mod, LLVM), LLVM)

    def call(a, b, c, *scalars):
        tensors = [tvm.runtime.tensor(array) for array in (a, b, c)]
        executable["main"](*tensors, *scalars)
        return tensors[-1].numpy().copy()

    drawn.check(call)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", SEEDS[::4])
def test_random_products_compile_for_a_gpu(seed, dtype):
    """Nobody chose a kernel: that is the default there."""
    drawn = Drawn(seed, dtype)
    chosen = with_default_kernels(tvm.IRModule({"main": drawn.func}), HOPPER)
    assert choices_in(chosen["main"])
    backend_of(HOPPER).build(with_tile_kernels(chosen, HOPPER), HOPPER)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_products_on_a_gpu(cuda, seed, dtype):
    drawn, target = Drawn(seed, dtype), resolve_target("cuda")
    module = backend_of(target).build(with_tile_kernels(annotated(drawn).mod, target), target).module

    def call(a, b, c, *scalars):
        tensors = [tvm.runtime.tensor(array, cuda) for array in (a, b, c)]
        module["main"](*tensors, *scalars)
        return tensors[-1].numpy()

    drawn.check(call)


def test_what_always_follows_is_one_dimension():
    @T.prim_func(s_tir=True)
    def func(
        A: T.Buffer((2, 3, 5, 8), "float32"), B: T.Buffer((5, 8, 6), "float32"), C: T.Buffer((6, 2, 3), "float32")
    ):
        for b, i, h, x, j in T.grid(2, 3, 5, 8, 6):
            with T.sblock("sum"):
                vb, vi, vh, vx, vj = T.axis.remap("SSRRS", [b, i, h, x, j])
                with T.init():
                    C[vj, vb, vi] = T.float32(0)
                C[vj, vb, vi] = C[vj, vb, vi] + A[vb, vi, vh, vx] * B[vh, vx, vj]

    sch = s_tir.Schedule(func)
    found = einsum_of(sch.get(sch.get_sblock("sum")))
    assert found.operands.texts == {"a": "i0:6 i2:40", "b": "i2:40 i4:6", "c": "i4:6 i0:6"}
    assert found.operands.swapped and found.operands.row == "i4"
    assert [str(it.var.name) for it in found.tiled["block_k"]] == ["vh", "vx"]


def test_texts_of_dimensions():
    found = Operands.parse("b:2 i:16/64+32 :1/3+2 k:8", "k:8/16+o1 j:5", "b:2 i:16 j:5")
    assert found.texts == {"a": "b:2 i:16/64+32 :1/3+2 k:8", "b": "k:8/16+o1 j:5", "c": "b:2 i:16 j:5"}
    assert (found.row, found.column, found.term, found.blocks, found.steps) == ("i", "j", "k", ["b"], [])


@T.prim_func(s_tir=True)
def strided(A: T.Buffer((32, 8), "float32"), B: T.Buffer((8, 16), "float32"), C: T.Buffer((16, 16), "float32")):
    for i, j, k in T.grid(16, 16, 8):
        with T.sblock("sum"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi * 2, vk] * B[vk, vj]


@T.prim_func(s_tir=True)
def dots(A: T.Buffer((16, 8), "float32"), B: T.Buffer((16, 8), "float32"), C: T.Buffer((16,), "float32")):
    for i, k in T.grid(16, 8):
        with T.sblock("sum"):
            vi, vk = T.axis.remap("SR", [i, k])
            with T.init():
                C[vi] = T.float32(0)
            C[vi] = C[vi] + A[vi, vk] * B[vi, vk]


@T.prim_func(s_tir=True)
def beside(A: T.Buffer((16, 8), "float32"), B: T.Buffer((8, 16), "float32"), C: T.Buffer((16, 16), "float32")):
    for i, j, k in T.grid(16, 16, 16):
        with T.sblock("sum"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            T.where(k < 8)
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]


@pytest.mark.parametrize(
    ("func", "message"),
    [
        (strided, r"A\[vi \* 2, vk\] isn't indexed by one loop and where that starts; vi \* 2 is none such"),
        (dots, "has no rows, no columns or no sum"),
        (beside, "its loops don't run over all of the product"),
    ],
)
def test_others_are_refused(func, message):
    sch = s_tir.Schedule(func)
    with pytest.raises(ScheduleError, match=message):
        tile_kernel(sch, sch.get_sblock("sum"), "einsum")
    mod = tvm.IRModule({"main": func})
    assert with_default_kernels(mod, HOPPER).same_as(mod)  # they are threads' there


def test_nobody_chooses_on_a_cpu():
    mod = tvm.IRModule({"main": Drawn(0).func})
    assert with_default_kernels(mod, LLVM).same_as(mod)


def test_what_a_record_has_stays():
    mod = tvm.IRModule({"main": Drawn(0).func})
    assert with_default_kernels(mod, HOPPER, ["main"]).same_as(mod)
