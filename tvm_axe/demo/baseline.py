"""What the demo is measured against: numpy in one process, and numpy in two processes with an all-reduce.

Both call the OpenBLAS that numpy brings. The one process lets it use every core; the two processes let it use one core
each, and add up their halves of the product through shared memory, each the half of the rows that is its own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.synchronize import Semaphore
from typing import NamedTuple

import numpy as np

__all__ = ["AllReduce", "Problem", "time_one_process"]

WORKERS = 2


class Problem(NamedTuple):
    """The block's inputs, float32: X [tokens, inner], W [inner, outer], bias [outer], residual [tokens, outer]."""

    X: np.ndarray
    W: np.ndarray
    bias: np.ndarray
    residual: np.ndarray

    @staticmethod
    def random(tokens: int, inner: int, outer: int, seed: int) -> Problem:
        """Standard normal inputs, W scaled so that the product is of the order of 1."""
        rng = np.random.default_rng(seed)
        shapes = [(tokens, inner), (inner, outer), (outer,), (tokens, outer)]
        x, w, bias, residual = (rng.standard_normal(shape, dtype="float32") for shape in shapes)
        return Problem(x, w / np.float32(np.sqrt(inner)), bias, residual)

    def reference(self) -> np.ndarray:
        """Return the result in float64."""
        x, w, bias, residual = (array.astype("float64") for array in self)
        return np.maximum(x @ w + bias, 0) + residual


def _epilogue(product: np.ndarray, bias: np.ndarray, residual: np.ndarray) -> None:
    """Compute ``product = relu(product + bias) + residual``, in place as numpy is fastest at it."""
    np.add(product, bias, out=product)
    np.maximum(product, 0, out=product)
    np.add(product, residual, out=product)


def time_one_process(problem: Problem, repeat: int) -> list[float]:
    """Seconds of each of `repeat` runs in this process, behind one that is not counted."""
    out = np.empty_like(problem.residual)

    def run() -> None:
        np.matmul(problem.X, problem.W, out=out)
        _epilogue(out, problem.bias, problem.residual)

    run()
    return [_seconds(run) for _ in range(repeat)]


def _seconds(run: Callable[[], None]) -> float:
    """Return how long one run takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class AllReduce:
    """Two processes that stay up: each multiplies half of the reduction, both add up, both compute the epilogue.

    Use it as a context manager; leaving it ends the processes and frees the shared memory.
    """

    def __init__(self, problem: Problem) -> None:
        # Partial products and sums, a slab for each worker.
        self._shape = (2, WORKERS, *problem.residual.shape)
        self._memory = SharedMemory(create=True, size=4 * int(np.prod(self._shape)))
        self._pipes: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        try:
            self._start(problem)
        except BaseException:
            self.__exit__()
            raise

    def _start(self, problem: Problem) -> None:
        """Start the processes and send each its columns of X and its rows of W."""
        # Fresh interpreters, as a fork would take over this process's threads and its BLAS, already set up.
        spawn = multiprocessing.get_context("spawn")
        # Kept here, as a semaphore goes with the last of its objects, and a worker opens it by name.
        self._arrived = [spawn.Semaphore(0) for _ in range(WORKERS)]
        with _environment(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"):
            for rank in range(WORKERS):
                ours, theirs = spawn.Pipe()
                self._pipes.append(ours)
                arguments = (rank, self._memory.name, self._shape, self._arrived, theirs)
                process = spawn.Process(target=_worker, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
        inner = problem.X.shape[1]
        for rank, pipe in enumerate(self._pipes):
            own = slice(rank * inner // WORKERS, (rank + 1) * inner // WORKERS)
            pipe.send(Problem(problem.X[:, own].copy(), problem.W[own].copy(), problem.bias, problem.residual))

    def __enter__(self) -> AllReduce:
        return self

    def __exit__(self, *exception: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            # A closed pipe ends a worker that waits for orders; one that doesn't end is stuck.
            process.join(timeout=5)
            process.kill()
            process.join()
        self._memory.close()
        self._memory.unlink()

    def time(self, repeat: int) -> list[float]:
        """Seconds that the slower worker takes for each of `repeat` runs, behind one that is not counted."""
        for pipe in self._pipes:
            pipe.send(repeat)
        return [max(run) for run in zip(*(pipe.recv() for pipe in self._pipes))]

    def results(self) -> np.ndarray:
        """Return a copy of every worker's result, [worker, tokens, outer]."""
        return np.ndarray(self._shape, "float32", self._memory.buf)[1].copy()


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Set environment variables for the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _worker(rank: int, memory: str, shape: tuple[int, ...], arrived: list[Semaphore], orders: Connection) -> None:
    """Take one process's share of the problem, then run as often as it is told, until the pipe closes."""
    # Ctrl-C reaches the whole group; it is for the process that gives the orders.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    shared = SharedMemory(name=memory)
    partials, sums = np.ndarray(shape, "float32", shared.buf)
    problem: Problem = orders.recv()
    tokens = shape[2]
    own = slice(rank * tokens // WORKERS, (rank + 1) * tokens // WORKERS)
    peer = 1 - rank

    def barrier() -> None:
        arrived[peer].release()
        arrived[rank].acquire()

    def run() -> None:
        np.matmul(problem.X, problem.W, out=partials[rank])
        barrier()
        np.add(partials[0, own], partials[1, own], out=sums[rank, own])
        sums[peer, own] = sums[rank, own]
        barrier()
        _epilogue(sums[rank], problem.bias, problem.residual)

    def run_together() -> float:
        barrier()
        return _seconds(run)

    try:
        while True:
            repeat = orders.recv()
            run()
            orders.send([run_together() for _ in range(repeat)])
    except EOFError:
        del partials, sums
        shared.close()
