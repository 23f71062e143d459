#pragma once

// ⑥ Reads encoded rows of the cache, with eight consecutive values in each lane, as in
// kv_encode.cuh. Values have the bits that kv/codec.h defines.

#include <cstdint>

#include "turbomind/backend/cuda/kv/row_writer.cuh"
#include "turbomind/kv/codec.h"
#include "turbomind/kv/k_offset.h"
#include "turbomind/kv/layout.h"

namespace turbomind::cuda {

// A lane's eight values as stored, and the row's metadata.
template <KvCacheMode M>
struct StoredLane {
  static constexpr int kBits = Codec<M>::kBits;
  Words<kBits> payload;
  uint32_t meta;  // the group's scale byte, or (scale, zero)
};

template <KvCacheMode M>
TM_DEVICE StoredLane<M> LoadLane(const RowTarget& from, int lane) {
  StoredLane<M> out;
  out.payload = LoadGlobal(reinterpret_cast<const Words<StoredLane<M>::kBits>*>(
      from.payload + lane * StoredLane<M>::kBits));
  out.meta = 0;
  if constexpr (IsFp4(M)) {
    out.meta = LoadGlobal(reinterpret_cast<const uint8_t*>(from.meta) + lane / 2);
  } else if constexpr (IsInteger(M)) {
    out.meta = LoadGlobal(reinterpret_cast<const uint32_t*>(from.meta));
  }
  return out;
}

template <KvCacheMode M>
TM_DEVICE uint32_t CodeOf(const StoredLane<M>& x, int i) {
  constexpr int kBits = StoredLane<M>::kBits;
  return x.payload.v[i * kBits / 32] >> (i * kBits % 32) & ((1u << kBits) - 1);
}

// Return code * scale + zero.
template <DataType T, KvCacheMode M>
TM_DEVICE float IntValue(const StoredLane<M>& x, int i) {
  const IntParam param = IntParamOf<T>(x.meta);
  return MulRounded(static_cast<float>(CodeOf(x, i)), param.scale) + param.zero;
}

// Codec<M>::DecodeRow for one value.
template <DataType T, KvCacheMode M>
TM_DEVICE float DecodeValue(const StoredLane<M>& x, int i, float global_scale) {
  if constexpr (IsInteger(M)) {
    return IntValue<T>(x, i);
  } else {
    const auto code = static_cast<uint16_t>(CodeOf(x, i));
    if constexpr (M == KvCacheMode::kNone) {
      return ToFloat<T>(code);
    } else {
      return Codec<M>::Value(static_cast<uint8_t>(code), static_cast<uint8_t>(x.meta),
                             global_scale);
    }
  }
}

// A lane's eight values of a block's K offset.
using OffsetLane = StoredLane<KvCacheMode::kInt8>;

// REQUIRES: kv.HasKOffset().
TM_DEVICE OffsetLane LoadOffset(const KvLayerView& kv, int64_t block, int head, int lane) {
  return LoadLane<KvCacheMode::kInt8>(OffsetTarget(kv, block, head), lane);
}

}  // namespace turbomind::cuda
