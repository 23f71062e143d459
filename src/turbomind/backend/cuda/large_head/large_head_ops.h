#pragma once

// ⑦ Attention with heads of more than 256 values on a GPU (attention_ops.h).

#include "turbomind/backend/cuda/decode/decode_ops.h"
#include "turbomind/backend/cuda/prefill/prefill_ops.h"
#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

inline constexpr int kLargestSmallHead = 256;

// Return whether these kernels run a layer. Its head_dim is a multiple of 16, at most kMaxHeadDim.
inline bool HasLargeHeads(const KvLayerView& kv) {
  return kv.head_dim > kLargestSmallHead && !kv.HasLatents();
}

// Throws InvalidArgument for a layer with large heads that the kernels do not support.
void RequireLargeHeadKernels(const KvLayerView& layer, const GpuProperties& gpu);

// Both support every format, dtype, group of query heads, window, cap, sink, K offset and fast
// bias. Addresses are on the GPU, except those of `host`, the same batch on the host. q and out are
// 16-byte aligned.
//
// Operands are BF16 for a BF16 cache that is not quantized, otherwise FP16. A row of the output
// depends on its own query, the positions that it sees, and how they are cut.

// Attention of the sequences with one token, in a plan's items. The launches do not depend on
// positions, so that they can be recorded: one for each pool with items, and one that merges,
// unless the block that ends last does that (DecodeSchedule).
void RunLargeHeadItems(const Context& context, const DecodePlanner::Plan& plan,
                       const AttentionParams& params);

// Return how many tiles of kHeadTile query heads an SM decodes at once, for the tuner.
int LargeHeadResidentTiles(const Context& context, const KvLayerView& kv, int group);

// Attention of these sequences. The positions of long contexts with few queries are cut to fill the
// GPU. They are not cut if context.deterministic is set, and one kernel runs all batches. A row
// then has the same bits for every chunking of its sequence and every batch.
void RunLargeHeadSequences(const Context& context, const AttentionParams& params,
                           const BatchView& host, const SequenceRange& sequences);

}  // namespace turbomind::cuda
