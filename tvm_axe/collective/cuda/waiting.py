"""How a kernel's threads wait for a peer's and tell it: the source, and the words in the devices' slabs.

Source: PTX ISA, "Memory Consistency Model", "Release and Acquire Patterns".
"""

from __future__ import annotations

ROW, SENT, EXCHANGE, COUNT, OFF = 256, 240, 253, 254, 255
"""Words of a block's row: the peers', those that say what peers sent, the numbers of the block's last exchange and last
meeting, and, in row 0, whether a meeting has been called off."""
BLOCKS = 128
"""The most blocks of a kernel that waits, each of which has a row of words."""

PRIMITIVES = """
__device__ void axe_fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ unsigned axe_load(const unsigned* word) {
  unsigned seen;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(word) : "memory");
  return seen;
}
// Whoever sees what was stored behind a fence sees what was before it; it waits for nothing that the thread has stored.
__device__ void axe_acquire(const unsigned* word) {
  unsigned seen;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(word) : "memory");
}
__device__ void axe_store(unsigned* word, unsigned value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// A word of 16 bytes, a scalar, which is stored, or loaded, at once.
__device__ void axe_store_word(char* place, uint4 word) {
  unsigned long long low = word.x | static_cast<unsigned long long>(word.y) << 32;
  unsigned long long high = word.z | static_cast<unsigned long long>(word.w) << 32;
  asm volatile("{ .reg .b128 word; mov.b128 word, {%1, %2}; st.relaxed.sys.global.b128 [%0], word; }" ::"l"(place),
               "l"(low), "l"(high) : "memory");
}
__device__ uint4 axe_load_word(const char* place) {
  unsigned long long low, high;
  asm volatile("{ .reg .b128 word; ld.relaxed.sys.global.b128 word, [%2]; mov.b128 {%0, %1}, word; }"
               : "=l"(low), "=l"(high) : "l"(place) : "memory");
  return make_uint4(low, low >> 32, high, high >> 32);
}

// What a kernel does behind this is behind the kernel before, also if it was launched while that one ended.
__device__ void axe_behind() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ unsigned long long axe_nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}
"""
"""How kernels touch what peers touch at the same time; all that waiting and telling is made of."""

MEET = """
// Whether a wait is given up at this poll, since it takes too long or a peer has called it off: then it is reported.
__device__ bool axe_given_up(int polls, unsigned long long& start, unsigned* off, unsigned* missing,
                             unsigned long long limit) {
  if (polls % 64 != 63) return false;
  unsigned called_off = axe_load(off);
  unsigned long long now = axe_nanoseconds();
  if (start == 0) start = now;
  if (!called_off && now - start <= limit) return false;
  *missing = 1;
  axe_store(off, 1);  // no later wait goes on
  return true;
}

// Wait until a word of the device's own slab is as large as a target, or that is given up.
__device__ void axe_await(unsigned* word, unsigned target, unsigned* off, unsigned* missing,
                          unsigned long long limit) {
  unsigned long long start = 0;
  for (int polls = 0;; ++polls) {
    unsigned seen = axe_load(word);
    if (static_cast<int>(seen - target) >= 0 || axe_given_up(polls, start, off, missing, limit)) break;
  }
  axe_acquire(word);
}

// Tell a peer that what happened before, in this device's memory or another's, has.
__device__ void axe_tell(unsigned* word, unsigned count) {
  axe_fence();
  axe_store(word, count);
}
"""
