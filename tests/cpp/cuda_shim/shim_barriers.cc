// Barriers of some threads, and the registers of warp groups.

#include "cuda_shim/shim_state.h"

namespace turbomind::cuda_shim {
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

}  // namespace turbomind::cuda_shim
