"""The source of the kernels that move what collectives move, alone or between meetings.

A kernel that holds meetings (`Around`) has a row of words for each of its blocks in every device's slab
(`tvm_axe.collective.cuda.meeting`): block b tells block b of each peer that it has come, and waits for those, first
before it moves anything and again when it has. So no block waits for another of its own device, and when the kernel is
done, all of its blocks have met all of theirs.

Memory order. Before: what earlier kernels wrote happens before this one, as they are in one stream; the thread that
stores to a peer fences and releases at system scope, the peer's thread that polls acquires, and the barrier of the
block behind it orders that before the loads of all its threads. After: the block's barrier orders the writes of all its
threads before the thread that fences (``fence.acq_rel.sys`` is cumulative) and releases; who acquires, and the kernels
behind it in its stream, see them. No load of a peer's memory may go by the read-only cache, which an acquire leaves as
it is: pointers carry no ``__restrict__``.

A collective of few bytes may hold no meeting: it is one, an exchange (`tvm_axe.collective.cuda.exchange`).

Loads of several peers are issued before the first of them is added, since each takes about a microsecond; the sum is
then in the order of the slabs.

Source: PTX ISA, "Memory Consistency Model", "Release and Acquire Patterns", "Causality Order" and "Barriers".
"""

from __future__ import annotations

import ctypes
import functools

from tvm_axe.collective.cuda import exchange
from tvm_axe.collective.cuda.exchange import THREADS, VECTOR, WARP
from tvm_axe.collective.cuda.waiting import COUNT, MEET, OFF, PRIMITIVES, ROW
from tvm_axe.collective.tensor import check_dtype
from tvm_axe.errors import InputError

DIMS = 4
"""Dimensions of the runs of a box."""
MOST = 72
"""Slabs of a sum, as many GPUs as one NVLink domain has."""
PIECES = 24
"""Boxes that one kernel copies."""

# Types that are added: the CUDA type, and what it is added in. Others are only copied, as words of their size.
_SUMS = {
    "float16": ("__half", "float"),
    "bfloat16": ("__nv_bfloat16", "float"),
    "float8_e4m3fn": ("__nv_fp8_e4m3", "float"),
    "float8_e5m2": ("__nv_fp8_e5m2", "float"),
    "float32": ("float", "float"),
    "float64": ("double", "double"),
    "int8": ("unsigned char", "unsigned"),
    "int16": ("unsigned short", "unsigned"),
    "int32": ("unsigned", "unsigned"),
    "int64": ("unsigned long long", "unsigned long long"),
    "uint8": ("unsigned char", "unsigned"),
    "uint16": ("unsigned short", "unsigned"),
    "uint32": ("unsigned", "unsigned"),
    "uint64": ("unsigned long long", "unsigned long long"),
}
_EXCHANGED = ("float16", "bfloat16", "float32", "float64", "int32", "int64")
_WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long", 16: "uint4"}


class Around(ctypes.Structure):
    """The meetings that a kernel holds: before it moves, and after."""

    _fields_ = (
        ("slabs", ctypes.c_uint64),
        ("distance", ctypes.c_int64),
        ("limit", ctypes.c_uint64),
        ("missing", ctypes.c_uint64),
        ("me", ctypes.c_int32),
        ("devices", ctypes.c_int32),
        ("before", ctypes.c_int32),
        ("after", ctypes.c_int32),
    )


class Box(ctypes.Structure):
    """Which elements are moved: `run` contiguous ones at each index of the extents, `total` in all."""

    _fields_ = (
        ("extent", ctypes.c_int64 * DIMS),
        ("source_step", ctypes.c_int64 * DIMS),
        ("target_step", ctypes.c_int64 * DIMS),
        ("run", ctypes.c_int64),
        ("total", ctypes.c_int64),
    )


class Sum(ctypes.Structure):
    """What a kernel adds: a box of each of the sources, to each of the targets."""

    _fields_ = (
        ("box", Box),
        ("source", ctypes.c_uint64 * MOST),
        ("target", ctypes.c_uint64 * MOST),
        ("sources", ctypes.c_int32),
        ("targets", ctypes.c_int32),
    )


class Piece(ctypes.Structure):
    """A box that is copied."""

    _fields_ = (("box", Box), ("source", ctypes.c_uint64), ("target", ctypes.c_uint64))


class Pieces(ctypes.Structure):
    """What a kernel copies."""

    _fields_ = (("piece", Piece * PIECES), ("count", ctypes.c_int64))


_HEAD = f"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

struct Around {{
  char* slabs;
  long long distance;
  unsigned long long limit;
  unsigned* missing;
  int me, devices, before, after;
}};
struct Box {{ long long extent[{DIMS}], source_step[{DIMS}], target_step[{DIMS}], run, total; }};
struct Sum {{ Box box; unsigned long long source[{MOST}], target[{MOST}]; int sources, targets; }};
struct Exchange {{ unsigned long long source, target; long long total, share, stride, staging, half, region; }};
struct Piece {{ Box box; unsigned long long source, target; }};
struct Pieces {{ Piece piece[{PIECES}]; long long count; }};

struct Boolean {{ unsigned char value; }};

template <typename Wide, typename T> __device__ Wide widened(T value) {{ return Wide(value); }}
template <> __device__ float widened<float, __half>(__half value) {{ return __half2float(value); }}
template <> __device__ float widened<float, __nv_bfloat16>(__nv_bfloat16 value) {{ return __bfloat162float(value); }}
template <> __device__ unsigned widened<unsigned, Boolean>(Boolean value) {{ return value.value; }}
template <typename T, typename Wide> __device__ T narrowed(Wide value) {{ return T(value); }}
template <> __device__ __half narrowed<__half, float>(float value) {{ return __float2half_rn(value); }}
template <> __device__ __nv_bfloat16 narrowed<__nv_bfloat16, float>(float value) {{
  return __float2bfloat16_rn(value);
}}
template <> __device__ Boolean narrowed<Boolean, unsigned>(unsigned value) {{
  return Boolean{{static_cast<unsigned char>(value != 0)}};
}}

template <typename T, int LANES> struct alignas(sizeof(T) * LANES) Pack {{ T lane[LANES]; }};
{PRIMITIVES}{MEET}
// Meet the blocks of this number of all devices, if `whether`.
__device__ void meet_block(const Around& around, int whether) {{
  __shared__ unsigned count;
  if (!whether) return;
  unsigned* own = reinterpret_cast<unsigned*>(around.slabs + around.me * around.distance);
  unsigned* row = own + {ROW} * blockIdx.x;
  __syncthreads();
  if (threadIdx.x == 0) row[{COUNT}] = count = row[{COUNT}] + 1;
  __syncthreads();
  int peer = threadIdx.x;
  if (peer < around.devices) {{
    unsigned* theirs = reinterpret_cast<unsigned*>(around.slabs + peer * around.distance) + {ROW} * blockIdx.x;
    axe_tell(theirs + around.me, count);
    axe_await(row + peer, count, own + {OFF}, around.missing + peer, around.limit);
  }}
  __syncthreads();
}}

// Where the element of that number is in a slab of the source, and in one of the target.
__device__ void place(const Box& box, long long number, long long& source, long long& target) {{
  if (box.run == box.total) {{
    source = target = number;
    return;
  }}
  source = target = number % box.run;
  number /= box.run;
#pragma unroll
  for (int dim = {DIMS} - 1; dim >= 0; --dim) {{
    if (box.extent[dim] == 1) continue;
    long long at = number % box.extent[dim];
    number /= box.extent[dim];
    source += at * box.source_step[dim];
    target += at * box.target_step[dim];
  }}
}}

template <typename Word> __device__ void copy(const Pieces& pieces, const Around& around) {{
  const int AHEAD = 4;
  meet_block(around, around.before);
  int count = static_cast<int>(pieces.count), grid = gridDim.x;
  int each = count < grid ? grid / max(count, 1) : 1;  // blocks of a piece
  // Large ones are all blocks', one behind the other, so that a device sends to one peer at a time, or has from one.
  if (count > 0 && 2 * pieces.piece[0].box.total >= static_cast<long long>(grid) * blockDim.x) each = grid;
  for (int number = blockIdx.x / each; number < count; number += (grid + each - 1) / each) {{
    const Piece& piece = pieces.piece[number];
    const Word* source = reinterpret_cast<const Word*>(piece.source);
    Word* target = reinterpret_cast<Word*>(piece.target);
    long long step = static_cast<long long>(each) * blockDim.x;
    long long i = static_cast<long long>(blockIdx.x % each) * blockDim.x + threadIdx.x;
    for (; i < piece.box.total; i += AHEAD * step) {{
      Word words[AHEAD];
      long long to[AHEAD];
#pragma unroll
      for (int k = 0; k < AHEAD; ++k) {{
        long long from;
        if (i + k * step < piece.box.total) {{
          place(piece.box, i + k * step, from, to[k]);
          words[k] = source[from];
        }}
      }}
#pragma unroll
      for (int k = 0; k < AHEAD; ++k) {{
        if (i + k * step < piece.box.total) target[to[k]] = words[k];
      }}
    }}
  }}
  meet_block(around, around.after);
}}

template <typename T, typename Wide, int LANES> __device__ void add(const Sum& moved, const Around& around) {{
  typedef Pack<T, LANES> Words;
  const int AHEAD = 8;
  meet_block(around, around.before);
  long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < moved.box.total; i += step) {{
    long long from, to;
    place(moved.box, i, from, to);
    Wide sum[LANES];
    Words words[AHEAD];
    for (int first = 0; first < moved.sources; first += AHEAD) {{
#pragma unroll
      for (int k = 0; k < AHEAD; ++k) {{
        if (first + k < moved.sources) words[k] = reinterpret_cast<const Words*>(moved.source[first + k])[from];
      }}
#pragma unroll
      for (int k = 0; k < AHEAD; ++k) {{
        if (first + k >= moved.sources) continue;
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane) {{
          Wide term = widened<Wide, T>(words[k].lane[lane]);
          sum[lane] = first + k == 0 ? term : sum[lane] + term;
        }}
      }}
    }}
    Words result;
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) result.lane[lane] = narrowed<T, Wide>(sum[lane]);
    for (int slab = 0; slab < moved.targets; ++slab) reinterpret_cast<Words*>(moved.target[slab])[to] = result;
  }}
  meet_block(around, around.after);
}}
"""


def exchanging(dtype: str | None, marked: bool, twice: bool = False) -> str:
    """Return the name of the kernel that exchanges and adds elements of a type, or without one places what comes.

    It does so by words that are `marked` or by blocks that tell; or `twice`, in two steps, by words that are marked.
    """
    return f"exchange_{dtype or 'placed'}_{'twice' if twice else 'marked' if marked else 'told'}"


def copying(nbytes: int) -> str:
    """Return the name of the kernel that copies words of so many bytes."""
    return f"copy_{nbytes}"


def adding(dtype: str, lanes: int) -> str:
    """Return the name of the kernel that adds elements of a type, so many at a time.

    Raises
    ------
    InputError
        If no kernel adds them.
    """
    if dtype != "bool" and dtype not in _SUMS:
        raise InputError(f"elements of {dtype} can't be added on a GPU; those of {', '.join((*_SUMS, 'bool'))} can")
    return f"add_{dtype}_{lanes}"


@functools.cache
def kernels() -> dict[str, str]:
    """Return the body of each kernel, by its name."""
    bodies = {copying(nbytes): f"copy<{word}>" for nbytes, word in _WORDS.items()}
    for dtype, (kind, wide) in {**_SUMS, "bool": ("Boolean", "unsigned")}.items():
        for lanes in {1, VECTOR // check_dtype(dtype).itemsize}:
            bodies[adding(dtype, lanes)] = f"add<{kind}, {wide}, {lanes}>"
        for marked in (True, False) if dtype in _EXCHANGED else ():
            lanes, given = VECTOR // check_dtype(dtype).itemsize, str(marked).lower()
            bodies[exchanging(dtype, marked)] = f"exchange<{kind}, {wide}, {lanes}, {given}, false>"
            bodies[exchanging(dtype, True, twice=True)] = f"exchange_twice<{kind}, {wide}, {lanes}>"
    for marked in (True, False):
        bodies[exchanging(None, marked)] = f"exchange<unsigned, unsigned, 4, {str(marked).lower()}, true>"
    return bodies


def threads(name: str) -> int:
    """Return how many threads a block of a kernel has."""
    if not name.startswith("exchange"):
        return THREADS
    if name.endswith("told"):
        return WARP + THREADS
    # Who keeps words of several peers has many registers, and at most 256 threads may have more than 168 each.
    return THREADS // 2 + (0 if name.endswith("twice") else WARP)


@functools.cache
def source(phases: bool = False) -> str:
    """Return the kernels' source; to measure where the time goes, with samples of an exchange's `phases`.

    Of each block and each of the last `exchange.KEPT` exchanges, ``axe_phases`` then has the ticks of the clock when a
    thread that moves began, had number and data, had sent it, had what peers sent, had stored the sum, and ended, as
    0 to 4 and 8; in two steps, when it had the sums of the others, 7; when the warp that waits had told a peer, 5, and
    been told, 6; nanoseconds at the first and the last.
    """
    moved = {"copy": "Pieces", "add": "Sum", "exchange": "Exchange"}
    return (
        ("#define AXE_PHASES\n" if phases else "")
        + _HEAD
        + exchange.SOURCE
        + "".join(
            f'extern "C" __global__ void __launch_bounds__({threads(name)}) {name}(const __grid_constant__ '
            f"{moved[name.partition('_')[0]]} moved, const __grid_constant__ Around around) "
            f"{{ {body}(moved, around); }}\n"
            for name, body in kernels().items()
        )
    )
