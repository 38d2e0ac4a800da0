"""What the random programs of `fuzz_schedules` are drawn with: see `fuzz_stages`."""

from __future__ import annotations

import random
from collections.abc import Sequence

from fuzz_programs import Stage, Tensor

DTYPES = ("float32",) * 8 + ("float16", "float64", "int32", "int32", "int8")
_NAMES = "abcdefgh"


class Drawing:
    """A program in the making: its extents, tensors and stages so far."""

    def __init__(self, rng: random.Random, devices: Sequence[int]) -> None:
        self.rng = rng
        self.devices = tuple(devices)
        self.dtype = rng.choice(DTYPES)
        pool = [1, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8, 9, *devices, *(2 * n for n in devices if 2 * n <= 9)]
        self.extents = {name: rng.choice(pool) for name in _NAMES[: rng.randint(2, 4)]}
        self.tensors: dict[str, Tensor] = {}
        self.stages: list[Stage] = []
        self.making: str | None = None  # the tensor that the next stage stores to

    # ---- Tensors ----

    def extent(self) -> str:
        """One of the extents."""
        return self.rng.choice(list(self.extents))

    def shape(self, low: int = 1, high: int = 3) -> tuple[str, ...]:
        """A shape of them."""
        rank = self.rng.choices(range(low, high + 1), weights=[1, 5, 9, 3][low : high + 1])[0]
        return tuple(self.extent() for _ in range(rank))

    def tensor(self, prefix: str, shape: Sequence[str], dtype: str | None = None, limit: str | None = None) -> Tensor:
        """A new tensor, a parameter so far."""
        name = f"{prefix}{sum(each.startswith(prefix) for each in self.tensors)}"
        self.tensors[name] = Tensor(name, tuple(shape), dtype or self.dtype, False, limit)
        return self.tensors[name]

    def values(self) -> list[Tensor]:
        """The tensors that hold values: no indices."""
        return [t for t in self.tensors.values() if t.limit is None and t.name != self.making]

    def produced(self) -> list[Tensor]:
        """Those that a stage wrote."""
        targets = {stage.target for stage in self.stages}
        return [tensor for tensor in self.values() if tensor.name in targets]

    def source(self, low: int = 0) -> Tensor:
        """What a stage starts from: mostly what an earlier one wrote, the last most often."""
        produced = [tensor for tensor in self.produced() if len(tensor.shape) >= low]
        if produced and self.rng.random() < 0.85:
            return produced[-1] if self.rng.random() < 0.7 else self.rng.choice(produced)
        known = [tensor for tensor in self.values() if len(tensor.shape) >= low]
        if known and self.rng.random() < 0.3:
            return self.rng.choice(known)
        return self.tensor("X", self.shape(max(low, 1)))

    def operand(self, shape: Sequence[str]) -> tuple[Tensor, tuple[int, ...]]:
        """A tensor, and which dimensions of `shape` index it: some of them, perhaps in another order."""
        fitting = []
        for tensor in self.values():
            found = embedding(tensor.shape, shape)
            if found is not None:
                fitting.append((tensor, found))
        if fitting and self.rng.random() < 0.6:
            return self.rng.choice(fitting[-3:])
        dims = [dim for dim in range(len(shape)) if self.rng.random() < 0.8]
        if self.rng.random() < 0.2:
            self.rng.shuffle(dims)
        return self.tensor("X", [shape[dim] for dim in dims]), tuple(dims)

    # ---- Values ----

    def cast(self, value: str, have: str, want: str) -> str:
        """A value in another type."""
        return value if have == want else f'T.Cast("{want}", {value})'

    def load(self, tensor: Tensor, indices: Sequence[str], dtype: str) -> str:
        """An element in a type."""
        return self.cast(f"{tensor.name}[{', '.join(indices) or '()'}]", tensor.dtype, dtype)

    def constant(self, dtype: str) -> str:
        """A small number."""
        return f"T.{dtype}({self.rng.choice((1, 2, 3))})"

    def mixed(self, value: str, shape: Sequence[str], dtype: str, names: Sequence[str] | None = None) -> str:
        """A value of the iterators with other operands and constants."""
        names = names or [f"v{i}" for i in range(len(shape))]
        for _ in range(self.rng.choices((0, 1, 2, 3), weights=(3, 4, 2, 1))[0]):
            if self.rng.random() < 0.6:
                tensor, dims = self.operand(shape)
                other = self.load(tensor, [names[dim] for dim in dims], dtype)
            else:
                other = self.constant(dtype)
            form = self.rng.choice(
                ("{0} + {1}", "{0} - {1}", "{0} * {1}", "{1} - {0}", "T.max({0}, {1})", "T.min({0}, {1})", "{0} + {1}")
            )
            left = f"({value})" if " " in value else value
            value = form.format(left, other)
        return value

    def result(self, shape: Sequence[str], dtype: str | None = None) -> Tensor:
        """What a stage stores to."""
        other = self.rng.random() < 0.12 and self.dtype != "bool"
        made = self.tensor("Y", shape, dtype or (self.rng.choice(DTYPES) if other else self.dtype))
        self.making = made.name
        return made

    def stage(
        self,
        extents: Sequence[str],
        kinds: str,
        target: Tensor,
        indices: Sequence[str],
        value: str,
        combine: str | None = None,
    ) -> None:
        """Add a stage."""
        name, self.making = f"s{len(self.stages)}", None
        self.stages.append(Stage(name, tuple(extents), kinds, target.name, tuple(indices), value, combine))


def embedding(inner: Sequence[str], outer: Sequence[str]) -> tuple[int, ...] | None:
    """Dimensions of `outer` with the extents of `inner`, each used once; None if there are none."""
    left, found = list(range(len(outer))), []
    for extent in inner:
        at = next((dim for dim in left if outer[dim] == extent), None)
        if at is None:
            return None
        left.remove(at)
        found.append(at)
    return tuple(found)
