#pragma once

// Checks shared by the ops that access the cache. For each layer they read the positions of a
// step's tokens and the ids of all blocks that the layer uses.

#include "turbomind/ops/params.h"

namespace turbomind {

// The largest rotary part of a row with latents: sums of so many products of 13-bit values fit into
// 32 bits.
inline constexpr int kMaxRotaryDim = 128;

// Checks a layer's shape: sizes are positive, the kernels support head_dim, and the pools are set.
void CheckLayer(const KvLayerView& kv);
// Checks that the batch's arrays are consistent: cu_seqlens increases, context_lens and positions
// match.
void CheckBatch(const BatchView& batch);
// Checks the 16-bit pool of a layer, if there is one: 16 bits and the layer's shape.
void CheckWindow16Layer(const KvLayerView& kv, const KvLayerView& window16);
// Positions [begin, end) of a sequence.
struct PositionRange {
  int seq = 0;
  int begin = 0;
  int end = 0;
};
// Checks that the positions lie in existing blocks. `tables` is the batch's block_tables or
// window16_tables.
void CheckBlocks(const BatchView& batch, const int32_t* tables, const PositionRange& range,
                 int block_seq_len);

// Checks the rule of a layer's 16-bit window: it is enabled if and only if there is a pool.
void CheckRule(const KvLayerView& kv, const KvLayerView& window16, const PrecisionWindow& rule);

// What attention reads of a layer's cache.
struct CacheReads {
  const BatchView& batch;
  PrecisionWindow rule;
  int window = 0;  // as in kv/sliding_window.h
  int block_seq_len = 0;
};
// Checks that every position that the new tokens of a sequence see has a block.
void CheckReads(const CacheReads& reads, int seq);

}  // namespace turbomind
