#pragma once

// ⑦ The amplitudes of the fast bias (FastBias) in decode: q · u and q · w of every query, pair and
// head. Bound: latency.

#include <cstdint>

#include "turbomind/backend/cuda/decode/decode_shape.cuh"

namespace turbomind::cuda {

struct AmplitudeParams {
  const float* q = nullptr;  // as in DecodeParams
  int64_t q_stride = 0;
  int num_rows = 0;  // num_seqs * q_heads
  int q_heads = 0;
  int group = 0;
  int head_dim = 0;
  FastBias fast_bias;
  float* amplitudes = nullptr;  // [num_seqs, q_heads, 2 * num_pairs]
};

inline constexpr int kAmplitudeWarps = 4;  // one row each

// Grid: rows / kAmplitudeWarps.
__global__ void __launch_bounds__(32 * kAmplitudeWarps) AmplitudesKernel(AmplitudeParams p) {
  BeginKernel();
  const int row = BlockIndexX() * kAmplitudeWarps + WarpIndex();
  if (row >= p.num_rows) {
    return;
  }
  const int lane = ThreadIndexX() & 31;
  const int head = row % p.q_heads;
  const int n = 2 * p.fast_bias.num_pairs;
  const float* q = p.q + row / p.q_heads * p.q_stride + static_cast<int64_t>(head) * p.head_dim;
  const float* direction =
      p.fast_bias.directions + static_cast<int64_t>(head / p.group) * n * p.head_dim;
  for (int i = 0; i < n; ++i, direction += p.head_dim) {
    float sum = 0.f;
    for (int d = lane; d < p.head_dim; d += 32) {
      sum += LoadGlobal(q + d) * LoadGlobal(direction + d);
    }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) {
      sum += ShuffleXor(sum, mask);
    }
    if (lane == 0) {
      StoreGlobal(p.amplitudes + static_cast<int64_t>(row) * n + i, sum);
    }
  }
}

}  // namespace turbomind::cuda
