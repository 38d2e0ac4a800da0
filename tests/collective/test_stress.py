"""A thousand random commands, on one launch after the other, are done right and leave nothing behind.

python tests/collective/test_stress.py --commands 10000 --launches 200 --engine threads
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
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
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "children": {child.pid for child in process.children(recursive=True)},
        "threads": process.num_threads(),
        "descriptors": sorted(os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()),
        "mappings of shared memory": sum("memfd:" in line for line in maps),
        "mappings of files in /tmp": sum(" /tmp/" in line for line in maps),
        "shared memory with a name": {path.name for path in named.iterdir()} if named.is_dir() else set(),
    }


def soak(rng: np.random.Generator, commands: int, launches: int, engine: str) -> Iterator[int]:
    """Do random commands on one launch after the other; yields how many launches are done."""
    for launched in range(launches):
        with launch(Mesh(MESHES[launched % len(MESHES)]), engine=engine) as workers:
            random = Random(workers, rng)
            for _ in range(commands // launches):
                random.command()
            del random
        yield launched + 1


@pytest.mark.parametrize("engine", ["processes", "threads"])
def test_nothing_is_left_behind(engine: str) -> None:
    rng = np.random.default_rng(2105)
    for _ in range(2):  # what stays for the whole process, such as loaded libraries, is there after the first half
        gc.collect()  # not least what other tests have left
        before = left()
        assert list(soak(rng, COMMANDS // 2, LAUNCHES, engine))
    gc.collect()
    assert left() == before


def main() -> None:
    """Print what this process has, now and then, while it does random commands on many launches."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--commands", type=int, default=10_000)
    parser.add_argument("--launches", type=int, default=200)
    parser.add_argument("--engine", default="processes")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started, process = time.monotonic(), psutil.Process()
    for launches in soak(np.random.default_rng(options.seed), options.commands, options.launches, options.engine):
        if launches % max(options.launches // 10, 1) == 0:
            gc.collect()
            found, mapped = left(), len(Path("/proc/self/maps").read_text().splitlines())
            print(
                f"{launches} launches, {time.monotonic() - started:.0f} s: {process.memory_info().rss >> 20} MiB, "
                f"{mapped} mappings, {len(found['descriptors'])} descriptors, "
                f"{found['threads']} threads, {len(found['children'])} processes, "
                f"{len(found['shared memory with a name'])} files in /dev/shm",
                flush=True,
            )


if __name__ == "__main__":
    main()
