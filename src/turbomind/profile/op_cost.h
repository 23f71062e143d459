#pragma once

// What an op must move and compute at least, from its parameters alone: what a profile divides by
// time. Of what they point to it reads cu_seqlens and context_lens alone.

#include <cstddef>
#include <cstdint>

#include "turbomind/ops/params.h"

namespace turbomind {

// Bytes are counted once per op and use, wherever they lie: a cache may serve them.
struct OpCost {
  int64_t weight_bytes = 0;      // matrices, as PackedMatrix::num_bytes counts them
  int64_t kv_bytes = 0;          // cache: payload, (scale, zero) and scale bytes
  int64_t activation_bytes = 0;  // everything else, biases and norm weights too
  int64_t operations = 0;        // multiply-adds of matrix products and of attention, times 2

  void Add(const OpCost& other);
};

OpCost CostOf(const EmbedParams& params);
OpCost CostOf(const RmsNormParams& params);
OpCost CostOf(const LinearParams& params);
OpCost CostOf(const GatedActivationParams& params);
// `offsets`: those of the params, readable here.
OpCost CostOf(const GroupedLinearParams& params, const int32_t* offsets);
OpCost CostOf(const RouteExpertsParams& params);
OpCost CostOf(const CombineExpertsParams& params);
OpCost CostOf(const ProcessKVParams& params);
OpCost CostOf(const QuantiseBlocksParams& params);
OpCost CostOf(const FlattenKVParams& params);
// Of the sequences [num_decode, num_seqs) and [0, num_decode). A position that some query of a
// sequence sees is counted once for the sequence, in the pool or pools where it is seen.
OpCost PrefillCost(const AttentionParams& params);
OpCost DecodeCost(const AttentionParams& params);
OpCost CopyCost(size_t num_bytes);

}  // namespace turbomind
