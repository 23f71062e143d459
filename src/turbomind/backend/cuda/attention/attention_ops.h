#pragma once

// ⑦ Attention of a batch on a GPU: layers with large heads have kernels of their own
// (large_head_ops.h), all others those of decode_ops.h and prefill_ops.h.

#include <cstdint>

#include "turbomind/backend/cuda/decode/decode_ops.h"
#include "turbomind/backend/cuda/prefill/prefill_ops.h"
#include "turbomind/backend/cuda/runtime/context.h"
#include "turbomind/ops/params.h"

namespace turbomind::cuda {

// Attention of sequences [0, num_decode) of the batch, each with one token, as `planner` cuts them:
// Device::DecodeAttention.
void CudaDecodeAttention(const Context& context, const DecodePlanner& planner,
                         const AttentionParams& params);

// Attention of these sequences, for prefill or decode. `host` is the batch of `params` on the host.
void CudaPrefillAttention(const Context& context, const PrefillChoices& choices,
                          const AttentionParams& params, const BatchView& host,
                          const SequenceRange& sequences,
                          int64_t scratch_bytes = kPrefillScratchBytes);

}  // namespace turbomind::cuda
