"""Scratch of calls: of streams, threads and graphs, of arguments' sizes, and given by the caller."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from programs_sequences import PROGRAMS, arguments, drawn, expected, split, sums

from tvm_axe import tile
from tvm_axe.machines.cache import Cache
from tvm_axe.machines.target import resolve_target
from tvm_axe.tile.allocating import STREAMS, Scratch
from tvm_axe.tile.backend import tile_backend_of
from tvm_axe.tile.sequencing import in_sequence


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return Cache(tmp_path_factory.mktemp("cache"))


def test_scratch_may_be_given() -> None:
    """As an executable for a GPU gives it: behind the parameters, of the shapes that arguments decide."""
    rng, target = np.random.default_rng(), resolve_target("llvm")
    for name in ("split", "counted"):
        program = tile.read_sequence(PROGRAMS[name])
        func = in_sequence(tile.plan(program, target), given=True)
        module = tile_backend_of(target).build(tvm.IRModule({program.name: func}), target).module
        given = drawn(name, rng)
        values = [
            tvm.runtime.tensor(value) if isinstance(value, np.ndarray) else value for value in arguments(name, given)
        ]
        module[program.name](*values, *Scratch(program, "cpu").new(values))
        (out,) = (value for value, own in zip(values, arguments(name, given)) if own is given[-1])
        np.testing.assert_array_equal(out.numpy(), expected(name, given))


def test_scratch_of_streams_and_threads() -> None:
    scratch = Scratch(tile.read_sequence(sums), "cpu")
    values, device = [tvm.runtime.tensor(array) for array in drawn("sums", np.random.default_rng())], tvm.cpu(0)
    found: dict[Any, Any] = {"here": scratch.new(values)[0]}
    assert scratch.new(values)[0].same_as(found["here"]) and tuple(found["here"].shape) == (2, 64)
    for stream in (1, 2):
        with tvm_ffi.use_raw_stream(device, stream):
            found[stream] = scratch.new(values)[0]
            assert scratch.new(values)[0].same_as(found[stream])
    other = threading.Thread(target=lambda: found.update(there=scratch.new(values)[0]))
    other.start(), other.join()
    places = {tensor.data_ptr() for tensor in found.values()}
    assert len(places) == len(found) == 4
    for stream in range(3, 3 + STREAMS):  # the oldest are let go
        with tvm_ffi.use_raw_stream(device, stream):
            scratch.new(values)
    assert not scratch.new(values)[0].same_as(found["here"])


def test_scratch_of_other_sizes() -> None:
    scratch = Scratch(tile.read_sequence(split), "cpu")
    for m, n in ((3, 8), (5, 16), (3, 8)):
        values = [tvm.runtime.empty((size, 256), "float16", tvm.cpu(0)) for size in (m, n)]
        (tensor,) = scratch.new([*values, tvm.runtime.empty((m, n), "float32", tvm.cpu(0)), 1.0])
        assert (tuple(tensor.shape), str(tensor.dtype)) == ((2, m, n), "float32")


def test_scratch_beside_tensors_of_others() -> None:
    """Whose stream isn't known: it is kept for no later call."""
    scratch, values = Scratch(tile.read_sequence(sums), "cpu"), drawn("sums", np.random.default_rng())
    (first,), (second,) = scratch.new(values), scratch.new(values)
    assert tuple(first.shape) == (2, 64) and first.data_ptr() != second.data_ptr()


def test_scratch_beside_tensors_of_pytorch() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    scratch, values = Scratch(tile.read_sequence(sums), "cpu"), [torch.zeros((64, 256)), torch.zeros(64)]
    (first,), (second,) = scratch.new(values), scratch.new(values)
    assert first.shape == (2, 64) and first.dtype == torch.float32 and first.data_ptr() != second.data_ptr()


@pytest.mark.gpu
def test_two_streams(cuda: object, store: Cache) -> None:
    """Calls that run at once don't share scratch; behind a long kernel all of them are launched before one begins."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    executable, rng = tile.compile(split, "cuda", store, work_dir=None), np.random.default_rng()
    streams, calls = [torch.cuda.Stream() for _ in range(2)], []
    for number in range(20):
        a, b, alpha, c = (torch.from_numpy(x).cuda() if hasattr(x, "shape") else x for x in drawn("split", rng))
        calls.append((streams[number % 2], [a, b, c, alpha]))
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
    for stream, given in calls:
        with torch.cuda.stream(stream):
            executable(*given)
    torch.cuda.synchronize()
    for _, (a, b, c, alpha) in calls:
        assert torch.equal(c, (a.float() @ b.float().T) * alpha)


@pytest.mark.gpu
def test_two_streams_of_the_runtime(cuda: Any, store: Cache) -> None:
    executable, rng = tile.compile(sums, "cuda", store), np.random.default_rng()
    streams = [int(cuda.create_raw_stream()) for _ in range(2)]
    data = [drawn("sums", rng) for _ in range(20)]
    calls = [(x, [tvm.runtime.tensor(array, cuda) for array in (x, y)]) for x, y in data]
    cuda.sync()
    for number, (_, given) in enumerate(calls):
        with tvm_ffi.use_raw_stream(cuda, streams[number % 2]):
            executable(*given)
    for stream in streams:
        cuda.sync(stream)
    for x, (_, y) in calls:
        np.testing.assert_array_equal(y.numpy(), x.sum(1))


@pytest.mark.gpu
def test_captured_in_graphs(cuda: object, store: Cache) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    executable, rng = tile.compile(sums, "cuda", store), np.random.default_rng()
    given = [torch.from_numpy(array).cuda() for array in drawn("sums", rng)]
    executable(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        executable(*given)
    given[0].copy_(torch.from_numpy(drawn("sums", rng)[0]))
    given[1].fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(given[1], given[0].sum(1))
