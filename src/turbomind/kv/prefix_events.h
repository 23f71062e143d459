#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "turbomind/kv/cache_salt.h"

namespace turbomind {

enum class PrefixEventKind : uint8_t { kStored, kRemoved, kCleared };

// What the blocks of an event hold if not all layers share their blocks: K and V of the layers with
// one window, or the states of all recurrent layers after the block's last token.
struct PrefixGroup {
  int index = 0;
  bool is_state = false;
  int window = 0;  // as in kv/sliding_window.h; 0 for states
  bool operator==(const PrefixGroup&) const = default;
};

// A change of the prefix cache. A block's hash depends on its tokens, the blocks before it and the
// salt, so that all engines give equal blocks equal hashes.
struct PrefixEvent {
  PrefixEventKind kind = PrefixEventKind::kCleared;
  std::vector<uint64_t> blocks = {};      // hashes; for kStored, consecutive blocks of one prefix
  std::optional<uint64_t> parent = {};    // kStored: the block before them; empty at the beginning
  std::vector<int32_t> tokens = {};       // kStored: all tokens of `blocks`
  CacheSalt salt = {};                    // kStored
  std::optional<PrefixGroup> group = {};  // empty if all layers share their blocks, or for kCleared
};

// Returns the hash of the block that has the key `key` of BlockTrie below `parent`.
uint64_t BlockHash(std::optional<uint64_t> parent, const std::vector<int32_t>& key);

// A bounded queue of events, from the engine thread to a consumer.
//
// If the consumer falls behind by more than kMaxBlocks, the queue drops its events and holds one
// kCleared event instead. The consumer then knows too few blocks, but never a block that the cache
// does not have. Any thread may call the functions.
class PrefixEvents {
 public:
  static constexpr size_t kMaxBlocks = size_t{1} << 16;

  void Add(PrefixEvent event);
  // Returns the events in order. Waits up to `timeout_ms` if there are none.
  std::vector<PrefixEvent> Take(int timeout_ms);

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<PrefixEvent> events_;
  size_t num_blocks_ = 0;  // in `events_`
};

}  // namespace turbomind
