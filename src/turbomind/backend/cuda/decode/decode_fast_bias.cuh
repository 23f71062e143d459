#pragma once

// ⑦ The part of the decode scores that comes from the fast part of K's bias (FastBias): waves over
// the positions. Amplitudes (decode_amplitudes.cuh) are computed once per step. Every score then
// takes two products per pair. All heads and layers read the same waves, from the L2 cache.

#include <cstdint>

#include "turbomind/backend/cuda/decode/decode_shape.cuh"

namespace turbomind::cuda {

// Add the waves of the tile at a position to its raw scores. `unit` is the factor from q · k
// to a raw score.
template <class C>
TM_DEVICE void AddWaves(const DecodeTask<C>& task, int position, float unit,
                        float (&scores)[C::kHeadTiles][C::kSubTiles][4]) {
  const FastBias& bias = task.params.fast_bias;
  const int n = 2 * bias.num_pairs;
  const float* amplitudes =
      task.params.amplitudes +
      (task.item.sequence * static_cast<int64_t>(task.params.q_heads) + task.first_head) * n;
#pragma unroll 1
  for (int pair = 0; pair < bias.num_pairs; ++pair) {
    const int wave = LoadGlobal(bias.waves_of + task.kv_head * bias.num_pairs + pair);
    const float* cos = bias.waves + 2 * wave * bias.num_positions + position + task.at.g;
    float of_cos[C::kHeadTiles][2];
    float of_sin[C::kHeadTiles][2];
#pragma unroll
    for (int i = 0; i < 2 * C::kHeadTiles; ++i) {
      const int head = i / 2 * kHeadTile + 2 * task.at.t + i % 2;
      const bool real = head < task.num_heads;
      const float* at = amplitudes + (real ? head : 0) * n + 2 * pair;
      of_cos[i / 2][i % 2] = real ? LoadGlobal(at) * unit : 0.f;
      of_sin[i / 2][i % 2] = real ? LoadGlobal(at + 1) * unit : 0.f;
    }
#pragma unroll
    for (int row = 0; row < 2 * C::kSubTiles; ++row) {
      const float c = LoadGlobal(cos + 8 * row);
      const float s = LoadGlobal(cos + bias.num_positions + 8 * row);
#pragma unroll
      for (int i = 0; i < 2 * C::kHeadTiles; ++i) {
        float& score = scores[i / 2][row / 2][row % 2 * 2 + i % 2];
        score += c * of_cos[i / 2][i % 2] + s * of_sin[i / 2][i % 2];
      }
    }
  }
}

}  // namespace turbomind::cuda
