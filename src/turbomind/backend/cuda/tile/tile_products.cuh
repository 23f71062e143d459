#pragma once

// ⑦ Products of a block's rows with a tile in 16 bits, and the softmax between them.
//   scores  each warp multiplies its rows with all tokens, over its part of the dimensions
//   weights the parts are added and become weights: a few threads have a row, and its m and l
//   sums    each warp multiplies the weights with its columns of the values
// Between the steps, the block waits for all warps.
//
// A row's sums depend only on its own query and the positions that it sees, as in prefill_rows.cuh:
// tiles begin at multiples of kTokens, and hidden positions have weight 0.

#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/kv/fragments.cuh"
#include "turbomind/backend/cuda/prefill/prefill_shape.cuh"
#include "turbomind/backend/cuda/tile/tile_shape.cuh"

namespace turbomind::cuda {

// A thread's warp in the block.
struct TileLane {
  int lane;
  int warp;
  int group;   // of rows
  int column;  // among the warps of a group
  int g;       // rows g and g + 8 of a tile
  int t;       // columns 2 t and 2 t + 1 of eight
};

// Return the place of a thread.
template <class C>
TM_DEVICE TileLane LaneOfTile() {
  const int lane = ThreadIndexX() & 31;
  const int warp = WarpIndex();
  return {lane, warp, warp / C::kColumnWarps, warp % C::kColumnWarps, lane >> 2, lane & 3};
}

template <class C>
using TileScores = float[C::kRowTiles][C::kTokens / 8][4];

// scores += queries · tile over 16 dimensions from column 16 * step on.
template <class C>
TM_DEVICE void AddScores(const TileLane& at, int step, TileScores<C>& scores) {
  const char* from = SharedMemory() + (16 * C::kRowTiles * at.group + (at.lane & 15)) * C::kStride +
                     32 * step + (at.lane >> 4) * 16;
  uint32_t a[C::kRowTiles][4];
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
    LoadMatrices(a[tile], from + tile * 16 * C::kStride);
  }
  // The four matrices have 8 tokens and 8 dimensions, the next 8 dimensions, and the same for the
  // next 8 tokens.
  const char* tokens = SharedMemory() + C::kTileAt +
                       ((at.lane & 7) + (at.lane >> 4) * 8) * C::kStride + 32 * step +
                       (at.lane >> 3 & 1) * 16;
#pragma unroll
  for (int n = 0; n < C::kTokens / 8; n += 2) {
    uint32_t b[4];
    LoadMatrices(b, tokens + n * 8 * C::kStride);
#pragma unroll
    for (int tile = 0; tile < C::kRowTiles; ++tile) {
      Multiply<C::kBFloat>(scores[tile][n], a[tile], b[0], b[1]);
      Multiply<C::kBFloat>(scores[tile][n + 1], a[tile], b[2], b[3]);
    }
  }
}

// Store the warp's part of the scores. sum_of(tile, n, i) returns a part.
template <class C, class F>
TM_DEVICE void StoreScores(const TileLane& at, const F& sum_of) {
  char* const to = SharedMemory() + C::kSumsAt +
                   (at.column * C::kRows + 16 * C::kRowTiles * at.group + at.g) * C::kSumStride +
                   8 * at.t;
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int n = 0; n < C::kTokens / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        StoreShared(to + (16 * tile + 8 * half) * C::kSumStride + 32 * n,
                    Words<8>{{FloatBits(sum_of(tile, n, 2 * half)),
                              FloatBits(sum_of(tile, n, 2 * half + 1))}});
      }
    }
  }
}

// A row's softmax, which its threads share: m is the same in all of them, and l is over the
// thread's own tokens.
struct TileSoftmax {
  float m = kMinRowMax;
  float l = 0.f;
};

// Maximum or sum over the threads of a row.
template <class C>
TM_DEVICE float MaxOfRow(float x) {
#pragma unroll
  for (int mask = 1; mask < C::kRowThreads; mask *= 2) {
    x = fmaxf(x, ShuffleXor(x, mask));
  }
  return x;
}
template <class C>
TM_DEVICE float SumOfRow(float x) {
#pragma unroll
  for (int mask = 1; mask < C::kRowThreads; mask *= 2) {
    x += ShuffleXor(x, mask);
  }
  return x;
}

// Replace a row's sums by weights 2^(score - m) in 16 bits, and store the factor by which m changes
// earlier sums. `seen` are the tokens of the tile that the row sees. score_of(sum) returns a score
// in units of log2.
template <class C, class F>
TM_DEVICE void StoreWeights(const SeenPositions& seen, const F& score_of, TileSoftmax* state) {
  const int row = ThreadIndexX() / C::kRowThreads;
  const int first = ThreadIndexX() % C::kRowThreads * C::kThreadScores;
  char* const sums = SharedMemory() + C::kSumsAt + row * C::kSumStride;
  float x[C::kThreadScores] = {};
#pragma unroll
  for (int warp = 0; warp < C::kColumnWarps; ++warp) {
    constexpr int kRun = C::kThreadScores < 4 ? C::kThreadScores : 4;
#pragma unroll
    for (int i = 0; i < C::kThreadScores; i += kRun) {
      const auto part =
          LoadShared<Words<4 * kRun>>(sums + warp * C::kRows * C::kSumStride + 4 * (first + i));
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        x[i + j] += BitsFloat(part.v[j]);
      }
    }
  }
  float max_score = -INFINITY;
#pragma unroll
  for (int i = 0; i < C::kThreadScores; ++i) {
    const bool visible = first + i >= seen.begin && first + i < seen.end;
    x[i] = visible ? score_of(x[i]) : -INFINITY;
    max_score = fmaxf(max_score, x[i]);
  }
  max_score = MaxOfRow<C>(max_score);
  SyncWarp();  // all threads of the row have read the sums
  float factor = 1.f;
  if (max_score > state->m + kLazyMax) {
    factor = Exp2Approx(state->m - max_score);
    state->m = max_score;
    state->l *= factor;
  }
#pragma unroll
  for (int i = 0; i < C::kThreadScores; ++i) {
    x[i] = Exp2Approx(x[i] - state->m);
    state->l += x[i];
  }
  if constexpr (C::kThreadScores == 1) {
    const uint32_t pair = PackPair<C::kBFloat>(x[0], 0.f);
    StoreShared(sums + 2 * first, static_cast<uint16_t>(pair));
  } else {
    Words<2 * C::kThreadScores> weights;
#pragma unroll
    for (int i = 0; i < C::kThreadScores / 2; ++i) {
      weights.v[i] = PackPair<C::kBFloat>(x[2 * i], x[2 * i + 1]);
    }
    StoreShared(sums + 2 * first, weights);
  }
  if (first == 0) {
    StoreShared(SharedMemory() + C::kFactorsAt + 4 * row, factor);
  }
}

template <class C>
using TileSums = float[C::kRowTiles][C::kChunks][4];

// Return the stored factor of the lane's row g + 8 * half of a tile.
template <class C>
TM_DEVICE float FactorOf(const TileLane& at, int tile, int half) {
  const int row = 16 * (C::kRowTiles * at.group + tile) + at.g + 8 * half;
  return LoadShared<float>(SharedMemory() + C::kFactorsAt + 4 * row);
}

// o = factor o + weights · tile, for the warp's columns.
template <class C>
TM_DEVICE void AddValues(const TileLane& at, TileSums<C>& o) {
  float factor[C::kRowTiles][2];
  bool changed = false;
#pragma unroll
  for (int i = 0; i < 2 * C::kRowTiles; ++i) {
    factor[i / 2][i % 2] = FactorOf<C>(at, i / 2, i % 2);
    changed = changed || factor[i / 2][i % 2] != 1.f;
  }
  if (AnyInWarp(changed)) {
#pragma unroll
    for (int i = 0; i < C::kRowTiles * C::kChunks * 4; ++i) {
      o[i / (C::kChunks * 4)][i / 4 % C::kChunks][i % 4] *= factor[i / (C::kChunks * 4)][i % 4 / 2];
    }
  }
  const char* weights = SharedMemory() + C::kSumsAt +
                        (16 * C::kRowTiles * at.group + (at.lane & 15)) * C::kSumStride +
                        (at.lane >> 4) * 16;
  // The four matrices have 8 positions and 8 dimensions, the next 8 positions, and the same for the
  // next 8 dimensions.
  const char* values = SharedMemory() + C::kTileAt + (at.lane & 15) * C::kStride +
                       2 * C::kColumns * at.column + (at.lane >> 4) * 16;
#pragma unroll
  for (int u = 0; u < C::kTokens / 16; ++u) {
    uint32_t a[C::kRowTiles][4];
#pragma unroll
    for (int tile = 0; tile < C::kRowTiles; ++tile) {
      LoadMatrices(a[tile], weights + tile * 16 * C::kSumStride + 32 * u);
    }
#pragma unroll
    for (int n = 0; n < C::kChunks; n += 2) {
      uint32_t b[4];
      LoadMatricesTransposed(b, values + u * 16 * C::kStride + 16 * n);
#pragma unroll
      for (int tile = 0; tile < C::kRowTiles; ++tile) {
        Multiply<C::kBFloat>(o[tile][n], a[tile], b[0], b[1]);
        Multiply<C::kBFloat>(o[tile][n + 1], a[tile], b[2], b[3]);
      }
    }
  }
}

// Multiply the warp's sums by a factor.
template <class C>
TM_DEVICE void ScaleTileSums(float factor, TileSums<C>& o) {
#pragma unroll
  for (int i = 0; i < C::kRowTiles * C::kChunks * 4; ++i) {
    o[i / (C::kChunks * 4)][i / 4 % C::kChunks][i % 4] *= factor;
  }
}

}  // namespace turbomind::cuda
