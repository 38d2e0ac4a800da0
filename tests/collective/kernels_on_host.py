"""The kernels of exchanges, compiled for the host as they are, all devices' threads run in random order.

Only the primitives are others (`waiting.PRIMITIVES`), and at each a thread may be left for any other. A store by them
is done later, each of its words by itself and in any order: at the latest at the thread's next fence or when its kernel
ends, and one or another while it polls. Of what is stored and loaded plainly every step is seen at once, so the fences
of messages without marks aren't tried.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tvm_axe.collective.cuda import source
from tvm_axe.collective.cuda.exchange import WARP, Exchange
from tvm_axe.collective.cuda.source import Around
from tvm_axe.collective.cuda.waiting import PRIMITIVES

HEADERS = ("cuda_bf16.h", "cuda_fp16.h", "cuda_fp8.h")
KERNELS = [
    *(source.exchanging(dtype, marked) for dtype in ("int32", "bfloat16", None) for marked in (False, True)),
    *(source.exchanging(dtype, True, twice=True) for dtype in ("int32", "bfloat16")),
]
"""Those that are compiled; tests name one by its place."""

_BEFORE = """
#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>
#include <ucontext.h>
#define __device__
#define __global__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(threads)
using std::max;
using std::min;
struct uint4 { unsigned x, y, z, w; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
struct Index { int x; };
static Index threadIdx, blockIdx, blockDim, gridDim;
struct Fake {
  float value;
  Fake() = default;
  explicit Fake(float value) : value(value) {}
  operator float() { return value; }
};
struct __half { unsigned short bits; };
struct __nv_bfloat16 { unsigned short bits; };
struct __nv_fp8_e4m3 : Fake { using Fake::Fake; };
struct __nv_fp8_e5m2 : Fake { using Fake::Fake; };
static float __half2float(__half) { return 0; }
static __half __float2half_rn(float) { return {}; }
static float __bfloat162float(__nv_bfloat16 value) {
  unsigned bits = value.bits << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}
static __nv_bfloat16 __float2bfloat16_rn(float value) {  // of what is no NaN
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
static void stay();
static void __syncthreads();
static void later(void* place, const void* value, int nbytes);
static void flush();
static void drain();
static unsigned long long steps;
"""

_PRIMITIVES = """
static void axe_fence() { flush(); stay(); }
static unsigned axe_load(const unsigned* word) { stay(); drain(); return *word; }
static void axe_acquire(const unsigned*) { stay(); }
static void axe_store(unsigned* word, unsigned value) { stay(); later(word, &value, 4); }
static void axe_store_word(char* place, uint4 word) { stay(); later(place, &word, 16); }
static uint4 axe_load_word(const char* place) {
  stay();
  drain();
  uint4 word;
  std::memcpy(&word, place, 16);
  return word;
}
static void axe_behind() {}
static unsigned long long axe_nanoseconds() { return steps; }
"""

_BEHIND = """
struct Store { void* place; uint4 value; int nbytes; };
struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  std::function<void()> body;
  std::vector<Store> stores;
  int block, number, at_barrier;
  bool done;
};
struct Device { std::vector<std::unique_ptr<Thread>> threads; std::vector<int> waiting; int kernel; double speed; };
static ucontext_t scheduler;
static std::vector<Device> devices;
static Device* device;
static Thread* thread;
static std::mt19937 generator;

static unsigned below(size_t bound) { return generator() % bound; }
static void put(const Store& store) { std::memcpy(store.place, &store.value, store.nbytes); }
static void flush() {
  std::shuffle(thread->stores.begin(), thread->stores.end(), generator);
  for (const Store& store : thread->stores) put(store);
  thread->stores.clear();
}
static void drain() {
  if (thread->stores.empty() || below(8)) return;
  std::swap(thread->stores[below(thread->stores.size())], thread->stores.back());
  put(thread->stores.back());
  thread->stores.pop_back();
}
static void later(void* place, const void* value, int nbytes) {
  Store store = {place, {}, nbytes};
  std::memcpy(&store.value, value, nbytes);
  thread->stores.push_back(store);
}
static void stay() { swapcontext(&thread->context, &scheduler); }
static void __syncthreads() {
  thread->at_barrier = 1;
  if (++device->waiting[thread->block] == blockDim.x) {
    device->waiting[thread->block] = 0;
    for (auto& other : device->threads) if (other->block == thread->block) other->at_barrier = 0;
  }
  while (thread->at_barrier) stay();
}
static void begin() {
  thread->body();
  flush();
  thread->done = true;
  swapcontext(&thread->context, &scheduler);
}

typedef void (*Kernel)(const Exchange, const Around);
static const Kernel kernel_of[] = {KERNELS};

// Each device's kernels, one behind the other; whether all end within so many steps. A device of speed 0 never comes.
extern "C" bool run(int count, int kernels, int threads, const Exchange* told, const Around* arounds, const int* blocks,
                    const int* which, const double* speeds, unsigned seed, unsigned long long most) {
  generator.seed(seed);
  devices.clear();
  devices.resize(count);
  blockDim = {threads};
  std::vector<double> weights(speeds, speeds + count);
  for (Device& each : devices) each.kernel = -1;
  int left = count;
  for (int i = 0; i < count; ++i) left -= speeds[i] == 0;
  for (steps = 1; left; ++steps) {
    if (steps > most) return false;
    int number = std::discrete_distribution<>(weights.begin(), weights.end())(generator);
    device = &devices[number];
    if (device->threads.empty()) {
      if (++device->kernel == kernels) {
        weights[number] = 0;
        --left;
        continue;
      }
      device->waiting.assign(blocks[device->kernel], 0);
      for (int i = 0; i < threads * blocks[device->kernel]; ++i) {
        auto made = std::make_unique<Thread>();
        made->stack = std::make_unique<char[]>(32 << 10);
        made->block = i / threads, made->number = i % threads, made->at_barrier = 0, made->done = false;
        int at = device->kernel;
        const Exchange& moved = told[at * count + number];
        const Around& around = arounds[at * count + number];
        made->body = [=] { kernel_of[which[at]](moved, around); };
        getcontext(&made->context);
        made->context.uc_stack.ss_sp = made->stack.get();
        made->context.uc_stack.ss_size = 32 << 10;
        made->context.uc_link = nullptr;
        makecontext(&made->context, begin, 0);
        device->threads.push_back(std::move(made));
      }
    }
    size_t at = below(device->threads.size());
    thread = device->threads[at].get();
    if (!thread->stores.empty() && below(2)) {  // one of what it has stored is seen, before others
      size_t which = below(thread->stores.size());
      put(thread->stores[which]);
      thread->stores.erase(thread->stores.begin() + which);
    }
    threadIdx = {thread->number}, blockIdx = {thread->block}, gridDim = {blocks[device->kernel]};
    swapcontext(&scheduler, &thread->context);
    if (thread->done) device->threads.erase(device->threads.begin() + at);
  }
  return true;
}
"""


class OnHost:
    """The kernels, compiled; `changes` are made in their source, to see that mistakes are caught."""

    def __init__(self, folder: Path, changes: Sequence[tuple[str, str]] = ()) -> None:
        compiler = shutil.which("g++")
        if compiler is None:
            pytest.skip("no g++, which compiles the kernels for the host")
        lines = source.source().splitlines(keepends=True)
        kernel = 'extern "C" __global__'
        text = "".join(line for line in lines if kernel not in line or any(f" {name}(" in line for name in KERNELS))
        for old, new in ((PRIMITIVES, _PRIMITIVES), *changes):
            assert text.count(old) == 1, f"the kernels' source has {text.count(old)} of {old!r}"
            text = text.replace(old, new)
        for name in HEADERS:
            (folder / name).write_text("")
        (folder / "kernels.cpp").write_text(_BEFORE + text + _BEHIND.replace("KERNELS", ", ".join(KERNELS)))
        command = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-I.", "kernels.cpp", "-o", "kernels.so"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:4000]
        self._run = ctypes.CDLL(str(folder / "kernels.so")).run
        self._run.restype = ctypes.c_bool

    def run(
        self,
        told: Sequence[Sequence[Exchange]],
        arounds: Sequence[Sequence[Around]],
        blocks: Sequence[int],
        which: Sequence[int],
        speeds: Sequence[float],
        movers: int,
        seed: int,
        most: int,
    ) -> bool:
        """Run kernels, each on all devices; whether they end within so many steps."""
        count, kernels = len(speeds), len(told)
        every = (Exchange * (count * kernels))(*(each for row in told for each in row))
        around = (Around * (count * kernels))(*(each for row in arounds for each in row))
        numbers = ctypes.c_int * kernels
        return bool(
            self._run(
                count, kernels, movers + WARP, every, around, numbers(*blocks), numbers(*which),
                (ctypes.c_double * count)(*speeds), seed, ctypes.c_ulonglong(most),
            )
        )  # fmt: skip
