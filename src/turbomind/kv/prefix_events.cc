#include "turbomind/kv/prefix_events.h"

#include <chrono>
#include <utility>

namespace turbomind {
namespace {

// The finalizer of SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators").
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

uint64_t BlockHash(std::optional<uint64_t> parent, const std::vector<int32_t>& key) {
  uint64_t hash = parent.value_or(0);
  for (const int32_t token : key) {
    hash = Mix(hash ^ static_cast<uint32_t>(token));
  }
  return hash;
}

void PrefixEvents::Add(PrefixEvent event) {
  const std::lock_guard lock(mutex_);
  num_blocks_ += event.blocks.size();
  if (event.kind == PrefixEventKind::kCleared || num_blocks_ > kMaxBlocks) {
    events_.clear();
    num_blocks_ = 0;
    event = {.kind = PrefixEventKind::kCleared};
  }
  events_.push_back(std::move(event));
  arrived_.notify_one();
}

std::vector<PrefixEvent> PrefixEvents::Take(int timeout_ms) {
  std::unique_lock lock(mutex_);
  arrived_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                    [this] { return !events_.empty(); });
  num_blocks_ = 0;
  return std::exchange(events_, {});
}

}  // namespace turbomind
