#pragma once

// ⑥ Writes encoded rows to the cache, in the format of their target. All lanes of a warp call these
// functions together, with rows of one format, as in kv_encode.cuh.

#include <cstddef>
#include <cstdint>

#include "turbomind/backend/cuda/kv/kv_encode.cuh"
#include "turbomind/backend/cuda/runtime/intrinsics.cuh"
#include "turbomind/kv/layout.h"

namespace turbomind::cuda {

// Location of a row in the cache. A null payload means that the row is not stored.
struct RowTarget {
  KvCacheMode format;
  std::byte* payload;
  std::byte* meta;  // scale bytes or (scale, zero)
  float global_scale;
};

// Return the location of a block's K offset. REQUIRES: kv.HasKOffset().
TM_DEVICE RowTarget OffsetTarget(const KvLayerView& kv, int64_t block, int head) {
  const KvRow row = kv.KOffset(block, head);
  return {KvCacheMode::kInt8, reinterpret_cast<std::byte*>(row.payload),
          reinterpret_cast<std::byte*>(row.metadata), 1.f};
}

template <int kBytes>
TM_DEVICE void StoreLane(const RowTarget& to, const RowLane& at, const Words<kBytes>& words) {
  if (to.payload != nullptr && at.active()) {
    StoreGlobal(reinterpret_cast<Words<kBytes>*>(to.payload + at.lane * kBytes), words);
  }
}

template <class Scale, DataType T>
TM_DEVICE void StoreFp4(const RowTarget& to, const RowLane& at, const LaneValues& x, bool search) {
  const Fp4Lane out = EncodeFp4<Scale, T>(x, to.global_scale, search);
  StoreLane(to, at, Words<4>{{out.codes}});
  if (to.payload != nullptr && at.active() && at.lane % 2 == 0) {
    StoreGlobal(reinterpret_cast<uint8_t*>(to.meta) + at.lane / 2, static_cast<uint8_t>(out.byte));
  }
}

template <DataType T, int kIntBits>
TM_DEVICE void StoreIntLane(const RowTarget& to, const RowLane& at, const IntLane<kIntBits>& out) {
  StoreLane(to, at, out.codes);
  if (to.payload != nullptr && at.lane == 0) {
    const uint32_t pair = T == DataType::kBFloat16 ? PackBFloat2(out.scale, out.zero)
                                                   : PackHalf2(out.scale, out.zero);
    StoreGlobal(reinterpret_cast<uint32_t*>(to.meta), pair);
  }
}

// LaneWriter<M>::Write<T> encodes and stores a lane's part of a row of the cache dtype, as
// Codec<M>::EncodeRow defines it. A format without one does not compile. Integers need the range of
// the whole row.
struct LaneToWrite {
  const LaneValues& x;
  ValueRange range;
  bool search;
};

template <KvCacheMode M>
struct LaneWriter;

template <>
struct LaneWriter<KvCacheMode::kNone> {
  template <DataType T>
  static TM_DEVICE void Write(const RowTarget& to, const RowLane& at, const LaneToWrite& lane) {
    StoreLane(to, at,
              Words<16>{{lane.x.pairs[0], lane.x.pairs[1], lane.x.pairs[2], lane.x.pairs[3]}});
  }
};

template <int kIntBits>
struct IntWriter {
  template <DataType T>
  static TM_DEVICE void Write(const RowTarget& to, const RowLane& at, const LaneToWrite& lane) {
    StoreIntLane<T>(to, at, EncodeIntIn<kIntBits, T>(lane.range, lane.x, at));
  }
};
template <>
struct LaneWriter<KvCacheMode::kInt8> : IntWriter<8> {};
template <>
struct LaneWriter<KvCacheMode::kInt4> : IntWriter<4> {};

template <bool kE4m3>
struct Fp8Writer {
  template <DataType T>
  static TM_DEVICE void Write(const RowTarget& to, const RowLane& at, const LaneToWrite& lane) {
    StoreLane(to, at, EncodeFp8<kE4m3>(lane.x, to.global_scale));
  }
};
template <>
struct LaneWriter<KvCacheMode::kFp8E4m3> : Fp8Writer<true> {};
template <>
struct LaneWriter<KvCacheMode::kFp8E5m2> : Fp8Writer<false> {};

template <class Scale>
struct Fp4Writer {
  template <DataType T>
  static TM_DEVICE void Write(const RowTarget& to, const RowLane& at, const LaneToWrite& lane) {
    StoreFp4<Scale, T>(to, at, lane.x, lane.search);
  }
};
template <>
struct LaneWriter<KvCacheMode::kFp4Mx> : Fp4Writer<MxScale> {};
template <>
struct LaneWriter<KvCacheMode::kFp4Nv> : Fp4Writer<NvScale> {};

// Return x[piece] without a register array that is indexed at run time.
template <int kPieces>
TM_DEVICE LaneValues SelectPiece(const LaneValues (&x)[kPieces], int piece) {
  static_assert(kPieces <= 2);
  LaneValues out = x[0];
#pragma unroll
  for (int i = 0; i < kLaneValues; ++i) {
    out.pairs[i / 2] = piece == 0 ? x[0].pairs[i / 2] : x[kPieces - 1].pairs[i / 2];
    out.value[i] = piece == 0 ? x[0].value[i] : x[kPieces - 1].value[i];
  }
  out.top = piece == 0 ? x[0].top : x[kPieces - 1].top;
  return out;
}

// Write a row in format M.
template <int kRowLanes, DataType T, KvCacheMode M>
TM_DEVICE void WriteRowAs(const RowTarget& to, const RowLane& at,
                          const LaneValues (&x)[RowPieces(kRowLanes)], bool search) {
  ValueRange range = {};
  if constexpr (IsInteger(M)) {
    range = RangeOfPieces<kRowLanes, T>(x, at);
  }
#pragma unroll 1
  for (int piece = 0; piece < RowPieces(kRowLanes); ++piece) {
    LaneWriter<M>::template Write<T>(to, at.Piece(piece), {SelectPiece(x, piece), range, search});
  }
}

// Write a row in the target's format. With `search`, FP4 scales minimize the squared error.
template <int kRowLanes, DataType T>
TM_DEVICE void WriteRow(const RowTarget& to, const RowLane& at,
                        const LaneValues (&x)[RowPieces(kRowLanes)], bool search) {
  DispatchFormat(to.format,
                 [&]<KvCacheMode M>() { WriteRowAs<kRowLanes, T, M>(to, at, x, search); });
}

}  // namespace turbomind::cuda
