#pragma once

// ⑥ y = x · wᵀ in FP32 throughout, for FP32 weights (routers, and `exact` in tests).
//
// A block owns kExactOutputs outputs of kExactRows rows. Its warps take turns with runs of 128
// columns. A lane's products are added in the order of the columns, then over lanes, then over
// warps. So are the squares of a fused norm.

#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/linear/linear_shape.cuh"

namespace turbomind::cuda {

inline constexpr int kExactOutputs = 8;
inline constexpr int kExactRows = 4;
inline constexpr int kExactWarps = 8;
inline constexpr int kExactSums = (kExactOutputs + 1) * kExactRows;  // of a warp, with squares
inline constexpr int kExactSharedBytes = kExactWarps * kExactSums * 4;

struct ExactParams {
  LinearKernelParams linear;
  FusedNorm norm = {};  // with kNormed
};

// Grid: slots of kExactRows rows × blocks of kExactOutputs outputs.
template <int kWarps, bool kNormed>
__global__ void __launch_bounds__(32 * kWarps) ExactLinearKernel(ExactParams all) {
  BeginKernel();
  const LinearKernelParams& params = all.linear;
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
  constexpr int kOutputs = kExactOutputs + (kNormed ? 1 : 0);  // the last one is the squares
  float sums[kOutputs][kExactRows] = {};
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
    if constexpr (kNormed) {
      const auto weight = LoadFloats<4>(all.norm.weight + col);
#pragma unroll
      for (int r = 0; r < kExactRows; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float value = BitsFloat(x[r].v[i]);
          sums[kExactOutputs][r] = fmaf(value, value, sums[kExactOutputs][r]);
          x[r].v[i] = FloatBits(value * weight.v[i]);
        }
      }
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
  constexpr int kSums = kOutputs * kExactRows;
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
  const auto add = [&](int i) {
    float sum = LoadShared<float>(shared + i);
    for (int w = 1; w < kWarps; ++w) {
      sum += LoadShared<float>(shared + w * kSums + i);
    }
    return sum;
  };
  const auto scale_of = [&](int row) {
    const float squares = add(kExactOutputs * kExactRows + row);
    return 1.f / sqrtf(squares / static_cast<float>(params.cols) + all.norm.eps);
  };
  if (ThreadIndexX() < kExactOutputs * kExactRows) {
    const int row = ThreadIndexX() % kExactRows;
    float sum = add(ThreadIndexX());
    if constexpr (kNormed) {
      sum *= scale_of(row);
    }
    StoreOutput<false>(params, block, row, block.first_output + ThreadIndexX() / kExactRows, sum);
  }
  if constexpr (kNormed) {
    if (all.norm.out != nullptr && BlockIndexY() == 0) {
      StoreNormed(params, block, all.norm, 32 * kWarps, scale_of);
    }
  }
}

}  // namespace turbomind::cuda
