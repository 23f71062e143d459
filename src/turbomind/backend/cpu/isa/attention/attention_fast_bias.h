#pragma once

// ⑦ The part of the scores that comes from the fast part of K's bias (FastBias): a sum of waves
// over the positions, whose amplitudes are products of the query and the bias.

#include <cstdint>

#include "turbomind/backend/cpu/isa/attention/attention_softmax.h"
#include "turbomind/backend/cpu/kv_kernels.h"

namespace turbomind::TM_ISA {

// Writes the amplitudes of some query rows, [rows, 2 * num_pairs], in units of log2.
inline void FillAmplitudes(const FastBias& bias, const KvHead& kv, const float* q, int rows,
                           float softmax_scale, float* amplitudes) {
  const int n = 2 * bias.num_pairs;
  const int head_dim = kv.layer->head_dim;
  const float* directions = bias.directions + static_cast<int64_t>(kv.head) * n * head_dim;
  const float factor = softmax_scale * kLog2E;
  for (int row = 0; row < rows; ++row) {
    for (int i = 0; i < n; ++i) {
      *amplitudes++ = factor * DotRow(q + static_cast<int64_t>(row) * head_dim,
                                      directions + i * head_dim, head_dim);
    }
  }
}

// Adds the waves to one row of sums of the tile at position `tile`. `scale` is the factor from sums
// to scores.
inline void AddWaves(const FastBias& bias, int head, int tile, const float* amplitudes, float scale,
                     float* sums) {
  const F32x16 inverse = Set1(scale != 0.f ? 1.f / scale : 0.f);
  const int32_t* waves_of = bias.waves_of + head * bias.num_pairs;
  for (int i = 0; i < kTileTokens; i += kLanes) {
    F32x16 sum = Zero();
    for (int pair = 0; pair < bias.num_pairs; ++pair) {
      const float* cos = bias.waves + 2 * waves_of[pair] * bias.num_positions + tile + i;
      sum = Fma(Load(cos), Set1(amplitudes[2 * pair]), sum);
      sum = Fma(Load(cos + bias.num_positions), Set1(amplitudes[2 * pair + 1]), sum);
    }
    Store(sums + i, Fma(sum, inverse, Load(sums + i)));
  }
}

}  // namespace turbomind::TM_ISA
