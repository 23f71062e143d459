#pragma once

// The minimum number of bytes that an op must move, computed from its parameters. The functions
// read only cu_seqlens and context_lens of the arrays that the parameters point to.

#include <cstddef>
#include <cstdint>

#include "turbomind/ops/params.h"
#include "turbomind/ops/recurrent_params.h"

namespace turbomind {

// Bytes are counted once per op and use, whether they lie in a cache or in memory.
struct OpCost {
  int64_t weight_bytes = 0;      // matrices, as PackedMatrix::num_bytes counts them
  int64_t kv_bytes = 0;          // KV cache: payload, (scale, zero) and scale bytes; states
  int64_t activation_bytes = 0;  // everything else, including biases and norm weights

  void Add(const OpCost& other);
};

OpCost CostOf(const EmbedParams& params);
OpCost CostOf(const NormParams& params);
OpCost CostOf(const AddParams& params);
OpCost CostOf(const SoftCapParams& params);
OpCost CostOf(const LinearParams& params);
OpCost CostOf(const GatedActivationParams& params);
// `offsets` are the offsets of the parameters in host memory.
OpCost CostOf(const GroupedLinearParams& params, const int32_t* offsets);
OpCost CostOf(const RouteExpertsParams& params);
OpCost CostOf(const CombineExpertsParams& params);
OpCost CostOf(const WriteKvParams& params);
OpCost CostOf(const QuantizeBlocksParams& params);
OpCost CostOf(const FlattenKVParams& params);
// The cost of the sequences [num_decode, num_seqs) and [0, num_decode). A position that some query
// of a sequence sees counts once for the sequence, in each pool in which it is seen.
OpCost PrefillCost(const AttentionParams& params);
OpCost DecodeCost(const AttentionParams& params);
// A state is read unless the step begins its sequence. It is written once, and once for each save.
OpCost CostOf(const ShortConvolutionParams& params);
OpCost CostOf(const GatedDeltaParams& params);
OpCost CostOf(const SelectiveScanParams& params);
OpCost CostOf(const GatedNormParams& params);
OpCost CostOf(const SigmoidGateParams& params);
OpCost CopyCost(size_t num_bytes);

}  // namespace turbomind
