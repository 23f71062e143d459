#pragma once

// ⑦ Attention over latents: decoding, drafts and prompts, with absorbed queries.
//
// All heads of a token read one row, so that a block's rows (token, head) multiply the same tile
// (tile_shape.cuh). cp.async copies a tile while the one before it is multiplied.
//
// Bytes moved: the rows of the positions, once per block of rows. Bound: bytes with 16 heads, and
// shared memory or tensor cores with 64 and more (docs/gpu.md has the counts).

#include <cstdint>

#include "turbomind/backend/cuda/latent/latent_tile.cuh"
#include "turbomind/backend/cuda/tile/tile_products.cuh"

namespace turbomind::cuda {

// The factors of expanded latents and rotary parts.
struct LatentScales {
  float latent;
  float rotary;
};

// Compute the warp's part of the scores and store it.
template <class C>
TM_DEVICE void ComputeScores(const TileLane& at, const LatentScales& scales) {
  TileScores<C> latent = {};
#pragma unroll
  for (int i = 0; i < C::kScoreSteps; ++i) {
    AddScores<C>(at, at.column + i * C::kColumnWarps, latent);
  }
  TileScores<C> rotary = {};
  if (at.column < C::kRotarySteps) {
    AddScores<C>(at, C::kRank / 16 + at.column, rotary);
  }
  StoreScores<C>(at, [&](int tile, int n, int i) {
    return latent[tile][n][i] * scales.latent + rotary[tile][n][i] * scales.rotary;
  });
}

// Return the factors of a view's expanded values.
TM_DEVICE LatentScales ScalesOfView(const KvLayerView& kv) {
  return {HeadScale(kv.global_scale[1], 0) * ExpandedUnit(kv.format[1]),
          HeadScale(kv.global_scale[0], 0)};
}

// Read the positions that rows see in one of the ranges of prefill_shape.cuh.
template <class C>
TM_DEVICE void ReadLatents(const LatentTask& task, const TileLane& at, int range,
                           TileSoftmax* state, TileSums<C>& o) {
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
  const auto score_of = [&](float sum) { return sum * scale; };
  // Warps whose rows are all past the last only copy and expand.
  const bool has_rows = task.first_row + 16 * C::kRowTiles * at.group < task.num_rows;
  CopyRawTile<C>(task, at.warp, view, some, some.begin / C::kTokens * C::kTokens);
  OffsetLane offset = LoadTileOffset<C>(task, view, some, some.begin / C::kTokens * C::kTokens);
#pragma unroll 1
  for (int first = some.begin / C::kTokens * C::kTokens; first < some.end; first += C::kTokens) {
    StoreTileOffset<C>(p.views[view], offset, scales.latent);
    WaitForCopies<0>();
    SyncBlock();  // the tile has arrived, and no warp reads the one before it
    ExpandTile<C>(p.views[view], some.begin - first, some.end - first);
    SyncBlock();
    if (first + C::kTokens < some.end) {
      CopyRawTile<C>(task, at.warp, view, some, first + C::kTokens);
      offset = LoadTileOffset<C>(task, view, some, first + C::kTokens);
    }
    if (has_rows) {
      ComputeScores<C>(at, scales);
    }
    SyncBlock();
    StoreWeights<C>({mine.begin - first, mine.end - first}, score_of, state);
    SyncBlock();
    if (has_rows) {
      AddValues<C>(at, o);
    }
  }
  SyncBlock();  // no warp reads the tile or the weights
}

// Store each row's factor of its sums: the one that normalizes them, or 1 for a partial result,
// whose m and l are stored too.
template <class C>
TM_DEVICE void FinishSoftmax(const LatentTask& task, const TileSoftmax& state) {
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
TM_DEVICE void WriteSums(const LatentTask& task, const TileLane& at, const TileSums<C>& o) {
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
// kTileThreads threads; C::SharedBytes.
template <class C>
__global__ void __launch_bounds__(kTileThreads, C::kRows == 16 ? 2 : 1)
    LatentKernel(LatentParams params) {
  BeginKernel();
  const LatentTask task =
      params.items != nullptr ? ItemTask(params, C::kRows) : SequenceTask(params, C::kRows);
  if (!task.exists) {
    return;
  }
  const TileLane at = LaneOfTile<C>();
  StoreLatentQueries<C>(task);
  SyncBlock();
  TileSoftmax state;
  TileSums<C> o = {};
#pragma unroll 1
  for (int range = 0; range < kPrefillRanges; ++range) {
    ReadLatents<C>(task, at, range, &state, o);
    if (range == 0) {
      ScaleTileSums<C>(ScalesOfView(params.views[0]).latent, o);
    }
  }
  FinishSoftmax<C>(task, state);
  SyncBlock();
  WriteSums<C>(task, at, o);
}

}  // namespace turbomind::cuda
