"""The moves of collectives on a GPU: kernels that read and write its peers' memory, and copies by copy engines.

A kernel adds as `tvm_axe.collective.ops` does, in the same order and bit for bit: float types of less than four bytes
in float32, rounded once. What is only copied, contiguous and large is left to a copy engine, which takes no processor:
367 GB/s beside 374 of a kernel over NVLink 4, from some MiB on.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tvm_ffi

from tvm_axe.collective.cuda.driver import call
from tvm_axe.collective.plan import Move
from tvm_axe.collective.tensor import check_dtype
from tvm_axe.errors import InputError
from tvm_axe.layout.shapes import dense_strides
from tvm_axe.machines import cache, nvcc
from tvm_axe.machines.target import resolve_target

_THREADS = 256
_BLOCKS = 1056  # eight for each processor of the largest GPU
_VECTOR = 16  # bytes of the longest load
_ENGINE = 4 << 20  # bytes; what copy engines are given is as large or larger
_DIMS = 4  # of the runs of a box
_MOST = 72  # slabs of a group, as many GPUs as one NVLink domain has

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
_WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long", 16: "uint4"}

_HEAD = f"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

struct Moved {{
  unsigned long long source[{_MOST}], target[{_MOST}];
  long long extent[{_DIMS}], source_step[{_DIMS}], target_step[{_DIMS}];
  long long run, total;
  int sources, targets;
}};

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

// Where the element of that number is in a slab of the source, and in one of the target.
__device__ void place(const Moved& moved, long long number, long long& source, long long& target) {{
  if (moved.run == moved.total) {{
    source = target = number;
    return;
  }}
  source = target = number % moved.run;
  number /= moved.run;
#pragma unroll
  for (int dim = {_DIMS} - 1; dim >= 0; --dim) {{
    if (moved.extent[dim] == 1) continue;
    long long at = number % moved.extent[dim];
    number /= moved.extent[dim];
    source += at * moved.source_step[dim];
    target += at * moved.target_step[dim];
  }}
}}

template <typename Word> __device__ void copy(const Moved& moved) {{
  long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < moved.total; i += step) {{
    long long from, to;
    place(moved, i, from, to);
    Word word = reinterpret_cast<const Word*>(moved.source[0])[from];
    for (int slab = 0; slab < moved.targets; ++slab) reinterpret_cast<Word*>(moved.target[slab])[to] = word;
  }}
}}

template <typename T, typename Wide, int LANES> __device__ void add(const Moved& moved) {{
  typedef Pack<T, LANES> Words;
  long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < moved.total; i += step) {{
    long long from, to;
    place(moved, i, from, to);
    Words words = reinterpret_cast<const Words*>(moved.source[0])[from];
    Wide sum[LANES];
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) sum[lane] = widened<Wide, T>(words.lane[lane]);
    for (int slab = 1; slab < moved.sources; ++slab) {{
      words = reinterpret_cast<const Words*>(moved.source[slab])[from];
#pragma unroll
      for (int lane = 0; lane < LANES; ++lane) sum[lane] += widened<Wide, T>(words.lane[lane]);
    }}
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane) words.lane[lane] = narrowed<T, Wide>(sum[lane]);
    for (int slab = 0; slab < moved.targets; ++slab) reinterpret_cast<Words*>(moved.target[slab])[to] = words;
  }}
}}
"""


class Side(NamedTuple):
    """The source or the target of a collective: where its slabs are, the shape and the type of one."""

    slabs: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


class _Moved(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_uint64 * _MOST),
        ("target", ctypes.c_uint64 * _MOST),
        ("extent", ctypes.c_int64 * _DIMS),
        ("source_step", ctypes.c_int64 * _DIMS),
        ("target_step", ctypes.c_int64 * _DIMS),
        ("run", ctypes.c_int64),
        ("total", ctypes.c_int64),
        ("sources", ctypes.c_int32),
        ("targets", ctypes.c_int32),
    )


class Mover:
    """What does moves on a GPU, behind what its stream was told before.

    Parameters
    ----------
    arch : str
        The GPU's architecture.
    stream : CUstream
        The stream.
    """

    def __init__(self, arch: str, stream: Any) -> None:
        self._stream = stream
        target = resolve_target(f"cuda:{arch}")
        self._module = call("cuModuleLoadData", nvcc.cubin(_source(), target, cache.Cache()))
        self._functions: dict[str, Any] = {}

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

    def move(self, move: Move, source: Side, target: Side) -> None:
        """Do a move.

        Raises
        ------
        InputError
            If the sides have different types, or one whose elements no kernel adds.
        """
        if source.dtype != target.dtype:
            raise InputError(f"target has dtype {target.dtype}, not the source's {source.dtype}")
        sources = [source.slabs[slab] for slab in move.source.slabs]
        targets = [target.slabs[slab] for slab in move.target.slabs]
        itemsize = check_dtype(source.dtype).itemsize
        outer = move.outer
        run = math.prod(move.box[outer:])
        starts = [corner.start * itemsize for corner in (move.source, move.target)]
        contiguous = math.prod(move.box[:outer]) == 1
        if contiguous and len(sources) == 1 and run * itemsize >= _ENGINE:
            for each in targets:
                call("cuMemcpyDtoDAsync", each + starts[1], sources[0] + starts[0], run * itemsize, self._stream)
            return
        steps = [list(dense_strides(corner.shape)[:outer]) for corner in (move.source, move.target)]
        places = [*(each + starts[0] for each in sources), *(each + starts[1] for each in targets)]
        known = [run * itemsize, *(step * itemsize for side in steps for step in side), *places]
        lanes = math.gcd(_VECTOR, *known) // itemsize
        lanes = _VECTOR // itemsize if lanes * itemsize >= _VECTOR else 1
        self._launch(move, source.dtype, lanes, run, outer, steps, places)

    def _launch(
        self,
        move: Move,
        dtype: str,
        lanes: int,
        run: int,
        outer: int,
        steps: Sequence[Sequence[int]],
        places: Sequence[int],
    ) -> None:
        terms = len(move.source.slabs)
        extents = list(move.box[:outer])
        # The innermost dimensions go to the kernel; of what is left, each index is a launch.
        ahead = max(0, len(extents) - _DIMS)
        itemsize = check_dtype(dtype).itemsize
        for number in range(math.prod(extents[:ahead])):
            offsets = [0, 0]
            for dim in range(ahead - 1, -1, -1):
                number, at = divmod(number, extents[dim])
                for side in range(2):
                    offsets[side] += at * steps[side][dim] * itemsize
            moved = _Moved()
            for at, place in enumerate(places):
                if at < terms:
                    moved.source[at] = place + offsets[0]
                else:
                    moved.target[at - terms] = place + offsets[1]
            inner = extents[ahead:]
            for dim in range(_DIMS):
                given = dim - (_DIMS - len(inner))
                moved.extent[dim] = inner[given] if given >= 0 else 1
                moved.source_step[dim] = steps[0][ahead + given] // lanes if given >= 0 else 0
                moved.target_step[dim] = steps[1][ahead + given] // lanes if given >= 0 else 0
            moved.run, moved.total = run // lanes, math.prod(inner) * run // lanes
            moved.sources, moved.targets = terms, len(places) - terms
            blocks = min(_BLOCKS, -(-moved.total // _THREADS))
            function = self._function(_name(dtype, lanes, terms > 1))
            pointers = (ctypes.c_void_p * 1)(ctypes.addressof(moved))
            call(
                "cuLaunchKernel", function, blocks, 1, 1, _THREADS, 1, 1, 0, self._stream, ctypes.addressof(pointers), 0
            )

    def _function(self, name: str) -> Any:
        if name not in self._functions:
            self._functions[name] = call("cuModuleGetFunction", self._module, name.encode())
        return self._functions[name]


def _name(dtype: str, lanes: int, adds: bool) -> str:
    """The kernel of a type, for so many elements at a time."""
    if not adds:
        return f"copy_{check_dtype(dtype).itemsize * lanes}"
    if dtype != "bool" and dtype not in _SUMS:
        raise InputError(f"elements of {dtype} can't be added on a GPU; those of {', '.join((*_SUMS, 'bool'))} can")
    return f"add_{dtype}_{lanes}"


@functools.cache
def _source() -> str:
    """The kernels' source."""
    bodies = {f"copy_{nbytes}": f"copy<{word}>" for nbytes, word in _WORDS.items()}
    for dtype, (kind, wide) in {**_SUMS, "bool": ("Boolean", "unsigned")}.items():
        for lanes in {1, _VECTOR // check_dtype(dtype).itemsize}:
            bodies[_name(dtype, lanes, True)] = f"add<{kind}, {wide}, {lanes}>"
    return _HEAD + "".join(
        f'extern "C" __global__ void {name}(const __grid_constant__ Moved moved) {{ {body}(moved); }}\n'
        for name, body in bodies.items()
    )
