#pragma once

// Checks that the ops over the cache share. In each layer they read the positions of a step's
// tokens and the ids of all blocks that it uses.

#include "turbomind/ops/params.h"

namespace turbomind {

// The layer's shape: sizes are positive, head_dim is one the kernels hold, pools are there.
void CheckLayer(const KvLayerView& kv);
// The batch's arrays agree with one another: cu_seqlens rises, context_lens and positions match.
void CheckBatch(const BatchView& batch);
// The 16-bit pool of a layer, where there is one: 16 bit, of the layer's shape.
void CheckWindow16Layer(const KvLayerView& kv, const KvLayerView& window16);
// Positions [begin, end) of a sequence.
struct PositionRange {
  int seq = 0;
  int begin = 0;
  int end = 0;
};
// They lie in blocks that are there. `tables`: the batch's block_tables or window16_tables.
void CheckBlocks(const BatchView& batch, const int32_t* tables, const PositionRange& range,
                 int block_seq_len);

}  // namespace turbomind
