#pragma once

// ⑦ Launches the kernel that merges the partial results of attention (decode_combine.cuh).

#include "turbomind/backend/cuda/decode/decode_merge.cuh"
#include "turbomind/backend/cuda/runtime/context.h"

namespace turbomind::cuda {

struct CombineParams {
  MergeParams merge;
  int num_rows = 0;       // num_seqs * q_heads
  int warps_per_row = 1;  // 1, 2, 4 or 8: the order of sums depends on it
};

void LaunchCombine(const Context& context, const CombineParams& params);

}  // namespace turbomind::cuda
