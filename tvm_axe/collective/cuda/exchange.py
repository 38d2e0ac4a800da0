"""The source of exchanges: collectives of few bytes.

| collective | what a device sends to a peer | what it does with what has come |
|---|---|---|
| all-reduce | its slab | adds it to its own |
| reduce-scatter | the peer's part of its slab | adds it to its own part |
| all-gather | its slab | puts it into the sender's place |
| all-to-all | the peer's part of its slab | puts it into the sender's place |
| all-reduce in two steps | the peer's part of its slab; then its own part's sum | adds it; puts it into its place |

A collective of few bytes holds no meeting: it is one, an exchange. A device stores what a peer is to have to that
peer's *staging*, a part of the tensor of words, so that the way of a message is gone once, not there and back and there
again, as where a peer is told, reads, and tells that it has read. Who has all that its peers sent knows that they have
come to the exchange, and nobody reads what is another's. The staging has two halves, of which exchanges take turns: who
sends the next but one has what the peers sent in the next, which they did behind this one. Small messages say
themselves that they are there: each 16 bytes are 12 of data and the exchange's number, stored at once, so any data may
be sent. Of larger ones a block says so, as where it meets.

An exchange orders what is before and behind it as a meeting does, unless that is asked for *quietly*, and for that a
thread fences and tells, is told and acquires. That isn't in the way of marked words, which need no order: a block of
its own does it beside those that move, and the kernel ends when all have. A fence waits for what the threads of its
multiprocessor have stored, of which that block has none; and a block writes the number of its exchange last. A thread
has its data and the number at once, as it reads both by itself, and keeps the data to add them.

Source: PTX ISA, "Memory Consistency Model", "Vector Data-types" and "Release and Acquire Patterns".
"""

from __future__ import annotations

import ctypes

from tvm_axe.collective.cuda.waiting import BLOCKS, EXCHANGE, OFF, ROW, SENT

THREADS = 512
"""Of a block; in an exchange those that move, beside a warp more."""
WARP = 32
"""Threads that tell and wait."""
VECTOR = 16
"""Bytes of the longest load."""
PHASES, KEPT = 9, 32
"""What is sampled of an exchange, and of how many, where that is asked for: see `source`."""
EXCHANGED = 8
"""The most devices of an exchange."""
GROUP = 3
"""Vectors that are sent as one more marked words."""
LINE = 8
"""Words in 128 bytes, which what a warp stores to a peer at once begins with, as it then takes the fewest packets."""


class Exchange(ctypes.Structure):
    """What an exchange moves: `total` vectors of `VECTOR` bytes from each device to each, `share` a block.

    From what is for one device to what is for the next are `stride` vectors; 0 if all are sent the same. The staging
    begins at byte `staging` of a slab; a device's part of a half has `half` bytes, of which a block has `region`.
    """

    _fields_ = (
        ("source", ctypes.c_uint64),
        ("target", ctypes.c_uint64),
        ("total", ctypes.c_int64),
        ("share", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("staging", ctypes.c_int64),
        ("half", ctypes.c_int64),
        ("region", ctypes.c_int64),
    )


SOURCE = f"""
#ifdef AXE_PHASES
// When each block came where, in its last exchanges; only measurements build this.
struct Phases {{ long long ticks[{PHASES}]; unsigned long long nanoseconds[2]; unsigned long long seen; }};
__device__ Phases axe_phases[{KEPT}][{BLOCKS}];
// A warp issues in order, so what is stored first must be there when the clock is read.
__device__ void axe_came(unsigned number, int phase, unsigned seen) {{
  Phases& phases = axe_phases[number % {KEPT}][blockIdx.x];
  *const_cast<volatile unsigned long long*>(&phases.seen) = seen;
  phases.ticks[phase] = clock64();
  if (phase == {PHASES} - 1) phases.nanoseconds[1] = axe_nanoseconds();
}}
#define AXE_BEGAN const long long began = clock64(); const unsigned long long begun = axe_nanoseconds();
#define AXE_CAME(thread, phase, seen) \\
  if (threadIdx.x == (thread)) axe_came(number, phase, static_cast<unsigned>(seen))
#define AXE_ENDED                                             \\
  if (threadIdx.x == 0) {{                                     \\
    Phases& phases = axe_phases[number % {KEPT}][blockIdx.x]; \\
    phases.ticks[0] = began, phases.nanoseconds[0] = begun;   \\
    axe_came(number, {PHASES} - 1, number);                   \\
  }}
#else
#define AXE_BEGAN
#define AXE_CAME(thread, phase, seen)
#define AXE_ENDED
#endif

// Three vectors as four words, of which each is stored at once: 12 bytes of data, and the number of the exchange. From
// one to the next are `pitch` words: those of threads beside each other lie beside each other.
__device__ void send_marked(char* place, int pitch, const uint4* data, unsigned number) {{
#pragma unroll
  for (int k = 0; k < {GROUP}; ++k) {{
    axe_store_word(place + k * pitch * {VECTOR}, make_uint4(data[k].x, data[k].y, data[k].z, number));
  }}
  axe_store_word(place + {GROUP} * pitch * {VECTOR}, make_uint4(data[0].w, data[1].w, data[2].w, number));
}}

// What a peer has stored there by now.
__device__ void load_marked(const char* place, int pitch, uint4 (&word)[{GROUP} + 1]) {{
#pragma unroll
  for (int k = 0; k <= {GROUP}; ++k) word[k] = axe_load_word(place + k * pitch * {VECTOR});
}}

// Whether such words are all of that exchange.
__device__ bool is_marked(const uint4 (&word)[{GROUP} + 1], unsigned number) {{
  bool there = true;
#pragma unroll
  for (int k = 0; k <= {GROUP}; ++k) there = there && word[k].w == number;
  return there;
}}

// The device so many behind this one, around the ring; a division would take longer than to load a word.
__device__ int behind(const Around& around, int away) {{
  const int peer = around.me + away;
  return peer < around.devices ? peer : peer - around.devices;
}}

// What the peers from `begin` on have sent, in that order, once it is there; `place` says where it comes to. What comes
// from several is loaded before any of it is looked at. Of the device itself, and of none, nothing comes.
template <int PEERS, typename Place>
__device__ void collect(uint4 (&data)[PEERS][{GROUP}], int begin, const Place& place, int pitch, unsigned number,
                        const Around& around) {{
  unsigned* off = reinterpret_cast<unsigned*>(around.slabs + around.me * around.distance) + {OFF};
  unsigned long long start = 0;
  for (int polls = 0;; ++polls) {{
    int absent = -1;
    uint4 word[PEERS][{GROUP} + 1];
#pragma unroll
    for (int j = 0; j < PEERS; ++j) {{
      const int from = begin + j;
      if (from < around.devices && from != around.me) load_marked(place(from), pitch, word[j]);
    }}
#pragma unroll
    for (int j = 0; j < PEERS; ++j) {{
      const int from = begin + j;
      if (from >= around.devices || from == around.me) continue;
      if (!is_marked(word[j], number)) absent = from;
      const unsigned last[{GROUP}] = {{word[j][{GROUP}].x, word[j][{GROUP}].y, word[j][{GROUP}].z}};
#pragma unroll
      for (int k = 0; k < {GROUP}; ++k) data[j][k] = make_uint4(word[j][k].x, word[j][k].y, word[j][k].z, last[k]);
    }}
    if (absent < 0 || axe_given_up(polls, start, off, around.missing + absent, around.limit)) return;
  }}
}}

// Where this block's words from a device are in another's staging, in the half whose turn it is.
__device__ char* staged(const Exchange& moved, const Around& around, unsigned number, int whose, int from) {{
  const int half = static_cast<int>(moved.half), region = static_cast<int>(moved.region);  // all is less than 2 GiB
  return around.slabs + whose * around.distance + moved.staging +
         static_cast<int>((number & 1) * around.devices + from) * half + blockIdx.x * region;
}}

// Tell the peers' blocks of this number, and be told by them: the last warp does, whose threads have these lanes.
__device__ void meet_others(const Around& around, int lane, unsigned number) {{
  if (lane < 0 || lane >= around.devices || lane == around.me) return;
  unsigned* words = reinterpret_cast<unsigned*>(around.slabs + around.me * around.distance);
  unsigned* theirs = reinterpret_cast<unsigned*>(around.slabs + lane * around.distance) + {ROW} * blockIdx.x;
  axe_tell(theirs + {SENT} + around.me, number);
  AXE_CAME(blockDim.x - {WARP} + (around.me == 0), 5, number);
  axe_await(words + {ROW} * blockIdx.x + {SENT} + lane, number, words + {OFF}, around.missing + lane, around.limit);
  AXE_CAME(blockDim.x - {WARP} + (around.me == 0), 6, number);
}}

__device__ void end_exchange(unsigned* row, unsigned number, const Around& around) {{
  __syncthreads();  // all of the block have read its number
  if (threadIdx.x == 0) row[{EXCHANGE}] = number;
  meet_block(around, around.after);
}}

template <typename T, int LANES> union Vector {{ uint4 whole; Pack<T, LANES> pack; }};

// Add a vector to a sum, which it may begin.
template <typename T, typename Wide, int LANES>
__device__ void add_vector(Wide (&sum)[LANES], const uint4& term, bool begins) {{
  Vector<T, LANES> vector;
  vector.whole = term;
#pragma unroll
  for (int at = 0; at < LANES; ++at) {{
    Wide wide = widened<Wide, T>(vector.pack.lane[at]);
    sum[at] = begins ? wide : sum[at] + wide;
  }}
}}

template <typename T, typename Wide, int LANES> __device__ uint4 rounded(const Wide (&sum)[LANES]) {{
  Vector<T, LANES> vector;
#pragma unroll
  for (int at = 0; at < LANES; ++at) vector.pack.lane[at] = narrowed<T, Wide>(sum[at]);
  return vector.whole;
}}

// All but the last warp of a block move; the last tells peers and waits for what they tell. Of marked words, a last
// block does that, and nothing else, unless the exchange is quiet. What comes is added, or placed beside each other.
template <typename T, typename Wide, int LANES, bool MARKED, bool PLACED>
__device__ void exchange(const Exchange& moved, const Around& around) {{
  AXE_BEGAN
  axe_behind();
  const int AHEAD = MARKED ? {GROUP} : 4, PEERS = MARKED ? 4 : 1;  // vectors of a thread at a time, and devices
  const int movers = blockDim.x - {WARP}, lane = threadIdx.x - movers;
  unsigned* row = reinterpret_cast<unsigned*>(around.slabs + around.me * around.distance) + {ROW} * blockIdx.x;
  long long first = blockIdx.x * moved.share;
  const int count = lane >= 0 ? 0 : max(0, static_cast<int>(min(moved.share, moved.total - first)));
  // Where threads begin, from one vector of a thread to its next, and from one turn to the next.
  const int begins = MARKED ? (count + AHEAD - 1) / AHEAD : count, apart = MARKED ? begins : movers;
  const int pitch = (begins + {LINE} - 1) / {LINE} * {LINE};  // the same of marked words
  const int step = MARKED ? movers : AHEAD * movers;
  const uint4* source = reinterpret_cast<const uint4*>(moved.source) + first;
  uint4* target = reinterpret_cast<uint4*>(moved.target) + first;
  uint4 own[AHEAD] = {{}}, others[AHEAD] = {{}};
  auto load = [&](uint4* data, int whose, int base) {{
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) {{
      int i = base + k * apart;
      if (base < begins && i < count) data[k] = source[whose * moved.stride + i];
    }}
  }};
  load(own, around.me, threadIdx.x);  // beside the number: neither waits for the other
  const unsigned number = row[{EXCHANGE}] + 1;
  for (int base = threadIdx.x; base < begins; base += step) {{
    if (base != threadIdx.x) load(own, around.me, base);
    if (base == threadIdx.x) {{ AXE_CAME(0, 1, own[0].x); }}
    for (int away = 1; away < around.devices; ++away) {{
      const int peer = behind(around, away);
      char* place = staged(moved, around, number, peer, around.me) + base * {VECTOR};
      if (moved.stride) load(others, peer, base);
      if constexpr (MARKED) {{
        if (moved.stride) send_marked(place, pitch, others, number);
        else send_marked(place, pitch, own, number);
        continue;
      }}
#pragma unroll
      for (int k = 0; k < AHEAD; ++k) {{
        int i = base + k * apart;
        if (i < count) *reinterpret_cast<uint4*>(place + k * apart * {VECTOR}) = moved.stride ? others[k] : own[k];
      }}
    }}
  }}
  AXE_CAME(0, 2, number);
  if (!MARKED) {{
    __syncthreads();
    meet_others(around, lane, number);
    __syncthreads();
  }} else if (around.before && blockIdx.x == gridDim.x - 1) {{
    meet_others(around, lane, number);  // one block's is enough to order what is before and behind
  }}
  for (int base = threadIdx.x; base < begins; base += step) {{
    if (begins > step) load(own, around.me, base);
    auto place = [&](int from) {{ return staged(moved, around, number, around.me, from) + base * {VECTOR}; }};
    Wide sum[AHEAD][LANES];
    for (int begin = 0; begin < around.devices; begin += PEERS) {{
      uint4 term[PEERS][AHEAD] = {{}};
      if constexpr (MARKED) {{
        collect(term, begin, place, pitch, number, around);
      }} else if (begin != around.me) {{
        const char* words = place(begin);
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {{
          if (base + k * apart >= count) continue;
          term[0][k] = *reinterpret_cast<const uint4*>(words + k * apart * {VECTOR});
        }}
      }}
#pragma unroll
      for (int j = 0; j < PEERS; ++j) {{
        const int from = begin + j;
        if (from >= around.devices) continue;
#pragma unroll
        for (int k = 0; k < AHEAD; ++k) {{
          int i = base + k * apart;
          if (from == around.me) term[j][k] = own[k];
          if constexpr (PLACED) {{
            if (i < count) target[from * moved.total + i] = term[j][k];
          }} else {{
            add_vector<T>(sum[k], term[j][k], from == 0);
          }}
        }}
      }}
      if (PLACED && begin == 0) {{ AXE_CAME(0, 3, term[0][0].x); }}
    }}
    if (PLACED) continue;
    AXE_CAME(0, 3, sum[0][0]);
#pragma unroll
    for (int k = 0; k < AHEAD; ++k) {{
      int i = base + k * apart;
      if (i < count) target[i] = rounded<T>(sum[k]);
    }}
  }}
  AXE_CAME(0, 4, number);
  end_exchange(row, number, around);
  AXE_ENDED
}}

// An all-reduce in two steps, of marked words: each device is sent the terms of its part, of `stride` vectors, which it
// adds, and sends the sum. A block has a share of every part, and sends all of it to all, also where the last parts are
// less. Its words of the second step lie behind those of the first. The sum may be where the terms were: who stores a
// vector is who has read it.
template <typename T, typename Wide, int LANES>
__device__ void exchange_twice(const Exchange& moved, const Around& around) {{
  AXE_BEGAN
  axe_behind();
  const int PEERS = 4;
  const int movers = blockDim.x - {WARP}, lane = threadIdx.x - movers;
  unsigned* row = reinterpret_cast<unsigned*>(around.slabs + around.me * around.distance) + {ROW} * blockIdx.x;
  const int total = static_cast<int>(moved.total), part = static_cast<int>(moved.stride);
  const int share = static_cast<int>(moved.share), first = blockIdx.x * share;
  const int second = static_cast<int>(moved.region) / 2, count = lane >= 0 ? 0 : max(0, min(share, part - first));
  const int begins = (count + {GROUP} - 1) / {GROUP}, pitch = (begins + {LINE} - 1) / {LINE} * {LINE};
  // How many vectors of a device's part this block has.
  auto ends = [&](int whose) {{ return min(count, total - whose * part - first); }};
  auto load = [&](uint4* data, int whose, int base) {{
    const uint4* source = reinterpret_cast<const uint4*>(moved.source) + whose * part + first;
    const int end = ends(whose);
#pragma unroll
    for (int k = 0; k < {GROUP}; ++k) {{
      if (base + k * begins < end) data[k] = source[base + k * begins];
    }}
  }};
  auto store = [&](const uint4* data, int whose, int base) {{
    uint4* target = reinterpret_cast<uint4*>(moved.target) + whose * part + first;
    const int end = ends(whose);
#pragma unroll
    for (int k = 0; k < {GROUP}; ++k) {{
      if (base + k * begins < end) target[base + k * begins] = data[k];
    }}
  }};
  uint4 term[PEERS][{GROUP}] = {{}};
  auto load_next = [&](int away, int base) {{  // of the next peers, before any of it is sent
#pragma unroll
    for (int j = 0; j < PEERS; ++j) {{
      if (away + j < around.devices) load(term[j], behind(around, away + j), base);
    }}
  }};
  if (threadIdx.x < begins) load_next(1, threadIdx.x);  // beside the number: neither waits for the other
  const unsigned number = row[{EXCHANGE}] + 1;
  for (int base = threadIdx.x; base < begins; base += movers) {{
    for (int away = 1; away < around.devices; away += PEERS) {{
      if (base != threadIdx.x || away != 1) load_next(away, base);
      if (base == threadIdx.x && away == 1) {{ AXE_CAME(0, 1, term[0][0].x); }}
#pragma unroll
      for (int j = 0; j < PEERS; ++j) {{
        if (away + j >= around.devices) continue;
        const int peer = behind(around, away + j);
        send_marked(staged(moved, around, number, peer, around.me) + base * {VECTOR}, pitch, term[j], number);
      }}
    }}
  }}
  AXE_CAME(0, 2, number);
  if (around.before && blockIdx.x == gridDim.x - 1) meet_others(around, lane, number);
  for (int base = threadIdx.x; base < begins; base += movers) {{
    uint4 own[{GROUP}] = {{}};
    load(own, around.me, base);
    Wide sum[{GROUP}][LANES];
    for (int begin = 0; begin < around.devices; begin += PEERS) {{
      uint4 terms[PEERS][{GROUP}] = {{}};
      auto place = [&](int from) {{ return staged(moved, around, number, around.me, from) + base * {VECTOR}; }};
      collect(terms, begin, place, pitch, number, around);
#pragma unroll
      for (int j = 0; j < PEERS; ++j) {{
        const int from = begin + j;
        if (from >= around.devices) continue;
#pragma unroll
        for (int k = 0; k < {GROUP}; ++k) add_vector<T>(sum[k], from == around.me ? own[k] : terms[j][k], from == 0);
      }}
    }}
    AXE_CAME(0, 3, sum[0][0]);
    uint4 result[{GROUP}];
#pragma unroll
    for (int k = 0; k < {GROUP}; ++k) result[k] = rounded<T>(sum[k]);
    for (int away = 1; away < around.devices; ++away) {{
      const int peer = behind(around, away);
      char* place = staged(moved, around, number, peer, around.me) + second;
      send_marked(place + base * {VECTOR}, pitch, result, number);
    }}
    store(result, around.me, base);
  }}
  AXE_CAME(0, 4, number);
  for (int base = threadIdx.x; base < begins; base += movers) {{
    for (int begin = 0; begin < around.devices; begin += PEERS) {{
      uint4 sums[PEERS][{GROUP}] = {{}};
      auto place = [&](int from) {{
        return staged(moved, around, number, around.me, from) + second + base * {VECTOR};
      }};
      collect(sums, begin, place, pitch, number, around);
#pragma unroll
      for (int j = 0; j < PEERS; ++j) {{
        const int from = begin + j;
        if (from < around.devices && from != around.me) store(sums[j], from, base);
      }}
    }}
  }}
  AXE_CAME(0, 7, number);
  end_exchange(row, number, around);
  AXE_ENDED
}}
"""
