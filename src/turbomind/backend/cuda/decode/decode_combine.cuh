#pragma once

// ⑦ Merges the partial results of decode attention (decode_attention.cuh) in a launch of its own.
//
// A warp owns every warps_per_row-th partial of one row, with four of them in flight at once. The
// warps of a row are merged in shared memory. Bound: latency.

#include <cstdint>

#include "turbomind/backend/cuda/decode/decode_combine.h"

namespace turbomind::cuda {

inline constexpr int kCombineWarps = 8;
inline constexpr int kCombineAhead = 4;

constexpr int CombineSharedBytes(int vectors) { return kCombineWarps * 32 * (16 * vectors + 8); }

// Grid: ⌈num_rows · warps_per_row / kCombineWarps⌉; kCombineWarps warps; CombineSharedBytes.
template <int kVectors>
__global__ void __launch_bounds__(32 * kCombineWarps) CombineKernel(CombineParams p) {
  BeginKernel();
  const int lane = ThreadIndexX() & 31;
  const int warp = ThreadIndexX() >> 5;
  const int part = warp % p.warps_per_row;
  const int index = (BlockIndexX() * kCombineWarps + warp) / p.warps_per_row;
  const bool is_row = index < p.num_rows;
  const MergeRow row = {index / p.merge.q_heads, index % p.merge.q_heads};
  MergedRow<kVectors> sum;
  if (is_row) {
    sum = AddPartials<kVectors, kCombineAhead>(p.merge, row, {part, p.warps_per_row}, lane);
  }
  if (p.warps_per_row > 1) {
    // Layout: each lane's words for each warp, with the words of one warp contiguous.
    char* const memory = SharedMemory();
    char* const ml = memory + kCombineWarps * 32 * 16 * kVectors;
    const auto at = [&](int of, int v) { return memory + ((of * kVectors + v) * 32 + lane) * 16; };
    const auto ml_at = [&](int of) { return ml + (of * 32 + lane) * 8; };
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      StoreShared(at(warp, v), sum.o[v]);
    }
    StoreShared(ml_at(warp), Words<8>{{FloatBits(sum.m), FloatBits(sum.l)}});
    SyncBlock();
    for (int other = 1; part == 0 && other < p.warps_per_row; ++other) {
      MergedRow<kVectors> next;
      const auto words = LoadShared<Words<8>>(ml_at(warp + other));
      next.m = BitsFloat(words.v[0]);
      next.l = BitsFloat(words.v[1]);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        next.o[v] = LoadShared<Floats4>(at(warp + other, v));
      }
      sum.RaiseTo(fmaxf(sum.m, next.m));
      sum.Add(next);
    }
  }
  if (is_row && part == 0) {
    FinishRow<kVectors>(p.merge, row, lane, sum);
  }
}

}  // namespace turbomind::cuda
