#pragma once

// Checks that the ops over the cache share. They cost a few integers per sequence.

#include "turbomind/ops/params.h"

namespace turbomind {

// The layer's shape: sizes are positive, head_dim is one the kernels hold, pools are there.
void CheckLayer(const KvLayerView& kv);
// The batch's arrays agree with one another: cu_seqlens rises, context_lens and positions match.
void CheckBatch(const BatchView& batch);
// Positions [begin, end) of a sequence lie in blocks that are there.
void CheckBlocks(const BatchView& batch, int seq, int begin, int end, int block_seq_len);

}  // namespace turbomind
