#pragma once

// ⑦ Merges the partial results of prefill attention over splits into its output. A warp owns a row.

#include "turbomind/backend/cuda/prefill/prefill_attention.cuh"

namespace turbomind::cuda {

inline constexpr int kPrefillCombineWarps = 4;

// Grid: num_rows / kPrefillCombineWarps, rounded up.
template <int D>
__global__ void __launch_bounds__(32 * kPrefillCombineWarps) PrefillCombineKernel(PrefillParams p) {
  BeginKernel();
  static_assert(kMaxPrefillSplits <= 32);
  const int lane = ThreadIndexX() & 31;
  const int64_t row =
      static_cast<int64_t>(BlockIndexX()) * kPrefillCombineWarps + (ThreadIndexX() >> 5);
  if (row >= p.num_rows) {
    return;
  }
  float m = kMinRowMax;
  float l = 0.f;
  if (lane < p.num_splits) {  // each lane has one split
    const float* ml = p.partial_ml + 2 * (lane * p.num_rows + row);
    m = LoadGlobal(ml);
    l = LoadGlobal(ml + 1);
  }
  float max_score = m;
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    max_score = fmaxf(max_score, ShuffleXor(max_score, mask));
  }
  const float weight = Exp2Approx(m - max_score);
  l *= weight;
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    l += ShuffleXor(l, mask);
  }
  const int heads = p.num_heads * p.group;
  const int64_t token = p.sequences[0].first_token + row / heads;
  const int q_head = p.first_head * p.group + static_cast<int>(row % heads);
  const float factor = FinalScale(SinkLogit(p, token, q_head), max_score, l);
  float* const out = p.out + (token * p.q_heads + q_head) * D;
#pragma unroll
  for (int first = 0; first < D; first += 128) {
    const int dim = first + 4 * lane;
    float sum[4] = {};
    for (int split = 0; split < p.num_splits; ++split) {
      const float scale = ShuffleTo(weight, split);
      if (dim < D) {
        const float* from = p.partial_o + (split * p.num_rows + row) * D + dim;
        const auto o = LoadGlobal(reinterpret_cast<const Words<16>*>(from));
        for (int i = 0; i < 4; ++i) {
          sum[i] += scale * BitsFloat(o.v[i]);
        }
      }
    }
    if (dim < D) {
      Words<16> packed;
      for (int i = 0; i < 4; ++i) {
        packed.v[i] = FloatBits(sum[i] * factor);
      }
      StoreGlobal(reinterpret_cast<Words<16>*>(out + dim), packed);
    }
  }
}

}  // namespace turbomind::cuda
