#pragma once

// ⑦ Decode attention over paged, quantized pools, for one query token per sequence.
//
// A block owns one item (a range of positions of one sequence, cut by decode_plan.h), one KV head
// and up to kHeads of its query heads. Its warps take turns with tiles of kTileTokens positions.
// Each warp has its own ring of kStages stages, filled by cp.async, and its own online softmax. At
// the end the warps are merged into one partial result per query head. The block that ends last
// merges these over the items of a sequence (DecodeParams::arrivals), or CombineKernel does.
//
// Bytes moved: every byte of payload, parameters and scales of the range, once per KV head and
// kHeads query heads, 16 bytes at a time. Bound: memory, with at most about 3 instructions per FP4
// element. Whatever is the same for all tiles is computed once (StageView). The scores of a tile
// start at q · the K offset of its block (decode_query.cuh).
//
// Matrix products: Kᵀ tiles of 16 positions × 16 dimensions times a tile of 8 query heads
// (mma.m16n8k16). A dequantized value serves all heads of the block. Dimensions may be permuted as
// long as keys and queries use the same order. SideShape scatters values in shared memory to avoid
// bank conflicts.
//
// The reference maximum of the softmax rises only when a score exceeds it by more than 2^8. It
// starts finite, so that a tile without visible positions adds nothing.

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "turbomind/backend/cuda/decode/decode_fast_bias.cuh"
#include "turbomind/backend/cuda/decode/decode_load.cuh"
#include "turbomind/backend/cuda/decode/decode_query.cuh"
#include "turbomind/backend/cuda/decode/decode_shape.cuh"
#include "turbomind/backend/cuda/kv/fragments.cuh"

namespace turbomind::cuda {

template <class C>
TM_DEVICE IntParam LoadParam(const char* from) {
  return IntParamOf<C::kType>(LoadShared<uint32_t>(from));
}

// Expand the lane's words i ... of a key row to pairs of dimensions, times their scales. Words past
// the end of the row become zero.
template <class C>
TM_DEVICE void ExpandKeys(const StageView& view, int stage, int row, int i, bool there,
                          uint32_t* pairs) {
  using F = Fragments<C::kKeyFormat, C::kType>;
  using Shape = typename C::KeyShape;
  constexpr int kPiece = Shape::kKeyPiece;
  constexpr int kPairs = F::kDims / 2;
  const int word = Shape::KeyWord(0, i);  // relative to the lane's first word
  Words<4 * kPiece> words = {};
  [[maybe_unused]] uint32_t scale = 0;  // scales of the piece's first and second group of 16
  if (there) {
    words = LoadShared<Words<4 * kPiece>>(view.key + stage + row * Shape::kRowBytes + 4 * word);
    if constexpr (IsFp4(C::kKeyFormat)) {
      using Bytes = std::conditional_t<kPiece == 4, uint16_t, uint8_t>;
      scale = ScalesOf<C::kKeyFormat, F::kHardware, kPiece == 4>(
          LoadShared<Bytes>(view.key_meta + stage + row * C::kScaleStride + word / 2));
    }
  }
#pragma unroll
  for (int j = 0; j < kPiece; ++j) {
    uint32_t expanded[kPairs];
    F::Expand(words.v[j], expanded);
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {
      pairs[j * kPairs + p] = expanded[p];
      if constexpr (IsFp4(C::kKeyFormat)) {
        pairs[j * kPairs + p] = MulHalf2(expanded[p], j < 2 ? LowTwice(scale) : HighTwice(scale));
      }
    }
  }
}

// A warp's scores of each head tile for one tile of positions: rows g and g + 8 of each 16, for
// the heads 2 t and 2 t + 1.
template <class C>
using TileScores = float[C::kHeadTiles][C::kSubTiles][4];

// Compute the scores of 16 positions, without the softmax scale. Each key is expanded once for all
// heads.
template <class C>
TM_DEVICE void ScoreRows(const DecodeTask<C>& task, const Query<C> (&query)[C::kHeadTiles],
                         const StageView& view, int stage, int sub_tile, TileScores<C>& scores) {
  using F = Fragments<C::kKeyFormat, C::kType>;
  using Shape = typename C::KeyShape;
  constexpr int kPiece = Shape::kKeyPiece;
  constexpr int kPairs = F::kDims / 2;
#pragma unroll
  for (int n = 0; n < C::kHeadTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[n][sub_tile][i] = IsInteger(C::kKeyFormat) ? 0.f : query[n].shift[i % C::kShiftValues];
    }
  }
#pragma unroll
  for (int i = 0; i < Shape::kKeyWords; i += kPiece) {
    const bool there = Shape::kKeysEven || Shape::KeyWord(task.at.t, i) < Shape::kRowWords;
    uint32_t pairs[2][kPiece * kPairs];  // for the rows g and g + 8
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      ExpandKeys<C>(view, stage, 16 * sub_tile + 8 * x, i, there, pairs[x]);
    }
#pragma unroll
    for (int p = 0; p + 1 < kPiece * kPairs; p += 2) {
      const int step = (i * kPairs + p) / 2;
      const uint32_t a[4] = {pairs[0][p], pairs[1][p], pairs[0][p + 1], pairs[1][p + 1]};
#pragma unroll
      for (int n = 0; n < C::kHeadTiles; ++n) {
        Multiply<F::kBFloat>(scores[n][sub_tile], a, query[n].b[step][0], query[n].b[step][1]);
      }
    }
  }
  if constexpr (IsInteger(C::kKeyFormat)) {
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const IntParam param = LoadParam<C>(view.key_meta + stage + 4 * (16 * sub_tile + 8 * x));
#pragma unroll
      for (int n = 0; n < C::kHeadTiles; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& score = scores[n][sub_tile][2 * x + h];
          score = score * param.scale + (query[n].sum[h] * param.zero + query[n].shift[h]);
        }
      }
    }
  }
}

// A warp's results for a head tile and the heads 2 t and 2 t + 1. o has dimension ValueDim(g, tile)
// and the next one (rows g and g + 8 of a tile). m and l are reference maxima and sums.
template <class C>
struct HeadState {
  float o[C::kOutTiles][4];
  float m[2];
  float l[2];  // over the lane's rows only, until the end
};
template <class C>
using WarpState = HeadState<C>[C::kHeadTiles];
// Operand B of the value products for 16 positions.
template <class C>
using Weights = uint32_t[C::kHeadTiles][2];

// Scales of a lane's four positions as FP16 pairs, with zeros for integer formats.
template <class C>
struct ValueScales {
  uint32_t scale[2];  // of the positions 2 t and 2 t + 1, and of those plus 8
  uint32_t zero[2];
};

// Load a piece of a row of values: whole words, or the bytes of two dimensions.
template <class C>
TM_DEVICE auto LoadValues(const char* from) {
  using Shape = typename C::ValueShape;
  constexpr int kBits = Fragments<C::kValueFormat, C::kType>::kBits;
  using Piece = Words<4 * Shape::kValuePiece>;
  if constexpr (Shape::kEighths || kBits == 16) {
    return LoadShared<Piece>(from);
  } else if constexpr (kBits == 8) {
    return Piece{{LoadShared<uint16_t>(from)}};
  } else {
    return Piece{{LoadShared<uint8_t>(from)}};
  }
}

// Load the scales of one group of 16 dimensions for a lane's four positions. `from` is the first
// position's scale.
template <class C>
TM_DEVICE void LoadValueScales(const char* from, ValueScales<C>* scales) {
  constexpr bool kHardware = Fragments<C::kValueFormat, C::kType>::kHardware;
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    const char* row = from + 8 * x * C::kScaleStride;
    scales->scale[x] = ScalePair<C::kValueFormat, kHardware>(
        LoadShared<uint8_t>(row), LoadShared<uint8_t>(row + C::kScaleStride));
  }
}

// Load (scale, zero) of a lane's four positions.
template <class C>
TM_DEVICE void LoadValueParams(const char* from, ValueScales<C>* scales) {
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    if constexpr (C::kType == DataType::kBFloat16) {
      const IntParam a = LoadParam<C>(from + 32 * x);
      const IntParam b = LoadParam<C>(from + 32 * x + 4);
      scales->scale[x] = PackHalf2(a.scale, b.scale);
      scales->zero[x] = PackHalf2(a.zero, b.zero);
    } else {
      const auto a = LoadShared<uint32_t>(from + 32 * x);
      const auto b = LoadShared<uint32_t>(from + 32 * x + 4);
      scales->scale[x] = SelectBytes(a, b, 0x5410);
      scales->zero[x] = SelectBytes(a, b, 0x7632);
    }
  }
}

// Add the products of the weights and word i of the values to o. The words belong to the positions
// row, row + 1, row + 8 and row + 9 of an operand.
template <class C>
TM_DEVICE void AddValueWord(const uint32_t (&words)[4], const ValueScales<C>& scales, int i,
                            const Weights<C>& weights, WarpState<C>& state) {
  using F = Fragments<C::kValueFormat, C::kType>;
  using Shape = typename C::ValueShape;
  uint32_t pairs[2][F::kDims];
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    F::ExpandTokens(words[2 * x], words[2 * x + 1], pairs[x]);
#pragma unroll
    for (int d = 0; d < Shape::kValueDims; ++d) {
      if constexpr (IsFp4(C::kValueFormat)) {
        pairs[x][d] = MulHalf2(pairs[x][d], scales.scale[x]);
      } else if constexpr (IsInteger(C::kValueFormat)) {
        pairs[x][d] = FmaHalf2(pairs[x][d], scales.scale[x], scales.zero[x]);
      }
    }
  }
#pragma unroll
  for (int d = 0; d < Shape::kValueDims; d += 2) {
    const uint32_t a[4] = {pairs[0][d], pairs[0][d + 1], pairs[1][d], pairs[1][d + 1]};
#pragma unroll
    for (int n = 0; n < C::kHeadTiles; ++n) {
      float(&o)[4] = state[n].o[(i * Shape::kValueDims + d) / 2];
      Multiply<F::kBFloat>(o, a, weights[n][0], weights[n][1]);
    }
  }
}

// o += weights · values for 16 positions. Each value is expanded once for all heads.
template <class C>
TM_DEVICE void AddValues(const StageView& view, int stage, int sub_tile, const Weights<C>& weights,
                         WarpState<C>& state) {
  using Shape = typename C::ValueShape;
  constexpr int kPiece = Shape::kValuePiece;
  constexpr int kOddRow = Shape::Slot(1) * Shape::kRowBytes;
  ValueScales<C> scales = {};
  if constexpr (IsInteger(C::kValueFormat)) {
    LoadValueParams<C>(view.value_meta + stage + 4 * 16 * sub_tile, &scales);
  }
#pragma unroll
  for (int i = 0; i < Shape::kValueWords; i += kPiece) {
    const char* from = view.value + stage + 16 * sub_tile * Shape::kRowBytes +
                       Shape::ValueWordDim(0, i) * Shape::F::kBits / 8;
    Words<4 * kPiece> words[4];
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      words[x] = LoadValues<C>(from + (x >> 1) * 8 * Shape::kRowBytes + (x & 1) * kOddRow);
    }
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      if constexpr (IsFp4(C::kValueFormat)) {
        if (j * Shape::kValueDims % 16 == 0) {
          LoadValueScales<C>(view.value_meta + stage + 16 * sub_tile * C::kScaleStride +
                                 Shape::ValueWordDim(0, i + j) / 16,
                             &scales);
        }
      }
      const uint32_t four[4] = {words[0].v[j], words[1].v[j], words[2].v[j], words[3].v[j]};
      AddValueWord<C>(four, scales, i + j, weights, state);
    }
  }
}

// The same for all positions of a tile.
template <class C>
TM_DEVICE void AddTile(const StageView& view, int stage, const TileScores<C>& weights,
                       WarpState<C>& state) {
  constexpr bool kBFloat = Fragments<C::kValueFormat, C::kType>::kBFloat;
#pragma unroll
  for (int u = 0; u < C::kSubTiles; ++u) {
    Weights<C> b;
#pragma unroll
    for (int n = 0; n < C::kHeadTiles; ++n) {
      const float(&w)[4] = weights[n][u];
      b[n][0] = TransposeMatrix(PackPair<kBFloat>(w[0], w[1]));
      b[n][1] = TransposeMatrix(PackPair<kBFloat>(w[2], w[3]));
    }
    AddValues<C>(view, stage, u, b, state);
  }
}

// Replace the scores of a head tile by weights 2^(score - m). If m rises, scale o and l down.
template <class C>
TM_DEVICE void UpdateSoftmax(float scale, float (&scores)[C::kSubTiles][4], HeadState<C>* state) {
  float max_score[2] = {scores[0][0], scores[0][1]};
#pragma unroll
  for (int u = 0; u < C::kSubTiles; ++u) {
    max_score[0] = fmaxf(max_score[0], fmaxf(scores[u][0], scores[u][2]));
    max_score[1] = fmaxf(max_score[1], fmaxf(scores[u][1], scores[u][3]));
  }
  max_score[0] *= scale;
  max_score[1] *= scale;
  if (AnyInWarp(max_score[0] > state->m[0] + kLazyMax || max_score[1] > state->m[1] + kLazyMax)) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) {
        max_score[h] = fmaxf(max_score[h], ShuffleXor(max_score[h], mask));
      }
      const float m = fmaxf(state->m[h], max_score[h]);
      const float factor = Exp2Approx(state->m[h] - m);
      state->m[h] = m;
      state->l[h] *= factor;
#pragma unroll
      for (int tile = 0; tile < C::kOutTiles; ++tile) {
        state->o[tile][h] *= factor;
        state->o[tile][2 + h] *= factor;
      }
    }
  }
#pragma unroll
  for (int u = 0; u < C::kSubTiles; ++u) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[u][i] = Exp2Approx(fmaf(scores[u][i], scale, -state->m[i & 1]));
      state->l[i & 1] += scores[u][i];
    }
  }
}

// Set the scores of positions outside [begin, end), relative to the tile's first, to -infinity, and
// make their values finite.
template <class C>
TM_DEVICE void HideOutside(const DecodeTask<C>& task, int begin, int end, int stage,
                           TileScores<C>& scores) {
#pragma unroll
  for (int u = 0; u < C::kSubTiles; ++u) {
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const int row = 16 * u + 8 * x + task.at.g;
      if (row < begin || row >= end) {
#pragma unroll
        for (int n = 0; n < C::kHeadTiles; ++n) {
          scores[n][u][2 * x] = -INFINITY;
          scores[n][u][2 * x + 1] = -INFINITY;
        }
      }
    }
  }
#pragma unroll 1
  for (int row = task.at.lane; row < C::kTileTokens; row += 32) {
    if (row < begin || row >= end) {
      ClearValues<C>(task.ring + stage, row);
    }
  }
  SyncWarp();
}

// Process all tiles of the warp: tiles warp, warp + kWarps, ... of the item.
template <class C>
TM_DEVICE void ReadItem(const DecodeTask<C>& task, WarpState<C>& state) {
  constexpr int kTile = C::kTileTokens;
  constexpr int kTurn = C::kTurnTokens;
  constexpr int kAhead = C::kStages - 1;
  const DecodeParams& p = task.params;
  const int start = task.item.begin / kTile * kTile + task.at.warp * kTile;
  const int mask = p.kv.block_seq_len - 1;
  const int shift = CountZeros(p.kv.block_seq_len);
  const TileSources sources =
      FindSources<C>(p.kv, task.kv_head, C::kWholeBlocks ? start & mask : 0, task.at.lane);
  const StageView view = ViewStages<C>(task.at, task.ring, task.shifts);
  const int32_t* table = KeepGlobal(p.block_tables + task.item.sequence * p.block_table_stride);
  const auto place_of = [&](int position) {
    return TilePlace{LoadGlobal(table + (position >> shift)), position & mask};
  };
  const int length = task.item.end - task.item.begin;
  int left = task.item.end - start;  // positions from the current tile on
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (left > i * kTurn) {
      LoadTile<C>(sources, task.at.lane, place_of(start + i * kTurn), view, i * C::kStageBytes);
    }
    CommitCopies();
  }
  // Look up the block table one tile ahead, so that the load overlaps with the computation of a
  // tile.
  int ahead = start + kAhead * kTurn;
  TilePlace next = {};
  if (left > kAhead * kTurn) {
    next = place_of(ahead);
  }
  Query<C> query[C::kHeadTiles];
#pragma unroll
  for (int n = 0; n < C::kHeadTiles; ++n) {
    LoadQuery<C>(task, n * kHeadTile, &query[n]);
  }
  const float score_scale = p.merge.softmax_scale * kLog2E *
                            Fragments<C::kKeyFormat, C::kType>::kUnit *
                            HeadScale(p.kv.global_scale[0], task.kv_head);
  const float scale = p.score_cap != 0.f ? 1.f : score_scale;
  int stage = 0;
  int free = kAhead * C::kStageBytes;
  int shift_row = 0;  // offset of the tile's shifts
#pragma unroll 1
  for (; left > 0; left -= kTurn) {
    WaitForCopies<C::kStages - 2>();
    SyncWarp();  // all lanes' copies have arrived, and no lane reads the stage that is filled next
    if (left > kAhead * kTurn) {
      LoadTile<C>(sources, task.at.lane, next, view, free);
    }
    CommitCopies();
    if (C::kHasShifts && shift_row == 0) {
      const int row = task.at.g * kTurn;  // in positions
      const int position = ahead - kAhead * kTurn + (row < left ? row : left - 1);
      FillShifts<C>(task, query, LoadGlobal(table + (position >> shift)), view.shift);
      SyncWarp();
    }
    ahead += kTurn;
    if (left > C::kStages * kTurn) {
      next = place_of(ahead);
    }
    LoadShifts<C>(view.shift + shift_row, query);
    shift_row = (shift_row + C::kShiftRowBytes) & (kShiftRows * C::kShiftRowBytes - 1);
    TileScores<C> scores;
#pragma unroll
    for (int u = 0; u < C::kSubTiles; ++u) {
      ScoreRows<C>(task, query, view, stage, u, scores);
    }
    if (p.fast_bias.num_pairs > 0) {
      const float unit = InverseApprox(Fragments<C::kKeyFormat, C::kType>::kUnit *
                                       HeadScale(p.kv.global_scale[0], task.kv_head));
      AddWaves<C>(task, ahead - C::kStages * kTurn, unit, scores);
    }
    if (p.score_cap != 0.f) {
#pragma unroll
      for (int i = 0; i < C::kHeadTiles * C::kSubTiles * 4; ++i) {
        float& score = scores[i / (C::kSubTiles * 4)][i / 4 % C::kSubTiles][i % 4];
        score = CapScore(score, score_scale, p.score_cap);
      }
    }
    if (left < kTile || left > length) {  // the item's first or last tile
      HideOutside<C>(task, left - length, left, stage, scores);
    }
#pragma unroll
    for (int n = 0; n < C::kHeadTiles; ++n) {
      UpdateSoftmax<C>(scale, scores[n], &state[n]);
    }
    AddTile<C>(view, stage, scores, state);
    free = stage;
    stage = stage == kAhead * C::kStageBytes ? 0 : stage + C::kStageBytes;
  }
  WaitForCopies<0>();
}

// Merge the warps' states into one partial result.
template <class C>
TM_DEVICE void MergeWarps(const DecodeTask<C>& task, const WarpState<C>& state) {
  constexpr int D = C::kHeadDim;
  float* merged_o = reinterpret_cast<float*>(SharedMemory());
  float* merged_ml = merged_o + C::kWarps * C::kHeads * C::kMergeStride;
  const Lane& at = task.at;
#pragma unroll
  for (int i = 0; i < 2 * C::kHeadTiles; ++i) {
    const HeadState<C>& heads = state[i / 2];
    const int h = i % 2;
    const int row = at.warp * C::kHeads + i / 2 * kHeadTile + 2 * at.t + h;
    float l = heads.l[h];
    for (int mask = 4; mask < 32; mask *= 2) {
      l += ShuffleXor(l, mask);
    }
#pragma unroll
    for (int tile = 0; tile < C::kOutTiles; ++tile) {
      float* to = merged_o + row * C::kMergeStride + C::ValueShape::ValueDim(at.g, tile);
      StoreShared(to, heads.o[tile][h]);
      StoreShared(to + 1, heads.o[tile][2 + h]);
    }
    if (at.g == 0) {
      StoreShared(merged_ml + 2 * row, heads.m[h]);
      StoreShared(merged_ml + 2 * row + 1, l);
    }
  }
  SyncBlock();
  const DecodeParams& p = task.params;
  const float factor =
      Fragments<C::kValueFormat, C::kType>::kUnit * HeadScale(p.kv.global_scale[1], task.kv_head);
  for (int head = at.warp; head < task.num_heads; head += C::kWarps) {
    float m = kMinRowMax;
    for (int w = 0; w < C::kWarps; ++w) {
      m = fmaxf(m, LoadShared<float>(merged_ml + 2 * (w * C::kHeads + head)));
    }
    float l = 0.f;
    float weight[C::kWarps];
    for (int w = 0; w < C::kWarps; ++w) {
      const float* ml = merged_ml + 2 * (w * C::kHeads + head);
      weight[w] = Exp2Approx(LoadShared<float>(ml) - m);
      l += weight[w] * LoadShared<float>(ml + 1);
    }
    const int64_t result =
        static_cast<int64_t>(task.item.partial) * p.merge.q_heads + task.first_head + head;
    for (int d = at.lane; d < D; d += 32) {
      float o = 0.f;
      for (int w = 0; w < C::kWarps; ++w) {
        o += weight[w] * LoadShared<float>(merged_o + (w * C::kHeads + head) * C::kMergeStride + d);
      }
      StoreGlobal(p.merge.partial_o + result * D + d, o * factor);
    }
    if (at.lane == 0) {
      StoreGlobal(p.merge.partial_ml + 2 * result, m);
      StoreGlobal(p.merge.partial_ml + 2 * result + 1, l);
    }
  }
}

// Note that the item is stored. Return the head tiles of the block, one per bit, whose items are
// now all stored and can be read.
template <class C>
TM_DEVICE int CompletedTiles(const DecodeTask<C>& task, int tiles) {
  const MergeParams& merge = task.params.merge;
  const int32_t* first = merge.first_partial + task.item.sequence;
  const int count = LoadGlobal(first + 1) - LoadGlobal(first);
  SyncBlock();  // the stores of all threads are before the fence
  if (ThreadIndexX() == 0) {
    const int group = merge.q_heads / task.params.kv.kv_heads;
    const int first_tile = (task.first_head - task.kv_head * group) / kHeadTile;
    int32_t* arrivals = task.params.arrivals +
                        (task.item.sequence * task.params.kv.kv_heads + task.kv_head) *
                            static_cast<int64_t>(HeadTiles(group)) +
                        first_tile;
    int completed = 0;
    FenceGlobal();
#pragma unroll 1
    for (int n = 0; n < tiles; ++n) {
      if (AddGlobal(arrivals + n, 1) == count - 1) {
        StoreGlobal(arrivals + n, 0);
        completed |= 1 << n;
      }
    }
    FenceGlobal();
    StoreShared(SharedMemory(), completed);
  }
  SyncBlock();
  return LoadShared<int>(SharedMemory());
}

// Merge the rows of this block's heads that have no other items left.
template <class C>
TM_DEVICE void MergeCompleted(const DecodeTask<C>& task) {
  constexpr int kVectors = MergeVectors(C::kHeadDim);
  const MergeParams& merge = task.params.merge;
  const int completed = CompletedTiles<C>(task, HeadTiles(task.num_heads));
#pragma unroll 1
  for (int head = task.at.warp; head < task.num_heads; head += C::kWarps) {
    if ((completed >> head / kHeadTile & 1) != 0) {
      const MergeRow row = {task.item.sequence, task.first_head + head};
      FinishRow<kVectors>(merge, row, task.at.lane,
                          AddPartials<kVectors, kMergeAhead>(merge, row, {}, task.at.lane));
    }
  }
}

// Grid: (KV heads · ⌈query heads per KV head / kHeads⌉) × items; kWarps warps; kSharedBytes.
template <class C>
__global__ void __launch_bounds__(32 * C::kWarps, C::kBlocksPerSm)
    DecodeKernel(DecodeParams params) {
  BeginKernel();
  const DecodeItem item = LoadGlobal(params.items + BlockIndexY());
  if (item.begin == item.end) {
    return;
  }
  const int lane = ThreadIndexX() & 31;
  const int warp = WarpIndex();
  const int group = params.merge.q_heads / params.kv.kv_heads;
  const int head_tiles = (group + C::kHeads - 1) / C::kHeads;
  const int kv_head = BlockIndexX() / head_tiles;
  const int first = BlockIndexX() % head_tiles * C::kHeads;
  const DecodeTask<C> task = {params,
                              item,
                              kv_head,
                              kv_head * group + first,
                              group - first < C::kHeads ? group - first : C::kHeads,
                              SharedMemory() + warp * C::kRingBytes,
                              SharedMemory() + C::kWarps * C::kRingBytes + warp * C::kShiftBytes,
                              {lane, warp, lane >> 2, lane & 3}};
  WarpState<C> state = {};
#pragma unroll
  for (int n = 0; n < C::kHeadTiles; ++n) {
    state[n].m[0] = state[n].m[1] = kMinRowMax;
  }
  ReadItem<C>(task, state);
  SyncBlock();  // the merge reuses the shared memory of the rings
  MergeWarps<C>(task, state);
  if (params.arrivals != nullptr) {
    MergeCompleted<C>(task);
  }
}

}  // namespace turbomind::cuda
