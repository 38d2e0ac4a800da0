"""The kinds of stages that the programs of `fuzz_schedules` are made of, and `draw_program`."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from fuzz_drawing import Drawing
from fuzz_evaluating import Malformed, fitting_inputs
from fuzz_programs import Program, Tensor


def iterators(count: int) -> list[str]:
    """The first iterators' names."""
    return [f"v{i}" for i in range(count)]


# ---- The kinds of stages ---------------------------------------------------------------------------------------------


def pointwise(d: Drawing) -> None:
    source = d.source()
    y = d.result(source.shape)
    names = iterators(len(source.shape))
    d.stage(source.shape, "S" * len(names), y, names, d.mixed(d.load(source, names, y.dtype), source.shape, y.dtype))


def broadcast(d: Drawing) -> None:
    """Values of fewer dimensions than the result."""
    source = d.source()
    if len(source.shape) == 3:
        return pointwise(d)
    at = d.rng.randint(0, len(source.shape))
    shape = (*source.shape[:at], d.extent(), *source.shape[at:])
    names = iterators(len(shape))
    y = d.result(shape)
    value = d.load(source, names[:at] + names[at + 1 :], y.dtype)
    d.stage(shape, "S" * len(shape), y, names, d.mixed(value, shape, y.dtype))
    return None


def contraction(d: Drawing) -> None:
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
    names = iterators(len(extents))
    ours = names[: len(outer)]
    ours.insert(k, names[-1])
    theirs = [names[-2], names[-1]] if turned else [names[-1], names[-2]]
    theirs = names[:1] * batch + theirs
    stored, indices = list(extents[:-1]), list(names[:-1])
    if d.rng.random() < 0.08:  # into every second element of what is there
        dim = d.rng.randrange(len(stored))
        stored[dim], indices[dim] = f"2 * {_factor(stored[dim])}", f"2 * {names[dim]}"
    y = d.result(stored)
    value = f"{d.load(left, ours, y.dtype)} * {d.load(right, theirs, y.dtype)}"
    kinds = "S" * (len(extents) - 1) + "R"
    d.stage(extents, kinds, y, indices, value, "sum")


def reduction(d: Drawing) -> None:
    source = d.source(low=1)
    rank = len(source.shape)
    reduced = sorted(d.rng.sample(range(rank), d.rng.choices(range(1, rank + 1), weights=[6, 2, 1][:rank])[0]))
    kept = [dim for dim in range(rank) if dim not in reduced]
    combine = d.rng.choice(("sum",) * 8 + ("prod", "max", "max", "min", "min", "any"))
    order = kept + reduced if d.rng.random() < 0.7 else list(range(rank))
    names = {dim: f"v{i}" for i, dim in enumerate(order)}
    y = d.result(
        [source.shape[dim] for dim in kept] or (["1"] if d.rng.random() < 0.5 else []),
        "bool" if combine == "any" else None,
    )
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


def _maps(d: Drawing, extent: str) -> list[str]:
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


def normed(d: Drawing) -> None:
    """What is left of a tensor without the sum or largest along one of its dimensions."""
    source = d.source(low=2)
    names = iterators(len(source.shape))
    dim = d.rng.randrange(len(names))
    kept = [at for at in range(len(names)) if at != dim]
    total = d.result([source.shape[at] for at in kept], source.dtype)
    kinds = "".join("R" if at == dim else "S" for at in range(len(names)))
    combine = d.rng.choice(("sum", "sum", "max", "min")) if source.dtype != "bool" else "any"
    d.stage(source.shape, kinds, total, [names[at] for at in kept], d.load(source, names, total.dtype), combine)
    y = d.result(source.shape)
    left, right = d.load(source, names, y.dtype), d.load(total, [names[at] for at in kept], y.dtype)
    d.stage(source.shape, "S" * len(names), y, names, d.mixed(f"{left} - {right}", source.shape, y.dtype))


def permuted(d: Drawing) -> None:
    """Reversed, rolled, interleaved or exclusive-or'd, at the store or at the read."""
    source = d.source(low=1)
    names = iterators(len(source.shape))
    dim = d.rng.randrange(len(names))
    moved = list(names)
    moved[dim] = d.rng.choice(_maps(d, source.shape[dim])).format(v=names[dim])
    y = d.result(source.shape)
    at_store = d.rng.random() < 0.6
    value = d.mixed(d.load(source, names if at_store else moved, y.dtype), source.shape, y.dtype)
    d.stage(source.shape, "S" * len(names), y, moved if at_store else names, value)


def transposed(d: Drawing) -> None:
    """The dimensions in another order, at the store or at the read."""
    source = d.source(low=2)
    names = iterators(len(source.shape))
    order = list(range(len(names)))
    d.rng.shuffle(order)
    y = d.result([source.shape[dim] for dim in order])
    if d.rng.random() < 0.5:
        d.stage(source.shape, "S" * len(names), y, [names[dim] for dim in order], d.load(source, names, y.dtype))
    else:
        back = [names[order.index(dim)] for dim in range(len(order))]
        d.stage(y.shape, "S" * len(names), y, names, d.load(source, back, y.dtype))


def flattened(d: Drawing) -> None:
    """Two dimensions as one."""
    source = d.source(low=2)
    shape, names = source.shape, iterators(len(source.shape))
    dim = d.rng.randrange(len(shape) - 1)
    flat = f"{_times(shape[dim], shape[dim + 1])}"
    target = (*shape[:dim], flat, *shape[dim + 2 :])
    y = d.result(target)
    if d.rng.random() < 0.6:
        index = f"{names[dim]} * {_factor(shape[dim + 1])} + {names[dim + 1]}"
        value = d.mixed(d.load(source, names, y.dtype), shape, y.dtype)
        d.stage(shape, "S" * len(names), y, [*names[:dim], index, *names[dim + 2 :]], value)
    else:
        outer = iterators(len(target))
        inner = _factor(shape[dim + 1])
        where = [*outer[:dim], f"{outer[dim]} // {inner}", f"{outer[dim]} % {inner}", *outer[dim + 1 :]]
        d.stage(target, "S" * len(target), y, outer, d.load(source, where, y.dtype))


def piped(d: Drawing) -> None:
    """What a stage of a pipeline sends on: the leading dimension, mostly one device long, rolled at the read."""
    stages = d.rng.choice([name for name, value in d.extents.items() if value in d.devices] or list(d.extents))
    known = [tensor for tensor in d.values() if tensor.shape[:1] == (stages,)]
    source = d.rng.choice(known) if known else d.tensor("X", (stages, *d.shape(0, 2)))
    names, y = iterators(len(source.shape)), d.result(source.shape, source.dtype)
    moved = [f"(v0 + {d.rng.choice((1, f'{stages} - 1'))}) % {stages}", *names[1:]]
    d.stage(source.shape, "S" * len(names), y, names, d.load(source, moved, y.dtype))


def _factor(extent: str) -> str:
    return f"({extent})" if " " in extent else extent


def _times(left: str, right: str) -> str:
    return f"{_factor(left)} * {_factor(right)}"


def unflattened(d: Drawing) -> None:
    """One dimension as two."""
    inner, outer = d.extent(), d.extent()
    flat = _times(outer, inner)
    rest = [d.extent()] * (d.rng.random() < 0.6)
    source = next((t for t in d.produced() if flat in t.shape[:1] and len(t.shape) < 3), None)
    source = source or d.tensor("X", [flat, *rest])
    rest = list(source.shape[1:])
    names = iterators(1 + len(rest))
    y = d.result([outer, inner, *rest])
    if d.rng.random() < 0.6:
        indices = [f"v0 // {inner}", f"v0 % {inner}", *names[1:]]
        value = d.mixed(d.load(source, names, y.dtype), source.shape, y.dtype)
        d.stage(source.shape, "S" * len(names), y, indices, value)
    else:
        names = iterators(2 + len(rest))
        d.stage(y.shape, "S" * len(names), y, names, d.load(source, [f"v0 * {inner} + v1", *names[2:]], y.dtype))


def padded(d: Drawing) -> None:
    """A store into a part of a larger tensor: filled before, or a parameter whose other elements stay."""
    source = d.source(low=1)
    shape, names = list(source.shape), iterators(len(source.shape))
    dim, before, after = d.rng.randrange(len(shape)), d.rng.randint(0, 3), d.rng.randint(0, 2)
    larger = list(shape)
    larger[dim] = f"{shape[dim]} + {before + after}"
    y = d.result(larger)
    if d.rng.random() < 0.5:
        d.stage(larger, "S" * len(names), y, names, d.constant(y.dtype))
    indices = list(names)
    indices[dim] = f"{names[dim]} + {before}"
    d.stage(shape, "S" * len(names), y, indices, d.mixed(d.load(source, names, y.dtype), shape, y.dtype))


def strided(d: Drawing) -> None:
    """Every second element: written, over a fill, or read."""
    source = d.source(low=1)
    names, shape = iterators(len(source.shape)), list(source.shape)
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


def concatenated(d: Drawing) -> None:
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
    names = iterators(len(shape))
    later = list(names)
    later[dim] = f"{names[dim]} + {_factor(first.shape[dim])}"
    d.stage(first.shape, "S" * len(names), y, names, d.load(first, names, y.dtype))
    d.stage(shape, "S" * len(names), y, later, d.load(second, names, y.dtype))


def appended(d: Drawing) -> None:
    """New rows of a cache."""
    new = d.source(low=1)
    names = iterators(len(new.shape))
    at = d.rng.randint(0, 3)
    cache = d.tensor("Y", [f"{new.shape[0]} + {at + d.rng.randint(0, 3)}", *new.shape[1:]], new.dtype)
    d.stage(new.shape, "S" * len(names), cache, [f"v0 + {at}", *names[1:]], d.load(new, names, cache.dtype))


def in_place(d: Drawing) -> None:
    """A tensor that goes on from what it was."""
    known = [t for t in d.values() if t.dtype != "bool"]
    state = d.rng.choice(known) if known and d.rng.random() < 0.5 else d.tensor("P", d.shape())
    names = iterators(len(state.shape))
    value = d.mixed(d.load(state, names, state.dtype), state.shape, state.dtype)
    d.stage(state.shape, "S" * len(names), state, names, value)


def halo(d: Drawing) -> None:
    """Neighbours of an element: of a larger tensor, clamped, or nothing beyond the border."""
    source = d.source(low=1)
    names, shape = iterators(len(source.shape)), list(source.shape)
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


def window(d: Drawing) -> None:
    """A sum over a window: a convolution of one dimension."""
    width = d.rng.choice((2, 3))
    rest = [d.extent()] * (d.rng.random() < 0.5)
    n = d.extent()
    x = d.tensor("X", [f"{n} + {width - 1}", *rest])
    y = d.result([n, *rest])
    names = iterators(2 + len(rest))
    value = d.load(x, [f"v0 + {names[-1]}", *names[1:-1]], y.dtype)
    if d.rng.random() < 0.5:
        w = d.tensor("W", [str(width)])
        value = f"{value} * {d.load(w, [names[-1]], y.dtype)}"
    d.stage(
        [n, *rest, str(width)], "S" * (1 + len(rest)) + "R", y, names[:-1], value, d.rng.choice(("sum", "sum", "max"))
    )


def gathered(d: Drawing) -> None:
    """Rows by index."""
    source = d.source(low=1)
    names = iterators(len(source.shape))
    dim, count = d.rng.randrange(len(source.shape)), d.extent()
    index = d.tensor("I", [count], "int32", source.shape[dim])
    shape = [count if i == dim else extent for i, extent in enumerate(source.shape)]
    y = d.result(shape)
    where = [f"{index.name}[{name}]" if i == dim else name for i, name in enumerate(names)]
    d.stage(shape, "S" * len(names), y, names, d.load(source, where, y.dtype))


def scattered(d: Drawing) -> None:
    """Rows to where an index says; stored, or added to what is there."""
    source = d.source(low=1)
    names = iterators(len(source.shape))
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


KINDS: dict[Callable[[Drawing], None], int] = {
    pointwise: 12,
    broadcast: 4,
    contraction: 14,
    reduction: 14,
    normed: 3,
    permuted: 6,
    piped: 2,
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


def drawn(rng: random.Random, devices: Sequence[int], stages: Callable[[Drawing], None]) -> Program:
    """A program of stages that are drawn until values fit its types, its extents often multiples of these numbers."""
    while True:
        drawing = Drawing(rng, devices)
        try:
            stages(drawing)
            program = _finished(drawing)
            fitting_inputs(program, 0)
            fitting_inputs(program, 1)  # the judge runs it twice
        except Malformed:
            continue
        return program


def draw_program(rng: random.Random, devices: Sequence[int]) -> Program:
    """A program of 1 to 5 stages (some kinds are two), its extents often multiples of these numbers of devices."""

    def stages(drawing: Drawing) -> None:
        count = rng.choices((1, 2, 3, 4, 5), weights=(3, 4, 4, 2, 1))[0]
        if rng.random() < 0.35:  # what collectives are split, reordered and fused with
            rng.choice((contraction, contraction, reduction))(drawing)
            for _ in range(rng.randint(1, 3)):
                readers = (pointwise, pointwise, pointwise, broadcast, reduction, contraction, normed)
                rare = (strided, padded, appended, concatenated, permuted, halo, in_place)
                rng.choice((*readers, rng.choice(rare)))(drawing)
        while len(drawing.stages) < count:
            rng.choices(list(KINDS), weights=list(KINDS.values()))[0](drawing)

    return drawn(rng, devices, stages)


def draw_pipeline(rng: random.Random, devices: Sequence[int]) -> Program:
    """A program whose stages work on the micro-batches of a pipeline, a device's each, and send them on."""

    def stages(drawing: Drawing) -> None:
        count = next(iter(drawing.extents))
        drawing.extents[count] = rng.choice(devices)
        held = drawing.tensor("X", (count, *drawing.shape(0, 2)))
        names, before = iterators(len(held.shape)), rng.randint(1, 2)
        for at in range(before + 1 + rng.randint(0, 2)):
            y = drawing.result(held.shape, held.dtype)
            moved = [f"(v0 + {rng.choice((1, f'{count} - 1'))}) % {count}", *names[1:]]
            value = drawing.load(held, moved if at == before else names, y.dtype)
            value = value if at == before else drawing.mixed(value, held.shape, y.dtype)
            drawing.stage(held.shape, "S" * len(names), y, names, value)
            held = y

    return drawn(rng, devices, stages)


def draw_steps(rng: random.Random, devices: Sequence[int]) -> Program:
    """A program with a loop that carries state: a step makes it of the one before, of which it reads other elements."""

    def stages(drawing: Drawing) -> None:
        for _ in range(rng.randint(0, 1)):
            rng.choice((pointwise, contraction, broadcast))(drawing)
        source = drawing.source(low=1)
        count = drawing.extent()
        shape, held = source.shape, iterators(len(source.shape))
        state = drawing.result([f"{count} + 1", *shape], source.dtype)
        drawing.stage(shape, "S" * len(shape), state, ["0", *held], drawing.load(source, held, state.dtype))
        names = iterators(len(shape) + 1)
        drawing.making = state.name
        extents, kinds, combine = [count, *shape], "S" * len(names), None
        dim = rng.randint(1, len(shape))
        before = drawing.load(state, names, state.dtype)
        last = f"{_factor(shape[dim - 1])} - 1"

        def moved(index: str) -> str:
            return drawing.load(state, [index if i == dim else name for i, name in enumerate(names)], state.dtype)

        match rng.randrange(4):
            case 0:
                value = drawing.mixed(before, shape, state.dtype, names[1:])
            case 1:
                right, left = moved(f"T.min({names[dim]} + 1, {last})"), moved(f"T.max({names[dim]} - 1, 0)")
                value = rng.choice((f"{before} + {right} - {left}", f"T.max({before}, T.min({left}, {right}))"))
            case 2:
                value = moved(rng.choice(_maps(drawing, shape[dim - 1])).format(v=names[dim]))
                value = drawing.mixed(f"{value} - {before}", shape, state.dtype, names[1:])
            case _:
                extents, kinds = [*extents, shape[dim - 1]], kinds + "R"
                value, combine = moved(f"v{len(names)}"), rng.choice(("sum", "max", "min"))
                if rng.random() < 0.6:
                    weights = drawing.tensor("W", [shape[dim - 1], shape[dim - 1]], state.dtype)
                    value = f"{value} * {drawing.load(weights, [names[dim], f'v{len(names)}'], state.dtype)}"
        drawing.stage(extents, kinds, state, ["v0 + 1", *names[1:]], value, combine)
        y = drawing.result(shape)
        at = rng.choice((count, count, "1", "0"))
        value = drawing.load(state, [at, *held], y.dtype)
        drawing.stage(shape, "S" * len(shape), y, held, drawing.mixed(value, shape, y.dtype))
        if rng.random() < 0.4:
            rng.choice((pointwise, reduction, contraction))(drawing)

    return drawn(rng, devices, stages)


def _finished(drawing: Drawing) -> Program:
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
