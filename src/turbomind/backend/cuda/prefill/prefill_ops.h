#pragma once

// ⑦ Prefill attention: the cache of each sequence flattened to 16 bits (kv_ops.h), then one kernel
// over dense rows (prefill_attention.cuh).

#include <cstdint>

#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

inline constexpr int64_t kPrefillScratchBytes = int64_t{256} << 20;

// Sequences of a batch, one after the other.
struct SequenceRange {
  int begin = 0;
  int end = 0;
};

// Attention of these sequences, whether they read prompts or decode. `params` holds GPU addresses;
// `host` is the same batch of which cu_seqlens and context_lens are read on the host.
//
// Operands are BF16 for a BF16 cache that is not quantized, else FP16: then queries and what is
// stored in BF16 are rounded to FP16, at most 65504 in size. Few queries of a long context are
// spread over the GPU by splitting the positions; not where context.deterministic is set: then a
// row of the output has the same bits however its sequence is cut into chunks and whatever else is
// in the batch.
//
// A value row with a NaN reaches the queries up to kKeys positions before it in its chunk.
//
// At most `scratch_bytes` of the workspace, a few KiB apart, hold flattened rows, by running
// sequences and KV heads one after the other; more where one KV head of one sequence needs more.
// The partial results of split positions come on top.
//
// REQUIRES: a cache dtype of 16 bits; head_dim 64, 80, 96, 128 or 256; q, out and q_stride in
// multiples of 16 bytes.
void CudaPrefillAttention(const Context& context, const AttentionParams& params,
                          const BatchView& host, const SequenceRange& sequences,
                          int64_t scratch_bytes = kPrefillScratchBytes);

}  // namespace turbomind::cuda
