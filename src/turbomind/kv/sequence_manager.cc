#include "turbomind/kv/sequence_manager.h"

#include <algorithm>
#include <utility>

#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"
#include "turbomind/kv/prefix_hit.h"

namespace turbomind {
namespace {

std::vector<int> FullPools(const KvCache& cache) {
  if (cache.groups().front().window != 0) {
    return {};
  }
  return cache.has_hot_pools() ? std::vector<int>{0, cache.HotPool(0)} : std::vector<int>{0};
}

}  // namespace

SequenceManager::SequenceManager(KvCache& cache, bool enable_prefix_caching)
    : cache_(cache),
      enable_prefix_caching_(enable_prefix_caching),
      trie_(cache.num_pools(), FullPools(cache), cache.block_seq_len()) {
  for (int pool = 0; pool < cache.num_pools(); ++pool) {
    managers_.emplace_back(cache.num_blocks(pool));
  }
}

SequenceManager::~SequenceManager() = default;

const SequenceManager::Sequence& SequenceManager::At(uint64_t id) const {
  const auto found = sequences_.find(id);
  Check(found != sequences_.end(), "the sequence exists");
  return found->second;
}

SequenceManager::Sequence& SequenceManager::At(uint64_t id) {
  return const_cast<Sequence&>(static_cast<const SequenceManager*>(this)->At(id));
}

int64_t SequenceManager::Create(uint64_t id, std::span<const int32_t> prompt,
                                bool use_prefix_cache) {
  Check(!prompt.empty(), "a prompt has tokens");
  Check(!Contains(id), "a sequence id is used once");
  Sequence sequence;
  sequence.tables.resize(managers_.size());
  sequence.unquantised.resize(cache_.groups().size());
  sequence.moves.resize(cache_.groups().size());
  if (enable_prefix_caching_ && use_prefix_cache) {
    // The last token is always computed: its logits are wanted.
    const std::vector<std::vector<int>> path = trie_.Find(prompt.first(prompt.size() - 1));
    const PrefixHit hit = FindPrefixHit(cache_.groups(), path);
    sequence.num_written = hit.num_blocks * cache_.block_seq_len();
    sequence.num_cut = (hit.num_found - hit.num_blocks) * cache_.block_seq_len();
    sequence.num_entered = hit.num_blocks;
    LockHit(sequence, path);
  }
  const int64_t num_hit = sequence.num_written;
  sequences_.emplace(id, std::move(sequence));
  return num_hit;
}

void SequenceManager::LockHit(Sequence& sequence, const std::vector<std::vector<int>>& path) {
  const int64_t n = sequence.num_written;
  const auto num_blocks = static_cast<size_t>(sequence.num_entered);
  for (std::vector<int32_t>& table : sequence.tables) {
    table.assign(num_blocks, -1);
  }
  const auto take = [&](int pool, size_t i) {
    const auto p = static_cast<size_t>(pool);
    const int block = path[i][p];
    if (block >= 0) {
      managers_[p].Lock(block);
      sequence.tables[p][i] = block;
    }
    return block >= 0;
  };
  for (int group = 0; group < cache_.num_groups(); ++group) {
    const LayerGroup& layers = cache_.groups()[static_cast<size_t>(group)];
    const HotRule& rule = layers.rule;
    bool has_gap = false;  // a block before this one, not a sink, has yet to be quantised
    for (auto i = static_cast<size_t>(layers.FirstVisibleBlock(n)); i < num_blocks; ++i) {
      const bool is_cold = !has_gap && take(group, i);
      has_gap = !is_cold && static_cast<int64_t>(i) >= rule.sink_blocks;
      if (rule.enabled() && (!is_cold || rule.IsHot(static_cast<int64_t>(i), n))) {
        Check(take(cache_.HotPool(group), i), "a hit has every block");
      }
    }
  }
}

int64_t SequenceManager::BlocksNeeded(uint64_t id, int pool, int64_t num_tokens) const {
  const Sequence& sequence = At(id);
  const bool is_cold = pool < cache_.num_groups();
  const bool has_hot = RuleOf(pool % cache_.num_groups()).enabled();
  if (has_hot && is_cold) {
    return static_cast<int64_t>(ColdSlotsMissing(sequence, pool, num_tokens).size());
  }
  if (!has_hot && !is_cold) {
    return 0;
  }
  const auto have = static_cast<int64_t>(sequence.tables.at(static_cast<size_t>(pool)).size());
  return std::max<int64_t>(CeilDiv(num_tokens, cache_.block_seq_len()) - have, 0);
}

std::vector<int64_t> SequenceManager::ColdSlotsMissing(const Sequence& sequence, int group,
                                                       int64_t num_tokens) const {
  const LayerGroup& layers = cache_.groups()[static_cast<size_t>(group)];
  const BlockRange cold = layers.ColdBlocks(sequence.num_written, num_tokens);
  // Blocks that the last query before saw cold have a slot (invariant 4).
  const int64_t known = std::max<int64_t>(sequence.num_written - 1, 0) / cache_.block_seq_len() -
                        layers.rule.recent_blocks;
  const std::vector<int32_t>& table = sequence.tables[static_cast<size_t>(group)];
  std::vector<int64_t> missing;
  for (int64_t i = std::max(cold.begin, known); i < cold.end; ++i) {
    if (i >= static_cast<int64_t>(table.size()) || table[static_cast<size_t>(i)] < 0) {
      missing.push_back(i);
    }
  }
  return missing;
}

int64_t SequenceManager::BlocksToCome(uint64_t id, int pool, int64_t num_tokens,
                                      int64_t chunk) const {
  const int64_t needed = BlocksNeeded(id, pool, num_tokens);
  if (pool < cache_.num_groups()) {
    const LayerGroup& layers = cache_.groups()[static_cast<size_t>(pool)];
    return std::min(needed, layers.BlocksPerSequence(num_tokens, chunk));
  }
  const LayerGroup& layers = cache_.groups()[static_cast<size_t>(pool - cache_.num_groups())];
  const int64_t most = layers.HotBlocksPerSequence(num_tokens, chunk);
  if (layers.window > 0) {
    return std::min(needed, most);
  }
  // Sinks that it has already stay. The recent ones are given back as others come, but somebody
  // else may go on using them.
  const auto have = static_cast<int64_t>(At(id).tables[static_cast<size_t>(pool)].size());
  const int64_t sinks = std::min<int64_t>(layers.rule.sink_blocks, have);
  return std::min(needed, std::max<int64_t>(most - sinks, 0));
}

std::span<const BlockMove> SequenceManager::Moves(uint64_t id, int group) const {
  return At(id).moves.at(static_cast<size_t>(group));
}

void SequenceManager::DropFromTrie(const std::vector<PoolBlock>& blocks) {
  for (const PoolBlock& block : blocks) {
    managers_[static_cast<size_t>(block.pool)].Drop(block.block);
  }
}

void SequenceManager::EvictOldest(int pool) {
  const int block = managers_[static_cast<size_t>(pool)].OldestCached();
  Check(block >= 0, "a block can be evicted");
  DropFromTrie(trie_.Remove({pool, block}));
}

// Fills taken_.
bool SequenceManager::TakeBlocks(const std::vector<int64_t>& needed) {
  for (size_t p = 0; p < managers_.size(); ++p) {
    if (managers_[p].free() + managers_[p].cached() < needed[p]) {
      return false;
    }
  }
  taken_.resize(managers_.size());
  for (size_t p = 0; p < managers_.size(); ++p) {
    taken_[p].clear();
    for (int64_t i = 0; i < needed[p]; ++i) {
      if (managers_[p].free() == 0) {
        EvictOldest(static_cast<int>(p));
      }
      taken_[p].push_back(managers_[p].Allocate());
    }
  }
  return true;
}

bool SequenceManager::AllocateDataAndScaleBlocks(uint64_t id, int64_t num_tokens) {
  Sequence& sequence = At(id);
  needed_.clear();
  for (int pool = 0; pool < num_pools(); ++pool) {
    needed_.push_back(BlocksNeeded(id, pool, num_tokens));
  }
  if (!TakeBlocks(needed_)) {
    return false;
  }
  if (sequence.num_planned == 0) {
    MarkServed(sequence);
  }
  sequence.num_planned = num_tokens;
  for (int group = 0; group < cache_.num_groups(); ++group) {
    const auto g = static_cast<size_t>(group);
    const bool is_hot = RuleOf(group).enabled();  // where new tokens go
    const auto p = static_cast<size_t>(is_hot ? cache_.HotPool(group) : group);
    std::vector<int32_t>& table = sequence.tables[p];
    table.insert(table.end(), taken_[p].begin(), taken_[p].end());
    if (!is_hot) {
      if (cache_.has_hot_pools()) {
        sequence.tables[static_cast<size_t>(cache_.HotPool(group))].resize(table.size(), -1);
      }
      continue;
    }
    const std::vector<int64_t> missing = ColdSlotsMissing(sequence, group, num_tokens);
    sequence.tables[g].resize(table.size(), -1);
    for (size_t i = 0; i < missing.size(); ++i) {
      sequence.tables[g][static_cast<size_t>(missing[i])] = taken_[g][i];
      sequence.unquantised[g].push_back(missing[i]);
    }
    PlanMoves(sequence, group);
  }
  return true;
}

// A copy that has served a hit, at the end of a shared prefix, may serve the next one. One that was
// found for a sequence that then had to wait has not.
void SequenceManager::MarkServed(const Sequence& sequence) {
  for (int group = 0; cache_.has_hot_pools() && group < cache_.num_groups(); ++group) {
    const auto pool = static_cast<size_t>(cache_.HotPool(group));
    for (const int32_t block : sequence.tables[pool]) {
      if (block >= 0) {
        managers_[pool].ClearSpare(block);
      }
    }
  }
}

// Slots may be left from a step that was planned and never run.
void SequenceManager::PlanMoves(Sequence& sequence, int group) {
  const auto g = static_cast<size_t>(group);
  std::ranges::sort(sequence.unquantised[g]);
  const BlockRange cold = cache_.groups()[g].ColdBlocks(sequence.num_written, sequence.num_planned);
  sequence.moves[g].clear();
  for (const int64_t i : sequence.unquantised[g]) {
    if (i >= cold.begin && i < cold.end) {
      const auto index = static_cast<size_t>(i);
      const int32_t hot = sequence.tables[static_cast<size_t>(cache_.HotPool(group))][index];
      Check(hot >= 0, "a block that is to be quantised is hot");
      sequence.moves[g].push_back({hot, sequence.tables[g][index]});
    }
  }
}

void SequenceManager::Commit(uint64_t id, std::span<const int32_t> tokens) {
  Sequence& sequence = At(id);
  const auto num_tokens = static_cast<int64_t>(tokens.size());
  const int64_t length = cache_.block_seq_len();
  Check(num_tokens >= sequence.num_written, "written tokens stay written");
  for (const std::vector<int32_t>& table : sequence.tables) {
    Check(num_tokens <= static_cast<int64_t>(table.size()) * length, "written tokens have slots");
  }
  bool any_quantised = false;
  if (cache_.has_hot_pools()) {
    Check(num_tokens <= std::max(sequence.num_planned, sequence.num_written),
          "written tokens were planned");
    sequence.num_planned = num_tokens;
    for (int group = 0; group < cache_.num_groups(); ++group) {
      any_quantised = (RuleOf(group).enabled() && FinishMoves(sequence, group)) || any_quantised;
    }
  }
  sequence.num_written = num_tokens;
  const int64_t num_whole = num_tokens / length;
  if (enable_prefix_caching_ && (num_whole > sequence.num_entered || any_quantised)) {
    Enter(sequence, tokens.first(static_cast<size_t>(num_whole * length)));
    sequence.num_entered = num_whole;
  }
  for (int group = 0; group < cache_.num_groups(); ++group) {
    TrimBehindWindow(sequence, group);
    if (RuleOf(group).enabled()) {
      TrimQuantised(sequence, group);
    }
  }
}

// Cold slots of the moves up to num_planned are written now; others, planned for a longer step than
// the one that ran, are given back. True if there were any moves.
bool SequenceManager::FinishMoves(Sequence& sequence, int group) {
  const auto g = static_cast<size_t>(group);
  const BlockRange cold = cache_.groups()[g].ColdBlocks(sequence.num_written, sequence.num_planned);
  bool any = false;
  for (const int64_t i : sequence.unquantised[g]) {
    if (i >= cold.begin && i < cold.end) {
      any = true;
    } else {
      Release(sequence, group, i);
    }
  }
  sequence.unquantised[g].clear();
  sequence.moves[g].clear();
  return any;
}

void SequenceManager::Enter(const Sequence& sequence, std::span<const int32_t> whole) {
  const std::vector<PoolBlock> entered = trie_.Insert(whole, sequence.tables);
  for (const PoolBlock& block : entered) {
    managers_[static_cast<size_t>(block.pool)].Keep(block.block);
  }
  if (!cache_.has_hot_pools()) {
    return;
  }
  for (const PoolBlock& block : entered) {
    const int group = block.pool % cache_.num_groups();
    const int hot = trie_.Twin(block, cache_.HotPool(group));
    if (hot >= 0 && trie_.Twin(block, group) >= 0) {
      managers_[static_cast<size_t>(cache_.HotPool(group))].MarkSpare(hot);
    }
  }
}

void SequenceManager::Release(Sequence& sequence, int pool, int64_t index) {
  int32_t& block = sequence.tables[static_cast<size_t>(pool)][static_cast<size_t>(index)];
  if (block >= 0) {
    UnlockBlock({pool, std::exchange(block, -1)});
  }
}

void SequenceManager::TrimBehindWindow(Sequence& sequence, int group) {
  const auto is_there = [&](int pool, int64_t i) {
    return sequence.tables[static_cast<size_t>(pool)][static_cast<size_t>(i)] >= 0;
  };
  const int last_pool = cache_.has_hot_pools() ? cache_.HotPool(group) : group;
  // Backwards until the part that earlier calls have trimmed.
  int64_t i = cache_.groups()[static_cast<size_t>(group)].FirstVisibleBlock(sequence.num_written);
  while (i > 0 && (is_there(group, i - 1) || is_there(last_pool, i - 1))) {
    --i;
    Release(sequence, group, i);
    Release(sequence, last_pool, i);
  }
}

// Gives back the hot slots of blocks that the last query saw cold.
void SequenceManager::TrimQuantised(Sequence& sequence, int group) {
  const HotRule& rule = RuleOf(group);
  const int pool = cache_.HotPool(group);
  const std::vector<int32_t>& hot = sequence.tables[static_cast<size_t>(pool)];
  const int64_t last = std::max<int64_t>(sequence.num_written - 1, 0) / rule.block_seq_len;
  int64_t i = last - rule.recent_blocks;
  while (i > rule.sink_blocks && hot[static_cast<size_t>(i - 1)] >= 0) {
    --i;
    Check(sequence.tables[static_cast<size_t>(group)][static_cast<size_t>(i)] >= 0,
          "a block is quantised before its hot slot is given back");
    Release(sequence, pool, i);
  }
}

void SequenceManager::UnlockBlock(PoolBlock block) {
  managers_[static_cast<size_t>(block.pool)].Unlock(block.block);
}

void SequenceManager::FreeDataAndScaleBlocks(uint64_t id) {
  const Sequence& sequence = At(id);
  for (size_t p = 0; p < managers_.size(); ++p) {
    // Last first: the end of a prefix is evicted before its beginning.
    const std::vector<int32_t>& table = sequence.tables[p];
    for (auto block = table.rbegin(); block != table.rend(); ++block) {
      if (*block >= 0) {
        UnlockBlock({static_cast<int>(p), *block});
      }
    }
  }
  sequences_.erase(id);
}

void SequenceManager::ClearPrefixCache() { DropFromTrie(trie_.Clear()); }

int64_t SequenceManager::num_written(uint64_t id) const { return At(id).num_written; }

int64_t SequenceManager::num_cut(uint64_t id) const { return At(id).num_cut; }

std::span<const int32_t> SequenceManager::BlockTable(uint64_t id, int pool) const {
  return At(id).tables.at(static_cast<size_t>(pool));
}

BlockCounts SequenceManager::counts(int pool) const {
  const BlockManager& manager = managers_.at(static_cast<size_t>(pool));
  return {manager.total(), manager.free(), manager.cached(), manager.active()};
}

int64_t SequenceManager::high_water(int pool) const {
  return managers_.at(static_cast<size_t>(pool)).high_water();
}

int64_t SequenceManager::touched_bytes() const {
  int64_t sum = 0;
  for (int pool = 0; pool < num_pools(); ++pool) {
    sum += high_water(pool) * cache_.bytes_per_block(pool);
  }
  return sum;
}

std::byte* SequenceManager::GetBlockPtr(int64_t block, int pool) const {
  return cache_.GetBlockPtr(pool, block);
}

std::byte* SequenceManager::GetScaleBlockPtr(int64_t block, int pool) const {
  return cache_.GetScaleBlockPtr(pool, block);
}

}  // namespace turbomind
