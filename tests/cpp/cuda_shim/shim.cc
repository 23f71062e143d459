#include "cuda_shim/shim.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>

#include "turbomind/core/float_convert.h"

// Save the callee-saved registers on the current stack and restore those of the other stack.
extern "C" void turbomind_shim_switch(void** from, void* to);
asm(R"(
.text
.globl turbomind_shim_switch
.type turbomind_shim_switch, @function
turbomind_shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size turbomind_shim_switch, .-turbomind_shim_switch
)");

namespace turbomind::cuda_shim {
namespace {

constexpr size_t kStackBytes = 128 << 10;
constexpr size_t kSharedAlignment = 1024;
constexpr int kGroupWarps = 4;
constexpr int kProductRows = 64;   // of a
constexpr int kProductSteps = 16;  // columns of a
constexpr int kMaxBarrier = 15;
constexpr int kMaxRegisters = 65536;
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
  std::vector<char> stack;
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

struct State {
  std::map<const char*, Region> regions;  // by their first byte
  const std::function<void()>* kernel = nullptr;
  Dim3 block;
  std::vector<char> shared;
  char* shared_begin = nullptr;
  size_t shared_bytes = 0;
  bool overlaps = false;
  std::vector<Write> writes;  // by the word of shared memory
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<int> runnable;
  std::vector<int> at_barrier;
  int num_meetings = 0;  // of the block
  Clock block_clock;
  NamedBarrier named[kMaxBarrier + 1];
  std::map<const char*, Mbarrier> mbarriers;
  int alive = 0;
  int current = -1;
  void* main_stack = nullptr;
  std::mt19937_64 random;
  std::string error;
};

State& TheState() {
  static State state;
  return state;
}

Thread& Current() {
  State& s = TheState();
  return s.threads[static_cast<size_t>(s.current)];
}

void Merge(const Clock& from, Clock* to) {
  to->resize(std::max(to->size(), from.size()));
  for (size_t i = 0; i < from.size(); ++i) {
    (*to)[i] = std::max((*to)[i], from[i]);
  }
}

// Tell others, by their clock, what the current thread knows and that it has come to a barrier.
void Publish(Clock* clock) {
  Thread& me = Current();
  const auto warp = static_cast<size_t>(me.warp);
  me.known[warp] = TheState().warps[warp].part++;
  Merge(me.known, clock);
}

std::string Text(const Dim3& d) {
  return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
}

}  // namespace

void Fail(const std::string& what) {
  State& s = TheState();
  Thread& me = Current();
  s.error = what + ", block " + Text(s.block) + ", thread " + Text(me.index);
  turbomind_shim_switch(&me.stack_pointer, s.main_stack);
  std::abort();  // a failed launch is never resumed
}

namespace {

// Switch from the current thread to another runnable one, or back to the launch if there is none.
void RunAnother() {
  State& s = TheState();
  Thread& me = Current();
  if (s.runnable.empty()) {
    turbomind_shim_switch(&me.stack_pointer, s.main_stack);
    return;
  }
  const size_t pick = s.random() % s.runnable.size();
  s.current = s.runnable[pick];
  s.runnable[pick] = s.runnable.back();
  s.runnable.pop_back();
  if (&Current() != &me) {
    turbomind_shim_switch(&me.stack_pointer, Current().stack_pointer);
  }
}

void Wake(std::vector<int>& waiting) {
  State& s = TheState();
  s.runnable.insert(s.runnable.end(), waiting.begin(), waiting.end());
  waiting.clear();
}

void EndThread() {
  State& s = TheState();
  Thread& me = Current();
  if (s.overlaps && !(me.lets_next_begin && me.has_waited)) {
    Fail("a thread ended without LetNextBegin and WaitForPrevious");
  }
  me.done = true;
  --s.alive;
  Warp& warp = s.warps[static_cast<size_t>(me.warp)];
  --warp.alive;
  if (!warp.waiting.empty()) {
    Fail(std::string("a lane ended while its warp waits at ") + warp.what);
  }
  if (!me.uncommitted.empty() || !me.groups.empty()) {
    Fail("a thread ended with copies that it never waited for");
  }
  if (!me.sums.empty()) {
    Fail("a thread ended with products that it never waited for");
  }
  if (s.alive > 0 && static_cast<int>(s.at_barrier.size()) == s.alive) {
    Wake(s.at_barrier);
    ++s.num_meetings;
  }
  RunAnother();
  std::abort();
}

void Entry() {
  (*TheState().kernel)();
  EndThread();
}

void Prepare(Thread& thread) {
  thread.stack.resize(kStackBytes);
  const auto end = reinterpret_cast<uintptr_t>(thread.stack.data() + kStackBytes) & ~uintptr_t{15};
  void** top = reinterpret_cast<void**>(end);
  *--top = nullptr;  // lets Entry begin as if it had been called
  *--top = reinterpret_cast<void*>(&Entry);
  for (int i = 0; i < 6; ++i) {
    *--top = nullptr;
  }
  thread.stack_pointer = top;
}

void StartBlock(const LaunchShape& shape) {
  State& s = TheState();
  std::memset(s.shared_begin, kPoison, s.shared_bytes);
  s.writes.assign(s.shared_bytes / 4 + 1, Write());
  const size_t count = size_t{shape.block.x} * shape.block.y * shape.block.z;
  s.threads.resize(count);
  s.warps.assign((count + kWarp - 1) / kWarp, Warp());
  s.runnable.clear();
  s.at_barrier.clear();
  s.num_meetings = 0;
  s.block_clock.clear();
  std::fill(std::begin(s.named), std::end(s.named), NamedBarrier());
  s.mbarriers.clear();
  s.alive = static_cast<int>(count);
  for (size_t i = 0; i < count; ++i) {
    Thread& thread = s.threads[i];
    const unsigned at = static_cast<unsigned>(i);
    thread.index = {at % shape.block.x, at / shape.block.x % shape.block.y,
                    at / shape.block.x / shape.block.y};
    thread.lane = static_cast<int>(i % kWarp);
    thread.warp = static_cast<int>(i / kWarp);
    thread.done = false;
    thread.known.assign(s.warps.size(), 0);
    thread.uncommitted.clear();
    thread.groups.clear();
    thread.new_products.clear();
    thread.product_groups.clear();
    thread.num_performed = 0;
    thread.sums.clear();
    thread.num_products = 0;
    thread.registers_fenced = false;
    thread.num_registers = 0;
    thread.lets_next_begin = false;
    thread.has_waited = false;
    ++s.warps[i / kWarp].alive;
    Prepare(thread);
    s.runnable.push_back(static_cast<int>(i));
  }
}

// Check what the threads of an ended block have done in common.
void CheckGroups() {
  State& s = TheState();
  const auto fail = [&](const char* what) { s.error = "block " + Text(s.block) + ": " + what; };
  int num_registers = 0;
  for (const Thread& thread : s.threads) {
    const Thread& first =
        s.threads[static_cast<size_t>(thread.warp / kGroupWarps * kGroupWarps) * kWarp];
    if (thread.num_products != first.num_products) {
      fail("the warps of a group have different products");
    }
    if (thread.num_registers != first.num_registers) {
      fail("the warps of a group have different numbers of registers");
    }
    num_registers += thread.num_registers;
  }
  if (num_registers > kMaxRegisters) {
    fail("threads have more registers than an SM");
  }
  for (const NamedBarrier& barrier : s.named) {
    if (barrier.num_arrived > 0) {
      fail("nobody waits for arrivals at a barrier");
    }
  }
}

void RunBlock(const LaunchShape& shape) {
  State& s = TheState();
  StartBlock(shape);
  const size_t pick = s.random() % s.runnable.size();
  s.current = s.runnable[pick];
  s.runnable[pick] = s.runnable.back();
  s.runnable.pop_back();
  turbomind_shim_switch(&s.main_stack, Current().stack_pointer);
  if (s.error.empty() && s.alive > 0) {
    s.error = "block " + Text(s.block) + " hangs: " + std::to_string(s.alive) + " threads wait, " +
              std::to_string(s.at_barrier.size()) + " of them at a barrier";
  }
  if (s.error.empty()) {
    CheckGroups();
  }
}

bool AreUntouched(const float* sums, size_t count) {
  return std::all_of(sums, sums + count, [](float sum) { return FloatBits(sum) == ~0u; });
}

float ValueAt(const Product& product, const void* values, int index) {
  uint16_t bits = 0;
  std::memcpy(&bits, static_cast<const char*>(values) + 2 * index, sizeof(bits));
  return product.is_bfloat ? BFloat16ToFloat(bits) : HalfToFloat(bits);
}

// Return what the number of a piece of 16 bytes is combined with in this row.
int Swizzle(const Product& product, int row) {
  return product.row_bytes == 128 ? row % 8 : row / 2 % 4;
}

// Return whether the current thread knows that a write is over. Lanes of a warp know each other's.
bool IsKnown(const Write& write) {
  const State& s = TheState();
  const Thread& me = s.threads[static_cast<size_t>(s.current)];
  if (write.thread < 0) {
    return true;
  }
  const int warp = s.threads[static_cast<size_t>(write.thread)].warp;
  return warp == me.warp || write.part <= me.known[static_cast<size_t>(warp)];
}

// Check `num_rows` rows that a product reads.
void CheckRows(const Product& product, const char* rows, int num_rows) {
  const State& s = TheState();
  const auto bytes = static_cast<size_t>(num_rows) * static_cast<size_t>(product.row_bytes);
  CheckAccess(Space::kShared, rows, bytes, static_cast<size_t>(8 * product.row_bytes));
  const auto first = static_cast<size_t>(rows - s.shared_begin) / 4;
  for (size_t word = first; word < first + bytes / 4; ++word) {
    const Write& write = s.writes[word];
    if (write.thread >= 0 &&
        write.fences == s.threads[static_cast<size_t>(write.thread)].shared_fences) {
      Fail("a product reads shared memory that was written without a fence after it");
    }
    if (!IsKnown(write)) {
      Fail("a product reads shared memory that another warp wrote without a barrier after it");
    }
  }
}

const char* TileOf(const Product& product, const char* columns) {
  return columns - reinterpret_cast<uintptr_t>(columns) % static_cast<size_t>(product.row_bytes);
}

void CheckColumns(const Product& product, const char* columns, int num_rows) {
  CheckRows(product, TileOf(product, columns), num_rows);
  CheckAccess(Space::kShared, columns, 32, 32);
}

void CheckTiles(const Product& product) {
  if (product.a != nullptr) {
    CheckColumns(product, product.a, kProductRows);
  }
  if (!product.is_transposed) {
    CheckColumns(product, product.b, product.num_columns);
    return;
  }
  for (int column = 0; column < product.num_columns; column += product.row_bytes / 2) {
    const int slab = column * 2 / product.row_bytes;
    CheckRows(product, product.b + slab * product.slab_bytes, kProductSteps);
  }
}

using StepValues = float[kProductSteps];

// Read a row of a tile from 16 columns on.
void ReadColumns(const Product& product, const char* columns, int row, StepValues& values) {
  const char* tile = TileOf(product, columns);
  for (int k = 0; k < kProductSteps; ++k) {
    const auto piece = static_cast<int>(columns - tile) / 16 + k / 8;
    const char* from = tile + row * product.row_bytes + (piece ^ Swizzle(product, row)) * 16;
    values[k] = ValueAt(product, from, k % 8);
  }
}

// Read the values of b for a column of the sums.
void ReadFactors(const Product& product, int column, StepValues& values) {
  if (!product.is_transposed) {
    ReadColumns(product, product.b, column, values);
    return;
  }
  const int slab_columns = product.row_bytes / 2;
  const char* slab = product.b + column / slab_columns * product.slab_bytes;
  const int at = column % slab_columns;
  for (int k = 0; k < kProductSteps; ++k) {
    const char* from = slab + k * product.row_bytes + (at / 8 ^ Swizzle(product, k)) * 16;
    values[k] = ValueAt(product, from, at % 8);
  }
}

// Lane 4 g + t has the rows g and g + 8 of its warp's, and the columns 8 n + 2 t and the next one.
void Perform(Thread& thread, const Product& product) {
  std::vector<float>& sums = thread.sums[product.sums].values;
  StepValues a[2];
  for (int half = 0; half < 2; ++half) {
    if (product.a == nullptr) {
      for (int k = 0; k < kProductSteps; ++k) {
        a[half][k] = ValueAt(product, product.factors[half], k);
      }
    } else {
      const int row = thread.warp % kGroupWarps * 16 + thread.lane / 4 + 8 * half;
      ReadColumns(product, product.a, row, a[half]);
    }
  }
  for (int column = thread.lane % 4 * 2; column < product.num_columns;
       column += column % 2 == 0 ? 1 : 7) {
    StepValues b;
    ReadFactors(product, column, b);
    for (int half = 0; half < 2; ++half) {
      float& sum = sums[static_cast<size_t>(column / 8 * 4 + half * 2 + column % 2)];
      sum = product.adds ? sum : 0.f;
      for (int k = 0; k < kProductSteps; ++k) {
        sum += a[half][k] * b[k];
      }
    }
  }
}

// Perform the thread's first `count` products, unless they have happened.
void PerformProducts(Thread& thread, int count) {
  int index = 0;
  const auto perform = [&](const std::vector<Product>& products) {
    for (const Product& product : products) {
      if (index >= thread.num_performed && index < count) {
        Perform(thread, product);
      }
      ++index;
    }
  };
  for (const std::vector<Product>& group : thread.product_groups) {
    perform(group);
  }
  perform(thread.new_products);
  thread.num_performed = std::max(thread.num_performed, count);
}

void Perform(const Copy& copy) {
  std::memset(copy.to, 0, copy.bytes);
  std::memcpy(copy.to, copy.from, copy.valid);
}

}  // namespace

Buffer::Buffer(const void* data, size_t bytes, Access access) : data_(data) {
  TheState().regions[static_cast<const char*>(data)] = {bytes, access == kReadWrite};
}

Buffer::~Buffer() { TheState().regions.erase(static_cast<const char*>(data_)); }

void Launch(const LaunchShape& shape, const std::function<void()>& kernel) {
  State& s = TheState();
  s.kernel = &kernel;
  s.random.seed(shape.seed);
  s.error.clear();
  s.shared.assign(shape.shared_bytes + kSharedAlignment, 0);
  s.shared_begin =
      s.shared.data() + (-reinterpret_cast<uintptr_t>(s.shared.data()) & (kSharedAlignment - 1));
  s.shared_bytes = shape.shared_bytes;
  s.overlaps = shape.overlaps;
  for (unsigned z = 0; z < shape.grid.z; ++z) {
    for (unsigned y = 0; y < shape.grid.y; ++y) {
      for (unsigned x = 0; x < shape.grid.x; ++x) {
        s.block = {x, y, z};
        RunBlock(shape);
        if (!s.error.empty()) {
          throw KernelError(s.error);
        }
      }
    }
  }
}

Dim3 ThreadIndex() { return Current().index; }
Dim3 BlockIndex() { return TheState().block; }
char* SharedMemory() { return TheState().shared_begin; }

void CheckAccess(Space space, const void* address, size_t bytes, size_t alignment) {
  State& s = TheState();
  const char* at = static_cast<const char*>(address);
  if (reinterpret_cast<uintptr_t>(at) % alignment != 0) {
    Fail("an access of " + std::to_string(bytes) + " bytes is not aligned");
  }
  if (space == Space::kShared) {
    if (at < s.shared_begin || at + bytes > s.shared_begin + s.shared_bytes) {
      Fail("an access of " + std::to_string(bytes) + " bytes is outside shared memory");
    }
    return;
  }
  const Thread& me = Current();
  const bool may_use = me.has_waited || (space == Space::kGlobalCopy && me.lets_next_begin);
  if (s.overlaps && !may_use) {
    Fail("global memory is used before WaitForPrevious");
  }
  auto region = s.regions.upper_bound(at);
  if (region == s.regions.begin()) {
    Fail("an address is in no buffer");
  }
  --region;
  if (at + bytes > region->first + region->second.bytes) {
    Fail("an access of " + std::to_string(bytes) + " bytes is outside its buffer by " +
         std::to_string(at + bytes - region->first - region->second.bytes));
  }
  if (space == Space::kGlobalWrite && !region->second.writable) {
    Fail("a write to a read-only buffer");
  }
}

namespace {

// Let the lanes of a warp, which are those waiting and the current one, know the same.
void ShareClocks(const std::vector<int>& waiting) {
  State& s = TheState();
  Clock& known = Current().known;
  for (int lane : waiting) {
    Merge(s.threads[static_cast<size_t>(lane)].known, &known);
  }
  for (int lane : waiting) {
    s.threads[static_cast<size_t>(lane)].known = known;
  }
}

}  // namespace

void MeetWarp(const Meeting& meeting, void (*run)(LaneWords&)) {
  State& s = TheState();
  Thread& me = Current();
  Warp& warp = s.warps[static_cast<size_t>(me.warp)];
  if (warp.alive < kWarp) {
    Fail(std::string("lanes have ended before ") + meeting.what);
  }
  if (!warp.waiting.empty() && std::strcmp(warp.what, meeting.what) != 0) {
    Fail(std::string("lanes of a warp meet at ") + warp.what + " and at " + meeting.what);
  }
  warp.what = meeting.what;
  const size_t in_bytes = sizeof(uint32_t) * static_cast<size_t>(meeting.num_in);
  if (in_bytes > 0) {
    std::memcpy(warp.words.in[me.lane], meeting.in, in_bytes);
  }
  if (static_cast<int>(warp.waiting.size()) + 1 < kWarp) {
    warp.waiting.push_back(s.current);
    RunAnother();
  } else {
    run(warp.words);
    if (std::strcmp(meeting.what, "syncwarp") == 0) {
      ShareClocks(warp.waiting);
    }
    for (int lane : warp.waiting) {
      Thread& other = s.threads[static_cast<size_t>(lane)];
      std::memcpy(other.out, warp.words.out[other.lane], sizeof(other.out));
    }
    std::memcpy(me.out, warp.words.out[me.lane], sizeof(me.out));
    Wake(warp.waiting);
    s.runnable.push_back(s.current);
    RunAnother();
  }
  if (meeting.num_out > 0) {
    std::memcpy(meeting.out, Current().out,
                sizeof(uint32_t) * static_cast<size_t>(meeting.num_out));
  }
}

void MeetBlock() {
  State& s = TheState();
  Publish(&s.block_clock);
  s.at_barrier.push_back(s.current);
  if (static_cast<int>(s.at_barrier.size()) == s.alive) {
    Wake(s.at_barrier);
    ++s.num_meetings;
  }
  RunAnother();
  Merge(s.block_clock, &Current().known);
}

namespace {

// Add an arrival, and return whether it is the last one.
bool Arrive(int barrier, int num_threads) {
  if (barrier < 1 || barrier > kMaxBarrier || num_threads <= 0 || num_threads % kWarp != 0) {
    Fail("barrier " + std::to_string(barrier) + " cannot be for " + std::to_string(num_threads) +
         " threads");
  }
  NamedBarrier& named = TheState().named[barrier];
  Publish(&named.clock);
  if (named.num_arrived > 0 && named.num_threads != num_threads) {
    Fail("threads meet at a barrier with different counts");
  }
  named.num_threads = num_threads;
  if (++named.num_arrived < num_threads) {
    return false;
  }
  named.num_arrived = 0;
  return true;
}

Mbarrier& FindMbarrier(void* barrier) {
  State& s = TheState();
  const auto found = s.mbarriers.find(static_cast<const char*>(barrier));
  if (found == s.mbarriers.end()) {
    Fail("an mbarrier is used that was not initialized");
  }
  if (found->second.owner != s.current && found->second.num_meetings == s.num_meetings) {
    Fail("an mbarrier is used before a barrier of the block after its initialization");
  }
  return found->second;
}

}  // namespace

void MeetSome(int barrier, int num_threads) {
  State& s = TheState();
  const bool is_last = Arrive(barrier, num_threads);
  NamedBarrier& named = s.named[barrier];
  named.waiting.push_back(s.current);
  if (is_last) {
    Wake(named.waiting);
  }
  RunAnother();
  Merge(named.clock, &Current().known);
}

void ArriveSome(int barrier, int num_threads) {
  if (Arrive(barrier, num_threads)) {
    Wake(TheState().named[barrier].waiting);
  }
}

void InitMbarrier(void* barrier, int num_arrivals) {
  State& s = TheState();
  CheckAccess(Space::kShared, barrier, 8, 8);
  NoteWrite(barrier, 8);
  const auto word = static_cast<size_t>(static_cast<char*>(barrier) - s.shared_begin) / 4;
  s.writes[word].is_barrier = s.writes[word + 1].is_barrier = true;
  s.mbarriers[static_cast<char*>(barrier)] = {num_arrivals,   num_arrivals, 0,  s.current,
                                              s.num_meetings, {},           {}, {}};
}

void ArriveMbarrier(void* barrier) {
  Mbarrier& mbarrier = FindMbarrier(barrier);
  Publish(&mbarrier.arriving);
  if (--mbarrier.num_pending == 0) {
    mbarrier.num_pending = mbarrier.num_arrivals;
    mbarrier.ended = mbarrier.arriving;
    mbarrier.parity ^= 1;
    Wake(mbarrier.waiting);
  }
}

void WaitMbarrier(void* barrier, int parity) {
  Mbarrier& mbarrier = FindMbarrier(barrier);
  while (mbarrier.parity == parity) {
    mbarrier.waiting.push_back(TheState().current);
    RunAnother();
  }
  Merge(mbarrier.ended, &Current().known);
}

void SetRegisters(int count) {
  if (count % 8 != 0 || count < 24 || count > 256) {
    Fail("a warp cannot have " + std::to_string(count) + " registers");
  }
  Current().num_registers = count;
}

void NoteWrite(const void* shared, size_t bytes) {
  State& s = TheState();
  const auto first = static_cast<size_t>(static_cast<const char*>(shared) - s.shared_begin);
  for (size_t word = first / 4; word < (first + bytes + 3) / 4; ++word) {
    if (s.writes[word].is_barrier) {
      Fail("a write to an mbarrier");
    }
    s.writes[word] = {s.current, Current().shared_fences,
                      s.warps[static_cast<size_t>(Current().warp)].part};
  }
}

void StartProduct(const Product& product) {
  Thread& me = Current();
  if (!me.registers_fenced) {
    Fail("a product starts without a fence of the registers since the last group");
  }
  CheckTiles(product);
  const auto count = static_cast<size_t>(product.num_columns) / 2;
  Sums& sums = me.sums[product.sums];
  if (sums.num_products++ == 0) {
    sums.values.assign(product.sums, product.sums + count);
  } else if (!AreUntouched(product.sums, count)) {
    Fail("sums were changed before their products were waited for");
  }
  std::memset(product.sums, kPoison, count * sizeof(float));
  me.new_products.push_back(product);
  ++me.num_products;
  if (TheState().random() % 2 == 0) {
    int pending = static_cast<int>(me.new_products.size());
    for (const auto& group : me.product_groups) {
      pending += static_cast<int>(group.size());
    }
    PerformProducts(me, pending);
  }
}

void CommitProducts() {
  Thread& me = Current();
  me.product_groups.push_back(me.new_products);
  me.new_products.clear();
  me.registers_fenced = false;
}

namespace {

// Check that the lane's factors in registers have not changed since the start of the product.
void CheckFactors(const Thread& thread, const Product& product) {
  for (int i = 0; product.own_factors != nullptr && i < 4; ++i) {
    if (product.own_factors[i] != product.factors[i % 2][i / 2 * 4 + thread.lane % 4]) {
      Fail("factors were changed before their products were waited for");
    }
  }
}

}  // namespace

void WaitForProducts(int newest) {
  Thread& me = Current();
  while (static_cast<int>(me.product_groups.size()) > newest) {
    const auto size = static_cast<int>(me.product_groups.front().size());
    PerformProducts(me, size);
    for (const Product& product : me.product_groups.front()) {
      CheckFactors(me, product);
      Sums& sums = me.sums[product.sums];
      if (--sums.num_products == 0) {
        if (!AreUntouched(product.sums, sums.values.size())) {
          Fail("sums were changed before their products were waited for");
        }
        std::copy(sums.values.begin(), sums.values.end(), product.sums);
        me.sums.erase(product.sums);
      }
    }
    me.product_groups.pop_front();
    me.num_performed -= size;
  }
}

void LetNextBegin() { Current().lets_next_begin = true; }
void WaitForPrevious() { Current().has_waited = true; }

void FenceShared() { ++Current().shared_fences; }
void FenceRegisters() { Current().registers_fenced = true; }

void CopyAsync(void* shared, const void* global, int bytes, int valid) {
  if (valid < 0 || valid > bytes) {
    Fail("a copy of " + std::to_string(valid) + " of " + std::to_string(bytes) + " bytes");
  }
  const Copy copy = {static_cast<char*>(shared), static_cast<const char*>(global),
                     static_cast<size_t>(bytes), static_cast<size_t>(valid)};
  CheckAccess(Space::kShared, shared, copy.bytes, copy.bytes);
  if (valid > 0) {
    CheckAccess(Space::kGlobalCopy, global, copy.valid, copy.bytes);
  }
  std::memset(shared, kPoison, copy.bytes);
  NoteWrite(shared, copy.bytes);
  if (TheState().random() % 2 == 0) {
    Perform(copy);
  } else {
    Current().uncommitted.push_back(copy);
  }
}

void CommitCopies() {
  Thread& me = Current();
  me.groups.push_back(me.uncommitted);
  me.uncommitted.clear();
}

void WaitForCopies(int newest) {
  Thread& me = Current();
  while (static_cast<int>(me.groups.size()) > newest) {
    for (const Copy& copy : me.groups.front()) {
      Perform(copy);
      NoteWrite(copy.to, copy.bytes);
    }
    me.groups.pop_front();
  }
}

}  // namespace turbomind::cuda_shim
