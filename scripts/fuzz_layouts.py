"""Redistribute tensors between layouts drawn at random, and compare with numpy: values, and bytes with the plan's.

    python scripts/fuzz_layouts.py --count 2000 --mesh tp=3
    python scripts/fuzz_layouts.py --count 200 --engine processes --json

Layouts are blocks (even and uneven, several axes on a dimension), cyclic blocks, other orders of devices and of memory,
padded rows, replicas over a part of the mesh, one device or a few, and terms of sums. Each slab is poisoned before.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

import tvm_axe as axe
from tvm_axe.collective import MeshTensor, Workers, launch
from tvm_axe.collective.plan import received as received_of
from tvm_axe.errors import LayoutError
from tvm_axe.layout import Iter, Layout, Mesh, Placement, plan_redistribution
from tvm_axe.layout.holding import Holding, terms_between
from tvm_axe.layout.redistributing import Step

MESHES = ("tp=2", "tp=3", "tp=4", "x=2,y=2", "x=2,y=3")
DTYPES = ("float32", "float16", "int8", "int32", "float64")
ORDERS = ("row-major", "row-major", "column-major", "padded")


@dataclass(frozen=True)
class Pair:
    """A tensor to move: what it is, how it lies, and how it is to lie."""

    shape: tuple[int, ...]
    dtype: str
    source: Layout
    target: Layout

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape} from {self.source} to {self.target}"


def draw_pair(rng: random.Random, mesh: Mesh) -> Pair:
    """A pair of layouts that `mesh` can hold, of one tensor; half of the pairs are of blocks."""
    shape = tuple(rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 12, 19)) for _ in range(rng.randint(1, 3)))
    draw = _blocks if rng.random() < 0.5 else _layout
    return Pair(shape, rng.choice(DTYPES), draw_layout(rng, shape, mesh, draw), draw_layout(rng, shape, mesh, draw))


Draw = Callable[[random.Random, Sequence[int], Mesh], Layout]


def draw_layout(rng: random.Random, shape: tuple[int, ...], mesh: Mesh, draw: Draw) -> Layout:
    """One layout of a tensor; drawn again until it says one thing only."""
    while True:
        try:
            layout = draw(rng, shape, mesh)
            Holding.of(layout, shape, mesh)
        except LayoutError:
            continue
        return layout


def _blocks(rng: random.Random, shape: Sequence[int], mesh: Mesh) -> Layout:
    """Contiguous blocks, row-major, replicas and terms of sums on whole axes: what collectives lead to."""
    cuts = [list[str]() for _ in shape]
    partial = set[str]()
    for axis in rng.sample(mesh.names, len(mesh.names)):
        role = rng.choice(("cut", "cut", "copies", "sum"))
        if role == "cut":
            cuts[rng.randrange(len(shape))].append(axis)
        elif role == "sum":
            partial.add(axis)
    return Placement(tuple(map(tuple, cuts)), frozenset(partial)).layout(shape, mesh)


def _layout(rng: random.Random, shape: Sequence[int], mesh: Mesh) -> Layout:
    digits: list[list[tuple[int, str]]] = [[] for _ in shape]  # of each dimension, major first: extent and axis
    terms, copies, offset = list[Iter](), list[Iter](), dict[str, int]()
    for axis, size in mesh.axes.items():
        role = rng.choice(("cut", "cut", "cut", "copies", "copies", "one device", "sum", "part"))
        reverse = rng.random() < 0.2
        step, start = (-1, size - 1) if reverse else (1, 0)
        if role == "cut":
            digits[rng.randrange(len(shape))].append((step * size, axis))
        elif role == "sum":
            terms.append(Iter(size, step, axis))
        elif role == "copies":
            copies.append(Iter(size, 1, axis))
        elif role == "part" and size % 2 == 0 and size > 2:  # pairs of devices hold the same half
            outer = rng.random() < 0.5
            digits[rng.randrange(len(shape))].append((-2 if outer else 2, f"{axis}/2"))
            copies.append(Iter(size // 2, 1 if outer else 2, axis))
        else:
            offset[axis] = rng.randrange(size)
        if role in ("cut", "sum") and reverse:
            offset[axis] = start
    iters: list[list[tuple[int, int, str]]] = []  # extent, stride, axis ("" is memory, its stride still to come)
    for extent, cuts in zip(shape, digits):
        rng.shuffle(cuts)
        parts = []
        for size, axis in cuts:
            name, _, half = axis.partition("/")
            count = abs(size)
            stride = (mesh[name] // 2 if size < 0 else 1) if half else (-1 if size < 0 else 1)
            parts.append((count, stride, name))
        blocks = math.prod(count for count, _, _ in parts)
        inner = rng.choice((1, 2, 3)) if rng.random() < 0.3 else 0
        if inner and blocks > 1:  # cyclic: blocks of `inner` are dealt out
            rounds = -(-extent // (blocks * inner))
            iters.append([(rounds, 1, ""), *parts, (inner, 1, "")])
        else:
            iters.append([*parts, (-(-extent // blocks), 1, "")])
    local = [(dim, place) for dim, parts in enumerate(iters) for place, part in enumerate(parts) if not part[2]]
    order = rng.choice(ORDERS)
    stride = 1
    for number, (dim, place) in enumerate(local if order == "column-major" else local[::-1]):
        extent = iters[dim][place][0]
        iters[dim][place] = (extent, stride, "m")
        stride *= extent
        stride += 1 if order == "padded" and number == 0 else 0
    shard = [Iter(*part) for parts in iters for part in parts]
    return Layout([*terms, *shard], copies, offset)


def check(pair: Pair, workers: Workers, rng: np.random.Generator) -> str | None:
    """What is wrong, if anything is."""
    mesh = workers.mesh
    array = rng.integers(-5, 6, pair.shape).astype(pair.dtype)
    tensor = workers.mesh_tensor(pair.shape, pair.dtype, layout=pair.source)
    moved: MeshTensor | None = None
    try:
        for device in range(mesh.size):
            tensor.slab(device)[...] = 99
        tensor.scatter(array)
        terms = _spread(tensor, rng)
        before = [tensor.slab(device).copy() for device in range(mesh.size)]
        moved = axe.redistribute(tensor, pair.target)
        found = moved.gather()
        if not np.array_equal(found, array + terms):
            return f"{np.sum(found != array + terms)} of {array.size} elements are wrong"
        if not all(np.array_equal(tensor.slab(device), old) for device, old in enumerate(before)):
            return "the source was changed"
        return _copies(moved) or _bytes(pair, mesh)
    finally:
        workers.free(tensor)
        if moved is not None:
            workers.free(moved)


def _spread(tensor: MeshTensor, rng: np.random.Generator) -> np.ndarray:
    """Fill the terms of a sum but the first, alike where there are copies; returns what they add to the whole."""
    holding = tensor.holding
    assert holding is not None
    extra = np.zeros(holding.shape, tensor.slab(0).dtype)
    of_term: dict[tuple[int, ...], np.ndarray] = {}
    for device in range(tensor.workers.mesh.size):
        term, held = holding.term(device), holding.held(device)
        if any(term):
            if term not in of_term:
                of_term[term] = rng.integers(-5, 6, holding.shape).astype(extra.dtype)
                extra += of_term[term]
            tensor.slab(device).reshape(-1)[held.addresses] = of_term[term].reshape(-1)[held.elements]
    return extra


def _copies(tensor: MeshTensor) -> str | None:
    """Whether a copy differs from another."""
    holding = tensor.holding
    assert holding is not None
    seen: dict[tuple[tuple[int, ...], int], np.ndarray] = {}
    for device in range(tensor.workers.mesh.size):
        held = holding.held(device)
        if not len(held.elements):
            continue
        values = tensor.slab(device).reshape(-1)[held.addresses]
        first = seen.setdefault((holding.term(device), int(held.elements[0])), values)
        if not np.array_equal(first, values):
            return f"device {device} holds another copy than the first"
    return None


def _bytes(pair: Pair, mesh: Mesh) -> str | None:
    """Whether what the engine moves in each step is what the plan says."""
    plan = plan_redistribution(pair.source, pair.target, mesh, pair.dtype, pair.shape)
    before = Holding.of(pair.source, pair.shape, mesh)
    for step in plan.steps:
        after = Holding.of(pair.target, pair.shape, mesh)
        if step.after is not None:
            after = Holding.in_blocks(pair.shape, mesh, step.after.cuts, partial=step.after.partial)
        moved = max(_moved(step, before, after)) * np.dtype(pair.dtype).itemsize
        if moved != step.bytes:
            return f"{step.kind} moves {moved} bytes, and the plan says {step.bytes}"
        before = after
    return None


def _moved(step: Step, source: Holding, target: Holding) -> list[int]:
    """The elements that each device receives: counted in the engine's own moves, of a kernel element by element."""
    shape, mesh = source.shape, source.mesh
    received = [0] * mesh.size
    if step.kind in ("all_gather", "all_reduce", "reduce_scatter", "all_to_all"):
        (axis,) = step.axes
        numbers = [number for number in (step.gathered, step.cut) if number is not None]
        for device in range(mesh.size):
            group = mesh.group(device, axis)
            slabs = [_unpadded(holding, group) for holding in (source, target)]
            found = received_of(step.kind, *slabs, numbers, mesh[axis])
            received[device] = found[group.index(device)]
        return received
    terms = terms_between(source, target)
    for device in range(mesh.size):
        coords, held = mesh.coords(device), target.held(device)
        own = target.digits(coords)
        index = np.unravel_index(held.elements, shape) if shape else ()
        becomes = [np.ones(held.elements.shape, bool)]
        for it, digit in terms.made.items():
            becomes.append(np.equal(own[it], 0 if digit is None else source.number(digit, index)))
        needed = np.logical_and.reduce(np.broadcast_arrays(*becomes))
        for numbers in np.ndindex(*(int(it.extent) for it in terms.summed)):
            term = {it: own[it] for it in terms.stay} | dict(zip(terms.summed, numbers))
            at = source.device(index, coords, term)
            here = [np.broadcast_to(np.asarray(at[axis]) == coords[axis], held.elements.shape) for axis in mesh.names]
            received[device] += int(np.sum(needed & ~np.logical_and.reduce(here)))
    return received


def _unpadded(holding: Holding, group: Sequence[int]) -> tuple[int, ...]:
    """The slab of a group of devices, less what is padding on all of them."""
    indices = [found for device in group if (found := holding.indices(device)) is not None]
    return tuple(max((len(found[dim]) for found in indices), default=0) for dim in range(len(holding.shape)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first pair; the next one has the next")
    parser.add_argument("--count", type=int, default=200, help="pairs for each mesh")
    parser.add_argument("--mesh", action="append", help=f"such as x=2,y=3, as often as you like (default: {MESHES})")
    parser.add_argument("--engine", default="threads", help="threads or processes")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    args = parser.parse_args()
    start, wrong = time.time(), []
    kinds: Counter[str] = Counter()
    for text in args.mesh or MESHES:
        mesh = Mesh.parse(text)
        with launch(mesh, engine=args.engine) as workers:
            for seed in range(args.seed, args.seed + args.count):
                pair = draw_pair(random.Random(seed), mesh)
                plan = plan_redistribution(pair.source, pair.target, mesh, pair.dtype, pair.shape)
                kinds.update(step.kind for step in plan.steps)
                found = check(pair, workers, np.random.default_rng(seed))
                if found is not None:
                    wrong.append(f"{text} --seed {seed}: {pair}: {found}")
                    print(wrong[-1], file=sys.stderr)
    said = {"pairs": args.count * len(args.mesh or MESHES), "wrong": wrong, "steps": dict(kinds)}
    said |= {"engine": args.engine, "seconds": round(time.time() - start, 1)}
    print(json.dumps(said) if args.json else f"{said['pairs']} pairs, {len(wrong)} wrong; steps: {said['steps']}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
