#pragma once

// What the files of the shim share: the state of the launch that runs.

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda_shim/shim.h"

namespace turbomind::cuda_shim {

constexpr size_t kSharedAlignment = 1024;
constexpr int kGroupWarps = 4;
constexpr int kMaxBarrier = 15;
constexpr int kPoison = 0xff;  // NaN as FP32, FP16 and a scale

struct Copy {
  char* to;
  const char* from;
  size_t bytes;
  size_t valid;
};

// Sums to which products add: their values, and the number of products that are not waited for.
struct Sums {
  std::vector<float> values;
  int num_products = 0;
};

// For each warp, the newest part of its work that a thread knows to be over. Barriers separate the
// parts.
using Clock = std::vector<uint32_t>;

struct Thread {
  Clock known;
  Dim3 index;
  int lane = 0;
  int warp = 0;
  bool done = false;
  void* stack_pointer = nullptr;
  uint32_t out[kMaxWords];  // results of the last warp-wide instruction
  std::vector<Copy> uncommitted;
  std::deque<std::vector<Copy>> groups;  // oldest first
  // Products that are not yet waited for, in their order. The first num_performed have happened.
  std::vector<Product> new_products;
  std::deque<std::vector<Product>> product_groups;
  int num_performed = 0;
  std::map<float*, Sums> sums;
  int num_products = 0;  // since the start
  bool registers_fenced = false;
  int num_registers = 0;  // SetRegisters
  uint32_t shared_fences = 0;
  bool lets_next_begin = false;
  bool has_waited = false;  // WaitForPrevious
};

// The last write to a word of shared memory.
struct Write {
  uint32_t block = 0;  // State::num_blocks, or the word was not written in the block
  int thread = -1;
  uint32_t fences = 0;  // of the thread before the write
  uint32_t part = 0;    // of the warp's work
  bool is_barrier = false;
};

// A barrier of some threads.
struct NamedBarrier {
  int num_threads = 0;
  int num_arrived = 0;
  std::vector<int> waiting;
  Clock clock;
};

struct Mbarrier {
  int num_arrivals = 0;
  int num_pending = 0;
  int parity = 0;        // of the current phase
  int owner = -1;        // the thread that initialized it
  int num_meetings = 0;  // of the block until then
  std::vector<int> waiting;
  Clock arriving;  // what those know that have arrived in this phase
  Clock ended;     // and in the phase before
};

struct Warp {
  LaneWords words;
  const char* what = nullptr;
  std::vector<int> waiting;
  int alive = 0;
  uint32_t part = 1;
};

struct Region {
  size_t bytes;
  bool writable;
};

// SplitMix64: the order of the threads needs no better numbers.
struct Random {
  uint64_t state = 0;
  uint64_t operator()() {
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  // Return a number below `end`.
  size_t Below(size_t end) { return ((*this)() >> 32) * end >> 32; }
};

struct State {
  std::map<const char*, Region> regions;  // by their first byte
  const std::function<void()>* kernel = nullptr;
  Dim3 block;
  std::vector<char> shared;
  char* shared_begin = nullptr;
  size_t shared_bytes = 0;
  bool overlaps = false;
  uint32_t num_blocks = 0;    // that have begun in the process
  std::vector<Write> writes;  // by the word of shared memory
  std::vector<Thread> threads;
  std::vector<std::unique_ptr<char[]>> stacks;  // of as many threads as a block has had
  std::vector<Warp> warps;
  std::vector<int> runnable;
  std::vector<int> at_barrier;
  int num_meetings = 0;  // of the block
  Clock block_clock;     // what all threads know from barriers of the block, beside Thread::known
  bool has_other_barriers = false;  // a thread has come to one of some threads
  NamedBarrier named[kMaxBarrier + 1];
  std::map<const char*, Mbarrier> mbarriers;
  int alive = 0;
  int current = -1;
  Thread* current_thread = nullptr;
  void* main_stack = nullptr;
  Random random;
  std::string error;
};

inline State& TheState() {
  static State state;
  return state;
}
inline Thread& Current() { return *TheState().current_thread; }

// Switch from the current thread to another runnable one, or back to the launch if there is none.
void RunAnother();
void Wake(std::vector<int>& waiting);

// Add what `from` knows.
void Merge(const Clock& from, Clock* to);
// Tell others, by their clock, what the current thread knows and that it has come to a barrier.
void Publish(Clock* clock);

}  // namespace turbomind::cuda_shim
