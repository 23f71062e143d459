// Random operations on SequenceManager against a plain model. The tokens up to a slot determine its
// content, the query's position determines the pool that the query reads, and the tables alone
// determine which blocks are active.

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "kv/first_seen.h"
#include "kv/memory_device.h"
#include "sanitized_sample.h"
#include "turbomind/kv/sequence_manager.h"

namespace turbomind {
namespace {

constexpr int kLength = 16;
constexpr int kNumOperations = 100000;

// Returns a config with a full-attention layer and a sliding-window layer, each its own group.
KvCacheConfig TwoGroups() {
  return MakeKvCacheConfig({0, 40}, KvCacheMode::kFp4Nv, 1, 16, kLength, DataType::kBFloat16);
}

uint64_t Mix(uint64_t hash, int32_t token) {
  hash = (hash ^ static_cast<uint64_t>(static_cast<uint32_t>(token))) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 29);
}

// Returns the hash of tokens[0..i] for every i. Slot i must hold this hash.
std::vector<uint64_t> Stamps(const std::vector<int32_t>& tokens) {
  std::vector<uint64_t> stamps;
  uint64_t hash = 1;
  for (const int32_t token : tokens) {
    stamps.push_back(hash = Mix(hash, token));
  }
  return stamps;
}

struct ModelSequence {
  std::vector<int32_t> tokens;  // computed and still to compute
  int64_t num_written = 0;
  std::set<std::pair<int, int32_t>> quantized;  // by this sequence: group and quantized block
};

// Lengths of prompts and steps.
struct Lengths {
  int shared = 120;  // of prefixes; a prompt begins with a part of one
  int chunk = 50;    // maximum tokens of a step
};

class RandomOperations {
 public:
  RandomOperations(SequenceManager& manager, const KvCache& cache, uint32_t seed,
                   Lengths lengths = {})
      : manager_(manager), cache_(cache), random_(seed), lengths_(lengths) {
    for (auto& prefix : shared_) {
      prefix = RandomTokens(lengths.shared);
    }
  }

  // Runs random operations. Throws InternalError at the first disagreement with the model.
  void Run(int num_operations) {
    for (int i = 0; i < num_operations; ++i) {
      Step();
      manager_.CheckIntegrity();
      CheckCounts();
      CheckContents();
    }
    while (!model_.empty()) {
      Free(model_.begin()->first);
    }
    manager_.ClearPrefixCache();
    manager_.CheckIntegrity();
    for (int pool = 0; pool < cache_.num_pools(); ++pool) {
      Check(manager_.counts(pool).free == cache_.num_blocks(pool),
            "every block must be free at the end");
    }
  }

  int64_t num_hit_tokens = 0;
  int64_t num_refused = 0;
  int64_t num_partial_hits = 0;
  int64_t num_to_quantize = 0;
  int64_t num_cut_tokens = 0;

 private:
  int Below(int n) { return static_cast<int>(random_() % static_cast<unsigned>(n)); }

  std::vector<int32_t> RandomTokens(int n) {
    std::vector<int32_t> tokens;
    for (int i = 0; i < n; ++i) {
      tokens.push_back(Below(3));
    }
    return tokens;
  }

  uint64_t AnyId() {
    auto it = model_.begin();
    std::advance(it, Below(static_cast<int>(model_.size())));
    return it->first;
  }

  void Step() {
    const int kind = Below(100);
    if (model_.empty() || (kind < 12 && model_.size() < 8)) {
      Create();
    } else if (kind < 92) {
      Grow(AnyId());
    } else if (kind < 99) {
      Free(AnyId());
    } else if (Below(10) == 0) {
      manager_.ClearPrefixCache();
    }
  }

  void Create() {
    ModelSequence sequence;
    const std::vector<int32_t>& prefix = shared_[static_cast<size_t>(Below(4))];
    sequence.tokens.assign(prefix.begin(), prefix.begin() + Below(lengths_.shared + 1));
    for (const int32_t token : RandomTokens(1 + Below(40))) {
      sequence.tokens.push_back(token);
    }
    const uint64_t id = next_id_++;
    const bool use_cache = Below(8) != 0;
    const auto length = static_cast<int64_t>(sequence.tokens.size());
    const int64_t hit = manager_.Create(id, sequence.tokens, use_cache);
    Check(hit % kLength == 0 && hit >= 0 && hit < length,
          "a hit must have whole blocks and leave a token to compute");
    Check(use_cache || hit == 0, "there must be no hit without the prefix cache");
    num_hit_tokens += hit;
    num_cut_tokens += manager_.num_cut(id);
    Check(hit + manager_.num_cut(id) < length,
          "a hit and its cut part must be shorter than the prompt");
    num_partial_hits += hit > 0 && hit / kLength < (length - 1) / kLength;
    sequence.num_written = hit;
    model_[id] = sequence;
  }

  void Grow(uint64_t id) {
    ModelSequence& sequence = model_[id];
    const int64_t before = sequence.num_written;
    const auto left = static_cast<int64_t>(sequence.tokens.size()) - before;
    const int64_t num_tokens =
        before + std::min<int64_t>(left ? left : 1, 1 + Below(lengths_.chunk));
    while (static_cast<int64_t>(sequence.tokens.size()) < num_tokens) {
      sequence.tokens.push_back(Below(3));
    }
    bool fits = true;
    std::vector<int64_t> active;
    for (int pool = 0; pool < cache_.num_pools(); ++pool) {
      const BlockCounts counts = manager_.counts(pool);
      const int64_t needed = manager_.BlocksNeeded(id, pool, num_tokens);
      fits = fits && needed <= counts.free + counts.cached;
      active.push_back(counts.active + needed);
      Check(manager_.BlocksToCome(id, pool, num_tokens, num_tokens) >= 0,
            "BlocksToCome must not be negative");
    }
    const std::vector<std::vector<int32_t>> old = Tables(id);
    Check(manager_.AllocateDataAndScaleBlocks(id, num_tokens) == fits,
          "allocation must fail only if blocks are missing");
    if (!fits) {
      ++num_refused;
      Check(Tables(id) == old, "a failed allocation must change nothing");
      if (Below(2) == 0) {
        Free(AnyId());  // preemption
      }
      return;
    }
    for (int pool = 0; pool < cache_.num_pools(); ++pool) {
      Check(manager_.counts(pool).active == active[static_cast<size_t>(pool)],
            "an allocation must take BlocksNeeded blocks");
    }
    if (Below(10) == 0) {
      return;  // canceled between planning and the step: the slots stay unwritten
    }
    Write(id, before, num_tokens);
    QuantizePending(id);
    for (int64_t p = before; p < num_tokens; p = std::min(NextBlock(p), num_tokens)) {
      CheckSeen(id, p);
    }
    CheckSeen(id, num_tokens - 1);
    // Sometimes fewer tokens than planned are committed.
    const int64_t num_kept =
        Below(10) == 0 ? std::max<int64_t>(before, num_tokens - Below(40)) : num_tokens;
    sequence.num_written = num_kept;
    manager_.Commit(id, std::span(sequence.tokens).first(static_cast<size_t>(num_kept)));
    RememberPending(id, sequence);
  }

  static int64_t NextBlock(int64_t position) { return (position / kLength + 1) * kLength; }

  void Free(uint64_t id) {
    manager_.FreeDataAndScaleBlocks(id);
    model_.erase(id);
  }

  std::vector<std::vector<int32_t>> Tables(uint64_t id) const {
    std::vector<std::vector<int32_t>> tables;
    for (int pool = 0; pool < cache_.num_pools(); ++pool) {
      const auto table = manager_.BlockTable(id, pool);
      tables.emplace_back(table.begin(), table.end());
    }
    return tables;
  }

  struct Slot {
    std::byte* row;     // K, at least 8 bytes
    std::byte* scales;  // K and V, 2 bytes; null without FP4
  };

  Slot SlotOf(int pool, int32_t block, int64_t position) const {
    const bool is_in_window16 = pool >= cache_.num_groups();
    const int layer = pool % cache_.num_groups();  // each group has one layer, in order
    const KvLayerView view =
        is_in_window16 ? cache_.Window16LayerView(layer) : cache_.LayerView(layer);
    const int64_t token = position % kLength;
    std::byte* row = view.Payload(KvSide::kK, block, 0);
    std::byte* scales = view.scales ? view.Scales(KvSide::kK, block, 0) : nullptr;
    Check(manager_.GetBlockPtr(block, pool) == row &&
              manager_.GetScaleBlockPtr(block, pool) == scales,
          "a block of a one-layer group must start at the layer's address");
    return {row + token * view.row_bytes[0],
            scales ? scales + token * view.ScaleStride() : nullptr};
  }

  static void Store(const Slot& slot, uint64_t stamp) {
    std::memcpy(slot.row, &stamp, sizeof(stamp));
    if (slot.scales) {
      slot.scales[0] = slot.scales[1] = static_cast<std::byte>(stamp % 0x7F);
    }
  }

  static void CheckSlot(const Slot& slot, uint64_t stamp) {
    const auto scale = static_cast<std::byte>(stamp % 0x7F);
    Check(std::memcmp(slot.row, &stamp, sizeof(stamp)) == 0 &&
              (!slot.scales || (slot.scales[0] == scale && slot.scales[1] == scale)),
          "a slot must hold the data and scales of its tokens");
  }

  // Writes new tokens to the 16-bit pools, or to the quantized pools if there is no 16-bit window.
  void Write(uint64_t id, int64_t begin, int64_t end) {
    const std::vector<uint64_t> stamps = Stamps(model_[id].tokens);
    for (int group = 0; group < cache_.num_groups(); ++group) {
      const int pool = cache_.rule(group).enabled() ? cache_.Window16Pool(group) : group;
      const auto table = manager_.BlockTable(id, pool);
      for (int64_t i = begin; i < end; ++i) {
        Store(SlotOf(pool, table[static_cast<size_t>(i / kLength)], i),
              stamps[static_cast<size_t>(i)]);
      }
    }
  }

  // Copies blocks to the quantized pools, in place of the step's quantization.
  void QuantizePending(uint64_t id) {
    for (int group = 0; group < cache_.num_groups(); ++group) {
      for (const PendingQuantization& pending : manager_.BlocksToQuantize(id, group)) {
        Check(!model_[id].quantized.contains({group, pending.quantized}),
              "a block must be quantized only once");
        for (int64_t i = 0; i < kLength; ++i) {
          uint64_t stamp = 0;
          std::memcpy(&stamp, SlotOf(cache_.Window16Pool(group), pending.window16, i).row,
                      sizeof(stamp));
          Store(SlotOf(group, pending.quantized, i), stamp);
        }
        pending_.push_back({group, pending.quantized});
        ++num_to_quantize;
      }
    }
  }

  // Records the quantized blocks of the step. A block that is in a quantized table after Commit
  // must not be quantized again.
  void RememberPending(uint64_t id, ModelSequence& sequence) {
    for (const auto& [group, block] : pending_) {
      const auto table = manager_.BlockTable(id, group);
      if (std::ranges::count(table, block)) {
        sequence.quantized.insert({group, block});
      }
    }
    pending_.clear();
    // Ids of blocks that left a sliding window are reused for other blocks.
    std::erase_if(sequence.quantized, [&](const std::pair<int, int32_t>& entry) {
      return std::ranges::count(manager_.BlockTable(id, entry.first), entry.second) == 0;
    });
  }

  // Checks that every slot visible to a query at `position` is in the pool that the query reads and
  // holds the content of its tokens.
  void CheckSeen(uint64_t id, int64_t position) {
    const std::vector<uint64_t> stamps = Stamps(model_[id].tokens);
    for (int group = 0; group < cache_.num_groups(); ++group) {
      const LayerGroup& layers = cache_.groups()[static_cast<size_t>(group)];
      const int64_t first = FirstSeen(layers.window, position);
      for (int64_t i = first; i <= position; ++i) {
        const bool is_in_window16 =
            layers.rule.enabled() && layers.rule.IsInWindow16(i / kLength, position);
        const int pool = is_in_window16 ? cache_.Window16Pool(group) : group;
        const int32_t block = manager_.BlockTable(id, pool)[static_cast<size_t>(i / kLength)];
        Check(block >= 0, "a visible slot has a block");
        CheckSlot(SlotOf(pool, block, i), stamps[static_cast<size_t>(i)]);
      }
    }
  }

  // Checks, between steps, the slots of a random sequence that later queries will see, in either
  // pool.
  void CheckContents() {
    if (model_.empty()) {
      return;
    }
    const uint64_t id = AnyId();
    const ModelSequence& sequence = model_[id];
    const int64_t n = sequence.num_written;
    Check(manager_.num_written(id) == n, "num_written must equal the model's length");
    const std::vector<uint64_t> stamps = Stamps(sequence.tokens);
    for (int group = 0; group < cache_.num_groups(); ++group) {
      const LayerGroup& layers = cache_.groups()[static_cast<size_t>(group)];
      const int64_t first = FirstSeen(layers.window, n);
      for (int64_t i = first; i < n; ++i) {
        const auto b = static_cast<size_t>(i / kLength);
        bool is_in_window16 = layers.rule.enabled() && layers.rule.IsInWindow16(i / kLength, n);
        if (layers.rule.enabled() && layers.rule.IsInWindow16(i / kLength, n - 1)) {
          // The next step quantizes this block, unless a hit found it quantized.
          is_in_window16 = manager_.BlockTable(id, cache_.Window16Pool(group))[b] >= 0;
        }
        const int pool = is_in_window16 ? cache_.Window16Pool(group) : group;
        const int32_t block = manager_.BlockTable(id, pool)[b];
        Check(block >= 0, "a visible slot has a block");
        CheckSlot(SlotOf(pool, block, i), stamps[static_cast<size_t>(i)]);
      }
    }
  }

  void CheckCounts() const {
    for (int pool = 0; pool < cache_.num_pools(); ++pool) {
      std::set<int32_t> used;
      for (const auto& [id, sequence] : model_) {
        const auto table = manager_.BlockTable(id, pool);
        used.insert(table.begin(), table.end());
      }
      used.erase(-1);
      const BlockCounts counts = manager_.counts(pool);
      Check(counts.active == static_cast<int64_t>(used.size()),
            "the active blocks must be those in tables");
      Check(counts.free + counts.cached + counts.active == counts.total,
            "free, cached and active blocks must add up to the total");
    }
  }

  SequenceManager& manager_;
  const KvCache& cache_;
  std::mt19937 random_;
  Lengths lengths_;
  std::vector<std::pair<int, int32_t>> pending_;  // of the current step: group and quantized block
  std::vector<int32_t> shared_[4];
  std::map<uint64_t, ModelSequence> model_;
  uint64_t next_id_ = 1;
};

TEST_CASE("random operations agree with the model") {
  MemoryDevice device;
  KvCache cache(device, TwoGroups(), {36, 26});
  SequenceManager manager(cache, true);
  RandomOperations operations(manager, cache, 1);
  operations.Run(kNumOperations);
  CHECK(operations.num_hit_tokens > 50000);
  CHECK(operations.num_partial_hits > 100);
  CHECK(operations.num_refused > 1000);
  MESSAGE("hit tokens " << operations.num_hit_tokens << ", partial hits "
                        << operations.num_partial_hits << ", refused " << operations.num_refused);
}

TEST_CASE("one group, with and without a sliding window, agrees with the model") {
  for (const int window : {0, 24, -40}) {
    MemoryDevice device;
    KvCacheConfig config = TwoGroups();
    config.windows = {window, window};
    config.layers.resize(1);
    config.windows.resize(1);
    KvCache cache(device, config, {30});
    SequenceManager manager(cache, true);
    RandomOperations operations(manager, cache, 2);
    operations.Run(kNumOperations / 10);
    CHECK(operations.num_hit_tokens > 1000);
  }
}

struct Window16Case {
  PrecisionWindowTokens tokens;
  std::vector<int> windows;
  std::vector<int64_t> num_blocks;
  int sixteen_bit_layer = -1;
};

KvCacheConfig Window16Config(const Window16Case& one) {
  KvCacheConfig config = TwoGroups();
  config.windows = one.windows;
  config.layers.resize(one.windows.size());
  config.window16 = one.tokens;
  if (one.sixteen_bit_layer >= 0) {
    config.layers[static_cast<size_t>(one.sixteen_bit_layer)] = {};
  }
  return config;
}

constexpr Lengths kLong = {.shared = 260, .chunk = 70};

// The cases combine sinks and recent blocks in every way. Their sliding windows are longer, hardly
// longer, as long as, and shorter than the 16-bit window, with and without a full-attention group.
// Some cases also have layers in 16 bit.
TEST_CASE("random operations with a 16-bit window agree with the model") {
  const Window16Case cases[] = {
      {{64, 64}, {0, 120}, {30, 14, 44, 40}},
      {{64, 0}, {0, 40}, {40, 10, 26, 16}},
      {{0, 64}, {0, 66}, {44, 5, 32, 28}},
      {{0, 0}, {0, 65}, {44, 20, 9, 8}},
      {{64, 64}, {0, 65}, {30, 1, 44, 36}},
      {{0, 64}, {24, 90}, {1, 8, 12, 26}},
      {{64, 128}, {0}, {10, 52}},
      {{64, 64}, {0, -120}, {30, 14, 44, 40}},
      {{0, 0}, {0, -72}, {44, 20, 9, 8}},
      {{0, 0}, {17}, {7, 7}},
      {{64, 64}, {0, 0}, {30, 60, 44, 0}, 1},
      {{64, 64}, {0, 120}, {60, 14, 0, 40}, 0},
      {{64, 64}, {0, 120}, {30, 40, 44, 0}, 1},
  };
  for (const Window16Case& one : cases) {
    CAPTURE(one.tokens.sink_tokens);
    CAPTURE(one.tokens.recent_tokens);
    CAPTURE(one.windows.back());
    MemoryDevice device;
    KvCache cache(device, Window16Config(one), one.num_blocks);
    SequenceManager manager(cache, true);
    RandomOperations operations(manager, cache, 4, kLong);
    // The first case is the default window and runs the most operations.
    operations.Run(&one == cases ? kNumOperations / 2 : kNumOperations / 10);
    CHECK(operations.num_hit_tokens > 1000);
    // If recent_tokens is 0, a hit needs only the sinks in 16 bits, and they are always cached.
    CHECK((operations.num_cut_tokens > 300 || one.tokens.recent_tokens == 0));
    CHECK(operations.num_refused > 100);
    CHECK(operations.num_to_quantize > 200);
    MESSAGE("hit tokens " << operations.num_hit_tokens << ", cut " << operations.num_cut_tokens
                          << ", quantized blocks " << operations.num_to_quantize << ", refused "
                          << operations.num_refused);
  }
}

// Plants a fault when a block of pools [first_pool, ...) is unlocked for the 5000th time.
class FaultyManager : public SequenceManager {
 public:
  using SequenceManager::SequenceManager;
  int first_pool = 0;

 protected:
  bool IsTheOne(PoolBlock block) { return block.pool >= first_pool && ++num_unlocks_ == 5000; }

 private:
  int num_unlocks_ = 0;
};

// Leaks one reference.
class LeakyManager : public FaultyManager {
 public:
  using FaultyManager::FaultyManager;

 protected:
  void UnlockBlock(PoolBlock block) override {
    if (!IsTheOne(block)) {
      SequenceManager::UnlockBlock(block);
    }
  }
};

// Releases one block twice, although another sequence may still use it.
class EagerManager : public FaultyManager {
 public:
  using FaultyManager::FaultyManager;

 protected:
  void UnlockBlock(PoolBlock block) override {
    SequenceManager::UnlockBlock(block);
    if (IsTheOne(block)) {
      SequenceManager::UnlockBlock(block);
    }
  }
};

class SoundManager : public FaultyManager {
 public:
  using FaultyManager::FaultyManager;
};

template <class Manager>
void RunPlanted(bool window16) {
  const Window16Case one = {{64, 64}, {0, 120}, {30, 14, 44, 40}};
  MemoryDevice device;
  KvCache cache(device, window16 ? Window16Config(one) : TwoGroups(),
                window16 ? one.num_blocks : std::vector<int64_t>{36, 26});
  Manager manager(cache, true);
  manager.first_pool = window16 ? cache.num_groups() : 0;
  RandomOperations(manager, cache, 3, window16 ? kLong : Lengths()).Run(kNumOperations / 5);
}

TEST_CASE("a planted leak and a planted double release are found, in 16-bit pools too" *
          doctest::skip(testing::kSanitized)) {
  for (const bool window16 : {false, true}) {
    RunPlanted<SoundManager>(window16);
    CHECK_THROWS_AS(RunPlanted<LeakyManager>(window16), InternalError);
    CHECK_THROWS_AS(RunPlanted<EagerManager>(window16), InternalError);
  }
}

}  // namespace
}  // namespace turbomind
