"""The CUDA source of tile programs, run on the host: threads of a block are coroutines, from barrier to barrier.

It is for what CUDA says in C++: elements and their places, conditions, vectors, barriers, shuffles and
atomics, of integers and float32. Of instructions of its own (inline assembly) it knows ``cp.async``, which copies when
it is waited for, or at once: what is right both ways doesn't depend on when. A kernel with others, or of other types,
isn't compiled.
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
struct Piece { unsigned to; const void* from; int size, read; };
static std::vector<std::vector<std::vector<Piece>>> copies;  // of each thread, of each group, the last one open
static void move(const Piece& piece) {
  std::memset(shared + piece.to, piece.to % piece.size ? 0xff : 0, piece.size);
  if (piece.to % piece.size == 0) std::memcpy(shared + piece.to, piece.from, piece.read);
}
static void copied(unsigned to, const void* from, int size, int read) {
  if (EARLY) move({to, from, size, read});
  else copies[threadIdx.x].back().push_back({to, from, size, read});
}
static void committed() { copies[threadIdx.x].emplace_back(); }
static void waited(int most) {
  auto& groups = copies[threadIdx.x];
  while ((int) groups.size() - 1 > most) {
    for (const Piece& piece : groups.front()) move(piece);
    groups.erase(groups.begin());
  }
}
static unsigned __cvta_generic_to_shared(void* place) { return (uchar*) place - shared; }
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
    copies.assign(THREADS, {{}});
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
_ASYNCHRONOUS = (
    (
        r'asm volatile\("cp\.async\.c[ag]\.shared\.global \[%0\], \[%1\], (\d+);".*',
        r"copied(__dst_mem, __src_mem, \1, \1);",
    ),
    (
        r'asm volatile\("cp\.async\.c[ag]\.shared\.global \[%0\], \[%1\], (\d+), %2;".*',
        r"copied(__dst_mem, __src_mem, \1, __src_size);",
    ),
    (r'asm volatile\("cp\.async\.commit_group;".*', "committed();"),
    (r'asm volatile\("cp\.async\.wait_group (\d+);".*', r"waited(\1);"),
)


def run(
    source: str,
    blocks: int,
    arrays: Mapping[str, np.ndarray | int],
    folder: Path,
    early: bool = False,
    number: int = 0,
) -> None:
    """Run a kernel in blocks along one axis, on arrays by the names of its parameters; what it stores is in these.

    Numbers, such as strides, are integers. Of a source with several kernels it is the one of a number. Copies that run
    ahead are made as late as they may be, or, if `early`, at once.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++, which compiles kernels for the host")
    body = source[source.index(_HEAD) + len(_HEAD) :]
    for written, meant in _ASYNCHRONOUS:
        body = re.sub(written, meant, body)
    assert "asm" not in body, "the kernel has instructions of its own"
    body = re.sub(r"extern __shared__ __align__\(\d+\) uchar (\w+)\[\];", r"uchar* \1 = shared;", body)
    kernels = _KERNEL.findall(body)
    assert number < len(kernels), "the source has no such kernel"
    threads, name, parameters = kernels[number]
    types, names = zip(*(each.replace("__restrict__", "").rsplit(maxsplit=1) for each in parameters.split(",")))
    words = ("" if "*" in kind else "(intptr_t) " for kind in types)
    call = ", ".join(f"({kind}) {word}arguments[{at}]" for at, (kind, word) in enumerate(zip(types, words)))
    behind = _BEHIND.replace("CALL", f"{name}({call})").replace("THREADS", threads)
    (folder / "kernel.cpp").write_text(f"#define EARLY {int(early)}\n" + _BEFORE + body + behind)
    options = ["-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-shared", "-fPIC"]
    done = subprocess.run(
        [compiler, *options, "kernel.cpp", "-o", "kernel.so"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[:4000]
    values = [arrays[each.strip().removesuffix("_ptr")] for each in names]
    given = [value if isinstance(value, int) else value.ctypes.data for value in values]
    ctypes.CDLL(str(folder / "kernel.so")).run((ctypes.c_void_p * len(given))(*given), blocks)
