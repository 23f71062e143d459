// SequenceManager::CheckIntegrity checks the invariants of sequence_manager.h against the tables.

#include <algorithm>

#include "turbomind/core/check.h"
#include "turbomind/kv/sequence_manager.h"

namespace turbomind {

void SequenceManager::CheckTables(const Sequence& sequence, int group) const {
  const LayerGroup& layers = cache_.groups()[static_cast<size_t>(group)];
  const PrecisionWindow& rule = layers.rule;
  const std::vector<int32_t>& quantized = sequence.tables[static_cast<size_t>(group)];
  const std::vector<int64_t>& unquantized = sequence.unquantized[static_cast<size_t>(group)];
  const auto num_blocks = static_cast<int64_t>(quantized.size());
  const int64_t n = sequence.num_written;
  const int64_t first = layers.FirstVisibleBlock(n);
  Check(n <= num_blocks * cache_.block_seq_len(), "every written token must have a slot");
  if (!rule.enabled()) {
    for (int64_t i = 0; i < num_blocks; ++i) {
      Check((quantized[static_cast<size_t>(i)] >= 0) == (i >= first),
            "a table must contain exactly the visible blocks");
    }
    return;
  }
  const std::vector<int32_t>& window16 =
      sequence.tables[static_cast<size_t>(cache_.Window16Pool(group))];
  Check(window16.size() == quantized.size(), "the tables of a group must have the same length");
  Check(std::ranges::is_sorted(unquantized), "pending slots must be listed in order");
  for (int64_t i = 0; i < num_blocks; ++i) {
    const bool is_in_window16 = window16[static_cast<size_t>(i)] >= 0;
    const bool has_slot = quantized[static_cast<size_t>(i)] >= 0;
    const bool is_pending = std::ranges::binary_search(unquantized, i);
    const bool is_quantized = has_slot && !is_pending;
    Check(has_slot || !is_pending, "a block with pending quantization must have a quantized slot");
    if (i < first) {
      Check(!is_in_window16 && !has_slot, "no block outside the window may have a slot");
    } else if (i * cache_.block_seq_len() >= n) {
      Check(is_in_window16 && !is_quantized,
            "blocks for future tokens must be in the 16-bit window only");
    } else if (rule.IsInWindow16(i, n)) {
      Check(is_in_window16,
            "a block that the next query reads as 16-bit must be in the 16-bit window");
      Check(i >= rule.sink_blocks || !has_slot, "sinks must not be quantized");
    } else if (rule.IsInWindow16(i, n - 1)) {
      Check(is_in_window16 || is_quantized,
            "a block that leaves the recent blocks must be in one of the pools");
    } else {
      Check(is_quantized && !is_in_window16,
            "a block that the last query read as quantized must be quantized only");
    }
  }
}

void SequenceManager::CheckStates(const Sequence& sequence) const {
  const State& state = sequence.state;
  if (!cache_.has_states()) {
    Check(state.slot < 0 && state.restore < 0 && state.saves.empty(),
          "a model without recurrent layers must have no states");
    return;
  }
  Check(state.slot >= 0 || sequence.num_written == 0 || state.restore >= 0,
        "a sequence with written tokens must have a state");
  Check(state.slot >= 0 || state.saves.empty(), "a planned step must have a working slot");
  int64_t last = sequence.num_written;
  for (const PlannedSave& save : state.saves) {
    Check(last < save.position && save.position <= sequence.num_planned,
          "planned saves must be in order and in the planned step");
    Check(save.checkpoint < 0 || save.position % cache_.block_seq_len() == 0,
          "a checkpoint must be at the end of a block");
    Check(save.slot >= 0 || save.position == sequence.num_planned,
          "a state before the last token must have a slot");
    last = save.position;
  }
}

// Adds a sequence's blocks of a pool to their numbers of users.
void SequenceManager::CountUsers(const Sequence& sequence, int pool,
                                 std::vector<int>& users) const {
  const auto count = [&users](int32_t block) {
    if (block >= 0) {
      ++users.at(static_cast<size_t>(block));
    }
  };
  std::ranges::for_each(sequence.tables[static_cast<size_t>(pool)], count);
  if (pool == cache_.StatePool()) {
    count(sequence.state.slot);
    std::ranges::for_each(sequence.state.saves, count, &PlannedSave::slot);
  }
  if (pool == cache_.CheckpointPool()) {
    count(sequence.state.restore);
    std::ranges::for_each(sequence.state.saves, count, &PlannedSave::checkpoint);
  }
}

void SequenceManager::CheckPool(int pool, bool check_scale_bytes) const {
  const BlockManager& manager = managers_[static_cast<size_t>(pool)];
  manager.CheckIntegrity();
  Check(cache_.data_bytes(pool) == manager.total() * cache_.data_bytes_per_block(pool) &&
            cache_.scale_bytes(pool) == manager.total() * cache_.scale_bytes_per_block(pool),
        "data and scales must have room for every block");
  std::vector<int> users(static_cast<size_t>(manager.high_water()), 0);
  for (const auto& [id, sequence] : sequences_) {
    CountUsers(sequence, pool, users);
  }
  int64_t kept = 0;
  for (int block = 0; block < static_cast<int>(users.size()); ++block) {
    Check(manager.num_users(block) == users[static_cast<size_t>(block)],
          "a block's reference count must equal the number of sequences that use it");
    Check(pool != cache_.StatePool() || users[static_cast<size_t>(block)] <= 1,
          "a working slot must have one sequence");
    Check(manager.is_kept(block) == trie_.Contains({pool, block}),
          "a block must be kept if and only if it is in the trie");
    if (manager.is_kept(block)) {
      ++kept;
      if (check_scale_bytes) {
        cache_.CheckScaleBytes(pool, block);
      }
    }
  }
  Check(kept == trie_.num_blocks(pool), "every block in the trie must be allocated");
}

void SequenceManager::CheckIntegrity(bool check_scale_bytes) const {
  trie_.CheckIntegrity();
  for (const auto& [id, sequence] : sequences_) {
    for (int group = 0; group < cache_.num_groups(); ++group) {
      CheckTables(sequence, group);
    }
    CheckStates(sequence);
  }
  for (int pool = 0; pool < num_pools(); ++pool) {
    CheckPool(pool, check_scale_bytes);
  }
}

}  // namespace turbomind
