#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "turbomind/kv/layout.h"
#include "turbomind/kv/precision_window.h"

namespace turbomind {

// What the cache stores, by model layer.
struct KvCacheConfig {
  std::vector<block::Config::LayerFormats> layers;
  std::vector<int> windows;  // 0: full attention. Same length as layers
  int kv_heads = 0;
  int head_dim = 0;
  int block_seq_len = 64;
  DataType dtype = DataType::kBFloat16;
  PrecisionWindowTokens window16;  // off unless set
};

// Every layer with the same mode for K and V.
KvCacheConfig MakeKvCacheConfig(const std::vector<int>& windows, KvCacheMode format, int kv_heads,
                                int head_dim, int block_seq_len, DataType dtype);

// Blocks [begin, end) of a sequence; empty where end <= begin.
struct BlockRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// The layers that share block ids: full attention, or one sliding window length. Where blocks are
// 16-bit, layers with both sides in 16 bit make a group of their own, in which there is no 16-bit
// window.
struct LayerGroup {
  int window = 0;           // 0: full attention
  std::vector<int> layers;  // model layers, ascending
  block::Layout layout;     // of the quantized pool
  std::optional<block::Layout>
      window16_layout;  // the same layers in mode none; empty: there is no 16-bit window
  PrecisionWindow rule;

  int64_t bytes_per_block() const { return layout.block_bytes() + layout.scale_block_bytes(); }
  int64_t window16_bytes_per_block() const {
    return window16_layout ? window16_layout->block_bytes() : 0;
  }
  // Quantized blocks that a sequence of up to `num_tokens` needs, at most, while no more than
  // `chunk` tokens are added at once: all its blocks, or those of its window; where there is a
  // 16-bit window, without the sinks, the current block and the recent ones (0 for a sequence that
  // is in the 16-bit window altogether).
  int64_t BlocksPerSequence(int64_t num_tokens, int64_t chunk) const;
  // 16-bit blocks, while at most `chunk` tokens are added at once (1: decode): sinks, the recent
  // ones, the one that is being quantized, and those of the chunk. 0 where there is no 16-bit
  // window.
  int64_t Window16BlocksPerSequence(int64_t num_tokens, int64_t chunk) const;
  // Quantized and 16-bit blocks of a sequence of `num_tokens` between steps, each token added on
  // its own.
  int64_t QuantizedBlocksHeld(int64_t num_tokens) const;
  int64_t Window16BlocksHeld(int64_t num_tokens) const;
  // First block of a sequence that a query at `position`, or any later one, can see.
  int64_t FirstVisibleBlock(int64_t position) const;
  // Blocks that some query at a position in [begin, end) sees quantized. REQUIRES: rule.enabled().
  BlockRange QuantizedBlocks(int64_t begin, int64_t end) const;
};

// Full attention first, then windows in ascending order; of one window, 16-bit layers last. Throws
// InvalidArgument for negative windows and whatever block::Layout refuses.
std::vector<LayerGroup> MakeLayerGroups(const KvCacheConfig& config);

// Whether some group has 16-bit blocks.
bool HasWindow16(const std::vector<LayerGroup>& groups);

}  // namespace turbomind
