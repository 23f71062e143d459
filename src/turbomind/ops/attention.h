#pragma once

// ⑦ Attention of a step's tokens over the cache.

#include "turbomind/ops/device.h"

namespace turbomind {

// Sequences [num_decode, num_seqs) of the batch: any number of new tokens.
void invokePrefillAttention(Device& device, const AttentionParams& params);
// Sequences [0, num_decode): one new token each.
void dispatchDecoding(Device& device, const AttentionParams& params);
// Both check the shapes and that every visible position has a block, then call the device. A query
// gets the same bits from both. Throw InternalError.

}  // namespace turbomind
