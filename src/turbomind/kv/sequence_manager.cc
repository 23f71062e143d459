#include "turbomind/kv/sequence_manager.h"

#include <algorithm>
#include <utility>

#include "turbomind/core/check.h"

namespace turbomind {
namespace {

int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

int FullGroup(const KvCache& cache) { return cache.groups().front().window == 0 ? 0 : -1; }

}  // namespace

SequenceManager::SequenceManager(KvCache& cache, bool enable_prefix_caching)
    : cache_(cache),
      enable_prefix_caching_(enable_prefix_caching),
      trie_(cache.num_groups(), FullGroup(cache), cache.block_seq_len()) {
  for (int group = 0; group < cache.num_groups(); ++group) {
    managers_.emplace_back(cache.num_blocks(group));
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

int64_t SequenceManager::LongestHit(const std::vector<std::vector<int>>& path) const {
  int64_t longest = 0;
  std::vector<int64_t> run(managers_.size(), 0);  // blocks present without a gap up to here
  for (int64_t n = 1; n <= static_cast<int64_t>(path.size()); ++n) {
    bool usable = true;
    for (size_t g = 0; g < managers_.size(); ++g) {
      run[g] = path[static_cast<size_t>(n - 1)][g] >= 0 ? run[g] + 1 : 0;
      const int64_t first = cache_.groups()[g].FirstVisibleBlock(n * cache_.block_seq_len());
      usable = usable && n - first <= run[g];
    }
    longest = usable ? n : longest;
  }
  return longest;
}

int64_t SequenceManager::Create(uint64_t id, std::span<const int32_t> prompt,
                                bool use_prefix_cache) {
  Check(!prompt.empty(), "a prompt has tokens");
  Check(!Contains(id), "a sequence id is used once");
  Sequence sequence;
  sequence.tables.resize(managers_.size());
  if (enable_prefix_caching_ && use_prefix_cache) {
    // The last token is always computed: its logits are wanted.
    const std::vector<std::vector<int>> path = trie_.Find(prompt.first(prompt.size() - 1));
    const int64_t num_blocks = LongestHit(path);
    sequence.num_written = num_blocks * cache_.block_seq_len();
    sequence.num_entered = num_blocks;
    for (size_t g = 0; g < managers_.size(); ++g) {
      std::vector<int32_t>& table = sequence.tables[g];
      table.assign(static_cast<size_t>(num_blocks), -1);
      for (int64_t i = cache_.groups()[g].FirstVisibleBlock(sequence.num_written); i < num_blocks;
           ++i) {
        const int block = path[static_cast<size_t>(i)][g];
        managers_[g].Lock(block);
        table[static_cast<size_t>(i)] = block;
      }
    }
  }
  const int64_t num_hit = sequence.num_written;
  sequences_.emplace(id, std::move(sequence));
  return num_hit;
}

int64_t SequenceManager::BlocksNeeded(uint64_t id, int group, int64_t num_tokens) const {
  const auto have = static_cast<int64_t>(At(id).tables.at(static_cast<size_t>(group)).size());
  return std::max<int64_t>(CeilDiv(num_tokens, cache_.block_seq_len()) - have, 0);
}

int64_t SequenceManager::BlocksToCome(uint64_t id, int pool, int64_t num_tokens,
                                      int64_t chunk) const {
  return std::min(BlocksNeeded(id, pool, num_tokens),
                  cache_.groups()[static_cast<size_t>(pool)].BlocksPerSequence(num_tokens, chunk));
}

std::span<const BlockMove> SequenceManager::Moves(uint64_t, int) const { return {}; }

void SequenceManager::DropFromTrie(const std::vector<GroupBlock>& blocks) {
  for (const GroupBlock& block : blocks) {
    managers_[static_cast<size_t>(block.group)].Drop(block.block);
  }
}

void SequenceManager::EvictOldest(int group) {
  const int block = managers_[static_cast<size_t>(group)].OldestCached();
  Check(block >= 0, "a block can be evicted");
  DropFromTrie(trie_.Remove({group, block}));
}

bool SequenceManager::TakeBlocks(const std::vector<int64_t>& needed,
                                 std::vector<std::vector<int>>* taken) {
  for (size_t g = 0; g < managers_.size(); ++g) {
    if (managers_[g].free() + managers_[g].cached() < needed[g]) {
      return false;
    }
  }
  taken->resize(managers_.size());
  for (size_t g = 0; g < managers_.size(); ++g) {
    for (int64_t i = 0; i < needed[g]; ++i) {
      if (managers_[g].free() == 0) {
        EvictOldest(static_cast<int>(g));
      }
      (*taken)[g].push_back(managers_[g].Allocate());
    }
  }
  return true;
}

bool SequenceManager::AllocateDataAndScaleBlocks(uint64_t id, int64_t num_tokens) {
  Sequence& sequence = At(id);
  std::vector<int64_t> needed;
  for (int group = 0; group < cache_.num_groups(); ++group) {
    needed.push_back(BlocksNeeded(id, group, num_tokens));
  }
  std::vector<std::vector<int>> taken;
  if (!TakeBlocks(needed, &taken)) {
    return false;
  }
  for (size_t g = 0; g < managers_.size(); ++g) {
    sequence.tables[g].insert(sequence.tables[g].end(), taken[g].begin(), taken[g].end());
  }
  return true;
}

void SequenceManager::Commit(uint64_t id, std::span<const int32_t> tokens) {
  Sequence& sequence = At(id);
  const auto num_tokens = static_cast<int64_t>(tokens.size());
  const int64_t length = cache_.block_seq_len();
  Check(num_tokens >= sequence.num_written, "written tokens stay written");
  for (const std::vector<int32_t>& table : sequence.tables) {
    Check(num_tokens <= static_cast<int64_t>(table.size()) * length, "written tokens have slots");
  }
  sequence.num_written = num_tokens;
  const int64_t num_whole = num_tokens / length;
  if (enable_prefix_caching_ && num_whole > sequence.num_entered) {
    const auto whole = tokens.first(static_cast<size_t>(num_whole * length));
    for (const GroupBlock& block : trie_.Insert(whole, sequence.tables)) {
      managers_[static_cast<size_t>(block.group)].Keep(block.block);
    }
    sequence.num_entered = num_whole;
  }
  TrimBehindWindows(sequence);
}

void SequenceManager::TrimBehindWindows(Sequence& sequence) {
  for (size_t g = 0; g < managers_.size(); ++g) {
    std::vector<int32_t>& table = sequence.tables[g];
    // Backwards until the part that earlier calls have trimmed.
    int64_t i = cache_.groups()[g].FirstVisibleBlock(sequence.num_written);
    while (i > 0 && table[static_cast<size_t>(i - 1)] >= 0) {
      --i;
      UnlockBlock({static_cast<int>(g), std::exchange(table[static_cast<size_t>(i)], -1)});
    }
  }
}

void SequenceManager::UnlockBlock(GroupBlock block) {
  managers_[static_cast<size_t>(block.group)].Unlock(block.block);
}

void SequenceManager::FreeDataAndScaleBlocks(uint64_t id) {
  const Sequence& sequence = At(id);
  for (size_t g = 0; g < managers_.size(); ++g) {
    // Last first: the end of a prefix is evicted before its beginning.
    const std::vector<int32_t>& table = sequence.tables[g];
    for (auto block = table.rbegin(); block != table.rend(); ++block) {
      if (*block >= 0) {
        UnlockBlock({static_cast<int>(g), *block});
      }
    }
  }
  sequences_.erase(id);
}

bool SequenceManager::Fork(uint64_t source, uint64_t id) {
  const Sequence& from = At(source);
  Check(!Contains(id), "a sequence id is used once");
  const auto num_blocks = static_cast<size_t>(CeilDiv(from.num_written, cache_.block_seq_len()));
  std::vector<int64_t> needed;
  for (const std::vector<int32_t>& table : from.tables) {
    const auto end = table.begin() + static_cast<std::ptrdiff_t>(num_blocks);
    needed.push_back(std::count_if(table.begin(), end, [](int block) { return block >= 0; }));
  }
  std::vector<std::vector<int>> taken;
  if (!TakeBlocks(needed, &taken)) {
    return false;
  }
  Sequence copy;
  copy.num_written = from.num_written;
  copy.tables.resize(managers_.size());
  for (size_t g = 0; g < managers_.size(); ++g) {
    size_t next = 0;
    for (size_t i = 0; i < num_blocks; ++i) {
      const int32_t block = from.tables[g][i];
      copy.tables[g].push_back(block < 0 ? -1 : taken[g][next++]);
      if (block >= 0) {
        cache_.CopyBlock(static_cast<int>(g), copy.tables[g].back(), block);
      }
    }
  }
  sequences_.emplace(id, std::move(copy));
  return true;
}

void SequenceManager::ClearPrefixCache() { DropFromTrie(trie_.Clear()); }

int64_t SequenceManager::num_written(uint64_t id) const { return At(id).num_written; }

std::span<const int32_t> SequenceManager::BlockTable(uint64_t id, int group) const {
  return At(id).tables.at(static_cast<size_t>(group));
}

BlockCounts SequenceManager::counts(int group) const {
  const BlockManager& manager = managers_.at(static_cast<size_t>(group));
  return {manager.total(), manager.free(), manager.cached(), manager.active()};
}

int64_t SequenceManager::high_water(int group) const {
  return managers_.at(static_cast<size_t>(group)).high_water();
}

int64_t SequenceManager::touched_bytes() const {
  int64_t sum = 0;
  for (size_t g = 0; g < managers_.size(); ++g) {
    sum += managers_[g].high_water() * cache_.groups()[g].bytes_per_block();
  }
  return sum;
}

bool SequenceManager::CanEverFit(int64_t num_tokens, int64_t chunk) const {
  for (size_t g = 0; g < managers_.size(); ++g) {
    if (cache_.groups()[g].BlocksPerSequence(num_tokens, chunk) > managers_[g].total()) {
      return false;
    }
  }
  return true;
}

std::byte* SequenceManager::GetBlockPtr(int64_t block, int group) const {
  return cache_.GetBlockPtr(group, block);
}

std::byte* SequenceManager::GetScaleBlockPtr(int64_t block, int group) const {
  return cache_.GetScaleBlockPtr(group, block);
}

void SequenceManager::CheckGroup(int group, bool check_scale_bytes) const {
  const BlockManager& manager = managers_[static_cast<size_t>(group)];
  const LayerGroup& layers = cache_.groups()[static_cast<size_t>(group)];
  manager.CheckIntegrity();
  Check(cache_.data_bytes(group) == manager.total() * layers.layout.block_bytes() &&
            cache_.scale_bytes(group) == manager.total() * layers.layout.scale_block_bytes(),
        "both pools have a place for every block");
  std::vector<int> users(static_cast<size_t>(manager.high_water()), 0);
  for (const auto& [id, sequence] : sequences_) {
    const std::vector<int32_t>& table = sequence.tables[static_cast<size_t>(group)];
    const auto num_blocks = static_cast<int64_t>(table.size());
    const int64_t first = layers.FirstVisibleBlock(sequence.num_written);
    Check(sequence.num_written <= num_blocks * cache_.block_seq_len(), "written tokens have slots");
    for (int64_t i = 0; i < num_blocks; ++i) {
      const int32_t block = table[static_cast<size_t>(i)];
      Check((block >= 0) == (i >= first), "a table has the visible blocks and no others");
      if (block >= 0) {
        ++users.at(static_cast<size_t>(block));
      }
    }
  }
  int64_t kept = 0;
  for (int block = 0; block < static_cast<int>(users.size()); ++block) {
    Check(manager.num_users(block) == users[static_cast<size_t>(block)],
          "a block's reference count is the number of sequences that use it");
    Check(manager.is_kept(block) == trie_.Contains({group, block}),
          "a block is kept if and only if it is in the trie");
    if (manager.is_kept(block)) {
      ++kept;
      if (check_scale_bytes) {
        cache_.CheckScaleBytes(group, block);
      }
    }
  }
  Check(kept == trie_.num_blocks(group), "every block of the trie was handed out");
}

void SequenceManager::CheckIntegrity(bool check_scale_bytes) const {
  trie_.CheckIntegrity();
  for (int group = 0; group < cache_.num_groups(); ++group) {
    CheckGroup(group, check_scale_bytes);
  }
}

}  // namespace turbomind
