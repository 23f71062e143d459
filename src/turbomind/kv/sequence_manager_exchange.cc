// Copies cached blocks out of and into the pools.

#include <algorithm>
#include <string>
#include <utility>

#include "turbomind/core/check.h"
#include "turbomind/kv/prefix_hit.h"
#include "turbomind/kv/sequence_manager.h"

namespace turbomind {
namespace {

using Path = std::vector<std::vector<int>>;  // by block, then by pool (BlockTrie::Find)

// Throws InvalidArgument unless the copies have the sizes of the pools and one of them has bytes.
void CheckSizes(const KvCache& cache, const BlockViews& copies) {
  if (static_cast<int>(copies.size()) != cache.num_pools()) {
    throw InvalidArgument("A stored block has copies for " + std::to_string(copies.size()) +
                          " pools, but the KV cache has " + std::to_string(cache.num_pools()) +
                          ".");
  }
  for (int pool = 0; pool < cache.num_pools(); ++pool) {
    const auto size = static_cast<int64_t>(copies[static_cast<size_t>(pool)].size());
    // Working states belong to running sequences and are never stored.
    const int64_t wanted = pool == cache.StatePool() ? 0 : cache.bytes_per_block(pool);
    if (size != 0 && size != wanted) {
      throw InvalidArgument("A stored block has " + std::to_string(size) + " bytes for pool " +
                            std::to_string(pool) + ", but a block of the KV cache has " +
                            std::to_string(wanted) + ".");
    }
  }
}

}  // namespace

int64_t SequenceManager::CachedTokens(std::span<const int32_t> prompt,
                                      const CacheSalt& salt) const {
  Check(!prompt.empty(), "a prompt must have tokens");
  const Path path = trie_.Find(prompt.first(prompt.size() - 1), salt);
  return FindPrefixHit(cache_.groups(), path, cache_.CheckpointPool()).num_blocks *
         cache_.block_seq_len();
}

std::vector<BlockCopies> SequenceManager::ExportBlocks(std::span<const int32_t> tokens,
                                                       int64_t first, int64_t max_blocks,
                                                       const CacheSalt& salt) const {
  Check(first >= 0, "the first block must not be negative");
  const Path path = trie_.Find(tokens, salt);
  const auto end = std::min(static_cast<int64_t>(path.size()), first + max_blocks);
  std::vector<BlockCopies> exported;
  for (int64_t i = first; i < end; ++i) {
    BlockCopies& copies = exported.emplace_back(managers_.size());
    for (int pool = 0; pool < num_pools(); ++pool) {
      const int block = path[static_cast<size_t>(i)][static_cast<size_t>(pool)];
      if (block >= 0) {
        copies[static_cast<size_t>(pool)] = cache_.ReadBlock(pool, block);
      }
    }
  }
  return exported;
}

int64_t SequenceManager::ImportBlocks(std::span<const int32_t> tokens, int64_t first,
                                      std::span<const BlockViews> copies, const CacheSalt& salt) {
  const auto length = static_cast<size_t>(cache_.block_seq_len());
  const auto begin = static_cast<size_t>(first);
  const size_t end = begin + copies.size();
  Check(first >= 0 && end * length <= tokens.size(), "every imported block must have its tokens");
  std::ranges::for_each(copies, [this](const BlockViews& c) { CheckSizes(cache_, c); });
  Path path = trie_.Find(tokens.first(end * length), salt);
  if (!enable_prefix_caching_ || path.size() < begin) {
    return 0;
  }
  // Taking slots must not evict the beginning of the prefix.
  std::vector<PoolBlock> locked;
  for (const std::vector<int>& blocks : path) {
    for (int pool = 0; pool < num_pools(); ++pool) {
      const int block = blocks[static_cast<size_t>(pool)];
      if (block >= 0) {
        managers_[static_cast<size_t>(pool)].Lock(block);
        locked.push_back({pool, block});
      }
    }
  }
  path.resize(end, std::vector<int>(managers_.size(), -1));
  std::vector<std::vector<int32_t>> tables(managers_.size(), std::vector<int32_t>(end, -1));
  int64_t num_placed = 0;
  std::string wrong;
  for (size_t i = begin; i < end && wrong.empty(); ++i, ++num_placed) {
    std::vector<PoolBlock> placed;
    try {
      if (!Place(copies[i - begin], path[i], placed)) {
        break;
      }
    } catch (const InternalError& error) {  // an illegal scale byte
      std::ranges::for_each(placed, [this](PoolBlock block) { UnlockBlock(block); });
      wrong = error.what();
      break;
    }
    for (const PoolBlock& block : placed) {
      tables[static_cast<size_t>(block.pool)][i] = block.block;
      locked.push_back(block);
    }
  }
  Enter(tokens.first((begin + static_cast<size_t>(num_placed)) * length), tables, salt);
  // As in FreeDataAndScaleBlocks, the end of the prefix is evicted before its beginning.
  std::ranges::for_each(locked.rbegin(), locked.rend(),
                        [this](PoolBlock block) { UnlockBlock(block); });
  if (!wrong.empty()) {
    throw InvalidArgument("A stored block is damaged: " + wrong);
  }
  return num_placed;
}

// Copies the parts of a block that the prefix cache lacks (`known` is -1 for their pools) to new
// blocks, which it adds to `placed`. Returns false and takes nothing if they do not fit, or if the
// block would have no copy that the trie can keep. A checkpoint that does not fit is left out.
bool SequenceManager::Place(const BlockViews& copies, const std::vector<int>& known,
                            std::vector<PoolBlock>& placed) {
  needed_.assign(managers_.size(), 0);
  bool has_any = false;
  for (size_t p = 0; p < managers_.size(); ++p) {
    needed_[p] = known[p] < 0 && !copies[p].empty() ? 1 : 0;
    has_any = has_any || known[p] >= 0 || needed_[p] > 0;
  }
  const bool brings_checkpoint =
      cache_.has_states() &&
      std::exchange(needed_[static_cast<size_t>(cache_.CheckpointPool())], 0) > 0;
  const std::vector<int> full = FullPools(cache_);
  const auto is_there = [&](int pool) {
    const auto p = static_cast<size_t>(pool);
    return known[p] >= 0 || needed_[p] > 0;
  };
  if (!has_any || (!full.empty() && std::ranges::none_of(full, is_there)) || !TakeBlocks(needed_)) {
    return false;
  }
  for (int pool = 0; pool < num_pools(); ++pool) {
    for (const int block : taken_[static_cast<size_t>(pool)]) {
      placed.push_back({pool, block});
    }
  }
  const int32_t checkpoint = brings_checkpoint ? TakeCheckpoint(CheckpointKind::kPrompt) : -1;
  if (checkpoint >= 0) {
    placed.push_back({cache_.CheckpointPool(), checkpoint});
  }
  for (const PoolBlock& block : placed) {
    cache_.WriteBlock(block.pool, block.block, copies[static_cast<size_t>(block.pool)]);
    cache_.CheckScaleBytes(block.pool, block.block);
  }
  return true;
}

}  // namespace turbomind
