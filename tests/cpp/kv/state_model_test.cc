// Random operations on the states of recurrent layers. A device in plain memory computes a
// sequence's state as a hash of its tokens, exactly where the plan says. After every step, the
// state must be that of the committed tokens.

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "kv/memory_device.h"
#include "sanitized_sample.h"
#include "turbomind/core/check.h"
#include "turbomind/kv/sequence_manager.h"

namespace turbomind {
namespace {

constexpr int kLength = 16;
constexpr int kStateBytes = 64;
constexpr int kNumOperations = 60000;

uint64_t Mix(uint64_t hash, int32_t token) {
  hash = (hash ^ static_cast<uint64_t>(static_cast<uint32_t>(token))) * 0x9E3779B97F4A7C15u;
  return hash ^ (hash >> 29);
}

uint64_t HashOf(std::span<const int32_t> tokens) {
  uint64_t hash = 1;
  for (const int32_t token : tokens) {
    hash = Mix(hash, token);
  }
  return hash;
}

uint64_t Read(const StateView& view, int32_t slot) {
  uint64_t hash = 0;
  std::memcpy(&hash, view.At(slot), sizeof(hash));
  return hash;
}

void Write(const StateView& view, int32_t slot, uint64_t hash) {
  std::memcpy(view.At(slot), &hash, sizeof(hash));
}

// What the device does wrong.
enum class Fault { kNone, kSkipsRestore, kSavesLate, kSavesTooMuch, kKeepsSlot };

struct Case {
  std::vector<int> windows = {kNoAttention, 0};
  std::vector<int64_t> num_blocks = {60};
  int64_t num_slots = 11;
  int64_t num_checkpoints = 12;
  PrecisionWindowTokens window16 = {};
  int64_t interval = 0;
  bool prefix_caching = true;
  int max_draft = 4;
};

struct ModelSequence {
  std::vector<int32_t> tokens;  // known
  std::vector<int32_t> draft;   // of the planned step
  int64_t num_written = 0;
  int64_t num_planned = 0;
};

template <class Manager>
class StateOperations {
 public:
  StateOperations(const Case& one, uint32_t seed, Fault fault = Fault::kNone)
      : case_(one),
        fault_(fault),
        cache_(device_, Config(one), NumBlocks(one)),
        manager_(cache_, one.prefix_caching, nullptr, one.interval),
        other_cache_(device_, Config(one), NumBlocks(one)),
        other_(other_cache_, true, nullptr, one.interval),
        random_(seed) {
    for (auto& prefix : shared_) {
      prefix = RandomTokens(160);
    }
    for (KvCache* cache : {&cache_, &other_cache_}) {  // tests write no scales
      for (int pool = 0; pool < cache->num_groups(); ++pool) {
        std::memset(cache->GetScaleBlockPtr(pool, 0), 1,
                    static_cast<size_t>(cache->scale_bytes(pool)));
      }
    }
  }

  void Run(int num_operations) {
    for (int i = 0; i < num_operations; ++i) {
      Operate();
      manager_.CheckIntegrity(false);
      CheckStates();
    }
    while (!live_.empty()) {
      Free(live_.begin()->first);
    }
    manager_.ClearPrefixCache();
    manager_.CheckIntegrity(false);
    for (int pool = 0; pool < cache_.num_pools(); ++pool) {
      Check(manager_.counts(pool).free == cache_.num_blocks(pool),
            "every block and state must be free at the end");
    }
  }

  int64_t num_hits = 0;
  int64_t num_cut = 0;
  int64_t num_refused = 0;
  int64_t num_short_drafts = 0;
  int64_t num_restored = 0;
  int64_t num_entered = 0;  // checkpoints found in the prefix cache
  int64_t num_imported = 0;

 private:
  using Live = std::map<uint64_t, ModelSequence>;

  static KvCacheConfig Config(const Case& one) {
    KvCacheConfig config =
        MakeKvCacheConfig(one.windows, KvCacheMode::kFp4Nv, 1, 16, kLength, DataType::kBFloat16);
    config.window16 = one.window16;
    config.state_bytes = config.checkpoint_bytes = kStateBytes;
    return config;
  }

  static std::vector<int64_t> NumBlocks(const Case& one) {
    std::vector<int64_t> num_blocks = one.num_blocks;
    num_blocks.insert(num_blocks.end(), {one.num_slots, one.num_checkpoints});
    return num_blocks;
  }

  int Below(int64_t n) { return static_cast<int>(random_() % static_cast<uint64_t>(n)); }

  std::vector<int32_t> RandomTokens(int n) {
    std::vector<int32_t> tokens;
    for (int i = 0; i < n; ++i) {
      tokens.push_back(Below(3));
    }
    return tokens;
  }

  typename Live::iterator Any() {
    return std::next(live_.begin(), Below(static_cast<int64_t>(live_.size())));
  }

  void Operate() {
    const int kind = Below(100);
    if (live_.empty() || (kind < 12 && live_.size() < 8)) {
      Create();
    } else if (kind < 86) {
      Step();
    } else if (kind < 92) {
      Free(Any()->first);
    } else if (kind < 95) {
      Exchange();
    } else if (kind < 98) {
      const auto& [id, sequence] = *Any();
      manager_.AddBranch(id, 1 + Below(12));
    } else if (Below(4) == 0) {
      manager_.ClearPrefixCache();
    }
  }

  void Create() {
    ModelSequence sequence;
    const std::vector<int32_t>& prefix = shared_[static_cast<size_t>(Below(3))];
    sequence.tokens.assign(prefix.begin(), prefix.begin() + Below(161));
    for (const int32_t token : RandomTokens(1 + Below(30))) {
      sequence.tokens.push_back(token);
    }
    const uint64_t id = next_id_++;
    const auto length = static_cast<int64_t>(sequence.tokens.size());
    const int64_t cached = manager_.CachedTokens(sequence.tokens);
    const int64_t hit = manager_.Create(id, sequence.tokens, Below(10) != 0);
    Check(hit % kLength == 0 && hit < length && (hit == 0 || hit == cached),
          "a hit must be the cached tokens");
    Check((manager_.CheckpointToRestore(id) >= 0) == (hit > 0), "a hit must have a checkpoint");
    Check(manager_.StateSlot(id) < 0, "a sequence must have no slot before its first step");
    num_hits += hit > 0;
    num_cut += manager_.num_cut(id);
    sequence.num_written = hit;
    live_[id] = std::move(sequence);
    if (Below(3) == 0) {
      Free(id);  // it did not fit, as in Scheduler::Admit
    }
  }

  // Plans several sequences, runs some of them and commits what was right.
  void Step() {
    std::set<uint64_t> planned;
    for (int i = Below(4); i >= 0 && !live_.empty(); --i) {
      const uint64_t id = Any()->first;
      if (Plan(id)) {
        planned.insert(id);
      } else {
        ++num_refused;
        const uint64_t victim = Any()->first;
        planned.erase(id);  // an earlier plan of the same step
        planned.erase(victim);
        Free(victim);
      }
    }
    for (const uint64_t id : planned) {
      if (Below(12) == 0) {
        continue;  // planned, but it never runs
      }
      Compute(id);
      Commit(id);
    }
  }

  // Plans some known tokens, or the last one and a draft.
  bool Plan(uint64_t id) {
    ModelSequence& sequence = live_[id];
    sequence.draft.clear();
    auto left = static_cast<int64_t>(sequence.tokens.size()) - sequence.num_written;
    if (left == 0) {
      sequence.tokens.push_back(Below(3));
      left = 1;
    }
    const int64_t begin = sequence.num_written;
    sequence.num_planned = begin + (left == 1 ? 1 : std::min<int64_t>(left, 1 + Below(60)));
    if (!manager_.AllocateDataAndScaleBlocks(id, sequence.num_planned)) {
      return false;
    }
    Check(sequence.num_planned != begin, "a step must have tokens");
    const int64_t max_uncertain = manager_.MaxUncertain(id);
    const int wanted = left == 1 ? Below(case_.max_draft + 1) : 0;
    if (wanted > 0) {
      const auto before = manager_.PlannedSaves(id);
      const std::vector<PlannedSave> old(before.begin(), before.end());
      const bool fits =
          manager_.AllocateDataAndScaleBlocks(id, sequence.num_planned + wanted, wanted);
      Check(!fits || wanted <= max_uncertain, "a draft must not exceed the slots");
      if (fits) {
        sequence.draft = RandomTokens(wanted);
        sequence.num_planned += wanted;
      } else {
        ++num_short_drafts;
        const auto after = manager_.PlannedSaves(id);
        Check(std::ranges::equal(old, after), "a refused draft must change nothing");
      }
    }
    return true;
  }

  std::vector<int32_t> PlannedTokens(const ModelSequence& sequence) const {
    const auto certain = sequence.num_planned - static_cast<int64_t>(sequence.draft.size());
    std::vector<int32_t> tokens(sequence.tokens.begin(), sequence.tokens.begin() + certain);
    tokens.insert(tokens.end(), sequence.draft.begin(), sequence.draft.end());
    return tokens;
  }

  // The step of the device.
  void Compute(uint64_t id) {
    const ModelSequence& sequence = live_[id];
    const std::vector<int32_t> tokens = PlannedTokens(sequence);
    const int32_t slot = fault_ == Fault::kKeepsSlot ? 0 : manager_.StateSlot(id);
    const int32_t restore = manager_.CheckpointToRestore(id);
    if (restore >= 0 && fault_ != Fault::kSkipsRestore) {
      std::memcpy(cache_.states().At(slot), cache_.checkpoints().At(restore), kStateBytes);
    }
    num_restored += restore >= 0;
    uint64_t state = sequence.num_written == 0 ? 1 : Read(cache_.states(), slot);
    auto save = manager_.PlannedSaves(id).begin();
    for (int64_t i = sequence.num_written; i < sequence.num_planned; ++i) {
      state = Mix(state, tokens[static_cast<size_t>(i)]);
      while (save != manager_.PlannedSaves(id).end() &&
             save->position + (fault_ == Fault::kSavesLate ? 1 : 0) == i + 1) {
        if (save->slot >= 0) {
          Write(cache_.states(), save->slot, state);
        }
        ++save;
      }
    }
    if (fault_ == Fault::kSavesTooMuch) {
      Write(cache_.states(), 3, state);
    }
    Check(save == manager_.PlannedSaves(id).end() || fault_ != Fault::kNone,
          "every save must be within the step");
    Write(cache_.states(), slot, state);
    for (const PlannedSave& planned : manager_.PlannedSaves(id)) {
      if (planned.checkpoint >= 0) {
        const int32_t from = planned.slot >= 0 ? planned.slot : slot;
        std::memcpy(cache_.checkpoints().At(planned.checkpoint), cache_.states().At(from),
                    kStateBytes);
      }
    }
  }

  // Keeps a random number of the draft's tokens.
  void Commit(uint64_t id) {
    ModelSequence& sequence = live_[id];
    const auto kept = Below(static_cast<int64_t>(sequence.draft.size()) + 1);
    if (!sequence.draft.empty()) {
      sequence.tokens.insert(sequence.tokens.end(), sequence.draft.begin(),
                             sequence.draft.begin() + kept);
      sequence.num_written = static_cast<int64_t>(sequence.tokens.size());
      sequence.tokens.push_back(Below(3));
    } else {
      sequence.num_written = sequence.num_planned;
    }
    manager_.Commit(id,
                    std::span(sequence.tokens).first(static_cast<size_t>(sequence.num_written)));
    Check(manager_.PlannedSaves(id).empty(), "a committed step must have no saves");
    Check(manager_.CheckpointToRestore(id) < 0, "a committed step must leave its state in a slot");
  }

  void Free(uint64_t id) {
    manager_.FreeDataAndScaleBlocks(id);
    live_.erase(id);
  }

  // Copies a prefix to another cache, or back.
  void Exchange() {
    const std::vector<int32_t>& tokens = Any()->second.tokens;
    SequenceManager* from = &manager_;
    SequenceManager* to = &other_;
    if (Below(2) == 0) {
      std::swap(from, to);
    }
    const auto copies = from->ExportBlocks(tokens, 0, 4 + Below(8));
    std::vector<BlockViews> views;
    for (const BlockCopies& block : copies) {
      views.emplace_back(block.begin(), block.end());
    }
    num_imported += to->ImportBlocks(tokens, 0, views);
    other_.CheckIntegrity(false);
    if (Below(8) == 0) {
      other_.ClearPrefixCache();
    }
  }

  // Checks the states of all sequences and the checkpoints along one of them.
  void CheckStates() {
    for (const auto& [id, sequence] : live_) {
      Check(manager_.num_written(id) == sequence.num_written, "num_written must be the model's");
      if (sequence.num_written == 0) {
        continue;
      }
      const uint64_t expected =
          HashOf(std::span(sequence.tokens).first(static_cast<size_t>(sequence.num_written)));
      const int32_t restore = manager_.CheckpointToRestore(id);
      const uint64_t state = restore >= 0 ? Read(cache_.checkpoints(), restore)
                                          : Read(cache_.states(), manager_.StateSlot(id));
      Check(state == expected, "the state must be that of the committed tokens");
    }
    if (live_.empty()) {
      return;
    }
    const std::vector<int32_t>& tokens = Any()->second.tokens;
    const auto copies = manager_.ExportBlocks(tokens, 0, 100);
    for (size_t i = 0; i < copies.size(); ++i) {
      const BlockCopy& copy = copies[i][static_cast<size_t>(cache_.CheckpointPool())];
      if (!copy.empty()) {
        ++num_entered;
        uint64_t state = 0;
        std::memcpy(&state, copy.data(), sizeof(state));
        Check(state == HashOf(std::span(tokens).first((i + 1) * kLength)),
              "a checkpoint must be the state after its block");
      }
    }
  }

  Case case_;
  Fault fault_;
  MemoryDevice device_;
  KvCache cache_;
  Manager manager_;
  KvCache other_cache_;
  SequenceManager other_;
  std::mt19937 random_;
  std::vector<int32_t> shared_[3];
  Live live_;
  uint64_t next_id_ = 1;
};

TEST_CASE("states follow the committed tokens through hits, drafts, preemption and exchange") {
  const Case cases[] = {
      {},
      {.interval = 3},
      {.num_checkpoints = 60, .interval = 1},
      {.num_blocks = {30}, .num_slots = 6, .num_checkpoints = 5, .interval = 2},
      {.windows = {0, kNoAttention, 40}, .num_blocks = {60, 30}},
      {.windows = {kNoAttention, 40}, .num_blocks = {30}},
      {.windows = {0, kNoAttention, 120},
       .num_blocks = {40, 14, 50, 40},
       .window16 = {64, 64},
       .interval = 2},
  };
  for (const Case& one : cases) {
    CAPTURE(&one - cases);
    StateOperations<SequenceManager> operations(one, 7);
    operations.Run(&one == cases ? kNumOperations : kNumOperations / 6);
    CHECK(operations.num_hits > 100);
    CHECK(operations.num_cut > 1000);
    CHECK(operations.num_refused > 10);
    CHECK(operations.num_restored > 100);
    CHECK(operations.num_short_drafts > 10);
    CHECK(operations.num_entered > 1000);
    CHECK(operations.num_imported > 100);
    MESSAGE("hits " << operations.num_hits << ", cut tokens " << operations.num_cut << ", refused "
                    << operations.num_refused << ", short drafts " << operations.num_short_drafts
                    << ", restored " << operations.num_restored << ", imported "
                    << operations.num_imported);
  }
}

TEST_CASE("without checkpoints, or without the prefix cache, nothing is found") {
  for (const bool prefix_caching : {false, true}) {
    Case one = {.num_checkpoints = prefix_caching ? 0 : 60, .prefix_caching = prefix_caching};
    StateOperations<SequenceManager> operations(one, 8);
    operations.Run(kNumOperations / 10);
    CHECK(operations.num_entered == 0);
    CHECK(operations.num_hits == 0);
    CHECK(operations.num_restored == 0);
    CHECK(operations.num_short_drafts > 10);
  }
}

TEST_CASE("a device that misplaces a state is found" * doctest::skip(testing::kSanitized)) {
  for (const Fault fault :
       {Fault::kSkipsRestore, Fault::kSavesLate, Fault::kSavesTooMuch, Fault::kKeepsSlot}) {
    CAPTURE(static_cast<int>(fault));
    StateOperations<SequenceManager> operations({}, 9, fault);
    CHECK_THROWS_AS(operations.Run(2000), InternalError);
  }
}

// Loses or releases twice the 300th unlocked state.
template <int kTimes>
class FaultyManager : public SequenceManager {
 public:
  using SequenceManager::SequenceManager;

 protected:
  void UnlockBlock(PoolBlock block) override {
    const bool is_it = block.pool >= 1 && ++num_unlocks_ == 300;
    for (int i = is_it ? kTimes : 1; i > 0; --i) {
      SequenceManager::UnlockBlock(block);
    }
  }

 private:
  int num_unlocks_ = 0;
};

TEST_CASE("a lost state and a state that is released twice are found") {
  StateOperations<FaultyManager<1>>({}, 10).Run(1000);
  CHECK_THROWS_AS(StateOperations<FaultyManager<0>>({}, 10).Run(1000), InternalError);
  CHECK_THROWS_AS(StateOperations<FaultyManager<2>>({}, 10).Run(1000), InternalError);
}

}  // namespace
}  // namespace turbomind
