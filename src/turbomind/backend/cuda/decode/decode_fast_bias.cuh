#pragma once

// ⑦ The part of the decode scores that comes from the fast part of K's bias (FastBias): waves over
// the positions times amplitudes, which decode_amplitudes.cuh computes once per step. It is a
// matrix product of 16 positions, 8 heads, and the cos and sin of four pairs at a time. TF32 keeps
// 11 bits of a factor, so each factor is a sum of two, and the product of the two remainders is
// left out. All heads and layers read the same waves, from the L2 cache.

#include <cstdint>

#include "turbomind/backend/cuda/decode/decode_shape.cuh"

namespace turbomind::cuda {

inline constexpr int kWavePairs = 4;  // per matrix product; lane t has pair t of them

// The upper bits of x, which TF32 can hold.
TM_DEVICE float UpperTf32(float x) { return BitsFloat(FloatBits(x) & 0xffffe000u); }

// Add the waves of the tile at a position to its raw scores. `unit` is the factor from q · k
// to a raw score.
template <class C>
TM_DEVICE void AddWaves(const DecodeTask<C>& task, int position, float unit,
                        float (&scores)[C::kHeadTiles][C::kSubTiles][4]) {
  const FastBias& bias = task.params.fast_bias;
  const int n = 2 * bias.num_pairs;
  const float* amplitudes =
      task.params.amplitudes +
      (task.item.sequence * static_cast<int64_t>(task.params.merge.q_heads) + task.first_head) * n;
  const int32_t* waves_of = bias.waves_of + task.kv_head * bias.num_pairs;
  const float* waves = bias.waves + position + task.at.g;
  int offsets[kMaxFastPairs / kWavePairs];  // loaded together, because every wave waits for one
#pragma unroll
  for (int i = 0; i < kMaxFastPairs / kWavePairs; ++i) {
    const int pair = i * kWavePairs + task.at.t;
    offsets[i] = LoadGlobal(waves_of + (pair < bias.num_pairs ? pair : 0));
  }
#pragma unroll
  for (int i = 0; i < kMaxFastPairs / kWavePairs; ++i) {
    if (i * kWavePairs >= bias.num_pairs) {
      break;
    }
    const int pair = i * kWavePairs + task.at.t;
    const float* cos = waves + 2 * offsets[i] * bias.num_positions;
    float upper[C::kSubTiles][4];
    float lower[C::kSubTiles][4];
#pragma unroll
    for (int j = 0; j < 4 * C::kSubTiles; ++j) {  // rows g and g + 8 of cos, then of sin
      const float x =
          LoadGlobal(cos + j / 4 * 16 + j % 2 * 8 + (j / 2 % 2 == 0 ? 0 : bias.num_positions));
      upper[j / 4][j % 4] = UpperTf32(x);
      lower[j / 4][j % 4] = x - upper[j / 4][j % 4];
    }
#pragma unroll
    for (int tile = 0; tile < C::kHeadTiles; ++tile) {
      const int head = tile * kHeadTile + task.at.g;
      const bool real = head < task.num_heads && pair < bias.num_pairs;
      const float* at = amplitudes + (real ? head * n + 2 * pair : 0);
      const float of_cos = real ? LoadGlobal(at) * unit : 0.f;
      const float of_sin = real ? LoadGlobal(at + 1) * unit : 0.f;
      const float cos_upper = UpperTf32(of_cos);
      const float sin_upper = UpperTf32(of_sin);
#pragma unroll
      for (int u = 0; u < C::kSubTiles; ++u) {
        MmaTf32(scores[tile][u], upper[u], cos_upper, sin_upper);
        MmaTf32(scores[tile][u], lower[u], cos_upper, sin_upper);
        MmaTf32(scores[tile][u], upper[u], of_cos - cos_upper, of_sin - sin_upper);
      }
    }
  }
}

}  // namespace turbomind::cuda
