// Random operations on SequenceManager against a plain model: what every slot must hold follows
// from the tokens before it, and which blocks are in use follows from the tables alone.

#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "kv/memory_device.h"
#include "turbomind/kv/sequence_manager.h"

namespace turbomind {
namespace {

constexpr int kLength = 16;
constexpr int kNumOperations = 100000;

// A full-attention layer and one with a window, each a group of its own.
KvCacheConfig TwoGroups() {
  return MakeKvCacheConfig({0, 40}, KvCacheMode::kFp4Nv, 1, 16, kLength, DataType::kBFloat16);
}

uint64_t Mix(uint64_t hash, int32_t token) {
  hash = (hash ^ static_cast<uint64_t>(static_cast<uint32_t>(token))) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 29);
}

// Hash of tokens[0..i] for every i: what slot i must hold.
std::vector<uint64_t> Stamps(const std::vector<int32_t>& tokens) {
  std::vector<uint64_t> stamps;
  uint64_t hash = 1;
  for (const int32_t token : tokens) {
    stamps.push_back(hash = Mix(hash, token));
  }
  return stamps;
}

struct ModelSequence {
  std::vector<int32_t> tokens;  // all that the sequence will have
  int64_t num_written = 0;
};

class RandomOperations {
 public:
  RandomOperations(SequenceManager& manager, const KvCache& cache, uint32_t seed)
      : manager_(manager), cache_(cache), random_(seed) {
    for (auto& prefix : shared_) {
      prefix = RandomTokens(120);
    }
  }

  // Throws InternalError at the first disagreement.
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
    for (int group = 0; group < cache_.num_groups(); ++group) {
      Check(manager_.counts(group).free == cache_.num_blocks(group), "every block is free again");
    }
  }

  int64_t num_hit_tokens = 0;
  int64_t num_refused = 0;
  int64_t num_forks = 0;
  int64_t num_partial_hits = 0;

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
    } else if (kind < 75) {
      Grow(AnyId());
    } else if (kind < 80) {
      Fork(AnyId());
    } else if (kind < 99) {
      if (kind < 92) {
        Grow(AnyId());
      } else {
        Free(AnyId());
      }
    } else if (Below(10) == 0) {
      manager_.ClearPrefixCache();
    }
  }

  void Create() {
    ModelSequence sequence;
    const std::vector<int32_t>& prefix = shared_[static_cast<size_t>(Below(4))];
    sequence.tokens.assign(prefix.begin(), prefix.begin() + Below(121));
    for (const int32_t token : RandomTokens(1 + Below(40))) {
      sequence.tokens.push_back(token);
    }
    const uint64_t id = next_id_++;
    const bool use_cache = Below(8) != 0;
    const auto length = static_cast<int64_t>(sequence.tokens.size());
    const int64_t hit = manager_.Create(id, sequence.tokens, use_cache);
    Check(hit % kLength == 0 && hit >= 0 && hit < length,
          "a hit is whole blocks and leaves a token");
    Check(use_cache || hit == 0, "no hit without the prefix cache");
    num_hit_tokens += hit;
    num_partial_hits += hit > 0 && hit / kLength < (length - 1) / kLength;
    sequence.num_written = hit;
    model_[id] = sequence;
  }

  void Grow(uint64_t id) {
    ModelSequence& sequence = model_[id];
    const int64_t before = sequence.num_written;
    const auto left = static_cast<int64_t>(sequence.tokens.size()) - before;
    const int64_t num_tokens = before + std::min<int64_t>(left ? left : 1, 1 + Below(50));
    while (static_cast<int64_t>(sequence.tokens.size()) < num_tokens) {
      sequence.tokens.push_back(Below(3));
    }
    bool fits = true;
    for (int group = 0; group < cache_.num_groups(); ++group) {
      const BlockCounts counts = manager_.counts(group);
      fits = fits && manager_.BlocksNeeded(id, group, num_tokens) <= counts.free + counts.cached;
    }
    const std::vector<std::vector<int32_t>> old = Tables(id);
    Check(manager_.AllocateDataAndScaleBlocks(id, num_tokens) == fits, "refused only when full");
    if (!fits) {
      ++num_refused;
      Check(Tables(id) == old, "nothing changes when there are not enough blocks");
      if (Below(2) == 0) {
        Free(AnyId());  // preemption
      }
      return;
    }
    if (Below(10) == 0) {
      return;  // cancelled between planning and the step: slots without content
    }
    Write(id, before, num_tokens);
    sequence.num_written = num_tokens;
    manager_.Commit(id, std::span(sequence.tokens).first(static_cast<size_t>(num_tokens)));
  }

  void Fork(uint64_t source) {
    const uint64_t id = next_id_++;
    if (model_.size() < 8 && manager_.Fork(source, id)) {
      model_[id] = model_[source];
      ++num_forks;
      for (int group = 0; group < cache_.num_groups(); ++group) {
        for (const int32_t block : manager_.BlockTable(id, group)) {
          const auto table = manager_.BlockTable(source, group);
          Check(block < 0 || std::count(table.begin(), table.end(), block) == 0,
                "a fork shares no block");
        }
      }
    }
  }

  void Free(uint64_t id) {
    manager_.FreeDataAndScaleBlocks(id);
    model_.erase(id);
  }

  std::vector<std::vector<int32_t>> Tables(uint64_t id) const {
    std::vector<std::vector<int32_t>> tables;
    for (int group = 0; group < cache_.num_groups(); ++group) {
      const auto table = manager_.BlockTable(id, group);
      tables.emplace_back(table.begin(), table.end());
    }
    return tables;
  }

  struct Slot {
    std::byte* row;     // K, 8 bytes
    std::byte* scales;  // K and V, 2 bytes
  };

  Slot SlotOf(int group, int32_t block, int64_t position) const {
    const KvLayerView view = cache_.LayerView(group);
    const int64_t token = position % kLength;
    Check(manager_.GetBlockPtr(block, group) + token * view.row_bytes[0] ==
                  view.Payload(KvSide::kK, block, 0) + token * view.row_bytes[0] &&
              manager_.GetScaleBlockPtr(block, group) == view.Scales(KvSide::kK, block, 0),
          "a block of one layer starts where the layer does");
    return {view.Payload(KvSide::kK, block, 0) + token * view.row_bytes[0],
            view.Scales(KvSide::kK, block, 0) + token * view.ScaleStride()};
  }

  void Write(uint64_t id, int64_t begin, int64_t end) {
    const std::vector<uint64_t> stamps = Stamps(model_[id].tokens);
    for (int group = 0; group < cache_.num_groups(); ++group) {
      const auto table = manager_.BlockTable(id, group);
      for (int64_t i = begin; i < end; ++i) {
        const Slot slot = SlotOf(group, table[static_cast<size_t>(i / kLength)], i);
        const uint64_t stamp = stamps[static_cast<size_t>(i)];
        std::memcpy(slot.row, &stamp, sizeof(stamp));
        slot.scales[0] = slot.scales[1] = static_cast<std::byte>(stamp % 0x7F);
      }
    }
  }

  // Every written slot that a later query can see holds what its tokens say.
  void CheckContents() {
    if (model_.empty()) {
      return;
    }
    const uint64_t id = AnyId();
    const ModelSequence& sequence = model_[id];
    Check(manager_.num_written(id) == sequence.num_written, "the model has the same length");
    const std::vector<uint64_t> stamps = Stamps(sequence.tokens);
    for (int group = 0; group < cache_.num_groups(); ++group) {
      const auto table = manager_.BlockTable(id, group);
      const int window = cache_.groups()[static_cast<size_t>(group)].window;
      const int64_t first = window ? std::max<int64_t>(sequence.num_written - window + 1, 0) : 0;
      for (int64_t i = first; i < sequence.num_written; ++i) {
        const int32_t block = table[static_cast<size_t>(i / kLength)];
        Check(block >= 0, "a visible slot has a block");
        const Slot slot = SlotOf(group, block, i);
        const uint64_t stamp = stamps[static_cast<size_t>(i)];
        Check(std::memcmp(slot.row, &stamp, sizeof(stamp)) == 0 &&
                  slot.scales[0] == static_cast<std::byte>(stamp % 0x7F) &&
                  slot.scales[1] == static_cast<std::byte>(stamp % 0x7F),
              "a slot holds what its tokens say, in both pools");
      }
    }
  }

  void CheckCounts() const {
    for (int group = 0; group < cache_.num_groups(); ++group) {
      std::set<int32_t> used;
      for (const auto& [id, sequence] : model_) {
        const auto table = manager_.BlockTable(id, group);
        used.insert(table.begin(), table.end());
      }
      used.erase(-1);
      const BlockCounts counts = manager_.counts(group);
      Check(counts.active == static_cast<int64_t>(used.size()),
            "active blocks are those in tables");
      Check(counts.free + counts.cached + counts.active == counts.total, "states add up");
    }
  }

  SequenceManager& manager_;
  const KvCache& cache_;
  std::mt19937 random_;
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
  CHECK(operations.num_forks > 1000);
  MESSAGE("hit tokens " << operations.num_hit_tokens << ", partial hits "
                        << operations.num_partial_hits << ", refused " << operations.num_refused
                        << ", forks " << operations.num_forks);
}

TEST_CASE("the same without a full-attention group, and without a window") {
  for (const int window : {0, 24}) {
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

// Forgets one reference.
class LeakyManager : public SequenceManager {
 public:
  using SequenceManager::SequenceManager;

 protected:
  void UnlockBlock(GroupBlock block) override {
    if (++num_unlocks_ != 5000) {
      SequenceManager::UnlockBlock(block);
    }
  }

 private:
  int num_unlocks_ = 0;
};

// Gives back a block twice where another sequence still uses it.
class EagerManager : public SequenceManager {
 public:
  using SequenceManager::SequenceManager;

 protected:
  void UnlockBlock(GroupBlock block) override {
    SequenceManager::UnlockBlock(block);
    if (++num_unlocks_ == 5000) {
      SequenceManager::UnlockBlock(block);
    }
  }

 private:
  int num_unlocks_ = 0;
};

template <class Manager>
void RunPlanted() {
  MemoryDevice device;
  KvCache cache(device, TwoGroups(), {36, 26});
  Manager manager(cache, true);
  RandomOperations(manager, cache, 3).Run(kNumOperations);
}

TEST_CASE("a planted leak and a planted double release are found") {
  RunPlanted<SequenceManager>();
  CHECK_THROWS_AS(RunPlanted<LeakyManager>(), InternalError);
  CHECK_THROWS_AS(RunPlanted<EagerManager>(), InternalError);
}

}  // namespace
}  // namespace turbomind
