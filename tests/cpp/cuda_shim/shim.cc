#include "cuda_shim/shim.h"

#include <algorithm>
#include <cstring>

#include "cuda_shim/shim_state.h"

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
constexpr int kMaxRegisters = 65536;

std::string Text(const Dim3& d) {
  return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
}

}  // namespace

void Merge(const Clock& from, Clock* to) {
  to->resize(std::max(to->size(), from.size()));
  for (size_t i = 0; i < from.size(); ++i) {
    (*to)[i] = std::max((*to)[i], from[i]);
  }
}

void Publish(Clock* clock) {
  TheState().has_other_barriers = true;
  Thread& me = Current();
  const auto warp = static_cast<size_t>(me.warp);
  me.known[warp] = TheState().warps[warp].part++;
  Merge(me.known, clock);
}

void Fail(const std::string& what) {
  State& s = TheState();
  Thread& me = Current();
  s.error = what + ", block " + Text(s.block) + ", thread " + Text(me.index);
  turbomind_shim_switch(&me.stack_pointer, s.main_stack);
  std::abort();  // a failed launch is never resumed
}

namespace {

// Make a runnable thread the current one.
void PickThread() {
  State& s = TheState();
  const size_t pick = s.random.Below(s.runnable.size());
  s.current = s.runnable[pick];
  s.current_thread = &s.threads[static_cast<size_t>(s.current)];
  s.runnable[pick] = s.runnable.back();
  s.runnable.pop_back();
}

}  // namespace

void RunAnother() {
  State& s = TheState();
  Thread& me = Current();
  if (s.runnable.empty()) {
    turbomind_shim_switch(&me.stack_pointer, s.main_stack);
    return;
  }
  PickThread();
  if (&Current() != &me) {
    turbomind_shim_switch(&me.stack_pointer, Current().stack_pointer);
  }
}

void Wake(std::vector<int>& waiting) {
  State& s = TheState();
  s.runnable.insert(s.runnable.end(), waiting.begin(), waiting.end());
  waiting.clear();
}

// Let the threads at the block's barrier go on. All of them know what each warp has done.
void PassBarrier() {
  State& s = TheState();
  for (size_t warp = 0; warp < s.warps.size(); ++warp) {
    s.block_clock[warp] = s.warps[warp].part++;
  }
  Wake(s.at_barrier);
  ++s.num_meetings;
}

namespace {

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
    PassBarrier();
  }
  RunAnother();
  std::abort();
}

void Entry() {
  (*TheState().kernel)();
  EndThread();
}

// Let a thread begin with Entry on its stack.
void Prepare(Thread& thread, char* stack) {
  const auto end = reinterpret_cast<uintptr_t>(stack + kStackBytes) & ~uintptr_t{15};
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
  ++s.num_blocks;
  s.writes.resize(std::max(s.writes.size(), s.shared_bytes / 4 + 1));
  const size_t count = size_t{shape.block.x} * shape.block.y * shape.block.z;
  s.threads.resize(count);
  while (s.stacks.size() < count) {
    s.stacks.push_back(std::make_unique_for_overwrite<char[]>(kStackBytes));
  }
  s.warps.assign((count + kWarp - 1) / kWarp, Warp());
  s.runnable.clear();
  s.at_barrier.clear();
  s.num_meetings = 0;
  s.block_clock.assign((count + kWarp - 1) / kWarp, 0);
  std::fill(std::begin(s.named), std::end(s.named), NamedBarrier());
  s.mbarriers.clear();
  s.has_other_barriers = false;
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
    Prepare(thread, s.stacks[i].get());
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
  PickThread();
  turbomind_shim_switch(&s.main_stack, Current().stack_pointer);
  if (s.error.empty() && s.alive > 0) {
    s.error = "block " + Text(s.block) + " hangs: " + std::to_string(s.alive) + " threads wait, " +
              std::to_string(s.at_barrier.size()) + " of them at a barrier";
  }
  if (s.error.empty()) {
    CheckGroups();
  }
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
  s.random.state = shape.seed;
  s.error.clear();
  s.shared.resize(std::max(s.shared.size(), shape.shared_bytes + kSharedAlignment));
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
  if (!warp.waiting.empty() && warp.what != meeting.what &&
      std::strcmp(warp.what, meeting.what) != 0) {
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
    if (s.has_other_barriers && std::strcmp(meeting.what, "syncwarp") == 0) {
      ShareClocks(warp.waiting);
    }
    const size_t out_bytes = sizeof(uint32_t) * static_cast<size_t>(meeting.num_out);
    for (int lane : warp.waiting) {
      Thread& other = s.threads[static_cast<size_t>(lane)];
      std::memcpy(other.out, warp.words.out[other.lane], out_bytes);
    }
    std::memcpy(me.out, warp.words.out[me.lane], out_bytes);
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
  s.at_barrier.push_back(s.current);
  if (static_cast<int>(s.at_barrier.size()) == s.alive) {
    PassBarrier();
  }
  RunAnother();
}

void NoteWrite(const void* shared, size_t bytes) {
  State& s = TheState();
  const auto first = static_cast<size_t>(static_cast<const char*>(shared) - s.shared_begin);
  const Thread& me = Current();
  const Write write = {s.num_blocks, s.current, me.shared_fences,
                       s.warps[static_cast<size_t>(me.warp)].part};
  for (size_t word = first / 4; word < (first + bytes + 3) / 4; ++word) {
    if (s.writes[word].is_barrier && s.writes[word].block == s.num_blocks) {
      Fail("a write to an mbarrier");
    }
    s.writes[word] = write;
  }
}

void LetNextBegin() { Current().lets_next_begin = true; }
void WaitForPrevious() { Current().has_waited = true; }

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
