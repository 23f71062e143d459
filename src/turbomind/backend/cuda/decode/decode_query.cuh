#pragma once

// ⑦ The queries of decode attention as operands of the tensor cores, and the part of the scores
// that comes from the K offsets of blocks (kv/k_offset.h).
//
// The keys of a block are what their codes mean plus the block's offset, so a query adds q · offset
// once per block. A warp computes these sums for its next kShiftRows tiles with one more set of
// matrix products. It keeps them in shared memory as starting values of the tiles' scores.

#include <cstdint>

#include "turbomind/backend/cuda/decode/decode_shape.cuh"
#include "turbomind/backend/cuda/kv/fragments.cuh"
#include "turbomind/kv/layout.h"

namespace turbomind::cuda {

// The queries of a head tile as operand B of the key products, in the keys' order of dimensions,
// and what the heads 2 t and 2 t + 1 add to their scores.
template <class C>
struct Query {
  uint32_t b[C::kSteps][2];
  float sum[2];  // of the head's rounded values, for integer keys
  // q · offset of the tile in units of raw scores. Floats have it for the rows g and g + 8, as a
  // whole accumulator.
  float shift[C::kShiftValues];
};

// Load the queries of the heads from `first` on, relative to the block's first head.
template <class C>
TM_DEVICE void LoadQuery(const DecodeTask<C>& task, int first, Query<C>* query) {
  using F = Fragments<C::kKeyFormat, C::kType>;
  using Shape = typename C::KeyShape;
  constexpr int kPairs = F::kDims / 2;  // pairs per word
  const int head = first + task.at.g;
  const bool real = head < task.num_heads;
  const float* q = task.params.q + task.item.sequence * task.params.q_stride +
                   static_cast<int64_t>(task.first_head + (real ? head : 0)) * C::kHeadDim;
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
    const uint32_t packed = F::kBFloat ? PackBFloat2(x[0], x[1]) : PackFiniteHalf2(x[0], x[1]);
    query->b[pair / 2][pair % 2] = packed;
    if constexpr (IsInteger(C::kKeyFormat)) {
      sum += LowHalf(packed) + HighHalf(packed);
    }
  }
  if constexpr (IsInteger(C::kKeyFormat)) {
    sum += ShuffleXor(sum, 1);
    sum += ShuffleXor(sum, 2);  // the sum of head g, in its four lanes
    query->sum[0] = ShuffleTo(sum, 8 * task.at.t);
    query->sum[1] = ShuffleTo(sum, 8 * task.at.t + 4);
  }
}

// Expand the codes of an offset row to pairs of dimensions, plus 1024, in the order of the keys.
template <class F, int kWords>
TM_DEVICE void ExpandOffset(const uint32_t* codes, uint32_t (&pairs)[kWords]) {
  static_assert(2 * kWords == F::kDims);
  if constexpr (F::High(0) == 4) {
    const uint32_t low = SelectBytes(codes[0], codes[1], 0x5140);
    const uint32_t high = SelectBytes(codes[0], codes[1], 0x7362);
    pairs[0] = SelectBytes(low, kHalf1024, 0x7170);
    pairs[1] = SelectBytes(low, kHalf1024, 0x7372);
    pairs[2] = SelectBytes(high, kHalf1024, 0x7170);
    pairs[3] = SelectBytes(high, kHalf1024, 0x7372);
  } else {
#pragma unroll
    for (int p = 0; p < kWords; ++p) {
      pairs[p] = SelectBytes(codes[p / 2], kHalf1024, p % 2 == 0 ? 0x7170 : 0x7372);
    }
  }
}

// Add the products of the queries and an offset row's codes plus 1024, one row per g, to
// sums[n][h] for head 2 t + h, and the sums of the queries to sums[n][2 + h].
template <class C>
TM_DEVICE void MultiplyOffset(const Lane& at, const uint8_t* row,
                              const Query<C> (&query)[C::kHeadTiles],
                              float (&sums)[C::kHeadTiles][4]) {
  using F = Fragments<C::kKeyFormat, C::kType>;
  using Shape = typename C::KeyShape;
  constexpr int kPairs = F::kDims / 2;
  constexpr int kPieceBytes = Shape::kKeyPiece * F::kDims;  // of consecutive dimensions
  constexpr int kBytes = kPieceBytes < 16 ? kPieceBytes : 16;
#pragma unroll
  for (int i = 0; i < Shape::kKeyWords; i += kBytes / F::kDims) {
    const int word = Shape::KeyWord(at.t, i);
    Words<kBytes> codes = {};
    if (Shape::kKeysEven || word < Shape::kRowWords) {
      codes = LoadGlobal(reinterpret_cast<const Words<kBytes>*>(row + word * F::kDims));
    }
#pragma unroll
    for (int j = 0; j < kBytes / F::kDims; ++j) {
      uint32_t pairs[kPairs];
      ExpandOffset<F>(codes.v + j * F::kDims / 4, pairs);
#pragma unroll
      for (int p = 0; p < kPairs; p += 2) {
        const int step = ((i + j) * kPairs + p) / 2;
        const uint32_t a[4] = {pairs[p], kHalfOne, pairs[p + 1], kHalfOne};
#pragma unroll
        for (int n = 0; n < C::kHeadTiles; ++n) {
          MmaHalf(sums[n], a, query[n].b[step][0], query[n].b[step][1]);
        }
      }
    }
  }
}

// Write the shifts of kShiftRows tiles. `block` is that of the tile in row g. Without K offsets,
// the shifts are zero. `to` is StageView::shift.
template <class C>
TM_DEVICE void FillShifts(const DecodeTask<C>& task, const Query<C> (&query)[C::kHeadTiles],
                          int32_t block, char* to) {
  const KvLayerView& kv = task.params.kv;
  float sums[C::kHeadTiles][4] = {};
  IntParam param = {0.f, 0.f};
  if (kv.HasKOffset()) {
    const KvRow first = kv.KOffset(0, task.kv_head);
    const int64_t block_at = int64_t{block} * static_cast<int32_t>(kv.block_bytes);
    const auto bits = LoadGlobal(reinterpret_cast<const uint32_t*>(first.metadata + block_at));
    MultiplyOffset<C>(task.at, first.payload + block_at, query, sums);
    // Most kernels serve both dtypes of the cache.
    param = kv.dtype == DataType::kBFloat16 ? IntParamOf<DataType::kBFloat16>(bits)
                                            : IntParamOf<DataType::kFloat16>(bits);
    const float unit = InverseApprox(Fragments<C::kKeyFormat, C::kType>::kUnit *
                                     HeadScale(kv.global_scale[0], task.kv_head));
    param = {param.scale * unit, param.zero * unit};
    param.zero -= 1024.f * param.scale;
  }
#pragma unroll
  for (int n = 0; n < C::kHeadTiles; ++n) {
    Words<4 * C::kShiftValues> shift;
#pragma unroll
    for (int i = 0; i < C::kShiftValues; ++i) {
      shift.v[i] = FloatBits(sums[n][i % 2] * param.scale + sums[n][2 + i % 2] * param.zero);
    }
    StoreShared(to + task.at.g * C::kShiftRowBytes + C::kShiftTileBytes * n, shift);
  }
}

// Load a tile's shifts from its row. Keys in 16 bits have none.
template <class C>
TM_DEVICE void LoadShifts(const char* from, Query<C> (&query)[C::kHeadTiles]) {
#pragma unroll
  for (int n = 0; n < C::kHeadTiles; ++n) {
    Words<4 * C::kShiftValues> words = {};
    if constexpr (C::kHasShifts) {
      words = LoadShared<Words<4 * C::kShiftValues>>(from + C::kShiftTileBytes * n);
    }
#pragma unroll
    for (int i = 0; i < C::kShiftValues; ++i) {
      query[n].shift[i] = BitsFloat(words.v[i]);
    }
  }
}

}  // namespace turbomind::cuda
