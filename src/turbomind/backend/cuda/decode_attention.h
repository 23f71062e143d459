#pragma once

// ⑦ Decode attention over paged, quantised pools, for one query token per sequence.
//
// What a block owns: one item (a range of positions of one sequence, cut by decode_plan.h), one KV
// head, up to 8 of its query heads. Its four warps take turns with tiles of kTileTokens positions,
// each with a ring of kStages stages of its own that cp.async fills, and an online softmax of its
// own; they are merged at the end into one partial result per query head, which CombineKernel
// merges over the items of a sequence.
//
// What moves: every byte of payload, parameters and scales of the range, once per KV head and 8
// query heads; 16 bytes at a time. Bound: memory, with at most about 4 instructions per FP4 element
// (decode_shape.h).
//
// Products: Kᵀ tiles of 16 positions × 16 dimensions times 8 query heads (mma.m16n8k16), so that a
// dequantised value serves all heads. Dimensions may come in any order as long as queries come in
// the same; positions of a tile come in the order TileRow, which spreads the rows that a quarter
// warp reads over the banks of shared memory.
//
// The reference maximum of the softmax moves only when a score exceeds it by more than 2^8; it
// begins finite, so that a tile without visible positions adds nothing.

#include <cmath>
#include <cstdint>

#include "turbomind/backend/cuda/decode_shape.h"
#include "turbomind/backend/cuda/fragments.h"

namespace turbomind::cuda {

// Asks for kRows rows that lie one after the other; with kZeros those outside [begin, end) become
// zero: rows that nobody wrote may hold NaN, codes of 4 bits cannot. place(chunk) says where 16
// bytes go.
template <int kRows, int kRowBytes, bool kZeros, class Place>
TM_DEVICE void CopyRows(const Lane& at, char* to, const char* from, int begin, int end,
                        Place place) {
  constexpr int kChunks = kRows * kRowBytes / 16;
  static_assert(kRows * kRowBytes % 16 == 0);
#pragma unroll
  for (int first = 0; first < kChunks; first += 32) {
    const int chunk = first + at.lane;
    if (kChunks % 32 == 0 || chunk < kChunks) {
      int valid = 16;
      if constexpr (kZeros) {
        const bool before = kRowBytes % 16 == 0 && (chunk * 16) / kRowBytes < begin;
        const int left = end * kRowBytes - chunk * 16;
        valid = before || left < 0 ? 0 : left < 16 ? left : 16;
      }
      CopyAsync(to + place(chunk) * 16, from + chunk * 16, valid);
    }
  }
}

// Where the rows of a KV head lie in block 0; block sizes fit 31 bits (DecodeParams), so that an
// address is one multiplication.
struct Sources {
  const char* keys;
  const char* values;
  const char* scales;
  const char* key_params;
  const char* value_params;
  int32_t block_bytes;
  int32_t scale_block_bytes;
  int block_mask;   // block_seq_len - 1
  int block_shift;  // its log2
};

template <class C>
TM_DEVICE Sources FindSources(const KvLayerView& kv, int kv_head) {
  const auto bytes = [](const std::byte* p) { return reinterpret_cast<const char*>(p); };
  Sources from = {};
  from.keys = bytes(kv.Payload(KvSide::kK, 0, kv_head));
  from.values = bytes(kv.Payload(KvSide::kV, 0, kv_head));
  if constexpr (C::kScaleStride > 0) {
    from.scales = bytes(kv.Scales(KvSide::kK, 0, kv_head));
  }
  if constexpr (C::KeyShape::kParamBytes > 0) {
    from.key_params = bytes(kv.Params(KvSide::kK, 0, kv_head));
  }
  if constexpr (C::ValueShape::kParamBytes > 0) {
    from.value_params = bytes(kv.Params(KvSide::kV, 0, kv_head));
  }
  from.block_bytes = static_cast<int32_t>(kv.block_bytes);
  from.scale_block_bytes = static_cast<int32_t>(kv.scale_block_bytes);
  from.block_mask = kv.block_seq_len - 1;
  from.block_shift = CountZeros(kv.block_seq_len);
  return from;
}

// The tile of positions [first, first + kTileTokens) into a stage. A committed group, even empty.
template <class C>
TM_DEVICE void LoadTile(const DecodeTask<C>& task, const Sources& sources, int first, int32_t block,
                        char* stage) {
  if (first < task.item.end) {
    using KeyShape = typename C::KeyShape;
    using ValueShape = typename C::ValueShape;
    constexpr int kRows = C::kTileTokens;
    const int slot = first & sources.block_mask;
    const int begin = task.item.begin - first;
    const int end = task.item.end - first;
    const auto straight = [](int chunk) { return chunk; };
    const auto swizzled = [](int chunk) {
      return C::kSwizzleValues ? chunk ^ ((chunk >> 3 & 1) << 1) : chunk;
    };
    const int64_t at = static_cast<int64_t>(block) * sources.block_bytes;
    CopyRows<kRows, KeyShape::kRowBytes, KeyShape::F::kBits != 4>(
        task.at, stage, sources.keys + at + slot * KeyShape::kRowBytes, begin, end, straight);
    CopyRows<kRows, ValueShape::kRowBytes, ValueShape::F::kBits != 4>(
        task.at, stage + C::kValuesAt, sources.values + at + slot * ValueShape::kRowBytes, begin,
        end, swizzled);
    if constexpr (C::kScaleStride > 0) {
      const int64_t scale_at = static_cast<int64_t>(block) * sources.scale_block_bytes;
      CopyRows<kRows, C::kScaleStride, true>(task.at, stage + C::kScalesAt,
                                             sources.scales + scale_at + slot * C::kScaleStride,
                                             begin, end, straight);
    }
    if constexpr (KeyShape::kParamBytes > 0) {
      CopyRows<kRows, 4, true>(task.at, stage + C::kKeyParamsAt, sources.key_params + at + slot * 4,
                               begin, end, straight);
    }
    if constexpr (ValueShape::kParamBytes > 0) {
      CopyRows<kRows, 4, true>(task.at, stage + C::kValueParamsAt,
                               sources.value_params + at + slot * 4, begin, end, straight);
    }
  }
  CommitCopies();
}

template <bool kBFloat>
TM_DEVICE void Multiply(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kBFloat) {
    MmaBFloat(c, a, b0, b1);
  } else {
    MmaHalf(c, a, b0, b1);
  }
}

template <bool kBFloat>
TM_DEVICE uint32_t PackPair(float low, float high) {
  return kBFloat ? PackBFloat2(low, high) : PackHalf2(low, high);
}

// The scale of the group of 16 that a word of a key row lies in, twice.
template <class C>
TM_DEVICE uint32_t KeyScale(const char* stage, int row, int word) {
  const char* from = stage + C::kScalesAt + row * C::kScaleStride + word / 2;
  const uint32_t byte = LoadShared<uint8_t>(from);
  return ScalePair<C::kKeyMode>(byte, byte);
}

// (scale, zero) of a row of integer codes; zero where the position is not there.
struct Param {
  float scale;
  float zero;
};
template <class C>
TM_DEVICE Param LoadParam(const char* params, int row) {
  const auto bits = LoadShared<uint32_t>(params + 4 * row);
  return {ToFloat<C::kType>(static_cast<uint16_t>(bits)),
          ToFloat<C::kType>(static_cast<uint16_t>(bits >> 16))};
}

// The queries of 8 heads as operand B of the keys' products, in the order of the keys' dimensions,
// and the sum of each head's values as rounded.
template <class C>
struct Query {
  uint32_t b[C::kSteps][2];
  float sum[2];  // of the heads 2 t and 2 t + 1, for integer keys
};

template <class C>
TM_DEVICE void LoadQuery(const DecodeTask<C>& task, Query<C>* query) {
  using F = Fragments<C::kKeyMode, C::kType>;
  using Shape = typename C::KeyShape;
  constexpr int kPairs = F::kDims / 2;  // of a word
  const bool real = task.at.g < task.num_heads;
  const float* q = task.params.q + task.item.sequence * task.params.q_stride +
                   static_cast<int64_t>(task.first_head + (real ? task.at.g : 0)) * C::kHeadDim;
  float sum = 0.f;
#pragma unroll
  for (int pair = 0; pair < 2 * C::kSteps; ++pair) {
    const int word = Shape::KeyWord(task.at.t, pair / kPairs);
    const int dim = word * F::kDims;
    float x[2] = {0.f, 0.f};
    if (real && word < Shape::kRowWords && pair / kPairs < Shape::kKeyWords) {
      x[0] = LoadGlobal(q + dim + F::Low(pair % kPairs));
      x[1] = LoadGlobal(q + dim + F::High(pair % kPairs));
    }
    const uint32_t packed = PackPair<F::kBFloat>(x[0], x[1]);
    query->b[pair / 2][pair % 2] = packed;
    if constexpr (IsInteger(C::kKeyMode)) {
      sum += HalfToFloat(static_cast<uint16_t>(packed)) +
             HalfToFloat(static_cast<uint16_t>(packed >> 16));
    }
  }
  if constexpr (IsInteger(C::kKeyMode)) {
    sum += ShuffleXor(sum, 1);
    sum += ShuffleXor(sum, 2);  // of head g, in its four lanes
    query->sum[0] = ShuffleTo(sum, 8 * task.at.t);
    query->sum[1] = ShuffleTo(sum, 8 * task.at.t + 4);
  }
}

// Scores of 16 positions: rows g and g + 8 (in the order TileRow), heads 2 t and 2 t + 1, not yet
// scaled by the softmax scale.
template <class C>
TM_DEVICE void ScoreRows(const DecodeTask<C>& task, const Query<C>& query, const char* stage,
                         int sub_tile, float (&scores)[4]) {
  using F = Fragments<C::kKeyMode, C::kType>;
  using Shape = typename C::KeyShape;
  constexpr int kPiece = Shape::kKeyPiece;
  constexpr int kPairs = F::kDims / 2;
  scores[0] = scores[1] = scores[2] = scores[3] = 0.f;
  const int row = 16 * sub_tile + TileRow(task.at.g);
#pragma unroll
  for (int i = 0; i < Shape::kKeyWords; i += kPiece) {
    const int word = Shape::KeyWord(task.at.t, i);
    uint32_t pairs[2][kPiece * kPairs];  // of the rows g and g + 8
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const bool there = Shape::kQuarters || word < Shape::kRowWords;
      Words<4 * kPiece> words = {};
      if (there) {
        words = LoadShared<Words<4 * kPiece>>(stage + (row + 8 * x) * Shape::kRowBytes + 4 * word);
      }
#pragma unroll
      for (int j = 0; j < kPiece; ++j) {
        uint32_t expanded[kPairs];
        F::Expand(words.v[j], expanded);
        uint32_t scale = 0;
        if constexpr (IsFp4(C::kKeyMode)) {
          scale = there ? KeyScale<C>(stage, row + 8 * x, word + j) : 0;
        }
#pragma unroll
        for (int p = 0; p < kPairs; ++p) {
          pairs[x][j * kPairs + p] =
              IsFp4(C::kKeyMode) ? MulHalf2(expanded[p], scale) : expanded[p];
        }
      }
    }
#pragma unroll
    for (int p = 0; p + 1 < kPiece * kPairs; p += 2) {
      const int step = (i * kPairs + p) / 2;
      const uint32_t a[4] = {pairs[0][p], pairs[1][p], pairs[0][p + 1], pairs[1][p + 1]};
      Multiply<F::kBFloat>(scores, a, query.b[step][0], query.b[step][1]);
    }
  }
  if constexpr (IsInteger(C::kKeyMode)) {
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const auto param = LoadParam<C>(stage + C::kKeyParamsAt, row + 8 * x);
      scores[2 * x] = scores[2 * x] * param.scale + query.sum[0] * param.zero;
      scores[2 * x + 1] = scores[2 * x + 1] * param.scale + query.sum[1] * param.zero;
    }
  }
}

// Results of a warp: o of dimensions ValueDim(g, tile) and the next (rows g and g + 8 of a tile)
// and heads 2 t, 2 t + 1; reference maxima and sums of those heads.
template <class C>
struct WarpState {
  float o[C::kOutTiles][4];
  float m[2];
  float l[2];  // of the lane's rows, until the end
};

// The scales of one side's parameters of two positions.
template <class C>
struct ValueScales {
  uint32_t scale[2];  // of the positions TileRow(2 t), TileRow(2 t + 1), and those 8 on
  uint32_t zero[2];
};

// A piece of a row of values from dimension `dim` on: whole words, or the bytes of two dimensions.
template <class C, int kPiece>
TM_DEVICE Words<4 * kPiece> LoadValues(const char* values, int row, int dim) {
  using Shape = typename C::ValueShape;
  constexpr int kBits = Fragments<C::kValueMode, C::kType>::kBits;
  int byte = dim * kBits / 8;
  if (C::kSwizzleValues) {
    byte ^= (row >> 1 & 1) << 5;
  }
  const char* from = values + row * Shape::kRowBytes + byte;
  if constexpr (Shape::kEighths || kBits == 16) {
    return LoadShared<Words<4 * kPiece>>(from);
  } else if constexpr (kBits == 8) {
    return {{LoadShared<uint16_t>(from)}};
  } else {
    return {{LoadShared<uint8_t>(from)}};
  }
}

// Of one group of 16 dimensions and four positions.
template <class C>
TM_DEVICE void LoadValueScales(const char* stage, const int (&rows)[4], int group,
                               ValueScales<C>* scales) {
  uint32_t byte[4];
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    byte[x] = LoadShared<uint8_t>(stage + C::kScalesAt + rows[x] * C::kScaleStride +
                                  C::KeyShape::kScaleBytes + group);
  }
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    scales->scale[x] = ScalePair<C::kValueMode>(byte[2 * x], byte[2 * x + 1]);
  }
}

// Word i of the values of the positions row, row + 1 of an operand and 8 on → o.
template <class C>
TM_DEVICE void AddValueWord(const uint32_t (&words)[4], const ValueScales<C>& scales, int i,
                            const uint32_t (&weights)[2], WarpState<C>* state) {
  using F = Fragments<C::kValueMode, C::kType>;
  using Shape = typename C::ValueShape;
  uint32_t pairs[2][F::kDims];
#pragma unroll
  for (int x = 0; x < 2; ++x) {
    F::ExpandTokens(words[2 * x], words[2 * x + 1], pairs[x]);
#pragma unroll
    for (int d = 0; d < Shape::kValueDims; ++d) {
      if constexpr (IsFp4(C::kValueMode)) {
        pairs[x][d] = MulHalf2(pairs[x][d], scales.scale[x]);
      } else if constexpr (IsInteger(C::kValueMode)) {
        pairs[x][d] = FmaHalf2(pairs[x][d], scales.scale[x], scales.zero[x]);
      }
    }
  }
#pragma unroll
  for (int d = 0; d < Shape::kValueDims; d += 2) {
    const uint32_t a[4] = {pairs[0][d], pairs[0][d + 1], pairs[1][d], pairs[1][d + 1]};
    Multiply<F::kBFloat>(state->o[(i * Shape::kValueDims + d) / 2], a, weights[0], weights[1]);
  }
}

// o += weights · values of 16 positions. `weights` is operand B.
template <class C>
TM_DEVICE void AddValues(const DecodeTask<C>& task, const char* stage, int sub_tile,
                         const uint32_t (&weights)[2], WarpState<C>* state) {
  using Shape = typename C::ValueShape;
  constexpr int kPiece = Shape::kValuePiece;
  const int g = task.at.g;
  int rows[4];  // 2 t, 2 t + 1, and 8 on
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    rows[x] = 16 * sub_tile + TileRow(2 * task.at.t + (x & 1) + (x & 2) * 4);
  }
  ValueScales<C> scales = {};
  if constexpr (IsInteger(C::kValueMode)) {
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const Param a = LoadParam<C>(stage + C::kValueParamsAt, rows[2 * x]);
      const Param b = LoadParam<C>(stage + C::kValueParamsAt, rows[2 * x + 1]);
      scales.scale[x] = PackHalf2(a.scale, b.scale);
      scales.zero[x] = PackHalf2(a.zero, b.zero);
    }
  }
#pragma unroll
  for (int i = 0; i < Shape::kValueWords; i += kPiece) {
    const int dim = Shape::ValueDim(g, i * Shape::kValueDims / 2);
    Words<4 * kPiece> words[4];
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      words[x] = LoadValues<C, kPiece>(stage + C::kValuesAt, rows[x], dim);
    }
#pragma unroll
    for (int j = 0; j < kPiece; ++j) {
      if constexpr (IsFp4(C::kValueMode)) {
        const int group = Shape::ValueDim(g, (i + j) * Shape::kValueDims / 2) / 16;
        if (j == 0 || (j * Shape::kValueDims) % 16 == 0) {
          LoadValueScales<C>(stage, rows, group, &scales);
        }
      }
      const uint32_t four[4] = {words[0].v[j], words[1].v[j], words[2].v[j], words[3].v[j]};
      AddValueWord<C>(four, scales, i + j, weights, state);
    }
  }
}

// Scores → weights 2^(score - m) in `scores`; o and l are lowered where m moves.
template <class C>
TM_DEVICE void UpdateSoftmax(float scale, float (&scores)[C::kSubTiles][4], WarpState<C>* state) {
  float most[2] = {scores[0][0], scores[0][1]};
#pragma unroll
  for (int u = 0; u < C::kSubTiles; ++u) {
    most[0] = fmaxf(most[0], fmaxf(scores[u][0], scores[u][2]));
    most[1] = fmaxf(most[1], fmaxf(scores[u][1], scores[u][3]));
  }
  most[0] *= scale;
  most[1] *= scale;
  if (AnyInWarp(most[0] > state->m[0] + kLazyMax || most[1] > state->m[1] + kLazyMax)) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) {
        most[h] = fmaxf(most[h], ShuffleXor(most[h], mask));
      }
      const float m = fmaxf(state->m[h], most[h]);
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

// Positions that are not in the item count as -infinity.
template <class C>
TM_DEVICE void HideScores(const DecodeTask<C>& task, int first, float (&scores)[C::kSubTiles][4]) {
  if (first >= task.item.begin && first + C::kTileTokens <= task.item.end) {
    return;
  }
#pragma unroll
  for (int u = 0; u < C::kSubTiles; ++u) {
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const int position = first + 16 * u + TileRow(task.at.g) + 8 * x;
      if (position < task.item.begin || position >= task.item.end) {
        scores[u][2 * x] = -INFINITY;
        scores[u][2 * x + 1] = -INFINITY;
      }
    }
  }
}

// One tile that lies in a stage.
template <class C>
TM_DEVICE void ReadTile(const DecodeTask<C>& task, const Query<C>& query, float scale, int first,
                        const char* stage, WarpState<C>* state) {
  float scores[C::kSubTiles][4];
#pragma unroll
  for (int u = 0; u < C::kSubTiles; ++u) {
    ScoreRows<C>(task, query, stage, u, scores[u]);
  }
  HideScores<C>(task, first, scores);
  UpdateSoftmax<C>(scale, scores, state);
  constexpr bool kBFloat = Fragments<C::kValueMode, C::kType>::kBFloat;
#pragma unroll
  for (int u = 0; u < C::kSubTiles; ++u) {
    const uint32_t weights[2] = {TransposeMatrix(PackPair<kBFloat>(scores[u][0], scores[u][1])),
                                 TransposeMatrix(PackPair<kBFloat>(scores[u][2], scores[u][3]))};
    AddValues<C>(task, stage, u, weights, state);
  }
}

// The factor g of a head; 1 where there is none.
TM_DEVICE float HeadFactor(const float* g, int head) {
  return g != nullptr ? LoadGlobal(g + head) : 1.f;
}

// All tiles of the warp: tiles warp, warp + 4, ... of the item.
template <class C>
TM_DEVICE void ReadItem(const DecodeTask<C>& task, WarpState<C>* state) {
  constexpr int kTile = C::kTileTokens;
  constexpr int kStride = kDecodeWarps * kTile;
  const DecodeParams& p = task.params;
  const int32_t* table = p.block_tables + task.item.sequence * p.block_table_stride;
  const Sources sources = FindSources<C>(p.kv, task.kv_head);
  const int start = task.item.begin / kTile * kTile + task.at.warp * kTile;
  // Read one tile ahead of its use: a load from the table is on the way while a tile is computed.
  const auto block_of = [&](int first) {
    return first < task.item.end ? LoadGlobal(table + (first >> sources.block_shift)) : 0;
  };
#pragma unroll
  for (int i = 0; i < C::kStages - 1; ++i) {
    const int first = start + i * kStride;
    LoadTile<C>(task, sources, first, block_of(first), task.ring + i * C::kStageBytes);
  }
  Query<C> query;
  LoadQuery<C>(task, &query);
  const float scale = p.softmax_scale * kLog2E * Fragments<C::kKeyMode, C::kType>::kUnit *
                      HeadFactor(p.kv.g[0], task.kv_head);
  int32_t next_block = block_of(start + (C::kStages - 1) * kStride);
  int stage = 0;
#pragma unroll 1
  for (int first = start; first < task.item.end; first += kStride) {
    WaitForCopies<C::kStages - 2>();
    SyncWarp();  // all lanes' copies are there, and nobody reads the stage that is filled next
    const int free = stage == 0 ? C::kStages - 1 : stage - 1;
    const int ahead = first + (C::kStages - 1) * kStride;
    LoadTile<C>(task, sources, ahead, next_block, task.ring + free * C::kStageBytes);
    next_block = block_of(ahead + kStride);
    ReadTile<C>(task, query, scale, first, task.ring + stage * C::kStageBytes, state);
    stage = stage + 1 == C::kStages ? 0 : stage + 1;
  }
  WaitForCopies<0>();
}

// The warps' states → one partial result.
template <class C>
TM_DEVICE void MergeWarps(const DecodeTask<C>& task, const WarpState<C>& state) {
  constexpr int D = C::kHeadDim;
  float* merged_o = reinterpret_cast<float*>(SharedMemory());
  float* merged_ml = merged_o + kDecodeWarps * kDecodeHeads * C::kMergeStride;
  const Lane& at = task.at;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = at.warp * kDecodeHeads + 2 * at.t + h;
    float l = state.l[h];
    for (int mask = 4; mask < 32; mask *= 2) {
      l += ShuffleXor(l, mask);
    }
#pragma unroll
    for (int tile = 0; tile < C::kOutTiles; ++tile) {
      float* to = merged_o + row * C::kMergeStride + C::ValueShape::ValueDim(at.g, tile);
      StoreShared(to, state.o[tile][h]);
      StoreShared(to + 1, state.o[tile][2 + h]);
    }
    if (at.g == 0) {
      StoreShared(merged_ml + 2 * row, state.m[h]);
      StoreShared(merged_ml + 2 * row + 1, l);
    }
  }
  SyncBlock();
  const DecodeParams& p = task.params;
  const float factor =
      Fragments<C::kValueMode, C::kType>::kUnit * HeadFactor(p.kv.g[1], task.kv_head);
  for (int head = at.warp; head < task.num_heads; head += kDecodeWarps) {
    float m = kLeastMax;
    for (int w = 0; w < kDecodeWarps; ++w) {
      m = fmaxf(m, LoadShared<float>(merged_ml + 2 * (w * kDecodeHeads + head)));
    }
    float l = 0.f;
    float weight[kDecodeWarps];
    for (int w = 0; w < kDecodeWarps; ++w) {
      const float* ml = merged_ml + 2 * (w * kDecodeHeads + head);
      weight[w] = Exp2Approx(LoadShared<float>(ml) - m);
      l += weight[w] * LoadShared<float>(ml + 1);
    }
    const int64_t result =
        static_cast<int64_t>(task.item.partial) * p.q_heads + task.first_head + head;
    for (int d = at.lane; d < D; d += 32) {
      float o = 0.f;
      for (int w = 0; w < kDecodeWarps; ++w) {
        o += weight[w] *
             LoadShared<float>(merged_o + (w * kDecodeHeads + head) * C::kMergeStride + d);
      }
      StoreGlobal(p.partial_o + result * D + d, o * factor);
    }
    if (at.lane == 0) {
      StoreGlobal(p.partial_ml + 2 * result, m);
      StoreGlobal(p.partial_ml + 2 * result + 1, l);
    }
  }
}

// Grid: items × (KV heads · ⌈query heads of a KV head / 8⌉); kDecodeWarps warps; C::kSharedBytes.
template <class C>
__global__ void __launch_bounds__(32 * kDecodeWarps) DecodeKernel(DecodeParams params) {
  const int thread = ThreadIndexX();
  const int lane = thread & 31;
  const int group = params.q_heads / params.kv.kv_heads;
  const int head_tiles = (group + kDecodeHeads - 1) / kDecodeHeads;
  const int kv_head = BlockIndexY() / head_tiles;
  const int first = BlockIndexY() % head_tiles * kDecodeHeads;
  const DecodeTask<C> task = {params,
                              LoadGlobal(params.items + BlockIndexX()),
                              kv_head,
                              kv_head * group + first,
                              group - first < kDecodeHeads ? group - first : kDecodeHeads,
                              SharedMemory() + (thread >> 5) * C::kRingBytes,
                              {lane, thread >> 5, lane >> 2, lane & 3}};
  WarpState<C> state = {};
  state.m[0] = state.m[1] = kLeastMax;
  ReadItem<C>(task, &state);
  SyncBlock();  // the rings make room for the results
  MergeWarps<C>(task, state);
}

}  // namespace turbomind::cuda
