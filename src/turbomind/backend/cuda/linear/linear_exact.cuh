#pragma once

// ⑥ y = x · wᵀ in FP32 throughout, for FP32 weights (routers, and `exact` in tests).
//
// A block owns kExactOutputs outputs of kExactRows rows. Its warps take turns with runs of 128
// columns. A lane's products are added in the order of the columns, then over lanes, then over
// warps.

#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/linear/linear_shape.cuh"

namespace turbomind::cuda {

inline constexpr int kExactOutputs = 8;
inline constexpr int kExactRows = 4;
inline constexpr int kExactWarps = 8;
inline constexpr int kExactSharedBytes = kExactWarps * kExactOutputs * kExactRows * 4;

// Grid: slots of kExactRows rows × blocks of kExactOutputs outputs.
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps) ExactLinearKernel(LinearKernelParams params) {
  LinearBlock block;
  if (!FindBlock(params, BlockIndexX(), kExactRows, kExactOutputs, &block)) {
    return;
  }
  const int lane = ThreadIndexX() & 31;
  const int warp = ThreadIndexX() >> 5;
  const int64_t row_bytes = RowBytes(MatrixFormat::kF32, params.cols);
  const char* weights = block.weight + block.first_output * row_bytes;
  const float* rows[kExactRows];
#pragma unroll
  for (int r = 0; r < kExactRows; ++r) {
    rows[r] = RowOfX(params, block, r);
  }
  float sums[kExactOutputs][kExactRows] = {};
  for (int col = 4 * ThreadIndexX(); col < params.cols; col += 128 * kWarps) {
    Words<16> w[kExactOutputs];
    Words<16> x[kExactRows];
#pragma unroll
    for (int o = 0; o < kExactOutputs; ++o) {
      const char* at = weights + o * row_bytes + static_cast<int64_t>(col) * 4;
      w[o] = LoadGlobal(reinterpret_cast<const Words<16>*>(at));
    }
#pragma unroll
    for (int r = 0; r < kExactRows; ++r) {
      x[r] = LoadGlobal(reinterpret_cast<const Words<16>*>(rows[r] + col));
    }
#pragma unroll
    for (int o = 0; o < kExactOutputs; ++o) {
#pragma unroll
      for (int r = 0; r < kExactRows; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[o][r] = fmaf(BitsFloat(w[o].v[i]), BitsFloat(x[r].v[i]), sums[o][r]);
        }
      }
    }
  }
  constexpr int kSums = kExactOutputs * kExactRows;
  float* shared = reinterpret_cast<float*>(SharedMemory());
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    float sum = sums[i / kExactRows][i % kExactRows];
    for (int mask = 16; mask > 0; mask /= 2) {
      sum += ShuffleXor(sum, mask);
    }
    if (lane == 0) {
      StoreShared(shared + warp * kSums + i, sum);
    }
  }
  SyncBlock();
  if (ThreadIndexX() < kSums) {
    const int i = ThreadIndexX();
    float sum = LoadShared<float>(shared + i);
    for (int w = 1; w < kWarps; ++w) {
      sum += LoadShared<float>(shared + w * kSums + i);
    }
    StoreOutput<false>(params, block, i % kExactRows, block.first_output + i / kExactRows, sum);
  }
}

}  // namespace turbomind::cuda
