#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "turbomind/kv/layout.h"
#include "turbomind/kv/precision_window.h"

namespace turbomind {

// What the cache stores, by model layer.
struct KvCacheConfig {
  std::vector<block::Config::LayerModes> layers;
  std::vector<int> windows;  // 0: full attention. Same length as layers
  int kv_heads = 0;
  int head_dim = 0;
  int block_seq_len = 64;
  DataType dtype = DataType::kBFloat16;
  HotTokens hot;  // off unless set
};

// Every layer with the same mode for K and V.
KvCacheConfig MakeKvCacheConfig(const std::vector<int>& windows, KvCacheMode mode, int kv_heads,
                                int head_dim, int block_seq_len, DataType dtype);

// Blocks [begin, end) of a sequence; empty where end <= begin.
struct BlockRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// The layers that share block ids: full attention, or one sliding window length. Where blocks are
// hot, layers with both sides in 16 bit make a group of their own, in which nothing is hot.
struct LayerGroup {
  int window = 0;                           // 0: full attention
  std::vector<int> layers;                  // model layers, ascending
  block::Layout layout;                     // of the cold pool
  std::optional<block::Layout> hot_layout;  // the same layers in mode none; empty: nothing is hot
  HotRule rule;

  int64_t bytes_per_block() const { return layout.block_bytes() + layout.scale_block_bytes(); }
  int64_t hot_bytes_per_block() const { return hot_layout ? hot_layout->block_bytes() : 0; }
  // Cold blocks that a sequence of up to `num_tokens` needs, at most, while no more than `chunk`
  // tokens are added at once: all its blocks, or those of its window; where blocks are hot, without
  // the sinks, the current block and the recent ones (0 for a sequence that is hot altogether).
  int64_t BlocksPerSequence(int64_t num_tokens, int64_t chunk) const;
  // Hot blocks, while at most `chunk` tokens are added at once (1: decode): sinks, the recent ones,
  // the one that is being quantised, and those of the chunk. 0 where nothing is hot.
  int64_t HotBlocksPerSequence(int64_t num_tokens, int64_t chunk) const;
  // Cold and hot blocks of a sequence of `num_tokens` between steps, each token added on its own.
  int64_t ColdBlocksHeld(int64_t num_tokens) const;
  int64_t HotBlocksHeld(int64_t num_tokens) const;
  // First block of a sequence that a query at `position`, or any later one, can see.
  int64_t FirstVisibleBlock(int64_t position) const;
  // Blocks that some query at a position in [begin, end) sees cold. REQUIRES: rule.enabled().
  BlockRange ColdBlocks(int64_t begin, int64_t end) const;
};

// Full attention first, then windows in ascending order; of one window, 16-bit layers last. Throws
// InvalidArgument for negative windows and whatever block::Layout refuses.
std::vector<LayerGroup> MakeLayerGroups(const KvCacheConfig& config);

// Whether some group has hot blocks.
bool HasHot(const std::vector<LayerGroup>& groups);

}  // namespace turbomind
