"""The moves of collectives on a GPU: kernels that read and write its peers' memory, and copies by copy engines.

A kernel adds as `tvm_axe.collective.ops` does, in the same order and bit for bit: float types of less than four bytes
in float32, rounded once. What is only copied may be left to a copy engine, which takes no processor: 367 GB/s beside
374 of a kernel over NVLink 4, from some MiB on. Each device begins with its own slab and goes on with the next one's,
so that what a device is sent comes from one at a time.

A collective of few bytes of all devices is an exchange (`exchange`), which is a meeting itself. Where another is
between meetings, its first kernel holds the one and its last the other, so that a small one is a
single launch. All devices must then have as many blocks, whatever each of them moves: as the whole message has, which
is of one size on all.
"""

from __future__ import annotations

import copy
import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tvm_ffi

from tvm_axe.collective.algorithms import Phase
from tvm_axe.collective.cuda.driver import call, enum, struct
from tvm_axe.collective.cuda.exchange import KEPT, PHASES, THREADS, VECTOR, Exchange
from tvm_axe.collective.cuda.meeting import ROWS, Meeting
from tvm_axe.collective.cuda.source import (
    DIMS,
    MOST,
    PIECES,
    Around,
    Box,
    Piece,
    Pieces,
    Sum,
    adding,
    copying,
    exchanging,
    kernels,
    source,
    threads,
)
from tvm_axe.collective.cuda.waiting import BLOCKS
from tvm_axe.collective.merging import Held
from tvm_axe.collective.plan import Corner, Move
from tvm_axe.collective.tensor import check_dtype
from tvm_axe.errors import InputError
from tvm_axe.layout.shapes import dense_strides
from tvm_axe.machines import cache, nvcc
from tvm_axe.machines.target import resolve_target

_BLOCKS = 528  # four for each processor of the largest GPU; of a kernel that holds no meeting
_HELD = 8 << 20  # bytes; a larger message wants more blocks than can wait at once, and meetings of their own
_ROWS = 64  # copies of a move that are told to an engine one by one; where there are more, a kernel is faster


class Side(NamedTuple):
    """The source or the target of a collective: where its slabs are, the shape and the type of one."""

    slabs: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """The bytes of a slab."""
        return math.prod(self.shape) * check_dtype(self.dtype).itemsize


class _Kernel(NamedTuple):
    """A launch: which kernel, what it moves, and how many elements, so many at a time, at most are a block's."""

    name: str
    moved: Sum | Pieces | Exchange
    items: int


class _Copy(NamedTuple):
    """What a copy engine is told: rows of so many bytes, from one address to another, each so far apart."""

    source: int
    target: int
    nbytes: int
    rows: int = 1
    pitches: tuple[int, int] = (0, 0)


class Mover:
    """What does moves on a GPU, behind what its stream was told before.

    Parameters
    ----------
    arch : str
        The GPU's architecture.
    stream : CUstream
        The stream.
    room : int
        How many blocks may wait at once on any of the devices' GPUs.
    """

    phases = False
    """Whether exchanges sample where their time goes (`samples`), which only measurements ask for."""

    early = True
    """Whether an exchange is launched while the kernel before ends; only measurements do without."""

    def __init__(self, arch: str, stream: Any, room: int) -> None:
        self._stream = stream
        self._rows = max(1, min(room, ROWS))
        target = resolve_target(f"cuda:{arch}")
        self._module = call("cuModuleLoadData", nvcc.cubin(source(self.phases), target, cache.Cache()))
        self._functions: dict[str, Any] = {}
        loaded = enum("CUfunction_attribute", "CU_FUNC_ATTRIBUTE_NUM_REGS")
        for name in kernels():
            self._functions[name] = call("cuModuleGetFunction", self._module, name.encode())
            # Loads it now: where a peer's kernel waits in the same context, loading would wait for that one.
            call("cuFuncGetAttribute", loaded, self._functions[name])

    def on(self, stream: Any) -> Mover:
        """Return what does moves on another stream, with the same kernels, as long as this one isn't closed."""
        other = copy.copy(self)
        other._stream = stream
        return other

    def samples(self) -> np.ndarray:
        """Return what the last exchanges sampled (`source.source`), once the stream has finished.

        Of each exchange's and each block's, fields ``ticks`` and ``nanoseconds``; zeros where there was none.
        """
        kind = np.dtype([("ticks", "int64", PHASES), ("nanoseconds", "uint64", 2), ("seen", "uint64")])
        found = np.zeros((KEPT, BLOCKS), kind)
        place, nbytes = call("cuModuleGetGlobal", self._module, b"axe_phases")
        assert int(nbytes) == found.nbytes, (nbytes, found.nbytes)
        call("cuMemcpyDtoH", found.ctypes.data, place, found.nbytes)
        return found

    def close(self) -> None:
        """Give back what it has."""
        call("cuModuleUnload", self._module)

    @staticmethod
    def side(tensor: tvm_ffi.Tensor, is_view: bool) -> Side:
        """Return a tensor as a side of a collective; dimension 0 of a view is that of its slabs.

        Raises
        ------
        InputError
            If a slab isn't dense.
        """
        shape, strides, dtype = tuple(tensor.shape), tuple(tensor.strides), str(tensor.dtype)
        first, itemsize = tensor.data_ptr(), check_dtype(dtype).itemsize
        slabs = tuple(first + i * strides[0] * itemsize for i in range(shape[0])) if is_view else (first,)
        inner, steps = (shape[1:], strides[1:]) if is_view else (shape, strides)
        if any(extent > 1 and step != dense for extent, step, dense in zip(inner, steps, dense_strides(inner))):
            raise InputError(f"a slab must be dense, not of strides {steps} for shape {inner}")
        return Side(slabs, inner, dtype)

    def run(
        self,
        phases: Sequence[Phase],
        source: Side,
        target: Side,
        meeting: Meeting | None = None,
        holds: Held = Held(),  # noqa: B008, it is a tuple
    ) -> None:
        """Do the phases of a collective.

        Parameters
        ----------
        phases : sequence of Phase
            As `algorithms.phases` has them.
        source, target : Side
            The tensors.
        meeting : Meeting, optional
            The device's meetings.
        holds : Held
            Whether the device meets its peers before it, and after.

        Raises
        ------
        InputError
            If the sides have different types, or one whose elements no kernel adds.
        """
        if source.dtype != target.dtype:
            raise InputError(f"target has dtype {target.dtype}, not the source's {source.dtype}")
        if any(holds) and self._exchanged(phases, source, target, _known(meeting), holds):
            return
        before, after, *_ = holds
        nbytes = max(source.nbytes, target.nbytes)
        # The same on all devices, as are the phases.
        held = 0 < nbytes <= _HELD
        rows = max(1, min(self._rows, -(-nbytes // (THREADS * VECTOR))))
        first, last = (held and not phase.by_engine for phase in (phases[0], phases[-1]))
        if before and not first:
            _known(meeting).meet(True, 0)
        for number, phase in enumerate(phases):
            works = list(_works(phase, target if phase.onwards else source, target))
            meets = (before and first and number == 0, after and last and number == len(phases) - 1)
            if any(meets) and not works:
                works = [_Kernel(copying(1), Pieces(), 0)]
            for at, work in enumerate(works):
                if isinstance(work, _Copy):
                    self._copy(work)
                    continue
                opens, closes = meets[0] and at == 0, meets[1] and at == len(works) - 1
                if opens or closes:
                    self._launch(work, rows, _known(meeting).around(opens, closes))
                else:
                    self._launch(work, max(1, min(_BLOCKS, -(-work.items // THREADS))), Around())
        if after and not last:
            _known(meeting).meet(True, 0)

    def _exchanged(self, phases: Sequence[Phase], source: Side, target: Side, meeting: Meeting, holds: Held) -> bool:
        """Exchange slabs or parts of them, if that is what the phases are, with all devices; whether it is.

        To meet before it only orders what is in front, as what is touched of peers is the exchange's own; and it
        leaves out the meeting behind it if it holds that loosely: by the next, all have come, and are done with this.
        """
        part = _parted(phases, source, target, meeting)
        if part is None:
            return False
        found = meeting.exchange(part.source, part.target, part.nbytes, self._rows, part.stride, part.twice)
        if found is None:
            return False
        told, blocks, marked = found
        name = exchanging(None if part.placed else source.dtype, marked, part.twice)
        if name not in self._functions:
            return False
        around = meeting.around(not holds.quietly, holds.before and not holds.loosely)
        # Of marked words, a last block says that the device has come.
        self._launch(_Kernel(name, told, told.total), blocks + (marked and not holds.quietly), around)
        return True

    def _launch(self, work: _Kernel, blocks: int, around: Around) -> None:
        pointers = (ctypes.c_void_p * 2)(ctypes.addressof(work.moved), ctypes.addressof(around))
        place, function = ctypes.addressof(pointers), self._functions[work.name]
        if self.early and isinstance(work.moved, Exchange):
            call("cuLaunchKernelEx", _early(blocks, threads(work.name), self._stream), function, place, 0)
            return
        call("cuLaunchKernel", function, blocks, 1, 1, threads(work.name), 1, 1, 0, self._stream, place, 0)

    def _copy(self, copy: _Copy) -> None:
        if copy.rows == 1:
            call("cuMemcpyDtoDAsync", copy.target, copy.source, copy.nbytes, self._stream)
            return
        told = struct("CUDA_MEMCPY2D")
        told.srcMemoryType = told.dstMemoryType = enum("CUmemorytype", "CU_MEMORYTYPE_DEVICE")
        told.srcDevice, told.dstDevice = copy.source, copy.target
        told.srcPitch, told.dstPitch = copy.pitches
        told.WidthInBytes, told.Height = copy.nbytes, copy.rows
        call("cuMemcpy2DAsync", told, self._stream)


def _early(blocks: int, count: int, stream: Any) -> Any:
    """A launch of so many blocks and threads that begins as the kernel before ends its last block.

    The kernel waits for what that one wrote (``griddepcontrol.wait``).
    """
    config, attribute = struct("CUlaunchConfig"), struct("CUlaunchAttribute")
    attribute.id = enum("CUlaunchAttributeID", "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION")
    attribute.value.programmaticStreamSerializationAllowed = 1
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = count, 1, 1
    config.sharedMemBytes, config.hStream = 0, stream
    config.attrs, config.numAttrs = [attribute], 1
    return config


class _Part(NamedTuple):
    """What a device gives and gets in an exchange: addresses, the bytes of a part, and how far apart they are.

    What has come is `placed` beside each other, or added; `twice` if that are parts, whose sums are then sent.
    """

    source: int
    target: int
    nbytes: int
    stride: int
    placed: bool
    twice: bool


def _parted(phases: Sequence[Phase], source: Side, target: Side, meeting: Meeting) -> _Part | None:
    """A collective of equal, contiguous parts among all devices as an exchange, if it is one; all find the same."""
    (first, *more), n, me = phases, meeting.devices, meeting.rank
    if first.twice and n == len(source.slabs) > 1:
        return _Part(source.slabs[me], target.slabs[me], source.nbytes, 0, placed=False, twice=True)
    counts = {math.prod(move.box) for move in first.moves if math.prod(move.box[: move.outer]) == 1}
    if more or first.by_engine or n < 2 or len(counts) != 1:
        return None
    (count,), everybody = counts, tuple(range(n))
    mine, nbytes = me * count, count * check_dtype(source.dtype).itemsize
    views = tuple(len(side.slabs) == n for side in (source, target))
    wholes = tuple(math.prod(side.shape) for side in (source, target))
    dealt = sorted(
        (move.source.slabs, tuple(sorted(move.target.slabs)), move.source.start, move.target.start)
        for move in first.moves
    )
    each = [((p,), (0,), mine, p * count) for p in everybody]
    # Which sides are views, the elements of a slab of each, the moves; the stride, and whether what comes is placed.
    known: list[tuple[tuple[bool, bool], tuple[int, int], list[Any], int, bool]] = [
        ((True, True), (count, count), [(everybody, (me,), 0, 0)], 0, False),  # an all-reduce
        ((True, False), (n * count, count), [(everybody, (0,), mine, 0)], nbytes, False),  # a reduce-scatter
        ((False, True), (count, n * count), [((0,), everybody, 0, mine)], 0, True),  # an all-gather
        ((True, False), (n * count, n * count), each, nbytes, True),  # an all-to-all
    ]
    for *form, stride, placed in known:
        if form == [views, wholes, dealt]:
            own = [side.slabs[me if is_view else 0] for side, is_view in zip((source, target), views)]
            return _Part(own[0], own[1], nbytes, stride, placed, twice=False)
    return None


def _known(meeting: Meeting | None) -> Meeting:
    assert meeting is not None  # it meets
    return meeting


def _works(phase: Phase, source: Side, target: Side) -> Iterator[_Kernel | _Copy]:
    """What the moves of a phase are on this GPU, in their order."""
    itemsize = check_dtype(source.dtype).itemsize
    copied: list[tuple[Move, int, int]] = []
    for move in phase.moves:
        sources = [source.slabs[slab] + move.source.start * itemsize for slab in move.source.slabs]
        targets = [target.slabs[slab] + move.target.start * itemsize for slab in move.target.slabs]
        if len(sources) > 1:
            yield from _sums(move, source.dtype, sources, targets)
        else:
            copied += [(move, sources[0], each) for each in targets]
    if phase.by_engine and all(math.prod(move.box[: move.outer][:-1]) <= _ROWS for move, *_ in copied):
        for move, first, second in copied:
            yield from _copies(move, itemsize, first, second)
        return
    for start in range(0, len(copied), PIECES):
        yield from _pieces(copied[start : start + PIECES], itemsize)


def _sums(move: Move, dtype: str, sources: Sequence[int], targets: Sequence[int]) -> Iterator[_Kernel]:
    """The kernels that add, one for each index of the dimensions that are too many for one."""
    if max(len(sources), len(targets)) > MOST:
        raise InputError(f"a sum of {len(sources)} slabs on GPUs; valid are up to {MOST}")
    itemsize = check_dtype(dtype).itemsize
    lanes = _lanes(itemsize, [_alignment(move, itemsize), *sources, *targets])
    if lanes * itemsize < VECTOR:
        lanes = 1
    for box, offsets in _boxes(move, lanes):
        moved = Sum(box=box, sources=len(sources), targets=len(targets))
        for slabs, places, offset in ((moved.source, sources, offsets[0]), (moved.target, targets, offsets[1])):
            for at, place in enumerate(places):
                slabs[at] = place + offset * itemsize
        yield _Kernel(adding(dtype, lanes), moved, box.total)


def _pieces(copied: Sequence[tuple[Move, int, int]], itemsize: int) -> Iterator[_Kernel]:
    """The kernel that copies these boxes; more than one where a box has too many dimensions."""
    lanes = _lanes(itemsize, [number for move, *places in copied for number in (_alignment(move, itemsize), *places)])
    pieces = [
        Piece(box, first + offsets[0] * itemsize, second + offsets[1] * itemsize)
        for move, first, second in copied
        for box, offsets in _boxes(move, lanes)
    ]
    for start in range(0, len(pieces), PIECES):
        some = pieces[start : start + PIECES]
        moved = Pieces(count=len(some))
        moved.piece[: len(some)] = some
        yield _Kernel(copying(itemsize * lanes), moved, sum(piece.box.total for piece in some))


def _copies(move: Move, itemsize: int, source: int, target: int) -> Iterator[_Copy]:
    """A box as rows of bytes for a copy engine."""
    outer, nbytes = move.outer, math.prod(move.box[move.outer :]) * itemsize
    steps = _steps(move)
    if not outer:
        yield _Copy(source, target, nbytes)
        return
    pitches = steps[0][-1] * itemsize, steps[1][-1] * itemsize
    for offsets in _offsets(move.box[: outer - 1], steps):
        at = (source + offsets[0] * itemsize, target + offsets[1] * itemsize)
        yield _Copy(*at, nbytes, move.box[outer - 1], pitches)


def _lanes(itemsize: int, known: Sequence[int]) -> int:
    """How many elements are a word, where all these addresses and distances, in bytes, are multiples of it."""
    return math.gcd(VECTOR, *known) // itemsize


def _alignment(move: Move, itemsize: int) -> int:
    """The largest number of bytes that a box's runs, and the distances between them, are multiples of."""
    steps = [step for side in _steps(move) for step in side]
    return math.gcd(math.prod(move.box[move.outer :]), *steps) * itemsize


def _steps(move: Move) -> tuple[list[int], list[int]]:
    """From one index of each outer dimension to the next, in elements, in the source and in the target."""

    def of(corner: Corner) -> list[int]:
        return list(dense_strides(corner.shape)[: move.outer])

    return of(move.source), of(move.target)


def _boxes(move: Move, lanes: int) -> Iterator[tuple[Box, tuple[int, int]]]:
    """A move's box, in words of so many elements, with its offsets in source and target, in elements.

    The innermost dimensions are the kernel's; of what is left, each index has a box.
    """
    extents, steps = move.box[: move.outer], _steps(move)
    ahead = max(0, len(extents) - DIMS)
    inner, run = extents[ahead:], math.prod(move.box[move.outer :]) // lanes
    for offsets in _offsets(extents[:ahead], steps):
        box = Box(run=run, total=math.prod(inner) * run)
        for dim in range(DIMS):
            given = ahead + dim - (DIMS - len(inner))
            real = given >= ahead
            box.extent[dim] = extents[given] if real else 1
            box.source_step[dim] = steps[0][given] // lanes if real else 0
            box.target_step[dim] = steps[1][given] // lanes if real else 0
        yield box, offsets


def _offsets(extents: Sequence[int], steps: tuple[Sequence[int], Sequence[int]]) -> Iterator[tuple[int, int]]:
    """The offset of each index of the first dimensions, in the source and in the target."""
    for number in range(math.prod(extents)):
        offsets = [0, 0]
        for dim in range(len(extents) - 1, -1, -1):
            number, at = divmod(number, extents[dim])
            offsets = [offset + at * side[dim] for offset, side in zip(offsets, steps)]
        yield offsets[0], offsets[1]
