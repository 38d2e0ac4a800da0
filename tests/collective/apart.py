"""Devices with memory of their own that are the host's: what `discrete` does without a GPU.

Each worker maps the memory of slabs, files without a name, into a range of addresses that is nobody else's, so that
what it sees of a peer is what was handed to it and mapped, as with CUDA's virtual memory. They may meet by themselves,
by counters in each other's slabs, as GPUs do.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import mmap
import os
import random
import time

import numpy as np
import tvm

from tvm_axe import _tvm
from tvm_axe.collective import Workers, launch, ops, ranked, ranks_engine, side
from tvm_axe.collective.cuda import driver
from tvm_axe.collective.cuda.moving import Mover
from tvm_axe.collective.cuda.passing import Passing, Scratch
from tvm_axe.collective.device import Device
from tvm_axe.collective.discrete import DiscreteSession
from tvm_axe.collective.engine import Engine
from tvm_axe.collective.plan import VIEWS
from tvm_axe.collective.staging import Copies
from tvm_axe.collective.tensor import check_dtype
from tvm_axe.errors import WorkerError
from tvm_axe.layout import Mesh

PAGE = 1 << 16  # larger than the host's own, so that what takes one for the other shows
SIZE = 1 << 32
_FIXED, _SHARED, _PRIVATE, _ANONYMOUS, _NORESERVE = 0x10, 0x01, 0x02, 0x20, 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)


def _map(address: int | None, nbytes: int, protection: int, flags: int, descriptor: int = -1) -> int:
    found = _libc.mmap(address, nbytes, protection, flags, descriptor, 0)
    assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
    return found


class HostMemory(Device):
    """A device whose memory is of the host.

    It is told how much there is (`room`) in pages of how many bytes (`page`), and at which collective of so many bytes
    or more it fails for good (`fails`; 0 for none).
    """

    def __init__(self, told, size):
        self.runtime = tvm.cpu()
        self._room, self._page, self._fails = told["room"], told["page"], told["fails"]
        self._used, self._size = 0, size
        self._own: dict[int, tuple[int, int]] = {}
        self._lost = False
        self._missing: set[int] = set()
        self._passing: dict[str, Passing] = {}

    def start(self, threads, cores):
        _tvm.use_threads(threads, cores)
        self._base = _map(None, self._size, 0, _PRIVATE | _ANONYMOUS | _NORESERVE)

    def tensor(self, view):
        return _tvm.device_tensor(self._base + view.offset, view.shape, view.strides, view.dtype, self.runtime)

    def collective(self, name, source, target, numbers, rank):
        if 0 < self._fails <= _tvm.as_array(source).nbytes:
            self._lost = True
            raise WorkerError("the device fell off the bus")
        ops.collective(name, _tvm.as_array(source), _tvm.as_array(target), *numbers, rank=rank)

    def step(self, name, tensors, numbers, rank):
        side.step(name, [_tvm.as_array(tensor) for tensor in tensors], numbers, rank)

    def copies(self, memory):
        return HostCopies()

    def finish(self):
        if self._lost:
            raise WorkerError("the device doesn't answer")

    def usable(self):
        return not self._lost

    def meet(self, view, peers, rank, seconds):
        self._words = _tvm.as_array(self.tensor(view))
        self._peers, self._rank, self._seconds, self._count = peers, peers.index(rank), seconds, 0
        self.meets = True

    def connect(self, unique, size, rank, groups, seconds, is_off):
        from tvm_axe.collective.cuda import nccl

        self._warm = np.zeros(16 * max(2, size), "uint8")
        given = 0, self._warm.ctypes.data, lambda: None, lambda: None, seconds, is_off
        _, parts = nccl.connected(unique, size, rank, groups, *given)
        self._kept = []
        self._passing = {
            axis: Passing(parts[axis], InPlace(), Scratch(self._scratch, 1 << 10), count, at)
            for axis, (_, count, at) in groups.items()
        }

    def _scratch(self, nbytes):
        self._kept.append(np.full(nbytes, 255, "uint8"))
        return self._kept[-1].ctypes.data

    def passes(self, axis):
        return axis in self._passing

    def passed(self, name, source, target, numbers, rank, axis):
        sides = (Mover.side(tensor, is_view) for tensor, is_view in zip((source, target), VIEWS[name]))
        self._passing[axis].collective(name, *sides, [int(number) for number in numbers])

    def arrive(self):
        self._count += 1
        self._words[:, self._rank] = self._count

    def wait(self, behind):
        wanted, end = self._count - behind, time.monotonic() + self._seconds
        own = self._words[self._rank]
        while late := [peer for peer in range(len(self._words)) if own[peer] < wanted]:
            if own[-1] or time.monotonic() > end:
                self._missing.update(self._peers[each] for each in late)
                own[-1] = 1  # no later meeting waits again
                return
            time.sleep(0)

    def missing(self):
        return sorted(self._missing)

    def call_off(self):
        if self.meets:
            self._words[:, -1] = 1

    def settle(self):
        if self.meets:
            self._words[self._rank] = self._count = 0
            self._missing.clear()

    def reserve(self, offset, nbytes):
        length = self._whole(nbytes)
        if self._used + length > self._room:
            raise WorkerError(f"no memory for a slab of {length} bytes")
        descriptor = os.memfd_create("slab", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, length)
        self._own[offset] = descriptor, length
        self._used += length
        self.share(offset, nbytes, descriptor)

    def lent(self, offset):
        return self._own[offset][0]

    def share(self, offset, nbytes, descriptor):
        length = self._whole(nbytes)
        _map(self._base + offset, length, mmap.PROT_READ | mmap.PROT_WRITE, _FIXED | _SHARED, descriptor)

    def release(self, offset, nbytes):
        length = self._whole(nbytes)
        _map(self._base + offset, length, 0, _FIXED | _PRIVATE | _ANONYMOUS | _NORESERVE)
        if offset in self._own:
            descriptor, own = self._own.pop(offset)
            os.close(descriptor)
            self._used -= own

    def move(self, offset, array, home):
        here = np.ctypeslib.as_array((ctypes.c_uint8 * array.nbytes).from_address(self._base + offset))
        if home:
            array[:] = here
        else:
            here[:] = array

    def _whole(self, nbytes):
        return -(-nbytes // self._page) * self._page

    def close(self):
        for offset in list(self._own):
            self.release(offset, self._own[offset][1])
        _libc.munmap(ctypes.c_void_p(self._base), ctypes.c_size_t(self._size))


class InPlace:
    """What moves between slabs and scratch memory of the host, as `Mover` does on a GPU."""

    def run(self, phases, source, target):
        for move in (move for phase in phases for move in phase.moves):
            terms = [self._box(source, move.source, slab, move.box) for slab in move.source.slabs]
            self._box(target, move.target, 0, move.box)[...] = ops.summed(terms)

    @staticmethod
    def _box(side, corner, slab, box):
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * side.nbytes).from_address(side.slabs[slab]))
        group = memory.view(check_dtype(side.dtype)).reshape(1, *corner.shape)
        return ops.boxes(group, dataclasses.replace(corner, slabs=(0,)), box)[0]


class HostCopies(Copies):
    """Copies that are made at once, or only when they are waited for, by chance."""

    def __init__(self):
        self._random = random.Random(os.getpid())
        self._fetches, self._stores = [], []

    def begin(self):
        assert not self._fetches and not self._stores

    def fetch(self, slab, corner, box, array):
        assert array.flags.c_contiguous and array.shape == box
        self._later(self._fetches, array, self._box(slab, corner, box, array.dtype))

    def store(self, slab, corner, box, array):
        assert array.flags.c_contiguous and array.shape == box
        self._later(self._stores, self._box(slab, corner, box, array.dtype), array)

    def fetched(self):
        self._do(self._fetches)

    def stored(self):
        self._do(self._stores)

    def _later(self, copies, target, source):
        copies.append((target, source))
        if self._random.random() < 0.5:
            self._do(copies)

    @staticmethod
    def _do(copies):
        while copies:
            target, source = copies.pop(0)
            target[...] = source

    @staticmethod
    def _box(slab, corner, box, dtype):
        nbytes = int(np.prod(corner.shape)) * dtype.itemsize
        memory = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(slab.data_ptr()))
        corner = dataclasses.replace(corner, slabs=(0,))
        return ops.boxes(memory.view(dtype).reshape(1, *corner.shape), corner, box)[0]


class ApartEngine(Engine):
    """Workers on such devices."""

    name = "apart"

    def launch(self, mesh, timeout, **options):
        names = ("room", "page", "fails", "processes", "barriers", "neighbours", "ranks", "axes", "unique")
        room, page, fails, processes, barriers, neighbours, ranks, axes, unique = self.options(options, *names)
        told = {"room": room or SIZE, "page": page or (mmap.PAGESIZE if ranks else PAGE), "fails": fails or 0}
        if ranks:
            return ranked.launch(
                ranks_engine.start_messages, mesh, timeout, functools.partial(self._devices, told, neighbours)
            )
        alone = processes is None or processes
        maker, meets = f"{__name__}:HostMemory", mesh.size + 1 if barriers == "device" else None
        session = DiscreteSession(
            mesh, timeout, maker, [told] * mesh.size, SIZE, told["page"], alone, meets, neighbours, axes or (), unique
        )
        session.start()
        return session

    @staticmethod
    def _devices(told, neighbours, job):
        maker = f"{__name__}:HostMemory"
        return ranked.Devices(maker, [told] * len(job.ranks), SIZE, told["page"], neighbours or job.hosts)


APART = ApartEngine()


def launched(mesh: Mesh, where: str, timeout: float = 60.0, **options: object) -> Workers:
    """Launch workers of an engine, or on devices with memory of their own."""
    engine, *how = where.split("-")
    if "threads" in how:
        options["processes"] = False
    if "meeting" in how:  # though they share a GPU, and each waits while the other could run
        options["barriers"] = "device"
    if "staged" in how and engine == "cuda":
        options["peers"] = False
    elif "staged" in how:
        options["neighbours"] = [[device] for device in range(mesh.size)]
    if "ranks" in how:
        options["ranks"] = True
    if engine == "apart":
        return Workers(mesh, APART, APART.launch(mesh, timeout, **options))
    if engine == "cuda" and "RANK" not in os.environ:  # ranks have a GPU each
        options["gpus"] = driver.gpus_for(mesh.size)
    return launch(mesh, engine=engine, timeout=timeout, **options)
