#pragma once

// ⑦ Prefill attention: flattens the cache of each sequence to 16 bits (kv_ops.h), then runs one
// kernel over the dense rows (prefill_launch.h).

#include <cstdint>

#include "turbomind/backend/cuda/prefill/prefill_choice.h"
#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

inline constexpr int64_t kPrefillScratchBytes = int64_t{256} << 20;

// Consecutive sequences of a batch.
struct SequenceRange {
  int begin = 0;
  int end = 0;
};

// Attention of these sequences, for prefill or decode. `params` holds GPU addresses. `host` is the
// same batch; its cu_seqlens and context_lens are read on the host.
//
// Operands are BF16 for a BF16 cache that is not quantized, otherwise FP16. With FP16, queries and
// stored BF16 values are rounded to FP16, at most 65504 in magnitude. If a long context has few
// queries, its positions are split to fill the GPU. They are not split if context.deterministic is
// set, and products of warp groups are not used. A row of the output then has the same bits for
// every chunking of its sequence and every batch.
//
// A NaN in a value row also reaches the queries up to kKeys positions before it in its chunk, and
// with products of warp groups also those that share a block of rows with them.
//
// Flattened rows use at most `scratch_bytes` of the workspace, within a few KiB, because sequences
// and KV heads are processed in groups. They use more only if one KV head of one sequence needs
// more. The partial results of split positions are additional.
//
// REQUIRES: a cache dtype of 16 bits; head_dim 64, 80, 96, 128, 256; q,
// out and q_stride are multiples of 16 bytes.
void RunPrefillSequences(const Context& context, const PrefillChoices& choices,
                         const AttentionParams& params, const BatchView& host,
                         const SequenceRange& sequences, int64_t scratch_bytes);

}  // namespace turbomind::cuda
