#pragma once

// ⑦ Merges the partial results of attention over latents into its output. A warp owns a row (a head
// of a token). Bound: latency.

#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/kv/hadamard.cuh"
#include "turbomind/backend/cuda/latent/latent_shape.cuh"

namespace turbomind::cuda {

// REQUIRES: rank is a multiple of 4, at most kMaxLatentDim; all arrays are 16-byte aligned.
struct LatentCombineParams {
  const float* partial_o = nullptr;   // as in LatentParams
  const float* partial_ml = nullptr;  // same
  // Token t has the partial results [first_partial[t], first_partial[t + 1]) * num_parts; null:
  // [t, t + 1) * num_parts.
  const int32_t* first_partial = nullptr;
  int num_parts = 1;
  float* out = nullptr;  // [num_tokens, q_heads, rank]
  int64_t out_stride = 0;
  int num_tokens = 0;
  int q_heads = 0;
  int rank = 0;
  bool rotate = false;  // the sums, back
};

inline constexpr int kLatentCombineWarps = 4;

// Grid: ⌈num_tokens · q_heads / kLatentCombineWarps⌉.
template <int kVectors>
__global__ void __launch_bounds__(32 * kLatentCombineWarps)
    LatentCombineKernel(LatentCombineParams p) {
  BeginKernel();
  const int lane = ThreadIndexX() & 31;
  const int64_t row =
      static_cast<int64_t>(BlockIndexX()) * kLatentCombineWarps + (ThreadIndexX() >> 5);
  if (row >= int64_t{p.num_tokens} * p.q_heads) {
    return;
  }
  const int64_t token = row / p.q_heads;
  const int64_t head = row % p.q_heads;
  const auto first_of = [&](int64_t t) -> int64_t {
    return (p.first_partial != nullptr ? LoadGlobal(p.first_partial + t) : t) * p.num_parts;
  };
  const int64_t begin = first_of(token);
  const int64_t end = first_of(token + 1);
  const auto ml_of = [&](int64_t partial) {
    return LoadGlobal(
        reinterpret_cast<const Words<8>*>(p.partial_ml + 2 * (partial * p.q_heads + head)));
  };
  float max = kMinRowMax;
  for (int64_t i = begin + lane; i < end; i += 32) {
    max = fmaxf(max, BitsFloat(ml_of(i).v[0]));
  }
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    max = fmaxf(max, ShuffleXor(max, mask));
  }
  float l = 0.f;
  float o[kVectors][4] = {};
#pragma unroll 2
  for (int64_t i = begin; i < end; ++i) {
    const auto ml = ml_of(i);
    const float weight = Exp2Approx(BitsFloat(ml.v[0]) - max);
    l += weight * BitsFloat(ml.v[1]);
    const float* from = p.partial_o + (i * p.q_heads + head) * p.rank + 4 * lane;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if (128 * v + 4 * lane < p.rank) {
        const auto part = LoadGlobal(reinterpret_cast<const Words<16>*>(from + 128 * v));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          o[v][j] += weight * BitsFloat(part.v[j]);
        }
      }
    }
  }
  const float factor = l > 0.f ? 1.f / l : 0.f;
#pragma unroll
  for (int i = 0; i < kVectors * 4; ++i) {
    o[i / 4][i % 4] *= factor;
  }
  if (p.rotate) {
    RotateRow(o, lane, RotationSize(p.rank));
  }
  float* const out = p.out + token * p.out_stride + head * p.rank + 4 * lane;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (128 * v + 4 * lane < p.rank) {
      StoreGlobal(reinterpret_cast<Words<16>*>(out + 128 * v),
                  Words<16>{{FloatBits(o[v][0]), FloatBits(o[v][1]), FloatBits(o[v][2]),
                             FloatBits(o[v][3])}});
    }
  }
}

}  // namespace turbomind::cuda
