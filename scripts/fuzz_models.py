"""Random Relax models, shared over meshes at random, against upstream's build of the same on one device.

    python scripts/fuzz_models.py --count 100 --seed 0 [--symbolic 0.6] [--delays]

Each model is a chain of operators on values of two, three or four dimensions, with reuse of earlier values, constants,
tuples and several results. Extents of every other model are symbolic here and there, and it is called at several sizes,
in any order. Each is compiled for a mesh of 2, 3, 4, 2 x 2 or 3 x 2 threads, under a random limit on its weights and
with rates at random, so that few bytes are worth sharing; half of them with parameters and variables pinned at random,
some with the schedules that kernels take by default, some without. It is called on whole arrays and in a session, with
weights at random, whose results go into a second call. Prints each model that is wrong or that fails, with its seed.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax.backend import cpu_generic

import tvm_axe as axe
from tvm_axe.analysis.sizes import number
from tvm_axe.collective.engine import HOST, Rates
from tvm_axe.executable import Session, write_safetensors
from tvm_axe.executable.model import MeshModelExecutable, Told
from tvm_axe.executable.signatures import signatures
from tvm_axe.executable.spread import Spread
from tvm_axe.layout import Link
from tvm_axe.machines.target import resolve_target
from tvm_axe.pipeline import SCHEDULES, TILE_KERNELS, Work, run
from tvm_axe.relax import share_model
from tvm_axe.relax.sharing import described
from tvm_axe.relax.workspace import with_workspaces

MOST = 4096
"""Elements of a value at most."""
LARGEST = 7
"""What a size is at most."""
Extent: TypeAlias = "int | tirx.Expr"
Shape = list[Extent]
SLOW = Rates(Link(latency=0.0, bandwidth=1e10), memory=1e12, operations=2e10)
op = relax.op


class Model:
    """A random model.

    Parameters
    ----------
    seed : int
        What it is drawn from.
    symbolic : float
        How likely an extent of a model with sizes is one of them.
    """

    def __init__(self, seed: int, symbolic: float = 0.3) -> None:
        self.symbolic = symbolic
        self.rng = np.random.default_rng(seed)
        self.sizes = [tirx.Var(name, "int64") for name in "nm"] if seed % 2 else []
        self.builder = relax.BlockBuilder()
        self.params: list[relax.Var] = []
        self.values: list[relax.Var] = []
        for _ in range(self.rng.integers(1, 3)):
            self.values.append(self.parameter(self.shape()))
        self.inputs = len(self.params)
        self.module = self.made()

    def pick(self, *choices: int) -> int:
        return int(self.rng.choice(choices))

    def shape(self) -> Shape:
        return [self.extent(1, 2, 3, 4, 6, 8, 12) for _ in range(self.pick(2, 3, 3, 4))]

    def extent(self, *choices: int) -> Extent:
        """One of some numbers, or a size, if there are any."""
        if self.sizes and self.rng.random() < self.symbolic:
            return self.sizes[int(self.rng.integers(len(self.sizes)))]
        return self.pick(*choices)

    def parameter(self, shape: Shape) -> relax.Var:
        if self.rng.random() < 0.15 and self.values and all(isinstance(extent, int) for extent in shape):
            return self.constant(shape)
        self.params.append(relax.Var(f"p{len(self.params)}", relax.TensorType(shape, "float32")))
        return self.params[-1]

    def constant(self, shape: Sequence[int]) -> relax.Expr:
        return relax.const(self.rng.standard_normal(shape).astype("float32") / max(1, shape[-1] if shape else 1) ** 0.5)

    def made(self) -> tvm.IRModule:
        # Every size is the extent of a parameter.
        known = [size for size in self.sizes for param in self.params for n in param.ty.shape if size.same_as(n)]
        self.sizes = [size for size in self.sizes if any(size.same_as(each) for each in known)]
        with self.builder.function("forward", attrs={"num_input": self.inputs}):
            with self.builder.dataflow():
                for _ in range(self.rng.integers(2, 9)):
                    made = self.step(self.values[int(self.rng.integers(len(self.values)))])
                    if made is not None:
                        self.values.append(made)
                results = self.values[-self.pick(1, 1, 2) :]
                outs = [self.builder.emit_output(self.builder.normalize(op.multiply(each, relax.const(np.float32(1)))))
                        for each in results]  # fmt: skip
            self.builder.emit_func_output(relax.Tuple(outs), self.params)
        return self.builder.get()

    def step(self, x: relax.Var) -> relax.Var | None:
        steps: list[Callable[[relax.Var, Shape], relax.Expr | None]] = [
            self.matmul, self.matmul, self.linear, self.linear, self.pointwise, self.pointwise, self.reshape,
            self.transpose, self.softmax, self.norm, self.reduce, self.split, self.concatenate, self.add, self.repeat,
            self.pad, self.conv, self.bias, self.lookup,
        ]  # fmt: skip
        shape = extents(x)
        made = steps[int(self.rng.integers(len(steps)))](x, shape)
        if made is None:
            return None
        made = self.builder.normalize(made)
        most = dict.fromkeys(self.sizes, LARGEST)
        whole = [at_sizes(n, most) for n in made.ty.shape]
        return self.builder.emit(made) if np.prod(whole) <= MOST else None

    def matmul(self, x: relax.Var, shape: Shape) -> relax.Expr:
        return op.matmul(x, self.parameter([*shape[:-2], shape[-1], self.pick(2, 4, 6, 8)]))

    def linear(self, x: relax.Var, shape: Shape) -> relax.Expr:
        weight = self.parameter([self.pick(3, 4, 8, 12), shape[-1]])
        return op.matmul(x, self.builder.emit(op.permute_dims(weight)))

    def bias(self, x: relax.Var, shape: Shape) -> relax.Expr:
        return op.add(x, self.parameter([shape[-1]]))

    def pointwise(self, x: relax.Var, _: Shape) -> relax.Expr:
        return [op.nn.relu, op.nn.gelu, op.nn.silu, op.tanh, op.negative][int(self.rng.integers(5))](x)

    def reshape(self, x: relax.Var, shape: Shape) -> relax.Expr:
        if self.rng.random() < 0.5 and len(shape) > 2:
            at = int(self.rng.integers(len(shape) - 1))
            return op.reshape(x, [*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]])
        at = int(self.rng.integers(len(shape)))
        if not isinstance(shape[at], int):
            return x
        part = int(self.rng.choice([n for n in range(1, shape[at] + 1) if shape[at] % n == 0]))
        return op.reshape(x, [*shape[:at], part, shape[at] // part, *shape[at + 1 :]])

    def transpose(self, x: relax.Var, shape: Shape) -> relax.Expr:
        return op.permute_dims(x, [int(n) for n in self.rng.permutation(len(shape))])

    def softmax(self, x: relax.Var, shape: Shape) -> relax.Expr:
        return op.nn.softmax(x, axis=int(self.rng.integers(len(shape))))

    def norm(self, x: relax.Var, shape: Shape) -> relax.Expr:
        if self.rng.random() < 0.5:
            return op.nn.rms_norm(x, self.parameter([shape[-1]]), axes=[-1])
        return op.nn.layer_norm(x, self.parameter([shape[-1]]), self.parameter([shape[-1]]), axes=[-1])

    def reduce(self, x: relax.Var, shape: Shape) -> relax.Expr | None:
        if len(shape) < 3:
            return None
        how = [op.sum, op.mean, op.max, op.min][int(self.rng.integers(4))]
        return how(x, axis=[int(self.rng.integers(len(shape)))], keepdims=bool(self.rng.integers(2)))

    def split(self, x: relax.Var, shape: Shape) -> relax.Expr | None:
        at = int(self.rng.integers(len(shape)))
        if not isinstance(shape[at], int) or shape[at] < 2:
            return None
        parts = self.builder.emit(op.split(x, [int(self.rng.integers(1, shape[at]))], axis=at))
        return relax.TupleGetItem(parts, int(self.rng.integers(2)))

    def concatenate(self, x: relax.Var, shape: Shape) -> relax.Expr:
        at = int(self.rng.integers(len(shape)))
        other = self.parameter([*shape[:at], self.extent(1, 2, 4), *shape[at + 1 :]])
        return op.concat([x, other] if self.rng.integers(2) else [other, x], axis=at)

    def lookup(self, x: relax.Var, shape: Shape) -> relax.Expr | None:
        if not all(isinstance(n, int) for n in shape):
            return None
        rows, *rest = self.pick(3, 4, 7, 12), *shape[:-1]
        return op.take(self.parameter([rows, shape[-1]]), relax.const(self.rng.integers(0, rows, rest)), axis=0)

    def add(self, x: relax.Var, shape: Shape) -> relax.Expr | None:
        same = [v for v in self.values if str(extents(v)) == str(shape) and not v.same_as(x)]
        return op.add(x, same[0]) if same else None

    def repeat(self, x: relax.Var, shape: Shape) -> relax.Expr:
        return op.repeat(x, 2, axis=int(self.rng.integers(len(shape))))

    def pad(self, x: relax.Var, shape: Shape) -> relax.Expr:
        return op.nn.pad(x, [int(n) for n in self.rng.integers(0, 3, 2 * len(shape))])

    def conv(self, x: relax.Var, shape: Shape) -> relax.Expr | None:
        if len(shape) != 4 or not all(isinstance(n, int) and n > 1 for n in shape[2:]):
            return None
        return op.nn.conv2d(x, self.parameter([self.pick(2, 4, 6), shape[1], 3, 3]), padding=1)


def pins(model: Model, mesh: axe.Mesh, rng: np.random.Generator) -> dict[str, dict[str, int | None]]:
    """Some parameters and variables of a model with a dimension along some axes, or none."""
    (block,) = model.module["forward"].body.blocks
    values = [*model.module["forward"].params, *(binding.var for binding in block.bindings)]
    found: dict[str, dict[str, int | None]] = {}
    for var in values:
        if rng.random() < 0.2 and isinstance(var.ty, relax.TensorType):
            known = [not isinstance(extent, int) or extent > 1 for extent in extents(var)]
            dims = [None, *(dim for dim, can_be in enumerate(known) if can_be)]
            found[var.name] = {axis: dims[int(rng.integers(len(dims)))] for axis in mesh.names if rng.random() < 0.7}
    return found


def extents(value: relax.Expr) -> Shape:
    return [int(extent) if isinstance(extent, tirx.IntImm) else extent for extent in value.ty.shape]


def at_sizes(extent: tirx.Expr, sizes: Mapping[tirx.Var, int]) -> int:
    found = number(extent, sizes)
    assert found is not None  # it is arithmetic
    return found


def alone(module: tvm.IRModule) -> Callable[[list[np.ndarray]], list[np.ndarray]]:
    """What upstream's own build of a model computes on one device.

    Its passes are all but the one that makes views of reshapes, which fails of extents such as n + 4.
    """
    target = tvm.target.Target("llvm")
    passes = [
        *cpu_generic.library_dispatch_passes(target),
        *cpu_generic.legalize_passes(target),
        relax.transform.ToNonDataflow(),
        relax.transform.RemovePurityChecking(),
        relax.transform.CallTIRRewrite(),
        *cpu_generic.finalize_passes(target),
    ]
    built = relax.build(module, target, relax_pipeline=tvm.transform.Sequential(passes))
    machine = relax.VirtualMachine(built, tvm.cpu())
    return lambda arrays: [
        each.numpy() for each in machine["forward"](*[tvm.runtime.tensor(array) for array in arrays])
    ]


@contextmanager
def launched() -> Iterator[dict[int, axe.Workers]]:
    """Workers on threads, each on another mesh."""
    meshes = [{"tp": 2}, {"tp": 3}, {"tp": 4}, {"dp": 2, "tp": 2}, {"dp": 2, "tp": 2}, {"dp": 3, "tp": 2}]
    found = {number: axe.launch(axe.Mesh(mesh), engine="threads") for number, mesh in enumerate(meshes)}
    try:
        yield found
    finally:
        for workers in found.values():
            workers.close()


def differs(found: Sequence[Any], true: Sequence[np.ndarray]) -> str:
    """Which result is wrong; empty if none is."""
    for place, (out, want) in enumerate(zip(map(np.asarray, found), true, strict=True)):
        scale = max(float(np.abs(want).max(initial=0)), 1e-3)
        if out.shape != want.shape or not np.allclose(out, want, rtol=1e-4, atol=1e-4 * scale, equal_nan=True):
            worst = float(np.abs(out - want).max()) if out.shape == want.shape else float("inf")
            return f"result {place} differs by {worst:.2e}"
    return ""


def in_session(
    model: Model,
    exe: MeshModelExecutable,
    on: axe.Workers,
    arrays: list[np.ndarray],
    reference: Callable[[list[np.ndarray]], list[np.ndarray]],
    rng: np.random.Generator,
) -> str:
    """What is wrong in a session with some of the parameters as weights, out of a file or not; empty if nothing is.

    What calls find in memory that nothing was written to is no number. Results go into a second call where they fit.
    """
    names = [str(param.name) for param in model.params]
    constant = [all(isinstance(n, int) for n in extents(param)) for param in model.params]
    chosen = [name for name, is_constant in zip(names, constant) if is_constant and rng.integers(2)]
    weights: Any = {name: array for name, array in zip(names, arrays) if name in chosen}
    with tempfile.TemporaryDirectory() as folder:
        if weights and rng.integers(2):
            write_safetensors(Path(folder) / "weights", weights)
            weights = Path(folder) / "weights"
        with exe.load(on, weights) as session:
            poisoned(session)
            inputs: list[Any] = [array for name, array in zip(names, arrays) if name not in chosen]
            first = session.forward(*inputs)
            wrong = differs(first, reference(arrays))
            if wrong:
                return wrong
            left = [name for name in names if name not in chosen]
            again = list(arrays)
            for at, name in enumerate(left):
                fits = [each for each in first if each.shape == inputs[at].shape]
                if fits and rng.integers(2):
                    inputs[at] = fits[int(rng.integers(len(fits)))]
                    again[names.index(name)] = inputs[at].numpy()
            poisoned(session)
            return differs(session.forward(*inputs), reference(again))


def poisoned(session: Session) -> None:
    """Fill what a call of a session may use, and is to write first."""
    pool = session._memory._pool
    used = {id(value.tensor) for value in gc.get_objects() if type(value) is Spread}
    for tensor in pool._all:
        if id(tensor) not in used:
            for device in range(1 if tensor.shared else session._memory._program.shared.mesh.size):
                tensor.slab(device).reshape(-1).view("uint8")[:] = 0xFF  # as large as it was used last


def check(seed: int, workers: dict[int, axe.Workers], symbolic: float = 0.3) -> tuple[str, float]:
    """What is wrong with one model, empty if nothing is, and the part of its products that was shared."""
    model, rng = Model(seed, symbolic), np.random.default_rng(seed + 1_000_000)
    reference = alone(model.module)
    on = workers[int(rng.integers(len(workers)))]
    devices = on.mesh.size
    memory = float(rng.choice([0.0, 1 / devices + 0.05, 1.0]))
    rates = HOST if rng.integers(4) == 0 else SLOW
    pinned = pins(model, on.mesh, rng) if rng.integers(2) else None
    if pinned:
        memory = 1.0  # what is pinned whole is more than less would allow
    shared = share_model(model.module, on.mesh, memory=memory, rates=rates, page=on.page, pins=pinned)
    target = resolve_target("llvm")
    work = Work(shared.module, target)
    if rng.integers(2):
        work = run(work, (SCHEDULES, TILE_KERNELS))
    runnable, workspaces = with_workspaces(work.module)
    functions = [each._replace(num_input=None) for each in signatures(model.module)]
    exe = MeshModelExecutable(functions, shared, Told.of(shared), shared.module, runnable, workspaces, target, {})
    for _ in range(4 if model.sizes else 2):
        sizes = {size: int(rng.integers(1, LARGEST + 1)) for size in model.sizes}
        shapes = [[at_sizes(n, sizes) for n in param.ty.shape] for param in model.params]
        arrays = [rng.standard_normal(shape).astype("float32") / np.float32(2) for shape in shapes]
        found, true = exe.run(on, *arrays), reference(arrays)
        at = ", ".join(f"{size.name} = {n}" for size, n in sizes.items())
        wrong = differs(found if isinstance(found, tuple) else (found,), true)
        if wrong:
            return f"{wrong} on {on.mesh} at {at}\n{described(shared)}", 0.0
    wrong = in_session(model, exe, on, arrays, reference, rng)
    if wrong:
        return f"{wrong} in a session on {on.mesh} at {at}\n{described(shared)}", 0.0
    return "", shared.functions["forward"].chosen.divided


def main(count: int, seed: int, symbolic: float = 0.3) -> int:
    """Check `count` models from `seed` on, as symbolic as told; return how many were wrong or failed."""
    logging.getLogger("tvm_axe").setLevel(logging.ERROR)
    bad, parts, start = 0, [], time.perf_counter()
    with launched() as workers:
        for at in range(seed, seed + count):
            try:
                wrong, part = check(at, workers, symbolic)
            except Exception:
                wrong, part = traceback.format_exc(limit=-4), 0.0
            parts.append(part)
            if wrong:
                bad += 1
                print(f"seed {at}: {wrong}", flush=True)
    seconds = time.perf_counter() - start
    print(f"{count} models, {bad} wrong, {np.mean(parts):.0%} of products shared, {seconds:.0f} s")
    return bad


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--symbolic", type=float, default=0.3, help="how likely an extent is symbolic, of every other")
    parser.add_argument("--delays", action="store_true", help="have workers stop at random round everything they call")
    options = parser.parse_args()
    if options.delays:
        import fuzz_delays

        fuzz_delays.install()
    sys.exit(bool(main(options.count, options.seed, options.symbolic)))
