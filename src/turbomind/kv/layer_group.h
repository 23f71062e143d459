#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "turbomind/kv/layout.h"
#include "turbomind/kv/precision_window.h"

namespace turbomind {

// The contents of the cache, by model layer.
struct KvCacheConfig {
  std::vector<block::Config::LayerFormats> layers;
  std::vector<int> windows;  // as in kv/sliding_window.h. As long as `layers`
  int kv_heads = 0;
  int head_dim = 0;
  int rotary_dim = 0;  // as in KvLayerView
  // Per layer, if layers differ; else empty.
  std::vector<int> layer_kv_heads;
  std::vector<int> layer_head_dims;
  // Per layer, the layer whose K and V it reads, at or before it; empty: its own.
  std::vector<int> kv_sources;
  int block_seq_len = 64;
  DataType dtype = DataType::kBFloat16;
  PrecisionWindowTokens window16;  // off unless set
  // Format of the window's blocks: 16 bits, or int8 for layers whose K is quantized.
  KvCacheMode window_format = KvCacheMode::kNone;
  // Blocks have offsets of keys or latents (kv/k_offset.h): those that leave the window, and with
  // `k_bias` also those whose keys are quantized when they are written.
  bool k_offset = false;
  bool k_bias = false;  // as ModelConfig::k_bias
  // Bytes of the state of all recurrent layers of one sequence, and of a checkpoint. Both are
  // multiples of 64, or 0 if there are no such layers.
  int64_t state_bytes = 0;
  int64_t checkpoint_bytes = 0;
};

// Returns a configuration in which every layer has the same KV format for K and V.
KvCacheConfig MakeKvCacheConfig(const std::vector<int>& windows, KvCacheMode format, int kv_heads,
                                int head_dim, int block_seq_len, DataType dtype);

// Blocks [begin, end) of a sequence; empty if end <= begin.
struct BlockRange {
  int64_t begin = 0;
  int64_t end = 0;
};

// The layers that share block ids: all full-attention layers, or all layers with one sliding window
// length, of those with the same head_dim and KV heads. A layer that reads the K and V of another
// one is in no group. With a 16-bit window, layers whose K and V are both 16-bit form a group of
// their own, which has no 16-bit window.
struct LayerGroup {
  int window = 0;           // as in kv/sliding_window.h
  std::vector<int> layers;  // model layers, ascending
  int num_readers = 0;      // `layers`, and the layers that read their K and V
  block::Layout layout;     // of the quantized pool
  std::optional<block::Layout>
      window16_layout;  // the same layers in 16 bits; empty if there is no 16-bit window
  PrecisionWindow rule;

  int64_t bytes_per_block() const { return layout.block_bytes() + layout.scale_block_bytes(); }
  int64_t window16_bytes_per_block() const {
    return window16_layout ? window16_layout->block_bytes() : 0;
  }
  // Returns the maximum number of quantized blocks that a sequence of up to `num_tokens` needs if
  // at most `chunk` tokens are added at once. Without a 16-bit window these are all blocks, or
  // those of the sliding window. With one, the sinks, the current block and the recent blocks do
  // not count; the result is 0 if the whole sequence is in the 16-bit window.
  int64_t BlocksPerSequence(int64_t num_tokens, int64_t chunk) const;
  // Returns the maximum number of 16-bit blocks if at most `chunk` tokens are added at once (1:
  // decode). They are the sinks, the recent blocks, the block that is being quantized, and the
  // blocks of the chunk. 0 if there is no 16-bit window.
  int64_t Window16BlocksPerSequence(int64_t num_tokens, int64_t chunk) const;
  // Return the quantized and 16-bit blocks that a sequence of `num_tokens` holds between steps if
  // tokens are added one at a time.
  int64_t QuantizedBlocksHeld(int64_t num_tokens) const;
  int64_t Window16BlocksHeld(int64_t num_tokens) const;
  // Returns the first block of a sequence that a query at `position` or later can see.
  int64_t FirstVisibleBlock(int64_t position) const;
  // Returns the blocks that some query at a position in [begin, end) reads as quantized. REQUIRES:
  // rule.enabled().
  BlockRange QuantizedBlocks(int64_t begin, int64_t end) const;
};

// Returns the groups: full attention first, then windows in ascending order, then chunks; for equal
// windows, 16-bit layers last, and then by head_dim and KV heads. Layers without attention are in
// no group. Throws InvalidArgument for any configuration that block::Layout rejects, and if no
// layer has attention.
std::vector<LayerGroup> MakeLayerGroups(const KvCacheConfig& config);

// Returns whether any group has 16-bit blocks.
bool HasWindow16(const std::vector<LayerGroup>& groups);

}  // namespace turbomind
