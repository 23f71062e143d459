#pragma once

// ⑦ Attention of a step's tokens over the cache.

#include "turbomind/ops/device.h"

namespace turbomind {

// Computes sequences [num_decode, num_seqs) of the batch, with any number of new tokens.
void invokePrefillAttention(Device& device, const AttentionParams& params);
// Computes sequences [0, num_decode), with one new token each.
void dispatchDecoding(Device& device, const AttentionParams& params);
// Both functions check the shapes and that every visible position has a block, then call the
// device. A query gets the same bits from both. They throw InternalError.

}  // namespace turbomind
