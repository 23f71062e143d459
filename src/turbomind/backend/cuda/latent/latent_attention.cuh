#pragma once

// ⑦ Attention over latents: decoding, drafts and prompts, with absorbed queries.
//
// All heads of a token read one row, so that a block's rows (token, head) multiply the same tile.
// A tile of positions is copied to shared memory as it is stored (cp.async, while the tile before
// it is multiplied) and expanded there to 16 bits once. Then
//   scores  each warp multiplies its rows with all tokens, over its part of the 576 dimensions
//   weights the parts are added and become weights: a few threads have a row, and its m and l
//   sums    each warp multiplies the weights with its columns of the latents
// Between the steps, the block waits for all warps.
//
// Bytes moved: the rows of the positions, once per block of rows. Bound: bytes with 16 heads, and
// shared memory or tensor cores with 64 and more (docs/gpu.md has the counts).
//
// A row's sums depend only on its own query and the positions that it sees, as in
// prefill_attention.cuh: tiles begin at multiples of kTokens, and hidden positions have weight 0.

#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/latent/latent_tile.cuh"

namespace turbomind::cuda {

// A thread's warp in the block.
struct LatentLane {
  int lane;
  int warp;
  int group;   // of rows
  int column;  // among the warps of a group
  int g;       // rows g and g + 8 of a tile
  int t;       // columns 2 t and 2 t + 1 of eight
};

template <class C>
using LatentScores = float[C::kRowTiles][C::kTokens / 8][4];

// scores += queries · tile over 16 dimensions from column 16 * step on.
template <class C>
TM_DEVICE void AddScores(const LatentLane& at, int step, LatentScores<C>& scores) {
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

// The factors of expanded latents and rotary parts.
struct LatentScales {
  float latent;
  float rotary;
};

// Compute the warp's part of the scores and store it.
template <class C>
TM_DEVICE void StoreScores(const LatentLane& at, const LatentScales& scales) {
  LatentScores<C> scores = {};
#pragma unroll
  for (int i = 0; i < C::kLatentSteps; ++i) {
    AddScores<C>(at, at.column + i * C::kColumnWarps, scores);
  }
  LatentScores<C> rotary = {};
  if (at.column < C::kRotarySteps) {
    AddScores<C>(at, C::kRank / 16 + at.column, rotary);
  }
  char* const to = SharedMemory() + C::kSumsAt +
                   (at.column * C::kRows + 16 * C::kRowTiles * at.group + at.g) * C::kSumStride +
                   8 * at.t;
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int n = 0; n < C::kTokens / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum[2];
        for (int i = 0; i < 2; ++i) {
          sum[i] = scores[tile][n][2 * half + i] * scales.latent +
                   rotary[tile][n][2 * half + i] * scales.rotary;
        }
        StoreShared(to + (16 * tile + 8 * half) * C::kSumStride + 32 * n,
                    Words<8>{{FloatBits(sum[0]), FloatBits(sum[1])}});
      }
    }
  }
}

// A row's softmax, which its threads share: m is the same in all of them, and l is over the
// thread's own tokens.
struct LatentSoftmax {
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

// Replace a row's scores by weights 2^(score - m) in 16 bits, and store the factor by which m
// changes earlier sums. `seen` are the tokens of the tile that the row sees.
template <class C>
TM_DEVICE void StoreWeights(const SeenPositions& seen, float scale, LatentSoftmax* state) {
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
    x[i] = visible ? x[i] * scale : -INFINITY;
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
using LatentSums = float[C::kRowTiles][C::kChunks][4];

// Return the stored factor of the lane's row g + 8 * half of a tile.
template <class C>
TM_DEVICE float FactorOf(const LatentLane& at, int tile, int half) {
  const int row = 16 * (C::kRowTiles * at.group + tile) + at.g + 8 * half;
  return LoadShared<float>(SharedMemory() + C::kFactorsAt + 4 * row);
}

// o = factor o + weights · latents, for the warp's columns.
template <class C>
TM_DEVICE void AddLatents(const LatentLane& at, LatentSums<C>& o) {
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

// Return the factors of a view's expanded values.
TM_DEVICE LatentScales ScalesOfView(const KvLayerView& kv) {
  LatentScales scales = {HeadScale(kv.global_scale[1], 0), HeadScale(kv.global_scale[0], 0)};
  if (kv.format[1] == KvCacheMode::kFp4Mx) {
    scales.latent *= Fragments<KvCacheMode::kFp4Mx, DataType::kFloat16>::kUnit;
  } else if (kv.format[1] == KvCacheMode::kFp4Nv) {
    scales.latent *= Fragments<KvCacheMode::kFp4Nv, DataType::kFloat16>::kUnit;
  }
  return scales;
}

// Read the positions that rows see in one of the ranges of prefill_shape.cuh.
template <class C>
TM_DEVICE void ReadLatents(const LatentTask& task, const LatentLane& at, int range,
                           LatentSoftmax* state, LatentSums<C>& o) {
  const LatentParams& p = task.params;
  const int view = range == 0 ? 0 : 1;
  const SeenPositions oldest = SeenBy(p.rule, 0, range, task.Position(task.first_row));
  const SeenPositions newest =
      SeenBy(p.rule, 0, range, task.Position(task.first_row + C::kRows - 1));
  const auto within = [&](const SeenPositions& x) -> SeenPositions {
    return {x.begin > task.range.begin ? x.begin : task.range.begin,
            x.end < task.range.end ? x.end : task.range.end};
  };
  const SeenPositions some = within({oldest.begin, newest.end});
  if (some.begin >= some.end) {
    return;
  }
  const SeenPositions mine = within(
      SeenBy(p.rule, 0, range, task.Position(task.first_row + ThreadIndexX() / C::kRowThreads)));
  const LatentScales scales = ScalesOfView(p.views[view]);
  const float scale = p.softmax_scale * kLog2E;
  // Warps whose rows are all past the last only copy and expand.
  const bool has_rows = task.first_row + 16 * C::kRowTiles * at.group < task.num_rows;
  CopyRawTile<C>(task, at.warp, view, some, some.begin / C::kTokens * C::kTokens);
#pragma unroll 1
  for (int first = some.begin / C::kTokens * C::kTokens; first < some.end; first += C::kTokens) {
    WaitForCopies<0>();
    SyncBlock();  // the tile has arrived, and no warp reads the one before it
    ExpandTile<C>(p.views[view], some.begin - first, some.end - first);
    SyncBlock();
    if (first + C::kTokens < some.end) {
      CopyRawTile<C>(task, at.warp, view, some, first + C::kTokens);
    }
    if (has_rows) {
      StoreScores<C>(at, scales);
    }
    SyncBlock();
    StoreWeights<C>({mine.begin - first, mine.end - first}, scale, state);
    SyncBlock();
    if (has_rows) {
      AddLatents<C>(at, o);
    }
  }
  SyncBlock();  // no warp reads the tile or the weights
}

// Store each row's factor of its sums: the one that normalizes them, or 1 for a partial result,
// whose m and l are stored too.
template <class C>
TM_DEVICE void FinishSoftmax(const LatentTask& task, const LatentSoftmax& state) {
  const LatentParams& p = task.params;
  const float l = SumOfRow<C>(state.l);
  const int in_block = ThreadIndexX() / C::kRowThreads;
  const int row = task.first_row + in_block;
  if (ThreadIndexX() % C::kRowThreads != 0 || row >= task.num_rows) {
    return;
  }
  float factor = 1.f;
  if (p.partial_o == nullptr) {
    factor = l > 0.f ? 1.f / l : 0.f;
  } else {
    const int64_t partial =
        (task.partial + static_cast<int64_t>(row / p.q_heads) * p.num_parts) * p.q_heads +
        row % p.q_heads;
    StoreGlobal(reinterpret_cast<Words<8>*>(p.partial_ml + 2 * partial),
                Words<8>{{FloatBits(state.m), FloatBits(l)}});
  }
  StoreShared(SharedMemory() + C::kFactorsAt + 4 * in_block, factor);
}

template <class C>
TM_DEVICE void WriteSums(const LatentTask& task, const LatentLane& at, const LatentSums<C>& o) {
  const LatentParams& p = task.params;
  const int rank = p.views[0].head_dim;
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = task.first_row + 16 * (C::kRowTiles * at.group + tile) + at.g + 8 * half;
      if (row >= task.num_rows) {
        continue;
      }
      const int token = row / p.q_heads;
      const int64_t head = row % p.q_heads;
      float* to = p.partial_o == nullptr
                      ? p.out + (task.first_token + token) * p.q_stride + head * rank
                      : p.partial_o + ((task.partial + static_cast<int64_t>(token) * p.num_parts) *
                                           p.q_heads +
                                       head) *
                                          rank;
      const float factor = FactorOf<C>(at, tile, half);
#pragma unroll
      for (int n = 0; n < C::kChunks; ++n) {
        const int d = C::kColumns * at.column + 8 * n + 2 * at.t;
        if (d < rank) {
          StoreGlobal(reinterpret_cast<Words<8>*>(to + d),
                      Words<8>{{FloatBits(o[tile][n][2 * half] * factor),
                                FloatBits(o[tile][n][2 * half + 1] * factor)}});
        }
      }
    }
  }
}

// Grid: with items, blocks of an item's rows × (items · parts). Otherwise num_tiles × parts.
// kLatentThreads threads; C::SharedBytes.
template <class C>
__global__ void __launch_bounds__(kLatentThreads, C::kRows == 16 ? 2 : 1)
    LatentKernel(LatentParams params) {
  BeginKernel();
  const LatentTask task =
      params.items != nullptr ? ItemTask(params, C::kRows) : SequenceTask(params, C::kRows);
  if (!task.exists) {
    return;
  }
  const int lane = ThreadIndexX() & 31;
  const int warp = WarpIndex();
  const LatentLane at = {lane,      warp,    warp / C::kColumnWarps, warp % C::kColumnWarps,
                         lane >> 2, lane & 3};
  StoreLatentQueries<C>(task);
  SyncBlock();
  LatentSoftmax state;
  LatentSums<C> o = {};
#pragma unroll 1
  for (int range = 0; range < kPrefillRanges; ++range) {
    ReadLatents<C>(task, at, range, &state, o);
    if (range == 0) {
      const float scale = ScalesOfView(params.views[0]).latent;
#pragma unroll
      for (int i = 0; i < C::kRowTiles * C::kChunks * 4; ++i) {
        o[i / (C::kChunks * 4)][i / 4 % C::kChunks][i % 4] *= scale;
      }
    }
  }
  FinishSoftmax<C>(task, state);
  SyncBlock();
  WriteSums<C>(task, at, o);
}

}  // namespace turbomind::cuda
