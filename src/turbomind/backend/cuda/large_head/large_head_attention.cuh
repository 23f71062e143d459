#pragma once

// ⑦ Attention with heads of more than 256 values: decoding, drafts and prompts.
//
// A warp could not keep the sums of such rows in registers, so that the warps of a block share a
// tile and split its columns (tile_shape.cuh). Keys and values take turns in one place of shared
// memory. For each tile, the block
//   expands K, multiplies it with the queries, and copies the stored keys of the next tile
//   makes weights, expands V, multiplies it with them, and copies the stored values of the next
//   tile
// cp.async copies a side while the other one is expanded and multiplied.
//
// Formats are chosen at run time, once per side and tile, so that one kernel serves all of them.
//
// Bytes moved: the rows of the positions, once per block of rows. Bound: bytes with few rows, and
// shared memory or tensor cores with 64 and more.

#include <cstdint>

#include "turbomind/backend/cuda/large_head/large_head_tile.cuh"
#include "turbomind/backend/cuda/tile/tile_products.cuh"

namespace turbomind::cuda {

// Multiply the queries with the rows of K offsets, over the warp's part of the dimensions, and
// store the sums behind the scores. The codes are exact in FP16, and so are products with ones.
template <class C>
TM_DEVICE void StoreOffsetSums(const TileLane& at) {
  float sums[C::kRowTiles][4] = {};
#pragma unroll
  for (int i = 0; i < C::kScoreSteps; ++i) {
    const int step = at.column + i * C::kColumnWarps;
    uint32_t b[2] = {0, 0};
    if (at.g < C::kOffsetRows) {
      const char* const from =
          SharedMemory() + C::kOffsetsAt + at.g * C::kStride + 32 * step + 4 * at.t;
      b[0] = LoadShared<uint32_t>(from);
      b[1] = LoadShared<uint32_t>(from + 16);
    }
#pragma unroll
    for (int tile = 0; tile < C::kRowTiles; ++tile) {
      uint32_t a[4];
      LoadMatrices(a, SharedMemory() +
                          (16 * (C::kRowTiles * at.group + tile) + (at.lane & 15)) * C::kStride +
                          32 * step + (at.lane >> 4) * 16);
      MmaHalf(sums[tile], a, b[0], b[1]);
    }
  }
  if (2 * at.t < C::kOffsetRows) {
#pragma unroll
    for (int i = 0; i < 2 * C::kRowTiles; ++i) {
      const int row = 16 * (C::kRowTiles * at.group + i / 2) + at.g + 8 * (i % 2);
      StoreShared(
          SharedMemory() + C::kSumsAt + (at.column * C::kRows + row) * C::kSumStride +
              4 * C::kTokens + 8 * at.t,
          Words<8>{{FloatBits(sums[i / 2][i % 2 * 2]), FloatBits(sums[i / 2][i % 2 * 2 + 1])}});
    }
  }
}

// Return what the K offset of a token's block adds to q · k, for the row of this thread. `token` is
// in the tile.
template <class C>
TM_DEVICE float OffsetScore(const LargeHeadTask& task, const LargeTile& tile, int token) {
  const char* const from = SharedMemory() + C::kSumsAt +
                           ThreadIndexX() / C::kRowThreads * C::kSumStride + 4 * C::kTokens;
  float of_codes = 0.f;
  float of_ones = 0.f;
#pragma unroll
  for (int warp = 0; warp < C::kColumnWarps; ++warp) {
    const char* const part = from + warp * C::kRows * C::kSumStride;
    of_codes += LoadShared<float>(part + 4 * (token / kRunTokens));
    of_ones += LoadShared<float>(part + 4 * C::kRuns);
  }
  const IntParam param = OffsetParam(task, tile, token);
  return of_codes * param.scale + of_ones * param.zero;
}

// Compute the warp's part of the scores and store it.
template <class C>
TM_DEVICE void ComputeLargeScores(const TileLane& at) {
  TileScores<C> scores = {};
#pragma unroll
  for (int i = 0; i < C::kScoreSteps; ++i) {
    AddScores<C>(at, at.column + i * C::kColumnWarps, scores);
  }
  StoreScores<C>(at, [&](int tile, int n, int i) { return scores[tile][n][i]; });
}

// Return the positions of the block that both `seen` and its part contain.
TM_DEVICE SeenPositions WithinTask(const LargeHeadTask& task, const SeenPositions& seen) {
  return {seen.begin > task.range.begin ? seen.begin : task.range.begin,
          seen.end < task.range.end ? seen.end : task.range.end};
}

// Read the positions that rows see in one of the ranges of prefill_shape.cuh.
template <class C>
TM_DEVICE void ReadLargeRange(const LargeHeadTask& task, const TileLane& at, int range,
                              TileSoftmax* state, TileSums<C>& o) {
  const LargeHeadParams& p = task.params;
  // All positions of an item are seen.
  const auto seen_by = [&](int row) {
    return p.items != nullptr
               ? task.range
               : SeenBy(p.rule, p.window, range, task.Position(task.first_row + row));
  };
  const SeenPositions some = WithinTask(task, {seen_by(0).begin, seen_by(C::kRows - 1).end});
  if (some.begin >= some.end) {
    return;
  }
  const SeenPositions mine = WithinTask(task, seen_by(ThreadIndexX() / C::kRowThreads));
  const int view = range == 0 ? 0 : 1;
  const bool has_offsets = !C::kBFloat && p.views[view].HasKOffset();
  // A fast bias is added to keys together with their scale.
  const float key_scale =
      p.fast_bias.num_pairs > 0 ? 1.f : SideScale(p.views[view], 0, task.kv_head);
  const float scale = p.merge.softmax_scale * kLog2E;
  // The first token of this thread's scores. All are in one run.
  const int own_token = ThreadIndexX() % C::kRowThreads * C::kThreadScores;
  const auto tile_at = [&](int first) -> LargeTile {
    return {view, first, some.begin - first, some.end - first, first / C::kTokens & 1};
  };
  // Warps whose rows are all past the last only copy and expand.
  const bool has_rows = task.first_row + 16 * C::kRowTiles * at.group < task.num_rows;
  const int begin = some.begin / C::kTokens * C::kTokens;
  CopySide<C>(task, 0, tile_at(begin));
  CopySide<C>(task, 1, tile_at(begin));
#pragma unroll 1
  for (int step = 0; begin + step / 2 * C::kTokens < some.end; ++step) {
    const int side = step % 2;
    const LargeTile tile = tile_at(begin + step / 2 * C::kTokens);
    WaitForCopies<1>();
    SyncBlock();  // the side has arrived, and no warp reads the one before it
    if (side == 1) {
      const bool is_seen =
          own_token / kRunTokens * kRunTokens + kRunTokens > tile.begin && own_token < tile.end;
      const float added = has_offsets && is_seen ? OffsetScore<C>(task, tile, own_token) : 0.f;
      StoreWeights<C>(
          {mine.begin - tile.first, mine.end - tile.first},
          [&](float sum) {
            const float score = sum * key_scale + added;
            return p.score_cap != 0.f ? CapScore(score, scale, p.score_cap) : score * scale;
          },
          state);
    }
    ExpandLargeSide<C>(task, side, tile);
    SyncBlock();
    CopySide<C>(task, side, tile_at(tile.first + C::kTokens));
    if (!has_rows) {
      continue;
    }
    if (side == 0) {
      ComputeLargeScores<C>(at);
      if (has_offsets) {
        StoreOffsetSums<C>(at);
      }
    } else {
      AddValues<C>(at, o);
    }
  }
  WaitForCopies<0>();
  SyncBlock();  // no warp reads the tile or the weights
}

// Return the number of a row's partial result, of all heads.
TM_DEVICE int64_t PartialOf(const LargeHeadTask& task, int row) {
  const LargeHeadParams& p = task.params;
  return (task.partial + static_cast<int64_t>(row / task.group) * p.num_parts) * p.merge.q_heads +
         task.QueryHead(row);
}

// Store each row's factor of its sums: the one that normalizes them, or 1 for a partial result,
// whose m and l are stored too.
template <class C>
TM_DEVICE void FinishLargeSoftmax(const LargeHeadTask& task, const TileSoftmax& state) {
  const LargeHeadParams& p = task.params;
  const float l = SumOfRow<C>(state.l);
  const int in_block = ThreadIndexX() / C::kRowThreads;
  const int row = task.first_row + in_block;
  if (ThreadIndexX() % C::kRowThreads != 0 || row >= task.num_rows) {
    return;
  }
  float factor = 1.f;
  if (p.writes_partials) {
    StoreGlobal(reinterpret_cast<Words<8>*>(p.merge.partial_ml + 2 * PartialOf(task, row)),
                Words<8>{{FloatBits(state.m), FloatBits(l)}});
  } else {
    const float sink =
        SinkLogit(p.merge, {task.first_token + row / task.group, task.QueryHead(row)});
    const float max = fmaxf(state.m, sink);
    const float part = Exp2Approx(state.m - max);
    const float sum = l * part + Exp2Approx(sink - max);
    factor = sum > 0.f ? part / sum : 0.f;
  }
  StoreShared(SharedMemory() + C::kFactorsAt + 4 * in_block, factor);
}

template <class C>
TM_DEVICE void WriteLargeSums(const LargeHeadTask& task, const TileLane& at, const TileSums<C>& o) {
  const LargeHeadParams& p = task.params;
  const int head_dim = p.merge.head_dim;
#pragma unroll
  for (int tile = 0; tile < C::kRowTiles; ++tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = task.first_row + 16 * (C::kRowTiles * at.group + tile) + at.g + 8 * half;
      if (row >= task.num_rows) {
        continue;
      }
      const int64_t token = task.first_token + row / task.group;
      float* const to =
          p.writes_partials
              ? p.merge.partial_o + PartialOf(task, row) * head_dim
              : p.merge.out + (token * p.merge.q_heads + task.QueryHead(row)) * int64_t{head_dim};
      const float factor = FactorOf<C>(at, tile, half);
#pragma unroll
      for (int n = 0; n < C::kChunks; ++n) {
        const int d = C::kColumns * at.column + 8 * n + 2 * at.t;
        if (d < head_dim) {
          StoreGlobal(reinterpret_cast<Words<8>*>(to + d),
                      Words<8>{{FloatBits(o[tile][n][2 * half] * factor),
                                FloatBits(o[tile][n][2 * half + 1] * factor)}});
        }
      }
    }
  }
}

// Merge the block's rows if it is the last one of the sequence's items.
template <class C>
TM_DEVICE void MergeIfLast(const LargeHeadTask& task, const TileLane& at) {
  const LargeHeadParams& p = task.params;
  SyncBlock();  // all warps have stored their part
  if (ThreadIndexX() == 0) {
    const int num_items =
        FirstPartial(p.merge, task.sequence + 1) - FirstPartial(p.merge, task.sequence);
    const int blocks = (task.group + C::kRows - 1) / C::kRows;
    int32_t* const arrivals =
        p.arrivals +
        (static_cast<int64_t>(task.sequence) * p.views[0].kv_heads + task.kv_head) * blocks +
        task.first_row / C::kRows;
    FenceGlobal();
    const bool is_last = AddGlobal(arrivals, 1) == num_items - 1;
    if (is_last) {
      StoreGlobal(arrivals, 0);
    }
    FenceGlobal();
    StoreShared(SharedMemory(), is_last ? 1 : 0);
  }
  SyncBlock();
  if (LoadShared<int>(SharedMemory()) == 0) {
    return;
  }
  constexpr int kVectors = MergeVectors(kMaxHeadDim);
  constexpr int kAhead = 2;  // more would not fit the registers
#pragma unroll 1
  for (int row = task.first_row + at.warp; row < task.first_row + C::kRows && row < task.num_rows;
       row += kTileWarps) {
    const MergeRow of = {task.sequence, task.QueryHead(row)};
    FinishRow<kVectors>(p.merge, of, at.lane,
                        AddPartials<kVectors, kAhead>(p.merge, of, {}, at.lane));
  }
}

// Grids: LargeItemTask and LargeSequenceTask. kTileThreads threads; C::SharedBytes.
template <class C>
__global__ void __launch_bounds__(kTileThreads, C::kRows == 16 ? 2 : 1)
    LargeHeadKernel(LargeHeadParams params) {
  BeginKernel();
  const LargeHeadTask task = params.items != nullptr ? LargeItemTask(params, C::kRows)
                                                     : LargeSequenceTask(params, C::kRows);
  if (!task.exists) {
    return;
  }
  const TileLane at = LaneOfTile<C>();
  StoreLargeQueries<C>(task);
  SyncBlock();
  TileSoftmax state;
  TileSums<C> o = {};
#pragma unroll 1
  for (int range = 0; range < kPrefillRanges; ++range) {
    if (params.items == nullptr || range == params.item_view) {
      ReadLargeRange<C>(task, at, range, &state, o);
    }
    if (range == 0) {
      ScaleTileSums<C>(SideScale(params.views[0], 1, task.kv_head), o);
    }
  }
  FinishLargeSoftmax<C>(task, state);
  SyncBlock();
  WriteLargeSums<C>(task, at, o);
  if (params.arrivals != nullptr) {
    MergeIfLast<C>(task, at);
  }
}

}  // namespace turbomind::cuda
