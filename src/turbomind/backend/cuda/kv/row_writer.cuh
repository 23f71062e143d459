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

// RowWriter<M>::Write<kRowLanes, T> encodes and stores a row of the cache dtype, as
// Codec<M>::EncodeRow defines it. A format without one does not compile.
template <KvCacheMode M>
struct RowWriter;

template <>
struct RowWriter<KvCacheMode::kNone> {
  template <int kRowLanes, DataType T>
  static TM_DEVICE void Write(const RowTarget& to, const RowLane& at, const LaneValues& x, bool) {
    StoreLane(to, at, Words<16>{{x.pairs[0], x.pairs[1], x.pairs[2], x.pairs[3]}});
  }
};

template <int kIntBits>
struct IntWriter {
  template <int kRowLanes, DataType T>
  static TM_DEVICE void Write(const RowTarget& to, const RowLane& at, const LaneValues& x, bool) {
    StoreIntLane<T>(to, at, EncodeInt<kRowLanes, kIntBits, T>(x, at));
  }
};
template <>
struct RowWriter<KvCacheMode::kInt8> : IntWriter<8> {};
template <>
struct RowWriter<KvCacheMode::kInt4> : IntWriter<4> {};

template <bool kE4m3>
struct Fp8Writer {
  template <int kRowLanes, DataType T>
  static TM_DEVICE void Write(const RowTarget& to, const RowLane& at, const LaneValues& x, bool) {
    StoreLane(to, at, EncodeFp8<kE4m3>(x, to.global_scale));
  }
};
template <>
struct RowWriter<KvCacheMode::kFp8E4m3> : Fp8Writer<true> {};
template <>
struct RowWriter<KvCacheMode::kFp8E5m2> : Fp8Writer<false> {};

template <class Scale>
struct Fp4Writer {
  template <int kRowLanes, DataType T>
  static TM_DEVICE void Write(const RowTarget& to, const RowLane& at, const LaneValues& x,
                              bool search) {
    StoreFp4<Scale, T>(to, at, x, search);
  }
};
template <>
struct RowWriter<KvCacheMode::kFp4Mx> : Fp4Writer<MxScale> {};
template <>
struct RowWriter<KvCacheMode::kFp4Nv> : Fp4Writer<NvScale> {};

// Writes a row in the target's format. With `search`, FP4 scales minimize the squared error.
template <int kRowLanes, DataType T>
TM_DEVICE void WriteRow(const RowTarget& to, const RowLane& at, const LaneValues& x, bool search) {
  DispatchFormat(to.format, [&]<KvCacheMode M>() {
    RowWriter<M>::template Write<kRowLanes, T>(to, at, x, search);
  });
}

}  // namespace turbomind::cuda
