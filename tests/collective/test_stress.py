"""A thousand random commands, on one launch after the other, are done right and leave nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import psutil
import tvm
from tvm import relax

from tvm_axe.collective import LoadedProgram, MeshTensor, Workers, launch, ops
from tvm_axe.collective.plan import VIEWS, chunk
from tvm_axe.layout import Mesh

MESHES = [{"tp": 2}, {"dp": 2, "tp": 2}, {"tp": 1}, {"tp": 3}]
COMMANDS, LAUNCHES = 1000, 5


def case(rng: np.random.Generator, n: int) -> tuple[str, list[int], list[tuple[int, ...]]]:
    """A collective, its numbers, and the shapes of its slabs."""
    shape = tuple(int(extent) for extent in rng.integers(1, 120, 2))
    dim = int(rng.integers(2))
    name = str(rng.choice(sorted(VIEWS.keys() - {"all_gather_in_place"})))

    def block(dim: int) -> tuple[int, ...]:
        return (*shape[:dim], chunk(shape[dim], n, 0).stop, *shape[dim + 1 :])

    return {
        "all_reduce": (name, [], [shape, shape]),
        "reduce_scatter": (name, [dim], [shape, block(dim)]),
        "all_gather": (name, [dim], [block(dim), shape]),
        "all_to_all": (name, [dim, 1 - dim], [block(dim), block(1 - dim)]),
        "send": (name, [int(rng.integers(-3, 4))], [shape, shape]),
        "reduce": (name, [int(rng.integers(n))], [shape, shape]),
        "broadcast": (name, [int(rng.integers(n))], [shape, shape]),
    }[name]


class Random:
    """Random commands on one launch, each checked."""

    def __init__(self, workers: Workers, rng: np.random.Generator) -> None:
        self.workers, self.mesh, self.rng = workers, workers.mesh, rng
        self.programs: list[tuple[LoadedProgram, str, str, list[int], list[MeshTensor]]] = []

    def command(self) -> None:
        """Call a collective, or a program with several in a row; now and then a new one, or away with one."""
        axis = str(self.rng.choice(self.mesh.names))
        name, numbers, shapes = case(self.rng, self.mesh[axis])
        if self.rng.random() < 0.03 or not self.programs:
            tensors = [self.workers.mesh_tensor(shape, "float32") for shape in shapes]
            self.programs.append((self.load(name, axis, numbers, tensors), name, axis, numbers, tensors))
        elif self.rng.random() < 0.03:
            program, *_, tensors = self.programs.pop(int(self.rng.integers(len(self.programs))))
            for item in (program, *tensors):
                self.workers.free(item)
        elif self.rng.random() < 0.5:
            program, name, axis, numbers, tensors = self.programs[int(self.rng.integers(len(self.programs)))]
            expected = self.fill(name, axis, numbers, tensors)
            views = [(tensor, axis if view else "slab") for tensor, view in zip(tensors, VIEWS[name])]
            if self.rng.random() < 0.9:
                self.workers.call(program, views)
            else:
                assert len(self.workers.time(program, views, 3)) == 3
            self.check(tensors[1], expected)
        else:
            tensors = [self.workers.mesh_tensor(shape, "float32") for shape in shapes]
            expected = self.fill(name, axis, numbers, tensors)
            getattr(self.workers, name)(*tensors, axis, *numbers)
            self.check(tensors[1], expected)
            for tensor in tensors:
                self.workers.free(tensor)

    def load(self, name: str, axis: str, numbers: list[int], tensors: list[MeshTensor]) -> LoadedProgram:
        """A program that does the collective 1 to 20 times, with barriers."""
        builder = relax.BlockBuilder()
        shapes = [(self.mesh[axis], *t.shape) if view else t.shape for t, view in zip(tensors, VIEWS[name])]
        params = [relax.Var(f"t{i}", relax.TensorType(shape, "float32")) for i, shape in enumerate(shapes)]
        arguments = [*params, *map(relax.prim_value, numbers), tvm.ir.StringImm(axis)]
        with builder.function("main", params, pure=False):
            for _ in range(int(self.rng.integers(1, 21))):
                for function, given in ((name, arguments), ("barrier", [])):
                    op = relax.ExternFunc(f"axe.{function}")
                    builder.emit(relax.Call(op, given, ty_args=[relax.TupleType([])]))
            builder.emit_func_output(relax.Tuple([]))
        return self.workers.load(builder.finalize(), "llvm")

    def fill(self, name: str, axis: str, numbers: list[int], tensors: list[MeshTensor]) -> np.ndarray:
        """Put fresh data into the source, poison the target, and return what is to become of it."""
        source, target = (np.empty((self.mesh.size, *tensor.shape), "float32") for tensor in tensors)
        source[...], target[...] = self.rng.standard_normal(source.shape), np.nan
        for device in range(self.mesh.size):
            for tensor, array in zip(tensors, (source, target)):
                tensor.slab(device)[...] = array[device]
        for device in range(self.mesh.size):
            group = list(self.mesh.group(device, axis))
            views = [array[group] if view else array[device] for array, view in zip((source, target), VIEWS[name])]
            ops.collective(name, *views, *numbers, rank=group.index(device))
            if VIEWS[name][1]:
                target[group] = views[1]
        return target

    def check(self, target: MeshTensor, expected: np.ndarray) -> None:
        for device in range(self.mesh.size):
            np.testing.assert_array_equal(target.slab(device), expected[device])


def left() -> dict[str, object]:
    """What a process can leave behind."""
    process = psutil.Process()
    named = Path("/dev/shm")
    return {
        "children": {child.pid for child in process.children(recursive=True)},
        "threads": process.num_threads(),
        "descriptors": sorted(os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()),
        "mappings of shared memory": sum("memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines()),
        "shared memory with a name": {path.name for path in named.iterdir()} if named.is_dir() else set(),
    }


def test_nothing_is_left_behind() -> None:
    rng = np.random.default_rng(2105)
    for _ in range(2):  # what stays for the whole process, such as loaded libraries, is there after the first half
        before = left()
        for launched in range(LAUNCHES):
            with launch(Mesh(MESHES[launched % len(MESHES)])) as workers:
                commands = Random(workers, rng)
                for _ in range(COMMANDS // (2 * LAUNCHES)):
                    commands.command()
                del commands
    assert left() == before
