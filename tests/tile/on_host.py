"""The CUDA source of tile programs, run on the host: threads of a block are coroutines, from barrier to barrier.

It is for what CUDA says in C++: elements and their places, conditions, vectors, barriers, shuffles and
atomics, of integers and float32. A kernel with instructions of its own (inline assembly) or other types isn't
compiled.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

_BEFORE = """
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>
#include <ucontext.h>
#define __forceinline__ inline
#define __device__
#define __global__
#define __shared__ static
#define __restrict__
#define __launch_bounds__(...)
#define uint unsigned int
#define uchar unsigned char
#define ushort unsigned short
#define CUDART_INF_F INFINITY
using std::max;
using std::min;
struct Index { int x, y, z; };
template <class T> struct alignas(2 * sizeof(T)) Two { T x, y; };
template <class T> struct alignas(4 * sizeof(T)) Four { T x, y, z, w; };
using int2 = Two<int>;
using int4 = Four<int>;
using uint2 = Two<uint>;
using uint4 = Four<uint>;
using float2 = Two<float>;
using float4 = Four<float>;
using uchar2 = Two<uchar>;
using uchar4 = Four<uchar>;
using short2 = Two<short>;
using short4 = Four<short>;
using ushort2 = Two<ushort>;
using ushort4 = Four<ushort>;
static Index threadIdx, blockIdx;

struct Meeting { int count, turn; };
struct Thread { ucontext_t context; std::unique_ptr<char[]> stack; bool done; };
static ucontext_t scheduler;
static std::vector<Thread> threads;
static Meeting block;
static std::vector<Meeting> warps;
static char lanes[32][32][8];
alignas(128) static uchar shared[1 << 18];

static void meet(Meeting& meeting, int size) {
  int turn = meeting.turn, number = threadIdx.x;
  if (++meeting.count == size) {
    meeting.count = 0, ++meeting.turn;
    return;
  }
  while (meeting.turn == turn) {
    swapcontext(&threads[number].context, &scheduler);
  }
}
static void __syncthreads() { meet(block, threads.size()); }
static void __syncwarp(unsigned = 0) { meet(warps[threadIdx.x / 32], 32); }
template <class T> static T from(T value, int lane) {
  int warp = threadIdx.x / 32;
  std::memcpy(lanes[warp][threadIdx.x % 32], &value, sizeof(T));
  __syncwarp();
  std::memcpy(&value, lanes[warp][lane], sizeof(T));
  __syncwarp();
  return value;
}
static int lane() { return threadIdx.x % 32; }
template <class T> static T __shfl_sync(unsigned, T value, int at, int) { return from(value, at & 31); }
template <class T> static T __shfl_xor_sync(unsigned, T value, int mask, int) { return from(value, lane() ^ mask); }
template <class T> static T __shfl_up_sync(unsigned, T value, int by, int) {
  return from(value, lane() < by ? lane() : lane() - by);
}
template <class T> static T __shfl_down_sync(unsigned, T value, int by, int) {
  return from(value, lane() + by > 31 ? lane() : lane() + by);
}
template <class T> static T atomicAdd(T* place, T value) {
  T before = *place;
  *place += value;
  return before;
}
template <class T> static T atomicMin(T* place, T value) {
  T before = *place;
  *place = min(before, value);
  return before;
}
template <class T> static T atomicMax(T* place, T value) {
  T before = *place;
  *place = max(before, value);
  return before;
}
template <class T> static T atomicCAS(T* place, T compare, T value) {
  T before = *place;
  if (before == compare) *place = value;
  return before;
}
"""

_BEHIND = """
static void** arguments;
static void begin() {
  int number = threadIdx.x;
  CALL;
  threads[number].done = true;
  swapcontext(&threads[number].context, &scheduler);
}
extern "C" void run(void** given, int blocks) {
  arguments = given;
  for (int number = 0; number < blocks; ++number) {
    std::memset(shared, 0x5a, sizeof shared);
    block = {0, 0};
    warps.assign((THREADS + 31) / 32, {0, 0});
    threads.clear();
    threads.resize(THREADS);
    for (Thread& thread : threads) {
      thread.stack = std::make_unique<char[]>(256 << 10);
      thread.done = false;
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.get();
      thread.context.uc_stack.ss_size = 256 << 10;
      thread.context.uc_link = nullptr;
      makecontext(&thread.context, begin, 0);
    }
    for (bool left = true; left;) {
      left = false;
      for (int at = 0; at < THREADS; ++at) {
        if (threads[at].done) continue;
        left = true;
        threadIdx = {at, 0, 0}, blockIdx = {number, 0, 0};
        swapcontext(&scheduler, &threads[at].context);
      }
    }
  }
}
"""

_HEAD = (
    "  #define ushort unsigned short\n#endif\n"  # the last line of what upstream writes in front of all that it makes
)
_KERNEL = re.compile(r'extern "C" __global__ void __launch_bounds__\((\d+)[^)]*\) (\w+)\(([^)]*)\) {')


def run(source: str, blocks: int, arrays: Mapping[str, np.ndarray], folder: Path) -> None:
    """Run a kernel in blocks along one axis, on arrays by the names of its parameters; what it stores is in these."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++, which compiles kernels for the host")
    body = source[source.index(_HEAD) + len(_HEAD) :]
    assert "asm" not in body, "the kernel has instructions of its own"
    body = re.sub(r"extern __shared__ __align__\(\d+\) uchar (\w+)\[\];", r"uchar* \1 = shared;", body)
    found = _KERNEL.search(body)
    assert found is not None, "the source has no kernel"
    threads, name, parameters = found.groups()
    types, names = zip(*(each.replace("__restrict__", "").rsplit(maxsplit=1) for each in parameters.split(",")))
    call = ", ".join(f"({kind}) arguments[{at}]" for at, kind in enumerate(types))
    behind = _BEHIND.replace("CALL", f"{name}({call})").replace("THREADS", threads)
    (folder / "kernel.cpp").write_text(_BEFORE + body + behind)
    options = ["-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-shared", "-fPIC"]
    done = subprocess.run(
        [compiler, *options, "kernel.cpp", "-o", "kernel.so"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[:4000]
    given = [arrays[each.strip().removesuffix("_ptr")].ctypes.data for each in names]
    ctypes.CDLL(str(folder / "kernel.so")).run((ctypes.c_void_p * len(given))(*given), blocks)
