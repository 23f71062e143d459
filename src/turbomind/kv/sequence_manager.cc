#include "turbomind/kv/sequence_manager.h"

#include <algorithm>
#include <utility>

#include "turbomind/core/ceil_div.h"
#include "turbomind/core/check.h"
#include "turbomind/kv/prefix_hit.h"

namespace turbomind {

std::vector<int> FullPools(const KvCache& cache) {
  if (cache.groups().front().window != 0) {
    return {};
  }
  return cache.has_window16_pools() ? std::vector<int>{0, cache.Window16Pool(0)}
                                    : std::vector<int>{0};
}

namespace {

// Returns the groups of the events: the layers of each window, and the states. The result is empty
// if that is one group. Of the cache's groups with equal windows, the first one counts, as in
// FullPools.
std::vector<EventGroup> EventGroups(const KvCache& cache) {
  std::vector<EventGroup> groups;
  for (int g = 0; g < cache.num_groups(); ++g) {
    const int window = cache.groups()[static_cast<size_t>(g)].window;
    if (groups.empty() || groups.back().group.window != window) {
      const auto index = static_cast<int>(groups.size());
      groups.push_back({{.index = index, .window = window}, {g}});
      if (cache.has_window16_pools()) {
        groups.back().pools.push_back(cache.Window16Pool(g));
      }
    }
  }
  if (cache.has_states()) {
    const auto index = static_cast<int>(groups.size());
    groups.push_back({{.index = index, .is_state = true}, {cache.CheckpointPool()}});
  }
  return groups.size() == 1 ? std::vector<EventGroup>() : groups;
}

}  // namespace

SequenceManager::SequenceManager(KvCache& cache, bool enable_prefix_caching, PrefixEvents* events,
                                 int64_t checkpoint_interval)
    : cache_(cache),
      enable_prefix_caching_(enable_prefix_caching),
      trie_(cache.num_pools(), FullPools(cache), cache.block_seq_len(), events, EventGroups(cache)),
      checkpoint_interval_(checkpoint_interval) {
  for (int pool = 0; pool < cache.num_pools(); ++pool) {
    managers_.emplace_back(cache.num_blocks(pool));
  }
  if (cache.has_states()) {
    checkpoint_uses_.resize(static_cast<size_t>(cache.num_blocks(cache.CheckpointPool())));
  }
}

SequenceManager::~SequenceManager() = default;

const SequenceManager::Sequence& SequenceManager::At(uint64_t id) const {
  const auto found = sequences_.find(id);
  Check(found != sequences_.end(), "the sequence must exist");
  return found->second;
}

SequenceManager::Sequence& SequenceManager::At(uint64_t id) {
  return const_cast<Sequence&>(static_cast<const SequenceManager*>(this)->At(id));
}

int64_t SequenceManager::Create(uint64_t id, std::span<const int32_t> prompt, bool use_prefix_cache,
                                const CacheSalt& salt) {
  Check(!prompt.empty(), "a prompt must have tokens");
  Check(!Contains(id), "a sequence id must be used only once");
  Sequence sequence;
  sequence.salt = salt;
  sequence.tables.resize(managers_.size());
  sequence.unquantized.resize(cache_.groups().size());
  sequence.blocks_to_quantize.resize(cache_.groups().size());
  sequence.state.rule = {.block_seq_len = cache_.block_seq_len(),
                         .interval = checkpoint_interval_,
                         .prompt_tokens = static_cast<int64_t>(prompt.size())};
  if (enable_prefix_caching_ && use_prefix_cache) {
    // The last token is always computed because its logits are needed.
    const std::vector<std::vector<int>> path = trie_.Find(prompt.first(prompt.size() - 1), salt);
    const PrefixHit hit = FindPrefixHit(cache_.groups(), path, cache_.CheckpointPool());
    const auto path_blocks = static_cast<int64_t>(path.size());
    if (cache_.has_states() && path_blocks > hit.num_blocks) {
      NoteBranch(sequence.state, path);
    }
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
  for (int pool = 0; pool < cache_.num_kv_pools(); ++pool) {
    sequence.tables[static_cast<size_t>(pool)].assign(num_blocks, -1);
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
    const PrecisionWindow& rule = layers.rule;
    bool has_gap = false;  // an earlier block that is not a sink is still waiting to be quantized
    for (auto i = static_cast<size_t>(layers.FirstVisibleBlock(n)); i < num_blocks; ++i) {
      const bool is_quantized = !has_gap && take(group, i);
      has_gap = !is_quantized && static_cast<int64_t>(i) >= rule.sink_blocks;
      if (rule.enabled() && (!is_quantized || rule.IsInWindow16(static_cast<int64_t>(i), n))) {
        Check(take(cache_.Window16Pool(group), i), "a prefix hit must have every block");
      }
    }
  }
  if (cache_.has_states() && num_blocks > 0) {
    const auto pool = static_cast<size_t>(cache_.CheckpointPool());
    sequence.state.restore = path[num_blocks - 1][pool];
    managers_[pool].Lock(sequence.state.restore);
  }
}

int64_t SequenceManager::BlocksNeeded(uint64_t id, int pool, int64_t num_tokens) const {
  const Sequence& sequence = At(id);
  if (pool >= cache_.num_kv_pools()) {
    return pool == cache_.StatePool() && sequence.state.slot < 0 ? 1 : 0;
  }
  const bool is_quantized = pool < cache_.num_groups();
  const bool has_window16 = RuleOf(cache_.GroupOfPool(pool)).enabled();
  if (has_window16 && is_quantized) {
    return static_cast<int64_t>(QuantizedSlotsMissing(sequence, pool, num_tokens).size());
  }
  if (!has_window16 && !is_quantized) {
    return 0;
  }
  const auto have = static_cast<int64_t>(sequence.tables.at(static_cast<size_t>(pool)).size());
  return std::max<int64_t>(CeilDiv(num_tokens, cache_.block_seq_len()) - have, 0);
}

std::vector<int64_t> SequenceManager::QuantizedSlotsMissing(const Sequence& sequence, int group,
                                                            int64_t num_tokens) const {
  const LayerGroup& layers = cache_.groups()[static_cast<size_t>(group)];
  const BlockRange quantized = layers.QuantizedBlocks(sequence.num_written, num_tokens);
  // Blocks that the previous query read as quantized already have a slot (invariant 4).
  const int64_t known = std::max<int64_t>(sequence.num_written - 1, 0) / cache_.block_seq_len() -
                        layers.rule.recent_blocks;
  const std::vector<int32_t>& table = sequence.tables[static_cast<size_t>(group)];
  std::vector<int64_t> missing;
  for (int64_t i = std::max(quantized.begin, known); i < quantized.end; ++i) {
    if (i >= static_cast<int64_t>(table.size()) || table[static_cast<size_t>(i)] < 0) {
      missing.push_back(i);
    }
  }
  return missing;
}

int64_t SequenceManager::BlocksToCome(uint64_t id, int pool, int64_t num_tokens,
                                      int64_t chunk) const {
  const int64_t needed = BlocksNeeded(id, pool, num_tokens);
  if (pool >= cache_.num_kv_pools()) {
    return needed;
  }
  if (pool < cache_.num_groups()) {
    const LayerGroup& layers = cache_.groups()[static_cast<size_t>(pool)];
    return std::min(needed, layers.BlocksPerSequence(num_tokens, chunk));
  }
  const LayerGroup& layers = cache_.groups()[static_cast<size_t>(cache_.GroupOfPool(pool))];
  const int64_t max_blocks = layers.Window16BlocksPerSequence(num_tokens, chunk);
  if (layers.window != 0) {
    return std::min(needed, max_blocks);
  }
  // The sequence keeps the sinks that it already has. It releases recent blocks as new ones come,
  // but other sequences may still use those.
  const auto have = static_cast<int64_t>(At(id).tables[static_cast<size_t>(pool)].size());
  const int64_t sinks = std::min<int64_t>(layers.rule.sink_blocks, have);
  return std::min(needed, std::max<int64_t>(max_blocks - sinks, 0));
}

std::span<const PendingQuantization> SequenceManager::BlocksToQuantize(uint64_t id,
                                                                       int group) const {
  return At(id).blocks_to_quantize.at(static_cast<size_t>(group));
}

void SequenceManager::DropFromTrie(const std::vector<PoolBlock>& blocks) {
  for (const PoolBlock& block : blocks) {
    managers_[static_cast<size_t>(block.pool)].Drop(block.block);
  }
}

void SequenceManager::EvictOldest(int pool) {
  const int block = managers_[static_cast<size_t>(pool)].OldestCached();
  Check(block >= 0, "there must be a block to evict");
  DropFromTrie(trie_.Remove({pool, block}));
}

// Writes the blocks to taken_.
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

bool SequenceManager::AllocateDataAndScaleBlocks(uint64_t id, int64_t num_tokens,
                                                 int64_t num_uncertain) {
  Sequence& sequence = At(id);
  Check(num_uncertain == 0 || num_tokens - num_uncertain > sequence.num_written,
        "a draft must follow a new token");
  if (num_uncertain > MaxUncertain(id)) {
    return false;
  }
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
    const bool is_in_window16 = RuleOf(group).enabled();  // whether new tokens are 16-bit
    const auto p = static_cast<size_t>(is_in_window16 ? cache_.Window16Pool(group) : group);
    std::vector<int32_t>& table = sequence.tables[p];
    table.insert(table.end(), taken_[p].begin(), taken_[p].end());
    if (!is_in_window16) {
      if (cache_.has_window16_pools()) {
        sequence.tables[static_cast<size_t>(cache_.Window16Pool(group))].resize(table.size(), -1);
      }
      continue;
    }
    const std::vector<int64_t> missing = QuantizedSlotsMissing(sequence, group, num_tokens);
    sequence.tables[g].resize(table.size(), -1);
    for (size_t i = 0; i < missing.size(); ++i) {
      sequence.tables[g][static_cast<size_t>(missing[i])] = taken_[g][i];
      sequence.unquantized[g].push_back(missing[i]);
    }
    PlanQuantization(sequence, group);
  }
  if (cache_.has_states()) {
    PlanSaves(sequence, num_uncertain);
  }
  return true;
}

// Removes the spare mark from copies that served a hit: they end a shared prefix and may serve the
// next hit. A hit of a sequence that still waits for its first step does not count.
void SequenceManager::MarkServed(Sequence& sequence) {
  if (sequence.state.restore >= 0) {
    MarkServedCheckpoint(sequence.state);
  }
  for (int group = 0; cache_.has_window16_pools() && group < cache_.num_groups(); ++group) {
    const auto pool = static_cast<size_t>(cache_.Window16Pool(group));
    for (const int32_t block : sequence.tables[pool]) {
      if (block >= 0) {
        managers_[pool].ClearSpare(block);
      }
    }
  }
}

// Slots may remain from a step that was planned but never ran.
void SequenceManager::PlanQuantization(Sequence& sequence, int group) {
  const auto g = static_cast<size_t>(group);
  std::ranges::sort(sequence.unquantized[g]);
  const BlockRange quantized =
      cache_.groups()[g].QuantizedBlocks(sequence.num_written, sequence.num_planned);
  sequence.blocks_to_quantize[g].clear();
  for (const int64_t i : sequence.unquantized[g]) {
    if (i >= quantized.begin && i < quantized.end) {
      const auto index = static_cast<size_t>(i);
      const int32_t window16 =
          sequence.tables[static_cast<size_t>(cache_.Window16Pool(group))][index];
      Check(window16 >= 0, "a block with pending quantization must be in the 16-bit window");
      sequence.blocks_to_quantize[g].push_back({window16, sequence.tables[g][index]});
    }
  }
}

void SequenceManager::Commit(uint64_t id, std::span<const int32_t> tokens) {
  Sequence& sequence = At(id);
  const auto num_tokens = static_cast<int64_t>(tokens.size());
  const int64_t length = cache_.block_seq_len();
  Check(num_tokens >= sequence.num_written, "written tokens must stay written");
  for (int pool = 0; pool < cache_.num_kv_pools(); ++pool) {
    const std::vector<int32_t>& table = sequence.tables[static_cast<size_t>(pool)];
    Check(num_tokens <= static_cast<int64_t>(table.size()) * length,
          "every written token must have a slot");
  }
  if (cache_.has_states()) {
    ListCheckpoints(sequence, num_tokens);
  }
  const int64_t num_planned = sequence.num_planned;
  bool any_quantized = false;
  if (cache_.has_window16_pools()) {
    Check(num_tokens <= std::max(sequence.num_planned, sequence.num_written),
          "written tokens must have been planned");
    sequence.num_planned = num_tokens;
    for (int group = 0; group < cache_.num_groups(); ++group) {
      any_quantized =
          (RuleOf(group).enabled() && FinishQuantization(sequence, group)) || any_quantized;
    }
  }
  const int64_t num_whole = num_tokens / length;
  if (enable_prefix_caching_ && (num_whole > sequence.num_entered || any_quantized)) {
    Enter(tokens.first(static_cast<size_t>(num_whole * length)), sequence.tables, sequence.salt);
    sequence.num_entered = num_whole;
  }
  if (cache_.has_states()) {
    FinishSaves(sequence, num_planned, num_tokens);
  }
  sequence.num_written = num_tokens;
  for (int group = 0; group < cache_.num_groups(); ++group) {
    TrimBehindWindow(sequence, group);
    if (RuleOf(group).enabled()) {
      TrimQuantized(sequence, group);
    }
  }
}

// Completes the pending quantizations up to num_planned, whose quantized slots are now written.
// Releases the others, which were planned for a longer step than the one that ran. Returns true if
// any were completed.
bool SequenceManager::FinishQuantization(Sequence& sequence, int group) {
  const auto g = static_cast<size_t>(group);
  const BlockRange quantized =
      cache_.groups()[g].QuantizedBlocks(sequence.num_written, sequence.num_planned);
  bool any = false;
  for (const int64_t i : sequence.unquantized[g]) {
    if (i >= quantized.begin && i < quantized.end) {
      any = true;
    } else {
      Release(sequence, group, i);
    }
  }
  sequence.unquantized[g].clear();
  sequence.blocks_to_quantize[g].clear();
  return any;
}

void SequenceManager::Enter(std::span<const int32_t> whole,
                            const std::vector<std::vector<int32_t>>& tables,
                            const CacheSalt& salt) {
  const std::vector<PoolBlock> entered = trie_.Insert(whole, tables, salt);
  for (const PoolBlock& block : entered) {
    managers_[static_cast<size_t>(block.pool)].Keep(block.block);
  }
  if (!cache_.has_window16_pools()) {
    return;
  }
  for (const PoolBlock& block : entered) {
    if (block.pool >= cache_.num_kv_pools()) {
      continue;  // a checkpoint
    }
    const int group = cache_.GroupOfPool(block.pool);
    const int window16 = trie_.Twin(block, cache_.Window16Pool(group));
    if (window16 >= 0 && trie_.Twin(block, group) >= 0) {
      managers_[static_cast<size_t>(cache_.Window16Pool(group))].MarkSpare(window16);
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
  const int last_pool = cache_.has_window16_pools() ? cache_.Window16Pool(group) : group;
  // Goes backwards to the part that earlier calls have trimmed.
  int64_t i = cache_.groups()[static_cast<size_t>(group)].FirstVisibleBlock(sequence.num_written);
  while (i > 0 && (is_there(group, i - 1) || is_there(last_pool, i - 1))) {
    --i;
    Release(sequence, group, i);
    Release(sequence, last_pool, i);
  }
}

// Releases the 16-bit slots of blocks that the last query read as quantized.
void SequenceManager::TrimQuantized(Sequence& sequence, int group) {
  const PrecisionWindow& rule = RuleOf(group);
  const int pool = cache_.Window16Pool(group);
  const std::vector<int32_t>& window16 = sequence.tables[static_cast<size_t>(pool)];
  const int64_t last = std::max<int64_t>(sequence.num_written - 1, 0) / rule.block_seq_len;
  int64_t i = last - rule.recent_blocks;
  while (i > rule.sink_blocks && window16[static_cast<size_t>(i - 1)] >= 0) {
    --i;
    Check(sequence.tables[static_cast<size_t>(group)][static_cast<size_t>(i)] >= 0,
          "a block must be quantized before its 16-bit slot is released");
    Release(sequence, pool, i);
  }
}

void SequenceManager::UnlockBlock(PoolBlock block) {
  managers_[static_cast<size_t>(block.pool)].Unlock(block.block);
}

void SequenceManager::FreeDataAndScaleBlocks(uint64_t id) {
  Sequence& sequence = At(id);
  ReleaseStates(sequence);
  for (size_t p = 0; p < managers_.size(); ++p) {
    // Releases the last block first, so that the end of a prefix is evicted before its beginning.
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
