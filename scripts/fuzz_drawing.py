"""Draws the random programs of `fuzz_schedules`: see `draw_program`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from fuzz_programs import Malformed, Program, Stage, Tensor, fitting_inputs

DTYPES = ("float32",) * 8 + ("float16", "float64", "int32", "int32", "int8")
_NAMES = "abcdefgh"


class _Drawing:
    """A program in the making: its extents, tensors and stages so far."""

    def __init__(self, rng: random.Random, devices: Sequence[int]) -> None:
        self.rng = rng
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

    def tensor(
        self, prefix: str, shape: Sequence[str], dtype: str | None = None, limit: str | None = None
    ) -> Tensor:
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
            found = _embedding(tensor.shape, shape)
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


def _embedding(inner: Sequence[str], outer: Sequence[str]) -> tuple[int, ...] | None:
    """Dimensions of `outer` with the extents of `inner`, each used once; None if there are none."""
    left, found = list(range(len(outer))), []
    for extent in inner:
        at = next((dim for dim in left if outer[dim] == extent), None)
        if at is None:
            return None
        left.remove(at)
        found.append(at)
    return tuple(found)


def _vs(count: int) -> list[str]:
    return [f"v{i}" for i in range(count)]


# ---- The kinds of stages ---------------------------------------------------------------------------------------------


def pointwise(d: _Drawing) -> None:
    source = d.source()
    y = d.result(source.shape)
    names = _vs(len(source.shape))
    d.stage(source.shape, "S" * len(names), y, names, d.mixed(d.load(source, names, y.dtype), source.shape, y.dtype))


def broadcast(d: _Drawing) -> None:
    """Values of fewer dimensions than the result."""
    source = d.source()
    if len(source.shape) == 3:
        return pointwise(d)
    at = d.rng.randint(0, len(source.shape))
    shape = (*source.shape[:at], d.extent(), *source.shape[at:])
    names = _vs(len(shape))
    y = d.result(shape)
    value = d.load(source, names[:at] + names[at + 1 :], y.dtype)
    d.stage(shape, "S" * len(shape), y, names, d.mixed(value, shape, y.dtype))
    return None


def contraction(d: _Drawing) -> None:
    left = d.source(low=1)
    k = d.rng.randrange(len(left.shape))
    outer = [extent for dim, extent in enumerate(left.shape) if dim != k]
    batch = bool(outer) and d.rng.random() < 0.2
    right_shape = [*outer[:1]] * batch + [left.shape[k], d.extent()]
    if d.rng.random() < 0.3:
        right_shape[-2:] = right_shape[:-3:-1]
        turned = True
    else:
        turned = False
    known = [t for t in d.values() if list(t.shape) == right_shape and t is not left]
    right = d.rng.choice(known) if known and d.rng.random() < 0.4 else d.tensor("W", right_shape)
    column = right_shape[-2] if turned else right_shape[-1]
    extents = [*outer, column, left.shape[k]]
    names = _vs(len(extents))
    ours = names[: len(outer)]
    ours.insert(k, names[-1])
    theirs = [names[-2], names[-1]] if turned else [names[-1], names[-2]]
    theirs = ours_batch(names, batch) + theirs
    y = d.result(extents[:-1])
    value = f"{d.load(left, ours, y.dtype)} * {d.load(right, theirs, y.dtype)}"
    kinds = "S" * (len(extents) - 1) + "R"
    d.stage(extents, kinds, y, names[:-1], value, "sum")


def ours_batch(names: Sequence[str], batch: bool) -> list[str]:
    """The iterator that both operands of a batched contraction share."""
    return [names[0]] if batch else []


def reduction(d: _Drawing) -> None:
    source = d.source(low=1)
    rank = len(source.shape)
    reduced = sorted(d.rng.sample(range(rank), d.rng.choices(range(1, rank + 1), weights=[6, 2, 1][:rank])[0]))
    kept = [dim for dim in range(rank) if dim not in reduced]
    combine = d.rng.choice(("sum",) * 8 + ("prod", "max", "max", "min", "min", "any"))
    order = kept + reduced if d.rng.random() < 0.7 else list(range(rank))
    names = {dim: f"v{i}" for i, dim in enumerate(order)}
    y = d.result([source.shape[dim] for dim in kept] or (["1"] if d.rng.random() < 0.5 else []),
                 "bool" if combine == "any" else None)
    value = d.load(source, [names[dim] for dim in range(rank)], source.dtype if combine == "any" else y.dtype)
    if combine == "any":
        value = value if source.dtype == "bool" else f"{value} > T.{source.dtype}(0)"
    elif combine == "sum" and d.rng.random() < 0.3:
        value = f"{value} * {value}"
    elif d.rng.random() < 0.3:
        value = d.mixed(value, source.shape, y.dtype, [names[dim] for dim in range(rank)])
    kinds = "".join("R" if dim in reduced else "S" for dim in order)
    indices = [names[dim] for dim in kept] or ["0"] * len(y.shape)
    d.stage([source.shape[dim] for dim in order], kinds, y, indices, value, combine)


def _maps(d: _Drawing, extent: str) -> list[str]:
    """One-to-one maps of a dimension onto itself, of ``{v}``."""
    value = d.extents.get(extent, 1)
    shift = d.rng.randint(1, 8)
    maps = [f"{extent} - 1 - {{v}}", f"({{v}} + {shift}) % {extent}", f"({{v}} + {extent} - 1) % {extent}"]
    if value in (4, 6, 8, 9):
        step = 3 if value == 9 else 2
        maps += [f"{{v}} % {step} * ({extent} // {step}) + {{v}} // {step}"]
    if value in (2, 4, 8):
        maps += [f"{{v}} ^ {d.rng.randrange(1, value)}"]
    return maps


def permuted(d: _Drawing) -> None:
    """Reversed, rolled, interleaved or exclusive-or'd, at the store or at the read."""
    source = d.source(low=1)
    names = _vs(len(source.shape))
    dim = d.rng.randrange(len(names))
    moved = list(names)
    moved[dim] = d.rng.choice(_maps(d, source.shape[dim])).format(v=names[dim])
    y = d.result(source.shape)
    at_store = d.rng.random() < 0.6
    value = d.mixed(d.load(source, names if at_store else moved, y.dtype), source.shape, y.dtype)
    d.stage(source.shape, "S" * len(names), y, moved if at_store else names, value)


def transposed(d: _Drawing) -> None:
    """The dimensions in another order, at the store or at the read."""
    source = d.source(low=2)
    names = _vs(len(source.shape))
    order = list(range(len(names)))
    d.rng.shuffle(order)
    y = d.result([source.shape[dim] for dim in order])
    if d.rng.random() < 0.5:
        d.stage(source.shape, "S" * len(names), y, [names[dim] for dim in order], d.load(source, names, y.dtype))
    else:
        back = [names[order.index(dim)] for dim in range(len(order))]
        d.stage(y.shape, "S" * len(names), y, names, d.load(source, back, y.dtype))


def flattened(d: _Drawing) -> None:
    """Two dimensions as one."""
    source = d.source(low=2)
    shape, names = source.shape, _vs(len(source.shape))
    dim = d.rng.randrange(len(shape) - 1)
    flat = f"{_times(shape[dim], shape[dim + 1])}"
    target = (*shape[:dim], flat, *shape[dim + 2 :])
    y = d.result(target)
    if d.rng.random() < 0.6:
        index = f"{names[dim]} * {_factor(shape[dim + 1])} + {names[dim + 1]}"
        value = d.mixed(d.load(source, names, y.dtype), shape, y.dtype)
        d.stage(shape, "S" * len(names), y, [*names[:dim], index, *names[dim + 2 :]], value)
    else:
        outer = _vs(len(target))
        inner = _factor(shape[dim + 1])
        where = [*outer[:dim], f"{outer[dim]} // {inner}", f"{outer[dim]} % {inner}", *outer[dim + 1 :]]
        d.stage(target, "S" * len(target), y, outer, d.load(source, where, y.dtype))


def _factor(extent: str) -> str:
    return f"({extent})" if " " in extent else extent


def _times(left: str, right: str) -> str:
    return f"{_factor(left)} * {_factor(right)}"


def unflattened(d: _Drawing) -> None:
    """One dimension as two."""
    inner, outer = d.extent(), d.extent()
    flat = _times(outer, inner)
    rest = [d.extent()] * (d.rng.random() < 0.6)
    source = next((t for t in d.produced() if flat in t.shape[:1] and len(t.shape) < 3), None)
    source = source or d.tensor("X", [flat, *rest])
    rest = list(source.shape[1:])
    names = _vs(1 + len(rest))
    y = d.result([outer, inner, *rest])
    if d.rng.random() < 0.6:
        indices = [f"v0 // {inner}", f"v0 % {inner}", *names[1:]]
        value = d.mixed(d.load(source, names, y.dtype), source.shape, y.dtype)
        d.stage(source.shape, "S" * len(names), y, indices, value)
    else:
        names = _vs(2 + len(rest))
        d.stage(y.shape, "S" * len(names), y, names, d.load(source, [f"v0 * {inner} + v1", *names[2:]], y.dtype))


def padded(d: _Drawing) -> None:
    """A store into a part of a larger tensor: filled before, or a parameter whose other elements stay."""
    source = d.source(low=1)
    shape, names = list(source.shape), _vs(len(source.shape))
    dim, before, after = d.rng.randrange(len(shape)), d.rng.randint(0, 3), d.rng.randint(0, 2)
    larger = list(shape)
    larger[dim] = f"{shape[dim]} + {before + after}"
    y = d.result(larger)
    if d.rng.random() < 0.5:
        d.stage(larger, "S" * len(names), y, names, d.constant(y.dtype))
    indices = list(names)
    indices[dim] = f"{names[dim]} + {before}"
    d.stage(shape, "S" * len(names), y, indices, d.mixed(d.load(source, names, y.dtype), shape, y.dtype))


def strided(d: _Drawing) -> None:
    """Every second element: written, over a fill, or read."""
    source = d.source(low=1)
    names, shape = _vs(len(source.shape)), list(source.shape)
    dim, off = d.rng.randrange(len(shape)), d.rng.randrange(2)
    larger = list(shape)
    larger[dim] = f"2 * {_factor(shape[dim])}"
    indices = list(names)
    indices[dim] = f"2 * {names[dim]} + {off}"
    if d.rng.random() < 0.6:
        y = d.result(larger)
        if d.rng.random() < 0.6:
            d.stage(larger, "S" * len(names), y, names, d.constant(y.dtype))
        d.stage(shape, "S" * len(names), y, indices, d.load(source, names, y.dtype))
    else:
        x = d.tensor("X", larger)
        y = d.result(shape)
        d.stage(shape, "S" * len(names), y, names, d.mixed(d.load(x, indices, y.dtype), shape, y.dtype))


def concatenated(d: _Drawing) -> None:
    """Two stages that write a half each."""
    first = d.source(low=1)
    dim = d.rng.randrange(len(first.shape))
    shape = list(first.shape)
    shape[dim] = d.extent()
    known = [t for t in d.values() if list(t.shape) == shape]
    second = d.rng.choice(known) if known and d.rng.random() < 0.5 else d.tensor("X", shape)
    whole = list(first.shape)
    whole[dim] = f"{first.shape[dim]} + {_factor(shape[dim])}"
    y = d.result(whole)
    names = _vs(len(shape))
    later = list(names)
    later[dim] = f"{names[dim]} + {_factor(first.shape[dim])}"
    d.stage(first.shape, "S" * len(names), y, names, d.load(first, names, y.dtype))
    d.stage(shape, "S" * len(names), y, later, d.load(second, names, y.dtype))


def appended(d: _Drawing) -> None:
    """New rows of a cache."""
    new = d.source(low=1)
    names = _vs(len(new.shape))
    at = d.rng.randint(0, 3)
    cache = d.tensor("Y", [f"{new.shape[0]} + {at + d.rng.randint(0, 3)}", *new.shape[1:]], new.dtype)
    d.stage(new.shape, "S" * len(names), cache, [f"v0 + {at}", *names[1:]], d.load(new, names, cache.dtype))


def in_place(d: _Drawing) -> None:
    """A tensor that goes on from what it was."""
    known = [t for t in d.values() if t.dtype != "bool"]
    state = d.rng.choice(known) if known and d.rng.random() < 0.5 else d.tensor("P", d.shape())
    names = _vs(len(state.shape))
    value = d.mixed(d.load(state, names, state.dtype), state.shape, state.dtype)
    d.stage(state.shape, "S" * len(names), state, names, value)


def halo(d: _Drawing) -> None:
    """Neighbours of an element: of a larger tensor, clamped, or nothing beyond the border."""
    source = d.source(low=1)
    names, shape = _vs(len(source.shape)), list(source.shape)
    dim = d.rng.randrange(len(shape))
    v, extent = names[dim], _factor(shape[dim])

    def at(index: str) -> list[str]:
        return [index if i == dim else name for i, name in enumerate(names)]

    y = d.result(shape)
    match d.rng.randrange(3):
        case 0:
            larger = list(shape)
            larger[dim] = f"{shape[dim]} + 2"
            x = d.tensor("X", larger)
            offsets = d.rng.sample((f"{v} + 1", f"{v} + 2", v), d.rng.randint(1, 3))
            value = " + ".join(d.load(x, at(offset), y.dtype) for offset in offsets)
        case 1:
            lower, upper = f"T.max({v} - 1, 0)", f"T.min({v} + 1, {extent} - 1)"
            value = f"{d.load(source, at(lower), y.dtype)} + {d.load(source, at(upper), y.dtype)}"
        case _:
            zero = f"T.{y.dtype}(0)"
            left = f"T.if_then_else({v} >= 1, {d.load(source, at(f'{v} - 1'), y.dtype)}, {zero})"
            right = f"T.if_then_else({v} < {extent} - 1, {d.load(source, at(f'{v} + 1'), y.dtype)}, {zero})"
            value = f"{left} + {d.load(source, names, y.dtype)} + {right}"
    d.stage(shape, "S" * len(names), y, names, value)


def window(d: _Drawing) -> None:
    """A sum over a window: a convolution of one dimension."""
    width = d.rng.choice((2, 3))
    rest = [d.extent()] * (d.rng.random() < 0.5)
    n = d.extent()
    x = d.tensor("X", [f"{n} + {width - 1}", *rest])
    y = d.result([n, *rest])
    names = _vs(2 + len(rest))
    value = d.load(x, [f"v0 + {names[-1]}", *names[1:-1]], y.dtype)
    if d.rng.random() < 0.5:
        w = d.tensor("W", [str(width)])
        value = f"{value} * {d.load(w, [names[-1]], y.dtype)}"
    d.stage([n, *rest, str(width)], "S" * (1 + len(rest)) + "R", y, names[:-1], value, d.rng.choice(("sum", "sum", "max")))


def gathered(d: _Drawing) -> None:
    """Rows by index."""
    source = d.source(low=1)
    names = _vs(len(source.shape))
    dim, count = d.rng.randrange(len(source.shape)), d.extent()
    index = d.tensor("I", [count], "int32", source.shape[dim])
    shape = [count if i == dim else extent for i, extent in enumerate(source.shape)]
    y = d.result(shape)
    where = [f"{index.name}[{name}]" if i == dim else name for i, name in enumerate(names)]
    d.stage(shape, "S" * len(names), y, names, d.load(source, where, y.dtype))


def scattered(d: _Drawing) -> None:
    """Rows to where an index says; stored, or added to what is there."""
    source = d.source(low=1)
    names = _vs(len(source.shape))
    index = d.tensor("I", [source.shape[0]], "int32", source.shape[0])
    target = d.result(source.shape)
    where = [f"{index.name}[v0]", *names[1:]]
    if d.rng.random() < 0.5:
        d.stage(source.shape, "S" * len(names), target, where, d.load(source, names, target.dtype))
        return
    if d.rng.random() < 0.5:
        d.stage(source.shape, "S" * len(names), target, names, f"T.{target.dtype}(0)")
    kinds = d.rng.choice("SO") + "S" * (len(names) - 1)
    d.stage(source.shape, kinds, target, where, d.load(source, names, target.dtype), "add")


KINDS: dict[Callable[[_Drawing], None], int] = {
    pointwise: 12,
    broadcast: 4,
    contraction: 14,
    reduction: 14,
    permuted: 6,
    transposed: 4,
    flattened: 3,
    unflattened: 3,
    padded: 3,
    strided: 2,
    concatenated: 3,
    appended: 2,
    in_place: 3,
    halo: 4,
    window: 2,
    gathered: 2,
    scattered: 2,
}


def draw_program(rng: random.Random, devices: Sequence[int]) -> Program:
    """A program of 1 to 5 stages (some kinds are two), its extents often multiples of these numbers of devices."""
    while True:
        drawing = _Drawing(rng, devices)
        count = rng.choices((1, 2, 3, 4, 5), weights=(3, 4, 4, 2, 1))[0]
        while len(drawing.stages) < count:
            rng.choices(list(KINDS), weights=list(KINDS.values()))[0](drawing)
        program = _finished(drawing)
        try:
            fitting_inputs(program, 0)
        except Malformed:
            continue
        return program


def _finished(drawing: _Drawing) -> Program:
    """The program, with most of what is written and read again as intermediates."""
    whole = {tensor.name for tensor in drawing.produced()}
    tensors = []
    for tensor in drawing.tensors.values():
        targets = [i for i, stage in enumerate(drawing.stages) if stage.target == tensor.name]
        readers = [i for i, stage in enumerate(drawing.stages) if tensor.name in f"{stage.value} {stage.indices}"]
        again = bool(targets) and any(i > targets[0] for i in readers) and tensor.name in whole
        local = again and tensor.name.startswith("Y") and drawing.rng.random() < 0.8
        tensors.append(Tensor(tensor.name, tensor.shape, tensor.dtype, local, tensor.limit))
    return Program(tuple(drawing.extents.items()), tuple(tensors), tuple(drawing.stages))
