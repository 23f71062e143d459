#pragma once

// ⑦ Rotates rows of absorbed queries, or of sums of latents. A warp owns a row (a head of a token).
// Bound: latency, with few tokens.

#include <cstdint>

#include "turbomind/backend/cuda/kv/hadamard.cuh"

namespace turbomind::cuda {

// REQUIRES: rank is a multiple of 16, at most kMaxLatentDim; both arrays are 16-byte aligned.
struct RotateLatentsParams {
  const float* from = nullptr;  // [num_tokens, q_heads, rank]
  float* to = nullptr;          // same; may be `from`
  int64_t stride = 0;           // floats between tokens
  int64_t num_rows = 0;         // num_tokens * q_heads
  int q_heads = 0;
  int rank = 0;
};

inline constexpr int kRotateWarps = 4;

// Grid: ⌈num_rows / kRotateWarps⌉.
template <int kVectors>
__global__ void __launch_bounds__(32 * kRotateWarps) RotateLatentsKernel(RotateLatentsParams p) {
  BeginKernel();
  const int lane = ThreadIndexX() & 31;
  const int64_t row = static_cast<int64_t>(BlockIndexX()) * kRotateWarps + (ThreadIndexX() >> 5);
  if (row >= p.num_rows) {
    return;
  }
  const int64_t at = row / p.q_heads * p.stride + row % p.q_heads * p.rank + 4 * lane;
  float x[kVectors][4] = {};
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (128 * v + 4 * lane < p.rank) {
      const auto words = LoadGlobal(reinterpret_cast<const Words<16>*>(p.from + at + 128 * v));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[v][j] = BitsFloat(words.v[j]);
      }
    }
  }
  RotateRow(x, lane, RotationSize(p.rank));
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (128 * v + 4 * lane < p.rank) {
      StoreGlobal(reinterpret_cast<Words<16>*>(p.to + at + 128 * v),
                  Words<16>{{FloatBits(x[v][0]), FloatBits(x[v][1]), FloatBits(x[v][2]),
                             FloatBits(x[v][3])}});
    }
  }
}

}  // namespace turbomind::cuda
